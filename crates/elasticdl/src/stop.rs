// SPDX-License-Identifier: Apache-2.0
//! `stop`: ends a job in order; it can be resumed.

use std::io::Write;
use std::time::{Duration, Instant};

use edl_net::proto::StopRequest;
use rustix::process::Signal;

use crate::cli::JobArg;
use crate::cluster::{self, Place};
use crate::control;
use crate::exit::Exit;
use crate::jobs::Job;
use crate::say::say;
use crate::signals;

/// A master may write a last checkpoint before it ends.
const PATIENCE: Duration = Duration::from_secs(30);
/// A supervisor that is told to stop is gone after two seconds.
const SIGNAL_PATIENCE: Duration = Duration::from_secs(5);
const POLL: Duration = Duration::from_millis(50);

/// Asks the master first, then the supervisor, then leaves no choice.
pub(crate) fn run(args: &JobArg, out: &mut dyn Write) -> anyhow::Result<Exit> {
    let job = match cluster::find(args)? {
        Place::Here(job) => job,
        Place::There(remote) => return cluster::stop(&remote, out),
    };
    let name = job.name().unwrap_or_default();
    if !job.is_running() {
        writeln!(out, "job {name} is not running ({})", job.state())?;
        return Ok(Exit::Ok);
    }
    let asked = crate::runtime()?.block_on(control::within(ask(&job)));
    let is_gone = asked.is_ok() && ended_within(&job, PATIENCE)
        || signal(&job, Signal::TERM) && ended_within(&job, SIGNAL_PATIENCE)
        || signal(&job, Signal::KILL) && ended_within(&job, SIGNAL_PATIENCE);
    anyhow::ensure!(
        is_gone,
        "job `{name}` did not stop; see its processes with `elasticdl status {name}`"
    );
    let state = job.state();
    writeln!(out, "job {name} {state}")?;
    if state != "succeeded" {
        let kind = job.spec().map_or("train", |spec| spec.job_type.name());
        say(format_args!("resume it with `elasticdl {kind} --resume {name}`"));
    }
    Ok(Exit::Ok)
}

async fn ask(job: &Job) -> anyhow::Result<()> {
    let mut master = control::connect(job).await?;
    master.stop(StopRequest { reason: "stopped by `elasticdl stop`".into() }).await?;
    Ok(())
}

fn ended_within(job: &Job, patience: Duration) -> bool {
    let deadline = Instant::now() + patience;
    while job.is_running() {
        if Instant::now() >= deadline {
            return false;
        }
        std::thread::sleep(POLL);
    }
    true
}

/// Signals the supervisor, which is known to live by its hold on the job.
fn signal(job: &Job, signal: Signal) -> bool {
    match job.supervisor() {
        Some(supervisor) if job.is_running() => {
            signals::send(supervisor.pid, signal).is_some_and(|sent| sent.is_ok())
        }
        Some(_) | None => false,
    }
}
