// SPDX-License-Identifier: Apache-2.0
//! Checkpoints in the course of a job: who writes one, and what waits for it.

use super::checkpoints::{Cut, Progress};
use super::steps::Steps;
use super::{Command, CutFile, Effect, End, Holder, Job, PsOrder, Stage};
use crate::id::{CutId, Generation, PsId, WorkerId};
use crate::time::Time;

impl Job {
    /// Takes a checkpoint now; `exact` is the position if no work is in progress. Under AllReduce
    /// it is taken after the last step that is allowed, and is always exact.
    pub(super) fn begin_cut(&mut self, exact: Option<u64>, now: Time) {
        if !self.strategy.can_checkpoint() {
            return; // `advance_world` comes back to it.
        }
        let id = CutId::of(self.config.term, self.number());
        let generation = self.durable.generation;
        let at = self.strategy.last_step();
        let (version, exact) = (at.unwrap_or(self.ledger().version()), at.or(exact));
        let members = self.strategy.members();
        let servers = self.strategy.servers().members().keys();
        let workers = members.iter().map(|member| Holder::Worker(member.worker));
        let waiting = servers.clone().copied().map(Holder::Ps).chain(workers).collect();
        let cut = Cut { id, version, generation, exact, waiting };
        let folder = cut.folder();
        self.effects.push(Effect::PrepareCut { cut: id, folder: folder.clone() });
        for ps in servers {
            // Rows and dense parameters of a checkpoint must be of one step.
            let order = PsOrder::Cut { cut: id, generation, folder: folder.clone(), at };
            self.effects.push(Effect::ToPs(*ps, order));
        }
        // All members hold the same state, so each one writes a part.
        let layout = self.config.spec.layout(0);
        let n_members = u32::try_from(members.len()).expect("at most one member per lane");
        for (rank, member) in (0..).zip(members) {
            let partitions = layout.written(rank, n_members);
            let folder = folder.clone();
            let order = Command::Cut { cut: id, generation, folder, at: version, partitions };
            self.effects.push(Effect::ToWorker(member.worker, order));
        }
        self.checkpoints.begin(cut, now);
    }

    /// Gives up on a checkpoint that hangs.
    pub(super) fn check_cut(&mut self, now: Time) {
        let Some((id, workers, error)) = self.checkpoints.overdue(now) else { return };
        workers.into_iter().for_each(|worker| self.replace(worker));
        self.cut_failed(id, &error, now);
    }

    /// A server's stream broke while it was writing. The order or its answer may be lost, so all
    /// servers write again, into another folder.
    pub(super) fn cut_again(&mut self, ps: PsId, now: Time) {
        let cut = self.checkpoints.abandon_if_waiting_for(Holder::Ps(ps));
        let Some(cut) = cut else { return };
        self.effects.push(Effect::Delete(cut.folder()));
        if self.servers().is_serving() && self.servers().generation() == cut.generation {
            self.begin_cut(cut.exact, now);
        }
    }

    pub(super) fn cut_done(
        &mut self,
        holder: Holder,
        cut: CutId,
        generation: Generation,
        files: Vec<CutFile>,
        now: Time,
    ) {
        match self.checkpoints.written(holder, cut, generation, files) {
            Progress::Waiting => {}
            Progress::Incomplete => {
                self.cut_failed(cut, "some partitions' files are missing", now);
            }
            Progress::Complete { version, folder, files } => {
                self.effects.push(Effect::Commit { cut, folder, version, generation, files });
            }
        }
    }

    pub(super) fn committed(&mut self, cut: CutId, now: Time) {
        let Some(cut) = self.checkpoints.finish(cut) else { return };
        self.note("checkpoint", format!("checkpoint {} saved", cut.version));
        let is_exact = cut.exact == Some(self.ledger().n_done());
        let is_best = *self.stages.stage() == Stage::BestCut && is_exact;
        let record = |facts: &mut _| self.checkpoints.record(&cut, is_best, facts);
        let dropped = self.durable.change(&mut self.effects, record);
        self.effects.extend(dropped.into_iter().map(Effect::Delete));
        self.after_cut(true, is_exact, now);
    }

    /// A checkpoint failed: the previous one is kept, and the job continues.
    pub(super) fn cut_failed(&mut self, cut: CutId, error: &str, now: Time) {
        let Some(cut) = self.checkpoints.finish(cut) else { return };
        let text = format!(
            "checkpoint {} failed; training continues and the previous checkpoint is kept: {error}",
            cut.version
        );
        self.note("checkpoint_failed", text);
        self.effects.push(Effect::Delete(cut.folder()));
        if self.strategy.steps().is_some_and(Steps::is_farewell) {
            self.checkpoints.pause(now);
        }
        self.after_cut(false, cut.exact == Some(self.ledger().n_done()), now);
    }

    /// Continues what was waiting for the checkpoint. `is_exact`: it was of the current model.
    fn after_cut(&mut self, is_complete: bool, is_exact: bool, now: Time) {
        match self.stages.stage() {
            // An earlier one was still being written; now it is the best model's turn.
            Stage::BestCut if !is_exact => self.begin_cut(Some(self.ledger().n_done()), now),
            Stage::BestCut => self.resume_training(),
            Stage::Finishing if is_complete => self.export(),
            Stage::Finishing => {
                if !self.checkpoints.retry_final(now) {
                    let why =
                        "cannot write the final checkpoint; free some disk space, then resume";
                    self.end(End::Failed(why.into()));
                }
            }
            Stage::Stopping { reason, .. } => {
                let end = End::Stopped(reason.clone());
                self.end(end);
            }
            Stage::Working | Stage::Evaluating { .. } | Stage::Exporting | Stage::Ended => {}
        }
    }

    /// A member is gone and writes nothing: the checkpoint that waits for it is taken again later.
    pub(super) fn lose_cut_of(&mut self, worker: WorkerId) {
        if let Some(cut) = self.checkpoints.abandon_if_waiting_for(Holder::Worker(worker)) {
            let saved = self.durable.latest_checkpoint().map_or(0, |before| before.version);
            self.checkpoints.continue_from(saved);
            self.effects.push(Effect::Delete(cut.folder()));
        }
    }

    /// Gives up a checkpoint whose servers are gone.
    pub(super) fn abandon_cut(&mut self) {
        let cut = self.checkpoints.abandon();
        self.effects.extend(cut.map(|cut| Effect::Delete(cut.folder())));
    }
}
