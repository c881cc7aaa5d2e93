// SPDX-License-Identifier: Apache-2.0
//! Batches that are pushed lane by lane: the lanes of the next batch, and what the last one changed.
//!
//! A batch is applied when all its lanes have arrived from one world. Every member of that world has
//! then begun the step with the state after the step before. So no member that survives is more than
//! one step behind. For a member that is behind, the partition keeps the previous values of the rows
//! that the last step changed.

use std::collections::BTreeMap;
use std::sync::Arc;

use edl_core::applied::AppliedSet;
use edl_core::id::{BatchId, WorldId};
use edl_core::server::Outcome;

use super::{Partition, Refusal};
use crate::push::Push;
use crate::table::Table;
use crate::unique::Unique;

/// The lanes that wait for the others of their batch, and the rows before the last step.
#[derive(Clone, Debug)]
pub(super) struct Steps {
    n_lanes: u32,
    /// The last world that pushed; what lanes of worlds before it brought is dropped.
    world: WorldId,
    lanes: BTreeMap<u32, Arc<Push>>,
    /// The last step applied, counted from zero; none since the partition was made.
    last: Option<u64>,
    /// Per table, what the last step changed.
    previous: Vec<PreviousRows>,
}

/// Rows before the last step.
#[derive(Clone, Debug, Default)]
struct PreviousRows {
    ids: Vec<u64>,
    rows: Vec<f32>,
    dim: usize,
}

impl Steps {
    pub(super) fn new(n_lanes: u32) -> Self {
        let (lanes, previous) = (BTreeMap::new(), Vec::new());
        Self { n_lanes: n_lanes.max(1), world: WorldId(0), lanes, last: None, previous }
    }

    pub(super) fn n_staged(&self) -> usize {
        self.lanes.len()
    }

    /// Keeps a lane of the next batch; all of them, in order, once they are here.
    pub(super) fn stage(&mut self, push: &Arc<Push>) -> Result<Option<Vec<Arc<Push>>>, Refusal> {
        let batch = push.head.batch;
        let lane = push.head.lane.filter(|lane| lane.of == self.n_lanes && lane.number < lane.of);
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
        self.previous.iter_mut().for_each(|previous| previous.ids.clear());
    }

    /// Keeps the rows of `ids` as they are, before they change.
    pub(super) fn remember(&mut self, index: usize, table: &Table, ids: &[u64]) {
        if self.previous.len() <= index {
            self.previous.resize_with(index + 1, PreviousRows::default);
        }
        let previous = &mut self.previous[index];
        previous.dim = table.dim();
        previous.ids.extend_from_slice(ids);
        previous.rows.resize(ids.len() * previous.dim, 0.0);
        table.peek(ids, &mut previous.rows);
    }

    /// Whether the state after `step` steps is that before the last one.
    pub(super) fn undoes(&self, step: u64) -> bool {
        self.last == Some(step)
    }

    /// Puts back into `out` what the last step changed of the rows of `ids`.
    pub(super) fn undo(&self, index: usize, ids: &[u64], out: &mut [f32]) {
        let Some(previous) = self.previous.get(index).filter(|previous| previous.dim > 0) else {
            return;
        };
        // Rarely done, so the way from an id to its row is made for each call.
        let mut unique = Unique::new();
        unique.set(&[previous.ids.as_slice(), ids].concat());
        let places = &unique.inverse()[previous.ids.len()..];
        for (place, out) in places.iter().zip(out.chunks_exact_mut(previous.dim)) {
            let start = *place as usize * previous.dim;
            if let Some(row) = previous.rows.get(start..start + previous.dim) {
                out.copy_from_slice(row);
            }
        }
    }

    pub(super) fn check_invariants(&self, applied: &AppliedSet) {
        assert!(is_prefix(applied), "steps are applied one after the other");
        assert!(self.lanes.len() < self.n_lanes as usize, "a whole step is applied");
        for (number, push) in &self.lanes {
            let lane = push.head.lane.expect("only lanes are staged");
            assert_eq!((lane.number, lane.world), (*number, self.world), "lanes are of one world");
            assert_eq!(push.head.batch, next(applied), "only the next batch is staged");
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
    pub(super) fn push_lane(&mut self, push: &Arc<Push>) -> Result<Outcome, Refusal> {
        let (batch, next) = (push.head.batch, next(&self.applied));
        if batch != next {
            return Err(Refusal::NotNext { batch, next });
        }
        // In a step that is skipped, members do not wait for each other: none may pass it before
        // the servers have.
        let kept = if push.head.n_records > 0 { Outcome::Kept } else { Outcome::Staged };
        let Some(steps) = &mut self.steps else { return Ok(kept) };
        let Some(lanes) = steps.stage(push)? else { return Ok(kept) };
        steps.begin(self.updates);
        let update = self.begin_step(1);
        // A step that is skipped has no records in any lane.
        if lanes.iter().any(|lane| lane.head.n_records > 0) {
            self.apply_mean(&update, &lanes);
        }
        self.finish_step([batch]);
        Ok(Outcome::Round(vec![batch]))
    }
}

/// The batch after all that are applied, one after the other.
pub(super) fn next(applied: &AppliedSet) -> BatchId {
    let epoch = applied.epoch();
    BatchId { epoch, index: applied.n_in_epoch(epoch) }
}

/// Whether the applied batches are the first ones of the plan, without a gap.
pub(super) fn is_prefix(applied: &AppliedSet) -> bool {
    *applied == AppliedSet::of_first(applied.len(), applied.n_batches())
}
