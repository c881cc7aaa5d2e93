// SPDX-License-Identifier: Apache-2.0
//! Where a job's partitions come from: initial values, or a complete checkpoint.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use edl_core::id::PartitionId;
use edl_core::layout::Layout;
use edl_core::model::ModelSpec;

use super::{Checkpoint, Error, FileEntry, Snapshot, read_partition, read_snapshot};
use crate::first_values;
use crate::partition::{Dense, Partition, PartitionConfig};
use crate::table::Slab;

/// Creates partitions, in any order.
#[derive(Clone, Debug)]
pub struct Origin(OriginKind);

#[derive(Clone, Debug)]
enum OriginKind {
    /// A function of the partition's config.
    Config,
    /// The flat vector of all dense parameters and the rows of each table, as the model provides
    /// them.
    Given(Vec<f32>, Vec<Vec<f32>>),
    Checkpoint {
        folder: PathBuf,
        files: BTreeMap<PartitionId, FileEntry>,
        layout: Layout,
        keep_applied: bool,
    },
}

impl Origin {
    /// Initial values of `model`; those that it provides are read from the job's folder.
    pub fn first_values(model: &ModelSpec, job_dir: &Path) -> Result<Self, Error> {
        if !model.brings_first_values() {
            return Ok(Self(OriginKind::Config));
        }
        let values = first_values::read(job_dir, model.dense_len());
        let given =
            values.and_then(|values| Ok((values, first_values::read_rows(job_dir, model)?)));
        let (values, rows) =
            given.map_err(|error| Error::FirstValues { source: Box::new(error) })?;
        Ok(Self(OriginKind::Given(values, rows)))
    }

    /// The checkpoint in `folder`, which must have as many partitions as `ours`; `keep_applied` as in
    /// `Partition::restore`. In a new job, rows may be in separate partitions although they are not in
    /// the checkpoint, or the other way round: one or two partitions here hold what one holds there.
    pub fn checkpoint(folder: &Path, ours: &Layout, keep_applied: bool) -> Result<Self, Error> {
        let checkpoint = Checkpoint::open(folder)?;
        let layout = checkpoint.manifest.layout();
        let (theirs, ours_each) = (layout.with_segments().end, ours.with_segments().end);
        if theirs != ours_each || keep_applied && layout.is_apart != ours.is_apart {
            return Err(Error::OtherPartitioning {
                path: folder.to_owned(),
                theirs,
                ours: ours_each,
            });
        }
        let files = checkpoint.manifest.files.into_iter().map(|file| (file.partition, file));
        let files = files.collect();
        Ok(Self(OriginKind::Checkpoint { folder: folder.to_owned(), files, layout, keep_applied }))
    }

    pub fn make(&self, config: PartitionConfig) -> Result<Partition, Error> {
        let (folder, files, layout, keep_applied) = match &self.0 {
            OriginKind::Config => return Ok(Partition::new(config)),
            OriginKind::Given(values, rows) => {
                return Ok(Partition::with_first_values(config, values, rows));
            }
            OriginKind::Checkpoint { folder, files, layout, keep_applied } => {
                (folder, files, layout, *keep_applied)
            }
        };
        let file = |partition| {
            let missing = || Error::NoPartition { path: folder.clone(), partition };
            files.get(&partition).ok_or_else(missing)
        };
        if layout.is_apart == config.layout.is_apart {
            return read_partition(folder, file(config.id)?, config, keep_applied);
        }
        let place = config.id.0 % layout.with_segments().end;
        let mut snapshot = read_snapshot(folder, file(PartitionId(place))?)?;
        if layout.is_apart {
            let rows = PartitionId(layout.with_rows().start + place);
            snapshot.tables = read_snapshot(folder, file(rows)?)?.tables;
        }
        Partition::from_snapshot(config.clone(), restricted(snapshot, &config), keep_applied)
            .map_err(|source| Error::Partition { path: folder.clone(), source })
    }
}

/// Keeps the part of `snapshot` that the partition of `config` holds.
fn restricted(mut snapshot: Snapshot, config: &PartitionConfig) -> Snapshot {
    let PartitionConfig { id, layout, .. } = config;
    if !layout.with_segments().contains(&id.0) {
        snapshot.dense = Dense::default();
    }
    if !layout.with_rows().contains(&id.0) {
        snapshot.tables.iter_mut().for_each(|slab| *slab = Slab::new(slab.stride()));
    }
    let header = &mut snapshot.header;
    header.partition = *id;
    (header.n_partitions, header.is_apart) = (layout.n_partitions, layout.is_apart);
    snapshot
}
