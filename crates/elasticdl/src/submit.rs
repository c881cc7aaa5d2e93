// SPDX-License-Identifier: Apache-2.0
//! `train`, `evaluate` and `predict`: checks a job, makes its folder and runs it to its end.

use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use edl_core::model::ModelSpec;
use edl_core::spec::{JobSpec, JobType, Strategy};

use crate::config::Asked;
use crate::exit::{Exit, refuse};
use crate::flags::{Given, needs_cluster};
use crate::jobs::{Hold, Home, Job};
use crate::say::{counted, say};
use crate::ui::{self, Ui};
use crate::{
    cluster, config, detach, flags, host, models, own_loop, paths, python, resume, shipped,
    supervisor, top,
};

pub(crate) mod checks;

/// Others that look at a job may hold it for a moment.
const HOLD_DEADLINE: Duration = Duration::from_secs(2);

/// A job that is ready to run.
pub(crate) struct Ready {
    pub(crate) job: Job,
    pub(crate) hold: Hold,
    pub(crate) resume: bool,
}

/// A job that has no folder yet.
pub(crate) struct New {
    pub(crate) spec: JobSpec,
    /// What a loop of the user's own says of itself.
    own: Option<own_loop::Description>,
    /// What a module of the user's says of its model.
    model: Option<ModelSpec>,
}

/// Runs the command.
pub(crate) fn run(kind: JobType, asked: &Asked, out: &mut dyn Write) -> anyhow::Result<Exit> {
    let Asked { run, given, .. } = asked;
    if cluster::submit::is_asked(run, given) {
        return cluster::submit::run(kind, run, given.clone(), out);
    }
    if let Some(remote) = cluster::resume::asked(asked)? {
        return cluster::resume::run(kind, asked, remote, out);
    }
    if let Some(flag) = run.cluster_only() {
        return Err(needs_cluster(flag));
    }
    flags::on_this_machine(&asked.flags)?.iter().for_each(say);
    let home = Home::from_env()?;
    if let Some(spec) = local_python(kind, asked)? {
        return python::become_interpreter(&spec, asked.file.as_deref());
    }
    if run.print_config {
        // As it was said: a name that is made up here would be taken when the file is used twice.
        let spec = match run.resume {
            Some(_) => resume::described(&home, kind, asked)?.1,
            None => config::job(kind, given.clone())?,
        };
        out.write_all(config::to_yaml(&spec)?.as_bytes())?;
        return Ok(Exit::Ok);
    }
    let ready = if run.resume.is_some() {
        checks::check_workers(resume::described(&home, kind, asked)?.1.num_workers)?;
        match resume::prepare(&home, kind, asked)? {
            resume::Prepared::Ready(ready) => ready,
            resume::Prepared::Succeeded(job) => {
                say("this job has already succeeded; to train further, raise --num_epochs");
                write!(out, "{}", ui::summary(&job.handle(), job.status().as_ref(), Exit::Ok))?;
                return Ok(Exit::Ok);
            }
        }
    } else {
        let new = described(kind, given.clone())?;
        checks::check_workers(new.spec.num_workers)?;
        prepare(&home, new, run.job_dir.as_deref())?
    };
    if run.detach {
        return detach::run(ready, out);
    }
    if run.tui && top::can_show() {
        let job = ready.job.clone();
        detach::run(ready, &mut std::io::sink())?;
        return top::watched(&job);
    }
    let ui = Ui::new(&ready.job);
    supervise(ready, ui, out)
}

/// The new job, if it is one in a single process whose model needs an interpreter around it.
fn local_python(kind: JobType, asked: &Asked) -> anyhow::Result<Option<JobSpec>> {
    let run = &asked.run;
    if host::get().python.is_some() || run.print_config || run.resume.is_some() {
        return Ok(None);
    }
    let spec = config::job(kind, asked.given.clone())?;
    let is_local = spec.distribution_strategy == Strategy::Local;
    Ok((is_local && models::is_python(&spec)).then_some(spec))
}

