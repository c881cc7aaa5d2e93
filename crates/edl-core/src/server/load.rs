// SPDX-License-Identifier: Apache-2.0
//! Which partitions a server creates, and from what.

use std::ops::Range;
use std::sync::Arc;

use crate::id::Generation;
use crate::job::LoadFrom;
use crate::layout::Layout;
use crate::model::ModelSpec;
use crate::optimizer::OptimizerSpec;
use crate::server::Error;
use crate::spec::Mode;

/// An order to load, with everything that decides what the partitions hold.
#[derive(Clone, Debug, PartialEq)]
pub struct Load {
    pub generation: Generation,
    pub partitions: Range<u32>,
    pub layout: Layout,
    pub model: Arc<ModelSpec>,
    pub optimizer: OptimizerSpec,
    pub seed: u64,
    /// Per epoch.
    pub n_batches: u32,
    pub mode: Mode,
    pub lr_staleness_modulation: bool,
    pub from: LoadFrom,
}

impl Load {
    /// Whether the partitions exist, and fit the model.
    pub(super) fn check(&self) -> Result<(), Error> {
        self.model.check().map_err(Error::Model)?;
        let Self { partitions, layout, n_batches, .. } = self;
        let Range { start, end } = layout.with_rows();
        let is_within = start <= partitions.start && partitions.end <= end;
        let fits = layout.dense_len == self.model.dense_len();
        if *n_batches > 0 && partitions.start <= partitions.end && is_within && fits {
            return Ok(());
        }
        let n_partitions = layout.n_partitions;
        let (partitions, n_batches) = (partitions.clone(), *n_batches);
        Err(Error::Layout { partitions, n_partitions, n_batches })
    }
}
