// SPDX-License-Identifier: Apache-2.0
//! A model that counts: after training, every row holds the number of epochs and every dense
//! number the records trained, if and only if each batch was applied exactly once everywhere.
//!
//! Where workers hold the dense parameters, a digest takes their place (see `history`).

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use edl_core::audit;
use edl_core::batch::BatchPlan;
use edl_core::id::{BatchId, PartitionId};
use edl_core::lanes;
use edl_core::layout::Layout;
use edl_core::metric::Metric;
use edl_core::model::{Init, ModelSpec, ParamSpec, Rule, TableSpec};
use edl_core::optimizer::OptimizerSpec;
use edl_core::servers::PartitionState;
use edl_core::spec::{JobSpec, Mode};
use edl_tensor::checkpoint::codec;
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
}

impl Model {
    pub(crate) fn new(scenario: &Scenario) -> Self {
        let spec = scenario.spec.clone();
        let init = Init::Constant(0.0);
        let rule = Rule::Trainable { decay: false };
        let dense = ParamSpec { name: "dense".into(), shape: vec![DENSE_LEN], init, rule };
        let rows = TableSpec { name: "rows".into(), dim: DIMS[0], init };
        let model = ModelSpec {
            name: "counter".into(),
            params: vec![dense],
            tables: if spec.has_servers() { vec![rows] } else { Vec::new() },
            inputs: Vec::new(),
            metrics: vec![Metric::loss()],
            optimizer: OptimizerSpec::sgd(1.0),
        };
        let (layout, plan) = (spec.layout(DENSE_LEN), spec.plan(scenario.n_records));
        let history = History::new(&spec, &plan);
        Self { spec, plan, model: Arc::new(model), layout, history }
    }

    /// The batches of a round, by their index.
    fn round(&self, batch: BatchId) -> Range<u32> {
        let Mode::Sync { grads_to_wait } = self.spec.mode() else {
            return batch.index..batch.index + 1;
        };
        let first = batch.index / grads_to_wait * grads_to_wait;
        first..self.plan.n_batches().min(first + grads_to_wait)
    }

    /// The gradient of a batch, for one server. A round applies the mean, weighted by records, so
    /// gradients are scaled to add exactly one per record.
    pub(crate) fn push(&self, batch: BatchId, base_version: u64, hosted: Range<u32>) -> Push {
        let n_records = |index| self.plan.records(BatchId { index, ..batch }).len();
        let n_in_round: usize = self.round(batch).map(n_records).sum();
        let records = self.plan.records(batch);
        let head = self.head(batch, records.len(), base_version, hosted, None);
        self.scaled(head, &records, n_in_round)
    }

    /// The row gradients of one lane of a step, for one server.
    pub(crate) fn lane_push(&self, batch: BatchId, lane: Lane, hosted: Range<u32>) -> Push {
        let records = self.lane_records(batch, lane.number);
        let n_in_step = self.plan.records(batch).len();
        let head = self.head(batch, records.len(), 0, hosted, Some(lane));
        self.scaled(head, &records, n_in_step)
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
        position / n_batches * self.plan.n_records + in_epoch.min(self.plan.n_records)
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

    /// Panics unless the servers' partitions of a checkpoint hold exactly `n_epochs` of training.
    pub(crate) fn expect_trained(&self, disk: &Disk, folder: &str, n_epochs: u32) {
        let load = |id: u32| {
            let bytes = disk.read(folder, id).expect("the exported checkpoint is complete");
            let part = Partition::restore(self.config(id), &mut &*bytes, true);
            (id, part.expect("the exported checkpoint can be read"))
        };
        let parts: Parts = self.layout.with_rows().map(load).collect();
        let states: Vec<PartitionState> = parts.values().map(Partition::state).collect();
        let audit = audit::audit(&self.plan, &states, n_epochs);
        assert!(audit.is_clean, "{audit:?}");
        assert_eq!(audit.epochs.len(), n_epochs as usize, "nothing was trained beyond");
        let mut n_rows = 0;
        for part in parts.values() {
            part.check_invariants();
            for dense in part.dense() {
                expect_count("dense number", *dense, self.plan.n_records * u64::from(n_epochs));
            }
            for (_, row) in part.tables()[0].slab().rows() {
                expect_count("row", row[0], u64::from(n_epochs));
                n_rows += 1;
            }
        }
        assert_eq!(n_rows, self.plan.n_records, "every record has its row");
    }
}

fn expect_count(what: &str, value: f32, expected: u64) {
    #[expect(clippy::cast_precision_loss, reason = "counts stay small")]
    let error = (f64::from(value) - expected as f64).abs();
    assert!(error < 0.01, "a {what} is {value}, but {expected} records were trained into it");
}

/// A partition's file.
pub(crate) fn encode(part: &Partition) -> Vec<u8> {
    let mut bytes = Vec::new();
    codec::encode(&part.snapshot(), &mut bytes).expect("memory takes everything");
    bytes
}
