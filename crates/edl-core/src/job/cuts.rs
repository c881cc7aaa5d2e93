// SPDX-License-Identifier: Apache-2.0
//! Checkpoints: when one is cut, when it counts, which ones are kept.
//!
//! Any moment is good for a cut, because each partition's applied set travels with its rows. A
//! cut that is still being written is never overtaken by the next.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{Command, Durable, Effect, End, Job, PsOrder, Stage};
use crate::id::{CutId, Generation, PsId, WorkerId};
use crate::platform::{InstanceId, Role};
use crate::time::Time;

/// A failed final checkpoint is tried again after this pause, doubled by each further failure.
const RETRY_AFTER: Duration = Duration::from_secs(1);
const MAX_FINAL_TRIES: u32 = 5;
/// A cut that takes longer has failed: storage hangs.
const CUT_TIMEOUT: Duration = Duration::from_secs(600);

/// A checkpoint that is complete.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct CheckpointRef {
    /// Name of the folder below the job's checkpoints.
    pub folder: String,
    pub version: u64,
    /// Set if nothing was under way when it was cut: all batches before this position, no other.
    pub exact: Option<u64>,
    /// Could not be loaded once, and is not tried again.
    pub is_bad: bool,
}

/// One partition's file in a cut.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct CutFile {
    pub partition: u32,
    pub name: String,
    pub bytes: u64,
    pub checksum: String,
    pub updates: u64,
}

/// Who writes files of a cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Holder {
    Ps(PsId),
    Worker(WorkerId),
}

/// A cut being written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Cut {
    id: CutId,
    folder: String,
    version: u64,
    generation: Generation,
    exact: Option<u64>,
    deadline: Time,
    waiting: BTreeSet<Holder>,
    files: BTreeMap<u32, CutFile>,
}

impl Job {
    /// Cuts when the time or the version has come, unless one is being written.
    pub(super) fn cut_if_due(&mut self, now: Time) {
        let spec = &self.config.spec;
        let version = self.ledger.version();
        let is_new = version > self.last_cut_version;
        let every = Duration::from_secs(u64::from(spec.checkpoint_secs));
        let by_time = !every.is_zero() && now.since(self.last_cut_at) >= every;
        let steps = u64::from(spec.checkpoint_steps);
        let by_step = steps > 0 && version / steps > self.last_cut_version / steps;
        if self.cut.is_none() && is_new && (by_time || by_step) {
            self.begin_cut(None, now);
        }
    }

    /// Cuts now; `exact` is the position if nothing is under way. Under AllReduce now is the
    /// step that nobody has passed, and a cut is always exact.
    pub(super) fn begin_cut(&mut self, exact: Option<u64>, now: Time) {
        if self.is_allreduce() && !(self.worlds.is_settled() && self.is_serving()) {
            return; // `advance_world` comes back to it.
        }
        let id = CutId::of(self.config.term, self.number());
        let generation = self.durable.generation;
        let at = self.worlds.until();
        let (version, exact) =
            if self.is_allreduce() { (at, Some(at)) } else { (self.ledger.version(), exact) };
        let folder = format!("version-{version}.g{generation}.c{:x}", id.0);
        self.last_cut_at = now;
        self.last_cut_version = version;
        self.effects.push(Effect::PrepareCut { cut: id, folder: folder.clone() });
        let mut waiting = BTreeSet::new();
        for ps in self.servers.members().keys() {
            // Rows and dense parameters of a checkpoint must be of one step.
            let at = self.is_hybrid().then_some(at);
            let order = PsOrder::Cut { cut: id, generation, folder: folder.clone(), at };
            self.effects.push(Effect::ToPs(*ps, order));
            waiting.insert(Holder::Ps(*ps));
        }
        // All members hold the same, so each one writes a part.
        let layout = self.config.spec.layout(0);
        let members = self.worlds.current().map_or(&[][..], |world| &world.members);
        let n_members = u32::try_from(members.len()).expect("at most one member per lane");
        for (rank, member) in (0..).zip(members) {
            let partitions = layout.written(rank, n_members);
            let folder = folder.clone();
            let order = Command::Cut { cut: id, generation, folder, at, partitions };
            self.effects.push(Effect::ToWorker(member.worker, order));
            waiting.insert(Holder::Worker(member.worker));
        }
        let (files, deadline) = (BTreeMap::new(), now + self.cut_timeout());
        self.cut = Some(Cut { id, folder, version, generation, exact, deadline, waiting, files });
    }

    /// Gives up on a cut that hangs.
    pub(super) fn check_cut(&mut self, now: Time) {
        let Some(cut) = self.cut.as_ref().filter(|cut| now >= cut.deadline) else { return };
        let (id, owing) = (cut.id, cut.waiting.clone());
        let error = format!("not complete after {:?}", self.cut_timeout());
        for holder in owing {
            // Others hold what this one holds; a server may be slow, but has no substitute.
            if let Holder::Worker(worker) = holder {
                let instance = InstanceId { role: Role::Worker, id: worker.0 };
                self.effects.extend(self.instances.replace(instance).map(Effect::Platform));
            }
        }
        self.cut_failed(id, &error, now);
    }

    fn cut_timeout(&self) -> Duration {
        let patience = self.config.spec.task_timeout() * 2;
        if self.is_allreduce() { CUT_TIMEOUT.min(patience) } else { CUT_TIMEOUT }
    }

