// SPDX-License-Identifier: Apache-2.0
//! What is looked at before anything starts: each failure is one sentence that names the thing
//! and the next step.

use std::net::TcpListener;
use std::path::{Path, PathBuf};

use edl_core::model::{ModelSpec, unlabelled};
use edl_core::spec::{JobSpec, JobType};
use edl_data::{Dataset, OpenOptions};
use edl_tensor::checkpoint::{self, Checkpoint};

use crate::exit::refuse;
use crate::flags::Given;
use crate::jobs::Job;
use crate::models;

/// Workers are processes of one machine.
pub(crate) const MAX_WORKERS: u32 = 512;

/// What the checks found out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Facts {
    /// Of the data that the job goes through.
    pub(crate) n_records: u64,
}

/// Checks everything that can be known at submit time, but the job's folder.
/// `known` is the model of a loop that has described itself.
pub(crate) fn check(spec: &JobSpec, known: Option<&ModelSpec>) -> anyhow::Result<Facts> {
    spec.check().map_err(|invalid| refuse(invalid.to_string()))?;
    check_symbols(spec)?;
    let model = &known.cloned().map_or_else(|| models::describe(spec), Ok)?;
    check_strategy(spec, model)?;
    edl_core::optimizer::resolve(spec, model).map_err(|error| refuse(error.to_string()))?;
    let n_records = check_data(spec, model)?;
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
    Ok(Facts { n_records })
}

/// Only a Python module has functions to name.
fn check_symbols(spec: &JobSpec) -> anyhow::Result<()> {
    let symbols = [
        ("optimizer_fn", &spec.optimizer_fn),
        ("loss", &spec.loss),
        ("feed", &spec.feed),
        ("eval_metrics_fn", &spec.eval_metrics_fn),
        ("callbacks", &spec.callbacks),
        ("custom_data_reader", &spec.custom_data_reader),
        ("prediction_outputs_processor", &spec.prediction_outputs_processor),
    ];
    match symbols.iter().find(|(_, symbol)| !symbol.is_empty()) {
        Some((flag, _)) if !models::is_python(spec) => Err(refuse(format!(
            "--{flag} names a part of a Python model, but `{}` is built in; remove it",
            spec.model_def
        ))),
        Some(_) | None => Ok(()),
    }
}

/// A job whose processes are started here needs some workers, and not more than the machine and
/// its supervisor can bear.
pub(crate) fn check_workers(num_workers: u32) -> anyhow::Result<()> {
    match num_workers {
        0 => Err(refuse(
            "--num_workers=0 is too few; use at least 1, or start workers manually with \
             `elasticdl master`",
        )),
        1..=MAX_WORKERS => Ok(()),
        _ => Err(refuse(format!(
            "--num_workers={num_workers} is too many for one machine; use at most {MAX_WORKERS}"
        ))),
    }
}

/// Tables live on servers, and servers that hold nothing else need some.
fn check_strategy(spec: &JobSpec, model: &ModelSpec) -> anyhow::Result<()> {
    match model.tables.first() {
        Some(table) if !spec.has_servers() => Err(refuse(format!(
            "model `{}` has an embedding table `{}`, which AllReduce alone cannot train; use \
             --distribution_strategy=HybridStrategy, which keeps tables on parameter servers, or \
             ParameterServerStrategy",
            model.name, table.name
        ))),
        None if spec.is_hybrid() => Err(refuse(format!(
            "model `{}` has no embedding tables, so parameter servers would be empty; use \
             --distribution_strategy=AllreduceStrategy",
            model.name
        ))),
        Some(_) | None => Ok(()),
    }
}

/// Opens every data set of the job and tries the first record on the model.
fn check_data(spec: &JobSpec, model: &ModelSpec) -> anyhow::Result<u64> {
    let optional = |flag, data: &String| (!data.is_empty()).then(|| (flag, data.clone()));
    let sets: Vec<(&str, String)> = match spec.job_type {
        JobType::Train => [
            Some(("--training_data", spec.training_data.clone())),
            optional("--validation_data", &spec.validation_data),
        ]
        .into_iter()
        .flatten()
        .collect(),
        JobType::Evaluate => vec![("--validation_data", spec.validation_data.clone())],
        JobType::Predict => vec![("--prediction_data", spec.prediction_data.clone())],
    };
    let options = OpenOptions { codec: spec.codec_type, params: spec.data_reader_params.clone() };
    let fields = match spec.job_type {
        JobType::Train | JobType::Evaluate => model.inputs.clone(),
        JobType::Predict => unlabelled(&model.inputs),
    };
    let mut n_records = None;
    for (flag, location) in sets {
        if location.is_empty() {
            return Err(refuse(format!("{flag} is missing; specify a file, folder, glob or URL")));
        }
        let refused = |error: edl_data::Error| refuse(format!("{flag}: {}", chain(&error)));
        let data = Dataset::open(&location, &options).map_err(refused)?;
        data.check(&fields).map_err(|error| {
            refuse(format!(
                "{flag} does not match model `{}`: {}; choose other data or another --model_def",
                model.name,
                chain(&error)
            ))
        })?;
        n_records.get_or_insert(data.n_records());
    }
    Ok(n_records.unwrap_or_default())
}

