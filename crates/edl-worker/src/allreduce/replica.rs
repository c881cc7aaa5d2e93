// SPDX-License-Identifier: Apache-2.0
//! A whole copy of the parameters, as every worker of AllReduce holds one.
//!
//! It is made of the same partitions as on the parameter servers, so that optimizer, applied
//! set, checkpoint files and audit are the same. All partitions are always of the same step.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use edl_core::applied::AppliedSet;
use edl_core::batch::batch_of;
use edl_core::id::{BatchId, PartitionId};
use edl_core::layout::Layout;
use edl_core::model::ModelSpec;
use edl_core::optimizer::{self, Clip, OptimizerSpec};
use edl_core::spec::{JobSpec, Mode};
use edl_tensor::checkpoint::codec;
use edl_tensor::checkpoint::{self, Origin, Snapshot};
use edl_tensor::first_values;
use edl_tensor::model::Memory;
use edl_tensor::optimizer::Optimizer;
use edl_tensor::partition::{Partition, PartitionConfig, Placed};
use edl_tensor::table::Table;

/// Everything that decides what a replica holds before its first step.
#[derive(Clone, Debug)]
pub(crate) struct Recipe {
    pub(crate) model: Arc<ModelSpec>,
    optimizer: OptimizerSpec,
    seed: u64,
    layout: Layout,
    /// Steps of an epoch.
    n_batches: u32,
    /// The location of the model's own initial values.
    job_dir: PathBuf,
}

/// The partition that carries the state of the training script.
pub(crate) const STATE_PARTITION: u32 = 0;

#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error(transparent)]
    Checkpoint(#[from] checkpoint::Error),
    #[error("cannot get the training script's initial state")]
    FirstState(#[source] first_values::Error),
    #[error("cannot use partition {partition}")]
    Partition { partition: PartitionId, source: codec::Error },
    #[error("partition {0} was not received")]
    Missing(PartitionId),
    #[error(
        "partition {partition} does not contain exactly the first {step} steps; to start from a \
         checkpoint of another strategy, use --checkpoint_dir_for_init"
    )]
    PartialStep { partition: PartitionId, step: u64 },
}

/// The parameters after some step.
pub(crate) struct Replica {
    recipe: Recipe,
    /// All of them, in order.
    partitions: Vec<Placed>,
    /// The flat vector of all dense parameters, where the model reads it.
    dense: Box<dyn Memory>,
    step: u64,
}

impl Recipe {
    pub(crate) fn new(
        spec: &JobSpec,
        model: &ModelSpec,
        n_batches: u32,
        job_dir: PathBuf,
    ) -> Result<Self, optimizer::Error> {
        Ok(Self {
            model: Arc::new(model.clone()),
            optimizer: optimizer::resolve(spec, model)?,
            seed: spec.seed,
            layout: spec.layout(model.dense_len()),
            n_batches,
            job_dir,
        })
    }

    pub(crate) fn n_partitions(&self) -> u32 {
        self.layout.with_segments().end
    }

    /// The tables before the first step, whole, wherever their rows live.
    pub(crate) fn first_tables(&self) -> Result<Vec<Table>, Error> {
        let given = first_values::read_rows(&self.job_dir, &self.model);
        let given =
            given.map_err(|error| checkpoint::Error::FirstValues { source: error.into() })?;
        let optimizer = Optimizer::new(self.optimizer.clone());
        let tables = self.model.tables.iter().zip(given).map(|(spec, rows)| {
            let mut table = Table::new(spec, self.seed, &optimizer);
            table.give(&rows, |_| true);
            table
        });
        Ok(tables.collect())
    }

    /// How a gradient is changed before its step.
    pub(crate) fn clip(&self) -> Option<Clip> {
        self.optimizer.clip
    }

    /// Whether the training script takes the steps, so that its state belongs to the replica's.
    pub(crate) fn is_script(&self) -> bool {
        self.optimizer.is_script()
    }

    fn config(&self, partition: u32) -> PartitionConfig {
        PartitionConfig {
            id: PartitionId(partition),
            layout: self.layout,
            model: Arc::clone(&self.model),
            optimizer: self.optimizer.clone(),
            seed: self.seed,
            n_batches: self.n_batches,
            // A step is one push, already summed.
            mode: Mode::Async,
            lr_staleness_modulation: false,
        }
    }

    /// The parameters before the first step.
    pub(crate) fn first_values(&self, memory: Box<dyn Memory>) -> Result<Replica, Error> {
        self.make(&Origin::first_values(&self.model, &self.job_dir)?, memory)
    }

