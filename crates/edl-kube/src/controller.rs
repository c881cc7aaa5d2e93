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
/// How long another master that is being deleted may take to be gone.
const LEAVING_LIMIT: Duration = Duration::from_secs(15);
const LEAVING_PAUSE: Duration = Duration::from_millis(300);

/// The grace period of `pod`, the pod of this master, if a user has deleted it. The loss of its node, an
/// eviction and a preemption do not count.
pub fn deletion<'a>(
    client: &'a Client,
    namespace: &'a str,
    job: &'a str,
    pod: &'a str,
) -> BoxFuture<'a, Option<Duration>> {
    Box::pin(async move {
        let api: Api<Pod> = Api::namespaced(client.clone(), namespace);
        let masters = ListParams::default().labels(&names::role_selector(job, Role::Master));
        match timeout(DELETION_LIMIT, api.list(&masters)).await {
            Ok(Ok(masters)) => grace_of(pod, &masters.items),
            Ok(Err(_)) | Err(_) => None,
        }
    })
}

fn grace_of(mine: &str, masters: &[Pod]) -> Option<Duration> {
    let state = |pod: &Pod| facts::of(pod).state();
    match masters.iter().find(|pod| pod.metadata.name.as_deref() == Some(mine)) {
        Some(pod) => (state(pod) == PodState::Leaving(Ended::Deleted)).then(|| facts::grace(pod)),
        // It was deleted by force; after the loss of its node, it has a successor.
        None => {
            let has_successor = masters.iter().any(|pod| state(pod) == PodState::Running);
            (!has_successor).then_some(Duration::ZERO)
        }
    }
}

/// Keeps the Job of this training job's master, which runs in `pod`, from starting another one when
/// this one exits.
pub fn close<'a>(
    client: &'a Client,
    namespace: &'a str,
    job: &'a str,
    pod: &'a str,
) -> BoxFuture<'a, Result<(), Wait>> {
    Box::pin(async move {
        let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
        // Without an answer, the Job may delete this pod, with its log.
        let _ = timeout(LEAVING_LIMIT, wait_for_others(&pods, job, pod)).await;
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

/// Waits until the Job has counted the masters that are being deleted.
async fn wait_for_others(pods: &Api<Pod>, job: &str, mine: &str) {
    let masters = ListParams::default().labels(&names::role_selector(job, Role::Master));
    while let Ok(masters) = pods.list(&masters).await
        && is_other_leaving(mine, &masters.items)
    {
        tokio::time::sleep(LEAVING_PAUSE).await;
    }
}

fn is_other_leaving(mine: &str, masters: &[Pod]) -> bool {
    let is_leaving = |pod: &Pod| pod.metadata.deletion_timestamp.is_some();
    masters.iter().any(|pod| pod.metadata.name.as_deref() != Some(mine) && is_leaving(pod))
}

async fn close_once(api: &Api<Job>, name: &str) -> Result<(), kube::Error> {
    let Some(job) = api.get_opt(name).await? else { return Ok(()) };
    let patch = Patch::Merge(last_failure(&job));
    api.patch(name, &PatchParams::default(), &patch).await.map(drop)
}

/// The patch with which the next failure of a Job is its last. With a lower limit, the Job would
/// delete the pod that still runs, with its log.
fn last_failure(job: &Job) -> Value {
    let n_failed = job.status.as_ref().map_or(0, |status| {
        let uncounted = status.uncounted_terminated_pods.as_ref();
        let uncounted = uncounted.and_then(|pods| pods.failed.as_ref()).map_or(0, Vec::len);
        status.failed.unwrap_or(0).saturating_add(i32::try_from(uncounted).unwrap_or(i32::MAX))
    });
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
                "metadata": {
                    "name": name,
                    "deletionTimestamp": deleted,
                    "deletionGracePeriodSeconds": is_leaving.then_some(120),
                },
                "status": { "phase": "Running", "conditions": conditions },
            }))
            .unwrap()
        };
        let disrupted = |reason: &str| {
            let target = json!({ "type": "DisruptionTarget", "status": "True", "reason": reason });
            pod("me", true, json!([target]))
        };
        let successor = pod("other", false, json!([]));
        let patched = Some(Duration::from_secs(120));
        assert_eq!(grace_of("me", &[pod("me", true, json!([]))]), patched);
        assert_eq!(grace_of("me", &[pod("me", false, json!([]))]), None, "it crashed");
        assert_eq!(grace_of("me", &[]), Some(Duration::ZERO), "deleted by force");
        let lost = grace_of("me", std::slice::from_ref(&successor));
        assert_eq!(lost, None, "the node was lost, and has come back");
        assert!(is_other_leaving("other", &[pod("me", true, json!([])), successor.clone()]));
        assert!(!is_other_leaving("me", &[pod("me", true, json!([])), successor]));
        for reason in ["DeletionByTaintManager", "EvictionByEvictionAPI", "PreemptionByScheduler"] {
            assert_eq!(grace_of("me", &[disrupted(reason)]), None, "{reason}");
        }
    }

    #[test]
    fn earlier_losses_of_the_master_do_not_end_its_job() {
        let job = |status: Value| serde_json::from_value(json!({ "status": status })).unwrap();
        let limit = |status| last_failure(&job(status))["spec"]["backoffLimit"].clone();
        assert_eq!(limit(json!({ "failed": 3 })), 3);
        assert_eq!(limit(json!({})), 0);
        let uncounted = json!({ "failed": 1, "uncountedTerminatedPods": { "failed": ["uid"] } });
        assert_eq!(limit(uncounted), 2);
    }
}
