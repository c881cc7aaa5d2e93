// SPDX-License-Identifier: Apache-2.0
//! A model that counts: after training, every row holds the number of epochs and every dense
//! number the records trained, if and only if each batch was applied exactly once everywhere.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use edl_core::batch::BatchPlan;
use edl_core::id::{BatchId, PartitionId};
use edl_core::layout::Layout;
use edl_core::metric::Metric;
use edl_core::model::{Init, ModelSpec, ParamSpec, Rule, TableSpec};
use edl_core::optimizer::OptimizerSpec;
use edl_core::servers::PartitionState;
use edl_core::spec::{JobSpec, Mode};
use edl_tensor::partition::{Partition, PartitionConfig};
use edl_tensor::push::{self, Body, Head, Push};

/// Not a multiple of the numbers of partitions, so that segments differ.
const DENSE_LEN: usize = 11;

pub(crate) type Parts = BTreeMap<u32, Partition>;

/// The model of one job, and how its batches are made.
#[derive(Clone, Debug)]
pub(crate) struct Counter {
    pub(crate) spec: JobSpec,
    pub(crate) plan: BatchPlan,
    pub(crate) model: Arc<ModelSpec>,
    pub(crate) layout: Layout,
}

impl Counter {
    pub(crate) fn new(spec: JobSpec, n_records: u64) -> Self {
        let zero = Init::Constant(0.0);
        let rule = Rule::Trainable { decay: false };
        let model = ModelSpec {
            name: "counter".into(),
            params: vec![ParamSpec {
                name: "dense".into(),
                shape: vec![DENSE_LEN],
                init: zero,
                rule,
            }],
            tables: vec![TableSpec { name: "rows".into(), dim: 1, init: zero }],
            inputs: Vec::new(),
            metrics: vec![Metric::loss()],
            optimizer: OptimizerSpec::sgd(1.0),
        };
        let layout = spec.layout(DENSE_LEN);
        let plan = spec.plan(n_records);
        Self { spec, plan, model: Arc::new(model), layout }
    }

    pub(crate) fn partition_config(&self, id: u32) -> PartitionConfig {
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

    pub(crate) fn fresh(&self, partitions: Range<u32>) -> Parts {
        partitions.map(|id| (id, Partition::new(self.partition_config(id)))).collect()
    }

    /// The batches of a round, by their index.
    fn round(&self, batch: BatchId) -> Range<u32> {
        let Mode::Sync { grads_to_wait } = self.spec.mode() else {
            return batch.index..batch.index + 1;
        };
        let first = batch.index / grads_to_wait * grads_to_wait;
        first..self.plan.n_batches().min(first + grads_to_wait)
    }

    fn n_records(&self, batch: BatchId) -> u32 {
        u32::try_from(self.plan.records(batch).len()).expect("a batch is small")
    }

    /// The gradient of a batch, for one server. A round applies the mean, weighted by records, so
    /// that gradients are scaled up to add exactly one per record.
    #[expect(clippy::cast_precision_loss, reason = "counts stay small")]
    pub(crate) fn push(&self, batch: BatchId, base_version: u64, hosted: Range<u32>) -> Arc<Push> {
        let records = self.plan.records(batch);
        let in_round = self.round(batch).map(|index| BatchId { epoch: batch.epoch, index });
        let n_in_round: u32 = in_round.map(|batch| self.n_records(batch)).sum();
        let n_records = self.n_records(batch);
        let row = -(f64::from(n_in_round) / f64::from(n_records));
        #[expect(clippy::cast_possible_truncation, reason = "gradients are single precision")]
        let (row, dense) = (row as f32, -(n_in_round as f32));
        let span = push::span(&self.layout, &hosted);
        let mut body = Body { dense: vec![dense; span.len()], ..Body::default() };
        for partition in hosted.clone() {
            let ids = records.iter().copied();
            let ids: Vec<u64> =
                ids.filter(|id| self.layout.partition_of(*id).0 == partition).collect();
            body.counts.push(u32::try_from(ids.len()).expect("a batch is small"));
            body.grads.extend(ids.iter().map(|_| row));
            body.ids.extend(ids);
        }
        let head = Head {
            batch,
            n_records,
            base_version,
            partitions: hosted,
            layout: self.layout,
            lane: None,
        };
        Arc::new(Push::new(head, &[1], body).expect("lengths fit"))
    }

    /// Panics unless the parts hold exactly `n_epochs` of training.
    pub(crate) fn expect_trained(&self, parts: &Parts, n_epochs: u32) {
        assert_eq!(parts.len(), self.spec.partitions as usize, "all partitions are there");
        let states = states(parts);
        let audit = edl_core::audit::audit(&self.plan, &states, n_epochs);
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
    assert!(error < 0.01, "a {what} is {value}, but {expected} records went into it");
}

pub(crate) fn states(parts: &Parts) -> Vec<PartitionState> {
    let state = |(id, part): (&u32, &Partition)| PartitionState {
        partition: PartitionId(*id),
        applied: part.applied().clone(),
        updates: part.updates(),
        n_rows: part.n_rows(),
    };
    parts.iter().map(state).collect()
}
