// SPDX-License-Identifier: Apache-2.0
//! Checkpoints in progress: copied between two pushes, or after a named step, then written.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::{Effect, Error, Report, Server};
use crate::id::{CheckpointId, Generation, PartitionId};
use crate::job::CheckpointFile;

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Checkpoint {
    folder: String,
    /// The step whose state is written.
    at: Option<u64>,
    copied: BTreeSet<PartitionId>,
    files: BTreeMap<u32, CheckpointFile>,
}

impl Checkpoint {
    pub(super) fn check_invariants(&self, partitions: &Range<u32>) {
        let is_copied = |file: &u32| self.copied.contains(&PartitionId(*file));
        assert!(self.files.keys().all(is_copied), "only copies are written");
        assert!(self.files.len() < partitions.len(), "a complete checkpoint is reported");
    }
}

impl Server {
    /// One checkpoint at a time, but a step that has not come is given up for the next order: no
    /// worker may ever train it.
    pub(super) fn checkpoint(
        &mut self,
        checkpoint: CheckpointId,
        generation: Generation,
        folder: String,
        at: Option<u64>,
    ) {
        let Some(held) = self.held_mut().filter(|held| held.generation == generation) else {
            let error = Error::NotHeld(generation);
            return self.report_checkpoint_failed(checkpoint, &error);
        };
        if at.is_none() && !held.checkpoints.is_empty() {
            let error = Error::CheckpointRunning;
            return self.report_checkpoint_failed(checkpoint, &error);
        }
        let n = held.partitions.len();
        let is_uncopied =
            |_: &CheckpointId, other: &mut Checkpoint| other.at.is_some() && other.copied.len() < n;
        let given_up: Vec<CheckpointId> =
            held.checkpoints.extract_if(.., is_uncopied).map(|(other, _)| other).collect();
        if n > 0 {
            let (copied, files) = (BTreeSet::new(), BTreeMap::new());
            held.checkpoints.insert(checkpoint, Checkpoint { folder, at, copied, files });
        }
        for other in given_up {
            self.report_checkpoint_failed(other, &Error::Overtaken);
        }
        if n == 0 {
            let done = Report::CheckpointDone { checkpoint, generation, files: Vec::new() };
            return self.effects.push(Effect::Report(done));
        }
        self.effects.push(Effect::Copy { checkpoint, at });
        if at.is_some() {
            self.effects.push(Effect::Report(Report::CheckpointStarted { checkpoint }));
        }
    }

    pub(super) fn copied(
        &mut self,
        checkpoint: CheckpointId,
        partition: PartitionId,
        updates: u64,
    ) {
        let Some(held) = self.held_mut().filter(|held| held.hosts(partition)) else { return };
        let Some(open) = held.checkpoints.get_mut(&checkpoint) else { return };
        if let Some(at) = open.at.filter(|at| *at != updates) {
            let error = Error::Past { at, partition, step: updates };
            return self.end_checkpoint(checkpoint, &error.to_string());
        }
        if open.copied.insert(partition) {
            let folder = open.folder.clone();
            self.effects.push(Effect::Write { checkpoint, folder, partition });
        }
    }

    pub(super) fn written(&mut self, checkpoint: CheckpointId, file: CheckpointFile) {
        let Some(held) = self.held_mut() else { return };
        let Some(open) = held.checkpoints.get_mut(&checkpoint) else { return };
        if open.copied.contains(&PartitionId(file.partition)) {
            open.files.insert(file.partition, file);
        }
        if open.files.len() < held.partitions.len() {
            return;
        }
        let (generation, done) = (held.generation, held.checkpoints.remove(&checkpoint));
        let files = done.map(|done| done.files.into_values().collect()).unwrap_or_default();
        let done = Report::CheckpointDone { checkpoint, generation, files };
        self.effects.push(Effect::Report(done));
    }

    pub(super) fn write_failed(&mut self, checkpoint: CheckpointId, error: String) {
        self.end_checkpoint(checkpoint, &error);
    }

    fn end_checkpoint(&mut self, checkpoint: CheckpointId, error: &dyn ToString) {
        let Some(held) = self.held_mut() else { return };
        if held.checkpoints.remove(&checkpoint).is_some() {
            self.report_checkpoint_failed(checkpoint, error);
        }
    }

    pub(super) fn report_checkpoint_failed(
        &mut self,
        checkpoint: CheckpointId,
        error: &dyn ToString,
    ) {
        let failed = Report::CheckpointFailed { checkpoint, error: error.to_string() };
        self.effects.push(Effect::Report(failed));
    }
}
