// SPDX-License-Identifier: Apache-2.0
//! What survives every process: the master's store, and checkpoint folders with files.
//!
//! A file is written under a temporary name and gets its own one when it is complete, as in
//! production. If its writer dies first, part of it remains. Manifests and files of partitions are
//! read by the code that production uses.

use std::collections::BTreeMap;
use std::io::Cursor;
use std::path::Path;

use edl_core::checkpoint_name::CheckpointName;
use edl_core::id::{PartitionId, Term};
use edl_core::job::{CheckpointFile, Durable, Fact, FoundCheckpoint};
use edl_tensor::checkpoint::{self, FileEntry, Manifest, Snapshot, codec};

use crate::kernel::{Kernel, Pid};

const MANIFEST: &str = "manifest.json";

#[derive(Default)]
pub(crate) struct Disk {
    /// The master's store, and what it says.
    facts: BTreeMap<String, String>,
    pub(crate) durable: Durable,
    /// The highest term that was taken; masters of lower terms can write nothing.
    pub(crate) term: Term,
    /// Where workers and servers look for the master, and where the one before was.
    pub(crate) master: Option<Pid>,
    pub(crate) former_master: Option<Pid>,
    folders: BTreeMap<String, Folder>,
    writes: BTreeMap<WriteId, Write>,
    n_writes: u64,
    pub(crate) is_full: bool,
}

/// Files by their names.
#[derive(Default)]
struct Folder(BTreeMap<String, Vec<u8>>);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct WriteId(u64);

/// A file that is being written.
struct Write {
    writer: Pid,
    folder: String,
    name: String,
    bytes: Vec<u8>,
}

impl Write {
    fn temporary(&self, WriteId(id): WriteId) -> String {
        format!(".{}.{id}.tmp", self.name)
    }
}

impl Disk {
    /// Stores what must survive the master, in one transaction.
    pub(crate) fn persist(&mut self, facts: &[Fact]) {
        for Fact { key, value } in facts {
            match value {
                Some(value) => drop(self.facts.insert(key.clone(), value.clone())),
                None => drop(self.facts.remove(key)),
            }
        }
        let facts = self.facts.iter().map(|(key, value)| (key.as_str(), value.as_bytes()));
        self.durable = Durable::from_facts(facts).expect("it can be read back");
    }

    /// Changes what is stored while no master runs.
    pub(crate) fn edit(&mut self, change: impl FnOnce(&mut Durable)) {
        let mut durable = self.durable.clone();
        change(&mut durable);
        self.persist(&durable.changes(&self.durable));
    }

    /// Removes the folders of checkpoints that were given up.
    pub(crate) fn sweep(&mut self) {
        self.folders.retain(|_, Folder(files)| files.contains_key(MANIFEST));
    }

    pub(crate) fn create(&mut self, folder: String) {
        let before = self.folders.insert(folder, Folder::default());
        assert!(before.is_none(), "no folder is used twice");
    }

    pub(crate) fn delete(&mut self, folder: &str) {
        self.folders.remove(folder);
    }

    /// Begins to write a file.
    fn begin(&mut self, writer: Pid, folder: &str, name: String, bytes: Vec<u8>) -> WriteId {
        let id = WriteId(self.n_writes);
        self.n_writes += 1;
        let write = Write { writer, folder: folder.to_owned(), name, bytes };
        let Folder(files) = self.folders.entry(folder.to_owned()).or_default();
        files.insert(write.temporary(id), Vec::new());
        self.writes.insert(id, write);
        id
    }

    /// Begins to write the file of a partition.
    pub(crate) fn begin_file(
        &mut self,
        writer: Pid,
        folder: &str,
        snapshot: &Snapshot,
    ) -> (WriteId, CheckpointFile) {
        let mut bytes = Vec::new();
        let (length, checksum) = codec::encode(snapshot, &mut bytes).expect("memory is enough");
        let partition = snapshot.header.partition;
        let file = CheckpointFile {
            partition: partition.0,
            name: checkpoint::file_name(partition),
            bytes: length,
            checksum: checkpoint::checksum_text(checksum),
            updates: snapshot.header.updates,
        };
        (self.begin(writer, folder, file.name.clone(), bytes), file)
    }

    /// Begins to write a manifest, unless it is not whole.
    pub(crate) fn begin_manifest(
        &mut self,
        writer: Pid,
        folder: &str,
        manifest: &Manifest,
    ) -> Result<WriteId, String> {
        manifest.check().map_err(|error| error.to_string())?;
        let text = serde_json::to_vec(manifest).expect("a manifest has a JSON form");
        Ok(self.begin(writer, folder, MANIFEST.into(), text))
    }