/// The new job that the user describes, with what was left open filled in.
pub(crate) fn described(kind: JobType, given: Given) -> anyhow::Result<New> {
    let said = config::job(kind, given.clone())?;
    let mut spec = said.clone();
    paths::make_absolute(&mut spec)?;
    checks::pin_checkpoint(&mut spec, &given)?;
    if spec.is_own_loop() {
        let own = own_loop::describe(&spec)?;
        own.settle(&mut spec);
        shipped::fill(&mut spec)?;
        return Ok(New { spec, own: Some(own), model: None });
    }
    if !models::is_python(&spec) {
        // Before data is asked for: which data fits depends on the model.
        edl_zoo::open(&spec).map_err(|error| refuse(error.to_string()))?;
    }
    shipped::fill(&mut spec)?;
    if models::is_python(&spec) {
        spec.check().map_err(|invalid| refuse(invalid.to_string()))?;
        let python::Described { model, spec } = python::describe(&spec, &said)?;
        return Ok(New { spec, own: None, model: Some(model) });
    }
    Ok(New { spec, own: None, model: None })
}

/// Checks a new job and makes its folder; a job that cannot run leaves nothing behind.
pub(crate) fn prepare(home: &Home, new: New, dir: Option<&Path>) -> anyhow::Result<Ready> {
    let New { spec, own, model } = new;
    spec.check().map_err(|invalid| refuse(invalid.to_string()))?;
    let place = dir.map_or_else(|| home.jobs_dir().join(&spec.job_name), Path::to_owned);
    home.check_free(&spec.job_name, &place)?;
    let facts = checks::check(&spec, model.as_ref().or(own.as_ref().map(|own| &own.model)))?;
    let job = home.create(&spec, dir)?;
    own.map_or(Ok(()), |own| own.keep(job.dir()))?;
    let hold = hold(&job)?;
    announce(&job, &spec, &facts);
    Ok(Ready { job, hold, resume: false })
}

/// Takes the job for this process.
pub(crate) fn hold(job: &Job) -> anyhow::Result<Hold> {
    let deadline = Instant::now() + HOLD_DEADLINE;
    loop {
        let held = job.hold().with_context(|| format!("cannot lock `{}`", job.dir().display()))?;
        if let Some(hold) = held {
            return Ok(hold);
        }
        if Instant::now() >= deadline {
            let name = job.name().unwrap_or_default();
            return Err(refuse(format!(
                "job `{name}` is already running; watch it with `elasticdl attach {name}`"
            )));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Runs a job to its end in this process.
pub(crate) fn supervise(ready: Ready, mut ui: Ui, out: &mut dyn Write) -> anyhow::Result<Exit> {
    let Ready { job, hold, resume } = ready;
    let runtime = crate::runtime()?;
    let exit = runtime.block_on(supervisor::run(&job, hold, resume, &mut ui))?;
    let spec = job.spec()?;
    if exit == Exit::Ok && spec.job_type == JobType::Train && models::is_python(&spec) {
        python::export(&job, &spec);
    }
    let status = ui.finish();
    if status.is_none() && exit == Exit::Failed {
        for line in crate::logs::last_errors(&job) {
            say(line);
        }
    }
    write!(out, "{}", ui::summary(&job.handle(), status.as_ref(), exit))?;
    Ok(exit)
}

fn announce(job: &Job, spec: &JobSpec, facts: &checks::Facts) {
    let JobSpec { job_name, model_def, num_workers, num_ps_pods, .. } = spec;
    let workers = counted(u64::from(*num_workers), "worker");
    let who = if spec.is_allreduce() {
        let (lanes, minibatch) = (spec.n_lanes(), spec.minibatch_size);
        let step = u64::from(lanes) * u64::from(minibatch);
        let servers = if spec.is_hybrid() {
            format!("{num_ps_pods} PS for embedding tables, ")
        } else {
            String::new()
        };
        format!("{servers}{workers}, AllReduce steps of {lanes} × {minibatch} = {step} records")
    } else {
        format!("{num_ps_pods} PS, {workers}")
    };
    let verb = match spec.job_type {
        JobType::Train => "trains",
        JobType::Evaluate => "evaluates",
        JobType::Predict => "predicts with",
    };
    say(format_args!(
        "job {job_name} {verb} {model_def} on {}: {who}; logs and results in {}",
        counted(facts.n_records, "record"),
        job.dir().display(),
    ));
}
