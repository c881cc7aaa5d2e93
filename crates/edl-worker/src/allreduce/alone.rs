// SPDX-License-Identifier: Apache-2.0
//! Training without a job: one process trains all lanes of every step, with the numbers of a job.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use edl_core::id::WorldId;
use edl_core::lanes::n_active;
use edl_core::member::{Failure, Step};
use edl_core::optimizer::Clip;
use edl_core::spec::JobSpec;
use edl_core::worker::Records;
use edl_tensor::model::{Mean, Model};

use super::lanes::{Lanes, clip_mean, divide, divisor};
use super::replica::{Recipe, Replica};
use super::tables::Tables;
use super::{Interrupt, check};
use crate::feed::{Counts, Feeder, OpenRecords, Source, open_records};
use crate::progress::Progress;
use crate::{Error, chain};

/// Any world but that of a probe, which has no leader.
const WORLD: WorldId = WorldId(1);

/// Trains all epochs, or until the training script leaves its loop. `job_dir` has the initial
/// values; `forget` is called once they are read.
pub fn train_alone(
    spec: &JobSpec,
    n_records: u64,
    model: Box<dyn Model>,
    job_dir: &Path,
    forget: impl FnOnce(),
) -> Result<(), Error> {
    let records = open_records(spec, job_dir.to_owned());
    let alone = Alone::new(spec, n_records, model, job_dir, records)?;
    forget();
    alone.run(spec)
}

/// A worker without other workers and without a master.
struct Alone {
    lanes: Lanes,
    replica: Replica,
    feeder: Feeder,
    is_script: bool,
    clip: Option<Clip>,
    /// The mean gradient and the loss.
    mean: Vec<f32>,
}

impl Alone {
    fn new(
        spec: &JobSpec,
        n_records: u64,
        model: Box<dyn Model>,
        job_dir: &Path,
        open: OpenRecords,
    ) -> Result<Self, Error> {
        let plan = spec.plan(n_records);
        check(model.spec(), &plan, false)?;
        let recipe = Recipe::new(spec, model.spec(), plan.n_batches(), job_dir.to_owned());
        let recipe = recipe.map_err(|error| Error::Model(error.to_string()))?;
        let feeder = Feeder {
            open,
            first: Source::Training,
            counts: Counts { training: n_records, validation: 0, prediction: 0 },
            plan,
            n_lanes: spec.n_lanes(),
            fields: model.spec().inputs.clone(),
            opened: BTreeMap::new(),
        };
        let progress = Arc::new(Progress::new());
        let tables = Tables::new(Vec::new(), None, Arc::new(Interrupt::default()), progress);
        let mut lanes = Lanes::new(model, (spec, &feeder.plan), tables, None);
        let fail = |error: String| Error::Died(error);
        let replica = recipe.first_values(lanes.memory());
        let mut replica = replica.map_err(|error| fail(chain(&error)))?;
        if recipe.is_script() {
            let state = replica.take_state().map_err(|error| fail(chain(&error)))?;
            lanes.load_state(&state).map_err(fail)?;
        }
        let mean = vec![0.0; lanes.len()];
        let (is_script, clip) = (recipe.is_script(), recipe.clip());
        Ok(Self { lanes, replica, feeder, is_script, clip, mean })
    }

    fn run(mut self, spec: &JobSpec) -> Result<(), Error> {
        let n_steps = u64::from(self.feeder.plan.n_batches()) * u64::from(spec.num_epochs);
        while self.replica.step() < n_steps {
            match self.step(spec) {
                Ok(()) => {}
                Err(Failure::Quit) => break,
                Err(Failure::Failed(error) | Failure::NonFinite(error)) => {
                    return Err(Error::Died(error));
                }
                Err(failure) => unreachable!("there is no other process: {failure:?}"),
            }
        }
        self.lanes.finish(self.replica.step(), true, self.replica.dense());
        Ok(())
    }

    fn step(&mut self, spec: &JobSpec) -> Result<(), Failure> {
        let (batch, n_lanes) = (self.replica.next_batch(), spec.n_lanes());
        let n_records = self.feeder.plan.n_records_of(batch.index);
        let step = Step {
            world: WORLD,
            number: self.replica.step(),
            batch,
            n_records,
            n_active: n_active(n_records as usize, n_lanes, spec.minibatch_size),
            mine: 0..n_lanes,
            is_alone: true,
        };
        for lane in step.mine_active() {
            let records = self.feeder.read(&Records::Lane(batch, lane)).map_err(Failure::Failed)?;
            let dense = self.replica.dense();
            self.lanes.add(&step, (lane, dense), &records, vec![&mut self.mean])?;
        }
        let divisor = divisor(step.n_active, n_records);
        divide(&mut self.mean, self.lanes.spec().n_double_places(), divisor);
        let loss = *self.mean.last().expect("the loss is at the end");
        if !loss.is_finite() {
            let error = format!("the mean loss of all lanes is {loss} (batch {batch})");
            return Err(Failure::NonFinite(error));
        }
        if let Some(limit) = self.clip {
            clip_mean(&mut self.mean, self.lanes.spec(), limit);
        }
        let gradient = &self.mean[..self.mean.len() - 1];
        if self.is_script {
            let mean = Mean { gradient, loss };
            self.lanes.step(&step, mean, self.replica.dense_mut())?;
            self.replica.pass();
        } else {
            self.replica.apply(&[gradient]);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::stage::{Weights, spec};
    use super::super::tests::toy::{ToyModel, ToyRecords};
    use super::super::tests::{END, N_RECORDS, reference};
    use super::*;

    #[test]
    fn training_without_a_job_gives_the_weights_of_a_job() {
        let plain = spec();
        let clipped = JobSpec { clip_norm: Some(0.5), ..spec() };
        let weights = [plain, clipped].map(|spec| {
            let folder = tempfile::tempdir().unwrap();
            let open: OpenRecords =
                Box::new(|_| Ok(Arc::new(ToyRecords { n_records: N_RECORDS, swap: None })));
            let model = Box::new(ToyModel::new());
            let mut alone = Alone::new(&spec, N_RECORDS, model, folder.path(), open).unwrap();
            for _ in 0..END {
                alone.step(&spec).unwrap();
            }
            let encode = |partition| (partition, alone.replica.encode(partition, &[]));
            let weights: Weights = (0..spec.partitions).map(encode).collect();
            assert!(weights == reference(spec, N_RECORDS));
            weights
        });
        assert!(weights[0] != weights[1], "clipping shows");
    }
}
