// SPDX-License-Identifier: Apache-2.0
//! Checkpoint folders and results on disk.

use std::any::Any;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use edl_core::error::{chain, is_disk_full};
use edl_core::id::{CheckpointId, Generation, RunId, Term};
use edl_core::job::{self, CheckpointFile, Event, FoundCheckpoint, Job};
use edl_core::optimizer;
use edl_core::spec::JobType;
use edl_tensor::checkpoint::{self, Checkpoint, Manifest};

use crate::Config;
use crate::data::Data;

/// Where a job's checkpoints are, and what every manifest contains.
pub(crate) struct Checkpoints {
    folder: PathBuf,
    run: RunId,
    term: Term,
    job: String,
    n_batches: u32,
    fingerprint: String,
}

impl Checkpoints {
    pub(crate) fn new(config: &Config, job: &job::Config, data: &Data) -> Self {
        let spec = &config.spec;
        let folder = config.job_dir.checkpoints(spec);
        let n_batches = match spec.job_type {
            JobType::Train => spec.plan(data.n_records).n_batches(),
            JobType::Evaluate | JobType::Predict => 1,
        };
        let job::Config { run, term, .. } = *job;
        let (job, fingerprint) = (spec.job_name.clone(), data.fingerprint.clone());
        Self { folder, run, term, job, n_batches, fingerprint }
    }

    pub(crate) fn n_batches(&self) -> u32 {
        self.n_batches
    }

    /// One of the job's own checkpoint folders.
    pub(crate) fn path(&self, folder: &str) -> PathBuf {
        self.folder.join(folder)
    }

    /// Removes what was given up half written or half removed. Only while nothing is being written.
    pub(crate) fn sweep(&self) {
        sweep(&self.folder, self.run, |_| true);
    }

    /// What a server loads from: an own folder, or one that the user named.
    pub(crate) fn source(&self, folder: &str, is_own: bool) -> String {
        if is_own {
            return self.path(folder).to_string_lossy().into_owned();
        }
        let path = Path::new(folder);
        // A folder of checkpoints means its newest one.
        let newest = checkpoint::newest(path).unwrap_or_else(|error| {
            tracing::warn!("{}", chain(&error));
            None
        });
        newest.map_or_else(|| path.into(), |newest| newest.path).to_string_lossy().into_owned()
    }

    /// Makes the folder of a checkpoint; an event if that fails.
    pub(crate) fn prepare(&self, checkpoint: CheckpointId, folder: &str) -> Option<Event> {
        let path = self.path(folder);
        let error = fs::create_dir_all(&path).err()?;
        let error = format!("cannot create `{}`: {error}", path.display());
        Some(Event::CheckpointFailed { checkpoint, error })
    }

    pub(crate) fn manifest(
        &self,
        job: &Job,
        checkpoint: CheckpointId,
        (version, exact): (u64, Option<u64>),
        generation: Generation,
        files: Vec<CheckpointFile>,
    ) -> Option<Manifest> {
        let spec = &job.config().spec;
        let model = job.durable().model.clone()?;
        let optimizer = optimizer::resolve(spec, &model).ok()?;
        let layout = spec.layout(model.dense_len());
        let metrics =
            job.durable().evaluations.last().map(|e| e.metrics.clone()).unwrap_or_default();
        Some(Manifest {
            format: checkpoint::format(layout.is_apart),
            version,
            exact,
            generation,
            checkpoint,
            term: self.term,
            run: self.run.to_string(),
            job: self.job.clone(),
            seed: spec.seed,
            model,
            optimizer,
            n_batches: self.n_batches,
            n_partitions: layout.n_partitions,
            fingerprint: self.fingerprint.clone(),
            files: files.into_iter().map(Into::into).collect(),
            metrics,
            skipped: job.durable().skipped.clone(),
        })
    }
}

/// The complete checkpoints of `run` in a folder, the newest last; of any run if none is known, as in
/// the job's own folder.
pub(crate) fn find(folder: &Path, run: Option<RunId>) -> Vec<Checkpoint> {
    let mut found = checkpoint::find(folder).unwrap_or_else(|error| {
        tracing::warn!("{}", chain(&error));
        Vec::new()
    });
    let run = run.map(|run| run.to_string());
    found.retain(|it| run.as_ref().is_none_or(|run| *run == it.manifest.run));
    found
}

