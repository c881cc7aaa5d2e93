// SPDX-License-Identifier: Apache-2.0
//! A model that counts: after training, every row holds the number of epochs and every dense
//! number the records trained, if and only if each batch was applied exactly once everywhere.
//!
//! Where workers hold the dense parameters, a digest takes their place (see `history`).

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use edl_core::audit;
use edl_core::batch::{BatchPlan, batch_of};
use edl_core::id::{BatchId, PartitionId};
use edl_core::lanes;
use edl_core::layout::Layout;
use edl_core::metric::Metric;
use edl_core::model::{Init, ModelSpec, ParamSpec, Rule, TableSpec};
use edl_core::optimizer::OptimizerSpec;
use edl_core::servers::PartitionState;
use edl_core::spec::{JobSpec, Mode};
use edl_tensor::checkpoint::Snapshot;
use edl_tensor::partition::{Partition, PartitionConfig};
use edl_tensor::push::{self, Body, Head, Lane, Push};

use crate::disk::Disk;
use crate::history::History;
use crate::scenario::Scenario;

/// Not a multiple of the numbers of partitions, so segments differ.
const DENSE_LEN: usize = 11;
/// Row length of the only table.
pub(crate) const DIMS: [usize; 1] = [1];

pub(crate) type Parts = BTreeMap<u32, Partition>;

/// The model of one job, and what training it must yield.
pub(crate) struct Model {
    spec: JobSpec,
    pub(crate) plan: BatchPlan,
    pub(crate) model: Arc<ModelSpec>,
    pub(crate) layout: Layout,
    pub(crate) history: History,
    /// Training this batch gives a loss that is not finite.
    nonfinite: Option<BatchId>,
    skipped: Option<BatchId>,
}

impl Model {
    pub(crate) fn new(scenario: &Scenario) -> Self {
        let spec = scenario.spec.clone();
        let init = Init::Constant(0.0);
        let rule = Rule::Trainable { decay: false };
        let dense = ParamSpec::new("dense", vec![DENSE_LEN], init, rule);
        let rows = TableSpec { name: "rows".into(), dim: DIMS[0], init };
        let model = ModelSpec {
            name: "counter".into(),
            params: vec![dense],
            tables: if spec.n_servers() > 0 { vec![rows] } else { Vec::new() },
            inputs: Vec::new(),
            metrics: vec![Metric::loss()],
            optimizer: OptimizerSpec::sgd(1.0),
        };
        let (layout, plan) = (spec.layout(DENSE_LEN), spec.plan(scenario.n_records));
        let batch = |position| batch_of(position, plan.n_batches());
        let (nonfinite, skipped) = (scenario.nonfinite.map(batch), scenario.skipped().map(batch));
        let history = History::new(&spec, &plan, scenario.skipped());
        Self { spec, plan, model: Arc::new(model), layout, history, nonfinite, skipped }
    }

    pub(crate) fn is_finite(&self, batch: BatchId) -> bool {
        self.nonfinite != Some(batch)
    }

    /// Records that are trained once less than the others.
    fn skipped_records(&self) -> Vec<u64> {
        self.skipped.map_or_else(Vec::new, |batch| self.plan.records(batch))
    }

    /// The batches of a round, by their index.
    fn round(&self, batch: BatchId) -> Range<u32> {
        let Mode::Sync { grads_to_wait } = self.spec.mode() else {
            return batch.index..batch.index + 1;
        };
        let first = batch.index / grads_to_wait * grads_to_wait;
        first..self.plan.n_batches().min(first + grads_to_wait)
    }

    /// Records of all rounds before that of `batch`, in synchronous mode.
    pub(crate) fn records_before_round(&self, batch: BatchId) -> Option<u64> {
        let Mode::Sync { .. } = self.spec.mode() else { return None };
        let n_batches = u64::from(self.plan.n_batches());
        let first = u64::from(batch.epoch) * n_batches + u64::from(self.round(batch).start);
        Some(self.records_before(first))
    }

    /// Whether some records of a batch were in the batch that was skipped before.
    pub(crate) fn lost_records(&self, batch: BatchId) -> bool {
        let skipped = self.skipped_records();
        self.skipped.is_some_and(|it| it < batch)
            && self.plan.records(batch).iter().any(|record| skipped.contains(record))
    }

    /// Whether workers hold a partition; servers hold the others.
    pub(crate) fn is_state(&self, partition: u32) -> bool {
        self.spec.step_lanes().is_some() && self.layout.with_segments().contains(&partition)
    }

    /// The gradient of a batch, for one server. A round applies the mean, weighted by records, so
    /// gradients are scaled to add exactly one per record.
    pub(crate) fn push(&self, batch: BatchId, base_version: u64, hosted: Range<u32>) -> Push {
        let in_round = self
            .round(batch)
            .filter(|index| self.skipped != Some(BatchId { index: *index, ..batch }));
        let n_records = |index| self.plan.n_records_of(index) as usize;
        let n_in_round: usize = in_round.map(n_records).sum();
        let records = self.plan.records(batch);
        let head = self.head(batch, records.len(), base_version, hosted, None);
        self.scaled(head, &records, n_in_round)
    }

