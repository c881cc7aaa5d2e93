// SPDX-License-Identifier: Apache-2.0
//! Everything that a parameter server can request from its shell.

use std::fmt;

use crate::goodput::TimeReport;
use crate::id::{CheckpointId, Generation, PartitionId};
use crate::job::CheckpointFile;
use crate::server::{Inspection, Load, Request};
use crate::servers::PartitionState;

/// Something to do. The order of effects matters among `Drop`, `Load`, `Copy` and `Inspect`, and
/// among reports.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    /// Stop the owners of this generation and forget what they hold.
    Drop(Generation),
    /// Create or restore partitions; answered by `Loaded` or `LoadFailed`.
    Load(Box<Load>),
    /// Pass the push to every owner; each answers with `Pushed`.
    Apply(Request),
    /// Answer the pull with what the owners hold now.
    Answer(Request),
    /// Every hosted partition has the batch.
    Acknowledge(Request),
    /// The request is over, and nothing more will happen to it.
    Refuse(Request, Refusal),
    /// Copy every partition: now, or as soon as it has `at` updates or more. Each is answered by
    /// `Copied`. Owners still waiting for the step of an earlier order forget that order.
    Copy { checkpoint: CheckpointId, at: Option<u64> },
    /// Write the copy of a partition; answered by `Written` or `WriteFailed`.
    Write { checkpoint: CheckpointId, folder: String, partition: PartitionId },
    /// Ask every owner for its states; answered by `Inspected`.
    Inspect(Inspection, Generation),
    /// Send the hello with this number, and what the server holds; generation 0 is nothing.
    Hello { hello: u64, generation: Generation, states: Vec<PartitionState> },
    /// Send this to the master, or to the next one.
    Report(Report),
    /// Worth a line in the log.
    Note(Note),
}

/// What a server reports to its master.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Report {
    Heartbeat,
    /// Where the time of the process went.
    Spending(TimeReport),
    Loaded {
        generation: Generation,
        states: Vec<PartitionState>,
    },
    LoadFailed {
        generation: Generation,
        error: String,
    },
    /// The state of a step that has not come will be copied.
    CheckpointStarted {
        checkpoint: CheckpointId,
    },
    CheckpointDone {
        checkpoint: CheckpointId,
        generation: Generation,
        files: Vec<CheckpointFile>,
    },
    CheckpointFailed {
        checkpoint: CheckpointId,
        error: String,
    },
    /// The answer to the master's inspection.
    States {
        request: u64,
        generation: Generation,
        states: Vec<PartitionState>,
    },
}

/// Why a server did not do what a client requested.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The request is for an earlier generation than the server's.
    Generation {
        current: Generation,
    },
    NotServing,
    /// Something that had to come first did not come in time; the text names it.
    Waited(String),
    /// The server is not at the step that was requested; the text names both.
    StepMismatch(String),
    Other(String),
}

/// A log line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Note {
    Serving(Generation),
    /// The order to serve came for a generation that is not held.
    CannotServe(Generation),
    /// A pull stopped waiting for the push of a pull at this version.
    GaveUpWaiting {
        version: u64,
    },
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Serving(generation) => write!(f, "serving generation {generation}"),
            Self::CannotServe(generation) => {
                write!(f, "cannot serve generation {generation}: the server has not loaded it")
            }
            Self::GaveUpWaiting { version } => {
                write!(f, "a pull gave up waiting for the slowest worker at version {version}")
            }
        }
    }
}
