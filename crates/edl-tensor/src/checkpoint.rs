// SPDX-License-Identifier: Apache-2.0
//! Checkpoints on disk: one file per partition, and a manifest.
//!
//! Files get their names only when they are complete and on disk. The manifest is written last and
//! only once, so a folder is a complete checkpoint if and only if it has a manifest.

pub mod codec;
mod manifest;
mod origin;
#[cfg(test)]
pub(crate) mod tests;

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use edl_core::checkpoint_name::CheckpointName;
use edl_core::id::{CheckpointId, Generation, PartitionId, RunId};

use crate::first_values;
use crate::partition::{Partition, PartitionConfig};

pub use codec::Snapshot;
pub use manifest::{Error as ManifestError, FileEntry, Manifest, file_name};
pub use origin::Origin;

/// The number of the format that this build writes and reads.
pub const FORMAT: u32 = 1;
/// The format with dense parameters and rows in separate partitions.
pub const FORMAT_APART: u32 = 2;
/// The format of a partition's file that also holds the state of the training script.
pub const FORMAT_SCRIPT: u32 = 3;

const MANIFEST: &str = "manifest.json";
/// How often a folder is emptied that others may still write to.
const MAX_REMOVALS: u32 = 10;

/// A complete checkpoint on disk.
#[derive(Clone, Debug, PartialEq)]
pub struct Checkpoint {
    pub path: PathBuf,
    pub manifest: Manifest,
}

