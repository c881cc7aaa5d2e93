// SPDX-License-Identifier: Apache-2.0
//! `--cluster_spec`: patches for a job's pods and Service, merged as Kubernetes does: maps field by
//! field, lists of named entries by their names, and null removes a field.

use edl_core::platform::Role;
use edl_core::spec::Invalid;
use k8s_openapi::api::core::v1::{Pod, Service};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::{names, yaml};

/// Patches by their target; that of a role is applied after that of all pods.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Patches {
    pub pod: Map<String, Value>,
    pub master_pod: Map<String, Value>,
    pub ps_pod: Map<String, Value>,
    pub worker_pod: Map<String, Value>,
    pub service: Map<String, Value>,
}

/// Lists of named entries, and the field with the name.
const KEYS: [(&str, &str); 9] = [
    ("containers", "name"),
    ("initContainers", "name"),
    ("env", "name"),
    ("volumes", "name"),
    ("imagePullSecrets", "name"),
    ("volumeMounts", "mountPath"),
    ("ports", "name"),
    ("hostAliases", "ip"),
    ("tolerations", "key"),
];

/// Parses patches in YAML or JSON, also with ElasticDL's names.
pub fn read_patches(text: &str) -> Result<Patches, Invalid> {
    if text.trim().is_empty() {
        return Ok(Patches::default());
    }
    let invalid = |what: String| Invalid(format!("--cluster_spec: {what}"));
    let value = yaml::read_value(text).map_err(|error| invalid(error.to_string()))?;
    let Value::Object(fields) = value else {
        let expected = "expected patches under pod, master_pod, ps_pod, worker_pod or service";
        return Err(invalid(expected.into()));
    };
    let fields: Map<String, Value> = fields.into_iter().map(current).collect();
    serde_json::from_value(Value::Object(fields)).map_err(|error| invalid(error.to_string()))
}

/// Expands ElasticDL's short form `pod_spec: {labels, annotations, affinity, tolerations, env}`.
fn current((name, patch): (String, Value)) -> (String, Value) {
    let Some(new) = name.strip_suffix("_spec") else { return (name, patch) };
    if new == "service" {
        return (new.into(), json!({ "spec": patch }));
    }
    let mut whole = json!({ "metadata": {}, "spec": {} });
    for (field, value) in patch.as_object().into_iter().flatten() {
        match field.as_str() {
            "labels" | "annotations" => whole["metadata"][field] = value.clone(),
            "env" => {
                whole["spec"]["containers"] = json!([{ "name": names::CONTAINER, "env": value }]);
            }
            _ => whole["spec"][field] = value.clone(),
        }
    }
    (new.into(), whole)
}

impl Patches {
    pub(super) fn apply_to_pod(&self, pod: Value, role: Role) -> Result<Pod, Invalid> {
        let own = match role {
            Role::Master => ("master_pod", &self.master_pod),
            Role::Ps => ("ps_pod", &self.ps_pod),
            Role::Worker => ("worker_pod", &self.worker_pod),
        };
        apply(pod, &[("pod", &self.pod), own])
    }

    pub(super) fn apply_to_service(&self, service: Value) -> Result<Service, Invalid> {
        apply(service, &[("service", &self.service)])
    }
}

/// The patched object, if the type has all fields of the patches.
fn apply<T: DeserializeOwned + Serialize>(
    mut value: Value,
    patches: &[(&str, &Map<String, Value>)],
) -> Result<T, Invalid> {
    for (_, patch) in patches {
        merge_maps(value.as_object_mut().expect("objects are maps"), patch);
    }
    let unfit = |error: serde_json::Error| {
        Invalid(format!("--cluster_spec: the patched object is invalid: {error}"))
    };
    let object: T = serde_json::from_value(value).map_err(unfit)?;
    let written = serde_json::to_value(&object).map_err(unfit)?;
    for (name, patch) in patches {
        if let Some(path) = unknown(&written, patch) {
            return Err(Invalid(format!("--cluster_spec: unknown field `{name}{path}`")));
        }
    }
    Ok(object)
}

fn merge_maps(base: &mut Map<String, Value>, patch: &Map<String, Value>) {
    for (field, value) in patch {
        match (base.get_mut(field), value) {
            (_, Value::Null) => {
                base.remove(field);
            }
            (Some(Value::Object(old)), Value::Object(new)) => merge_maps(old, new),
            (Some(Value::Array(old)), Value::Array(new)) if key_of(field).is_some() => {
                merge_lists(old, new, key_of(field).unwrap_or_default());
            }
            (_, value) => {
                base.insert(field.clone(), value.clone());
            }
        }
    }
}

fn merge_lists(base: &mut Vec<Value>, patch: &[Value], key: &str) {
    for entry in patch {
        let same = |other: &&mut Value| other[key] == entry[key] && !entry[key].is_null();
        match (base.iter_mut().find(same), entry) {
            (Some(Value::Object(old)), Value::Object(new)) => merge_maps(old, new),
            (_, entry) => base.push(entry.clone()),
        }
    }
}

fn key_of(list: &str) -> Option<&'static str> {
    KEYS.iter().find(|(name, _)| *name == list).map(|(_, key)| *key)
}

/// The first field of a patch that is missing in the patched object.
fn unknown(written: &Value, patch: &Map<String, Value>) -> Option<String> {
    for (field, value) in patch {
        let is_empty = match value {
            Value::Null => true,
            Value::Object(map) => map.is_empty(),
            Value::Array(list) => list.is_empty(),
            Value::Bool(_) | Value::Number(_) | Value::String(_) => false,
        };
        match (written.get(field), value) {
            _ if is_empty => {}
            (None, _) => return Some(format!(".{field}")),
            (Some(written), Value::Object(patch)) => {
                if let Some(path) = unknown(written, patch) {
                    return Some(format!(".{field}{path}"));
                }
            }
            (Some(_), _) => {}
        }
    }
    None
}
