// SPDX-License-Identifier: Apache-2.0
//! A trained model that the user names: a job, its output folder, a `model.safetensors`, or a
//! checkpoint.

use std::path::{Path, PathBuf};

use edl_core::error::chain;
use edl_core::model::ModelSpec;
use edl_core::spec::{FIELDS, JobSpec, JobType};
use edl_tensor::checkpoint::{self, Checkpoint};
use edl_tensor::import::{CARD, ExportedModel, WEIGHTS};

use crate::exit::refuse;
use crate::flags::Given;
use crate::jobs::{Home, Job};
use crate::{config, paths};

/// The field that names it.
pub(crate) const FIELD: &str = "checkpoint_dir_for_init";
/// Where a job keeps the checkpoint that is made from an exported model.
const IMPORTED: &str = "imported";

const MANIFEST: &str = "manifest.json";

const KINDS: &str = "a job, an output folder, a model.safetensors or a checkpoint";

/// A trained model on this machine.
#[derive(Debug)]
pub(crate) struct Trained {
    pub(crate) source: Source,
    /// The job that trained it, if it is still on this machine.
    pub(crate) writer: Option<JobSpec>,
}

#[derive(Debug)]
pub(crate) enum Source {
    Checkpoint(Box<Checkpoint>),
    Exported(Box<ExportedModel>),
}

impl Trained {
    /// Finds the model at a path or, if there is none, of the job with this name.
    pub(crate) fn find(text: &str, home: &Home) -> anyhow::Result<Self> {
        // Absolute, because the job that trained it is found by the folders above.
        let path = std::path::absolute(paths::expanded(text)).unwrap_or_default();
        let at_path = if path.exists() { Self::at(&path, home)? } else { None };
        if let Some(found) = at_path {
            return Ok(found);
        }
        let job = if is_name(text) { home.find(Some(text)).ok() } else { None };
        match job {
            Some(job) => Self::of_job(&job),
            None if path.is_dir() => Err(refuse(format!(
                "no trained model in `{text}`: it has no complete checkpoint and no {WEIGHTS}; \
                 name {KINDS}"
            ))),
            None if path.exists() => {
                Err(refuse(format!("`{text}` is not a trained model; name {KINDS}")))
            }
            None => Err(refuse(format!(
                "trained model `{text}` not found; name {KINDS}, and list jobs with `elasticdl list`"
            ))),
        }
    }

    /// The model in a file or a folder.
    fn at(path: &Path, home: &Home) -> anyhow::Result<Option<Self>> {
        let is_file_of_export =
            path.file_name().is_some_and(|name| name == WEIGHTS || name == CARD);
        if is_file_of_export && path.is_file() {
            return Self::exported(&path.with_file_name(WEIGHTS), home).map(Some);
        }
        if let Some(job) = Job::open(path) {
            return Self::of_job(&job).map(Some);
        }
        if path.join(WEIGHTS).is_file() {
            return Self::exported(&path.join(WEIGHTS), home).map(Some);
        }
        if !path.is_dir() {
            return Ok(None);
        }
        let found = if path.join(MANIFEST).is_file() {
            Checkpoint::open(path).map(Some)
        } else {
            checkpoint::newest(path)
        };
        Ok(found.map_err(|error| unusable(&error))?.map(Self::of_checkpoint))
    }

    /// The newest checkpoint of a job; if it has none, its result.
    fn of_job(job: &Job) -> anyhow::Result<Self> {
        let spec = job.spec()?;
        let newest = job.newest_checkpoint(&spec).map_err(|error| unusable(&error))?;
        let source = match newest {
            Some(checkpoint) => Source::Checkpoint(Box::new(checkpoint)),
            None => {
                let weights = job.paths().output(&spec).join(WEIGHTS);
                if !weights.is_file() {
                    return Err(refuse(format!(
                        "job `{}` has no complete checkpoint and no result yet; name another",
                        job.handle()
                    )));
                }
                Source::Exported(Box::new(open(&weights)?))
            }
        };
        Ok(Self { source, writer: Some(spec) })
    }

    fn of_checkpoint(checkpoint: Checkpoint) -> Self {
        let writer = around(&checkpoint.path);
        Self { source: Source::Checkpoint(Box::new(checkpoint)), writer }
    }

    fn exported(weights: &Path, home: &Home) -> anyhow::Result<Self> {
        let model = open(weights)?;
        let writer = around(weights).or_else(|| {
            // A job with `--output` elsewhere.
            let job = home.find(Some(&model.card.job)).ok()?;
            let spec = job.spec().ok()?;
            let folder = std::fs::canonicalize(weights.parent()?).ok()?;
            let output = std::fs::canonicalize(job.paths().output(&spec)).ok()?;
            (folder == output).then_some(spec)
        });
        Ok(Self { source: Source::Exported(Box::new(model)), writer })
    }

