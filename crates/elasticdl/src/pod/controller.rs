// SPDX-License-Identifier: Apache-2.0
//! The Kubernetes Job that runs the master, as recorded in a file in the job's folder. It shows
//! whether this Job has restarted the master, or a user or the operator has started it.

use std::cell::Cell;
use std::time::{Duration, Instant};

use edl_core::job::JobState;
use edl_core::job_dir::JobDir;
use edl_core::spec::RestartPolicy;
use edl_kube::{controller, inside, names};
use serde::{Deserialize, Serialize};

use super::{Pod, variable};
use crate::exit::Exit;
use crate::jobs::{read_json, write_json};

/// Why this master was started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Start {
    /// By a user or the operator.
    Request,
    /// The Job has replaced another master.
    Loss,
    /// The Job has replaced a master whose pod a user had deleted.
    Deletion,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Record {
    uid: String,
    /// Whether a user has deleted the pod of its last master.
    was_deleted: bool,
    /// Set while this master still runs and may save the job: it exits within this time.
    #[serde(default)]
    leaves_within_secs: Option<u64>,
}

impl Record {
    /// Whether a new master that has waited so long waits for this one.
    fn is_awaited(&self, waited: Duration) -> bool {
        let limit = |secs| Duration::from_secs(secs) + LEAVING_MARGIN;
        self.leaves_within_secs.is_some_and(|secs| waited < limit(secs))
    }
}

/// A new master waits for a leaving one a little longer than that one takes.
const LEAVING_MARGIN: Duration = Duration::from_secs(7);
const LEAVING_PAUSE: Duration = Duration::from_millis(200);

/// The Job of this master; none if it runs outside of one.
pub(super) struct Controller {
    uid: Option<String>,
    dir: JobDir,
    /// Whether the record is that of this master.
    has_begun: Cell<bool>,
}

impl Controller {
    pub(super) fn of_environment(dir: &JobDir) -> Self {
        Self::new(dir, variable(names::CONTROLLER_VARIABLE).ok())
    }

    fn new(dir: &JobDir, uid: Option<String>) -> Self {
        Self { uid, dir: dir.clone(), has_begun: Cell::new(false) }
    }

    /// Waits while the master before is leaving and may save the job.
    pub(super) async fn wait_for_last(&self) {
        let start = Instant::now();
        if self.read().is_awaited(start.elapsed()) {
            tracing::info!("waiting for the previous master, which may be saving the job");
        }
        while self.read().is_awaited(start.elapsed()) {
            tokio::time::sleep(LEAVING_PAUSE).await;
        }
    }

    /// Why this master was started. It is the last master from now on.
    pub(super) fn begin(&self) -> anyhow::Result<Start> {
        let Some(uid) = &self.uid else { return Ok(Start::Request) };
        let before = self.read();
        self.write(Record { uid: uid.clone(), ..Record::default() })?;
        self.has_begun.set(true);
        Ok(start(&before, uid))
    }

    /// The grace period of this master's pod, if a user has deleted the pod.
    pub(super) async fn deletion(&self, pod: &Pod) -> Option<Duration> {
        match inside::connect().await {
            Ok(client) if self.uid.is_some() => {
                let job = &pod.spec.job_name;
                controller::deletion(&client, &pod.namespace, job, &pod.name).await
            }
            Ok(_) | Err(_) => None,
        }
    }

    /// A user has deleted the pod of this master. The next one waits until this one has left, which it
    /// does within this time.
    pub(super) fn leave(&self, within: Duration) {
        self.record_deletion(Some(within.as_secs()));
    }

    /// This master, whose pod a user has deleted, is about to exit.
    pub(super) fn left(&self) {
        self.record_deletion(None);
    }

    /// Keeps the Job from starting another master after `exit`, if that is the job's end.
    pub(super) async fn close(&self, pod: &Pod, exit: Exit) {
        let is_end = exit.job_end().is_some_and(|end| !is_retried(end, pod.spec.restart_policy));
        if self.uid.is_none() || exit == Exit::Ok || !is_end {
            return;
        }
        let closed = match inside::connect().await {
            Ok(client) => {
                let job = &pod.spec.job_name;
                let closed = controller::close(&client, &pod.namespace, job, &pod.name).await;
                closed.map_err(|why| why.to_string())
            }
            Err(error) => Err(error.to_string()),
        };
        if let Err(why) = closed {
            tracing::warn!(
                why,
                "cannot end this master's Kubernetes Job; it will start another master"
            );
        }
    }

