// SPDX-License-Identifier: Apache-2.0
//! `train`, `evaluate` and `predict`: checks a job, makes its folder and runs it to its end.

use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use edl_core::model::ModelSpec;
use edl_core::spec::{JobSpec, JobType, Strategy};

use crate::cli::RunFlags;
use crate::config::JobRequest;
use crate::console::{self, counted, eprint};
use crate::custom_loop::FirstWorker;
use crate::exit::{Exit, refuse};
use crate::flags::{Given, needs_cluster};
use crate::fork_server::ForkServer;
use crate::jobs::{Hold, Home, Job};
use crate::ui::{self, Ui};
use crate::{
    cluster, config, custom_loop, detach, flags, host, models, paths, python, resume, shipped,
    supervisor, trained,
};

pub(crate) mod checks;

/// Other commands may lock a job for a moment.
const HOLD_DEADLINE: Duration = Duration::from_secs(2);

/// A job that is ready to run.
pub(crate) struct Ready {
    pub(crate) job: Job,
    pub(crate) hold: Hold,
    pub(crate) resume: bool,
    /// Has been started to describe the job.
    pub(crate) forks: Option<ForkServer>,
    /// What the user has entered, for the job's page.
    pub(crate) command: Vec<String>,
    /// Has described it.
    pub(crate) first: Option<FirstWorker>,
}

/// A job that has no folder yet.
pub(crate) struct New {
    pub(crate) spec: JobSpec,
    /// The description of a custom training loop.
    custom_loop: Option<custom_loop::Description>,
    /// The model of the user's module.
    model: Option<ModelSpec>,
    forks: Option<ForkServer>,
    first: Option<FirstWorker>,
}

/// Runs the command.
pub(crate) fn run(
    kind: JobType,
    request: &JobRequest,
    out: &mut dyn Write,
) -> anyhow::Result<Exit> {
    let JobRequest { run, given, .. } = request;
    if let Some(name) = flags::text(given, "job_name").filter(|name| name.contains('_')) {
        eprint(format_args!(
            "the job is named `{}`, because names cannot contain `_`",
            config::job_name(name)
        ));
    }
    if cluster::submit::is_asked(run, given) {
        return cluster::submit::run(kind, run, given.clone(), out);
    }
    if let Some(remote) = cluster::resume::find(request)? {
        return cluster::resume::run(kind, request, remote, out);
    }
    if let Some(flag) = run.cluster_only() {
        return Err(needs_cluster(flag));
    }
    flags::on_this_machine(&request.flags)?.iter().for_each(eprint);
    let home = Home::from_env()?;
    if let Some(spec) = local_python(kind, request)? {
        return python::become_interpreter(&spec, request.file.as_deref());
    }
    if run.print_config {
        // Without a generated name, which would be in use when the file is used again.
        let spec = match run.resume {
            Some(_) => resume::described(&home, kind, request)?.1,
            None => config::job(kind, given.clone())?,
        };
        out.write_all(config::to_yaml(&spec)?.as_bytes())?;
        return Ok(Exit::Ok);
    }
    let ready = if run.resume.is_some() {
        checks::check_workers(&resume::described(&home, kind, request)?.1)?;
        match resume::prepare(&home, kind, request)? {
            resume::Prepared::Ready(ready) => ready,
            resume::Prepared::Succeeded(job) => {
                eprint("this job has already succeeded; to train further, raise --num_epochs");
                write!(out, "{}", ui::summary(&job.handle(), job.status().as_ref(), Exit::Ok))?;
                return Ok(Exit::Ok);
            }
        }
    } else {
        return start_new(&home, kind, given.clone(), run, out);
    };
    match detach::wanted(run) {
        Some(how) => how.show(detach::start(ready)?, out),
        None => run_here(ready, run, out),
    }
}

/// Runs a new job in the background, under the full-screen view, or in this process.
pub(crate) fn start_new(
    home: &Home,
    kind: JobType,
    given: Given,
    run: &RunFlags,
    out: &mut dyn Write,
) -> anyhow::Result<Exit> {
    let dir = run.job_dir.as_deref();
    let Some(how) = detach::wanted(run) else {
        return run_here(new(home, kind, given, dir)?, run, out);
    };
    match detach::start_new(kind, given, dir)? {
        Ok(job) => how.show(job, out),
        // It has said why.
        Err(exit) => Ok(exit),
    }
}

/// Describes and prepares a new job.
pub(crate) fn new(
    home: &Home,
    kind: JobType,
    given: Given,
    dir: Option<&Path>,
) -> anyhow::Result<Ready> {
    let new = described(home, kind, given, dir)?;
    checks::check_workers(&new.spec)?;
    prepare(home, new, dir)
}

fn run_here(ready: Ready, run: &RunFlags, out: &mut dyn Write) -> anyhow::Result<Exit> {
    let mut ui = Ui::new(&ready.job).resuming(ready.resume);
    let spec = ready.job.spec()?;
    if spec.is_custom_loop() || models::is_python(&spec) {
        ui = ui.with_script(run.shown_output());
    }
    supervise(ready, ui, out)
}

/// The new job, if it runs in a single process that must be a Python interpreter.
fn local_python(kind: JobType, request: &JobRequest) -> anyhow::Result<Option<JobSpec>> {
    let run = &request.run;
    if host::get().python.is_some() || run.print_config || run.resume.is_some() {
        return Ok(None);
    }
    let spec = config::job(kind, request.given.clone())?;
    let is_local = spec.distribution_strategy == Strategy::Local;
    Ok((is_local && models::is_python(&spec)).then_some(spec))
}