/// Replaces `--checkpoint_dir_for_init` by the one checkpoint that it means, and takes from the
/// job that wrote it what the user left open.
pub(crate) fn pin_checkpoint(spec: &mut JobSpec, given: &Given) -> anyhow::Result<()> {
    if spec.checkpoint_dir_for_init.is_empty() {
        if spec.job_type == JobType::Train {
            return Ok(());
        }
        return Err(refuse(
            "--checkpoint_dir_for_init is missing; specify a checkpoint, or a job's `checkpoints` \
             folder",
        ));
    }
    let checkpoint = find_checkpoint(Path::new(&spec.checkpoint_dir_for_init))?;
    let writer = checkpoint.path.ancestors().skip(1).take(2).find_map(Job::open);
    let said = |word: &str| given.contains_key(word);
    match writer.and_then(|job| job.spec().ok()) {
        Some(before) if !said("model_def") || spec.model_def == before.model_def => {
            spec.model_def = before.model_def;
            if !said("model_params") {
                spec.model_params = before.model_params;
            }
            if !said("codec_type") {
                spec.codec_type = before.codec_type;
            }
            if !said("data_reader_params") {
                spec.data_reader_params = before.data_reader_params;
            }
            if spec.job_type == JobType::Evaluate && !said("validation_data") {
                spec.validation_data = before.validation_data;
            }
        }
        None if !said("model_def") => spec.model_def = checkpoint.manifest.model.name.clone(),
        Some(_) | None => {}
    }
    spec.checkpoint_dir_for_init = checkpoint.path.to_string_lossy().into_owned();
    Ok(())
}

/// The checkpoint in a folder, the newest of a folder of checkpoints, or the newest of a job.
pub(crate) fn find_checkpoint(dir: &Path) -> anyhow::Result<Checkpoint> {
    let shown = dir.display();
    let refused = |error: checkpoint::Error| {
        refuse(format!("--checkpoint_dir_for_init: {}; choose another checkpoint", chain(&error)))
    };
    if dir.join("manifest.json").is_file() {
        return Checkpoint::open(dir).map_err(refused);
    }
    let below = match Job::open(dir) {
        Some(job) => job.paths().checkpoints(&job.spec()?),
        None => PathBuf::from(dir),
    };
    let found = checkpoint::find(&below).map_err(refused)?.pop();
    found.ok_or_else(|| {
        refuse(format!(
            "--checkpoint_dir_for_init: no complete checkpoint in `{shown}`; choose another folder"
        ))
    })
}

fn check_checkpoint(spec: &JobSpec, model: &ModelSpec) -> anyhow::Result<()> {
    if spec.checkpoint_dir_for_init.is_empty() {
        return Ok(());
    }
    let checkpoint = find_checkpoint(Path::new(&spec.checkpoint_dir_for_init))?;
    let theirs = &checkpoint.manifest.model;
    let shown = checkpoint.path.display();
    if theirs.name != model.name {
        return Err(refuse(format!(
            "the checkpoint `{shown}` is of model `{}`, not `{}`; use --model_def={} or another \
             checkpoint",
            theirs.name, model.name, theirs.name
        )));
    }
    if theirs.params != model.params || theirs.tables != model.tables {
        return Err(refuse(format!(
            "the checkpoint `{shown}` is of a `{}` with different parameters; use the \
             --model_params it was trained with, or another checkpoint",
            theirs.name
        )));
    }
    Ok(())
}

/// A port that is asked for must be free.
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
    // The nearest folder that exists must take new entries; nothing is made yet.
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

/// Makes an entry and removes it: permissions alone do not tell of read-only mounts.
pub(crate) fn tempdir_in(folder: &Path) -> std::io::Result<()> {
    let probe = folder.join(format!(".elasticdl-{}", std::process::id()));
    std::fs::create_dir(&probe)?;
    std::fs::remove_dir(&probe)
}

/// An error with its causes, as one sentence.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let words = error.to_string();
        // Some libraries repeat their cause in their own words.
        if !text.contains(&words) {
            text = format!("{text}: {words}");
        }
        cause = error.source();
    }
    text
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
        check_workers(1).unwrap();
        check_workers(MAX_WORKERS).unwrap();
        assert!(refusal(check_workers(0)).starts_with("--num_workers=0 is too few; "));
        assert!(refusal(check_workers(100_000)).contains("at most 512"));
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
    fn evaluation_without_a_checkpoint_is_refused() {
        let mut spec = JobSpec { job_type: JobType::Evaluate, ..JobSpec::default() };
        let text = refusal(pin_checkpoint(&mut spec, &Given::new()));
        assert!(text.starts_with("--checkpoint_dir_for_init is missing"), "{text}");
        let dir = tempfile::tempdir().unwrap();
        spec.checkpoint_dir_for_init = dir.path().to_string_lossy().into_owned();
        let text = refusal(pin_checkpoint(&mut spec, &Given::new()));
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
