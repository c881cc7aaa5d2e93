// SPDX-License-Identifier: Apache-2.0
//! A worker or parameter server that has lost its master makes the master's pod again.
//!
//! Nothing is asked of the API server while the master answers. Several of them may try at once:
//! a name can be given once, so one of them succeeds and the others find its pod.

use std::time::{Duration, Instant};

use edl_core::platform::{Ended, InstanceId};
use edl_core::pod::{Facts, State};
use edl_core::spec::JobSpec;
use futures::future::BoxFuture;
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, Client};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::calls::{Answer, Pods};
use crate::facts::{self, NODE_MARGIN};
use crate::manifest::{self, PodExtras};

/// A master that was away for less is on its way back by itself.
const PATIENCE: Duration = Duration::from_secs(3);
/// Between two looks at the master's pod, while it does not answer.
const LOOK_EVERY: Duration = Duration::from_secs(1);
const MASTER: InstanceId = InstanceId::MASTER;
/// How a master ends when its job is over: done, failed, stopped.
const JOB_OVER: [i32; 3] = [0, 1, 3];

/// Who may rescue a master.
#[derive(Clone, Debug)]
pub struct Rescuer {
    pub spec: JobSpec,
    pub namespace: String,
    pub me: InstanceId,
}

/// What is to be done about a master that does not answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    /// It is on its way, or will go by itself.
    Wait,
    /// There is none: make one.
    Make,
    /// It will not come back: remove it and make another.
    Replace,
    /// It has ended together with its job.
    Over,
}

/// Rescues the master whenever it was not `reachable` for long, until `shutdown`, which it cancels
/// itself if it finds that the job is over.
pub fn run(
    client: Client,
    rescuer: Rescuer,
    reachable: watch::Receiver<bool>,
    shutdown: CancellationToken,
) -> BoxFuture<'static, ()> {
    Box::pin(async move {
        tokio::select! {
            () = shutdown.cancelled() => {}
            () = watch_over(client, rescuer, reachable) => shutdown.cancel(),
        }
    })
}

