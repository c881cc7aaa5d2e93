// SPDX-License-Identifier: Apache-2.0
//! `demo`: trains a model while its processes are killed, then verifies that nothing was lost.
//!
//! The job runs twice: with three workers that are killed by a plan, and undisturbed with one worker.
//! Both results must be bit-identical.

mod plan;

use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use edl_core::job::JobState;
use edl_core::spec::{JobType, Strategy};
use edl_net::proto::JobStatus;
use rustix::process::Signal;
use serde_json::{Map, Value};
use sha2::{Digest as _, Sha256};
use tokio_util::sync::CancellationToken;

use crate::cli::DemoArgs;
use crate::cluster::Target;
use crate::console::eprint;
use crate::exit::Exit;
use crate::jobs::{Home, Job};
use crate::processes::cancel_on_signal;
use crate::ui::Watched;
use crate::{audit, detach, signals, stop, submit, top};

use plan::KillPlan;

const LANES: u32 = 4;
const WORKERS: u32 = 3;
const POLL: Duration = Duration::from_millis(200);
const EXIT_TIMEOUT: Duration = Duration::from_secs(3);
/// The model is trained in far less time than this, even on a busy machine.
const LIMIT: Duration = Duration::from_secs(900);

/// Runs the command; fails if the two runs differ or a record was not trained exactly once.
pub(crate) fn run(args: &DemoArgs, out: &mut dyn Write) -> anyhow::Result<Exit> {
    let home = Home::from_env()?;
    eprint(format_args!(
        "training a small convolutional network with {WORKERS} workers; the demo will kill some of \
         them, and the master"
    ));
    let interrupt = interrupt()?;
    let shaken = start(&home, args, "shaken", WORKERS)?;
    let mut plan = KillPlan::new(args.seed);
    let mut kill_due = |status: &JobStatus| {
        let pid = plan.due(status)?;
        Some(match kill(pid.pid) {
            Ok(()) => format!("{} was killed (kill -9 {})", pid.name, pid.pid),
            Err(error) => format!("cannot kill {}: {error}", pid.name),
        })
    };
    if top::can_show() && !args.plain {
        if top::show(&shaken, &mut kill_due)? == Watched::UserLeft {
            return clean_up(&home, &[&shaken]);
        }
    } else {
        let watched = watch(&shaken, &interrupt, &mut |status| {
            if let Some(text) = kill_due(status) {
                eprint(format_args!("step {}: {text}", status.step));
            }
        })?;
        if watched == Watched::UserLeft {
            return clean_up(&home, &[&shaken]);
        }
    }
    let n_kills = plan.n_done();
    eprint("now running the same job with one worker and no faults");
    let calm = start(&home, args, "calm", 1)?;
    if watch(&calm, &interrupt, &mut |_| {})? == Watched::UserLeft {
        return clean_up(&home, &[&shaken, &calm]);
    }
    let (first, second) = (hash(&shaken)?, hash(&calm)?);
    let report = audit::of(&Target::Local(shaken))?;
    out.write_all(audit::table(&report).as_bytes())?;
    writeln!(out, "{WORKERS} workers, {n_kills} processes killed: sha256 {first}")?;
    writeln!(out, "1 worker, no process killed:      sha256 {second}")?;
    let is_same = first == second;
    let verdict = if is_same { "results are bit-identical" } else { "RESULTS DIFFER" };
    writeln!(out, "{verdict}")?;
    Ok(if is_same && report.clean { Exit::Ok } else { Exit::Failed })
}

/// Starts the job in the background.
fn start(home: &Home, args: &DemoArgs, which: &str, workers: u32) -> anyhow::Result<Job> {
    let mut given = Map::new();
    let mut set = |name: &str, value: Value| given.insert(name.into(), value);
    let name = (1..)
        .map(|number| format!("demo-{number}-{which}"))
        .find(|name| home.find(Some(name)).is_err())
        .context("no free job name")?;
    set("job_name", name.into());
    set("model_def", "mnist_cnn".into());
    set("distribution_strategy", Strategy::Allreduce.name().into());
    set("num_workers", workers.into());
    set("lanes", LANES.into());
    set("minibatch_size", 32.into());
    set("num_epochs", args.epochs.into());
    set("seed", args.seed.into());
    set("checkpoint_secs", 5.into());
    set("allow_chaos", true.into());
    let new = submit::described(JobType::Train, given)?;
    let ready = submit::prepare(home, new, None)?;
    let job = ready.job.clone();
    detach::run(ready, &mut std::io::sink())?;
    Ok(job)
}

/// Set when the user presses Ctrl-C or the process is asked to exit.
fn interrupt() -> anyhow::Result<CancellationToken> {
    let interrupt = CancellationToken::new();
    let (runtime, shutdown) = (crate::runtime()?, interrupt.clone());
    std::thread::spawn(move || {
        runtime.block_on(async {
            if let Ok(mut signals) = cancel_on_signal(&shutdown) {
                signals.join_next().await;
            }
        });
    });
    Ok(interrupt)
}

/// Removes the jobs of a demo that the user has left.
fn clean_up(home: &Home, jobs: &[&Job]) -> anyhow::Result<Exit> {
    for job in jobs {
        let name = job.name().unwrap_or_default();
        let is_gone = !job.is_running() || stop::kill(job);
        anyhow::ensure!(is_gone, "job `{name}` did not stop; stop it with `elasticdl stop {name}`");
        wait_for_processes(job);
        home.remove(job)?;
    }
    eprint("interrupted; the jobs of the demo were removed");
    Ok(Exit::Interrupted)
}

/// Processes end with their supervisor, but not at once, and they may write files until then.
fn wait_for_processes(job: &Job) {
    let status = job.status().unwrap_or_default();
    let is_there = |pid: u32| Path::new("/proc").join(pid.to_string()).exists();
    let begun = Instant::now();
    while status.instances.iter().any(|it| is_there(it.pid)) && begun.elapsed() < EXIT_TIMEOUT {
        std::thread::sleep(POLL);
    }
}

/// Calls `visit` with every status of the job until it ends or the user leaves.
fn watch(
    job: &Job,
    interrupt: &CancellationToken,
    visit: &mut dyn FnMut(&JobStatus),
) -> anyhow::Result<Watched> {
    let name = job.name().unwrap_or_default();
    let begun = Instant::now();
    while job.is_running() {
        if interrupt.is_cancelled() {
            return Ok(Watched::UserLeft);
        }
        if let Some(status) = job.fresh_status() {
            visit(&status);
        }
        anyhow::ensure!(
            begun.elapsed() < LIMIT,
            "job `{name}` is taking too long; stop it with `elasticdl stop {name}`"
        );
        std::thread::sleep(POLL);
    }
    let state = job.state();
    anyhow::ensure!(
        state == JobState::Succeeded,
        "job `{name}` ended ({state}); see `elasticdl logs {name}`"
    );
    Ok(Watched::JobEnded)
}

fn kill(pid: u32) -> anyhow::Result<()> {
    Ok(signals::send(pid, Signal::KILL).context("no such process on this machine")??)
}

/// The hash of the exported weights.
fn hash(job: &Job) -> anyhow::Result<String> {
    let path = job.paths().output(&job.spec()?).join("model.safetensors");
    let bytes =
        std::fs::read(&path).with_context(|| format!("cannot read `{}`", path.display()))?;
    Ok(Sha256::digest(&bytes).iter().map(|byte| format!("{byte:02x}")).collect())
}
