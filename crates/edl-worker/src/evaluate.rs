// SPDX-License-Identifier: Apache-2.0
//! Evaluates the model on one shard of the validation data, minibatch by minibatch.

use edl_core::metric::{Measures, Metric};
use edl_core::worker::Finished;
use edl_tensor::model::{Error, Inputs, Model};

/// The sums of one shard.
#[derive(Debug)]
pub(crate) struct Evaluation(Box<Measures>);

impl Evaluation {
    pub(crate) fn new(metrics: &[Metric]) -> Self {
        Self(Box::new(Measures::new(metrics)))
    }

    /// Adds one minibatch.
    pub(crate) fn add(&mut self, model: &mut dyn Model, inputs: Inputs<'_>) -> Result<(), Error> {
        model.evaluate(inputs, &mut self.0).map(drop)
    }

    pub(crate) fn finish(self) -> Finished {
        Finished::Evaluation(self.0)
    }
}