    /// A server's stream broke while it was cutting: the order or its answer may be lost, so
    /// everybody cuts again, into another folder.
    pub(super) fn cut_again(&mut self, ps: PsId, now: Time) {
        let Some(cut) = self.cut.take_if(|cut| cut.waiting.contains(&Holder::Ps(ps))) else {
            return;
        };
        self.effects.push(Effect::Delete(cut.folder));
        if self.servers.is_serving() && self.servers.generation() == cut.generation {
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
        let Some(current) = self.cut.as_mut() else { return };
        // A zombie's files are of an older generation, and no manifest will ever name them.
        if current.id != cut || current.generation != generation || !current.waiting.remove(&holder)
        {
            return;
        }
        current.files.extend(files.into_iter().map(|file| (file.partition, file)));
        if !current.waiting.is_empty() {
            return;
        }
        if current.files.len() == self.config.spec.layout(0).n_partitions as usize {
            self.effects.push(Effect::Commit {
                cut,
                folder: current.folder.clone(),
                version: current.version,
                generation,
                files: current.files.values().cloned().collect(),
            });
        } else {
            self.cut_failed(cut, "some partitions' files are missing", now);
        }
    }

    pub(super) fn committed(&mut self, cut: CutId, now: Time) {
        let Some(current) = self.cut.take_if(|current| current.id == cut) else { return };
        let text = format!("checkpoint {} saved", current.version);
        self.note("checkpoint", text);
        let is_exact = current.exact == Some(self.ledger.n_done());
        let is_best = self.stage == Stage::BestCut && is_exact;
        let keep = self.config.spec.keep_checkpoint_max as usize;
        let dropped = self.change(|facts| {
            let (folder, version, exact) = (current.folder, current.version, current.exact);
            if is_best {
                facts.best = Some(folder.clone());
            }
            facts.checkpoints.push(CheckpointRef { folder, version, exact, is_bad: false });
            drop_old(facts, keep)
        });
        self.effects.extend(dropped.into_iter().map(Effect::Delete));
        self.after_cut(true, is_exact, now);
    }

    /// A cut went wrong: the checkpoint before stays, and the job goes on.
    pub(super) fn cut_failed(&mut self, cut: CutId, error: &str, now: Time) {
        let Some(current) = self.cut.take_if(|current| current.id == cut) else { return };
        let text = format!(
            "checkpoint {} failed; training continues and the previous checkpoint is kept: {error}",
            current.version
        );
        self.note("checkpoint_failed", text);
        let is_exact = current.exact == Some(self.ledger.n_done());
        self.effects.push(Effect::Delete(current.folder));
        if self.is_farewell() {
            self.not_before = now + RETRY_AFTER;
        }
        self.after_cut(false, is_exact, now);
    }

    /// What was waiting for the cut goes on. `is_exact` if it was of the model that is held now.
    fn after_cut(&mut self, is_complete: bool, is_exact: bool, now: Time) {
        match &mut self.stage {
            // One of before was still being written; now it is the best model's turn.
            Stage::BestCut if !is_exact => self.begin_cut(Some(self.ledger.n_done()), now),
            Stage::BestCut => self.resume_training(),
            Stage::Finishing if is_complete => self.export(),
            Stage::Finishing => {
                self.n_final_tries += 1;
                if self.n_final_tries >= MAX_FINAL_TRIES {
                    let why =
                        "cannot write the final checkpoint; free some disk space, then resume";
                    self.end(End::Failed(why.into()));
                } else {
                    self.not_before = now + RETRY_AFTER * (1 << (self.n_final_tries - 1));
                }
            }
            Stage::Stopping { reason, .. } => {
                let end = End::Stopped(reason.clone());
                self.end(end);
            }
            Stage::Working | Stage::Evaluating { .. } | Stage::Exporting | Stage::Ended => {}
        }
    }

    /// A member that is gone writes nothing: the cut it owes a part of is begun anew later.
    pub(super) fn lose_cut_of(&mut self, worker: WorkerId) {
        let Some(cut) = self.cut.take_if(|cut| cut.waiting.contains(&Holder::Worker(worker)))
        else {
            return;
        };
        self.last_cut_version = self.latest_checkpoint().map_or(0, |before| before.version);
        self.effects.push(Effect::Delete(cut.folder));
    }

    /// Whether a cut is written and only its manifest is missing.
    pub(super) fn is_committing(&self) -> bool {
        self.cut.as_ref().is_some_and(|cut| cut.waiting.is_empty())
    }

    /// Forgets a cut whose servers are gone.
    pub(super) fn abandon_cut(&mut self) {
        if let Some(cut) = self.cut.take() {
            self.effects.push(Effect::Delete(cut.folder));
        }
    }

    /// A checkpoint that holds exactly what is done now.
    pub(super) fn exact_checkpoint(&self) -> Option<&CheckpointRef> {
        let position = self.ledger.n_done();
        let is_exact = |c: &&CheckpointRef| c.exact == Some(position) && !c.is_bad;
        self.durable.checkpoints.last().filter(is_exact)
    }

    /// The newest checkpoint that can be loaded.
    pub(super) fn latest_checkpoint(&self) -> Option<&CheckpointRef> {
        self.durable.checkpoints.iter().rev().find(|checkpoint| !checkpoint.is_bad)
    }
}

/// Removes the checkpoints beyond the number to keep, but never the best; returns their folders.
fn drop_old(facts: &mut Durable, keep: usize) -> Vec<String> {
    if keep == 0 {
        return Vec::new();
    }
    // A bad checkpoint is no fallback, so it does not count as kept.
    let good = facts.checkpoints.iter().filter(|checkpoint| !checkpoint.is_bad);
    let mut n_too_many = good.count().saturating_sub(keep);
    let is_old = |c: &mut CheckpointRef| {
        let is_old = n_too_many > 0 && !c.is_bad;
        n_too_many -= usize::from(is_old);
        is_old && facts.best.as_ref() != Some(&c.folder)
    };
    let old = facts.checkpoints.extract_if(.., is_old);
    old.map(|checkpoint| checkpoint.folder).collect()
}