    /// The parameters of a complete checkpoint. Without `keep_applied` only the parameters and
    /// the optimizer's state are taken, and a new job starts from them.
    pub(crate) fn load(
        &self,
        folder: &Path,
        keep_applied: bool,
        memory: Box<dyn Memory>,
    ) -> Result<Replica, Error> {
        let origin = Origin::checkpoint(folder, &self.layout, keep_applied)?;
        self.make(&origin, memory)
    }

    fn make(&self, origin: &Origin, memory: Box<dyn Memory>) -> Result<Replica, Error> {
        let made = (0..self.n_partitions()).map(|partition| origin.make(self.config(partition)));
        self.assemble(made.collect::<Result<_, _>>()?, memory)
    }

    /// Reads one partition as another member encoded it.
    pub(crate) fn decode(&self, partition: u32, mut bytes: &[u8]) -> Result<Partition, Error> {
        Partition::restore(self.config(partition), &mut bytes, true)
            .map_err(|source| Error::Partition { partition: PartitionId(partition), source })
    }

    /// A replica of partitions that must all be of the same step; its parameters go to `memory`.
    pub(crate) fn assemble(
        &self,
        partitions: Vec<Partition>,
        mut memory: Box<dyn Memory>,
    ) -> Result<Replica, Error> {
        for (place, id) in (0..self.n_partitions()).map(PartitionId).enumerate() {
            if partitions.get(place).is_none_or(|partition| partition.id() != id) {
                return Err(Error::Missing(id));
            }
        }
        let step = partitions.first().map_or(0, Partition::updates);
        let applied = AppliedSet::of_first(step, self.n_batches);
        if let Some(partial) = partitions.iter().find(|part| *part.applied() != applied) {
            return Err(Error::PartialStep { partition: partial.id(), step });
        }
        let all = memory.numbers_mut();
        assert_eq!(all.len(), self.model.dense_len(), "memory of another model");
        let place = |partition| Placed::new(partition, all);
        let partitions = partitions.into_iter().map(place).collect();
        Ok(Replica { recipe: self.clone(), partitions, dense: memory, step })
    }
}

impl Replica {
    /// Steps in this state.
    pub(crate) fn step(&self) -> u64 {
        self.step
    }

    /// What the next step trains.
    pub(crate) fn next_batch(&self) -> BatchId {
        batch_of(self.step, self.recipe.n_batches)
    }

    pub(crate) fn dense(&self) -> &[f32] {
        self.dense.numbers()
    }

    /// Takes the next step by its mean gradient, which may be in pieces.
    pub(crate) fn apply(&mut self, gradient: &[&[f32]]) {
        let n_numbers: usize = gradient.iter().map(|piece| piece.len()).sum();
        let batch = self.next_batch();
        let all = self.dense.numbers_mut();
        assert_eq!(n_numbers, all.len(), "the gradient has the model's length");
        for partition in &mut self.partitions {
            partition.step(batch, all, gradient);
        }
        self.step += 1;
    }

    /// The parameters, for a step that the training script takes; `pass` counts it.
    pub(crate) fn dense_mut(&mut self) -> &mut [f32] {
        self.dense.numbers_mut()
    }

    /// The state of the training script that belongs to these parameters, once.
    pub(crate) fn take_state(&mut self) -> Result<Vec<u8>, Error> {
        let state = self.partitions.first_mut().map(Placed::take_state).unwrap_or_default();
        match state.is_empty() {
            // These are initial values, or the parameters of a job whose steps were not its script's.
            true => first_values::read_state(&self.recipe.job_dir).map_err(Error::FirstState),
            false => Ok(state),
        }
    }

    /// Counts the next step and leaves the parameters as they are.
    pub(crate) fn pass(&mut self) {
        let batch = self.next_batch();
        self.partitions.iter_mut().for_each(|partition| partition.pass(batch));
        self.step += 1;
    }

    /// One partition, for a member that lacks it. The first one carries the `state` of the training
    /// script.
    pub(crate) fn encode(&self, partition: u32, state: &[u8]) -> Vec<u8> {
        let mut snapshot = Snapshot::default();
        self.copy(partition, state, &mut snapshot);
        let mut bytes = Vec::new();
        codec::encode(&snapshot, &mut bytes).expect("memory takes all bytes");
        bytes
    }

    /// Copies some partitions into the memory of earlier copies; `state` as for `encode`.
    pub(crate) fn snapshot_into(
        &self,
        partitions: Range<u32>,
        state: &[u8],
        snapshots: &mut Vec<Snapshot>,
    ) {
        snapshots.resize_with(partitions.len(), Snapshot::default);
        for (partition, snapshot) in partitions.zip(snapshots) {
            self.copy(partition, state, snapshot);
        }
    }

