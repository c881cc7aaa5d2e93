// SPDX-License-Identifier: Apache-2.0
//! Pods: which job each belongs to, what it holds, and which others wait for room.

use std::collections::BTreeMap;
use std::sync::Arc;

use edl_core::platform::{Ended, Role};
use edl_core::pod::State;
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
    pub asks: Resources,
    pub life: Life,
}

/// Where a pod is in its life, as far as a plan cares.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Life {
    Waiting,
    Running,
    /// It holds its room, but not for long.
    Leaving,
    Ended(Ended),
}

/// Pods by what they are to a plan.
#[derive(Clone, Debug, Default)]
pub(super) struct Sorted {
    /// By namespace and name of the job.
    pub(super) of_jobs: BTreeMap<(String, String), Vec<JobPod>>,
    pub(super) others: Vec<Other>,
    /// Those that found no node for want of room.
    pub(super) waiting: Vec<Arc<Pod>>,
}

/// A pod that is not ours, on a node.
#[derive(Clone, Debug)]
pub(super) struct Other {
    pub(super) node: String,
    pub(super) asks: Resources,
    pub(super) is_leaving: bool,
}

impl JobPod {
    /// Whether it has, or waits for, a place that it means to keep.
    #[must_use]
    pub fn is_active(&self) -> bool {
        matches!(self.life, Life::Waiting | Life::Running)
    }

    #[must_use]
    pub fn is_running(&self) -> bool {
        self.life == Life::Running
    }
}

/// Sorts all pods of the cluster; `is_job` says whether a job of ours has this namespace and name.
pub(super) fn sort(pods: &[Arc<Pod>], is_job: impl Fn(&(String, String)) -> bool) -> Sorted {
    let mut sorted = Sorted::default();
    for pod in pods {
        let job = job_of(pod).filter(|(key, _)| is_job(key));
        if let Some((key, pod)) = job {
            sorted.of_jobs.entry(key).or_default().push(pod);
            continue;
        }
        let state = facts::of(pod).state();
        let node = pod.spec.as_ref().and_then(|spec| spec.node_name.clone());
        match (node, &state) {
            (_, State::Ended(_)) => {}
            (Some(node), _) => {
                let is_leaving = matches!(state, State::Leaving(_));
                sorted.others.push(Other { node, asks: amounts::asked(pod), is_leaving });
            }
            (None, State::Waiting(_)) if wants_room(pod) => sorted.waiting.push(pod.clone()),
            (None, _) => {}
        }
    }
    for pods in sorted.of_jobs.values_mut() {
        pods.sort_by_key(|pod| (pod.role, pod.index));
    }
    sorted
}

/// The job that a pod says it belongs to.
fn job_of(pod: &Pod) -> Option<((String, String), JobPod)> {
    let labels = pod.metadata.labels.as_ref()?;
    let instance = names::instance(labels)?;
    let key = (pod.metadata.namespace.clone()?, labels.get(names::JOB_LABEL)?.clone());
    let life = match facts::of(pod).state() {
        State::Waiting(_) => Life::Waiting,
        State::Running => Life::Running,
        State::Leaving(_) => Life::Leaving,
        State::Ended(how) => Life::Ended(how),
    };
    let pod = JobPod {
        role: instance.role,
        index: instance.id,
        name: pod.metadata.name.clone()?,
        uid: pod.metadata.uid.clone()?,
        node: pod.spec.as_ref().and_then(|spec| spec.node_name.clone()),
        asks: amounts::asked(pod),
        life,
    };
    Some((key, pod))
}

/// Whether room would help: the scheduler has tried the pod and found too little. One that waits
/// for a volume or for a node that does not exist would wait on an empty cluster, too; and one of
/// a DaemonSet fits on one node alone, which Kubernetes clears for it by itself.
fn wants_room(pod: &Pod) -> bool {
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

/// Who a pod belongs to, in words: its Deployment rather than one of many ReplicaSets.
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
        wants_room(&serde_json::from_value(pod).unwrap())
    }

    #[test]
    fn only_pods_that_lack_room_are_given_some() {
        assert!(waits("Unschedulable", "0/3 nodes are available: 3 Insufficient cpu.", "Job"));
        assert!(!waits("Unschedulable", "persistentvolumeclaim \"x\" not found", "Job"));
        assert!(!waits("SchedulingGated", "", "Job"));
        assert!(!waits("Unschedulable", "1 Insufficient cpu", "DaemonSet"));
        assert!(!wants_room(&Pod::default()), "nobody has tried to place it yet");
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
