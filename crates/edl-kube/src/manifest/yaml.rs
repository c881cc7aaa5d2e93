// SPDX-License-Identifier: Apache-2.0
//! `--yaml`: the objects as a file for `kubectl apply -f`.

use edl_core::spec::Invalid;
use serde::Serialize;

use super::JobObjects;
use crate::yaml;

/// All objects except the Secret and the Service, which the master creates itself, because a key must
/// not be printed.
pub fn to_yaml(objects: &JobObjects) -> Result<String, Invalid> {
    let JobObjects { config_map, network_policy, budgets, master, .. } = objects;
    let mut documents = vec![document(config_map)?, document(network_policy)?];
    for budget in budgets {
        documents.push(document(budget)?);
    }
    documents.push(document(master)?);
    Ok(documents.join("---\n"))
}

fn document(object: &impl Serialize) -> Result<String, Invalid> {
    yaml::write(object).map_err(|error| Invalid(format!("cannot write an object as YAML: {error}")))
}
