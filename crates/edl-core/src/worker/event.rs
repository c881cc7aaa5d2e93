// SPDX-License-Identifier: Apache-2.0
//! Everything that can happen to a worker with parameter servers.

use std::ops::Range;

use super::Report;
use crate::id::{BatchId, EvalId, Generation, LeaseId};
use crate::job::Command;
use crate::metric::Measures;
use crate::model::ModelSpec;

/// Something that happened.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// A deadline may have passed.
    Tick,
    /// The model is built.
    Built(Box<ModelSpec>),
    /// Asked to exit: finish the item in progress, return the rest.
    Leave,

    /// A master has admitted this worker again. It has assigned the worker's shards to others.
    Rejoined,
    /// From the master.
    Command(Command),

    /// Answer to `Effect::Read`.
    Decoded { item: WorkItem, result: Result<(), String> },

    /// All servers of the route are connected.
    Connected { connection: u64 },
    /// Answer to `Effect::Pull`: the parameters are here.
    Pulled { connection: u64, item: WorkItem },
    /// The model cannot name the rows of an item, so nothing was pulled.
    NotPulled { connection: u64, item: WorkItem, error: String },
    /// Every server has acknowledged the batch.
    Acknowledged { connection: u64, batch: BatchId, generation: Generation },
    /// The connection failed, or could not be made. It is of no further use.
    Broken { connection: u64 },

    /// Answer to `Effect::Compute`.
    Computed { item: WorkItem, result: Result<Computed, Fault> },
    /// `Effect::Begin` failed.
    NotBegun { lease: LeaseId, fault: Fault },
    /// Answer to `Effect::Finish`.
    Finished { lease: LeaseId, result: Result<Finished, Fault> },
}

/// A batch to train, or a minibatch of a shard to evaluate or predict. Items are computed in
/// this order: evaluations hold up the job, so they come before training.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum WorkItem {
    Piece { lease: LeaseId, piece: u32 },
    Batch(BatchId),
}

/// What a lease assigns.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Task {
    /// `skipped` are those of `indices` that are pushed without a gradient.
    Train {
        epoch: u32,
        indices: Range<u32>,
        skipped: Vec<u32>,
    },
    Shard(Shard),
}

/// A range of records that is processed in minibatches.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Shard {
    pub number: u32,
    pub records: Range<u64>,
    pub pass: Pass,
}

impl Shard {
    /// Minibatches of the shard.
    #[must_use]
    pub fn n_pieces(&self, minibatch_size: u32) -> u32 {
        let n_records = self.records.end.saturating_sub(self.records.start);
        let n_pieces = n_records.div_ceil(u64::from(minibatch_size.max(1)));
        u32::try_from(n_pieces).unwrap_or(u32::MAX)
    }

    /// The records of one minibatch. All but the last have the same size.
    #[must_use]
    pub fn piece(&self, piece: u32, minibatch_size: u32) -> Range<u64> {
        let first = self.records.start + u64::from(piece) * u64::from(minibatch_size);
        first..self.records.end.min(first + u64::from(minibatch_size))
    }
}

/// What is done with the records of a shard.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Pass {
    /// Measure the model at `version` on validation data.
    Evaluate { eval: EvalId, version: u64 },
    /// Write the model's output to a file in `folder`.
    Predict { folder: String },
}

/// The result of computing one item.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Computed {
    /// The gradient of a batch is ready to be pushed.
    Batch { loss: f32 },
    /// A minibatch was added to its shard.
    Piece,
}

/// Why an item or a shard was not computed.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Fault {
    /// Bad records, or a model that fails.
    Failed(String),
    /// The loss or the gradient of a batch is not finite.
    NonFinite(String),
    /// There is no room for the output of a shard: the same may succeed later.
    DiskFull(String),
}

impl Fault {
    /// Returns the lease of a batch or a shard with the reason.
    pub(super) fn report(self, lease: LeaseId, index: u32) -> Report {
        match self {
            Self::Failed(error) => Report::Failed { lease, index, error },
            Self::NonFinite(error) => Report::NonFinite { lease, index, error },
            Self::DiskFull(error) => Report::DiskFull { lease, index, error },
        }
    }
}

/// The result of a whole shard.
#[derive(Clone, Debug, PartialEq)]
pub enum Finished {
    Evaluation(Box<Measures>),
    /// The file is written.
    Prediction,
}