/// The new job that the user describes, completed with defaults.
pub(crate) fn described(
    home: &Home,
    kind: JobType,
    given: Given,
    dir: Option<&Path>,
) -> anyhow::Result<New> {
    let original = config::job(kind, given.clone())?;
    let mut spec = original.clone();
    paths::make_absolute(&mut spec)?;
    checks::pin_checkpoint(home, &mut spec, &given)?;
    if spec.is_custom_loop() {
        shipped::fill_name(&mut spec)?;
        let place = home.place(&spec.job_name, dir)?;
        check_before_script(home, &spec, &place)?;
        let forks = fork_server(&spec);
        let draft = home.draft(&spec.job_name, &place)?;
        let (description, first) =
            custom_loop::describe(&spec, Some(&place), forks.as_ref(), draft)?;
        description.settle(&mut spec);
        shipped::fill(&mut spec)?;
        return Ok(New { spec, custom_loop: Some(description), model: None, forks, first });
    }
    if !models::is_python(&spec) {
        // Checked before the data, because the model decides which data fits.
        edl_zoo::open(&spec).map_err(|error| refuse(error.to_string()))?;
    }
    shipped::fill(&mut spec)?;
    if models::is_python(&spec) {
        spec.check().map_err(|invalid| refuse(invalid.to_string()))?;
        let forks = fork_server(&spec);
        let python::Described { model, spec } = python::describe(&spec, &original, forks.as_ref())?;
        return Ok(New { spec, custom_loop: None, model: Some(model), forks, first: None });
    }
    Ok(New { spec, custom_loop: None, model: None, forks: None, first: None })
}

/// Refuses what is wrong no matter what the script does, before it runs.
fn check_before_script(home: &Home, spec: &JobSpec, place: &Path) -> anyhow::Result<()> {
    let mut any = spec.clone();
    custom_loop::any_plan().settle(&mut any);
    shipped::fill(&mut any)?;
    any.check().map_err(|invalid| refuse(invalid.to_string()))?;
    home.check_free(&any.job_name, place)
}

/// Checks a new job and makes its folder; a job that cannot run leaves nothing behind.
pub(crate) fn prepare(home: &Home, new: New, dir: Option<&Path>) -> anyhow::Result<Ready> {
    let New { mut spec, custom_loop, model, forks, first } = new;
    spec.check().map_err(|invalid| refuse(invalid.to_string()))?;
    let place = home.place(&spec.job_name, dir)?;
    home.check_free(&spec.job_name, &place)?;
    let model = model.as_ref().or(custom_loop.as_ref().map(|description| &description.model));
    let facts = checks::check(&spec, model, None)?;
    let imported = trained::imported(&spec, &place);
    if let Some((_, folder)) = &imported {
        spec.checkpoint_dir_for_init = folder.to_string_lossy().into_owned();
    }
    let job = home.create(&spec, dir)?;
    if let Some((weights, folder)) = imported {
        trained::import(&weights, &folder, &spec).or_else(|error| {
            home.remove(&job)?;
            Err(error)
        })?;
    }
    facts.save_indexes(&job.paths().indexes());
    custom_loop.map_or(Ok(()), |description| description.save(job.dir()))?;
    // With workers that are started manually, the first one is, too.
    let first = first.filter(|_| spec.num_workers > 0);
    first.as_ref().map_or(Ok(()), |first| first.join(&job))?;
    let hold = hold(&job)?;
    announce(&job, &spec, &facts);
    Ok(Ready { job, hold, resume: false, forks, first, command: host::entered() })
}

/// Locks the job for this process.
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
    let Ready { job, hold, resume, forks, first, command } = ready;
    let runtime = crate::runtime()?;
    let spec = job.spec()?;
    let forks = forks.or_else(|| fork_server(&spec));
    job.write_supervisor(&command)?;
    let run = supervisor::run(&job, &hold, resume, forks.clone(), first, &mut ui);
    let exit = runtime.block_on(run)?;
    if exit == Exit::Ok && spec.job_type == JobType::Train && models::is_python(&spec) {
        python::export(&job, &spec, forks.as_ref());
    }
    let status = ui.finish();
    if status.is_none() && exit == Exit::Failed {
        crate::logs::last_errors(&job).iter().for_each(console::error);
    }
    // Commands that wait for the end of the job may use all of its results.
    drop(hold);
    console::put_result(out, ui::summary(&job.handle(), status.as_ref(), exit))?;
    Ok(exit)
}

/// The process that forks this job's workers, if they are Python.
fn fork_server(spec: &JobSpec) -> Option<ForkServer> {
    let of = if spec.is_custom_loop() { custom_loop::command } else { python::this_command };
    ForkServer::start(spec, &of(spec))
}

fn announce(job: &Job, spec: &JobSpec, facts: &checks::Facts) {
    let JobSpec { job_name, model_def, num_workers, num_ps_pods, .. } = spec;
    let mut workers = counted(u64::from(*num_workers), "worker");
    if spec.spares > 0 {
        workers += &format!(", {}", counted(u64::from(spec.spares), "spare"));
    }
    let who = if let Some(lanes) = spec.step_lanes() {
        let minibatch = spec.minibatch_size;
        let step = u64::from(lanes) * u64::from(minibatch);
        let servers = match spec.n_servers() {
            0 => String::new(),
            n => format!("{n} PS for embedding tables, "),
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
    eprint(format_args!(
        "job {job_name} {verb} {model_def} on {}: {who}; logs and results in {}",
        counted(facts.n_records, "record"),
        job.dir().display(),
    ));
}
