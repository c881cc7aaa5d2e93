// SPDX-License-Identifier: Apache-2.0
//! Checkpoint folders and results on disk.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use edl_core::error::chain;
use edl_core::id::{CutId, Generation, PartitionId, RunId, Term};
use edl_core::job::{CheckpointRef, CutFile, Event, Job};
use edl_core::optimizer;
use edl_core::spec::JobType;
use edl_tensor::checkpoint::{self, FileEntry, Manifest};

use crate::{Config, Data};

/// Where a job's checkpoints are, and what every manifest says.
pub(crate) struct Checkpoints {
    folder: PathBuf,
    run: RunId,
    term: Term,
    job: String,
    n_batches: u32,
    fingerprint: String,
}

impl Checkpoints {
    pub(crate) fn new(config: &Config, run: RunId, data: &Data, term: Term) -> Self {
        let spec = &config.spec;
        let folder = config.job_dir.checkpoints(spec);
        let n_batches = match spec.job_type {
            JobType::Train => spec.plan(data.n_records).n_batches(),
            JobType::Evaluate | JobType::Predict => 1,
        };
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

    /// Removes what masters that were killed have left half written or half removed. Only for a
    /// folder that no other job writes to.
    pub(crate) fn sweep(&self, known: &[CheckpointRef]) {
        let entries = fs::read_dir(&self.folder).into_iter().flatten().flatten();
        for entry in entries {
            let name = entry.file_name();
            let is_ours = name.to_string_lossy().starts_with("version-");
            if is_ours && !known.iter().any(|checkpoint| name == *checkpoint.folder) {
                delete(&entry.path());
            }
        }
    }

    /// What a server loads from: an own folder, or one that the user named.
    pub(crate) fn source(&self, folder: &str, is_own: bool) -> String {
        if is_own {
            return self.path(folder).to_string_lossy().into_owned();
        }
        let path = Path::new(folder);
        // A folder of checkpoints means its newest one.
        let newest = checkpoint::find(path).ok().and_then(|mut found| found.pop());
        newest.map_or_else(|| path.into(), |newest| newest.path).to_string_lossy().into_owned()
    }

    /// Makes the folder of a cut; an event if that fails.
    pub(crate) fn prepare(&self, cut: CutId, folder: &str) -> Option<Event> {
        let path = self.path(folder);
        let error = fs::create_dir_all(&path).err()?;
        let error = format!("cannot create `{}`: {error}", path.display());
        Some(Event::CutFailed { cut, error })
    }

    pub(crate) fn manifest(
        &self,
        job: &Job,
        cut: CutId,
        version: u64,
        generation: Generation,
        files: Vec<CutFile>,
    ) -> Option<Manifest> {
        let spec = &job.config().spec;
        let model = job.durable().model.clone()?;
        let optimizer = optimizer::resolve(spec, &model).ok()?;
        let layout = spec.layout(model.dense_len());
        let metrics =
            job.durable().evaluations.last().map(|e| e.metrics.clone()).unwrap_or_default();
        let entry = |file: CutFile| FileEntry {
            partition: PartitionId(file.partition),
            name: file.name,
            bytes: file.bytes,
            checksum: file.checksum,
            updates: file.updates,
        };
        Some(Manifest {
            format: checkpoint::format(layout.is_apart),
            version,
            generation,
            cut,
            term: self.term,
            run: self.run.to_string(),
            job: self.job.clone(),
            seed: spec.seed,
            model,
            optimizer,
            n_batches: self.n_batches,
            n_partitions: layout.n_partitions,
            fingerprint: self.fingerprint.clone(),
            files: files.into_iter().map(entry).collect(),
            metrics,
        })
    }
}

/// Makes a cut a checkpoint.
pub(crate) fn commit(cut: CutId, folder: &Path, manifest: Option<Manifest>) -> Event {
    let Some(manifest) = manifest else {
        return Event::CutFailed { cut, error: "the model is not known yet".into() };
    };
    match checkpoint::commit_manifest(folder, &manifest) {
        Ok(()) => Event::Committed { cut },
        Err(error) => Event::CutFailed { cut, error: chain(&error) },
    }
}

/// Removes a checkpoint's folder. What cannot be removed is only litter.
pub(crate) fn delete(folder: &Path) -> Event {
    if let Err(error) = fs::remove_dir_all(folder)
        && error.kind() != io::ErrorKind::NotFound
    {
        tracing::warn!(folder = %folder.display(), %error, "cannot remove an old checkpoint");
    }
    Event::Tick
}

/// Writes the trained model.
pub(crate) fn export(from: &Path, to: &Path) -> Event {
    match edl_tensor::export::export(from, to, &BTreeMap::new()) {
        Ok(_) => Event::Exported,
        Err(error) => Event::ExportFailed { error: chain(&error) },
    }
}

/// Joins the parts that workers wrote into one file, in the order of the records.
pub(crate) fn join_parts(output: &Path, n_shards: u32) -> Event {
    match try_join_parts(output, n_shards) {
        Ok(()) => Event::Exported,
        Err(error) => Event::ExportFailed { error: format!("{}: {error}", output.display()) },
    }
}

fn try_join_parts(output: &Path, n_shards: u32) -> io::Result<()> {
    fs::create_dir_all(output)?;
    let temporary = output.join("predictions.jsonl.tmp");
    let mut whole = io::BufWriter::new(File::create(&temporary)?);
    let part = |shard: u32| output.join(format!("part-{shard:06}.jsonl"));
    for shard in 0..n_shards {
        io::copy(&mut File::open(part(shard))?, &mut whole)?;
    }
    whole.flush()?;
    whole.get_ref().sync_all()?;
    fs::rename(&temporary, output.join("predictions.jsonl"))?;
    (0..n_shards).try_for_each(|shard| fs::remove_file(part(shard)))
}
