// SPDX-License-Identifier: Apache-2.0
//! A worker or parameter server that has lost its master recreates the master's pod.
//!
//! The API server is not queried while the master responds. Several processes may try at once: a pod
//! name can exist only once, so one succeeds and the others find its pod.

use std::time::{Duration, Instant};

use edl_core::platform::InstanceId;
use edl_core::pod::{PodFacts, PodState};
use edl_core::spec::JobSpec;
use futures::future::BoxFuture;
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, Client};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::calls::{Answer, Pods};
use crate::facts::{self, NODE_MARGIN};
use crate::manifest::{self, PodExtras};

/// A master that was unreachable for less may come back by itself.
const PATIENCE: Duration = Duration::from_secs(3);
/// The interval of checks of the master's pod, while it does not respond.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
const MASTER: InstanceId = InstanceId::MASTER;

/// The process that rescues its master.
#[derive(Clone, Debug)]
pub struct Rescuer {
    pub spec: JobSpec,
    pub namespace: String,
    pub me: InstanceId,
}

/// What to do about a master that does not respond.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    /// It is starting, or will end by itself.
    Wait,
    /// There is none: create one.
    Make,
    /// It will not come back: delete it and create another.
    Replace,
    /// It has ended together with its job.
    Over,
}

/// Rescues the master whenever it was not `reachable` for a while, until `shutdown`, which it cancels
/// itself when the job is over.
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
            return std::future::pending().await; // The process is shutting down.
        }
        tokio::select! {
            _ = reachable.wait_for(|is_reachable| *is_reachable) => continue,
            () = tokio::time::sleep(PATIENCE) => {}
        }
        let mut leaving_since = None;
        while !*reachable.borrow() {
            if check(&pods, &rescuer, &mut leaving_since).await == Verdict::Over {
                tracing::info!("the master has finished; the job is over");
                return;
            }
            tokio::time::sleep(CHECK_INTERVAL).await;
        }
    }
}

/// Checks the master's pod once, and acts on the result.
async fn check(pods: &Pods, rescuer: &Rescuer, leaving_since: &mut Option<Instant>) -> Verdict {
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

/// What to do about a master's pod in this state.
fn judge(facts: Option<&PodFacts>, is_overdue: bool) -> Verdict {
    let Some(facts) = facts else { return Verdict::Make };
    match facts.state() {
        PodState::Ended(how) if how.job_end().is_some() => Verdict::Over,
        PodState::Ended(_) => Verdict::Replace,
        PodState::Leaving(_) if is_overdue => Verdict::Replace,
        PodState::Running if facts.is_node_silent => Verdict::Replace,
        PodState::Leaving(_) | PodState::Running | PodState::Waiting(_) => Verdict::Wait,
    }
}

async fn make(pods: &Pods, rescuer: &Rescuer) {
    // The owner of this process's pod also owns the master.
    let owner = match pods.get(rescuer.me).await {
        Ok(Some(mine)) => mine.metadata.owner_references.unwrap_or_default().into_iter().next(),
        Ok(None) => return, // This process's own pod is being deleted.
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
    use edl_core::pod::{Container, PodPhase};

    use super::*;

    fn ended(code: i32, reason: &str) -> PodFacts {
        let container = Container::Terminated { code, reason: reason.into() };
        let phase = if code == 0 { PodPhase::Succeeded } else { PodPhase::Failed };
        PodFacts { phase, container, ..PodFacts::default() }
    }

    #[test]
    fn a_master_is_made_again_unless_it_comes_back_or_its_job_is_over() {
        let running = PodFacts {
            phase: PodPhase::Running,
            container: Container::Running,
            ..PodFacts::default()
        };
        let leaving = PodFacts { is_leaving: true, ..running.clone() };
        let silent = PodFacts { is_node_silent: true, ..running.clone() };
        let table = [
            (None, false, Verdict::Make),
            (Some(PodFacts::default()), false, Verdict::Wait),
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