    /// All of a file is written: it gets its name.
    pub(crate) fn finish(&mut self, id: WriteId) -> Result<(), String> {
        let write = self.writes.remove(&id).expect("a file that is being written");
        let Some(Folder(files)) = self.folders.get_mut(&write.folder) else {
            return Err("the folder is gone".into());
        };
        if files.remove(&write.temporary(id)).is_none() {
            return Err("the file is gone".into());
        }
        if self.is_full {
            return Err("no space left on device".into());
        }
        let before = files.insert(write.name, write.bytes);
        assert!(before.is_none(), "a file of a checkpoint is never overwritten");
        Ok(())
    }

    /// A process dies: each file that it writes may have got its name, or lose its end.
    pub(crate) fn crash(&mut self, writer: Pid, kernel: &mut Kernel) {
        let torn: Vec<(WriteId, Write)> =
            self.writes.extract_if(.., |_, write| write.writer == writer).collect();
        for (id, mut write) in torn {
            let Some(Folder(files)) = self.folders.get_mut(&write.folder) else { continue };
            let temporary = write.temporary(id);
            if files.remove(&temporary).is_none() {
                continue;
            }
            kernel.count("torn writes");
            let length = kernel.pick(write.bytes.len() + 1);
            match kernel.pick(3) {
                0 => drop(files.insert(write.name, write.bytes)),
                1 => {
                    write.bytes.truncate(length);
                    files.insert(temporary, write.bytes);
                }
                _ => {
                    write.bytes[length..].fill(0);
                    files.insert(temporary, write.bytes);
                }
            }
        }
    }

    /// The complete checkpoints, the newest last.
    pub(crate) fn complete(&self) -> Vec<FoundCheckpoint> {
        let complete = self.folders.iter().filter_map(|(folder, Folder(files))| {
            let manifest = self.manifest(folder).ok()?;
            let is_there = |entry: &FileEntry| {
                files.get(&entry.name).is_some_and(|bytes| bytes.len() as u64 == entry.bytes)
            };
            // A master that was replaced may write a manifest after its successor has swept.
            if !manifest.files.iter().all(is_there) {
                return None;
            }
            let Manifest { generation, version, exact, model, skipped, .. } = manifest;
            let name = CheckpointName::parse(folder).expect("a name that a job gave");
            let folder = folder.clone();
            Some((name, FoundCheckpoint { folder, generation, version, exact, model, skipped }))
        });
        let by_age: BTreeMap<CheckpointName, FoundCheckpoint> = complete.collect();
        by_age.into_values().collect()
    }

    /// The store is gone. Checkpoints stay, and the status that was published last.
    pub(crate) fn lose_store(&mut self) {
        let generation = self.durable.generation;
        self.edit(|durable| *durable = Durable { generation, ..Durable::default() });
    }

    pub(crate) fn manifest(&self, folder: &str) -> Result<Manifest, String> {
        let Folder(files) = self.folders.get(folder).ok_or("no such folder")?;
        let text = files.get(MANIFEST).ok_or("the manifest is missing")?;
        Manifest::parse(text).map_err(|error| error.to_string())
    }

    /// The state of a partition in a complete checkpoint.
    pub(crate) fn read(&self, folder: &str, partition: u32) -> Result<Snapshot, String> {
        let manifest = self.manifest(folder)?;
        let is_it = |entry: &&FileEntry| entry.partition == PartitionId(partition);
        let entry = manifest.files.iter().find(is_it).ok_or("the manifest lacks a partition")?;
        let Folder(files) = &self.folders[folder];
        let bytes = files.get(&entry.name).ok_or("a file is missing")?;
        let (path, length) = (Path::new(&entry.name), bytes.len() as u64);
        checkpoint::decode_file(path, entry, length, &mut Cursor::new(bytes))
            .map_err(|error| error.to_string())
    }

    /// Changes one bit of the first file of a partition.
    pub(crate) fn spoil(&mut self, folder: &str, place: usize) {
        let Some(Folder(files)) = self.folders.get_mut(folder) else { return };
        let is_partition = |(name, _): &(&String, &mut Vec<u8>)| name.starts_with("partition");
        if let Some((_, bytes)) = files.iter_mut().find(is_partition) {
            let place = place % bytes.len();
            bytes[place] ^= 1;
        }
    }
}
