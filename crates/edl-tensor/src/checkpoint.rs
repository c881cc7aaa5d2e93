// SPDX-License-Identifier: Apache-2.0
//! Checkpoints on disk: one file per partition and a manifest that makes them one whole.
//!
//! Files appear under their names only when they are complete and on disk. The manifest comes
//! last and is never written twice, so that a folder with a manifest is a complete checkpoint
//! and any other folder is none.

pub mod codec;
mod manifest;
mod origin;
#[cfg(test)]
pub(crate) mod tests;

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use edl_core::id::{CutId, Generation, PartitionId};

use crate::first_values;
use crate::partition::{Partition, PartitionConfig};

pub use codec::Snapshot;
pub use manifest::{Error as ManifestError, FileEntry, Manifest, file_name};
pub use origin::Origin;

/// The number of the format that this build writes and reads.
pub const FORMAT: u32 = 1;
/// The same, where dense parameters and rows lie in partitions of their own.
pub const FORMAT_APART: u32 = 2;

const MANIFEST: &str = "manifest.json";

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
    #[error("the checkpoint `{}` has no partition {partition}", path.display())]
    NoPartition { path: PathBuf, partition: PartitionId },
    #[error("the checkpoint `{}` has {theirs} partitions, the job has {ours}", path.display())]
    OtherCut { path: PathBuf, theirs: u32, ours: u32 },
    #[error("cannot get the parameters' initial values")]
    FirstValues { source: Box<first_values::Error> },
}

/// The format of a checkpoint, by whether dense parameters and rows lie apart.
#[must_use]
pub fn format(is_apart: bool) -> u32 {
    if is_apart { FORMAT_APART } else { FORMAT }
}

/// Whether dense parameters and rows lie apart in a format; none if this build cannot read it.
#[must_use]
pub fn is_apart(format: u32) -> Option<bool> {
    match format {
        FORMAT => Some(false),
        FORMAT_APART => Some(true),
        _ => None,
    }
}

/// Name of a checkpoint's folder, such as `version-100.g2c7`.
#[must_use]
pub fn folder_name(version: u64, generation: Generation, cut: CutId) -> String {
    format!("version-{version}.g{generation}c{}", cut.0)
}

/// Writes one partition's file into the folder `dir`, which is made if needed. When this returns
/// the file is on disk.
pub fn write_file(dir: &Path, snapshot: &Snapshot) -> Result<FileEntry, Error> {
    fs::create_dir_all(dir).map_err(at("create", dir))?;
    let partition = snapshot.partition();
    let name = file_name(partition);
    let write = |file: &mut File| codec::encode(snapshot, file);
    let (bytes, checksum) = write_atomically(dir, &name, write, |from, to| fs::rename(from, to))?;
    let checksum = blake3::Hash::from_bytes(checksum).to_hex().to_string();
    Ok(FileEntry { partition, name, bytes, checksum, updates: snapshot.updates() })
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
    if length != entry.bytes {
        return Err(Error::Differs { path, what: "the length" });
    }
    let (snapshot, checksum) = codec::decode(&mut file)
        .map_err(|source| Error::Partition { path: path.clone(), source })?;
    if blake3::Hash::from_bytes(checksum).to_hex().as_str() != entry.checksum {
        return Err(Error::Differs { path, what: "the checksum" });
    }
    Ok(snapshot)
}

/// Makes the checkpoint in `dir` complete; refuses if it is complete already.
pub fn commit_manifest(dir: &Path, manifest: &Manifest) -> Result<(), Error> {
    let path = dir.join(MANIFEST);
    manifest.check().map_err(|source| Error::Manifest { path: path.clone(), source })?;
    let mut text = serde_json::to_vec_pretty(manifest)
        .map_err(|error| Error::Manifest { path: path.clone(), source: error.into() })?;
    text.push(b'\n');
    fs::create_dir_all(dir).map_err(at("create", dir))?;
    // A link, unlike a rename, fails if the name is taken.
    let write = |file: &mut File| file.write_all(&text);
    let placed = write_atomically(dir, MANIFEST, write, |from, to| {
        fs::hard_link(from, to)?;
        fs::remove_file(from)
    });
    match placed {
        Err(Error::File { source, .. }) if source.kind() == io::ErrorKind::AlreadyExists => {
            return Err(Error::Exists { path: dir.to_owned() });
        }
        other => other?,
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

    /// Later in the history of the job. A restore raises the generation, so that what comes after
    /// it counts as newer even if it went back to an older version.
    fn age(&self) -> (Generation, u64, CutId) {
        (self.manifest.generation, self.manifest.version, self.manifest.cut)
    }
}

/// The complete checkpoints below `dir`, the newest last. Damaged ones are passed over, unless
/// there is nothing else: then the newest damage is the answer.
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

/// Removes all but the newest `keep` complete checkpoints (0 keeps all), and what incomplete cuts
/// older than the newest have left. Folders named like those in `protect` stay. Returns what was
/// removed.
pub fn prune(dir: &Path, keep: usize, protect: &[PathBuf]) -> Result<Vec<PathBuf>, Error> {
    if keep == 0 {
        return Ok(Vec::new());
    }
    let complete = find(dir)?;
    let Some(newest) = complete.last() else { return Ok(Vec::new()) };
    let newest = (newest.manifest.generation, newest.manifest.cut);
    let old = complete.iter().rev().skip(keep).map(|checkpoint| checkpoint.path.clone());
    let left_over = folders(dir)?.into_iter().filter(|folder| {
        let is_older = parse_folder_name(folder).is_some_and(|cut| cut < newest);
        is_older && !folder.join(MANIFEST).exists()
    });
    let is_protected = |folder: &Path| protect.iter().any(|p| p.file_name() == folder.file_name());
    let doomed = old.chain(left_over).filter(|folder| !is_protected(folder));
    // Listed whole before the first is removed: without its manifest it would look left over.
    let doomed: Vec<PathBuf> = doomed.collect();
    doomed.iter().try_for_each(|folder| remove(folder))?;
    Ok(doomed)
}

/// The manifest goes first, so that a half removed checkpoint is none.
fn remove(folder: &Path) -> Result<(), Error> {
    let manifest = folder.join(MANIFEST);
    match fs::remove_file(&manifest) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(at("remove", &manifest)(error));
        }
        Ok(()) | Err(_) => {}
    }
    sync_folder(folder)?;
    fs::remove_dir_all(folder).map_err(at("remove", folder))
}

/// The generation and cut that a folder's name tells.
fn parse_folder_name(folder: &Path) -> Option<(Generation, CutId)> {
    let name = folder.file_name()?.to_str()?.strip_prefix("version-")?;
    let (_, cut) = name.split_once(".g")?;
    let (generation, cut) = cut.split_once('c')?;
    Some((Generation(generation.parse().ok()?), CutId(cut.parse().ok()?)))
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

/// Writes a file beside its place, makes it durable, and lets `place` give it its name.
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

/// A word that no other writer has: processes of two containers may have the same number.
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
