// SPDX-License-Identifier: Apache-2.0
//! Which master a process follows, when it tries again, and when it gives up.
//!
//! Pure: callers report what happened and when. No I/O, no clock.

use std::time::Duration;

use edl_core::id::{RunId, Term};
use edl_core::spec::JobSpec;
use edl_core::time::Time;
use tonic::{Code, Status};

/// The delay before a retry starts here and doubles with every further failure.
const FIRST_RETRY: Duration = Duration::from_millis(50);
const LAST_RETRY: Duration = Duration::from_secs(1);
/// The shortest heartbeat interval that a master can request, in seconds.
const MIN_HEARTBEAT: f64 = 0.05;

/// Why a process gives up: no retry can help.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("could not reach the master for {} s: {reason}", limit.as_secs())]
    MasterLost { limit: Duration, reason: String },
    #[error("the master refused this process: {0}")]
    Refused(String),
    #[error("the master at `{0}` uses another job's key; check --master_addr and the job's key")]
    OtherKey(String),
    #[error("the master's address belongs to another job: run {theirs} instead of {ours}")]
    OtherRun { ours: RunId, theirs: RunId },
    #[error("the master sent a welcome with an invalid {0}")]
    Welcome(String),
}

/// Why there is no master to follow right now.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    #[error("{0}")]
    Broken(String),
    #[error("the server at `{0}` does not have the job's key")]
    Untrusted(String),
    #[error("this master has term {theirs}, but a master of term {ours} has replaced it")]
    LowerTerm { theirs: Term, ours: Term },
    #[error(transparent)]
    Final(#[from] Error),
}

/// The fields that the welcomes of all roles have in common.
#[derive(Clone, Copy, Debug)]
pub struct Welcome<'a> {
    pub term: u64,
    pub run: &'a str,
    pub spec_json: &'a str,
    pub heartbeat_secs: f64,
}

/// The job as its master describes it.
#[derive(Clone, Debug, PartialEq)]
pub struct JobInfo {
    pub run: RunId,
    pub term: Term,
    pub spec: JobSpec,
    pub heartbeat: Duration,
}

/// The master that a process follows, across all its connections.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Follow {
    /// How long to look for a master; `None` means forever.
    patience: Option<Duration>,
    /// From the last welcome that was accepted.
    pub(super) job: Option<JobInfo>,
    pub(super) is_following: bool,
    /// Failures since that welcome.
    pub(super) n_failures: u32,
    last_followed: Time,
}

impl Follow {
    #[must_use]
    pub fn new(patience: Option<Duration>) -> Self {
        Self { patience, ..Self::default() }
    }

    /// The job, once a master has sent a welcome.
    #[must_use]
    pub fn job(&self) -> Option<&JobInfo> {
        self.job.as_ref()
    }

    #[must_use]
    pub fn is_following(&self) -> bool {
        self.is_following
    }

    /// Follows the master that sent `welcome`, unless it belongs to another run or was replaced.
    pub fn welcome(&mut self, welcome: Welcome<'_>) -> Result<&JobInfo, Failure> {
        let invalid_spec = |why: String| Error::Welcome(format!("job description: {why}"));
        let run = RunId::parse(welcome.run).ok_or_else(|| Error::Welcome("run ID".into()))?;
        let term = Term(welcome.term);
        if let Some(JobInfo { run: our_run, term: our_term, .. }) = self.job {
            // Terms can be compared only within a run.
            if run != our_run {
                return Err(Error::OtherRun { ours: our_run, theirs: run }.into());
            }
            if term < our_term {
                return Err(Failure::LowerTerm { theirs: term, ours: our_term });
            }
        }
        let spec: JobSpec = serde_json::from_str(welcome.spec_json)
            .map_err(|error| invalid_spec(error.to_string()))?;
        spec.check().map_err(|error| invalid_spec(error.to_string()))?;
        let heartbeat = Duration::try_from_secs_f64(welcome.heartbeat_secs.max(MIN_HEARTBEAT))
            .map_err(|_| Error::Welcome("heartbeat interval".into()))?;
        (self.is_following, self.n_failures) = (true, 0);
        Ok(self.job.insert(JobInfo { run, term, spec, heartbeat }))
    }

