// SPDX-License-Identifier: Apache-2.0
//! The items on their way through the worker: read, pulled, computed.

use std::collections::BTreeMap;

use super::{Computed, Effect, Fault, Report, Wants, WorkItem, Worker};
use crate::id::{BatchId, LeaseId};
use crate::spec::Mode;

/// Items that are read in addition to the one that is pulled and the one that is computed.
const READ_AHEAD: usize = 2;
/// Gradients sent and not yet acknowledged, where nothing else bounds them.
pub(super) const MAX_UNANSWERED: usize = 4;

/// How far the next items are. An item is in at most one of the three stages.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Pipeline {
    /// Items that are read; true once their records are here.
    reading: BTreeMap<WorkItem, bool>,
    pub(super) pull: Option<Pull>,
    computing: Option<Computing>,
    /// Pulls since the dense parameters were pulled; none before that.
    dense_age: Option<u32>,
    pub(super) has_computed: bool,
}

/// The item whose parameters are pulled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Pull {
    item: WorkItem,
    has_dense: bool,
    is_here: bool,
}

/// The item that the model works on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Computing {
    item: WorkItem,
    /// The result is useless: the parameters or the shard are gone.
    is_void: bool,
}

impl Pipeline {
    pub(super) fn computing_item(&self) -> Option<WorkItem> {
        self.computing.map(|computing| computing.item)
    }

    /// The item in progress, if its result will be used.
    pub(super) fn current(&self) -> Option<WorkItem> {
        self.computing.filter(|computing| !computing.is_void).map(|computing| computing.item)
    }

    /// The shard of a lease is gone, and what is added to it now.
    pub(super) fn void_pieces(&mut self, lease: LeaseId) {
        if let Some(computing) = &mut self.computing {
            let WorkItem::Piece { lease: of, .. } = computing.item else { return };
            computing.is_void |= of == lease;
        }
    }

    /// Batches computed with the parameters of a lost connection are computed again. Pieces are
    /// not: they are in their shard already.
    fn void_batch(&mut self) {
        if let Some(computing) = &mut self.computing {
            computing.is_void |= matches!(computing.item, WorkItem::Batch(_));
        }
    }

    /// Whether the next pull must bring the dense parameters. Only what will be pushed may use
    /// those of the batches before.
    fn takes_dense(&mut self, will_push: bool, dense_steps: u32) -> bool {
        let is_due = !will_push || self.dense_age.is_none_or(|age| age >= dense_steps);
        self.dense_age = Some(if is_due { 1 } else { self.dense_age.unwrap_or(0) + 1 });
        is_due
    }

    pub(super) fn check_invariants(&self) {
        let stages = [self.pull.map(|pull| pull.item), self.current()];
        for item in stages.into_iter().flatten() {
            assert!(!self.reading.contains_key(&item), "{item:?} is read and used");
        }
        assert!(stages[0].is_none() || stages[0] != stages[1], "an item is pulled and computed");
    }
}

impl Worker {
    /// Moves items on. A pull comes before the computation that it can overlap with.
    pub(super) fn advance_items(&mut self) {
        let ready = match self.pipeline.computing {
            None => self.pipeline.pull.take_if(|pull| pull.is_here),
            Some(_) => None,
        };
        let compute = ready.filter(|pull| self.work.is_open(pull.item));
        if let Some(Pull { item, .. }) = compute {
            self.pipeline.computing = Some(Computing { item, is_void: false });
        } else if let Some(pull) = ready {
            self.forget_pull(pull);
        }
        self.forget_closed();
        self.push_skipped();
        self.pull_ahead();
        self.effects.extend(compute.map(|pull| Effect::Compute(pull.item)));
        self.read_ahead();
    }

    /// What was pulled for an item is not used, so the next pull must bring dense parameters.
    fn forget_pull(&mut self, pull: Pull) {
        if pull.has_dense {
            self.pipeline.dense_age = None;
        }
        self.effects.push(Effect::Forget(pull.item));
    }

    /// Forgets the records of items that are no longer assigned.
    fn forget_closed(&mut self) {
        let (work, effects) = (&self.work, &mut self.effects);
        self.pipeline.reading.retain(|item, _| {
            let is_open = work.is_open(*item);
            if !is_open {
                effects.push(Effect::Forget(*item));
            }
            is_open
        });
    }

    fn read_ahead(&mut self) {
        let pulling = self.pipeline.pull.map(|pull| pull.item);
        let is_read =
            |item: &WorkItem| Some(*item) != pulling && Some(*item) != self.pipeline.current();
        let next: Vec<WorkItem> = self.work.upcoming().filter(is_read).take(READ_AHEAD).collect();
        for item in next {
            if self.pipeline.reading.contains_key(&item) {
                continue;
            }
            let records = self.work.records(item, self.config.minibatch_size);
            let records = records.expect("an upcoming item is held");
            self.pipeline.reading.insert(item, false);
            self.effects.push(Effect::Read { item, records });
        }
    }

    /// Pulls the parameters of the next item, if its records are here and nothing is in its way.
    fn pull_ahead(&mut self) {
        if self.pipeline.pull.is_some() || !self.connection.is_up() {
            return;
        }
        let current = self.pipeline.current();
        let next = self.work.upcoming().find(|item| Some(*item) != current);
        let Some(item) = next.filter(|item| self.may_pull(current, *item)) else { return };
        if self.pipeline.reading.get(&item) != Some(&true) {
            return;
        }
        self.pipeline.reading.remove(&item);
        let (will_push, min_round) = match item {
            WorkItem::Batch(batch) => (true, self.round(batch)),
            WorkItem::Piece { .. } => (false, None),
        };
        let dense = self.pipeline.takes_dense(will_push, self.config.dense_steps);
        self.pipeline.pull = Some(Pull { item, has_dense: dense, is_here: false });
        let wants = Wants { dense, will_push, min_round };
        self.effects.push(Effect::Pull { connection: self.connection.number(), item, wants });
    }

