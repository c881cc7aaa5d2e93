// SPDX-License-Identifier: Apache-2.0
//! The text of a verdict: its sentence, and what to do.

use super::cause::first_line;
use super::{Advice, Cause, Facts, Found};

impl Cause {
    /// What helps against it.
    #[must_use]
    pub fn advice(self) -> Advice {
        match self {
            Self::Healthy | Self::Succeeded => Advice::None,
            Self::Stopped | Self::Interrupted | Self::Stalled | Self::Unknown => Advice::Restart,
            Self::CodeError
            | Self::Panic
            | Self::Crash
            | Self::Hang
            | Self::NonFinite
            | Self::BadSettings => Advice::FixCode,
            Self::BadData | Self::DataChanged => Advice::FixData,
            Self::DiskFull
            | Self::NoAccess
            | Self::PortInUse
            | Self::Killed
            | Self::OutOfMemory
            | Self::DamagedCheckpoint
            | Self::NoCapacity
            | Self::Frozen
            | Self::Disconnected
            | Self::BitsDiffer => Advice::FixCluster,
        }
    }
}

impl Advice {
    /// For people.
    #[must_use]
    pub fn title(self) -> &'static str {
        match self {
            Self::None => "nothing to do",
            Self::Restart => "restart",
            Self::FixCode => "fix the code",
            Self::FixData => "fix the data",
            Self::FixCluster => "fix the machine or cluster",
        }
    }
}

/// The verdict in one sentence.
pub(super) fn sentence(found: &Found) -> String {
    let process = found.process.map_or_else(|| "a process".to_owned(), |p| p.to_string());
    let what = match found.cause {
        Cause::Healthy => "the job is running and making progress".to_owned(),
        Cause::Succeeded => "the job succeeded".into(),
        Cause::Stopped => "the job was stopped".into(),
        Cause::Interrupted => "all processes of the job are gone".into(),
        Cause::CodeError => format!("the model's code failed on {process}"),
        Cause::Panic => format!("{process} panicked"),
        Cause::Crash => format!("{process} crashed"),
        Cause::Hang => format!("{process} hung"),
        Cause::NonFinite => "the loss or gradient is not finite".into(),
        Cause::BadSettings => "the job's settings are invalid".into(),
        Cause::BadData => "the data cannot be used".into(),
        Cause::DataChanged => "the data has changed since the job started".into(),
        Cause::DiskFull => "the disk is full".into(),
        Cause::NoAccess => "a file or folder of the job is not accessible".into(),
        Cause::PortInUse => "a port that the job needs is in use".into(),
        Cause::Killed => format!("{process} was killed from outside the job"),
        Cause::OutOfMemory => format!("{process} ran out of memory"),
        Cause::DamagedCheckpoint => "none of the job's checkpoints can be loaded".into(),
        Cause::NoCapacity => "the job's processes cannot be started".into(),
        Cause::Frozen => format!("{process} is not responding"),
        Cause::Disconnected => format!("{process} could not reach the other processes"),
        Cause::BitsDiffer => "workers computed different results".into(),
        Cause::Stalled => format!("{process} is waiting for other processes"),
        Cause::Unknown => "the job failed".into(),
    };
    match first_line(&found.text) {
        text if text.is_empty() => what,
        text => format!("{what}: {text}"),
    }
}

/// What to do, with the exact next command.
pub(super) fn next(facts: &Facts, cause: Cause) -> String {
    let (job, is_over) = (&facts.job, is_over(facts));
    let resume = format!("`elasticdl {} --resume {job}`", facts.job_type);
    let again = match is_over {
        true => format!("then run {resume}"),
        false => "the job then continues by itself".into(),
    };
    match cause {
        Cause::Healthy => format!("follow it with `elasticdl attach {job}`"),
        Cause::Succeeded => format!("verify it with `elasticdl audit {job}`"),
        Cause::Stopped | Cause::Interrupted | Cause::Unknown if is_over => format!("run {resume}"),
        Cause::Stopped | Cause::Interrupted | Cause::Unknown | Cause::Stalled => {
            format!("wait for it to recover, or run `elasticdl stop {job}` and then {resume}")
        }
        Cause::CodeError | Cause::Panic | Cause::Crash if is_over => {
            format!("fix the model's code, {again}")
        }
        Cause::CodeError | Cause::Panic | Cause::Crash | Cause::Hang if !is_over => format!(
            "run `elasticdl stop {job}`, fix the model's code, and run {resume}; if this is normal \
             for the model, wait"
        ),
        Cause::CodeError | Cause::Panic | Cause::Crash | Cause::Hang => {
            format!("fix the model's code, or allow more time with --task_timeout_secs, {again}")
        }
        Cause::NonFinite => format!(
            "start a new job with a lower --learning_rate or with --clip_norm, or run {resume} with \
             --on_nonfinite=skip"
        ),
        Cause::BadSettings => "correct the settings and start a new job".into(),
        Cause::BadData => format!(
            "fix the data and start a new job{}; if files were just missing, restore them and run \
             {resume}",
            from_checkpoint(facts)
        ),
        Cause::DataChanged => format!(
            "restore the data and run {resume}, or start a new job{}",
            from_checkpoint(facts)
        ),
        Cause::DiskFull => {
            format!("free some disk space, for example with `elasticdl clean`; {again}")
        }
        Cause::NoAccess => format!("give the job access to it; {again}"),
        Cause::PortInUse => format!("stop the program that uses the port; {again}"),
        Cause::Killed => format!(
            "find out what killed it; if `dmesg` shows `Out of memory`, use fewer workers or less \
             memory per worker; {again}"
        ),
        Cause::OutOfMemory => {
            format!("use a smaller --minibatch_size, fewer workers, or more memory; {again}")
        }
        Cause::DamagedCheckpoint => {
            "check the disk, restore a checkpoint from a backup, or start a new job".into()
        }
        Cause::NoCapacity => {
            format!("free up capacity for its processes, or request less; {again}")
        }
        Cause::Frozen => format!(
            "check the machine and network of the process; the job replaces it after \
             --heartbeat_timeout_secs; {again}"
        ),
        Cause::Disconnected => format!("check the network and the master's machine; {again}"),
        Cause::BitsDiffer => format!(
            "use the same kind of machine, build and data for all workers, or allow differences \
             with --same_bits=report; {again}"
        ),
    }
}

fn is_over(facts: &Facts) -> bool {
    facts.state.is_final() || facts.state == crate::job::JobState::Interrupted
}

fn from_checkpoint(facts: &Facts) -> String {
    match facts.last_checkpoint.as_str() {
        "" => String::new(),
        folder => format!(" with --checkpoint_dir_for_init={folder}"),
    }
}
