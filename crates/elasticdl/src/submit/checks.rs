// SPDX-License-Identifier: Apache-2.0
//! Checks before anything starts. Each failure is one sentence that names the problem and the next
//! step.

use std::net::TcpListener;
use std::path::Path;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use edl_core::error::chain;
use edl_core::model::{ModelSpec, unlabelled};
use edl_core::spec::{FIELDS, Field, JobSpec, JobType};
use edl_data::{Dataset, OpenOptions, Progress};

use crate::console::eprint;
use crate::exit::refuse;
use crate::flags::{self, Given};
use crate::jobs::Home;
use crate::trained::{self, Trained};
use crate::{models, shipped};

/// Workers are processes of one machine.
pub(crate) const MAX_WORKERS: u32 = 512;

/// Between two lines about an index that is being built.
const PROGRESS_EVERY: Duration = Duration::from_secs(2);

/// What the checks found.
pub(crate) struct Facts {
    /// Of the data that the job goes through.
    pub(crate) n_records: u64,
    data: Vec<Dataset>,
}

impl Facts {
    /// Saves the indexes of the data for the processes of the job.
    pub(crate) fn save_indexes(&self, dir: &Path) {
        if let Err(error) = self.data.iter().try_for_each(|data| data.save_index(dir)) {
            eprint(format_args!("{error}; every process of the job indexes the data itself"));
        }
    }
}

/// Checks everything that can be known at submit time, except the job's folder. `known` is the model
/// of a job that was already described; `indexes` is the folder that can have indexes of its data.
pub(crate) fn check(
    spec: &JobSpec,
    known: Option<&ModelSpec>,
    indexes: Option<&Path>,
) -> anyhow::Result<Facts> {
    spec.check().map_err(|invalid| refuse(invalid.to_string()))?;
    check_symbols(spec)?;
    let model = &known.cloned().map_or_else(|| models::describe(spec), Ok)?;
    check_strategy(spec, model)?;
    edl_core::optimizer::resolve(spec, model).map_err(|error| refuse(error.to_string()))?;
    let data = check_data(spec, model, indexes)?;
    check_checkpoint(spec, model)?;
    for (flag, port) in [("--port", spec.port), ("--http_port", spec.http_port)] {
        check_port(flag, port)?;
    }
    let folders = [
        ("--output", &spec.output),
        ("--checkpoint_dir", &spec.checkpoint_dir),
        ("--tensorboard_dir", &spec.tensorboard_dir),
    ];
    for (flag, folder) in folders {
        check_folder(flag, folder)?;
    }
    Ok(Facts { n_records: data.first().map_or(0, Dataset::n_records), data })
}

/// Only a Python model has functions to name.
fn check_symbols(spec: &JobSpec) -> anyhow::Result<()> {
    let fields = serde_json::json!(spec);
    let is_set = |field: &&Field| field.is_symbol && fields[field.name] != "";
    match FIELDS.iter().find(is_set) {
        Some(field) if !models::is_python(spec) => Err(refuse(format!(
            "--{} names a part of a Python model, but `{}` is built in; remove it",
            field.name, spec.model_def
        ))),
        Some(_) | None => Ok(()),
    }
}

/// A job on this machine needs at least one worker, and no more than its supervisor can handle.
pub(crate) fn check_workers(spec: &JobSpec) -> anyhow::Result<()> {
    let JobSpec { num_workers, spares, .. } = *spec;
    match num_workers.saturating_add(spares) {
        _ if num_workers == 0 => Err(refuse(
            "--num_workers=0 is too few; use at least 1, or start workers manually with \
             `elasticdl master`",
        )),
        0..=MAX_WORKERS => Ok(()),
        _ if spares > 0 => Err(refuse(format!(
            "--num_workers={num_workers} and --spares={spares} are too many for one machine; use at \
             most {MAX_WORKERS} together"
        ))),
        _ => Err(refuse(format!(
            "--num_workers={num_workers} is too many for one machine; use at most {MAX_WORKERS}"
        ))),
    }
}

/// Embedding tables need servers, and Hybrid needs embedding tables.
fn check_strategy(spec: &JobSpec, model: &ModelSpec) -> anyhow::Result<()> {
    match model.tables.first() {
        Some(table) if spec.n_servers() == 0 => Err(refuse(format!(
            "model `{}` has an embedding table `{}`, which AllReduce alone cannot train; use \
             --distribution_strategy=HybridStrategy, which keeps tables on parameter servers, or \
             ParameterServerStrategy",
            model.name, table.name
        ))),
        None if spec.step_lanes().is_some() && spec.n_servers() > 0 => Err(refuse(format!(
            "model `{}` has no embedding tables, so parameter servers would be empty; use \
             --distribution_strategy=AllreduceStrategy",
            model.name
        ))),
        Some(_) | None => Ok(()),
    }
}