    /// The row gradients of one lane of a step, for one server.
    pub(crate) fn lane_push(&self, batch: BatchId, lane: Lane, hosted: Range<u32>) -> Push {
        let records = self.lane_records(batch, lane.number);
        let n_in_step = self.plan.n_records_of(batch.index) as usize;
        let head = self.head(batch, records.len(), 0, hosted, Some(lane));
        self.scaled(head, &records, n_in_step)
    }

    /// A push without a gradient, for one server.
    pub(crate) fn skip(&self, batch: BatchId, lane: Option<Lane>, hosted: Range<u32>) -> Push {
        let head = self.head(batch, 0, 0, hosted, lane);
        self.scaled(head, &[], 0)
    }

    pub(crate) fn lane_records(&self, batch: BatchId, lane: u32) -> Vec<u64> {
        let records = self.plan.records(batch);
        let shares = lanes::share_out(records.len(), self.spec.n_lanes(), self.spec.minibatch_size);
        shares.get(lane as usize).map_or_else(Vec::new, |share| records[share.clone()].to_vec())
    }

    fn head(
        &self,
        batch: BatchId,
        n_records: usize,
        base_version: u64,
        partitions: Range<u32>,
        lane: Option<Lane>,
    ) -> Head {
        let n_records = u32::try_from(n_records).expect("a batch is small");
        Head { batch, n_records, base_version, partitions, layout: self.layout, lane }
    }

    /// A gradient that adds one per record when it is weighted among `n_in_all` records.
    #[expect(clippy::cast_precision_loss, reason = "counts stay small")]
    fn scaled(&self, head: Head, records: &[u64], n_in_all: usize) -> Push {
        let row = -(n_in_all as f32 / records.len().max(1) as f32);
        let span = push::span(&self.layout, &head.partitions);
        let mut body = Body { dense: vec![-(n_in_all as f32); span.len()], ..Body::default() };
        for partition in head.partitions.clone() {
            let ids = self.ids_in(partition, records);
            body.counts.push(u32::try_from(ids.len()).expect("a batch is small"));
            body.grads.extend(ids.iter().map(|_| row));
            body.ids.extend(ids);
        }
        Push::new(head, &DIMS, body).expect("lengths fit")
    }

    /// Those of `ids` whose rows a partition holds.
    pub(crate) fn ids_in(&self, partition: u32, ids: &[u64]) -> Vec<u64> {
        let is_here = |id: &u64| self.layout.partition_of(*id).0 == partition;
        ids.iter().copied().filter(is_here).collect()
    }

    /// Records of the batches before `position`.
    pub(crate) fn records_before(&self, position: u64) -> u64 {
        let n_batches = u64::from(self.plan.n_batches());
        let in_epoch = position % n_batches * u64::from(self.plan.minibatch_size);
        let all = position / n_batches * self.plan.n_records + in_epoch.min(self.plan.n_records);
        let end = batch_of(position, self.plan.n_batches());
        let is_before = self.skipped.is_some_and(|skipped| skipped < end);
        all - if is_before { self.skipped_records().len() as u64 } else { 0 }
    }

    fn config(&self, id: u32) -> PartitionConfig {
        PartitionConfig {
            id: PartitionId(id),
            layout: self.layout,
            model: Arc::clone(&self.model),
            optimizer: self.model.optimizer.clone(),
            seed: self.spec.seed,
            n_batches: self.plan.n_batches(),
            mode: self.spec.mode(),
            lr_staleness_modulation: false,
        }
    }

    /// A partition of servers from a complete checkpoint.
    pub(crate) fn restore(&self, snapshot: Snapshot) -> Partition {
        let config = self.config(snapshot.header.partition.0);
        Partition::from_snapshot(config, snapshot, true).expect("a complete checkpoint fits")
    }

    /// Panics unless the servers' partitions of a checkpoint hold exactly `n_epochs` of training.
    pub(crate) fn expect_trained(&self, disk: &Disk, folder: &str, n_epochs: u32) {
        let load = |id: u32| {
            let snapshot = disk.read(folder, id).expect("the exported checkpoint is complete");
            (id, self.restore(snapshot))
        };
        let parts: Parts = self.layout.with_rows().map(load).collect();
        let states: Vec<PartitionState> = parts.values().map(Partition::state).collect();
        let audit = audit::audit(&self.plan, &states, n_epochs);
        assert!(audit.is_clean, "{audit:?}");
        assert_eq!(audit.epochs.len(), n_epochs as usize, "nothing was trained beyond");
        let skipped = self.skipped_records();
        let mut n_rows = 0;
        for part in parts.values() {
            part.check_invariants();
            for dense in part.dense() {
                let n_all = self.plan.n_records * u64::from(n_epochs);
                expect_count("dense number", *dense, n_all - skipped.len() as u64);
            }
            for (id, row) in part.tables()[0].slab().rows() {
                let is_skipped = skipped.contains(&id);
                expect_count("row", row[0], u64::from(n_epochs) - u64::from(is_skipped));
                n_rows += u64::from(!is_skipped);
            }
        }
        let n_trained = self.plan.n_records - skipped.len() as u64;
        assert_eq!(n_rows, n_trained, "every record has its row");
    }
}

fn expect_count(what: &str, value: f32, expected: u64) {
    #[expect(clippy::cast_precision_loss, reason = "counts stay small")]
    let error = (f64::from(value) - expected as f64).abs();
    assert!(error < 0.01, "a {what} is {value}, but {expected} records were trained into it");
}
