// SPDX-License-Identifier: Apache-2.0
//! Workers with a custom training loop: a command that calls `elasticdl.init()`.
//!
//! Such a command is run up to its first step before the job, to find its number of records and its
//! model. On this machine, the submitting command does that, and the process continues as the job's
//! first worker. On a cluster, the first master does, and the process ends.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{PipeWriter, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use edl_core::id::WorkerId;
use edl_core::job_dir::JobDir;
use edl_core::model::ModelSpec;
use edl_core::platform::{Ended, InstanceId, Role, WORKER_VARIABLES};
use edl_core::spec::{JobSpec, LogLevel, Strategy};
use edl_net::key::JobKey;
use edl_net::place::Place;
use edl_tensor::first_values;
use edl_worker::OpenModel;
use serde::{Deserialize, Serialize};
use serde_json::json;
use tempfile::TempDir;

use crate::exit::refuse;
use crate::fork_server::{self, ForkServer, Started};
use crate::jobs::{Job, write_json};
use crate::processes::{self, Membership};
use crate::{pod, python};

/// The folder for the description of a command that runs only up to its first step.
const DESCRIBE: &str = "ELASTICDL_DESCRIBE";
const MASTER_ADDR: &str = "ELASTICDL_MASTER_ADDR";
/// The number of a worker.
pub(crate) const WORKER_ID: &str = "ELASTICDL_WORKER_ID";
const KEY_FILE: &str = "ELASTICDL_JOB_KEY_FILE";
/// Unset: the folder of the key.
const JOB_DIR: &str = "ELASTICDL_JOB_DIR";
/// The folder of the trained model.
const OUTPUT: &str = "ELASTICDL_OUTPUT";
/// The number of lanes of a step.
const LANES: &str = "ELASTICDL_LANES";
/// The number of workers that the job starts with.
const WORLD_SIZE: &str = "ELASTICDL_WORLD_SIZE";
/// Where the metrics of the script also go, if set: `wandb` or `mlflow`.
const TRACK: &str = "ELASTICDL_TRACK";
/// Set for a worker whose supervisor holds its standard input.
pub(crate) const SUPERVISED: &str = "ELASTICDL_SUPERVISED";
/// Set for a worker in a pod.
pub(crate) const IN_POD: &str = "ELASTICDL_IN_POD";
/// What the command prints until there is a job.
const LOG: &str = "log";
/// The files of the description. The one with the model is complete once it exists, and the last.
const MODEL: &str = "model.json";
const VALUES: &str = "first_values.f32";
/// Only if the script takes the optimizer steps.
const STATE: &str = "first_state.bin";
/// Where optimizer steps are taken: `auto` (if unset), `rust` or `python`.
pub(crate) const STEP: &str = "ELASTICDL_STEP";
/// The worker that can be the process that has described the job.
pub(crate) const FIRST_WORKER: InstanceId = InstanceId { role: Role::Worker, id: 0 };
/// A script may read much data before its first step.
const DESCRIBE_LIMIT: Duration = Duration::from_secs(3600);

/// The description of a training loop.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Description {
    #[serde(flatten)]
    plan: LoopPlan,
    pub(crate) model: ModelSpec,
    #[serde(skip)]
    first_values: Vec<f32>,
    #[serde(skip)]
    first_state: Vec<u8>,
    /// Whether the process can continue as the first worker.
    #[serde(default)]
    continues: bool,
}

/// The process that has described its loop. It waits to become the job's first worker, and ends when
/// this is dropped.
#[derive(Debug)]
pub(crate) struct FirstWorker {
    process: Started,
    /// Its standard input, as for any worker.
    input: PipeWriter,
    /// With its log.
    folder: TempDir,
}

/// The data that a loop goes through.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LoopPlan {
    n_records: u64,
    minibatch_size: u32,
    num_epochs: u32,
    shuffle: bool,
    /// Whether the records are those of a stream, which have no numbers.
    #[serde(default)]
    is_stream: bool,
}

/// What the training data of a job begins with whose records are those of a stream.
const STREAM: &str = "stream";

