// SPDX-License-Identifier: Apache-2.0
//! One partition of a model's parameters: applies each batch exactly once.
//!
//! A partition is owned by one thread and does no I/O except reading a checkpoint. Weights, slots,
//! counts and the applied set change together inside `push`, so any snapshot between two pushes is
//! consistent, no matter what other partitions have applied.

mod dense;
mod placed;
mod report;
mod round;
mod steps;
#[cfg(test)]
mod tests;

use std::io::Read;
use std::sync::Arc;

use edl_core::applied::AppliedSet;
use edl_core::id::{BatchId, PartitionId, WorldId};
use edl_core::layout::Layout;
use edl_core::model::ModelSpec;
use edl_core::optimizer::OptimizerSpec;
use edl_core::server::Outcome;
use edl_core::spec::Mode;

use crate::checkpoint::codec::{self, Header, Snapshot};
use crate::optimizer::{Optimizer, Step, Update};
use crate::push::Push;
use crate::table::Table;
use crate::unique::Unique;

pub use dense::Dense;
pub use placed::Placed;
use round::Rounds;
use steps::Steps;

/// Everything that decides what a partition holds before its first push.
#[derive(Clone, Debug)]
pub struct PartitionConfig {
    pub id: PartitionId,
    pub layout: Layout,
    pub model: Arc<ModelSpec>,
    pub optimizer: OptimizerSpec,
    pub seed: u64,
    /// Batches per epoch.
    pub n_batches: u32,
    pub mode: Mode,
    pub lr_staleness_modulation: bool,
}

/// A partition's parameters, their optimizer state and the set of applied batches.
#[derive(Clone, Debug)]
pub struct Partition {
    config: PartitionConfig,
    optimizer: Optimizer,
    runs: Vec<dense::RuleRange>,
    dense: Dense,
    tables: Vec<Table>,
    applied: AppliedSet,
    /// Optimizer steps of this job.
    version: u64,
    /// Optimizer steps that the slots have seen; more than `version` if they came from another
    /// job's checkpoint.
    age: u64,
    /// Batches applied.
    updates: u64,
    /// The state of the training script, as it was read; empty in most partitions.
    state: Vec<u8>,
    /// Synchronous mode alone.
    rounds: Option<Rounds>,
    /// Where batches come in lanes.
    steps: Option<Steps>,
    mean: MeanBuffers,
}

/// Memory for the mean of a round's gradients.
#[derive(Clone, Debug, Default)]
struct MeanBuffers {
    dense: Vec<f32>,
    ids: Vec<u64>,
    unique: Unique,
    rows: Vec<f32>,
}

/// Why a push is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("batch {batch} does not exist: an epoch has {n_batches} batches")]
    Plan { batch: BatchId, n_batches: u32 },
    #[error("the push of batch {batch} is for another model or another partition layout")]
    Shape { batch: BatchId },
    #[error("batch {batch} belongs to round {round}, but round {next} is not complete yet")]
    TooEarly { batch: BatchId, round: u64, next: u64 },
    #[error("batch {batch} is out of order: {next} is next")]
    NotNext { batch: BatchId, next: BatchId },
    #[error("world {theirs} is outdated: world {ours} trains batch {batch}")]
    OldWorld { batch: BatchId, theirs: WorldId, ours: WorldId },
}

impl Partition {
    /// A partition before its first push. Its values are a function of the config, and zero where the
    /// model provides them.
    ///
    /// # Panics
    /// If the layout has no such partition or is for another model, or an epoch has no batches.
    #[must_use]
    pub fn new(config: PartitionConfig) -> Self {
        let PartitionConfig { id, layout, model, optimizer, seed, n_batches, mode, .. } = &config;
        assert!(id.0 < layout.n_partitions, "partition {id} of {}", layout.n_partitions);
        assert_eq!(layout.dense_len, model.dense_len(), "a layout of another model");
        let optimizer = Optimizer::new(optimizer.clone());
        let segment = layout.segment(*id);
        let applied = AppliedSet::new(*n_batches);
        Self {
            runs: dense::runs(model, &segment),
            dense: Dense::new(model, &segment, *seed, &optimizer),
            tables: model.tables.iter().map(|t| Table::new(t, *seed, &optimizer)).collect(),
            version: 0,
            age: 0,
            updates: 0,
            rounds: rounds(*mode, &applied),
            steps: steps(*mode),
            mean: MeanBuffers::default(),
            applied,
            state: Vec::new(),
            optimizer,
            config,
        }
    }

