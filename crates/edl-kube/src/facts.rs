// SPDX-License-Identifier: Apache-2.0
//! Reads a pod's facts out of what the API server says.

use std::time::Duration;

use edl_core::pod::{Container, Facts, Phase};
use k8s_openapi::api::core::v1::{ContainerState, Pod, PodCondition};

use crate::names;

/// A node gets this much longer than a pod's grace to say that the pod is gone.
pub(crate) const NODE_MARGIN: Duration = Duration::from_secs(10);
/// Kubernetes' own, for pods that do not say.
const DEFAULT_GRACE: Duration = Duration::from_secs(30);

/// What `pod` gets between the wish that it leaves and its end.
pub(crate) fn grace(pod: &Pod) -> Duration {
    let spec_grace = pod.spec.as_ref().and_then(|spec| spec.termination_grace_period_seconds);
    let grace = pod.metadata.deletion_grace_period_seconds.or(spec_grace);
    grace.and_then(|secs| u64::try_from(secs).ok()).map_or(DEFAULT_GRACE, Duration::from_secs)
}

/// What `pod` says about itself.
#[must_use]
pub fn of(pod: &Pod) -> Facts {
    let is_leaving = pod.metadata.deletion_timestamp.is_some();
    let Some(status) = &pod.status else { return Facts { is_leaving, ..Facts::default() } };
    let conditions = status.conditions.as_deref().unwrap_or_default();
    let find = |kind: &str, status: &str| {
        conditions.iter().find(|condition| condition.type_ == kind && condition.status == status)
    };
    let text = |condition: &PodCondition| condition.message.clone().unwrap_or_default();
    let containers = status.container_statuses.as_deref().unwrap_or_default();
    // Others, put there by a patch or the cluster, do not matter.
    let ours = containers.iter().find(|container| container.name == names::CONTAINER);
    let ours = ours.or_else(|| containers.first());
    Facts {
        phase: phase(status.phase.as_deref().unwrap_or_default()),
        reason: status.reason.clone().unwrap_or_default(),
        message: status.message.clone().unwrap_or_default(),
        unschedulable: find("PodScheduled", "False").map(text),
        disruption: find("DisruptionTarget", "True").and_then(|found| found.reason.clone()),
        container: ours
            .and_then(|container| container.state.as_ref())
            .map_or(Container::Unknown, container),
        // The node's own words say that all is well, but the control plane took them back.
        is_node_silent: ours.is_some_and(|container| container.ready)
            && find("ContainersReady", "True").is_some()
            && find("Ready", "False").is_some(),
        is_leaving,
        is_gone: false,
    }
}

fn phase(word: &str) -> Phase {
    match word {
        "Running" => Phase::Running,
        "Succeeded" => Phase::Succeeded,
        "Failed" => Phase::Failed,
        "Unknown" => Phase::Unknown,
        _ => Phase::Pending,
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
    use edl_core::pod::{State, Wait};
    use serde_json::json;

    use super::*;

    fn facts(pod: serde_json::Value) -> Facts {
        of(&serde_json::from_value(pod).unwrap())
    }

    #[test]
    fn a_pod_that_no_node_takes_says_why() {
        let pod = json!({"metadata": {"name": "a"}, "status": {"phase": "Pending", "conditions": [
            {"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
             "message": "0/3 nodes are available"}]}});
        let why = Wait::Unschedulable("0/3 nodes are available".into());
        assert_eq!(facts(pod).state(), State::Waiting(why));
    }

    #[test]
    fn a_pod_that_ran_out_of_memory_says_so() {
        let pod = json!({"metadata": {"name": "a"}, "status": {"phase": "Failed",
            "containerStatuses": [
                {"name": "sidecar", "image": "", "imageID": "", "ready": true, "restartCount": 0,
                 "state": {"running": {}}},
                {"name": "elasticdl", "image": "", "imageID": "", "ready": false,
                 "restartCount": 0,
                 "state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}}]}});
        assert_eq!(facts(pod).state(), State::Ended(Ended::OutOfMemory));
    }

    #[test]
    fn a_node_that_fell_silent_is_seen_at_its_pods() {
        let pod = |ready: &str| {
            json!({"metadata": {"name": "a"}, "status": {"phase": "Running",
                "conditions": [{"type": "Ready", "status": ready},
                               {"type": "ContainersReady", "status": "True"}],
                "containerStatuses": [{"name": "elasticdl", "image": "", "imageID": "",
                    "ready": true, "restartCount": 0, "state": {"running": {}}}]}})
        };
        assert!(facts(pod("False")).is_node_silent);
        assert!(!facts(pod("True")).is_node_silent);
    }
}
