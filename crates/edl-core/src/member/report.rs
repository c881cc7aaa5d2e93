// SPDX-License-Identifier: Apache-2.0
//! What a member tells its master, and when.

use crate::id::{CutId, Generation, LeaseId};
use crate::job::{CutFile, News};

/// What the master is told.
#[derive(Clone, Debug, PartialEq)]
pub enum Report {
    News(News),
    /// The files of a checkpoint are written.
    Written {
        checkpoint: CutId,
        generation: Generation,
        files: Vec<CutFile>,
    },
    /// The files of a checkpoint cannot be written.
    NotWritten {
        checkpoint: CutId,
        generation: Generation,
        error: String,
    },
    /// A shard cannot be evaluated here.
    Failed {
        lease: LeaseId,
        item: u32,
        error: String,
    },
}
