// SPDX-License-Identifier: Apache-2.0
//! Pods: the job of each, its resources, and which pods of others wait for capacity.

use std::collections::BTreeMap;
use std::sync::Arc;

use edl_core::platform::Role;
use edl_core::pod::PodState;
use edl_kube::{facts, names};
use edl_sched::resources::Resources;
use k8s_openapi::api::core::v1::Pod;

use super::amounts;

/// A pod of a training job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobPod {
    pub role: Role,
    /// The number of a server or worker.
    pub index: u32,
    pub name: String,
    pub uid: String,
    /// The name of the node that it is bound to.
    pub node: Option<String>,
    pub requests: Resources,
    pub state: PodState,
}

/// All pods, by their meaning to a plan.
#[derive(Clone, Debug, Default)]
pub(super) struct SortedPods {
    /// By namespace and name of the job.
    pub(super) of_jobs: BTreeMap<(String, String), Vec<JobPod>>,
    pub(super) others: Vec<OtherPod>,
    /// Pods of others that no node has capacity for.
    pub(super) waiting: Vec<Arc<Pod>>,
}

/// A pod on a node that belongs to no training job.
#[derive(Clone, Debug)]
pub(super) struct OtherPod {
    pub(super) node: String,
    pub(super) requests: Resources,
    pub(super) is_leaving: bool,
}

impl JobPod {
    /// Whether it runs or will run.
    #[must_use]
    pub fn is_active(&self) -> bool {
        matches!(self.state, PodState::Waiting(_) | PodState::Running)
    }

    #[must_use]
    pub fn is_running(&self) -> bool {
        self.state == PodState::Running
    }

    #[must_use]
    pub fn has_ended(&self) -> bool {
        matches!(self.state, PodState::Ended(_))
    }
}

/// Sorts all pods of the cluster; `is_job` is whether a job has this namespace and name.
pub(super) fn sort(pods: &[Arc<Pod>], is_job: impl Fn(&(String, String)) -> bool) -> SortedPods {
    let mut sorted = SortedPods::default();
    for pod in pods {
        let job = job_of(pod).filter(|(key, _)| is_job(key));
        if let Some((key, pod)) = job {
            sorted.of_jobs.entry(key).or_default().push(pod);
            continue;
        }
        let state = facts::of(pod).state();
        let node = pod.spec.as_ref().and_then(|spec| spec.node_name.clone());
        match (node, &state) {
            (_, PodState::Ended(_)) => {}
            (Some(node), _) => {
                let is_leaving = matches!(state, PodState::Leaving(_));
                let requests = amounts::requested(pod);
                sorted.others.push(OtherPod { node, requests, is_leaving });
            }
            (None, PodState::Waiting(_)) if needs_capacity(pod) => sorted.waiting.push(pod.clone()),
            (None, _) => {}
        }
    }
    for pods in sorted.of_jobs.values_mut() {
        pods.sort_by_key(|pod| (pod.role, pod.index));
    }
    sorted
}

/// The job of a pod, by its labels.
fn job_of(pod: &Pod) -> Option<((String, String), JobPod)> {
    let instance = names::instance_of(&pod.metadata)?;
    let key = (pod.metadata.namespace.clone()?, names::job_of(&pod.metadata)?.clone());
    let pod = JobPod {
        role: instance.role,
        index: instance.id,
        name: pod.metadata.name.clone()?,
        uid: pod.metadata.uid.clone()?,
        node: pod.spec.as_ref().and_then(|spec| spec.node_name.clone()),
        requests: amounts::requested(pod),
        state: facts::of(pod).state(),
    };
    Some((key, pod))
}

/// Whether free capacity would help: the scheduler has tried the pod and found too little. A pod
/// that waits for a volume or for a missing node would also wait on an empty cluster, and a
/// DaemonSet's pod fits on only one node, which Kubernetes clears by itself.
fn needs_capacity(pod: &Pod) -> bool {
    let is_daemon = pod.metadata.owner_references.iter().flatten().any(|it| it.kind == "DaemonSet");
    let conditions = pod.status.as_ref().and_then(|status| status.conditions.as_deref());
    let tried = conditions.unwrap_or_default().iter().find(|condition| {
        condition.type_ == "PodScheduled"
            && condition.status == "False"
            && condition.reason.as_deref() == Some("Unschedulable")
    });
    let message = tried.map(|condition| condition.message.as_deref().unwrap_or_default());
    !is_daemon && message.is_some_and(|text| text.is_empty() || text.contains("Insufficient"))
}

/// The name of a pod's service: its Deployment rather than one of many ReplicaSets.
pub(super) fn service_of(pod: &Pod) -> String {
    let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
    let own = pod.metadata.name.clone().unwrap_or_default();
    let owner = pod.metadata.owner_references.iter().flatten().next();
    let name = owner.map_or(own, |owner| {
        let labels = pod.metadata.labels.as_ref();
        let hash = labels.and_then(|labels| labels.get("pod-template-hash"));
        let deployment = hash.and_then(|hash| owner.name.strip_suffix(hash.as_str()));
        deployment.map_or(owner.name.clone(), |name| name.trim_end_matches('-').to_owned())
    });
    format!("{namespace}/{name}")
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn waits(reason: &str, message: &str, kind: &str) -> bool {
        let pod = json!({
            "metadata": {"name": "p", "ownerReferences": [
                {"apiVersion": "v1", "kind": kind, "name": "o", "uid": "u"}]},
            "status": {"phase": "Pending", "conditions": [{"type": "PodScheduled",
                "status": "False", "reason": reason, "message": message}]}});
        needs_capacity(&serde_json::from_value(pod).unwrap())
    }

    #[test]
    fn only_pods_that_lack_capacity_count_as_waiting() {
        assert!(waits("Unschedulable", "0/3 nodes are available: 3 Insufficient cpu.", "Job"));
        assert!(!waits("Unschedulable", "persistentvolumeclaim \"x\" not found", "Job"));
        assert!(!waits("SchedulingGated", "", "Job"));
        assert!(!waits("Unschedulable", "1 Insufficient cpu", "DaemonSet"));
        assert!(!needs_capacity(&Pod::default()), "the scheduler has not tried it yet");
    }

    #[test]
    fn a_service_is_called_after_its_deployment() {
        let of = |metadata: Value| {
            service_of(&serde_json::from_value(json!({ "metadata": metadata })).unwrap())
        };
        let owner = |name: &str| json!([{"apiVersion": "", "kind": "", "name": name, "uid": ""}]);
        let nginx = json!({"namespace": "web", "name": "nginx-5d-x", "ownerReferences":
            owner("nginx-5d"), "labels": {"pod-template-hash": "5d"}});
        assert_eq!(of(nginx), "web/nginx");
        let set = json!({"namespace": "a", "name": "db-0", "ownerReferences": owner("db")});
        assert_eq!(of(set), "a/db");
        assert_eq!(of(json!({"namespace": "a", "name": "alone"})), "a/alone");
    }
}
