// SPDX-License-Identifier: Apache-2.0
//! One pass through a model: its parameters and rows on a tape, its gradient where it is wanted.

use edl_core::model::{ModelSpec, Rule};
use edl_tensor::model::{Error, Gradient, Inputs, Outcome};

use crate::tape::{Pool, Tape, Var};

/// Whether a pass goes backward too.
pub(crate) enum PassKind<'a> {
    /// Parameters and rows collect gradients, random choices follow from the seed.
    Train { seed: u64, gradient: &'a mut Gradient },
    /// Forward alone, nothing random.
    Infer,
}

/// The values of one pass.
pub(crate) struct Pass<'a> {
    pub(crate) tape: Tape<'a>,
    spec: &'a ModelSpec,
    seed: Option<u64>,
    params: Vec<Var<1>>,
    rows: Vec<Var<1>>,
    /// Per parameter that is a moving average, where a training pass puts the difference to add.
    differences: Vec<Option<&'a mut [f32]>>,
}

impl<'a> Pass<'a> {
    /// Checks the inputs, of which each table has `n_ids` rows, and puts them on a tape.
    pub(crate) fn new(
        spec: &'a ModelSpec,
        inputs: Inputs<'a>,
        n_ids: &[usize],
        kind: PassKind<'a>,
        pool: &'a mut Pool,
    ) -> Result<Self, Error> {
        check(spec, inputs, n_ids)?;
        let tape = Tape::new(pool);
        let mut pass =
            Self { tape, spec, seed: None, params: vec![], rows: vec![], differences: vec![] };
        match kind {
            PassKind::Infer => pass.add_constants(inputs),
            PassKind::Train { seed, gradient } => {
                pass.seed = Some(seed);
                pass.add_leaves(inputs, gradient);
            }
        }
        Ok(pass)
    }

    fn add_constants(&mut self, inputs: Inputs<'a>) {
        let mut rest = inputs.dense;
        for param in &self.spec.params {
            let (values, after) = rest.split_at(param.len());
            self.params.push(self.tape.constant([param.len()], values));
            rest = after;
        }
        self.rows = inputs.rows.iter().map(|rows| self.tape.constant([rows.len()], rows)).collect();
    }

    fn add_leaves(&mut self, inputs: Inputs<'a>, gradient: &'a mut Gradient) {
        // Old numbers may stay: the backward pass writes every one.
        gradient.dense.resize(inputs.dense.len(), 0.0);
        let (mut rest, mut rest_of_gradient) = (inputs.dense, gradient.dense.as_mut_slice());
        for param in &self.spec.params {
            let (values, after) = rest.split_at(param.len());
            let (target, after_target) = rest_of_gradient.split_at_mut(param.len());
            (rest, rest_of_gradient) = (after, after_target);
            let (var, difference) = match param.rule {
                Rule::Trainable { .. } => (self.tape.param([param.len()], values, target), None),
                Rule::MovingAverage => {
                    target.fill(0.0);
                    (self.tape.constant([param.len()], values), Some(target))
                }
            };
            self.params.push(var);
            self.differences.push(difference);
        }
        gradient.rows.resize_with(inputs.rows.len(), Vec::new);
        for (rows, target) in inputs.rows.iter().zip(&mut gradient.rows) {
            target.resize(rows.len(), 0.0);
            self.rows.push(self.tape.param([rows.len()], rows, target));
        }
    }

    /// What random choices follow from, in a pass that may make some.
    pub(crate) fn seed(&self) -> Option<u64> {
        self.seed
    }

    /// Parameter number `index` of the spec, in its own shape of `D` dimensions.
    pub(crate) fn param<const D: usize>(&self, index: usize) -> Var<D> {
        let shape = &self.spec.params[index].shape;
        let shape = <[usize; D]>::try_from(shape.as_slice()).expect("a rank as in the spec");
        self.params[index].reshape(shape)
    }

    /// Moves the average that is parameter number `index` towards `found`, if this pass trains.
    pub(crate) fn move_average(&mut self, index: usize, found: &[f32], momentum: f32) {
        if let Some(Some(difference)) = self.differences.get_mut(index) {
            let moving = self.tape.value(self.params[index]);
            for ((difference, found), moving) in difference.iter_mut().zip(found).zip(moving) {
                *difference = momentum * (found - moving);
            }
        }
    }

    /// The rows of a table, in the order of the lookups.
    pub(crate) fn rows<const D: usize>(&self, table: usize, shape: [usize; D]) -> Var<D> {
        self.rows[table].reshape(shape)
    }

    /// The loss as a number.
    pub(crate) fn outcome(&self, loss: Var<0>) -> Outcome {
        Outcome { loss: self.tape.value(loss)[0] }
    }

    /// Goes back from the loss and fills the gradient: zero where the loss does not depend on it.
    pub(crate) fn backward(self, loss: Var<0>) -> Result<Outcome, Error> {
        let outcome = self.outcome(loss);
        if !outcome.loss.is_finite() {
            return Err(Error::NonFinite("loss"));
        }
        self.tape.backward(loss);
        Ok(outcome)
    }
}

/// Refuses inputs whose lengths do not fit the spec: the tape would panic on them.
pub(crate) fn check(spec: &ModelSpec, inputs: Inputs<'_>, n_ids: &[usize]) -> Result<(), Error> {
    if inputs.batch.is_empty() {
        return Err(Error::Other("the batch has no records".into()));
    }
    if inputs.dense.len() != spec.dense_len() {
        return Err(Error::Other(format!(
            "model `{}` has {} dense parameters, the inputs have {}",
            spec.name,
            spec.dense_len(),
            inputs.dense.len()
        )));
    }
    let needs: Vec<usize> = spec.tables.iter().zip(n_ids).map(|(t, n)| t.dim * n).collect();
    let has: Vec<usize> = inputs.rows.iter().map(Vec::len).collect();
    if needs != has {
        return Err(Error::Other(format!(
            "model `{}` needs rows of {needs:?} numbers, the inputs have {has:?}",
            spec.name
        )));
    }
    Ok(())
}