/// Opens every data set of the job and tries the first record on the model.
fn check_data(
    spec: &JobSpec,
    model: &ModelSpec,
    indexes: Option<&Path>,
) -> anyhow::Result<Vec<Dataset>> {
    let (flag, data) = shipped::data_of(spec);
    let mut sets = vec![(flag, data)];
    if spec.job_type == JobType::Train && !spec.validation_data.is_empty() {
        sets.push(("validation_data", &spec.validation_data));
    }
    let options = OpenOptions { codec: spec.codec_type, params: spec.data_reader_params.clone() };
    let fields = match spec.job_type {
        JobType::Train | JobType::Evaluate => model.inputs.clone(),
        JobType::Predict => unlabelled(&model.inputs),
    };
    let mut opened = Vec::new();
    for (flag, location) in sets {
        if location.is_empty() {
            return Err(refuse(format!(
                "--{flag} is missing; specify a file, folder, glob or URL"
            )));
        }
        let refused = |error: edl_data::Error| refuse(format!("--{flag}: {}", chain(&error)));
        let data = open(flag, location, &options, indexes).map_err(refused)?;
        data.check(&fields).map_err(|error| {
            refuse(format!(
                "--{flag} does not match model `{}`: {}; choose other data or another --model_def",
                model.name,
                chain(&error)
            ))
        })?;
        opened.push(data);
    }
    Ok(opened)
}

/// Opens a data set; if that takes long, the terminal shows how far it is.
fn open(
    flag: &str,
    location: &str,
    options: &OpenOptions,
    indexes: Option<&Path>,
) -> Result<Dataset, edl_data::Error> {
    let progress = &Progress::default();
    std::thread::scope(|scope| {
        // Dropped at the end, which ends the thread.
        let (_opening, ended) = mpsc::channel::<()>();
        scope.spawn(move || {
            while ended.recv_timeout(PROGRESS_EVERY) == Err(RecvTimeoutError::Timeout) {
                let (done, total) = progress.bytes();
                let percent = done.saturating_mul(100).checked_div(total).unwrap_or(0);
                eprint(format_args!("indexing --{flag}: {percent} %"));
            }
        });
        Dataset::open_indexed(location, options, indexes, progress)
    })
}

/// Replaces `--checkpoint_dir_for_init` by the trained model that it selects, and copies fields that
/// the user did not set from the job that trained it.
pub(crate) fn pin_checkpoint(home: &Home, spec: &mut JobSpec, given: &Given) -> anyhow::Result<()> {
    if spec.checkpoint_dir_for_init.is_empty() {
        if spec.job_type == JobType::Train {
            return Ok(());
        }
        let kind = spec.job_type.name();
        return Err(refuse(format!(
            "no trained model is named; run `elasticdl {kind} MODEL` with a job, an output folder, a \
             model.safetensors or a checkpoint"
        )));
    }
    let named = flags::text(given, trained::FIELD).unwrap_or_default();
    let is_path = Path::new(&spec.checkpoint_dir_for_init).exists();
    // The path is absolute by now, which a job's name must not be.
    let named = if is_path { spec.checkpoint_dir_for_init.clone() } else { named.to_owned() };
    Trained::find(&named, home)?.settle(spec, given)
}

fn check_checkpoint(spec: &JobSpec, model: &ModelSpec) -> anyhow::Result<()> {
    if spec.checkpoint_dir_for_init.is_empty() {
        return Ok(());
    }
    let found = Trained::find(&spec.checkpoint_dir_for_init, &Home::from_env()?)?;
    let (theirs, shown) = (found.model(), found.path().display());
    if theirs.name != model.name {
        return Err(refuse(format!(
            "`{shown}` is of model `{}`, not `{}`; use --model_def={} or another trained model",
            theirs.name, model.name, theirs.name
        )));
    }
    if theirs.params != model.params || theirs.tables != model.tables {
        return Err(refuse(format!(
            "`{shown}` is of a `{}` with different parameters; use the --model_params it was \
             trained with, or another trained model",
            theirs.name
        )));
    }
    Ok(())
}

/// A port that the user sets must be free.
pub(crate) fn check_port(flag: &str, port: u16) -> anyhow::Result<()> {
    if port == 0 {
        return Ok(());
    }
    TcpListener::bind(("127.0.0.1", port)).map(drop).map_err(|error| {
        refuse(format!(
            "cannot use {flag}={port}: {error}; choose another, or omit it to use a free port"
        ))
    })
}