/// Ends when the job is over.
async fn watch_over(client: Client, rescuer: Rescuer, mut reachable: watch::Receiver<bool>) {
    let api: Api<Pod> = Api::namespaced(client, &rescuer.namespace);
    let pods = Pods::new(api, rescuer.spec.clone());
    loop {
        if reachable.wait_for(|is_reachable| !is_reachable).await.is_err() {
            return std::future::pending().await; // Nobody is left who could lose it.
        }
        tokio::select! {
            _ = reachable.wait_for(|is_reachable| *is_reachable) => continue,
            () = tokio::time::sleep(PATIENCE) => {}
        }
        let mut leaving_since = None;
        while !*reachable.borrow() {
            if look(&pods, &rescuer, &mut leaving_since).await == Verdict::Over {
                tracing::info!("the master has finished; the job is over");
                return;
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }
}

/// Looks at the master's pod once, and does what is to be done.
async fn look(pods: &Pods, rescuer: &Rescuer, leaving_since: &mut Option<Instant>) -> Verdict {
    let found = match pods.get(MASTER).await {
        Ok(found) => found,
        Err(why) => {
            tracing::warn!(%why, "cannot read the master's pod");
            return Verdict::Wait;
        }
    };
    let facts = found.as_ref().map(facts::of);
    if facts.as_ref().is_some_and(|facts| facts.is_leaving) {
        leaving_since.get_or_insert_with(Instant::now);
    }
    let limit = found.as_ref().map(|pod| facts::grace(pod) + NODE_MARGIN);
    let is_overdue = leaving_since.zip(limit).is_some_and(|(since, limit)| since.elapsed() > limit);
    let verdict = judge(facts.as_ref(), is_overdue);
    match (verdict, found) {
        (Verdict::Replace, Some(pod)) => {
            let uid = pod.metadata.uid.unwrap_or_default();
            tracing::warn!(uid, "removing the master's pod, which will not recover");
            let deleted = pods.clone().delete(MASTER, uid, Duration::ZERO).await;
            if let Answer::NotDeleted { why, .. } = deleted {
                tracing::warn!(%why, "cannot remove the master's pod");
                return verdict;
            }
            make(pods, rescuer).await;
        }
        (Verdict::Make, _) => make(pods, rescuer).await,
        (Verdict::Wait | Verdict::Over | Verdict::Replace, _) => {}
    }
    verdict
}

/// Whether a master that ended with this code has brought its job to an end.
#[must_use]
pub fn is_over(code: i32) -> bool {
    JOB_OVER.contains(&code)
}

/// What the state of a master's pod means to those whom it does not answer.
fn judge(facts: Option<&Facts>, is_overdue: bool) -> Verdict {
    let Some(facts) = facts else { return Verdict::Make };
    match facts.state() {
        State::Ended(Ended::Exit(code)) if is_over(code) => Verdict::Over,
        State::Ended(_) => Verdict::Replace,
        State::Leaving(_) if is_overdue => Verdict::Replace,
        State::Running if facts.is_node_silent => Verdict::Replace,
        State::Leaving(_) | State::Running | State::Waiting(_) => Verdict::Wait,
    }
}

async fn make(pods: &Pods, rescuer: &Rescuer) {
    // What owns us owns the master, too.
    let owner = match pods.get(rescuer.me).await {
        Ok(Some(mine)) => mine.metadata.owner_references.unwrap_or_default().into_iter().next(),
        Ok(None) => return, // We are being deleted ourselves.
        Err(why) => {
            tracing::warn!(%why, "cannot read the pod of this process");
            return;
        }
    };
    let pod =
        match manifest::pod(&rescuer.spec, MASTER, &PodExtras { owner, ..PodExtras::default() }) {
            Ok(pod) => pod,
            Err(error) => {
                tracing::warn!(%error, "cannot build the master's pod from the job description");
                return;
            }
        };
    match pods.post(&pod).await {
        Ok(_) => tracing::warn!("the master is gone; recreated its pod"),
        Err(None) => tracing::info!("the master's pod was already recreated"),
        Err(Some(why)) => tracing::warn!(%why, "cannot recreate the master's pod"),
    }
}

#[cfg(test)]
mod tests {
    use edl_core::pod::{Container, Phase};

    use super::*;

    fn ended(code: i32, reason: &str) -> Facts {
        let container = Container::Terminated { code, reason: reason.into() };
        let phase = if code == 0 { Phase::Succeeded } else { Phase::Failed };
        Facts { phase, container, ..Facts::default() }
    }

    #[test]
    fn a_master_is_made_again_unless_it_comes_back_or_its_job_is_over() {
        let running =
            Facts { phase: Phase::Running, container: Container::Running, ..Facts::default() };
        let leaving = Facts { is_leaving: true, ..running.clone() };
        let silent = Facts { is_node_silent: true, ..running.clone() };
        let table = [
            (None, false, Verdict::Make),
            (Some(Facts::default()), false, Verdict::Wait),
            (Some(running), false, Verdict::Wait),
            (Some(silent), false, Verdict::Replace),
            (Some(leaving.clone()), false, Verdict::Wait),
            (Some(leaving), true, Verdict::Replace),
            (Some(ended(0, "Completed")), false, Verdict::Over),
            (Some(ended(1, "Error")), false, Verdict::Over),
            (Some(ended(3, "Error")), false, Verdict::Over),
            (Some(ended(70, "Error")), false, Verdict::Replace),
            (Some(ended(137, "Error")), false, Verdict::Replace),
            (Some(ended(137, "OOMKilled")), false, Verdict::Replace),
        ];
        for (facts, is_overdue, expected) in table {
            assert_eq!(judge(facts.as_ref(), is_overdue), expected, "{facts:?}");
        }
    }
}