/// Why a checkpoint cannot be written or read.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot {action} `{}`", path.display())]
    File { action: &'static str, path: PathBuf, source: io::Error },
    #[error("cannot use `{}`", path.display())]
    Partition { path: PathBuf, source: codec::Error },
    #[error("cannot use `{}`", path.display())]
    Manifest { path: PathBuf, source: manifest::Error },
    #[error("`{}` does not match the manifest: {what} differs", path.display())]
    Differs { path: PathBuf, what: &'static str },
    #[error("`{}` is already complete and cannot be overwritten", path.display())]
    Exists { path: PathBuf },
    #[error("the folder `{}` of the checkpoint no longer exists", path.display())]
    Gone { path: PathBuf },
    #[error("`{}` contains checkpoints of several jobs: {jobs}; specify the folder of one checkpoint", path.display())]
    SeveralRuns { path: PathBuf, jobs: String },
    #[error("the checkpoint `{}` has no partition {partition}", path.display())]
    NoPartition { path: PathBuf, partition: PartitionId },
    #[error("the checkpoint `{}` has {theirs} partitions, the job has {ours}", path.display())]
    OtherPartitioning { path: PathBuf, theirs: u32, ours: u32 },
    #[error("cannot get the parameters' initial values")]
    FirstValues { source: Box<first_values::Error> },
}

/// The format of a checkpoint, by whether dense parameters and rows are separate.
#[must_use]
pub fn format(is_apart: bool) -> u32 {
    if is_apart { FORMAT_APART } else { FORMAT }
}

/// Whether dense parameters and rows are separate in a format; none if this build cannot read it.
#[must_use]
pub fn is_apart(format: u32) -> Option<bool> {
    match format {
        FORMAT => Some(false),
        FORMAT_APART => Some(true),
        _ => None,
    }
}

/// Writes one partition's file into the folder `dir`. When this returns the file is on disk. A folder
/// that is gone is not recreated: the master has given up the checkpoint.
pub fn write_file(dir: &Path, snapshot: &Snapshot) -> Result<FileEntry, Error> {
    let partition = snapshot.header.partition;
    let name = file_name(partition);
    let write = |file: &mut File| codec::encode(snapshot, file);
    let written = write_atomically(dir, &name, write, |from, to| fs::rename(from, to));
    let is_gone = |source: &io::Error| source.kind() == io::ErrorKind::NotFound;
    if matches!(&written, Err(Error::File { source, .. }) if is_gone(source)) {
        return Err(Error::Gone { path: dir.to_owned() });
    }
    let (bytes, checksum) = written?;
    let checksum = checksum_text(checksum);
    Ok(FileEntry { partition, name, bytes, checksum, updates: snapshot.header.updates })
}

/// Reads one partition's file back and checks it against its manifest entry; `keep_applied` as
/// in `Partition::restore`.
pub fn read_partition(
    dir: &Path,
    entry: &FileEntry,
    config: PartitionConfig,
    keep_applied: bool,
) -> Result<Partition, Error> {
    let snapshot = read_snapshot(dir, entry)?;
    Partition::from_snapshot(config, snapshot, keep_applied)
        .map_err(|source| Error::Partition { path: dir.join(&entry.name), source })
}

/// Reads one partition's file as it was written.
pub fn read_snapshot(dir: &Path, entry: &FileEntry) -> Result<Snapshot, Error> {
    let path = dir.join(&entry.name);
    let mut file = File::open(&path).map_err(at("open", &path))?;
    let length = file.metadata().map_err(at("inspect", &path))?.len();
    decode_file(&path, entry, length, &mut file)
}

/// Decodes the file of a partition, which has `length` bytes, and checks it against its manifest
/// entry.
pub fn decode_file(
    path: &Path,
    entry: &FileEntry,
    length: u64,
    reader: &mut (impl Read + Seek),
) -> Result<Snapshot, Error> {
    let differs = |what| Error::Differs { path: path.to_owned(), what };
    if length != entry.bytes {
        return Err(differs("the length"));
    }
    match codec::decode(reader) {
        Ok((_, checksum)) if checksum_text(checksum) != entry.checksum => {
            Err(differs("the checksum"))
        }
        Ok((snapshot, _)) => Ok(snapshot),
        Err(source) => {
            // A damaged byte may look like any other mistake.
            let checksum = codec::checksum(reader, length).map_err(at("read", path))?;
            let is_whole = checksum_text(checksum) == entry.checksum;
            let source = if is_whole { source } else { codec::Error::Checksum };
            Err(Error::Partition { path: path.to_owned(), source })
        }
    }
}

/// A checksum as manifests contain it.
#[must_use]
pub fn checksum_text(checksum: codec::Checksum) -> String {
    blake3::Hash::from_bytes(checksum).to_hex().to_string()
}

/// Makes the checkpoint in `dir` complete; refuses if it is complete already.
pub fn commit_manifest(dir: &Path, manifest: &Manifest) -> Result<(), Error> {
    let path = dir.join(MANIFEST);
    manifest.check().map_err(|source| Error::Manifest { path: path.clone(), source })?;
    let mut text = serde_json::to_vec_pretty(manifest)
        .map_err(|error| Error::Manifest { path: path.clone(), source: error.into() })?;
    text.push(b'\n');
    if !write_once(dir, MANIFEST, &text)? {
        return Err(Error::Exists { path: dir.to_owned() });
    }
    dir.parent().map_or(Ok(()), sync_folder)
}

impl Checkpoint {
    /// Opens a complete checkpoint: its manifest is sound and every file has its length. Checksums
    /// are compared when a file is read.
    pub fn open(dir: &Path) -> Result<Self, Error> {
        let path = dir.join(MANIFEST);
        let text = fs::read(&path).map_err(at("read", &path))?;
        let manifest = Manifest::parse(&text).map_err(|source| Error::Manifest { path, source })?;
        for file in &manifest.files {
            let path = dir.join(&file.name);
            let length = fs::metadata(&path).map_err(at("inspect", &path))?.len();
            if length != file.bytes {
                return Err(Error::Differs { path, what: "the length" });
            }
        }
        Ok(Self { path: dir.to_owned(), manifest })
    }

    /// The order in the history of the job. A restore raises the generation, so later checkpoints are
    /// newer even if the restore went back to an older version.
    fn age(&self) -> (Generation, u64, CheckpointId) {
        (self.manifest.generation, self.manifest.version, self.manifest.checkpoint)
    }
}

/// The complete checkpoints below `dir`, the newest last. Damaged ones are passed over, unless
/// there is no other: then the error of the newest one is returned.
pub fn find(dir: &Path) -> Result<Vec<Checkpoint>, Error> {
    let mut found = Vec::new();
    let mut refused = None;
    for folder in folders(dir)? {
        if !folder.join(MANIFEST).exists() {
            continue;
        }
        match Checkpoint::open(&folder) {
            Ok(checkpoint) => found.push(checkpoint),
            Err(error) => refused = Some(error),
        }
    }
    found.sort_by_key(Checkpoint::age);
    match refused {
        Some(error) if found.is_empty() => Err(error),
        Some(_) | None => Ok(found),
    }
}

/// The newest complete checkpoint below `dir`. Rejects a folder with checkpoints of several runs,
/// because it is ambiguous.
pub fn newest(dir: &Path) -> Result<Option<Checkpoint>, Error> {
    let mut found = find(dir)?;
    let runs: BTreeMap<&str, &str> =
        found.iter().map(|c| (c.manifest.run.as_str(), c.manifest.job.as_str())).collect();
    if runs.len() > 1 {
        let jobs: Vec<String> = runs.values().map(|job| format!("`{job}`")).collect();
        return Err(Error::SeveralRuns { path: dir.to_owned(), jobs: jobs.join(", ") });
    }
    Ok(found.pop())
}

/// Removes the folders of `run` that no manifest completes and whose checkpoint `is_over`. The name of
/// a folder includes its run: those of other runs are kept.
pub fn sweep(dir: &Path, run: RunId, is_over: impl Fn(CheckpointId) -> bool) -> Result<(), Error> {
    for folder in folders(dir)? {
        let name = folder.file_name().and_then(OsStr::to_str).and_then(CheckpointName::parse);
        let is_litter = name.is_some_and(|name| name.run == run && is_over(name.checkpoint));
        if is_litter && !folder.join(MANIFEST).exists() {
            remove(&folder)?;
        }
    }
    Ok(())
}

/// Removes a checkpoint, its manifest first, so a partly removed one does not count as complete.
pub fn remove(folder: &Path) -> Result<(), Error> {
    match fs::remove_file(folder.join(MANIFEST)) {
        Ok(()) => sync_folder(folder)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(at("remove", folder)(error)),
    }
    // A process that has not learned of its end may add a file meanwhile, but not twice: the next
    // one finds no folder.
    for _ in 0..MAX_REMOVALS {
        match fs::remove_dir_all(folder) {
            Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => {}
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(at("remove", folder)(error));
            }
            Ok(()) | Err(_) => return Ok(()),
        }
    }
    Err(at("remove", folder)(io::ErrorKind::DirectoryNotEmpty.into()))
}

