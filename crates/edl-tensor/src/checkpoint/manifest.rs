// SPDX-License-Identifier: Apache-2.0
//! The manifest: lists the files of one checkpoint.

use std::collections::{BTreeMap, BTreeSet};

use edl_core::id::{BatchId, CheckpointId, Generation, PartitionId, Term};
use edl_core::job::CheckpointFile;
use edl_core::layout::Layout;
use edl_core::model::ModelSpec;
use edl_core::optimizer::OptimizerSpec;
use serde::{Deserialize, Serialize};

use super::{FORMAT, FORMAT_APART};

/// What a complete checkpoint is made of.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// `FORMAT` or `FORMAT_APART`.
    pub format: u32,
    pub version: u64,
    /// Set if no work was in progress: it holds exactly the batches before this position.
    #[serde(default)]
    pub exact: Option<u64>,
    pub generation: Generation,
    #[serde(rename = "cut")]
    pub checkpoint: CheckpointId,
    pub term: Term,
    /// 32 hex digits.
    pub run: String,
    pub job: String,
    pub seed: u64,
    pub model: ModelSpec,
    pub optimizer: OptimizerSpec,
    /// Batches per epoch.
    pub n_batches: u32,
    pub n_partitions: u32,
    /// Of the training data.
    pub fingerprint: String,
    pub files: Vec<FileEntry>,
    /// The metrics known when it was written.
    #[serde(default, deserialize_with = "edl_core::nonfinite::map")]
    pub metrics: BTreeMap<String, f64>,
    /// Batches that count as applied and changed nothing.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub skipped: BTreeSet<BatchId>,
}

/// One partition's file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileEntry {
    pub partition: PartitionId,
    pub name: String,
    pub bytes: u64,
    /// BLAKE3 in hex, as stored at the end of the file.
    pub checksum: String,
    pub updates: u64,
}

impl From<CheckpointFile> for FileEntry {
    fn from(file: CheckpointFile) -> Self {
        let CheckpointFile { partition, name, bytes, checksum, updates } = file;
        Self { partition: PartitionId(partition), name, bytes, checksum, updates }
    }
}

impl From<FileEntry> for CheckpointFile {
    fn from(file: FileEntry) -> Self {
        let FileEntry { partition, name, bytes, checksum, updates } = file;
        Self { partition: partition.0, name, bytes, checksum, updates }
    }
}

/// Why text is not the manifest of a whole checkpoint.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("it is corrupt")]
    Json(#[from] serde_json::Error),
    #[error(
        "the checkpoint has format {found}, this build reads formats {FORMAT} and {FORMAT_APART}; use the build that wrote it"
    )]
    Format { found: u32 },
    #[error("it must list each of {needs} partitions once, in order, but lists {has} files")]
    Partitions { needs: u32, has: usize },
    #[error("it lists `{0}`, which is not a valid name for a partition's file")]
    Name(String),
}

/// Name of a partition's file.
#[must_use]
pub fn file_name(partition: PartitionId) -> String {
    format!("partition-{:05}.edlp", partition.0)
}

impl Manifest {
    /// Reads a manifest and checks that it is whole.
    pub fn parse(text: &[u8]) -> Result<Self, Error> {
        #[derive(Deserialize)]
        struct Format {
            format: u32,
        }
        // First the format alone: in another one, anything else may differ.
        let Format { format: found } = serde_json::from_slice(text)?;
        if super::is_apart(found).is_none() {
            return Err(Error::Format { found });
        }
        let manifest: Self = serde_json::from_slice(text)?;
        manifest.check()?;
        Ok(manifest)
    }

    /// How the model's state is partitioned.
    #[must_use]
    pub fn layout(&self) -> Layout {
        let is_apart = super::is_apart(self.format) == Some(true);
        Layout { dense_len: self.model.dense_len(), n_partitions: self.n_partitions, is_apart }
    }

    /// Whether each partition has its file.
    pub fn check(&self) -> Result<(), Error> {
        if super::is_apart(self.format).is_none() {
            return Err(Error::Format { found: self.format });
        }
        let named = self.files.iter().map(|file| file.partition.0);
        if !named.eq(0..self.n_partitions) {
            return Err(Error::Partitions { needs: self.n_partitions, has: self.files.len() });
        }
        // A name from a file must not point outside the checkpoint's folder.
        match self.files.iter().find(|file| file.name != file_name(file.partition)) {
            Some(file) => Err(Error::Name(file.name.clone())),
            None => Ok(()),
        }
    }
}
