// SPDX-License-Identifier: Apache-2.0
//! `stop`: stops a job gracefully; it can be resumed.

use std::io::Write;
use std::time::{Duration, Instant};

use edl_core::job::{JobState, STOP_TIMEOUT};
use rustix::process::Signal;

use crate::cli::StopArgs;
use crate::cluster::{self, Target};
use crate::console::eprint;
use crate::control::STOPPED;
use crate::exit::Exit;
use crate::jobs::Job;
use crate::signals;

/// Time for a master to exit after its job has stopped.
const EXIT_TIMEOUT: Duration = Duration::from_secs(10);
/// Time for a supervisor whose master does not answer.
const SIGNAL_TIMEOUT: Duration = Duration::from_secs(5);
const POLL: Duration = Duration::from_millis(50);

/// Asks the master to stop the job. If that fails, stops the job's processes.
pub(crate) fn run(args: &StopArgs, out: &mut dyn Write) -> anyhow::Result<Exit> {
    let target = cluster::find(&args.job)?;
    let within = args.within.map_or(STOP_TIMEOUT, Duration::from_secs);
    let name = target.name();
    if let Target::Local(job) = &target
        && !job.is_running()
    {
        writeln!(out, "job {name} is not running ({})", job.state())?;
        return Ok(Exit::Ok);
    }
    let is_asked = target.request(async |master| master.stop(within).await).is_ok();
    let (state, reason) = match &target {
        Target::Local(job) => {
            let is_gone = is_asked && ended_within(job, within + EXIT_TIMEOUT)
                || signal(job, Signal::TERM) && ended_within(job, SIGNAL_TIMEOUT)
                || kill(job);
            anyhow::ensure!(
                is_gone,
                "job `{name}` did not stop; see its processes with `elasticdl status {name}`"
            );
            (job.state(), job.fresh_status().map(|status| status.reason).unwrap_or_default())
        }
        Target::Cluster(job) => {
            let within = is_asked.then_some(within);
            let status = job.runtime.block_on(job.end(within))?;
            (status.state(), status.reason)
        }
    };
    writeln!(out, "job {name} {state}")?;
    // What the stop has lost, if anything.
    if let Some(lost) = reason.strip_prefix(STOPPED).and_then(|lost| lost.strip_prefix("; ")) {
        eprint(format_args!("{lost}"));
    }
    if state != JobState::Succeeded {
        let kind = target.spec().map_or("train", |spec| spec.job_type.name());
        eprint(format_args!("resume it with `elasticdl {kind} --resume {}`", target.handle()));
    }
    Ok(Exit::Ok)
}

/// Kills the supervisor, and with it all processes of the job. Whether they are gone.
pub(crate) fn kill(job: &Job) -> bool {
    signal(job, Signal::KILL) && ended_within(job, SIGNAL_TIMEOUT)
}

fn ended_within(job: &Job, timeout: Duration) -> bool {
    let deadline = Instant::now() + timeout;
    while job.is_running() {
        if Instant::now() >= deadline {
            return false;
        }
        std::thread::sleep(POLL);
    }
    true
}

/// Signals the supervisor, which holds the job's lock while it runs.
fn signal(job: &Job, signal: Signal) -> bool {
    match job.supervisor() {
        Some(supervisor) if job.is_running() => {
            signals::send(supervisor.pid, signal).is_some_and(|sent| sent.is_ok())
        }
        Some(_) | None => false,
    }
}
