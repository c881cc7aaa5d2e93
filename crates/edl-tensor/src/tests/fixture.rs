// SPDX-License-Identifier: Apache-2.0
//! Small models and whole jobs for tests.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use edl_core::id::{BatchId, PartitionId};
use edl_core::layout::Layout;
use edl_core::model::{Init, ModelSpec, ParamSpec, Rule, TableSpec};
use edl_core::optimizer::{OptimizerKind, OptimizerSpec};
use edl_core::rng::{self, Rng};
use edl_core::spec::Mode;

use crate::partition::{Partition, PartitionConfig};
use crate::push::{Body, Head, Lane, Push};

/// A model of flat parameters and tables. Names decide the rules: `mean` is a moving average,
/// `b` has no weight decay.
pub(crate) fn model(params: &[(&str, usize)], dims: &[usize]) -> ModelSpec {
    let rule = |name: &str| match name {
        "mean" => Rule::MovingAverage,
        name => Rule::Trainable { decay: name != "b" },
    };
    let init = Init::Uniform { low: -1.0, high: 1.0 };
    let param = |(name, len): &(&str, usize)| ParamSpec::new(name, vec![*len], init, rule(name));
    let table =
        |(i, dim): (usize, &usize)| TableSpec { name: format!("table{i}"), dim: *dim, init };
    ModelSpec {
        name: "fixture".into(),
        params: params.iter().map(param).collect(),
        tables: dims.iter().enumerate().map(table).collect(),
        inputs: Vec::new(),
        metrics: Vec::new(),
        optimizer: OptimizerSpec::sgd(0.1),
    }
}

/// Everything that makes the partitions and the pushes of a small job.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    pub(crate) model: Arc<ModelSpec>,
    pub(crate) optimizer: OptimizerSpec,
    pub(crate) n_partitions: u32,
    pub(crate) n_batches: u32,
    pub(crate) mode: Mode,
    pub(crate) lr_staleness_modulation: bool,
}

/// A gradient of the whole model.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    pub(crate) n_records: u32,
    pub(crate) dense: Vec<f32>,
    /// Per table, a row of gradient by id.
    pub(crate) rows: Vec<BTreeMap<u64, Vec<f32>>>,
}

impl Job {
    pub(crate) fn new(mode: Mode) -> Self {
        Self {
            model: Arc::new(model(&[("w", 9), ("mean", 3), ("b", 2), ("v", 6)], &[3, 1])),
            optimizer: OptimizerSpec { weight_decay: 0.125, ..OptimizerSpec::sgd(0.25) },
            n_partitions: 4,
            n_batches: 7,
            mode,
            lr_staleness_modulation: false,
        }
    }

    pub(crate) fn with_adam(mut self) -> Self {
        self.optimizer.kind =
            OptimizerKind::Adam { beta_1: 0.9, beta_2: 0.999, epsilon: 1e-7, amsgrad: false };
        self
    }

    pub(crate) fn layout(&self) -> Layout {
        match self.mode {
            Mode::Steps { .. } => Layout::apart(self.model.dense_len(), self.n_partitions),
            Mode::Async | Mode::Bounded { .. } | Mode::Sync { .. } => {
                Layout::shared(self.model.dense_len(), self.n_partitions)
            }
        }
    }

    pub(crate) fn config(&self, partition: u32) -> PartitionConfig {
        PartitionConfig {
            id: PartitionId(partition),
            layout: self.layout(),
            model: Arc::clone(&self.model),
            optimizer: self.optimizer.clone(),
            seed: 11,
            n_batches: self.n_batches,
            mode: self.mode,
            lr_staleness_modulation: self.lr_staleness_modulation,
        }
    }

    pub(crate) fn partitions(&self) -> Vec<Partition> {
        (0..self.layout().n_partitions).map(|p| Partition::new(self.config(p))).collect()
    }

    /// The gradient of a batch, a function of its identity. Numbers are multiples of 1/8.
    pub(crate) fn gradient(&self, batch: BatchId) -> Part {
        let mut rng = Rng::new(rng::key(&[u64::from(batch.epoch), u64::from(batch.index)]));
        let mut number = move || rng.below(17) as f32 / 8.0 - 1.0;
        let dense = (0..self.model.dense_len()).map(|_| number()).collect();
        let mut ids = Rng::new(rng::key(&[1, u64::from(batch.epoch), u64::from(batch.index)]));
        let rows = self.model.tables.iter().map(|table| {
            let n = ids.below(6);
            (0..n).map(|_| (ids.below(12), (0..table.dim).map(|_| number()).collect())).collect()
        });
        let rows = rows.collect();
        Part { n_records: 1 + batch.index % 3, dense, rows }
    }

    /// What a worker pushes for a batch to the server of `partitions`.
    pub(crate) fn push(
        &self,
        batch: BatchId,
        base_version: u64,
        partitions: Range<u32>,
    ) -> Arc<Push> {
        self.push_part(batch, base_version, partitions, self.gradient(batch), None)
    }

    /// What a worker pushes for one lane of a batch.
    pub(crate) fn push_lane(
        &self,
        batch: BatchId,
        lane: Lane,
        partitions: Range<u32>,
    ) -> Arc<Push> {
        // Any other gradient for each lane.
        let key = BatchId { epoch: 1000 + batch.epoch, index: batch.index * lane.of + lane.number };
        self.push_part(batch, 0, partitions, self.gradient(key), Some(lane))
    }

    fn push_part(
        &self,
        batch: BatchId,
        base_version: u64,
        partitions: Range<u32>,
        part: Part,
        lane: Option<Lane>,
    ) -> Arc<Push> {
        let layout = self.layout();
        let mut body = Body::default();
        for partition in partitions.clone().map(PartitionId) {
            body.dense.extend_from_slice(&part.dense[layout.segment(partition)]);
            for table in &part.rows {
                let own = table.iter().filter(|(id, _)| layout.partition_of(**id) == partition);
                let before = body.ids.len();
                for (id, row) in own {
                    body.ids.push(*id);
                    body.grads.extend_from_slice(row);
                }
                body.counts.push(u32::try_from(body.ids.len() - before).unwrap());
            }
        }
        let n_records = part.n_records;
        let head = Head { batch, n_records, base_version, partitions, layout, lane };
        let dims: Vec<usize> = self.model.tables.iter().map(|table| table.dim).collect();
        Arc::new(Push::new(head, &dims, body).unwrap())
    }
}

/// The batch with this index of the first epoch.
pub(crate) fn batch(index: u32) -> BatchId {
    BatchId { epoch: 0, index }
}