/// Whether a job trains a stream: the audit of its records is one of the batches only.
pub(crate) fn is_stream(spec: &JobSpec) -> bool {
    spec.training_data.split_once(':').is_some_and(|(kind, _)| kind == STREAM)
}

/// The command of a worker, on this machine or in a pod. Its environment names the job.
pub(crate) fn worker(
    spec: &JobSpec,
    worker: u32,
    master_addr: &str,
    key_file: &Path,
    job_dir: &Path,
) -> Command {
    let mut command = command(spec);
    command
        .env(WORKER_ID, worker.to_string())
        .env(MASTER_ADDR, master_addr)
        .env(KEY_FILE, key_file)
        .env(JOB_DIR, job_dir)
        .env(OUTPUT, JobDir::new(job_dir).output(spec));
    command
}

pub(crate) fn command(spec: &JobSpec) -> Command {
    let mut command = Command::new("sh");
    command.arg("-c").arg(format!("exec {}", spec.job_command));
    command.envs(python::environment(spec)).env(LANES, spec.n_lanes().to_string());
    command.env(WORLD_SIZE, spec.num_workers.to_string());
    match spec.track {
        Some(track) => command.env(TRACK, track.name()),
        None => command.env_remove(TRACK),
    };
    command
}

/// Runs the command up to its first step. `folder` is for what it writes until there is a job.
/// `job_dir` is where the job will be, if the process can continue as its first worker.
pub(crate) fn describe(
    spec: &JobSpec,
    job_dir: Option<&Path>,
    forks: Option<&ForkServer>,
    folder: TempDir,
) -> anyhow::Result<(Description, Option<FirstWorker>)> {
    let line = &spec.job_command;
    let deadline = Instant::now() + DESCRIBE_LIMIT;
    let too_late = || refuse(format!("`{line}` did not reach its first step within an hour"));
    let mut command = command(spec);
    command.env(DESCRIBE, folder.path());
    if let Some(job_dir) = job_dir {
        command.env(SUPERVISED, "1").env(OUTPUT, JobDir::new(job_dir).output(spec));
        command.envs(worker_variables());
    }
    let log = folder.path().join(LOG);
    let output: OwnedFd = File::options().create(true).append(true).mode(0o600).open(&log)?.into();
    let (read, input) = std::io::pipe()?;
    let read = OwnedFd::from(read);
    let stdio = [&read, &output, &output];
    let started = fork_server::start(forks, &mut command, stdio, true, deadline)
        .map_err(|error| refuse(format!("cannot start `sh` for --job_command: {error}")))?;
    let process = started.ok_or_else(too_late)?;
    let mut first = FirstWorker { process, input, folder };
    let model = first.folder.path().join(MODEL);
    let looked = fork_server::before(deadline, || {
        let is_described = model.is_file().then_some(None);
        Ok(is_described.or_else(|| first.process.try_wait().map(Some)))
    })?;
    let ended = looked.ok_or_else(too_late)?;
    // It may have ended just after it was described.
    if !model.is_file() {
        let text = std::fs::read(&log)?;
        let text = String::from_utf8_lossy(&text);
        let why = match (text.trim(), ended) {
            (text, Some(how)) if !text.is_empty() && how != Ended::Exit(0) => text.to_owned(),
            (text, _) => {
                let separator = if text.is_empty() { "" } else { ":\n" };
                let rule = "it exited before its first step; it must call `elasticdl.init()`";
                format!("{rule}{separator}{text}")
            }
        };
        return Err(refuse(format!("cannot train `{line}`: {why}")));
    }
    let description = Description::read(first.folder.path())?;
    for name in [VALUES, STATE] {
        // They can be large, and have been read.
        let _there_is_none = std::fs::remove_file(first.folder.path().join(name));
    }
    let first = description.continues.then_some(first);
    Ok((description, first))
}

/// Variables for all workers that the user has not set.
pub(crate) fn worker_variables() -> impl Iterator<Item = (&'static str, &'static str)> {
    WORKER_VARIABLES.into_iter().filter(|(name, _)| std::env::var_os(name).is_none())
}