    pub(crate) fn model(&self) -> &ModelSpec {
        match &self.source {
            Source::Checkpoint(checkpoint) => &checkpoint.manifest.model,
            Source::Exported(model) => &model.card.model,
        }
    }

    /// Its checkpoint's folder, or its `model.safetensors`.
    pub(crate) fn path(&self) -> &Path {
        match &self.source {
            Source::Checkpoint(checkpoint) => &checkpoint.path,
            Source::Exported(model) => &model.weights,
        }
    }

    /// Makes a job use this model: with the fields of the job that trained it, unless the user has
    /// set them.
    pub(crate) fn settle(&self, spec: &mut JobSpec, given: &Given) -> anyhow::Result<()> {
        let is_given = |field: &str| given.contains_key(field);
        let uses = spec.job_type != JobType::Train;
        match &self.writer {
            Some(before) if uses && before.is_custom_loop() => {
                return Err(refuse(format!(
                    "job `{}` ran a training script, and only this script defines the model: load \
                     its `model.pt` or `model.safetensors` there; see docs/own-loop.md",
                    before.job_name
                )));
            }
            Some(before) if !is_given("model_def") || spec.model_def == before.model_def => {
                spec.model_def.clone_from(&before.model_def);
                copy_fields(spec, before, given)?;
            }
            None if !is_given("model_def") => spec.model_def.clone_from(&self.model().name),
            Some(_) | None => {}
        }
        if let Source::Checkpoint(checkpoint) = &self.source {
            let Checkpoint { path, manifest } = &**checkpoint;
            // A partition of the job is loaded from one of the checkpoint.
            let (theirs, ours) = (manifest.layout().with_segments().end, spec.partitions);
            if is_given("partitions") && theirs != ours {
                return Err(refuse(format!(
                    "`{}` has {theirs} partitions, not {ours}; leave out --partitions",
                    path.display()
                )));
            }
            spec.partitions = theirs;
        }
        spec.checkpoint_dir_for_init =
            std::path::absolute(self.path())?.to_string_lossy().into_owned();
        Ok(())
    }
}

/// Copies what belongs to the model from the job that trained it, unless the user has set it.
fn copy_fields(spec: &mut JobSpec, before: &JobSpec, given: &Given) -> anyhow::Result<()> {
    let mut names = vec!["model_zoo", "model_params", "codec_type", "data_reader_params"];
    names.extend(FIELDS.iter().filter(|field| field.is_symbol).map(|field| field.name));
    if spec.job_type == JobType::Evaluate {
        if before.validation_data.is_empty() && !given.contains_key("validation_data") {
            // Its own training data: the included data would not fit.
            return Err(refuse(format!(
                "job `{}` was trained without validation data; set --validation_data",
                before.job_name
            )));
        }
        names.push("validation_data");
    }
    let before = serde_json::json!(before);
    let copied = names.into_iter().filter(|name| !given.contains_key(*name));
    let copied = copied.map(|name| (name.to_owned(), before[name].clone())).collect();
    *spec = config::apply(spec, copied)?;
    Ok(())
}

/// Where a job in `dir` keeps the checkpoint that it starts from, if it must be made first.
pub(crate) fn imported(spec: &JobSpec, dir: &Path) -> Option<(PathBuf, PathBuf)> {
    let weights = PathBuf::from(&spec.checkpoint_dir_for_init);
    let is_exported = weights.file_name().is_some_and(|name| name == WEIGHTS);
    is_exported.then(|| (weights, dir.join(IMPORTED)))
}

/// Makes the checkpoint that a job starts from.
pub(crate) fn import(weights: &Path, folder: &Path, spec: &JobSpec) -> anyhow::Result<()> {
    open(weights)?.write_checkpoint(folder, spec.partitions)?;
    Ok(())
}

/// Whether a job that starts from the checkpoint `pinned` would start there again if the user named
/// `named`. A job or a folder may have newer checkpoints by now.
pub(crate) fn is_same_start(pinned: &str, named: &str, home: &Home) -> bool {
    let (Ok(found), false) = (Trained::find(named, home), pinned.is_empty()) else { return false };
    let pinned = Path::new(pinned);
    match found.source {
        Source::Checkpoint(checkpoint) => {
            let path = &checkpoint.path;
            path == pinned || path.parent() == pinned.parent() && !is_checkpoint(named)
        }
        Source::Exported(model) => {
            let card = model.card;
            Checkpoint::open(pinned).is_ok_and(|Checkpoint { manifest, .. }| {
                let theirs = (manifest.job, manifest.version, manifest.model);
                pinned.ends_with(IMPORTED) && theirs == (card.job, card.version, card.model)
            })
        }
    }
}

/// Whether a path is that of one checkpoint, rather than of a folder with several.
fn is_checkpoint(path: &str) -> bool {
    Path::new(path).join(MANIFEST).is_file()
}