/// The folders below `dir` in the order of their names; none if there is no `dir`.
fn folders(dir: &Path) -> Result<Vec<PathBuf>, Error> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(at("list", dir)(error)),
    };
    let mut folders = Vec::new();
    for entry in entries {
        let path = entry.map_err(at("list", dir))?.path();
        if path.is_dir() {
            folders.push(path);
        }
    }
    folders.sort();
    Ok(folders)
}

/// Writes a temporary file, makes it durable, and calls `place` to give it its name.
pub(crate) fn write_atomically<T>(
    dir: &Path,
    name: &str,
    write: impl FnOnce(&mut File) -> io::Result<T>,
    place: impl FnOnce(&Path, &Path) -> io::Result<()>,
) -> Result<T, Error> {
    let path = dir.join(name);
    let temporary = dir.join(format!(".{name}.{}.tmp", writer_name()));
    let attempt = || {
        let mut file = File::create(&temporary)?;
        let result = write(&mut file)?;
        file.sync_all()?;
        drop(file);
        place(&temporary, &path)?;
        Ok(result)
    };
    let result = attempt().map_err(|error| {
        // On a full disk every byte counts; if this fails too, the first error says more.
        let _ = fs::remove_file(&temporary);
        at("write", &path)(error)
    })?;
    sync_folder(dir)?;
    Ok(result)
}

/// Writes a file that is never overwritten; `false` if it already exists.
pub(crate) fn write_once(dir: &Path, name: &str, bytes: &[u8]) -> Result<bool, Error> {
    // A link, unlike a rename, fails if the name is in use.
    let link =
        |from: &Path, to: &Path| fs::hard_link(from, to).and_then(|()| fs::remove_file(from));
    match write_atomically(dir, name, |file| file.write_all(bytes), link) {
        Ok(()) => Ok(true),
        Err(Error::File { source, .. }) if source.kind() == io::ErrorKind::AlreadyExists => {
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

/// A unique name: processes of two containers may have the same id.
fn writer_name() -> String {
    static N_WRITERS: AtomicU64 = AtomicU64::new(0);
    let n_before = N_WRITERS.fetch_add(1, Ordering::Relaxed);
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    format!("{}-{n_before}-{:x}", std::process::id(), now.as_nanos())
}

/// Makes the names in a folder durable.
fn sync_folder(dir: &Path) -> Result<(), Error> {
    let dir = if dir.as_os_str().is_empty() { Path::new(".") } else { dir };
    File::open(dir).and_then(|file| file.sync_all()).map_err(at("sync", dir))
}

pub(crate) fn at(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
    let path = path.to_owned();
    move |source| Error::File { action, path, source }
}
