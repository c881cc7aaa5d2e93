// SPDX-License-Identifier: Apache-2.0
//! `demo`: trains a model while its processes are killed, then verifies that nothing was lost.
//!
//! The job runs twice: with three workers and a parameter server, of which a worker, the server and
//! the master are killed; and undisturbed with one worker. Both results must be bit-identical.

mod people;
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
use crate::console::{eprint, put_result, span};
use crate::exit::{Exit, refuse};
use crate::jobs::{Home, Job};
use crate::processes::cancel_on_signal;
use crate::ui::{Ui, Watched};
use crate::{audit, detach, signals, stop, submit, top};

use plan::KillPlan;

const LANES: u32 = 4;
const WORKERS: u32 = 3;
/// Two runs of this take less than a minute on two cores.
const N_PEOPLE: usize = 80_000;
const MODEL: &str = "hidden=512";
const POLL: Duration = Duration::from_millis(200);
const EXIT_TIMEOUT: Duration = Duration::from_secs(3);
/// The model is trained in far less time than this, even on a busy machine.
const LIMIT: Duration = Duration::from_secs(900);

/// Runs the command; fails if the two runs differ or a record was not trained exactly once.
pub(crate) fn run(args: &DemoArgs, out: &mut dyn Write) -> anyhow::Result<Exit> {
    let home = Home::from_env()?;
    let data = write_data(&home)?;
    eprint(format_args!(
        "training a recommendation model with {WORKERS} workers and a parameter server; the demo \
         will kill a worker, the server and the master"
    ));
    let interrupt = interrupt()?;
    let shaken = start(&home, args, "shaken", WORKERS, &data)?;
    let mut plan = KillPlan::new(args.seed);
    let mut lines = Vec::new();
    let begun = Instant::now();
    let mut act = |status: &JobStatus| {
        let line = act(&mut plan, status, begun.elapsed())?;
        lines.push(line.clone());
        Some(line)
    };
    let watched = if top::can_show() && !args.plain {
        let watched = top::show(&shaken, &mut act)?;
        // The view is gone with all that it showed.
        lines.iter().for_each(eprint);
        watched
    } else {
        watch(&shaken, &interrupt, &mut |status| act(status).iter().for_each(eprint))?
    };
    if watched == Watched::UserLeft {
        return clean_up(&home, &[&shaken]);
    }
    check_succeeded(&shaken)?;
    // The job may have ended before its last recovery was seen.
    let last = shaken.status().and_then(|status| plan.heal(&status, begun.elapsed()));
    last.map(|healed| healed.to_string()).iter().for_each(eprint);
    if !plan.is_complete() {
        eprint("the job ended before all of them were killed; train longer with --epochs=N");
    }
    eprint("now running the same job with one worker and no faults");
    let calm = start(&home, args, "calm", 1, &data)?;
    let mut ui = Ui::progress_of(&calm);
    let watched = watch(&calm, &interrupt, &mut |_| ui.tick())?;
    ui.finish();
    if watched == Watched::UserLeft {
        return clean_up(&home, &[&shaken, &calm]);
    }
    check_succeeded(&calm)?;
    verdict(&plan, shaken, &calm, out)
}

/// Kills the process that is due, or tells that the job has healed.
fn act(plan: &mut KillPlan, status: &JobStatus, now: Duration) -> Option<String> {
    if let Some(healed) = plan.heal(status, now) {
        return Some(healed.to_string());
    }
    let victim = plan.due(status, now)?;
    Some(match kill(victim.pid) {
        Ok(()) => {
            format!("step {}: {} was killed (kill -9 {})", status.step, victim.name, victim.pid)
        }
        Err(error) => {
            plan.undo();
            format!("cannot kill {}: {error}", victim.name)
        }
    })
}

/// Compares the two runs and prints what was found, and what to try next.
fn verdict(plan: &KillPlan, shaken: Job, calm: &Job, out: &mut dyn Write) -> anyhow::Result<Exit> {
    let (first, second) = (hash(&shaken)?, hash(calm)?);
    let name = shaken.name().unwrap_or_default();
    let report = audit::of(&Target::Local(shaken))?;
    let mut text = audit::table(&report, false);
    let killed = if plan.n_kills() == 1 { "process" } else { "processes" };
    let faults = format!("{WORKERS} workers, {} {killed} killed:", plan.n_kills());
    text += &format!("{faults:<34}sha256 {first}\n");
    text += &format!("{:<34}sha256 {second}\n", "1 worker, no process killed:");
    let is_same = first == second;
    text += if is_same { "results are bit-identical\n" } else { "RESULTS DIFFER\n" };
    let times = plan.healed().into_iter();
    let times = times.map(|it| format!("{} {}", it.name, span(it.after.as_secs_f64())));
    let times: Vec<String> = times.collect();
    text += &format!("healing times: {}\n", times.join(", "));
    text += "\nTry next:\n";
    let next = [
        (format!("elasticdl report {name}"), "save the page of the disturbed job"),
        ("elasticdl train --tui".into(), "train an image classifier, and watch it"),
        ("elasticdl init --workers=4".into(), "write a file with all options of a job"),
    ];
    for (command, what) in next {
        text += &format!("  {command:<36}{what}\n");
    }
    put_result(out, text)?;
    Ok(if is_same && report.clean { Exit::Ok } else { Exit::Failed })
}

/// Writes the data of both jobs; its path.
fn write_data(home: &Home) -> anyhow::Result<String> {
    let folder = home.demo_dir();
    std::fs::create_dir_all(&folder).map_err(|error| {
        let shown = folder.display();
        refuse(format!("cannot create `{shown}`: {error}; set ELASTICDL_HOME to another folder"))
    })?;
    let path = folder.join("people.csv");
    let shown = path.display().to_string();
    let text = people::csv(N_PEOPLE);
    // A demo that runs at the same time reads the same file.
    if std::fs::read(&path).ok().as_deref() != Some(text.as_bytes()) {
        let mut file = tempfile::NamedTempFile::new_in(&folder)?;
        file.write_all(text.as_bytes()).with_context(|| format!("cannot write `{shown}`"))?;
        file.persist(&path).with_context(|| format!("cannot write `{shown}`"))?;
    }
    Ok(shown)
}

/// Starts the job in the background.
fn start(
    home: &Home,
    args: &DemoArgs,
    which: &str,
    workers: u32,
    data: &str,
) -> anyhow::Result<Job> {
    let mut given = Map::new();
    let mut set = |name: &str, value: Value| given.insert(name.into(), value);
    let name = (1..)
        .map(|number| format!("demo-{number}-{which}"))
        .find(|name| home.find(Some(name)).is_err())
        .context("no free job name")?;
    set("job_name", name.into());
    set("model_def", "deepfm".into());
    set("model_params", MODEL.into());
    set("training_data", data.into());
    set("distribution_strategy", Strategy::Hybrid.name().into());
    set("num_workers", workers.into());
    set("num_ps_pods", 1.into());
    set("lanes", LANES.into());
    set("minibatch_size", 64.into());
    set("num_epochs", args.epochs.into());
    set("seed", args.seed.into());
    set("checkpoint_secs", 2.into());
    set("allow_chaos", true.into());
    detach::start(submit::new(home, JobType::Train, given, None)?)
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
    Ok(Watched::JobEnded)
}

fn check_succeeded(job: &Job) -> anyhow::Result<()> {
    let (state, name) = (job.state(), job.name().unwrap_or_default());
    anyhow::ensure!(
        state == JobState::Succeeded,
        "job `{name}` ended ({state}); see `elasticdl logs {name}`"
    );
    Ok(())
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
