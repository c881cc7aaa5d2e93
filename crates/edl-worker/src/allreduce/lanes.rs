// SPDX-License-Identifier: Apache-2.0
//! The lanes of one step through the model, added up in the tree's order.

use edl_core::id::BatchId;
use edl_core::lanes::{Span, children};
use edl_core::model::ModelSpec;
use edl_core::rng;
use edl_core::spec::AllreduceDtype;
use edl_net::mesh::round_to_bf16;
use edl_tensor::model::{Error, Gradient, Inputs, Model};
use twox_hash::XxHash3_64;

use super::inbox::Halt;
use crate::feed::Decoded;

/// The model with its buffers.
pub(super) struct Lanes {
    model: Box<dyn Model>,
    seed: u64,
    dtype: AllreduceDtype,
    gradient: Gradient,
    /// For sums that must be whole before they are added to another.
    spare: Vec<Vec<f32>>,
}

/// What the lanes of one step have in common.
#[derive(Clone, Copy)]
pub(super) struct Step<'a> {
    pub(super) batch: BatchId,
    /// The parameters before the step.
    pub(super) dense: &'a [f32],
}

/// Whether a lane begins a sum or is added to one.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Put {
    First,
    Add,
}

impl Lanes {
    pub(super) fn new(model: Box<dyn Model>, seed: u64, dtype: AllreduceDtype) -> Self {
        let dense = vec![0.0; model.spec().dense_len()];
        let gradient = Gradient { dense, rows: Vec::new() };
        Self { model, seed, dtype, gradient, spare: Vec::new() }
    }

    pub(super) fn spec(&self) -> &ModelSpec {
        self.model.spec()
    }

    /// How many numbers a lane yields: its gradient and its loss.
    pub(super) fn len(&self) -> usize {
        self.gradient.dense.len() + 1
    }

    /// Hands the last parameters to the model.
    pub(super) fn finish(&mut self, dense: &[f32]) {
        self.model.finish(dense);
    }

    /// Runs `pass` on records with these parameters.
    pub(super) fn pass<R>(
        &mut self,
        records: &Decoded,
        dense: &[f32],
        pass: impl FnOnce(&mut dyn Model, Inputs<'_>) -> R,
    ) -> R {
        pass(&mut *self.model, Inputs { batch: &records.batch, dense, rows: &[] })
    }

    /// Trains the lanes of `node` in order and leaves their sum in `out`.
    pub(super) fn sum(
        &mut self,
        step: Step<'_>,
        node: &Span,
        out: &mut [f32],
        records: &mut dyn FnMut(u32) -> Result<Decoded, Halt>,
    ) -> Result<(), Halt> {
        let Some((left, right)) = children(node) else {
            return self.lane(step, node.start, &records(node.start)?, out, Put::First);
        };
        self.sum(step, &left, out, records)?;
        if right.len() == 1 {
            return self.lane(step, right.start, &records(right.start)?, out, Put::Add);
        }
        let mut spare = self.spare.pop().unwrap_or_default();
        spare.resize(out.len(), 0.0);
        let summed = self.sum(step, &right, &mut spare, records);
        if summed.is_ok() {
            out.iter_mut().zip(&spare).for_each(|(sum, number)| *sum += number);
        }
        self.spare.push(spare);
        summed
    }

    /// A lane's value is the gradient of its mean loss times its records, so that the sum over
    /// all lanes divided by all records is the mean; its loss likewise, behind the gradient.
    fn lane(
        &mut self,
        step: Step<'_>,
        lane: u32,
        records: &Decoded,
        out: &mut [f32],
        put: Put,
    ) -> Result<(), Halt> {
        let batch = step.batch;
        let mut loss = self.train(step, lane, records).map_err(|error| {
            Halt::Failed(format!("{error} (batch {batch}, lane {lane}: {})", records.describe()))
        })?;
        let mut weight = records.batch.len() as f32;
        if self.dtype == AllreduceDtype::Bf16 {
            // What is rounded is what a lane that travels by itself would be.
            self.gradient.dense.iter_mut().for_each(|number| *number *= weight);
            round_to_bf16(&mut self.gradient.dense);
            loss *= weight;
            round_to_bf16(std::slice::from_mut(&mut loss));
            weight = 1.0;
        }
        let (sums, last) = out.split_at_mut(self.gradient.dense.len());
        let pairs = sums.iter_mut().zip(&self.gradient.dense);
        match put {
            Put::First => {
                pairs.for_each(|(sum, number)| *sum = number * weight);
                last[0] = loss * weight;
            }
            Put::Add => {
                pairs.for_each(|(sum, number)| *sum += number * weight);
                last[0] += loss * weight;
            }
        }
        Ok(())
    }

    /// Leaves the lane's gradient in `self.gradient`; returns its loss.
    fn train(&mut self, step: Step<'_>, lane: u32, records: &Decoded) -> Result<f32, Error> {
        let Step { batch, dense } = step;
        let words = [self.seed, batch.epoch.into(), batch.index.into(), lane.into()];
        let inputs = Inputs { batch: &records.batch, dense, rows: &[] };
        let outcome = self.model.train(inputs, rng::key(&words), &mut self.gradient)?;
        if self.gradient.dense.len() != dense.len() {
            return Err(Error::Other(
                "the model's gradient has another shape than its inputs".into(),
            ));
        }
        if outcome.loss.is_finite() { Ok(outcome.loss) } else { Err(Error::NotANumber) }
    }

    /// A hash of the bits that this machine computes for one lane: where it differs between two
    /// workers, their sums would depend on who computed them.
    pub(super) fn probe(&mut self, step: Step<'_>, records: &Decoded) -> Result<u64, String> {
        let mut out = vec![0.0; self.len()];
        // Rounded bits would hide others.
        let dtype = std::mem::take(&mut self.dtype);
        let trained = self.lane(step, 0, records, &mut out, Put::First);
        self.dtype = dtype;
        match trained {
            Ok(()) => Ok(hash(&out)),
            Err(Halt::Failed(error)) => Err(error),
            Err(Halt::Interrupted | Halt::Died(_)) => Err("interrupted".into()),
        }
    }
}

/// Equal for equal bits.
pub(super) fn hash(numbers: &[f32]) -> u64 {
    XxHash3_64::oneshot(bytemuck::cast_slice(numbers))
}