    /// Whether the parameters of `next` may be pulled while `current` is computed.
    fn may_pull(&self, current: Option<WorkItem>, next: WorkItem) -> bool {
        let WorkItem::Batch(next) = next else { return true };
        let current = match current {
            Some(WorkItem::Batch(current)) => Some(current),
            Some(WorkItem::Piece { .. }) | None => None,
        };
        match self.config.mode {
            Mode::Async => self.work.n_pushed() < MAX_UNANSWERED,
            // The servers may hold the pull back until the current batch has arrived.
            Mode::Bounded { .. } | Mode::Steps { .. } => {
                current.is_none() && self.work.n_pushed() < MAX_UNANSWERED
            }
            // All batches of a round start from the parameters after the round before.
            Mode::Sync { .. } => current.is_none_or(|it| self.round(it) == self.round(next)),
        }
    }

    /// The rounds that must have been applied before `batch` starts.
    fn round(&self, batch: BatchId) -> Option<u64> {
        match self.config.mode {
            Mode::Async | Mode::Bounded { .. } | Mode::Steps { .. } => None,
            Mode::Sync { grads_to_wait } => {
                let per_epoch = self.config.n_batches.div_ceil(grads_to_wait);
                let before = u64::from(batch.epoch) * u64::from(per_epoch);
                Some(before + u64::from(batch.index / grads_to_wait))
            }
        }
    }

    pub(super) fn decoded(&mut self, item: WorkItem) {
        let pulling = self.pipeline.pull.map(|pull| pull.item);
        match self.pipeline.reading.get_mut(&item) {
            Some(is_here) => *is_here = true,
            // The records of an item are always the same, so these are no different.
            None if pulling == Some(item) => {}
            None => self.effects.push(Effect::Forget(item)),
        }
    }

    pub(super) fn not_decoded(&mut self, item: WorkItem, error: String) {
        if self.pipeline.reading.contains_key(&item) {
            self.fail(item, Fault::Failed(error));
        }
    }

    pub(super) fn pulled(&mut self, connection: u64, item: WorkItem) {
        if connection != self.connection.number() {
            return;
        }
        self.connection.works();
        if let Some(pull) = self.pipeline.pull.as_mut().filter(|pull| pull.item == item) {
            pull.is_here = true;
        }
    }

    pub(super) fn not_pulled(&mut self, connection: u64, item: WorkItem, error: String) {
        if connection != self.connection.number() {
            return;
        }
        let pull = self.pipeline.pull.take_if(|pull| pull.item == item && !pull.is_here);
        let Some(pull) = pull else { return };
        self.forget_pull(pull);
        self.fail(item, Fault::Failed(error));
    }

    /// Nothing that was in progress on the connection will be answered.
    pub(super) fn disconnected(&mut self) {
        self.work.reopen();
        self.pipeline.dense_age = None;
        self.pipeline.void_batch();
        if let Some(pull) = self.pipeline.pull.take() {
            self.pipeline.reading.insert(pull.item, true);
        }
    }

    /// Pushes the batches that have no gradient.
    fn push_skipped(&mut self) {
        if !self.connection.is_up() {
            return;
        }
        let connection = self.connection.number();
        for batch in self.work.push_skipped() {
            self.effects.push(Effect::Skip { connection, batch });
            self.report_pushed(batch);
        }
    }

    pub(super) fn computed(&mut self, item: WorkItem, result: Result<Computed, Fault>) {
        let computing = self.pipeline.computing.take_if(|computing| computing.item == item);
        let Some(computing) = computing else { return };
        self.pipeline.has_computed = true;
        self.n_computed += 1;
        if computing.is_void {
            return;
        }
        match (item, result) {
            (WorkItem::Batch(batch), Ok(Computed::Batch { loss })) => self.push(batch, loss),
            (WorkItem::Piece { lease, .. }, Ok(Computed::Piece)) => {
                if self.work.piece_done(lease) {
                    self.effects.push(Effect::Finish(lease));
                }
            }
            (_, Err(fault)) => self.fail(item, fault),
            (WorkItem::Batch(_), Ok(Computed::Piece))
            | (WorkItem::Piece { .. }, Ok(Computed::Batch { .. })) => {
                unreachable!("the result fits the item")
            }
        }
    }

    fn push(&mut self, batch: BatchId, loss: f32) {
        let connection = self.connection.number();
        if !self.is_stopped() && self.connection.is_up() && self.work.pushed(batch, loss) {
            self.effects.push(Effect::Push { connection, batch });
            self.report_pushed(batch);
        }
    }

    /// The acknowledgement comes with the last batch of the round. If this worker crashes until
    /// then, the master must know that this batch was not why; and it may assign a batch that must
    /// be computed alone only after it knows.
    fn report_pushed(&mut self, batch: BatchId) {
        if matches!(self.config.mode, Mode::Sync { grads_to_wait } if grads_to_wait > 1) {
            self.effects.push(Effect::Report(Report::BatchPushed { batch }));
        }
    }
}
