// SPDX-License-Identifier: Apache-2.0
//! What the objects of a job are called and labelled: the one place that people, `kubectl`
//! commands and every part of the system agree on.

use std::collections::BTreeMap;

use edl_core::platform::{InstanceId, Role};

/// Label of every object of a job: `kubectl get pod -l elasticdl_job_name=JOB`.
pub const JOB_LABEL: &str = "elasticdl_job_name";
/// `master`, `ps` or `worker`.
pub const ROLE_LABEL: &str = "elasticdl_replica_type";
/// The number of a parameter server or worker.
pub const INDEX_LABEL: &str = "elasticdl_replica_index";
/// The same for all objects of all jobs.
pub const APP_LABEL: (&str, &str) = ("app", "elasticdl");

/// The one container of every pod, so that a patch can name it.
pub const CONTAINER: &str = "elasticdl";

/// Where a master listens for its job's processes.
pub const MASTER_PORT: u16 = 50_001;
/// Where a master serves `/metrics` and `/healthz`.
pub const HTTP_PORT: u16 = 8080;

/// The file of the ConfigMap that describes the job.
pub const JOB_FILE: &str = "job.yaml";
/// The file of the Secret that holds the job's key.
pub const KEY_FILE: &str = edl_core::job_dir::KEY;
/// Where pods find the ConfigMap.
pub const JOB_MOUNT: &str = "/etc/elasticdl/job";
/// Where pods find the Secret.
pub const KEY_MOUNT: &str = "/etc/elasticdl/key";

/// Annotation of the ConfigMap by which an operator tells a master how many workers to have.
pub const WORKERS_NOTE: &str = "elasticdl.org/workers";
/// Annotation of the ConfigMap by which an operator names the workers that it would rather see go
/// when there are to be fewer, e.g. `3,7`: others wait for the room on their nodes. A master may
/// choose otherwise.
pub const LEAVE_NOTE: &str = "elasticdl.org/leave";
/// Annotation of the ConfigMap by which a master tells an operator how far it is, as JSON.
pub const STATUS_NOTE: &str = "elasticdl.org/status";

/// The ConfigMap that describes a job and owns all its other objects.
#[must_use]
pub fn config_map(job: &str) -> String {
    format!("elasticdl-{job}")
}

/// The Secret with the job's key.
#[must_use]
pub fn secret(job: &str) -> String {
    format!("elasticdl-{job}-key")
}

/// The Service by which a job's processes find its master, wherever it runs.
#[must_use]
pub fn service(job: &str) -> String {
    format!("elasticdl-{job}-master")
}

/// The address of a job's master for pods of the same namespace.
#[must_use]
pub fn master_address(job: &str) -> String {
    format!("{}:{MASTER_PORT}", service(job))
}

/// The pod of a process.
#[must_use]
pub fn pod(job: &str, instance: InstanceId) -> String {
    format!("elasticdl-{job}-{instance}")
}

/// The labels that all objects of a job have.
#[must_use]
pub fn job_labels(job: &str) -> BTreeMap<String, String> {
    [(APP_LABEL.0, APP_LABEL.1), (JOB_LABEL, job)].map(|(k, v)| (k.into(), v.into())).into()
}

/// The labels of a process's pod.
#[must_use]
pub fn pod_labels(job: &str, instance: InstanceId) -> BTreeMap<String, String> {
    let mut labels = job_labels(job);
    labels.insert(ROLE_LABEL.into(), instance.role.to_string());
    labels.insert(INDEX_LABEL.into(), instance.id.to_string());
    labels
}

/// The label selector of a job's objects.
#[must_use]
pub fn selector(job: &str) -> String {
    format!("{JOB_LABEL}={job}")
}

/// The process that a pod's labels name.
#[must_use]
pub fn instance(labels: &BTreeMap<String, String>) -> Option<InstanceId> {
    let role = match labels.get(ROLE_LABEL)?.as_str() {
        "master" => Role::Master,
        "ps" => Role::Ps,
        "worker" => Role::Worker,
        _ => return None,
    };
    Some(InstanceId { role, id: labels.get(INDEX_LABEL)?.parse().ok()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pod_is_named_after_its_job_and_part_and_its_labels_name_it_too() {
        let worker = InstanceId { role: Role::Worker, id: 3 };
        let master = InstanceId::MASTER;
        assert_eq!(pod("x", worker), "elasticdl-x-worker-3");
        assert_eq!(pod("x", master), "elasticdl-x-master");
        for it in [worker, master] {
            assert_eq!(instance(&pod_labels("x", it)), Some(it));
        }
        assert_eq!(instance(&job_labels("x")), None);
    }
}
