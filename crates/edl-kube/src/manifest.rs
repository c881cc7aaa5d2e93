// SPDX-License-Identifier: Apache-2.0
//! The objects of a job, as pure functions of its description. Nothing here speaks to a cluster.
//!
//! The ConfigMap owns all the others: whoever deletes it deletes the job.

use edl_core::platform::{InstanceId, Role};
use edl_core::spec::{Invalid, JobSpec};
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::{ConfigMap, Pod, Secret, Service};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::names;

mod patch;
mod pod;
mod yaml;

pub use patch::{Patches, read_patches};
pub use pod::{PodExtras, pod};
pub use yaml::to_yaml;

/// Everything that submitting a job creates, in this order.
#[derive(Clone, Debug, PartialEq)]
pub struct JobObjects {
    pub config_map: ConfigMap,
    pub secret: Secret,
    pub service: Service,
    pub network_policy: NetworkPolicy,
    pub budgets: Vec<PodDisruptionBudget>,
    pub master: Pod,
}

/// The objects of a job. They have no owner yet: the ConfigMap has an identity only once it is
/// created.
pub fn job_objects(spec: &JobSpec, key: &str) -> Result<JobObjects, Invalid> {
    Ok(JobObjects {
        config_map: config_map(spec)?,
        secret: secret(spec, key),
        service: service(spec)?,
        network_policy: network_policy(spec),
        budgets: budgets(spec),
        master: pod(spec, InstanceId::MASTER, &PodExtras::default())?,
    })
}

impl JobObjects {
    /// Makes the ConfigMap the owner of all others.
    pub fn own(&mut self, owner: &OwnerReference) {
        let budgets = self.budgets.iter_mut().map(|budget| &mut budget.metadata);
        let others = [
            &mut self.secret.metadata,
            &mut self.service.metadata,
            &mut self.network_policy.metadata,
            &mut self.master.metadata,
        ];
        for metadata in others.into_iter().chain(budgets) {
            metadata.owner_references = Some(vec![owner.clone()]);
        }
    }
}

/// The job's ConfigMap as an owner, once it is created.
#[must_use]
pub fn owner(config_map: &ConfigMap) -> Option<OwnerReference> {
    Some(OwnerReference {
        api_version: "v1".into(),
        kind: "ConfigMap".into(),
        name: config_map.metadata.name.clone()?,
        uid: config_map.metadata.uid.clone()?,
        ..OwnerReference::default()
    })
}

/// What describes the job, to its own pods and to those who ask for it.
pub fn config_map(spec: &JobSpec) -> Result<ConfigMap, Invalid> {
    let text = crate::yaml::write(spec)
        .map_err(|error| Invalid(format!("cannot write the job as YAML: {error}")))?;
    Ok(ConfigMap {
        metadata: metadata(names::config_map(&spec.job_name), spec),
        data: Some([(names::JOB_FILE.to_owned(), text)].into()),
        ..ConfigMap::default()
    })
}

/// The job's key: who can read it is in the job.
#[must_use]
pub fn secret(spec: &JobSpec, key: &str) -> Secret {
    Secret {
        metadata: metadata(names::secret(&spec.job_name), spec),
        data: Some([(names::KEY_FILE.to_owned(), ByteString(key.into()))].into()),
        type_: Some("Opaque".into()),
        ..Secret::default()
    }
}

/// The key in a job's Secret.
#[must_use]
pub fn key(secret: &Secret) -> Option<String> {
    let key = secret.data.as_ref()?.get(names::KEY_FILE)?;
    String::from_utf8(key.0.clone()).ok()
}

/// Where the master is found, whichever pod it is.
pub fn service(spec: &JobSpec) -> Result<Service, Invalid> {
    let port = |name: &str, port: u16| json!({ "name": name, "port": port, "targetPort": port });
    let service = json!({
        "metadata": metadata(names::service(&spec.job_name), spec),
        "spec": {
            "selector": selector(spec, Some(Role::Master)),
            // A master that is about to be ready is waited for, not hidden.
            "publishNotReadyAddresses": true,
            "ports": [port("control", names::MASTER_PORT), port("http", names::HTTP_PORT)],
        },
    });
    read_patches(&spec.cluster_spec_json)?.apply_to_service(service)
}

/// Only the job's own pods may speak to each other.
fn network_policy(spec: &JobSpec) -> NetworkPolicy {
    let pods = json!({ "matchLabels": selector(spec, None) });
    object(json!({
        "metadata": metadata(names::config_map(&spec.job_name), spec),
        "spec": {
            "podSelector": pods,
            "policyTypes": ["Ingress"],
            "ingress": [{ "from": [{ "podSelector": pods }] }],
        },
    }))
}

/// A drain waits for those whose loss costs work. Bare pods can only be counted, not measured in
/// per cent.
fn budgets(spec: &JobSpec) -> Vec<PodDisruptionBudget> {
    let counts = [(Role::Master, 1), (Role::Ps, spec.num_ps_pods)];
    let counts = counts.into_iter().filter(|(_, count)| *count > 0);
    let budget = |(role, count): (Role, u32)| {
        object(json!({
            "metadata": metadata(format!("elasticdl-{}-{role}", spec.job_name), spec),
            "spec": {
                "minAvailable": count,
                "selector": { "matchLabels": selector(spec, Some(role)) },
            },
        }))
    };
    counts.map(budget).collect()
}

/// Of these variables, those that `--populate_env_names` names: servers and workers get them.
pub fn populated(
    spec: &JobSpec,
    variables: impl IntoIterator<Item = (String, String)>,
) -> Result<Vec<(String, String)>, Invalid> {
    let pattern = spec.populate_env_names.trim();
    if pattern.is_empty() {
        return Ok(Vec::new());
    }
    let whole = regex::Regex::new(&format!("^(?:{pattern})$")).map_err(|_| {
        Invalid(format!("--populate_env_names=`{pattern}` is not a valid regular expression"))
    })?;
    Ok(variables.into_iter().filter(|(name, _)| whole.is_match(name)).collect())
}

fn metadata(name: String, spec: &JobSpec) -> ObjectMeta {
    let namespace = Some(spec.namespace.clone()).filter(|name| !name.is_empty());
    let labels = Some(names::job_labels(&spec.job_name));
    ObjectMeta { name: Some(name), namespace, labels, ..ObjectMeta::default() }
}

fn selector(spec: &JobSpec, role: Option<Role>) -> Value {
    let mut labels = json!({ names::JOB_LABEL: spec.job_name });
    if let Some(role) = role {
        labels[names::ROLE_LABEL] = role.to_string().into();
    }
    labels
}

/// What was written here by hand is of its type; tests make every one of them.
fn object<T: DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).expect("the fields are the type's own")
}
