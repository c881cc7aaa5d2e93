// SPDX-License-Identifier: Apache-2.0
//! Checkpoints in the course of a job: who writes one, and what waits for it.

use super::checkpoints::{InProgress, Progress};
use super::step_control::StepControl;
use super::{
    CheckpointFile, CheckpointWriter, Command, Effect, End, EventKind, Job, MemberCheckpoint, Stage,
};
use crate::id::{CheckpointId, Generation, PsId, WorkerId};
use crate::server::Order;
use crate::time::Time;

impl Job {
    /// Takes a checkpoint now; `exact` is the position if no work is in progress. Under AllReduce
    /// it is taken after the last step that is allowed, and is always exact.
    pub(super) fn begin_checkpoint(&mut self, exact: Option<u64>, now: Time) {
        if !self.strategy.can_checkpoint() {
            return; // `advance_world` comes back to it.
        }
        let id = CheckpointId::of(self.config.term, self.number());
        let generation = self.durable.generation;
        let at = self.strategy.last_step();
        let (version, exact) = (at.unwrap_or(self.ledger().version()), at.or(exact));
        let members = self.strategy.members();
        let servers = self.strategy.servers().members().keys();
        let workers = members.iter().map(|member| CheckpointWriter::Worker(member.worker));
        let waiting = servers.clone().copied().map(CheckpointWriter::Ps).chain(workers).collect();
        let unaware = servers.clone().filter(|_| at.is_some()).copied().collect();
        let run = self.config.run;
        let checkpoint = InProgress { run, id, version, generation, exact, unaware, waiting };
        let folder = checkpoint.folder();
        self.effects.push(Effect::PrepareCheckpoint { checkpoint: id, folder: folder.clone() });
        for ps in servers {
            // Rows and dense parameters of a checkpoint must be of one step.
            let order =
                Order::Checkpoint { checkpoint: id, generation, folder: folder.clone(), at };
            self.effects.push(Effect::ToPs(*ps, order));
        }
        // All members hold the same state, so each one writes a part.
        let layout = self.config.spec.layout(0);
        let n_members = u32::try_from(members.len()).expect("at most one member per lane");
        for (rank, member) in (0..).zip(members) {
            let partitions = layout.written(rank, n_members);
            let (folder, at) = (folder.clone(), version);
            let order = MemberCheckpoint { checkpoint: id, generation, folder, at, partitions };
            self.effects.push(Effect::ToWorker(member.worker, Command::Checkpoint(order)));
        }
        self.checkpoints.begin(checkpoint, now);
    }

    /// Gives up on a checkpoint that hangs.
    pub(super) fn check_checkpoint(&mut self, now: Time) {
        if self.strategy.trains_in_steps() {
            self.checkpoints.wait_for_step(self.assignments.ledger().n_done(), now);
        }
        let Some((id, workers, error)) = self.checkpoints.overdue(now) else { return };
        workers.into_iter().for_each(|worker| self.replace(worker));
        self.checkpoint_failed(id, &error, now);
    }

    /// A server's stream broke while it was writing. The order or its answer may be lost, so all
    /// servers write again, into another folder.
    pub(super) fn restart_checkpoint(&mut self, ps: PsId, now: Time) {
        let checkpoint = self.checkpoints.abandon_if_waiting_for(CheckpointWriter::Ps(ps));
        let Some(checkpoint) = checkpoint else { return };
        self.effects.push(Effect::Delete(checkpoint.folder()));
        if self.servers().is_serving() && self.servers().generation() == checkpoint.generation {
            self.begin_checkpoint(checkpoint.exact, now);
        }
    }

    pub(super) fn checkpoint_done(
        &mut self,
        holder: CheckpointWriter,
        checkpoint: CheckpointId,
        generation: Generation,
        files: Vec<CheckpointFile>,
        now: Time,
    ) {
        match self.checkpoints.written(holder, checkpoint, generation, files) {
            Progress::Waiting => {}
            Progress::Incomplete => {
                self.checkpoint_failed(checkpoint, "some partitions' files are missing", now);
            }
            Progress::Complete { version, exact, folder, files } => {
                self.effects.push(Effect::Commit {
                    checkpoint,
                    folder,
                    version,
                    exact,
                    generation,
                    files,
                });
            }
        }
    }

