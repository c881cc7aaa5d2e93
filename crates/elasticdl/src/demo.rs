// SPDX-License-Identifier: Apache-2.0
//! `demo`: trains a model while its processes are being killed, then proves that nothing was lost.
//!
//! The job runs twice: with three workers and blows from a plan, and calmly with one worker. Both
//! must end with the same bits.

mod plan;

use std::io::Write;
use std::time::Duration;

use anyhow::Context as _;
use edl_core::spec::{JobType, Strategy};
use edl_net::proto::JobStatus;
use rustix::process::Signal;
use serde_json::{Map, Value};
use sha2::{Digest as _, Sha256};

use crate::cli::DemoArgs;
use crate::exit::Exit;
use crate::jobs::{Home, Job};
use crate::say::say;
use crate::{audit, detach, signals, submit, top};

use plan::Plan;

const LANES: u32 = 4;
const WORKERS: u32 = 3;
const POLL: Duration = Duration::from_millis(200);
/// The model is trained in far less time than this, even on a busy machine.
const LIMIT: Duration = Duration::from_secs(900);

/// Runs the command; fails if the two runs differ or a record was not trained exactly once.
pub(crate) fn run(args: &DemoArgs, out: &mut dyn Write) -> anyhow::Result<Exit> {
    let home = Home::from_env()?;
    say(format_args!(
        "training a small convolutional network with {WORKERS} workers; the demo will kill some of \
         them, and the master"
    ));
    let shaken = start(&home, args, "shaken", WORKERS)?;
    let mut plan = Plan::new(args.seed);
    let mut strike = |status: &JobStatus| {
        let pid = plan.due(status)?;
        Some(match kill(pid.pid) {
            Ok(()) => format!("{} was killed (kill -9 {})", pid.name, pid.pid),
            Err(error) => format!("cannot kill {}: {error}", pid.name),
        })
    };
    if top::can_show() && !args.plain {
        if top::show(&shaken, &mut strike)? == top::Watched::UserLeft {
            let name = shaken.name().unwrap_or_default();
            say(format_args!("the job keeps running; stop it with `elasticdl stop {name}`"));
            return Ok(Exit::Stopped);
        }
    } else {
        watch(&shaken, &mut |status| {
            if let Some(text) = strike(status) {
                say(format_args!("step {}: {text}", status.step));
            }
        })?;
    }
    let n_blows = plan.n_done();
    say("now running the same job with one worker and no faults");
    let calm = start(&home, args, "calm", 1)?;
    watch(&calm, &mut |_| {})?;
    let (first, second) = (hash(&shaken)?, hash(&calm)?);
    let report = audit::of(&shaken)?;
    out.write_all(audit::table(&report).as_bytes())?;
    writeln!(out, "{WORKERS} workers, {n_blows} processes killed: sha256 {first}")?;
    writeln!(out, "1 worker, no process killed:      sha256 {second}")?;
    let is_same = first == second;
    let verdict = if is_same { "results are bit-identical" } else { "RESULTS DIFFER" };
    writeln!(out, "{verdict}")?;
    Ok(if is_same && report.clean { Exit::Ok } else { Exit::Failed })
}

/// Starts the job in the background.
fn start(home: &Home, args: &DemoArgs, which: &str, workers: u32) -> anyhow::Result<Job> {
    let mut given = Map::new();
    let mut word = |name: &str, value: Value| given.insert(name.into(), value);
    let name = (1..)
        .map(|number| format!("demo-{number}-{which}"))
        .find(|name| home.find(Some(name)).is_err())
        .context("no free job name")?;
    word("job_name", name.into());
    word("model_def", "mnist_cnn".into());
    word("distribution_strategy", Strategy::Allreduce.name().into());
    word("num_workers", workers.into());
    word("lanes", LANES.into());
    word("minibatch_size", 32.into());
    word("num_epochs", args.epochs.into());
    word("seed", args.seed.into());
    word("checkpoint_secs", 5.into());
    let new = submit::described(JobType::Train, given)?;
    let ready = submit::prepare(home, new, None)?;
    let job = ready.job.clone();
    detach::run(ready, &mut std::io::sink())?;
    Ok(job)
}

/// Looks at the job until it ends.
fn watch(job: &Job, look: &mut dyn FnMut(&JobStatus)) -> anyhow::Result<()> {
    let name = job.name().unwrap_or_default();
    let begun = std::time::Instant::now();
    while job.is_running() {
        if let Some(status) = job.fresh_status() {
            look(&status);
        }
        anyhow::ensure!(
            begun.elapsed() < LIMIT,
            "job `{name}` is taking too long; stop it with `elasticdl stop {name}`"
        );
        std::thread::sleep(POLL);
    }
    let state = job.state();
    anyhow::ensure!(
        state == "succeeded",
        "job `{name}` ended ({state}); see `elasticdl logs {name}`"
    );
    Ok(())
}

fn kill(pid: u32) -> anyhow::Result<()> {
    Ok(signals::send(pid, Signal::KILL).context("no such process on this machine")??)
}

/// Of the exported weights.
fn hash(job: &Job) -> anyhow::Result<String> {
    let path = job.paths().output(&job.spec()?).join("model.safetensors");
    let bytes =
        std::fs::read(&path).with_context(|| format!("cannot read `{}`", path.display()))?;
    Ok(Sha256::digest(&bytes).iter().map(|byte| format!("{byte:02x}")).collect())
}
