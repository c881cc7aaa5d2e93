// SPDX-License-Identifier: Apache-2.0
//! Measures the model on one shard of the validation data, minibatch by minibatch.

use std::ops::Range;

use edl_core::id::{Generation, LeaseId};
use edl_core::metric::{Measures, Metric};
use edl_net::proto::{EvalDone, EvalWork};
use edl_tensor::model::{Error, Inputs, Model};

/// One shard under way.
#[derive(Debug)]
pub(crate) struct Evaluation {
    work: EvalWork,
    measures: Measures,
    n_records: u64,
}

impl Evaluation {
    pub(crate) fn new(work: EvalWork, metrics: &[Metric]) -> Self {
        Self { work, measures: Measures::new(metrics), n_records: 0 }
    }

    pub(crate) fn shard(&self) -> u32 {
        self.work.shard
    }

    pub(crate) fn records(&self) -> Range<u64> {
        self.work.first_record..self.work.end_record
    }

    /// Adds one minibatch.
    pub(crate) fn add(&mut self, model: &mut dyn Model, inputs: Inputs<'_>) -> Result<(), Error> {
        model.evaluate(inputs, &mut self.measures)?;
        self.n_records += inputs.batch.len() as u64;
        Ok(())
    }

    /// The shard's result, for the master to merge with the others.
    pub(crate) fn done(self, lease: LeaseId, generation: Generation) -> EvalDone {
        EvalDone {
            lease: lease.0,
            eval: self.work.eval,
            shard: self.work.shard,
            measures_json: serde_json::to_string(&self.measures).expect("sums are plain numbers"),
            n_records: self.n_records,
            generation: generation.0,
        }
    }
}
