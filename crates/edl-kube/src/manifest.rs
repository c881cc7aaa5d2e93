// SPDX-License-Identifier: Apache-2.0
//! The objects of a job, as pure functions of its description.
//!
//! The ConfigMap owns all the others: deleting it deletes the job.

use edl_core::platform::{InstanceId, Role};
use edl_core::spec::{Invalid, JobSpec};
use k8s_openapi::ByteString;
use k8s_openapi::api::batch::v1::Job;
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
    /// Creates the master's pod, and another one whenever it is lost.
    pub master: Job,
}

/// The objects of a job. They have no owner yet, because the ConfigMap has no uid before it is
/// created.
pub fn job_objects(spec: &JobSpec, key: &str) -> Result<JobObjects, Invalid> {
    Ok(JobObjects {
        config_map: config_map(spec)?,
        secret: secret(spec, key),
        service: service(spec)?,
        network_policy: network_policy(spec),
        budgets: budgets(spec),
        master: master(spec)?,
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

/// The job's ConfigMap as an owner, once it exists.
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

/// The job's description, for its pods and for the client.
pub fn config_map(spec: &JobSpec) -> Result<ConfigMap, Invalid> {
    let text = crate::yaml::write(spec)
        .map_err(|error| Invalid(format!("cannot write the job as YAML: {error}")))?;
    Ok(ConfigMap {
        metadata: metadata(names::config_map(&spec.job_name), spec),
        data: Some([(names::JOB_FILE.to_owned(), text)].into()),
        ..ConfigMap::default()
    })
}

/// The job's description in its ConfigMap, as YAML; empty if there is none.
#[must_use]
pub fn description(config_map: &ConfigMap) -> &str {
    let data = config_map.data.as_ref();
    data.and_then(|data| data.get(names::JOB_FILE)).map_or("", String::as_str)
}

/// The job's key: a process that can read it belongs to the job.
#[must_use]
pub fn secret(spec: &JobSpec, key: &str) -> Secret {
    Secret {
        metadata: metadata(names::secret(&spec.job_name), spec),
        data: Some([(names::KEY_FILE.to_owned(), ByteString(key.into()))].into()),
        type_: Some("Opaque".into()),
        ..Secret::default()
    }
}

#[must_use]
pub fn key(secret: &Secret) -> Option<String> {
    let key = secret.data.as_ref()?.get(names::KEY_FILE)?;
    String::from_utf8(key.0.clone()).ok()
}

/// The address of the master.
pub fn service(spec: &JobSpec) -> Result<Service, Invalid> {
    let port = |name: &str, port: u16| json!({ "name": name, "port": port, "targetPort": port });
    let service = json!({
        "metadata": metadata(names::service(&spec.job_name), spec),
        "spec": {
            "selector": names::selector_labels(&spec.job_name, Some(Role::Master)),
            // Processes must find a master that is not ready yet.
            "publishNotReadyAddresses": true,
            "ports": [port("control", names::MASTER_PORT), port("http", names::HTTP_PORT)],
        },
    });
    read_patches(&spec.cluster_spec_json)?.apply_to_service(service)
}

/// The Job that keeps one master running. Only an exit with code 0 completes it; before a master
/// exits with the end of its training job in another code, it sets the limit of failures to those so
/// far ([`crate::controller::close`]). A rule for exit codes (`podFailurePolicy`) would do the same,
/// but with such a rule, the pod of a lost node is never replaced.
pub fn master(spec: &JobSpec) -> Result<Job, Invalid> {
    let Pod { metadata: pod, spec: pod_spec, .. } =
        pod(spec, InstanceId::MASTER, &PodExtras::default())?;
    Ok(object(json!({
        "metadata": metadata(names::master(&spec.job_name), spec),
        "spec": {
            "backoffLimit": i32::MAX,
            "template": {
                "metadata": { "labels": pod.labels, "annotations": pod.annotations },
                "spec": pod_spec,
            },
        },
    })))
}

/// Only the job's own pods may connect to each other.
fn network_policy(spec: &JobSpec) -> NetworkPolicy {
    let pods = json!({ "matchLabels": names::selector_labels(&spec.job_name, None) });
    object(json!({
        "metadata": metadata(names::config_map(&spec.job_name), spec),
        "spec": {
            "podSelector": pods,
            "policyTypes": ["Ingress"],
            "ingress": [{ "from": [{ "podSelector": pods }] }],
        },
    }))
}

/// A drain waits for pods whose loss costs work. Bare pods need an absolute number, not a
/// percentage.
fn budgets(spec: &JobSpec) -> Vec<PodDisruptionBudget> {
    let counts = [(Role::Master, 1), (Role::Ps, spec.num_ps_pods)];
    let counts = counts.into_iter().filter(|(_, count)| *count > 0);
    let budget = |(role, count): (Role, u32)| {
        object(json!({
            "metadata": metadata(format!("elasticdl-{}-{role}", spec.job_name), spec),
            "spec": {
                "minAvailable": count,
                "selector": { "matchLabels": names::selector_labels(&spec.job_name, Some(role)) },
            },
        }))
    };
    counts.map(budget).collect()
}

/// The variables that match `--populate_env_names`, for servers and workers.
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

/// Converts JSON literals of this module, all of which tests create.
fn object<T: DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).expect("the fields are the type's own")
}