fn check_folder(flag: &str, folder: &str) -> anyhow::Result<()> {
    if folder.is_empty() {
        return Ok(());
    }
    // The nearest existing folder must be writable; nothing is created yet.
    let path = Path::new(folder);
    let existing = path.ancestors().find(|ancestor| ancestor.exists()).unwrap_or(path);
    let problem = if existing.is_dir() {
        tempdir_in(existing).err().map(|error| error.to_string())
    } else {
        Some(format!("`{}` is not a folder", existing.display()))
    };
    match problem {
        None => Ok(()),
        Some(problem) => {
            Err(refuse(format!("{flag}: cannot write to `{folder}`: {problem}; choose another")))
        }
    }
}

/// Creates a folder and removes it: permissions do not show read-only mounts.
pub(crate) fn tempdir_in(folder: &Path) -> std::io::Result<()> {
    let probe = folder.join(format!(".elasticdl-{}", std::process::id()));
    std::fs::create_dir(&probe)?;
    std::fs::remove_dir(&probe)
}

#[cfg(test)]
mod tests {
    use edl_core::spec::Strategy;

    use super::*;

    fn refusal<T: std::fmt::Debug>(result: anyhow::Result<T>) -> String {
        let error = result.unwrap_err();
        assert_eq!(crate::exit::of_error(&error), crate::exit::Exit::BadInput);
        error.to_string()
    }

    #[test]
    fn allreduce_is_refused_for_a_model_with_tables() {
        let spec = JobSpec { distribution_strategy: Strategy::Allreduce, ..JobSpec::default() };
        let deepfm = JobSpec { model_def: "deepfm".into(), ..JobSpec::default() };
        let deepfm = edl_zoo::open(&deepfm).unwrap();
        let text = refusal(check_strategy(&spec, deepfm.spec()));
        assert!(text.contains("`deepfm`") && text.contains("HybridStrategy"), "{text}");
        check_strategy(&JobSpec::default(), deepfm.spec()).unwrap();
        let hybrid = JobSpec { distribution_strategy: Strategy::Hybrid, ..JobSpec::default() };
        check_strategy(&hybrid, deepfm.spec()).unwrap();
        let cnn = edl_zoo::open(&JobSpec::default()).unwrap();
        let text = refusal(check_strategy(&hybrid, cnn.spec()));
        assert!(text.contains("no embedding tables") && text.contains("Allreduce"), "{text}");
    }

    #[test]
    fn a_number_of_workers_that_cannot_work_is_refused() {
        let check = |num_workers, spares| {
            check_workers(&JobSpec { num_workers, spares, ..JobSpec::default() })
        };
        check(1, 0).unwrap();
        check(MAX_WORKERS - 1, 1).unwrap();
        assert!(refusal(check(0, 1)).starts_with("--num_workers=0 is too few; "));
        assert!(refusal(check(100_000, 0)).contains("at most 512"));
        let together = "--num_workers=512 and --spares=1 are too many for one machine";
        assert!(refusal(check(MAX_WORKERS, 1)).starts_with(together));
    }

    #[test]
    fn a_port_in_use_is_refused_and_a_free_one_is_not() {
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = taken.local_addr().unwrap().port();
        let text = refusal(check_port("--port", port));
        assert!(text.starts_with(&format!("cannot use --port={port}: ")), "{text}");
        drop(taken);
        check_port("--port", port).unwrap();
    }

    #[test]
    fn evaluation_without_a_trained_model_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let home = Home::at(dir.path());
        let mut spec = JobSpec { job_type: JobType::Evaluate, ..JobSpec::default() };
        let text = refusal(pin_checkpoint(&home, &mut spec, &Given::new()));
        assert!(text.contains("`elasticdl evaluate MODEL`"), "{text}");
        spec.checkpoint_dir_for_init = dir.path().to_string_lossy().into_owned();
        let text = refusal(pin_checkpoint(&home, &mut spec, &Given::new()));
        assert!(text.contains("no complete checkpoint"), "{text}");
    }

    #[test]
    fn an_output_below_a_file_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        std::fs::write(&file, "").unwrap();
        let below = file.join("deep/er").to_string_lossy().into_owned();
        assert!(refusal(check_folder("--output", &below)).starts_with("--output: cannot write"));
        let new = dir.path().join("new/folder").to_string_lossy().into_owned();
        check_folder("--output", &new).unwrap();
        assert!(!dir.path().join("new").exists());
    }
}
