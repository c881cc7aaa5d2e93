// SPDX-License-Identifier: Apache-2.0
//! What survives every process: durable facts of the job, and checkpoint folders with files.

use std::collections::BTreeMap;

use edl_core::id::Term;
use edl_core::job::{CutFile, Durable};

use crate::kernel::Pid;

#[derive(Default)]
pub(crate) struct Disk {
    pub(crate) durable: Durable,
    /// The highest term that was taken; masters of lower terms can write nothing.
    pub(crate) term: Term,
    /// Where workers and servers look for the master, and where the one before was.
    pub(crate) master: Option<Pid>,
    pub(crate) former_master: Option<Pid>,
    pub(crate) folders: BTreeMap<String, Folder>,
    pub(crate) is_full: bool,
}

#[derive(Clone, Default)]
pub(crate) struct Folder {
    pub(crate) files: BTreeMap<u32, Vec<u8>>,
    manifest: Option<Manifest>,
}

#[derive(Clone)]
pub(crate) struct Manifest {
    pub(crate) version: u64,
    checksums: BTreeMap<u32, String>,
}

pub(crate) fn checksum(bytes: &[u8]) -> String {
    let add = |sum: u64, byte: &u8| (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    format!("{:016x}", bytes.iter().fold(0xcbf2_9ce4_8422_2325, add))
}

impl Disk {
    /// Writes the file of a partition. On a full disk, part of it may remain.
    pub(crate) fn write(
        &mut self,
        folder: &str,
        partition: u32,
        bytes: Vec<u8>,
        updates: u64,
    ) -> Result<CutFile, String> {
        let place = self.folders.get_mut(folder).ok_or("no such folder")?;
        if self.is_full {
            // Files get their name when they are complete, so a torn one has none.
            return Err("no space left on device".into());
        }
        let file = CutFile {
            partition,
            name: format!("partition-{partition:05}.edlp"),
            bytes: bytes.len() as u64,
            checksum: checksum(&bytes),
            updates,
        };
        place.files.insert(partition, bytes);
        Ok(file)
    }

    /// Writes the manifest, once, if every file that it names is there.
    pub(crate) fn commit(
        &mut self,
        folder: &str,
        version: u64,
        files: &[CutFile],
    ) -> Result<(), String> {
        if self.is_full {
            return Err("no space left on device".into());
        }
        let folder = self.folders.get_mut(folder).ok_or("the folder is gone")?;
        for file in files {
            let bytes = folder.files.get(&file.partition).ok_or("a file is missing")?;
            if checksum(bytes) != file.checksum {
                return Err("a file changed".into());
            }
        }
        assert!(folder.manifest.is_none(), "a manifest is never overwritten");
        let checksums = files.iter().map(|f| (f.partition, f.checksum.clone())).collect();
        folder.manifest = Some(Manifest { version, checksums });
        Ok(())
    }

    pub(crate) fn manifest(&self, folder: &str) -> Option<&Manifest> {
        self.folders.get(folder)?.manifest.as_ref()
    }

    /// The file of a partition in a complete checkpoint.
    pub(crate) fn read(&self, folder: &str, partition: u32) -> Result<&[u8], String> {
        let folder = self.folders.get(folder).ok_or("no such folder")?;
        let manifest = folder.manifest.as_ref().ok_or("the manifest is missing")?;
        let expected =
            manifest.checksums.get(&partition).ok_or("the manifest lacks a partition")?;
        let bytes = folder.files.get(&partition).ok_or("a file is missing")?;
        if checksum(bytes) == *expected { Ok(bytes) } else { Err("wrong checksum".into()) }
    }

    /// Changes one bit of the first file.
    pub(crate) fn spoil(&mut self, folder: &str, place: usize) {
        let Some(folder) = self.folders.get_mut(folder) else { return };
        if let Some(bytes) = folder.files.values_mut().next() {
            let place = place % bytes.len();
            bytes[place] ^= 1;
        }
    }
}