    /// A partition before its first push, of a model that provides `values`, the flat vector of all
    /// dense parameters, and the rows of some tables.
    ///
    /// # Panics
    /// As `new`, and if `values` are for another model.
    #[must_use]
    pub fn with_first_values(config: PartitionConfig, values: &[f32], rows: &[Vec<f32>]) -> Self {
        assert_eq!(values.len(), config.layout.dense_len, "initial values of another model");
        let mut partition = Self::new(config);
        let PartitionConfig { id, layout, model, .. } = &partition.config;
        partition.dense.give(model, &layout.segment(*id), values);
        for (table, rows) in partition.tables.iter_mut().zip(rows) {
            table.give(rows, |row| layout.partition_of(row) == *id);
        }
        partition
    }

    #[must_use]
    pub fn id(&self) -> PartitionId {
        self.config.id
    }

    /// Optimizer steps.
    #[must_use]
    pub fn version(&self) -> u64 {
        self.version
    }

    /// Batches applied.
    #[must_use]
    pub fn updates(&self) -> u64 {
        self.updates
    }

    #[must_use]
    pub fn applied(&self) -> &AppliedSet {
        &self.applied
    }

    /// Rows created so far, over all tables.
    #[must_use]
    pub fn n_rows(&self) -> u64 {
        self.tables.iter().map(|table| table.n_rows() as u64).sum()
    }

    /// The partition's segment of the dense vector.
    #[must_use]
    pub fn dense(&self) -> &[f32] {
        &self.dense.weights
    }

    #[must_use]
    pub fn tables(&self) -> &[Table] {
        &self.tables
    }

    /// Synchronous mode: rounds applied so far, over all epochs; otherwise zero.
    #[must_use]
    pub fn round(&self) -> u64 {
        self.rounds.as_ref().map_or(0, Rounds::next)
    }

    /// Pushes that wait for their round.
    #[must_use]
    pub fn n_staged(&self) -> usize {
        let steps = self.steps.as_ref().map_or(0, Steps::n_staged);
        self.rounds.as_ref().map_or(steps, Rounds::n_staged)
    }

    /// Writes the rows of `ids` to `out`; missing ones are created.
    ///
    /// # Panics
    /// If there is no such table, or `out` does not hold one row per id.
    pub fn gather(&mut self, table: usize, ids: &[u64], out: &mut [f32]) {
        self.tables[table].gather(ids, out);
    }

    /// Like `gather`, for readers that must leave no trace: missing rows are not kept.
    ///
    /// # Panics
    /// If there is no such table, or `out` does not hold one row per id.
    pub fn peek(&self, table: usize, ids: &[u64], out: &mut [f32]) {
        self.tables[table].peek(ids, out);
    }

    /// Takes this partition's part of a batch, once.
    pub fn push(&mut self, push: &Arc<Push>) -> Outcome {
        self.try_push(push).unwrap_or_else(|refusal| Outcome::Refused(refusal.to_string()))
    }

    /// Like `push`, with the reason of a refusal. A refused push changes nothing.
    fn try_push(&mut self, push: &Arc<Push>) -> Result<Outcome, Refusal> {
        self.check(push)?;
        let batch = push.head.batch;
        if self.applied.contains(batch) {
            return Ok(Outcome::Already);
        }
        if self.steps.is_some() {
            return self.push_lane(push);
        }
        let Some(rounds) = &mut self.rounds else {
            self.apply_one(push);
            return Ok(Outcome::Applied);
        };
        let (round, next) = (rounds.round_of(batch), rounds.next());
        if round >= next + Rounds::OPEN {
            return Err(Refusal::TooEarly { batch, round, next });
        }
        rounds.stage(push);
        let done = self.apply_complete_rounds();
        Ok(if done.is_empty() { Outcome::Staged } else { Outcome::Round(done) })
    }

