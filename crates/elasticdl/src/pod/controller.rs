// SPDX-License-Identifier: Apache-2.0
//! The Kubernetes Job that runs the master, as a file in the job's folder remembers it: it tells a
//! master that this Job started again from one that a user or the operator has started.

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
}

/// The Job of this master; none if it runs outside of one.
pub(super) struct Controller {
    uid: Option<String>,
    dir: JobDir,
}

impl Controller {
    pub(super) fn of_environment(dir: &JobDir) -> Self {
        Self { uid: variable(names::CONTROLLER_VARIABLE).ok(), dir: dir.clone() }
    }

    /// Why this master was started. It is the last master from now on.
    pub(super) fn begin(&self) -> anyhow::Result<Start> {
        let Some(uid) = &self.uid else { return Ok(Start::Request) };
        let before = read_json(&self.dir.controller()).unwrap_or_default();
        self.write(Record { uid: uid.clone(), was_deleted: false })?;
        Ok(start(&before, uid))
    }

    /// Remembers it if a user has deleted the pod of this master, which is about to exit.
    pub(super) async fn check_deletion(&self, pod: &Pod) {
        let Some(uid) = &self.uid else { return };
        let Ok(client) = inside::connect().await else { return };
        if controller::is_deleted(&client, &pod.namespace, &pod.spec.job_name, &pod.name).await {
            let written = self.write(Record { uid: uid.clone(), was_deleted: true });
            if let Err(error) = written {
                tracing::warn!("{error:#}");
            }
        }
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
                let closed = controller::close(&client, &pod.namespace, job).await;
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
        Controller { uid: uid.map(str::to_owned), dir: dir.clone() }
    }

    #[test]
    fn a_master_knows_whether_its_job_was_started_again_or_a_pod_was_lost() {
        let folder = tempfile::tempdir().unwrap();
        let dir = JobDir::new(folder.path());
        let begin = |uid| controller(&dir, uid).begin().unwrap();
        assert_eq!(begin(Some("a")), Start::Request);
        assert_eq!(begin(Some("a")), Start::Loss);
        let deleted = Record { uid: "a".into(), was_deleted: true };
        controller(&dir, Some("a")).write(deleted.clone()).unwrap();
        assert_eq!(begin(Some("a")), Start::Deletion);
        assert_eq!(begin(Some("a")), Start::Loss, "only the last master counts");
        controller(&dir, Some("a")).write(deleted).unwrap();
        assert_eq!(begin(Some("b")), Start::Request, "the job was resumed");
        assert_eq!(begin(None), Start::Request);
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