impl FirstWorker {
    /// Moves the log to the folder of the job.
    pub(crate) fn join(&self, job: &Job) -> anyhow::Result<()> {
        let log = job.paths().log(FIRST_WORKER);
        std::fs::rename(self.folder.path().join(LOG), &log)
            .with_context(|| format!("cannot write `{}`", log.display()))
    }

    /// Continues as the worker that this command would start; returns its standard input, too.
    pub(crate) fn begin(mut self, command: &Command) -> (Started, PipeWriter) {
        let set = command.get_envs().filter_map(|(name, value)| Some((name.to_str()?, value?)));
        let env: BTreeMap<&str, Cow<'_, str>> =
            set.map(|(name, value)| (name, value.to_string_lossy())).collect();
        // If it has ended already, its parent sees that.
        let _ended = writeln!(self.input, "{}", json!({ "env": env }));
        (self.process, self.input)
    }
}

/// A plan that every loop could have.
pub(crate) fn any_plan() -> LoopPlan {
    LoopPlan { n_records: 1, minibatch_size: 1, num_epochs: 1, shuffle: true, is_stream: false }
}

/// The plan of a loop that was described before.
pub(crate) fn plan(job_dir: &Path) -> Option<LoopPlan> {
    serde_json::from_slice(&std::fs::read(JobDir::new(job_dir).loop_plan()).ok()?).ok()
}

impl LoopPlan {
    /// Sets the fields of the job that the loop decides.
    pub(crate) fn settle(&self, spec: &mut JobSpec) {
        let kind = if self.is_stream { STREAM } else { "range" };
        spec.training_data = format!("{kind}:{}", self.n_records);
        spec.validation_data.clear();
        spec.minibatch_size = self.minibatch_size;
        spec.num_epochs = self.num_epochs;
        spec.shuffle = self.shuffle;
    }
}

impl Description {
    fn read(folder: &Path) -> anyhow::Result<Self> {
        let text = std::fs::read(folder.join(MODEL)).context("no model was saved")?;
        let mut described: Self = serde_json::from_slice(&text)
            .context("cannot read the description of the training loop")?;
        let values = std::fs::read(folder.join(VALUES)).context("no initial values were saved")?;
        let numbers = values.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
        described.first_values = numbers.collect();
        if described.model.optimizer.is_script() {
            described.first_state =
                std::fs::read(folder.join(STATE)).context("no initial state was saved")?;
        }
        Ok(described)
    }

    /// Sets the fields of the job that the loop decides.
    pub(crate) fn settle(&self, spec: &mut JobSpec) {
        self.plan.settle(spec);
    }

    /// Saves what workers need in the job's folder.
    pub(crate) fn save(&self, job_dir: &Path) -> anyhow::Result<()> {
        let paths = JobDir::new(job_dir);
        write_json(&paths.loop_model(), &self.model)?;
        first_values::write(job_dir, &self.first_values)?;
        if self.model.optimizer.is_script() {
            first_values::write_state(job_dir, &self.first_state)?;
        }
        // Last: once it exists, the rest is complete.
        write_json(&paths.loop_plan(), &self.plan)
    }
}

/// The model of this job's loop.
pub(crate) fn model(job_dir: &Path) -> Result<ModelSpec, String> {
    let path = JobDir::new(job_dir).loop_model();
    let text = std::fs::read_to_string(&path).map_err(|error| {
        let shown = path.display();
        format!("cannot read `{shown}`: {error}; the training loop must see the job's folder")
    })?;
    serde_json::from_str(&text).map_err(|error| format!("`{}`: {error}", path.display()))
}

/// Makes this process a worker of the job that its environment names, until the job's end. `open`
/// gets the description of the model from the job's folder.
pub fn work(open: impl FnOnce(ModelSpec) -> OpenModel) -> Result<u8, String> {
    let (worker, membership) = membership()?;
    let model = open(model(&membership.job_dir)?);
    crate::telemetry::start(LogLevel::Info);
    let ended = if std::env::var_os(IN_POD).is_some() {
        pod::work(worker, model)
    } else {
        let is_supervised = std::env::var_os(SUPERVISED).is_some();
        processes::run(is_supervised, async |shutdown| {
            membership.worker(worker, model, shutdown).await
        })
    };
    ended.map(crate::exit::Exit::code).map_err(|error| format!("{error:#}"))
}

