// SPDX-License-Identifier: Apache-2.0
//! Workers of the user's own: a command whose training loop calls `elasticdl.init()`.
//!
//! Such a command is run once before the job, up to its first step, to say how many records it
//! has and what its model is made of; what it says becomes the job's.

use std::path::Path;
use std::process::Stdio;

use anyhow::Context as _;
use edl_core::id::WorkerId;
use edl_core::model::ModelSpec;
use edl_core::spec::JobSpec;
use edl_net::key::JobKey;
use edl_tensor::first_values;
use edl_worker::OpenModel;
use serde::Deserialize;

use crate::by_hand::Joined;
use crate::exit::{Exit, refuse};
use crate::jobs::Job;
use crate::{processes, python};

/// Says where a command that is only asked what it is puts its answer.
const DESCRIBE: &str = "ELASTICDL_DESCRIBE";
const MASTER_ADDR: &str = "ELASTICDL_MASTER_ADDR";
/// Every worker finds its number there.
pub(crate) const WORKER_ID: &str = "ELASTICDL_WORKER_ID";
const KEY_FILE: &str = "ELASTICDL_JOB_KEY_FILE";
const SUPERVISED: &str = "ELASTICDL_SUPERVISED";
/// In the job's folder.
const MODEL: &str = "model.json";
const VALUES: &str = "first_values.f32";

/// What a training loop says of itself.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Description {
    n_records: u64,
    minibatch_size: u32,
    num_epochs: u32,
    shuffle: bool,
    pub(crate) model: ModelSpec,
    #[serde(skip)]
    first_values: Vec<f32>,
}

/// The command line of a worker.
pub(crate) fn command(spec: &JobSpec) -> Vec<std::ffi::OsString> {
    vec!["sh".into(), "-c".into(), format!("exec {}", spec.job_command).into()]
}

/// What a worker finds in its environment, beside its number.
pub(crate) fn environment(job: &Job) -> anyhow::Result<Vec<(&'static str, String)>> {
    let master = job.master().context("the master's address is not known")?;
    Ok(vec![
        (MASTER_ADDR, master.address),
        (KEY_FILE, job.key_path().to_string_lossy().into_owned()),
        (SUPERVISED, "1".to_owned()),
    ])
}

/// Runs the command up to its first step.
pub(crate) fn describe(spec: &JobSpec) -> anyhow::Result<Description> {
    let folder = tempfile::tempdir().context("cannot make a folder")?;
    let command = command(spec);
    let ran = std::process::Command::new(&command[0])
        .args(&command[1..])
        .envs(python::environment(spec))
        .env(DESCRIBE, folder.path())
        .stdin(Stdio::null())
        .output()
        .context("cannot start a shell")?;
    let told = String::from_utf8_lossy(&ran.stderr);
    let Ok(text) = std::fs::read_to_string(folder.path().join(MODEL)) else {
        let why = match told.trim() {
            "" => "it never came to a step of `elasticdl.init()`".to_owned(),
            told => told.to_owned(),
        };
        return Err(refuse(format!("`{}` cannot be trained: {why}", spec.job_command)));
    };
    let mut described: Description =
        serde_json::from_str(&text).context("the loop's description cannot be read")?;
    let values = std::fs::read(folder.path().join(VALUES)).context("it left no first values")?;
    let numbers = values.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
    described.first_values = numbers.collect();
    Ok(described)
}

impl Description {
    /// Makes the job what the loop says.
    pub(crate) fn settle(&self, spec: &mut JobSpec) {
        spec.training_data = format!("range:{}", self.n_records);
        spec.validation_data.clear();
        spec.minibatch_size = self.minibatch_size;
        spec.num_epochs = self.num_epochs;
        spec.shuffle = self.shuffle;
    }

    /// Leaves what workers need in the job's folder.
    pub(crate) fn keep(&self, job_dir: &Path) -> anyhow::Result<()> {
        let text = serde_json::to_string(&self.model)?;
        std::fs::write(job_dir.join(MODEL), text).context("cannot write the job's folder")?;
        first_values::write(job_dir, &self.first_values)?;
        Ok(())
    }
}

/// What the model of a loop in this job is made of.
pub(crate) fn model(job_dir: &Path) -> Result<ModelSpec, String> {
    let path = job_dir.join(MODEL);
    let text = std::fs::read_to_string(&path).map_err(|error| {
        format!("cannot read `{}`: {error}; a loop must see the job's folder", path.display())
    })?;
    serde_json::from_str(&text).map_err(|error| format!("`{}`: {error}", path.display()))
}

/// Makes this process a worker of the job that its environment names, until the job's end. The
/// model is opened with what the job's folder says of it.
pub fn work(open: impl FnOnce(ModelSpec) -> OpenModel) -> Result<u8, String> {
    let joined = joined()?;
    let model = model(&joined.1.job_dir)?;
    let (worker, joined) = joined;
    crate::telemetry::start("INFO");
    let is_supervised = std::env::var_os(SUPERVISED).is_some();
    let ended = processes::worker_with(worker, joined, is_supervised, open(model));
    Ok(ended.unwrap_or(Exit::Failed).code())
}

fn joined() -> Result<(WorkerId, Joined), String> {
    let read = |name: &str| {
        std::env::var(name).map_err(|_| {
            format!(
                "{name} is not set: this is no worker of a job; start it by `elasticdl run`, or by \
                 `elasticdl train --job_command=…`"
            )
        })
    };
    let master_addr = read(MASTER_ADDR)?;
    let worker = read(WORKER_ID)?.parse().map_err(|_| format!("{WORKER_ID} must be a number"))?;
    let key_file = read(KEY_FILE)?;
    let key = JobKey::load(Path::new(&key_file)).map_err(|error| format!("{KEY_FILE}: {error}"))?;
    let job_dir = Path::new(&key_file).parent().unwrap_or(Path::new(".")).to_owned();
    Ok((WorkerId(worker), Joined { master_addr, key, job_dir, spec: None }))
}
