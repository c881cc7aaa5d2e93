// SPDX-License-Identifier: Apache-2.0
//! Converts a Kubernetes pod to the facts that the job's machines use.

use std::time::Duration;

use edl_core::pod::{Container, PodFacts, PodPhase};
use k8s_openapi::api::core::v1::{ContainerState, ContainerStatus, Pod, PodCondition};
use k8s_openapi::jiff::Timestamp;

use crate::names;

/// How much longer than a pod's grace period its node may take to report that it is gone.
pub(crate) const NODE_MARGIN: Duration = Duration::from_secs(10);
/// Kubernetes' default.
const DEFAULT_GRACE: Duration = Duration::from_secs(30);

/// The grace period of a pod.
pub(crate) fn grace(pod: &Pod) -> Duration {
    let spec_grace = pod.spec.as_ref().and_then(|spec| spec.termination_grace_period_seconds);
    let grace = pod.metadata.deletion_grace_period_seconds.or(spec_grace);
    grace.and_then(|secs| u64::try_from(secs).ok()).map_or(DEFAULT_GRACE, Duration::from_secs)
}

/// The facts about a pod.
#[must_use]
pub fn of(pod: &Pod) -> PodFacts {
    let is_leaving = pod.metadata.deletion_timestamp.is_some();
    let Some(status) = &pod.status else { return PodFacts { is_leaving, ..PodFacts::default() } };
    let conditions = status.conditions.as_deref().unwrap_or_default();
    let find = |kind: &str, status: &str| {
        conditions.iter().find(|condition| condition.type_ == kind && condition.status == status)
    };
    let text = |condition: &PodCondition| condition.message.clone().unwrap_or_default();
    PodFacts {
        phase: phase(status.phase.as_deref().unwrap_or_default()),
        reason: status.reason.clone().unwrap_or_default(),
        message: status.message.clone().unwrap_or_default(),
        unschedulable: find("PodScheduled", "False").map(text),
        disruption: find("DisruptionTarget", "True").and_then(|found| found.reason.clone()),
        container: container_status(pod)
            .and_then(|container| container.state.as_ref())
            .map_or(Container::Unknown, container),
        is_leaving,
        is_gone: false,
    }
}

/// When the process of a pod started, if it runs.
pub(crate) fn started(pod: &Pod) -> Option<Timestamp> {
    let running = container_status(pod)?.state.as_ref()?.running.as_ref()?;
    running.started_at.as_ref().map(|time| time.0)
}

/// The status of our container, or of the first; others were added by a patch or the cluster.
pub(crate) fn container_status(pod: &Pod) -> Option<&ContainerStatus> {
    let containers = pod.status.as_ref()?.container_statuses.as_deref()?;
    let ours = containers.iter().find(|container| container.name == names::CONTAINER);
    ours.or_else(|| containers.first())
}

fn phase(name: &str) -> PodPhase {
    match name {
        "Running" => PodPhase::Running,
        "Succeeded" => PodPhase::Succeeded,
        "Failed" => PodPhase::Failed,
        "Unknown" => PodPhase::Unknown,
        _ => PodPhase::Pending,
    }
}

fn container(state: &ContainerState) -> Container {
    if let Some(ended) = &state.terminated {
        let reason = ended.reason.clone().unwrap_or_default();
        return Container::Terminated { code: ended.exit_code, reason };
    }
    if let Some(waiting) = &state.waiting {
        return Container::Waiting {
            reason: waiting.reason.clone().unwrap_or_default(),
            message: waiting.message.clone().unwrap_or_default(),
        };
    }
    state.running.as_ref().map_or(Container::Unknown, |_| Container::Running)
}

#[cfg(test)]
mod tests {
    use edl_core::platform::Ended;
    use edl_core::pod::{PodState, Wait};
    use serde_json::json;

    use super::*;

    fn facts(pod: serde_json::Value) -> PodFacts {
        of(&serde_json::from_value(pod).unwrap())
    }

    #[test]
    fn an_unschedulable_pod_has_a_reason() {
        let pod = json!({"metadata": {"name": "a"}, "status": {"phase": "Pending", "conditions": [
            {"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
             "message": "0/3 nodes are available"}]}});
        let why = Wait::Unschedulable("0/3 nodes are available".into());
        assert_eq!(facts(pod).state(), PodState::Waiting(why));
    }

    #[test]
    fn a_pod_that_ran_out_of_memory_is_recognized() {
        let pod = json!({"metadata": {"name": "a"}, "status": {"phase": "Failed",
            "containerStatuses": [
                {"name": "sidecar", "image": "", "imageID": "", "ready": true, "restartCount": 0,
                 "state": {"running": {}}},
                {"name": "elasticdl", "image": "", "imageID": "", "ready": false,
                 "restartCount": 0,
                 "state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}}]}});
        assert_eq!(facts(pod).state(), PodState::Ended(Ended::OutOfMemory));
    }

    #[test]
    fn the_start_of_a_process_is_that_of_its_container() {
        let pod = |state: serde_json::Value| -> Pod {
            serde_json::from_value(json!({"metadata": {"name": "a"}, "status": {
                "startTime": "2026-01-01T00:00:00Z",
                "containerStatuses": [{"name": "elasticdl", "image": "", "imageID": "",
                    "ready": true, "restartCount": 0, "state": state}]}}))
            .unwrap()
        };
        let running = pod(json!({"running": {"startedAt": "2026-01-01T00:00:07Z"}}));
        assert_eq!(started(&running), Some("2026-01-01T00:00:07Z".parse().unwrap()));
        assert_eq!(started(&pod(json!({"waiting": {}}))), None);
        assert_eq!(started(&Pod::default()), None);
    }
}
