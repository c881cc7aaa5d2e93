// SPDX-License-Identifier: Apache-2.0
//! Why a job failed or stalled: the first cause in the order of time, the process, its stack, the
//! records, and what to do.
//!
//! A failure has many symptoms: work fails again elsewhere, other processes lose their partner, the
//! job gives up. [`verdict`] starts at the end and goes back to the event that all this began with.
//! Others gather the facts; nothing is read here.

use serde::{Deserialize, Serialize};

use crate::job::{EventKind, JobState};
use crate::named::named;
use crate::platform::{Ended, InstanceId, InstanceState};
use crate::spec::JobType;

mod advice;
mod cause;
mod stack;

/// What is known of a job.
#[derive(Clone, Debug, Default)]
pub struct Facts {
    /// What commands find the job by.
    pub job: String,
    pub job_type: JobType,
    pub state: JobState,
    /// Why it ended, or what keeps it from working.
    pub reason: String,
    pub step: u64,
    pub last_checkpoint: String,
    /// In Unix time, like all times here.
    pub now_secs: f64,
    /// The events of this run, oldest first.
    pub events: Vec<Noted>,
    /// The processes that ended, oldest first, as far as a supervisor recorded them.
    pub exits: Vec<Exited>,
    /// Errors and stacks in the logs, the oldest of each process first.
    pub logged: Vec<Logged>,
    pub processes: Vec<ProcessNow>,
}

/// An entry of the job's events.
#[derive(Clone, Debug, PartialEq)]
pub struct Noted {
    pub at_secs: f64,
    pub kind: EventKind,
    pub text: String,
}

/// The end of a process, as its supervisor records it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Exited {
    pub at_secs: f64,
    pub instance: InstanceId,
    pub pid: u32,
    pub how: Ended,
    /// The supervisor asked it to exit.
    pub was_asked: bool,
    /// The supervisor ended the job because of it.
    pub ended_job: bool,
}

/// An error or a stack in the log of a process.
#[derive(Clone, Debug, PartialEq)]
pub struct Logged {
    pub at_secs: f64,
    pub instance: InstanceId,
    /// All its lines.
    pub text: String,
}

/// A process as the status shows it.
#[derive(Clone, Debug, PartialEq)]
pub struct ProcessNow {
    pub instance: InstanceId,
    pub state: InstanceState,
    /// Why it waits, or what it does without progress.
    pub why: String,
}

named! {
    /// What is wrong.
    Cause {
        /// The job runs.
        #[default]
        Healthy = "healthy",
        Succeeded = "succeeded",
        Stopped = "stopped",
        /// All processes are gone at once.
        Interrupted = "interrupted",
        CodeError = "code_error",
        Panic = "panic",
        Crash = "crash",
        Hang = "hang",
        NonFinite = "nonfinite",
        BadSettings = "bad_settings",
        BadData = "bad_data",
        DataChanged = "data_changed",
        DiskFull = "disk_full",
        NoAccess = "no_access",
        PortInUse = "port_in_use",
        Killed = "killed",
        OutOfMemory = "out_of_memory",
        DamagedCheckpoint = "damaged_checkpoint",
        NoCapacity = "no_capacity",
        Frozen = "frozen",
        Disconnected = "disconnected",
        BitsDiffer = "bits_differ",
        /// Processes wait for each other.
        Stalled = "stalled",
        Unknown = "unknown",
    }

    /// What the user should do.
    Advice {
        #[default]
        None = "none",
        Restart = "restart",
        FixCode = "fix_code",
        FixData = "fix_data",
        FixCluster = "fix_cluster",
    }
}

/// The answer.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Verdict {
    pub cause: Cause,
    pub advice: Advice,
    /// One sentence.
    pub verdict: String,
    /// The process in which it began.
    #[serde(serialize_with = "as_name")]
    pub process: Option<InstanceId>,
    pub at_secs: Option<f64>,
    pub step: u64,
    /// The batch or shard with its records.
    pub records: Option<String>,
    pub stack: Option<String>,
    /// What it is based on, in the order of time.
    pub evidence: Vec<Evidence>,
    /// What to do, with the next command.
    pub next: String,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Evidence {
    pub at_secs: Option<f64>,
    pub text: String,
}

/// The first cause.
#[derive(Clone, Debug, Default, PartialEq)]
struct Found {
    cause: Cause,
    process: Option<InstanceId>,
    at_secs: Option<f64>,
    text: String,
    evidence: Vec<Evidence>,
}

/// What is wrong with a job, and what to do about it.
#[must_use]
pub fn verdict(facts: &Facts) -> Verdict {
    let found = cause::first(facts);
    let advice = found.cause.advice();
    let stack = match advice {
        Advice::None | Advice::Restart => None,
        Advice::FixCode | Advice::FixData | Advice::FixCluster => stack::of(facts, &found),
    };
    Verdict {
        cause: found.cause,
        advice,
        verdict: advice::sentence(&found),
        process: found.process,
        at_secs: found.at_secs,
        step: facts.step,
        records: cause::records(&found, &facts.reason),
        stack,
        next: advice::next(facts, found.cause),
        evidence: found.evidence,
    }
}

fn as_name<S: serde::Serializer>(process: &Option<InstanceId>, to: S) -> Result<S::Ok, S::Error> {
    process.map(|process| process.to_string()).serialize(to)
}

#[cfg(test)]
mod tests;
