// SPDX-License-Identifier: Apache-2.0
//! The `Model` trait: what the training loop needs from a model, regardless of its engine.
//!
//! A model keeps no state between calls that a result depends on: parameters and embedding rows
//! come in, gradients go out. So any worker can train any batch, any number of times.

use edl_core::metric::Measures;
use edl_core::model::ModelSpec;
use edl_core::upcoming::Upcoming;

use crate::batch::Batch;

/// The mean over all records of a step.
#[derive(Clone, Copy, Debug)]
pub struct Mean<'a> {
    pub gradient: &'a [f32],
    pub loss: f32,
}

/// A model as the training loop sees it.
pub trait Model: Send {
    fn spec(&self) -> &ModelSpec;

    /// The initial values of all dense parameters, laid out like `Inputs::dense`; those under
    /// `Init::Given` are taken. Every worker of a job may be asked, and the first answer counts.
    fn first_values(&self) -> Option<Vec<f32>> {
        None
    }

    /// The rows of a table under `Init::Given`, those of the ids from zero on.
    fn first_rows(&self, _table: usize) -> Option<Vec<f32>> {
        None
    }

    /// The embedding ids that `batch` needs: one list per table of the spec, duplicates allowed.
    fn lookups(&self, batch: &Batch) -> Result<Vec<Vec<u64>>, Error>;

    /// Forward and backward. Writes the gradient of the batch's mean loss into `gradient`,
    /// every number of it. Random choices (dropout) follow from `seed` alone.
    fn train(
        &mut self,
        inputs: Inputs<'_>,
        seed: u64,
        gradient: &mut Gradient,
    ) -> Result<Outcome, Error>;

    /// Like `train`, but the dense part of the gradient may stay where the model made it, until the
    /// next pass: `pieces` finds it.
    fn train_in_place(
        &mut self,
        inputs: Inputs<'_>,
        seed: u64,
        gradient: &mut Gradient,
    ) -> Result<Outcome, Error> {
        self.train(inputs, seed, gradient)
    }

    /// What the last pass, a `train_in_place` with this `gradient`, made: pieces that are, one
    /// after the other, laid out like `Inputs::dense`.
    fn pieces<'a>(&'a self, gradient: &'a Gradient) -> Vec<&'a [f32]> {
        vec![&gradient.dense]
    }

    /// Memory for all dense parameters that passes read in place. A model copies parameters that
    /// lie elsewhere.
    fn memory(&self) -> Box<dyn Memory> {
        Box::new(vec![0.0; self.spec().dense_len()])
    }

    /// Forward without randomness; adds every record to `measures`.
    fn evaluate(&mut self, inputs: Inputs<'_>, measures: &mut Measures) -> Result<Outcome, Error>;

    /// The model's output, one row of numbers per record.
    fn predict(&mut self, inputs: Inputs<'_>) -> Result<Predictions, Error>;

    /// The passes from now on only show whether the model fits its data. They call no user code that
    /// is for other effects than the result of a pass, such as callbacks.
    fn begin_trial(&mut self) {}

    /// The number of steps before the next pass, and whether this worker leads the others, for a
    /// model that shows them to its user. Workers of AllReduce say so before each pass and before
    /// `finish`.
    fn at(&mut self, _step: u64, _is_leader: bool) {}

    /// What probably follows the next pass, for a model that reads records itself. Workers say so
    /// before each pass in training.
    fn upcoming(&mut self, _passes: Upcoming) {}

    /// Takes an optimizer step by the mean gradient of all lanes, where the optimizer is
    /// `OptimizerKind::Script`: changes `dense` and the state of the script. The result follows from
    /// these and `seed` alone. After an error, all later calls must fail.
    fn step(&mut self, _mean: Mean<'_>, _seed: u64, _dense: &mut [f32]) -> Result<(), Error> {
        Err(Error::Other("the model takes no optimizer steps".into()))
    }

    /// All state that later calls of `step` depend on, except the parameters.
    fn state(&mut self) -> Result<Vec<u8>, Error> {
        Ok(Vec::new())
    }

    /// Replaces that state.
    fn load_state(&mut self, _state: &[u8]) -> Result<(), Error> {
        Ok(())
    }

    /// The parameters that a worker of AllReduce ends with, for a model that passes them on.
    fn finish(&mut self, _dense: &[f32]) {}
}

/// The flat vector of all dense parameters, in memory of the model's choice. It is written between
/// passes alone.
pub trait Memory: Send {
    fn numbers(&self) -> &[f32];

    fn numbers_mut(&mut self) -> &mut [f32];
}

impl Memory for Vec<f32> {
    fn numbers(&self) -> &[f32] {
        self
    }

    fn numbers_mut(&mut self) -> &mut [f32] {
        self
    }
}

/// What one pass reads.
#[derive(Clone, Copy, Debug)]
pub struct Inputs<'a> {
    pub batch: &'a Batch,
    /// The flat vector of all dense parameters, in the order of the spec.
    pub dense: &'a [f32],
    /// Per table, `dim` numbers for each id that `lookups` named, in that order.
    pub rows: &'a [Vec<f32>],
}

/// The gradient of one batch. For parameters under `Rule::MovingAverage` it holds the difference
/// to add.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Gradient {
    /// Laid out like `Inputs::dense`.
    pub dense: Vec<f32>,
    /// Laid out like `Inputs::rows`.
    pub rows: Vec<Vec<f32>>,
}

impl Gradient {
    #[must_use]
    pub fn is_finite(&self) -> bool {
        is_finite(&self.dense) && self.rows.iter().all(|rows| is_finite(rows))
    }
}

/// Whether all numbers are finite.
#[must_use]
pub fn is_finite(numbers: &[f32]) -> bool {
    // Without an early end, so that many numbers are compared at once.
    numbers.iter().fold(true, |all, number| all & number.is_finite())
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Outcome {
    /// Mean over the batch's records.
    pub loss: f32,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Predictions {
    /// Numbers per record.
    pub width: usize,
    pub values: Vec<f32>,
}

/// Why a model cannot take a batch.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("the model needs a column `{column}` of {needs}, the batch has {has}")]
    Column { column: String, needs: String, has: String },
    #[error("record {record}: {problem}")]
    Record { record: u64, problem: String },
    /// The loss or the gradient.
    #[error("the {0} is not finite")]
    NonFinite(&'static str),
    #[error("the training script has left its loop")]
    Quit,
    #[error("{0}")]
    Other(String),
}