/// What the job needs to know about a checkpoint to continue from it.
pub(crate) fn describe(checkpoint: Checkpoint) -> FoundCheckpoint {
    let folder = checkpoint.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let Manifest { generation, version, exact, model, skipped, .. } = checkpoint.manifest;
    FoundCheckpoint { folder, generation, version, exact, model, skipped }
}

/// Completes a checkpoint with its manifest, and removes what is left of those that were given up.
pub(crate) fn commit(
    checkpoint: CheckpointId,
    run: RunId,
    folder: &Path,
    manifest: Option<Manifest>,
) -> Event {
    let Some(manifest) = manifest else {
        return Event::CheckpointFailed { checkpoint, error: "the model is not known yet".into() };
    };
    if let Err(error) = checkpoint::commit_manifest(folder, &manifest) {
        return Event::CheckpointFailed { checkpoint, error: chain(&error) };
    }
    if let Some(all) = folder.parent() {
        sweep(all, run, |other| other < checkpoint);
    }
    Event::Committed { checkpoint }
}

fn sweep(folder: &Path, run: RunId, is_over: impl Fn(CheckpointId) -> bool) {
    if let Err(error) = checkpoint::sweep(folder, run, is_over) {
        tracing::warn!("{}; retrying at the next checkpoint", chain(&error));
    }
}

/// Removes a checkpoint's folder. What cannot be removed is only litter.
pub(crate) fn delete(folder: &Path) -> Event {
    if let Err(error) = checkpoint::remove(folder) {
        tracing::warn!("{}; retrying at the next checkpoint", chain(&error));
    }
    Event::Tick
}

/// Writes the trained model. `n_bytes` counts what is read and written.
pub(crate) fn export(from: &Path, to: &Path, n_bytes: &AtomicU64) -> Event {
    let progress = |n: u64| _ = n_bytes.fetch_add(n, Relaxed);
    match edl_tensor::export::export(from, to, &BTreeMap::new(), &progress) {
        Ok(_) => Event::Exported,
        Err(error) => {
            Event::ExportFailed { error: chain(&error), is_disk_full: is_disk_full(&error) }
        }
    }
}

/// Joins the parts that workers wrote into one file, in the order of the records.
pub(crate) fn join_parts(output: &Path, n_shards: u32, n_bytes: &AtomicU64) -> Event {
    match try_join_parts(output, n_shards, n_bytes) {
        Ok(()) => Event::Exported,
        Err(error) => Event::ExportFailed {
            is_disk_full: is_disk_full(&error),
            error: format!("{}: {error}", output.display()),
        },
    }
}

/// Writes something. A panic is a failure like any other: else the job would wait forever.
pub(crate) fn or_failed(
    write: impl FnOnce() -> Event,
    failed: impl FnOnce(String) -> Event,
) -> Event {
    let text = |panic: Box<dyn Any + Send>| {
        let text = panic.downcast_ref::<&str>().map(ToString::to_string);
        text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default()
    };
    catch_unwind(AssertUnwindSafe(write))
        .unwrap_or_else(|panic| failed(format!("the master panicked: {}", text(panic))))
}

fn try_join_parts(output: &Path, n_shards: u32, n_bytes: &AtomicU64) -> io::Result<()> {
    fs::create_dir_all(output)?;
    let temporary = output.join("predictions.jsonl.tmp");
    let mut whole = io::BufWriter::new(File::create(&temporary)?);
    let part = |shard: u32| output.join(format!("part-{shard:06}.jsonl"));
    for shard in 0..n_shards {
        n_bytes.fetch_add(io::copy(&mut File::open(part(shard))?, &mut whole)?, Relaxed);
    }
    whole.flush()?;
    whole.get_ref().sync_all()?;
    fs::rename(&temporary, output.join("predictions.jsonl"))?;
    (0..n_shards).try_for_each(|shard| fs::remove_file(part(shard)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_while_the_result_is_written_is_a_failure_with_its_text() {
        let failed = |error| Event::ExportFailed { error, is_disk_full: false };
        for (write, text) in [
            ((|| panic!("at {}", 7)) as fn() -> Event, "the master panicked: at 7"),
            (|| panic!("at last"), "the master panicked: at last"),
        ] {
            assert_eq!(or_failed(write, failed), failed(text.to_owned()));
        }
        assert_eq!(or_failed(|| Event::Exported, failed), Event::Exported);
    }
}
