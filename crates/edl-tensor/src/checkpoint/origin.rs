// SPDX-License-Identifier: Apache-2.0
//! Where a job's partitions come from: first values, or a complete checkpoint.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use edl_core::id::PartitionId;

use super::{Checkpoint, Error, FileEntry, read_partition};
use crate::partition::{Partition, PartitionConfig};

/// Makes partitions, one by one and in any order.
#[derive(Clone, Debug)]
pub struct Origin(Option<Source>);

#[derive(Clone, Debug)]
struct Source {
    folder: PathBuf,
    files: BTreeMap<PartitionId, FileEntry>,
    keep_applied: bool,
}

impl Origin {
    /// First values: a function of the partition's config.
    #[must_use]
    pub fn first_values() -> Self {
        Self(None)
    }

    /// The checkpoint in `folder`, which must be cut into `n_partitions`; `keep_applied` as in
    /// `Partition::restore`.
    pub fn checkpoint(folder: &Path, n_partitions: u32, keep_applied: bool) -> Result<Self, Error> {
        let checkpoint = Checkpoint::open(folder)?;
        let theirs = checkpoint.manifest.n_partitions;
        if theirs != n_partitions {
            return Err(Error::OtherCut { path: folder.to_owned(), theirs, ours: n_partitions });
        }
        let files = checkpoint.manifest.files.into_iter().map(|file| (file.partition, file));
        let files = files.collect();
        Ok(Self(Some(Source { folder: folder.to_owned(), files, keep_applied })))
    }

    pub fn make(&self, config: PartitionConfig) -> Result<Partition, Error> {
        let Some(Source { folder, files, keep_applied }) = &self.0 else {
            return Ok(Partition::new(config));
        };
        let file = files
            .get(&config.id)
            .ok_or_else(|| Error::NoPartition { path: folder.clone(), partition: config.id })?;
        read_partition(folder, file, config, *keep_applied)
    }
}
