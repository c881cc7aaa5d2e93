// SPDX-License-Identifier: Apache-2.0
//! The job's folder: what is durable, and checkpoint folders with real partition files in them.

use std::collections::BTreeMap;
use std::ops::Range;

use edl_core::id::Term;
use edl_core::job::{CutFile, Durable};
use edl_tensor::checkpoint::codec;
use edl_tensor::partition::Partition;

use crate::counter::{Counter, Parts};

#[derive(Default)]
pub(crate) struct Disk {
    pub(crate) durable: Durable,
    /// The highest term that was taken; lower ones can write nothing.
    pub(crate) term: Term,
    pub(crate) folders: BTreeMap<String, Folder>,
}

#[derive(Clone, Default)]
pub(crate) struct Folder {
    pub(crate) files: BTreeMap<u32, Vec<u8>>,
    pub(crate) manifest: Option<BTreeMap<u32, String>>,
}

/// A partition's file and its checksum, which only its content decides.
pub(crate) fn encode(part: &Partition) -> Vec<u8> {
    let mut bytes = Vec::new();
    codec::encode(&part.snapshot(), &mut bytes).expect("memory takes everything");
    bytes
}

pub(crate) fn checksum(bytes: &[u8]) -> String {
    let word = |word: u64, byte: &u8| (word ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    format!("{:016x}", bytes.iter().fold(0xcbf2_9ce4_8422_2325, word))
}

impl Disk {
    /// Writes the manifest, once, if every file that it names is there.
    pub(crate) fn commit(&mut self, folder: &str, files: &[CutFile]) -> Result<(), String> {
        let folder = self.folders.get_mut(folder).ok_or("the folder is gone")?;
        for file in files {
            let bytes = folder.files.get(&file.partition).ok_or("a file is missing")?;
            if checksum(bytes) != file.checksum {
                return Err("a file changed".into());
            }
        }
        if folder.manifest.is_some() {
            return Err("a manifest is never overwritten".into());
        }
        folder.manifest = Some(files.iter().map(|f| (f.partition, f.checksum.clone())).collect());
        Ok(())
    }

    /// Loads some partitions of a complete checkpoint.
    pub(crate) fn load(
        &self,
        counter: &Counter,
        folder: &str,
        partitions: Range<u32>,
    ) -> Result<Parts, String> {
        let folder = self.folders.get(folder).ok_or("there is no such folder")?;
        let manifest = folder.manifest.as_ref().ok_or("it has no manifest")?;
        let mut parts = Parts::new();
        for id in partitions {
            let expected = manifest.get(&id).ok_or("the manifest lacks a partition")?;
            let bytes = folder.files.get(&id).ok_or("a file is missing")?;
            if checksum(bytes) != *expected {
                return Err("a checksum is wrong".into());
            }
            let config = counter.partition_config(id);
            let part = Partition::restore(config, &mut bytes.as_slice(), true);
            parts.insert(id, part.map_err(|error| error.to_string())?);
        }
        Ok(parts)
    }
}
