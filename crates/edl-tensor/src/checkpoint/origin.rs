// SPDX-License-Identifier: Apache-2.0
//! Where a job's partitions come from: first values, or a complete checkpoint.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use edl_core::id::PartitionId;
use edl_core::model::ModelSpec;

use super::{Checkpoint, Error, FileEntry, read_partition};
use crate::first_values;
use crate::partition::{Partition, PartitionConfig};

/// Makes partitions, one by one and in any order.
#[derive(Clone, Debug)]
pub struct Origin(Source);

#[derive(Clone, Debug)]
enum Source {
    /// A function of the partition's config.
    Config,
    /// The flat vector of all dense parameters, as the model brought it.
    Given(Vec<f32>),
    Checkpoint {
        folder: PathBuf,
        files: BTreeMap<PartitionId, FileEntry>,
        keep_applied: bool,
    },
}

impl Origin {
    /// First values of `model`; those that it brings are read from the job's folder.
    pub fn first_values(model: &ModelSpec, job_dir: &Path) -> Result<Self, Error> {
        if !model.brings_first_values() {
            return Ok(Self(Source::Config));
        }
        let values = first_values::read(job_dir, model.dense_len());
        let values = values.map_err(|error| Error::FirstValues { source: Box::new(error) })?;
        Ok(Self(Source::Given(values)))
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
        Ok(Self(Source::Checkpoint { folder: folder.to_owned(), files, keep_applied }))
    }

    pub fn make(&self, config: PartitionConfig) -> Result<Partition, Error> {
        let (folder, files, keep_applied) = match &self.0 {
            Source::Config => return Ok(Partition::new(config)),
            Source::Given(values) => return Ok(Partition::with_first_values(config, values)),
            Source::Checkpoint { folder, files, keep_applied } => (folder, files, keep_applied),
        };
        let file = files
            .get(&config.id)
            .ok_or_else(|| Error::NoPartition { path: folder.clone(), partition: config.id })?;
        read_partition(folder, file, config, *keep_applied)
    }
}