    fn copy(&self, partition: u32, state: &[u8], snapshot: &mut Snapshot) {
        self.partitions[partition as usize].snapshot_into(self.dense(), snapshot);
        if partition == STATE_PARTITION {
            snapshot.state.extend_from_slice(state);
        }
    }
}

#[cfg(test)]
mod tests {
    use edl_tensor::model::Model;

    use super::*;
    use crate::allreduce::tests::toy::ToyModel;

    fn recipe() -> Recipe {
        let spec = JobSpec { partitions: 3, optimizer: Some("adam".into()), ..JobSpec::default() };
        Recipe::new(&spec, ToyModel::new().spec(), 2, PathBuf::new()).unwrap()
    }

    fn memory(recipe: &Recipe) -> Box<dyn Memory> {
        Box::new(vec![0.0; recipe.model.dense_len()])
    }

    /// Takes `n` steps whose gradients are functions of their numbers.
    fn walk(replica: &mut Replica, n: u64) {
        for _ in 0..n {
            let number = |place: usize| (place as u64 * 7 + replica.step()) as f32 / 64.0;
            let gradient: Vec<f32> = (0..replica.dense().len()).map(number).collect();
            // Regardless of how it is split into pieces.
            let (left, right) =
                gradient.split_at(usize::from(replica.step().is_multiple_of(2)) * 5);
            replica.apply(&[left, &[], right]);
        }
    }

    #[test]
    fn a_replica_that_travelled_takes_the_same_steps() {
        let recipe = recipe();
        let mut replica = recipe.first_values(memory(&recipe)).unwrap();
        walk(&mut replica, 3);
        let travel = |partition| recipe.decode(partition, &replica.encode(partition, &[])).unwrap();
        let mut other = recipe.assemble((0..3).map(travel).collect(), memory(&recipe)).unwrap();
        assert_eq!((other.step(), other.next_batch()), (3, BatchId { epoch: 1, index: 1 }));
        walk(&mut replica, 4);
        walk(&mut other, 4);
        assert_eq!(replica.dense(), other.dense());
        assert!(
            (0..3).all(|partition| replica.encode(partition, &[]) == other.encode(partition, &[]))
        );
    }

    #[test]
    fn partitions_of_different_steps_make_no_replica() {
        let recipe = recipe();
        let mut replica = recipe.first_values(memory(&recipe)).unwrap();
        walk(&mut replica, 2);
        let old = replica.encode(1, &[]);
        walk(&mut replica, 1);
        let bytes = [replica.encode(0, &[]), old, replica.encode(2, &[])];
        let decode = |(partition, bytes): (u32, &Vec<u8>)| recipe.decode(partition, bytes).unwrap();
        let torn = || (0..).zip(&bytes).map(decode).collect::<Vec<_>>();
        let refused = recipe.assemble(torn(), memory(&recipe)).err().unwrap();
        assert!(matches!(refused, Error::PartialStep { partition: PartitionId(1), step: 3 }));
        let refused = recipe.assemble(torn().split_off(1), memory(&recipe)).err().unwrap();
        assert!(matches!(refused, Error::Missing(PartitionId(0))));
    }

    #[test]
    fn a_partition_is_not_taken_for_another() {
        let recipe = recipe();
        let replica = recipe.first_values(memory(&recipe)).unwrap();
        assert!(recipe.decode(1, &replica.encode(0, &[])).is_err());
        assert!(recipe.decode(0, b"nonsense").is_err());
    }

    #[test]
    fn a_replica_starts_from_the_models_own_values() {
        let dir = tempfile::tempdir().unwrap();
        let values: Vec<f32> = (0..23_u8).map(|n| f32::from(n) / 3.0).collect();
        let model = ToyModel::bringing(values.clone());
        let spec = JobSpec { partitions: 3, ..JobSpec::default() };
        let recipe = Recipe::new(&spec, model.spec(), 2, dir.path().into()).unwrap();
        let missing = recipe.first_values(memory(&recipe)).err().unwrap();
        assert!(crate::chain(&missing).contains("first_values.safetensors"), "{missing}");
        first_values::offer(dir.path(), &model).unwrap();
        // Another worker's model drew other numbers, and comes too late.
        first_values::offer(dir.path(), &ToyModel::bringing(vec![0.5; 23])).unwrap();
        let mut replica = recipe.first_values(memory(&recipe)).unwrap();
        assert_eq!(replica.dense()[..19], values[..19]);
        assert_ne!(replica.dense()[19..], values[19..], "the last ones have their own init");
        replica.apply(&[&[1.0; 23]]);
        let trained: Vec<f32> = values[..19].iter().map(|value| value - 0.1).collect();
        assert_eq!(replica.dense()[..19], trained);
    }
}
