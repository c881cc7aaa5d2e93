// SPDX-License-Identifier: Apache-2.0
//! Everything that a worker's machine requests.

use std::ops::Range;

use super::event::{Shard, WorkItem};
use super::report::Report;
use crate::id::{BatchId, LeaseId};
use crate::route::Route;

/// Something to do; effects are performed in order.
///
/// Records, parameters and gradients stay with the shell, which finds them by item or batch.
/// At most one `Compute` is unanswered at a time.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    /// Read and decode records; answer `Decoded`, and keep them until they are computed or
    /// forgotten.
    Read { item: WorkItem, records: Records },
    /// Drop the records of an item and what was pulled for it.
    Forget(WorkItem),

    /// Connect to all servers of the route; answer `Connected` or `Broken`.
    Connect { connection: u64, route: Route },
    /// End every wait on this connection.
    Abort { connection: u64 },
    /// Fetch the parameters of an item; answer `Pulled`, `NotPulled` or `Broken`.
    Pull { connection: u64, item: WorkItem, wants: Wants },
    /// Send the gradient of the batch that was computed last; `Acknowledged` or `Broken` follows.
    Push { connection: u64, batch: BatchId },
    /// Tell the servers that a batch has no gradient; `Acknowledged` or `Broken` follows.
    Skip { connection: u64, batch: BatchId },

    /// Run the model on the item that was pulled last; answer `Computed`.
    Compute(WorkItem),
    /// Prepare for the pieces of a shard; a failure is answered by `NotBegun`.
    Begin { lease: LeaseId, shard: Shard },
    /// Every piece of the shard is computed: answer `Finished`.
    Finish(LeaseId),
    /// Drop a shard that is not finished.
    Drop(LeaseId),

    /// Put this into the outbox.
    Report(Report),
    /// Exit, after a last attempt to empty the outbox.
    End,
}

/// Which records to read.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Records {
    Batch(BatchId),
    /// The records of one lane of a batch.
    Lane(BatchId, u32),
    Validation(Range<u64>),
    Prediction(Range<u64>),
}

/// What a pull requests in addition to the rows of its item.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Wants {
    pub dense: bool,
    /// A push follows. Servers that bound staleness count on it.
    pub will_push: bool,
    /// Rounds that the servers must have applied.
    pub min_round: Option<u64>,
}
