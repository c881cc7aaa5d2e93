// SPDX-License-Identifier: Apache-2.0
//! The facts of a job on this machine: its status, its folder, and the stack of a process that
//! hangs.

use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use edl_core::platform::InstanceId;
use edl_core::verdict::{Cause, Exited, Facts, Logged, Noted, Verdict, verdict};
use edl_net::proto::{Event, JobStatus};
use serde::de::DeserializeOwned;

use super::{log, of_status};
use crate::jobs::Job;
use crate::{logs, stacks, status};

/// How much of a file is read, from its end.
const MAX_READ: u64 = 4 << 20;
/// How long a process may take to log its stack.
const STACK_TIMEOUT: Duration = Duration::from_secs(1);
const POLL: Duration = Duration::from_millis(20);

/// What is wrong with the job. A process that hangs now is asked for its stack.
pub(super) fn verdict_of(job: &Job) -> anyhow::Result<Verdict> {
    let status = crate::runtime()?.block_on(status::of(job))?;
    let mut facts = gather(job, &status);
    let found = verdict(&facts);
    let hangs = found.process.filter(|_| found.cause == Cause::Hang && job.is_running());
    let Some(process) = hangs else { return Ok(found) };
    let is_it = |instance: &&edl_net::proto::Instance| instance.name() == process.to_string();
    let Some(pid) = status.instances.iter().find(is_it).map(|instance| instance.pid) else {
        return Ok(found);
    };
    let n_before = facts.logged.len();
    let deadline = Instant::now() + STACK_TIMEOUT;
    if stacks::ask(pid) {
        while facts.logged.len() == n_before && Instant::now() < deadline {
            std::thread::sleep(POLL);
            facts.logged = logged(job);
        }
        // It may not have been written to its end.
        std::thread::sleep(5 * POLL);
        facts.logged = logged(job);
    }
    Ok(verdict(&facts))
}

fn gather(job: &Job, status: &JobStatus) -> Facts {
    let facts = of_status(job.handle(), status);
    let events: Vec<Event> = lines(&job.paths().events());
    let noted =
        |event: Event| Noted { at_secs: event.at_secs, kind: event.kind(), text: event.text };
    // A job that was resumed has the events of its earlier runs, too.
    let since = job.started().map_or(0.0, unix_secs);
    Facts {
        events: events.into_iter().filter(|event| event.at_secs >= since).map(noted).collect(),
        exits: {
            let exits: Vec<Exited> = lines(&job.paths().exits());
            exits.into_iter().filter(|exit| exit.at_secs >= since).collect()
        },
        logged: logged(job),
        ..facts
    }
}

/// The errors and stacks that the processes of this run have logged.
fn logged(job: &Job) -> Vec<Logged> {
    // Times in logs have milliseconds.
    let since = job.started().map_or(0.0, unix_secs).floor();
    let of_process = |(name, path): (String, std::path::PathBuf)| {
        let instance: InstanceId = name.parse().ok()?;
        Some(log::entries(instance, &tail(&path)))
    };
    let all = logs::log_files(&job.paths().logs()).into_iter().filter_map(of_process).flatten();
    all.filter(|entry| entry.at_secs >= since).collect()
}

/// The lines of a file of JSON; one that is incomplete or of another version is left out.
fn lines<T: DeserializeOwned>(path: &Path) -> Vec<T> {
    tail(path).lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

/// The end of a file; one that cannot be read is empty.
fn tail(path: &Path) -> String {
    let read = || {
        let mut file = File::open(path)?;
        let start = file.metadata()?.len().saturating_sub(MAX_READ);
        file.seek(SeekFrom::Start(start))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        std::io::Result::Ok(String::from_utf8_lossy(&bytes).into_owned())
    };
    read().unwrap_or_default()
}

pub(super) fn now_secs() -> f64 {
    unix_secs(SystemTime::now())
}

fn unix_secs(at: SystemTime) -> f64 {
    at.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}