    fn read(&self) -> Record {
        read_json(&self.dir.controller()).unwrap_or_default()
    }

    fn record_deletion(&self, leaves_within_secs: Option<u64>) {
        // A master that still waits for the one before must not speak for it.
        let Some(uid) = self.uid.clone().filter(|_| self.has_begun.get()) else { return };
        if let Err(error) = self.write(Record { uid, was_deleted: true, leaves_within_secs }) {
            tracing::warn!("{error:#}");
        }
    }

    fn write(&self, record: Record) -> anyhow::Result<()> {
        write_json(&self.dir.controller(), &record)
    }
}

fn start(before: &Record, uid: &str) -> Start {
    match before.uid == uid {
        false => Start::Request,
        true if before.was_deleted => Start::Deletion,
        true => Start::Loss,
    }
}

/// Whether a job that ended like this is started again.
pub(super) fn is_retried(end: JobState, policy: RestartPolicy) -> bool {
    end == JobState::Failed && policy != RestartPolicy::Never
}

#[cfg(test)]
mod tests {
    use super::*;

    fn controller(dir: &JobDir, uid: Option<&str>) -> Controller {
        Controller::new(dir, uid.map(str::to_owned))
    }

    #[test]
    fn a_master_knows_whether_its_job_was_started_again_or_a_pod_was_lost() {
        let folder = tempfile::tempdir().unwrap();
        let dir = JobDir::new(folder.path());
        let begin = |uid| controller(&dir, uid).begin().unwrap();
        assert_eq!(begin(Some("a")), Start::Request);
        assert_eq!(begin(Some("a")), Start::Loss);
        let deleted = Record { uid: "a".into(), was_deleted: true, leaves_within_secs: None };
        controller(&dir, Some("a")).write(deleted.clone()).unwrap();
        assert_eq!(begin(Some("a")), Start::Deletion);
        assert_eq!(begin(Some("a")), Start::Loss, "only the last master counts");
        controller(&dir, Some("a")).write(deleted).unwrap();
        assert_eq!(begin(Some("b")), Start::Request, "the job was resumed");
        assert_eq!(begin(None), Start::Request);
    }

    #[tokio::test]
    async fn a_new_master_waits_for_one_that_leaves_but_not_forever() {
        let folder = tempfile::tempdir().unwrap();
        let dir = JobDir::new(folder.path());
        let (last, next) = (controller(&dir, Some("a")), controller(&dir, Some("a")));
        let is_awaited = |waited| next.read().is_awaited(waited);
        assert!(!is_awaited(Duration::ZERO), "there was none before");
        last.begin().unwrap();
        assert!(!is_awaited(Duration::ZERO), "it was lost");
        let within = Duration::from_secs(118);
        last.leave(within);
        assert!(is_awaited(within) && !is_awaited(within + LEAVING_MARGIN));
        // A master that is deleted while it waits does not speak for the one before.
        next.left();
        assert!(is_awaited(Duration::ZERO));
        let mut wait = std::pin::pin!(next.wait_for_last());
        tokio::select! {
            biased;
            () = &mut wait => panic!("the last one may save the job"),
            () = std::future::ready(()) => {}
        }
        last.left();
        wait.await;
        assert_eq!(next.begin().unwrap(), Start::Deletion, "unless it has ended the job");
    }

    #[test]
    fn only_failures_are_retried_and_only_on_request() {
        use RestartPolicy::{Always, Never, OnFailure};
        for (policy, expected) in [(Never, false), (OnFailure, true), (Always, true)] {
            assert_eq!(is_retried(JobState::Failed, policy), expected);
            assert!(!is_retried(JobState::Stopped, policy));
            assert!(!is_retried(JobState::Succeeded, policy));
        }
    }
}