    pub(super) fn committed(&mut self, checkpoint: CheckpointId, now: Time) {
        let Some(checkpoint) = self.checkpoints.succeed(checkpoint) else { return };
        self.note(EventKind::Checkpoint, format!("checkpoint {} saved", checkpoint.version));
        self.losses.saved();
        let is_exact = checkpoint.exact == Some(self.ledger().n_done());
        let is_best = *self.stages.stage() == Stage::BestCheckpoint && is_exact;
        let record = |facts: &mut _| self.checkpoints.record(&checkpoint, is_best, facts);
        let dropped = self.durable.change(&mut self.effects, record);
        self.effects.extend(dropped.into_iter().map(Effect::Delete));
        self.after_checkpoint(true, is_exact, now);
    }

    /// A checkpoint failed: the previous one is kept, and the job continues.
    pub(super) fn checkpoint_failed(&mut self, checkpoint: CheckpointId, error: &str, now: Time) {
        let Some(checkpoint) = self.checkpoints.finish(checkpoint) else { return };
        let text = format!(
            "checkpoint {} failed; training continues and the previous checkpoint is kept: {error}",
            checkpoint.version
        );
        let is_retry =
            *self.stages.stage() == Stage::Finishing && self.checkpoints.is_retrying_final();
        if !is_retry {
            self.note(EventKind::CheckpointFailed, text);
        }
        self.checkpoints.failed(error);
        self.effects.push(Effect::Delete(checkpoint.folder()));
        if self.strategy.steps().is_some_and(StepControl::is_draining) {
            self.checkpoints.pause(now);
        }
        self.after_checkpoint(false, checkpoint.exact == Some(self.ledger().n_done()), now);
    }

    /// Continues what was waiting for the checkpoint. `is_exact`: it was of the current model.
    fn after_checkpoint(&mut self, is_complete: bool, is_exact: bool, now: Time) {
        match self.stages.stage() {
            // An earlier one was still being written; now it is the best model's turn.
            Stage::BestCheckpoint if !is_exact && self.is_serving() => {
                self.begin_checkpoint(Some(self.ledger().n_done()), now)
            }
            Stage::BestCheckpoint => self.resume_training(),
            Stage::Finishing if is_complete => self.export(now),
            Stage::Finishing => {
                if !self.checkpoints.retry_final(now) {
                    let why =
                        "cannot write the final checkpoint; free some disk space, then resume";
                    self.end(End::Failed(why.into()));
                }
            }
            Stage::Stopping(stop) if stop.is_saving => {
                let lost = (!is_complete).then_some("its checkpoint could not be written");
                self.end_stop(lost);
            }
            // It is not the checkpoint of the stop.
            Stage::Stopping(_) => {}
            Stage::Working | Stage::Evaluating { .. } | Stage::Exporting { .. } | Stage::Ended => {}
        }
    }

    /// A member is gone and writes nothing: the checkpoint that waits for it is taken again later.
    pub(super) fn abandon_checkpoint_of(&mut self, worker: WorkerId) {
        if let Some(checkpoint) =
            self.checkpoints.abandon_if_waiting_for(CheckpointWriter::Worker(worker))
        {
            let saved = self.durable.latest_checkpoint().map_or(0, |before| before.version);
            self.checkpoints.continue_from(saved);
            self.effects.push(Effect::Delete(checkpoint.folder()));
        }
    }

    /// A server is gone: gives up a checkpoint unless only its manifest is missing.
    pub(super) fn abandon_unwritten_checkpoint(&mut self) {
        if self.checkpoints.committing().is_none() {
            self.abandon_checkpoint();
        }
    }

    pub(super) fn abandon_checkpoint(&mut self) {
        let checkpoint = self.checkpoints.abandon();
        self.effects.extend(checkpoint.map(|checkpoint| Effect::Delete(checkpoint.folder())));
    }
}
