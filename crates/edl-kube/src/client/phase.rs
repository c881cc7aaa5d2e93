// SPDX-License-Identifier: Apache-2.0
//! How far a master's pod is, from what the API server says about it. Pure.

use k8s_openapi::api::core::v1::{ContainerState, Pod};

/// Where the pod is in its life.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Phase {
    /// It waits, perhaps for a reason.
    Waiting(Option<Trouble>),
    Running,
    /// It has ended, with its exit code and its last words.
    Ended {
        code: i32,
        message: String,
    },
}

/// Why a pod does not run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trouble {
    /// A sentence with the name of the thing.
    pub text: String,
    /// Whether waiting cannot help.
    pub is_final: bool,
}

/// Reasons of a container that does not start for want of its image.
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

/// What the pod's own words mean.
#[must_use]
pub fn phase(pod: &Pod) -> Phase {
    let status = pod.status.clone().unwrap_or_default();
    let container = status.container_statuses.unwrap_or_default().into_iter().next();
    let state = container.as_ref().and_then(|container| container.state.clone());
    let ContainerState { terminated, waiting, running } = state.unwrap_or_default();
    let word = status.phase.unwrap_or_default();
    if let Some(ended) = terminated.filter(|_| word == "Succeeded" || word == "Failed") {
        let code = ended.exit_code;
        return Phase::Ended { code, message: ended.message.unwrap_or_default() };
    }
    match word.as_str() {
        "Succeeded" => return Phase::Ended { code: 0, message: String::new() },
        "Failed" => {
            let why = [status.reason, status.message].into_iter().flatten();
            return Phase::Ended { code: 1, message: why.collect::<Vec<_>>().join(": ") };
        }
        _ if running.is_some() => return Phase::Running,
        _ => {}
    }
    if let Some(waiting) = waiting {
        let reason = waiting.reason.unwrap_or_default();
        let message = waiting.message.unwrap_or_default();
        let image = container.map(|container| container.image).unwrap_or_default();
        if NO_IMAGE.contains(&reason.as_str()) {
            let text = format!("cannot pull image `{image}` ({reason}): {message}");
            return Phase::Waiting(Some(Trouble { text, is_final: true }));
        }
        if NO_START.contains(&reason.as_str()) {
            let text = format!("the container cannot start ({reason}): {message}");
            return Phase::Waiting(Some(Trouble { text, is_final: true }));
        }
    }
    let conditions = status.conditions.unwrap_or_default();
    let unscheduled = conditions
        .into_iter()
        .find(|condition| condition.type_ == "PodScheduled" && condition.status == "False");
    let trouble = unscheduled.and_then(|condition| condition.message).map(|message| Trouble {
        is_final: message.contains("persistentvolumeclaim") && message.contains("not found"),
        text: format!("no node can run it: {message}"),
    });
    Phase::Waiting(trouble)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn of(status: Value) -> Phase {
        phase(&serde_json::from_value(json!({ "metadata": {}, "status": status })).unwrap())
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
        let Phase::Waiting(Some(trouble)) = of(container(reason)) else { panic!() };
        assert!(trouble.is_final && trouble.text.contains("`no:such`"), "{trouble:?}");
    }

    #[test]
    fn a_cluster_that_is_full_is_waited_for_and_a_missing_claim_is_not() {
        let scheduled = |message: &str| {
            of(json!({ "phase": "Pending", "conditions": [{
                "type": "PodScheduled", "status": "False", "message": message }] }))
        };
        let Phase::Waiting(Some(full)) = scheduled("0/3 nodes are available: 3 Insufficient cpu.")
        else {
            panic!()
        };
        assert!(!full.is_final && full.text.contains("Insufficient cpu"));
        let Phase::Waiting(Some(claim)) = scheduled("persistentvolumeclaim \"c\" not found") else {
            panic!()
        };
        assert!(claim.is_final);
    }

    #[test]
    fn an_end_has_its_code_and_last_words() {
        let mut ended = container(json!({ "terminated": { "exitCode": 3, "message": "bye" } }));
        ended["phase"] = "Failed".into();
        assert_eq!(of(ended), Phase::Ended { code: 3, message: "bye".into() });
        let evicted = of(json!({ "phase": "Failed", "reason": "Evicted", "message": "low" }));
        assert_eq!(evicted, Phase::Ended { code: 1, message: "Evicted: low".into() });
        assert_eq!(of(container(json!({ "running": {} }))), Phase::Running);
    }
}
