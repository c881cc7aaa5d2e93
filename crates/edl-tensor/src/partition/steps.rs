// SPDX-License-Identifier: Apache-2.0
//! Steps that come in lanes: the lanes of the next batch, and what the last one changed.
//!
//! A batch is applied when all its lanes are here from one world. So every member of that world
//! has begun the step, and holds what the step before has left; whoever dies, nobody who goes on
//! is further behind than one step. For those the rows that the last step changed are kept as
//! they were before it.

use std::collections::BTreeMap;
use std::sync::Arc;

use edl_core::applied::AppliedSet;
use edl_core::id::{BatchId, WorldId};

use super::{Partition, Pushed, Refusal};
use crate::push::Push;
use crate::table::Table;
use crate::unique::Unique;

/// The lanes that wait for the others of their batch, and the way back.
#[derive(Clone, Debug)]
pub(super) struct Steps {
    n_lanes: u32,
    /// The last world that pushed; what lanes of worlds before it brought is dropped.
    world: WorldId,
    lanes: BTreeMap<u32, Arc<Push>>,
    /// The last step applied, counted from zero; none since the partition was made.
    last: Option<u64>,
    /// Per table, what the last step changed.
    former: Vec<Former>,
}

/// Rows as they were.
#[derive(Clone, Debug, Default)]
struct Former {
    ids: Vec<u64>,
    rows: Vec<f32>,
    dim: usize,
}

impl Steps {
    pub(super) fn new(n_lanes: u32) -> Self {
        let (lanes, former) = (BTreeMap::new(), Vec::new());
        Self { n_lanes: n_lanes.max(1), world: WorldId(0), lanes, last: None, former }
    }

    pub(super) fn n_staged(&self) -> usize {
        self.lanes.len()
    }

    /// Keeps a lane of the next batch; all of them, in order, once they are here.
    pub(super) fn stage(&mut self, push: &Arc<Push>) -> Result<Option<Vec<Arc<Push>>>, Refusal> {
        let batch = push.batch;
        let lane = push.lane.filter(|lane| lane.of == self.n_lanes && lane.number < lane.of);
        let lane = lane.ok_or(Refusal::Shape { batch })?;
        if lane.world < self.world {
            let (theirs, ours) = (lane.world, self.world);
            return Err(Refusal::OldWorld { batch, theirs, ours });
        }
        if lane.world > self.world {
            self.world = lane.world;
            self.lanes.clear();
        }
        // The same lane again has the same numbers: a step is a function of the state before it.
        self.lanes.entry(lane.number).or_insert_with(|| Arc::clone(push));
        let is_whole = self.lanes.len() == self.n_lanes as usize;
        Ok(is_whole.then(|| std::mem::take(&mut self.lanes).into_values().collect()))
    }

    /// The step after `step` steps is about to change rows.
    pub(super) fn begin(&mut self, step: u64) {
        self.last = Some(step);
        self.former.iter_mut().for_each(|former| former.ids.clear());
    }

    /// Keeps the rows of `ids` as they are, before they change.
    pub(super) fn remember(&mut self, index: usize, table: &Table, ids: &[u64]) {
        if self.former.len() <= index {
            self.former.resize_with(index + 1, Former::default);
        }
        let former = &mut self.former[index];
        former.dim = table.dim();
        former.ids.extend_from_slice(ids);
        former.rows.resize(ids.len() * former.dim, 0.0);
        table.peek(ids, &mut former.rows);
    }

    /// Whether the state after `step` steps is that before the last one.
    pub(super) fn undoes(&self, step: u64) -> bool {
        self.last == Some(step)
    }

    /// Puts back into `out` what the last step changed of the rows of `ids`.
    pub(super) fn undo(&self, index: usize, ids: &[u64], out: &mut [f32]) {
        let Some(former) = self.former.get(index).filter(|former| former.dim > 0) else { return };
        // Rarely done, so the way from an id to its row is made for each call.
        let mut unique = Unique::new();
        unique.set(&[former.ids.as_slice(), ids].concat());
        let places = &unique.inverse()[former.ids.len()..];
        for (place, out) in places.iter().zip(out.chunks_exact_mut(former.dim)) {
            let start = *place as usize * former.dim;
            if let Some(row) = former.rows.get(start..start + former.dim) {
                out.copy_from_slice(row);
            }
        }
    }

    pub(super) fn check_invariants(&self, applied: &AppliedSet) {
        assert!(is_prefix(applied), "steps are applied one after the other");
        assert!(self.lanes.len() < self.n_lanes as usize, "a whole step is applied");
        for (number, push) in &self.lanes {
            let lane = push.lane.expect("only lanes are staged");
            assert_eq!((lane.number, lane.world), (*number, self.world), "lanes are of one world");
            assert_eq!(push.batch, next(applied), "only the next batch is staged");
        }
    }
}

impl Partition {
    /// Whether the rows of `step` are here: as they are, or as they were before the last step.
    #[must_use]
    pub fn has_step(&self, step: u64) -> bool {
        step == self.updates || self.steps.as_ref().is_some_and(|steps| steps.undoes(step))
    }

    /// Like `peek`, for the rows as they were after `step` steps.
    ///
    /// # Panics
    /// As `peek`, and if the partition does not have that step.
    pub fn peek_at(&self, step: u64, table: usize, ids: &[u64], out: &mut [f32]) {
        assert!(self.has_step(step), "step {step} is asked of a partition at {}", self.updates);
        self.tables[table].peek(ids, out);
        if let Some(steps) = self.steps.as_ref().filter(|_| step < self.updates) {
            steps.undo(table, ids, out);
        }
    }

    /// Takes one lane of the next batch; the last one applies it.
    pub(super) fn push_lane(&mut self, push: &Arc<Push>) -> Pushed {
        let (batch, next) = (push.batch, next(&self.applied));
        if batch != next {
            return Pushed::Refused(Refusal::NotNext { batch, next });
        }
        let Some(steps) = &mut self.steps else { return Pushed::Staged };
        let lanes = match steps.stage(push) {
            Ok(Some(lanes)) => lanes,
            Ok(None) => return Pushed::Staged,
            Err(refusal) => return Pushed::Refused(refusal),
        };
        steps.begin(self.updates);
        let update = self.begin_step(1);
        self.apply_mean(&update, &lanes);
        self.finish_step([batch]);
        Pushed::Applied
    }
}

/// The batch after all that are applied, one after the other.
pub(super) fn next(applied: &AppliedSet) -> BatchId {
    let epoch = applied.epoch();
    BatchId { epoch, index: applied.n_in_epoch(epoch) }
}

/// Whether the applied batches are the first ones of the plan, without a gap.
pub(super) fn is_prefix(applied: &AppliedSet) -> bool {
    let next = next(applied);
    let closed = u64::from(next.epoch) * u64::from(applied.n_batches());
    let mut open = (0..next.index).map(|index| BatchId { index, ..next });
    applied.len() == closed + u64::from(next.index) && open.all(|batch| applied.contains(batch))
}
