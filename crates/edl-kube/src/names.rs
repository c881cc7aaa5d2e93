// SPDX-License-Identifier: Apache-2.0
//! Names and labels of a job's objects. Only this module writes and reads the labels.

use std::collections::BTreeMap;

use edl_core::platform::{InstanceId, Role};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

/// Label of every object of a job: `kubectl get pod -l elasticdl_job_name=JOB`.
const JOB_LABEL: &str = "elasticdl_job_name";
/// `master`, `ps` or `worker`.
const ROLE_LABEL: &str = "elasticdl_replica_type";
/// The number of a parameter server or worker.
const INDEX_LABEL: &str = "elasticdl_replica_index";
/// The same for all objects of all jobs.
const APP_LABEL: (&str, &str) = ("app", "elasticdl");

/// The label selector of the objects of all jobs.
pub const OF_ALL_JOBS: &str = JOB_LABEL;

/// The only container of every pod, by which a patch can name it.
pub const CONTAINER: &str = "elasticdl";

/// Label by which Kubernetes says which Job created a pod.
pub const CONTROLLER_LABEL: &str = "batch.kubernetes.io/controller-uid";
/// The master's variable with that label's value.
pub const CONTROLLER_VARIABLE: &str = "ELASTICDL_CONTROLLER_UID";

/// The master's port for its job's processes.
pub const MASTER_PORT: u16 = 50_001;
/// The master's port for `/metrics` and `/healthz`.
pub const HTTP_PORT: u16 = 8080;

/// The file of the ConfigMap with the job's description.
pub const JOB_FILE: &str = "job.yaml";
/// The file of the Secret with the job's key.
pub const KEY_FILE: &str = edl_core::job_dir::KEY;
/// Where pods mount the ConfigMap.
pub const JOB_MOUNT: &str = "/etc/elasticdl/job";
/// Where pods mount the Secret.
pub const KEY_MOUNT: &str = "/etc/elasticdl/key";

/// The ConfigMap that describes a job and owns all its other objects.
#[must_use]
pub fn config_map(job: &str) -> String {
    format!("elasticdl-{job}")
}

#[must_use]
pub fn secret(job: &str) -> String {
    format!("elasticdl-{job}-key")
}

/// The Service by which a job's processes find its master.
#[must_use]
pub fn service(job: &str) -> String {
    master(job)
}

/// The Job that runs the master's pod, whose name Kubernetes makes from this one.
#[must_use]
pub fn master(job: &str) -> String {
    pod(job, InstanceId::MASTER)
}

/// The service account of pods of a role, unless the user names one.
#[must_use]
pub fn account(role: Role) -> String {
    format!("elasticdl-{role}")
}

/// The address of a job's master for pods of the same namespace.
#[must_use]
pub fn master_address(job: &str) -> String {
    format!("{}:{MASTER_PORT}", service(job))
}

/// The names by which pods reach a Service.
#[must_use]
pub fn hosts(service: &str, namespace: &str) -> Vec<String> {
    let name = format!("{service}.{namespace}");
    let (inside, whole) = (format!("{name}.svc"), format!("{name}.svc.cluster.local"));
    vec![service.to_owned(), name, inside, whole]
}

/// The pod of a worker or parameter server.
#[must_use]
pub fn pod(job: &str, instance: InstanceId) -> String {
    format!("elasticdl-{job}-{instance}")
}

/// The labels that all objects of a job have.
#[must_use]
pub fn job_labels(job: &str) -> BTreeMap<String, String> {
    [(APP_LABEL.0, APP_LABEL.1), (JOB_LABEL, job)].map(|(k, v)| (k.into(), v.into())).into()
}

#[must_use]
pub fn pod_labels(job: &str, instance: InstanceId) -> BTreeMap<String, String> {
    let mut labels = job_labels(job);
    labels.insert(ROLE_LABEL.into(), instance.role.to_string());
    labels.insert(INDEX_LABEL.into(), instance.id.to_string());
    labels
}

/// The labels that select a job's pods, of one role or of all.
#[must_use]
pub fn selector_labels(job: &str, role: Option<Role>) -> BTreeMap<&'static str, String> {
    let role = role.map(|role| (ROLE_LABEL, role.to_string()));
    [(JOB_LABEL, job.to_owned())].into_iter().chain(role).collect()
}

/// The label selector of a job's objects.
#[must_use]
pub fn selector(job: &str) -> String {
    format!("{JOB_LABEL}={job}")
}

/// The label selector of a job's pods of one role.
#[must_use]
pub fn role_selector(job: &str, role: Role) -> String {
    format!("{JOB_LABEL}={job},{ROLE_LABEL}={role}")
}

/// The job that an object belongs to, by its labels.
#[must_use]
pub fn job_of(metadata: &ObjectMeta) -> Option<&String> {
    metadata.labels.as_ref()?.get(JOB_LABEL)
}

/// The process that runs in a pod, by its labels.
#[must_use]
pub fn instance_of(metadata: &ObjectMeta) -> Option<InstanceId> {
    let labels = metadata.labels.as_ref()?;
    let name = labels.get(ROLE_LABEL)?;
    let role = Role::ALL.into_iter().find(|role| role.to_string() == *name)?;
    Some(InstanceId { role, id: labels.get(INDEX_LABEL)?.parse().ok()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_is_identified_by_its_name_and_labels() {
        let worker = InstanceId { role: Role::Worker, id: 3 };
        let master = InstanceId::MASTER;
        assert_eq!(pod("x", worker), "elasticdl-x-worker-3");
        assert_eq!(pod("x", master), "elasticdl-x-master");
        let labelled = |labels| ObjectMeta { labels: Some(labels), ..ObjectMeta::default() };
        for it in [worker, master] {
            let metadata = labelled(pod_labels("x", it));
            assert_eq!(instance_of(&metadata), Some(it));
            assert_eq!(job_of(&metadata).map(String::as_str), Some("x"));
        }
        assert_eq!(instance_of(&labelled(job_labels("x"))), None);
    }
}