    /// Returns the delay before the next attempt, or why there must not be one.
    pub fn failed(&mut self, failure: Failure, now: Time) -> Result<Duration, Error> {
        if std::mem::take(&mut self.is_following) {
            self.last_followed = now;
        }
        let reason = failure.to_string();
        match failure {
            Failure::Final(error) => return Err(error),
            // Later on, another program may have the port of a master that restarts.
            Failure::Untrusted(at) if self.job.is_none() => return Err(Error::OtherKey(at)),
            Failure::Untrusted(_) | Failure::LowerTerm { .. } | Failure::Broken(_) => {}
        }
        if let Some(limit) = self.patience.filter(|limit| now.since(self.last_followed) >= *limit) {
            return Err(Error::MasterLost { limit, reason });
        }
        let delay = FIRST_RETRY * (1 << self.n_failures.min(8));
        self.n_failures = self.n_failures.saturating_add(1);
        Ok(delay.min(LAST_RETRY))
    }
}

impl From<Status> for Failure {
    fn from(status: Status) -> Self {
        let is_final = matches!(
            status.code(),
            Code::InvalidArgument
                | Code::FailedPrecondition
                | Code::PermissionDenied
                | Code::Unauthenticated
                | Code::Unimplemented
        );
        match is_final {
            true => Error::Refused(status.message().into()).into(),
            false => Self::Broken(format!("{}: {}", status.code(), status.message())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(300);

    fn welcome(term: u64) -> Welcome<'static> {
        let run = "00112233445566778899aabbccddeeff";
        Welcome { term, run, spec_json: r#"{"job_name": "toy"}"#, heartbeat_secs: 0.5 }
    }

    /// A process that follows a master of term 3.
    fn following() -> Follow {
        let mut follow = Follow::new(Some(LIMIT));
        assert_eq!(follow.welcome(welcome(3)).unwrap().heartbeat, Duration::from_millis(500));
        follow
    }

    #[test]
    fn a_master_of_a_lower_term_is_not_followed() {
        let mut follow = following();
        let failure = follow.welcome(welcome(2)).unwrap_err();
        assert_eq!(failure, Failure::LowerTerm { theirs: Term(2), ours: Term(3) });
        follow.failed(failure, Time::ZERO).unwrap();
        assert!(!follow.is_following);
        for term in [3, 4] {
            assert_eq!(follow.welcome(welcome(term)).unwrap().term, Term(term));
        }
        assert!(follow.is_following && follow.welcome(welcome(3)).is_err());
    }

    #[test]
    fn an_invalid_welcome_or_one_of_another_run_is_final() {
        for (welcome, error) in [
            (Welcome { run: "7", ..welcome(3) }, "invalid run ID"),
            (Welcome { run: &"f".repeat(32), ..welcome(2) }, "belongs to another job"),
            (Welcome { spec_json: "{", ..welcome(3) }, "invalid job description"),
            (Welcome { spec_json: "{}", ..welcome(3) }, "invalid job description"),
            (Welcome { heartbeat_secs: f64::INFINITY, ..welcome(3) }, "invalid heartbeat"),
        ] {
            let Err(Failure::Final(it)) = following().welcome(welcome) else { panic!("{error}") };
            assert!(it.to_string().contains(error), "{it}");
        }
    }

    #[test]
    fn only_a_refusal_is_final() {
        for code in (0..=16).map(Code::from) {
            let is_final = matches!(Status::new(code, "").into(), Failure::Final(_));
            assert_eq!(is_final, [3, 7, 9, 12, 16].contains(&i32::from(code)), "{code:?}");
        }
    }

    #[test]
    fn another_key_is_final_only_before_the_first_welcome() {
        let untrusted = || Failure::Untrusted("a:1".into());
        let first = Follow::new(None).failed(untrusted(), Time::ZERO);
        assert_eq!(first, Err(Error::OtherKey("a:1".into())));
        assert_eq!(following().failed(untrusted(), Time::ZERO), Ok(FIRST_RETRY));
    }

    #[test]
    fn retries_slow_down_until_the_next_welcome_or_the_limit() {
        let mut follow = following();
        let failed = |follow: &mut Follow, secs| {
            let now = Time::since_origin(Duration::from_secs(secs));
            follow.failed(Failure::Broken("broken".into()), now).map(|delay| delay.as_millis())
        };
        for delay in [50, 100, 200, 400, 800, 1000, 1000] {
            assert_eq!(failed(&mut follow, 0), Ok(delay));
        }
        follow.welcome(welcome(3)).unwrap();
        assert_eq!(failed(&mut follow, 1000), Ok(50), "the master was there until now");
        assert_eq!(failed(&mut follow, 1299), Ok(100));
        let error = Error::MasterLost { limit: LIMIT, reason: "broken".into() };
        assert_eq!(failed(&mut follow, 1300), Err(error));
        assert_eq!(failed(&mut Follow::new(None), 1300), Ok(50), "no limit");
    }
}
