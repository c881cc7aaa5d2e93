// SPDX-License-Identifier: Apache-2.0
//! The state of a pod, as the client shows it.

use edl_core::pod::{self, Container};
use k8s_openapi::api::core::v1::Pod;

use crate::facts;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PodState {
    /// Waiting, possibly because of a problem.
    Waiting(Option<Trouble>),
    Running,
    /// Ended, with its exit code and termination message.
    Ended {
        code: i32,
        message: String,
    },
}

/// Why a pod does not run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trouble {
    /// A sentence that names the object.
    pub text: String,
    /// Whether waiting is useless.
    pub is_final: bool,
}

/// Reasons of a container whose image cannot be pulled.
const NO_IMAGE: [&str; 5] = [
    "ErrImageNeverPull",
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
    "RegistryUnavailable",
];
/// Reasons of a container that can never start.
const NO_START: [&str; 4] =
    ["CreateContainerConfigError", "CreateContainerError", "RunContainerError", "StartError"];

/// Reads the state of a pod.
#[must_use]
pub fn pod_state(pod: &Pod) -> PodState {
    let facts = facts::of(pod);
    let status = facts::container_status(pod);
    let final_trouble = |text| PodState::Waiting(Some(Trouble { text, is_final: true }));
    match (facts.phase, &facts.container) {
        (pod::PodPhase::Succeeded | pod::PodPhase::Failed, Container::Terminated { code, .. }) => {
            let terminated = status.and_then(|status| status.state.as_ref()?.terminated.as_ref());
            let message = terminated.and_then(|ended| ended.message.clone()).unwrap_or_default();
            PodState::Ended { code: *code, message }
        }
        (pod::PodPhase::Succeeded, _) => PodState::Ended { code: 0, message: String::new() },
        (pod::PodPhase::Failed, _) => {
            let mut why = vec![facts.reason, facts.message];
            why.retain(|text| !text.is_empty());
            PodState::Ended { code: 1, message: why.join(": ") }
        }
        (_, Container::Running) => PodState::Running,
        (_, Container::Waiting { reason, message }) if NO_IMAGE.contains(&reason.as_str()) => {
            let image = status.map_or("", |status| status.image.as_str());
            final_trouble(format!("cannot pull image `{image}` ({reason}): {message}"))
        }
        (_, Container::Waiting { reason, message }) if NO_START.contains(&reason.as_str()) => {
            final_trouble(format!("the container cannot start ({reason}): {message}"))
        }
        (pod::PodPhase::Pending | pod::PodPhase::Running | pod::PodPhase::Unknown, _) => {
            PodState::Waiting(facts.unschedulable.filter(|message| !message.is_empty()).map(
                |message| Trouble {
                    is_final: message.contains("persistentvolumeclaim")
                        && message.contains("not found"),
                    text: format!("no node can run it: {message}"),
                },
            ))
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn of(status: Value) -> PodState {
        pod_state(&serde_json::from_value(json!({ "metadata": {}, "status": status })).unwrap())
    }

    fn container(state: Value) -> Value {
        json!({ "phase": "Pending", "containerStatuses": [{
            "name": "elasticdl", "image": "no:such", "imageID": "", "ready": false,
            "restartCount": 0, "state": state,
        }] })
    }

    #[test]
    fn an_image_that_is_not_there_is_named_and_not_waited_for() {
        let reason =
            json!({ "waiting": { "reason": "ErrImageNeverPull", "message": "not present" } });
        let PodState::Waiting(Some(trouble)) = of(container(reason)) else { panic!() };
        assert!(trouble.is_final && trouble.text.contains("`no:such`"), "{trouble:?}");
    }

    #[test]
    fn a_cluster_that_is_full_is_waited_for_and_a_missing_claim_is_not() {
        let scheduled = |message: &str| {
            of(json!({ "phase": "Pending", "conditions": [{
                "type": "PodScheduled", "status": "False", "message": message }] }))
        };
        let PodState::Waiting(Some(full)) =
            scheduled("0/3 nodes are available: 3 Insufficient cpu.")
        else {
            panic!()
        };
        assert!(!full.is_final && full.text.contains("Insufficient cpu"));
        let PodState::Waiting(Some(claim)) = scheduled("persistentvolumeclaim \"c\" not found")
        else {
            panic!()
        };
        assert!(claim.is_final);
    }

    #[test]
    fn an_ended_pod_has_its_code_and_message() {
        let mut ended = container(json!({ "terminated": { "exitCode": 3, "message": "bye" } }));
        ended["phase"] = "Failed".into();
        assert_eq!(of(ended), PodState::Ended { code: 3, message: "bye".into() });
        let evicted = of(json!({ "phase": "Failed", "reason": "Evicted", "message": "low" }));
        assert_eq!(evicted, PodState::Ended { code: 1, message: "Evicted: low".into() });
        assert_eq!(of(container(json!({ "running": {} }))), PodState::Running);
    }
}
