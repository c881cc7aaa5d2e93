// SPDX-License-Identifier: Apache-2.0
//! The Job that runs a master's pod, from the master's side: why its pod is deleted, and when it must
//! start no other one.

use std::time::Duration;

use edl_core::platform::{Ended, Role};
use edl_core::pod::{PodState, Wait};
use futures::future::BoxFuture;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{ListParams, Patch, PatchParams};
use kube::{Api, Client};
use serde_json::{Value, json};
use tokio::time::timeout;

use crate::calls::{late, wait_of};
use crate::{CALL_LIMIT, facts, names};

/// A pod that is deleted by force ends two seconds later.
const DELETION_LIMIT: Duration = Duration::from_millis(1500);
/// A master exits even if the API server does not respond.
const CLOSE_TRIES: u32 = 3;
const CLOSE_PAUSE: Duration = Duration::from_secs(1);

/// Whether a user has deleted `pod`, the pod of this master, in contrast to the loss of its node, an
/// eviction or a preemption.
pub fn is_deleted<'a>(
    client: &'a Client,
    namespace: &'a str,
    job: &'a str,
    pod: &'a str,
) -> BoxFuture<'a, bool> {
    Box::pin(async move {
        let api: Api<Pod> = Api::namespaced(client.clone(), namespace);
        let masters = ListParams::default().labels(&names::role_selector(job, Role::Master));
        match timeout(DELETION_LIMIT, api.list(&masters)).await {
            Ok(Ok(masters)) => is_deletion(pod, &masters.items),
            Ok(Err(_)) | Err(_) => false,
        }
    })
}

fn is_deletion(mine: &str, masters: &[Pod]) -> bool {
    let state = |pod: &Pod| facts::of(pod).state();
    match masters.iter().find(|pod| pod.metadata.name.as_deref() == Some(mine)) {
        Some(pod) => state(pod) == PodState::Leaving(Ended::Deleted),
        // It was deleted by force; after the loss of its node, it has a successor.
        None => !masters.iter().any(|pod| state(pod) == PodState::Running),
    }
}

/// Keeps the Job of this training job's master from starting another one when this one exits.
pub fn close<'a>(
    client: &'a Client,
    namespace: &'a str,
    job: &'a str,
) -> BoxFuture<'a, Result<(), Wait>> {
    Box::pin(async move {
        let api: Api<Job> = Api::namespaced(client.clone(), namespace);
        let name = names::master(job);
        let mut closed = Ok(());
        for _ in 0..CLOSE_TRIES {
            closed = match timeout(CALL_LIMIT, close_once(&api, &name)).await {
                Ok(Ok(())) => return Ok(()),
                Ok(Err(error)) => Err(wait_of(&error)),
                Err(_) => Err(late()),
            };
            tokio::time::sleep(CLOSE_PAUSE).await;
        }
        closed
    })
}

async fn close_once(api: &Api<Job>, name: &str) -> Result<(), kube::Error> {
    let Some(job) = api.get_opt(name).await? else { return Ok(()) };
    let patch = Patch::Merge(last_failure(&job));
    api.patch(name, &PatchParams::default(), &patch).await.map(drop)
}

/// The patch with which the next failure of a Job is its last. With a lower limit, the Job would
/// delete the pod that still runs, with its log.
fn last_failure(job: &Job) -> Value {
    let n_failed = job.status.as_ref().and_then(|status| status.failed).unwrap_or(0);
    json!({ "spec": { "backoffLimit": n_failed } })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_a_user_does_is_a_deletion() {
        let pod = |name: &str, is_leaving: bool, conditions: Value| -> Pod {
            let deleted = is_leaving.then_some("2026-01-01T00:00:00Z");
            serde_json::from_value(json!({
                "metadata": { "name": name, "deletionTimestamp": deleted },
                "status": { "phase": "Running", "conditions": conditions },
            }))
            .unwrap()
        };
        let disrupted = |reason: &str| {
            let target = json!({ "type": "DisruptionTarget", "status": "True", "reason": reason });
            pod("me", true, json!([target]))
        };
        let successor = pod("other", false, json!([]));
        assert!(is_deletion("me", &[pod("me", true, json!([]))]));
        assert!(!is_deletion("me", &[pod("me", false, json!([]))]), "it crashed");
        assert!(is_deletion("me", &[]), "deleted by force");
        assert!(!is_deletion("me", &[successor]), "the node was lost, and has come back");
        for reason in ["DeletionByTaintManager", "EvictionByEvictionAPI", "PreemptionByScheduler"] {
            assert!(!is_deletion("me", &[disrupted(reason)]), "{reason}");
        }
    }

    #[test]
    fn earlier_losses_of_the_master_do_not_end_its_job() {
        let job = |status: Value| serde_json::from_value(json!({ "status": status })).unwrap();
        let limit = |status| last_failure(&job(status))["spec"]["backoffLimit"].clone();
        assert_eq!(limit(json!({ "failed": 3 })), 3);
        assert_eq!(limit(json!({})), 0);
    }
}