/// Trains in this process, without a job. `description` is what a script writes that is run up to
/// its first step; `values` and `state` are those before it. The result is that of a job with as
/// many lanes.
pub fn work_alone(
    description: &str,
    (values, state): (Vec<f32>, Vec<u8>),
    lanes: u32,
    open: impl FnOnce(ModelSpec) -> OpenModel,
) -> Result<u8, String> {
    let described: Description =
        serde_json::from_str(description).map_err(|error| error.to_string())?;
    let described = Description { first_values: values, first_state: state, ..described };
    let strategy = Strategy::Allreduce;
    let mut spec =
        JobSpec { distribution_strategy: strategy, lanes: Some(lanes), ..JobSpec::default() };
    described.settle(&mut spec);
    let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
    described.save(folder.path()).map_err(|error| format!("{error:#}"))?;
    let model = open(described.model)(&spec)?;
    let (n_records, path) = (described.plan.n_records, folder.path().to_owned());
    // At once, because a script that is killed would leave it behind.
    let forget = move || drop(folder);
    let trained = edl_worker::train_alone(&spec, n_records, model, &path, forget);
    trained.map(|()| crate::exit::Exit::Ok.code()).map_err(|error| error.to_string())
}

fn membership() -> Result<(WorkerId, Membership), String> {
    let read = |name: &str| {
        std::env::var(name).map_err(|_| {
            format!(
                "{name} is not set: this process is not a worker of a job; start it with \
                 `elasticdl run` or `elasticdl train --job_command=…`"
            )
        })
    };
    let master_addr = read(MASTER_ADDR)?;
    let worker = read(WORKER_ID)?.parse().map_err(|_| format!("{WORKER_ID} must be a number"))?;
    let key_file = read(KEY_FILE)?;
    let key = JobKey::load(Path::new(&key_file)).map_err(|error| format!("{KEY_FILE}: {error}"))?;
    let beside = || Path::new(&key_file).parent().unwrap_or(Path::new(".")).to_owned();
    let job_dir = std::env::var_os(JOB_DIR).map_or_else(beside, PathBuf::from);
    let place = Place::default();
    Ok((WorkerId(worker), Membership { master_addr, key, job_dir, place }))
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;

    use edl_core::spec::Track;

    use super::*;
    use crate::jobs::Home;

    fn saying(command: &str) -> JobSpec {
        JobSpec { job_command: command.into(), ..JobSpec::default() }
    }

    #[test]
    fn a_worker_finds_its_job_in_its_environment() {
        let (key_file, job_dir) = (Path::new("/key/job.key"), Path::new("/data/job"));
        let track = Some(Track::Mlflow);
        let spec = JobSpec { lanes: Some(2), num_workers: 3, track, ..saying("python train.py") };
        let command = worker(&spec, 7, "there:1", key_file, job_dir);
        let words: Vec<&OsStr> = command.get_args().collect();
        assert_eq!(words, ["-c", "exec python train.py"]);
        for (name, value) in [
            ("ELASTICDL_WORKER_ID", "7"),
            ("ELASTICDL_MASTER_ADDR", "there:1"),
            ("ELASTICDL_JOB_KEY_FILE", "/key/job.key"),
            ("ELASTICDL_JOB_DIR", "/data/job"),
            ("OMP_NUM_THREADS", "1"),
            ("ELASTICDL_LANES", "2"),
            ("ELASTICDL_WORLD_SIZE", "3"),
            ("ELASTICDL_TRACK", "mlflow"),
        ] {
            let is_set = (OsStr::new(name), Some(OsStr::new(value)));
            assert!(command.get_envs().any(|set| set == is_set), "{name}");
        }
    }

    #[test]
    fn the_description_of_a_loop_is_saved_and_sets_the_job() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(plan(folder.path()), None);
        let count = JobSpec { model_def: "count".into(), ..JobSpec::default() };
        let any = any_plan();
        let described = Description {
            plan: LoopPlan {
                n_records: 40,
                minibatch_size: 5,
                num_epochs: 2,
                shuffle: false,
                ..any
            },
            model: crate::models::describe(&count).unwrap(),
            first_values: vec![0.5],
            first_state: Vec::new(),
            continues: false,
        };
        described.save(folder.path()).unwrap();
        let mut spec = saying("x");
        plan(folder.path()).unwrap().settle(&mut spec);
        assert_eq!((spec.training_data.as_str(), spec.num_epochs), ("range:40", 2));
        assert_eq!((spec.minibatch_size, spec.shuffle), (5, false));
        assert_eq!(model(folder.path()).unwrap(), described.model);
        assert!(!is_stream(&spec));
        LoopPlan { is_stream: true, ..described.plan }.settle(&mut spec);
        assert_eq!(spec.training_data, "stream:40");
        assert!(is_stream(&spec));
    }

    /// Describes a loop and then prints what it is given on its standard input.
    fn describing(continues: bool, fixture: &Path) -> JobSpec {
        let count = JobSpec { model_def: "count".into(), ..JobSpec::default() };
        let model = crate::models::describe(&count).unwrap();
        let plan = json!({
            "n_records": 40, "minibatch_size": 5, "num_epochs": 2, "shuffle": false,
            "model": model, "continues": continues,
        });
        std::fs::write(fixture.join("model"), plan.to_string()).unwrap();
        let script = "echo before; : > $ELASTICDL_DESCRIBE/first_values.f32; cp model \
                      $ELASTICDL_DESCRIBE/new; mv $ELASTICDL_DESCRIBE/new \
                      $ELASTICDL_DESCRIBE/model.json; cat; exit 7";
        saying(&format!("sh -c 'cd {}; {script}'", fixture.display()))
    }

    #[tokio::test]
    async fn the_process_that_describes_a_loop_continues_as_the_first_worker() {
        let root = tempfile::tempdir().unwrap();
        let spec = describing(true, root.path());
        let home = Home::at(&root.path().join("home"));
        let place = home.place("x", None).unwrap();
        let draft = home.draft("x", &place).unwrap();
        let (_, first) = describe(&spec, Some(&place), None, draft).unwrap();
        let job = JobSpec { job_name: "x".into(), ..JobSpec::default() };
        let job = home.create(&job, None).unwrap();
        let first = first.unwrap();
        first.join(&job).unwrap();
        let mut command = Command::new("x");
        command.env("ELASTICDL_WORKER_ID", "0").env_remove("ELASTICDL_TRACK");
        let (mut process, input) = first.begin(&command);
        drop(input);
        assert_eq!(process.wait().await.unwrap(), Ended::Exit(7));
        let log = std::fs::read_to_string(job.paths().log(FIRST_WORKER)).unwrap();
        assert_eq!(log, "before\n{\"env\":{\"ELASTICDL_WORKER_ID\":\"0\"}}\n");
        let left = std::fs::read_dir(home.jobs_dir()).unwrap().count();
        assert_eq!(left, 1, "only the folder of the job");
    }

    #[test]
    fn a_process_that_cannot_continue_is_no_worker() {
        let root = tempfile::tempdir().unwrap();
        let spec = describing(false, root.path());
        let folder = tempfile::tempdir().unwrap();
        assert!(describe(&spec, None, None, folder).unwrap().1.is_none());
    }

    #[test]
    fn a_command_that_trains_nothing_is_refused_with_its_output() {
        for (command, why) in [
            ("echo no module called torch >&2; exit 1", "no module called torch"),
            ("true", "exited before its first step"),
            ("echo done", "must call `elasticdl.init()`:\ndone"),
        ] {
            // Not `exec`: what follows a `;` is the shell's.
            let spec = saying(&format!("sh -c '{command}'"));
            let folder = tempfile::tempdir().unwrap();
            let refused = describe(&spec, None, None, folder).unwrap_err().to_string();
            assert!(refused.contains(why), "{refused}");
        }
    }
}