/// The job whose folder contains this path, as `checkpoints/NAME` or `output/NAME`.
fn around(path: &Path) -> Option<JobSpec> {
    let job = path.ancestors().skip(1).take(2).find_map(Job::open);
    job.and_then(|job| job.spec().ok())
}

fn open(weights: &Path) -> anyhow::Result<ExportedModel> {
    ExportedModel::open(weights).map_err(|error| refuse(format!("{}; name {KINDS}", chain(&error))))
}

fn unusable(error: &checkpoint::Error) -> anyhow::Error {
    refuse(format!("{}; choose another checkpoint", chain(error)))
}

fn is_name(text: &str) -> bool {
    !text.is_empty() && !text.contains('/') && !text.starts_with('.')
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An exported model without parameters.
    fn export(folder: &Path, job: &str, version: u64) {
        std::fs::create_dir_all(folder).unwrap();
        let model = serde_json::json!({
            "name": "m", "params": [], "tables": [], "inputs": [], "metrics": [],
            "optimizer": edl_core::optimizer::OptimizerSpec::sgd(0.1),
        });
        let card = serde_json::json!({
            "job": job, "version": version, "metrics": {}, "model": model,
        });
        std::fs::write(folder.join(CARD), card.to_string()).unwrap();
        std::fs::write(folder.join(WEIGHTS), b"\x02\0\0\0\0\0\0\0{}").unwrap();
    }

    #[test]
    fn a_model_is_found_by_a_relative_path_and_so_is_the_job_that_trained_it() {
        // In the current folder, so that its path can be relative.
        let dir = tempfile::tempdir_in(".").unwrap();
        let home = Home::at(dir.path());
        let spec = JobSpec { job_name: "base".into(), ..JobSpec::default() };
        let output = home.create(&spec, None).unwrap().dir().join("output");
        export(&output, "base", 7);
        let relative = Path::new(dir.path().file_name().unwrap()).join("jobs/base/output");
        for path in [relative.clone(), relative.join(WEIGHTS), relative.join(CARD)] {
            let found = Trained::find(path.to_str().unwrap(), &home).unwrap();
            assert!(found.path().is_absolute(), "the folders above it are known");
            assert_eq!(found.writer.unwrap().job_name, "base");
        }
    }

    #[test]
    fn a_job_has_as_many_partitions_as_the_checkpoint_that_it_starts_from() {
        let dir = tempfile::tempdir().unwrap();
        let home = Home::at(dir.path());
        export(dir.path(), "gone", 7);
        let folder = dir.path().join("kept");
        open(&dir.path().join(WEIGHTS)).unwrap().write_checkpoint(&folder, 3).unwrap();
        let found = Trained::find(folder.to_str().unwrap(), &home).unwrap();
        let mut spec = JobSpec { job_type: JobType::Evaluate, ..JobSpec::default() };
        found.settle(&mut spec, &Given::new()).unwrap();
        assert_eq!((spec.partitions, spec.model_def.as_str()), (3, "m"));
        spec.partitions = 8;
        let given = Given::from_iter([("partitions".to_owned(), 8.into())]);
        let error = found.settle(&mut spec, &given).unwrap_err().to_string();
        assert!(error.contains("has 3 partitions, not 8; leave out --partitions"), "{error}");
    }

    #[test]
    fn a_resumed_job_may_name_again_what_it_started_from() {
        let dir = tempfile::tempdir().unwrap();
        let home = Home::at(dir.path());
        let spec = JobSpec { job_name: "base".into(), ..JobSpec::default() };
        let base = home.create(&spec, None).unwrap();
        let weights = base.dir().join("output").join(WEIGHTS);
        export(weights.parent().unwrap(), "base", 7);
        let folder = dir.path().join("next").join(IMPORTED);
        import(&weights, &folder, &spec).unwrap();
        let is_same = |named: &str| is_same_start(folder.to_str().unwrap(), named, &home);
        assert!(is_same("base") && is_same(weights.to_str().unwrap()));
        assert!(is_same(folder.to_str().unwrap()), "what the job's description says");
        assert!(!is_same("other") && !is_same_start("", "base", &home));
        export(&dir.path().join("other"), "base", 8);
        assert!(!is_same(dir.path().join("other").to_str().unwrap()), "another step");

        // Checkpoints of a job, of which the newest was chosen.
        let [old, new] = [3, 9].map(|version| {
            let path = base.dir().join(format!("checkpoints/version-{version}"));
            open(&weights).unwrap().write_checkpoint(&path, 1).unwrap().path
        });
        let is_same = |named: &str| is_same_start(old.to_str().unwrap(), named, &home);
        assert!(is_same("base") && is_same(base.dir().join("checkpoints").to_str().unwrap()));
        assert!(is_same(old.to_str().unwrap()) && !is_same(new.to_str().unwrap()));
    }
}