    /// One copy of the state. Staged pushes are not part of it: their workers push again.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        let mut snapshot = Snapshot::default();
        self.snapshot_into(&mut snapshot);
        snapshot
    }

    /// Like `snapshot`, into the memory of an earlier one.
    pub fn snapshot_into(&self, snapshot: &mut Snapshot) {
        self.snapshot_with(&self.dense.weights, snapshot);
    }

    fn snapshot_with(&self, weights: &[f32], snapshot: &mut Snapshot) {
        snapshot.header = self.header();
        snapshot.dense.copy_from(&self.dense, weights);
        snapshot.tables.resize_with(self.tables.len(), Default::default);
        for (copy, table) in snapshot.tables.iter_mut().zip(&self.tables) {
            copy.copy_from(table.slab());
        }
        snapshot.applied = self.applied.to_bytes(None);
        snapshot.state.clone_from(&self.state);
    }

    /// Reads a partition's file. With `keep_applied`, the job that wrote it continues. Otherwise a
    /// new job starts from its parameters and optimizer state.
    pub fn restore(
        config: PartitionConfig,
        reader: &mut impl Read,
        keep_applied: bool,
    ) -> Result<Self, codec::Error> {
        let (snapshot, _) = codec::decode(reader)?;
        Self::from_snapshot(config, snapshot, keep_applied)
    }

    /// Continues from a snapshot; see `restore`.
    pub fn from_snapshot(
        config: PartitionConfig,
        snapshot: Snapshot,
        keep_applied: bool,
    ) -> Result<Self, codec::Error> {
        let mut partition = Self::new(config);
        let Snapshot { header, dense, tables, applied, state } = snapshot;
        let ours = partition.header();
        header.expect_fits(&ours, keep_applied)?;
        let keep_slots = header.slots == ours.slots;
        partition.dense = dense;
        if partition.config.optimizer.is_script() {
            partition.state = state;
        }
        if !keep_slots {
            partition.dense.reset_slots(&partition.optimizer);
        }
        for (table, slab) in partition.tables.iter_mut().zip(tables) {
            table.load(slab, keep_slots).map_err(|id| codec::Error::Duplicate { id })?;
        }
        partition.age = if keep_slots { header.age } else { 0 };
        if keep_applied {
            let applied = AppliedSet::from_bytes(&applied, None).ok_or(codec::Error::Applied)?;
            if applied.len() != header.updates || applied.n_batches() != header.n_batches {
                return Err(codec::Error::Applied);
            }
            if partition.steps.is_some() && !steps::is_prefix(&applied) {
                return Err(codec::Error::Applied);
            }
            partition.rounds = rounds(partition.config.mode, &applied);
            partition.applied = applied;
            partition.version = header.version;
            partition.updates = header.updates;
        }
        Ok(partition)
    }

    /// Panics where the state contradicts itself.
    pub fn check_invariants(&self) {
        assert_eq!(self.updates, self.applied.len(), "every update has its bit");
        assert!(self.version <= self.updates, "a step applies at least one batch");
        assert!(self.version <= self.age, "slots are at least as old as the job");
        let segment = self.config.layout.segment(self.config.id);
        assert_eq!(self.dense.weights.len(), segment.len(), "the segment is whole");
        for table in &self.tables {
            table.check_invariants();
            let owner = |id: &u64| self.config.layout.partition_of(*id);
            let own = self.config.id;
            assert!(
                table.slab().ids().iter().all(|id| owner(id) == own),
                "rows live where they hash"
            );
        }
        if let Some(steps) = &self.steps {
            steps.check_invariants(&self.applied);
        }
        match &self.rounds {
            Some(rounds) => rounds.check_invariants(&self.applied),
            None => assert_eq!(self.version, self.updates, "each batch is a step"),
        }
    }

    fn check(&self, push: &Push) -> Result<(), Refusal> {
        let batch = push.head.batch;
        let n_batches = self.config.n_batches;
        if batch.index >= n_batches {
            return Err(Refusal::Plan { batch, n_batches });
        }
        let dims = self.tables.iter().map(Table::dim);
        let fits = push.head.layout == self.config.layout
            && push.head.partitions.contains(&self.config.id.0)
            && push.head.lane.is_some() == self.steps.is_some()
            && push.dims().iter().copied().eq(dims);
        if fits { Ok(()) } else { Err(Refusal::Shape { batch }) }
    }

    fn apply_one(&mut self, push: &Push) {
        let modulated = self.config.lr_staleness_modulation;
        let lag = self.version.saturating_sub(push.head.base_version);
        let update = self.begin_step(if modulated { lag.max(1) } else { 1 });
        if push.head.n_records > 0 {
            self.apply_part(&update, push);
        }
        self.finish_step([push.head.batch]);
    }

    fn apply_complete_rounds(&mut self) -> Vec<BatchId> {
        let mut done = Vec::new();
        loop {
            let Some(rounds) = &mut self.rounds else { return done };
            let Some(pushes) = rounds.take_complete(&self.applied) else { return done };
            let batches: Vec<BatchId> = pushes.iter().map(|push| push.head.batch).collect();
            let update = self.begin_step(1);
            let trained: Vec<_> =
                pushes.into_iter().filter(|push| push.head.n_records > 0).collect();
            match trained.as_slice() {
                [] => {}
                [push] => self.apply_part(&update, push),
                pushes => self.apply_mean(&update, pushes),
            }
            self.finish_step(batches.iter().copied());
            if let Some(rounds) = &mut self.rounds {
                rounds.skip_applied(&self.applied);
            }
            done.extend(batches);
        }
    }

    fn begin_step(&mut self, staleness: u64) -> Update {
        let step = Step { version: self.version, age: self.age + 1, staleness };
        self.optimizer.update(step)
    }

    fn finish_step(&mut self, batches: impl IntoIterator<Item = BatchId>) {
        self.version += 1;
        self.age += 1;
        for batch in batches {
            let is_new = self.applied.insert(batch);
            assert!(is_new, "batch {batch} is applied once");
            self.updates += 1;
        }
    }

    fn apply_part(&mut self, update: &Update, push: &Push) {
        let id = self.config.id;
        self.dense.apply(update, &self.runs, push.dense_of(id));
        for (index, table) in self.tables.iter_mut().enumerate() {
            let (ids, grads) = push.rows_of(id, index);
            debug_assert!(
                ids.iter().all(|row| self.config.layout.partition_of(*row) == id),
                "a row of another partition"
            );
            table.update(update, ids, grads);
        }
    }

    /// One step by the mean of several gradients, weighted by their records. They are added in the
    /// order of the pushes, so the result does not depend on the order of arrival.
    fn apply_mean(&mut self, update: &Update, pushes: &[Arc<Push>]) {
        let id = self.config.id;
        let weights = weights(pushes);
        let MeanBuffers { dense, ids, unique, rows } = &mut self.mean;
        dense.clear();
        dense.resize(self.dense.weights.len(), 0.0);
        for (push, weight) in pushes.iter().zip(&weights) {
            for (sum, number) in dense.iter_mut().zip(push.dense_of(id)) {
                *sum += weight * number;
            }
        }
        self.dense.apply(update, &self.runs, dense);
        for (index, table) in self.tables.iter_mut().enumerate() {
            ids.clear();
            pushes.iter().for_each(|push| ids.extend_from_slice(push.rows_of(id, index).0));
            unique.set(ids);
            unique.clear_sums(table.dim(), rows);
            let mut first = 0;
            for (push, weight) in pushes.iter().zip(&weights) {
                let (ids, grads) = push.rows_of(id, index);
                unique.add_scaled(table.dim(), first, grads, *weight, rows);
                first += ids.len();
            }
            if let Some(steps) = &mut self.steps {
                steps.remember(index, table, unique.ids());
            }
            table.update(update, unique.ids(), rows);
        }
    }

    fn header(&self) -> Header {
        let PartitionConfig { id, layout, model, n_batches, .. } = &self.config;
        Header {
            partition: *id,
            n_partitions: layout.n_partitions,
            is_apart: layout.is_apart,
            dense_len: layout.dense_len,
            model: model.name.clone(),
            params: codec::params_digest(model),
            slots: self.optimizer.slot_names().iter().map(|name| (*name).into()).collect(),
            tables: codec::table_headers(model, &self.tables),
            n_batches: *n_batches,
            version: self.version,
            age: self.age,
            updates: self.updates,
        }
    }
}

fn rounds(mode: Mode, applied: &AppliedSet) -> Option<Rounds> {
    let Mode::Sync { grads_to_wait } = mode else { return None };
    Some(Rounds::new(grads_to_wait, applied))
}

fn steps(mode: Mode) -> Option<Steps> {
    if let Mode::Steps { lanes } = mode { Some(Steps::new(lanes)) } else { None }
}

/// Each push's share of a round's records.
fn weights(pushes: &[Arc<Push>]) -> Vec<f32> {
    let total: u64 = pushes.iter().map(|push| u64::from(push.head.n_records)).sum();
    let share = |push: &Arc<Push>| f64::from(push.head.n_records) / total as f64;
    #[expect(clippy::cast_possible_truncation, reason = "gradients are single precision")]
    pushes.iter().map(|push| share(push) as f32).collect()
}
