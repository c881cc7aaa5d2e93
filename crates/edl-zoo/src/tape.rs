// SPDX-License-Identifier: Apache-2.0
//! A tape for reverse-mode gradients over flat `f32` slices: what the built-in models are made of.
//!
//! An operation computes its value at once and records how gradients go back through it;
//! [`Tape::backward`] plays the record backward. Parameters and embedding rows are read where they
//! lie, their gradients are written where the caller wants them, and everything between lives in
//! buffers of a [`Pool`] that the next pass uses again.
//!
//! ```
//! use edl_zoo::tape::{Pool, Tape};
//!
//! // A linear classifier of three records with two numbers each, into two classes.
//! let features = [1.0, 0.0, 0.0, 1.0, 1.0, 1.0];
//! let (weight, bias) = ([0.0; 4], [0.0; 2]);
//! let (mut weight_gradient, mut bias_gradient) = ([0.0; 4], [0.0; 2]);
//!
//! let mut pool = Pool::default(); // Keep it for the next pass.
//! let mut tape = Tape::new(&mut pool);
//! let x = tape.constant([3, 2], &features);
//! let w = tape.param([2, 2], &weight, &mut weight_gradient);
//! let b = tape.param([2], &bias, &mut bias_gradient);
//! let logits = tape.linear(x, w, b);
//! let loss = tape.softmax_cross_entropy(logits, &[0, 1, 1]);
//! assert!((tape.value(loss)[0] - 2.0_f32.ln()).abs() < 1e-6);
//! tape.backward(loss);
//!
//! // One record of class 0 and two of class 1, all judged to be fifty-fifty.
//! assert!((bias_gradient[0] - 0.5 / 3.0).abs() < 1e-6);
//! assert!((bias_gradient[1] + 0.5 / 3.0).abs() < 1e-6);
//! ```
//!
//! Every pass runs on the calling thread, and no result depends on the pool or on the size of the
//! caches: equal inputs give equal bits on one instruction set.
//!
//! The rank of a value is part of its type. A shape mismatch is a bug in the model and panics, so a
//! model checks its inputs first. Images are `[n, height, width, channels]`, so loops over
//! channels fill whole registers.
//!
//! [`Tape::record`] adds operations that are not here.

mod batch_norm;
mod conv;
mod dropout;
mod join;
mod kernel;
mod linear;
mod loss;
mod matrix;
mod max_pool;
mod pairs;
mod pool;

pub use batch_norm::Statistics;
pub use loss::{sigmoid, softmax};
pub use matrix::{Matrix, matmul};
pub use pool::Pool;

#[cfg(test)]
pub(crate) use kernel::narrow;

/// A value on a tape, with a shape of `D` dimensions. It must be used with the tape that made it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Var<const D: usize> {
    id: Id,
    shape: [usize; D],
}

/// A value on a tape, whatever its shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Id(usize);

impl<const D: usize> Var<D> {
    #[must_use]
    pub fn shape(self) -> [usize; D] {
        self.shape
    }

    #[must_use]
    pub fn id(self) -> Id {
        self.id
    }

    /// How many numbers it has.
    #[must_use]
    pub fn size(self) -> usize {
        self.shape.iter().product()
    }

    /// The same numbers in another shape.
    ///
    /// # Panics
    ///
    /// If the shape has more or fewer numbers.
    #[must_use]
    pub fn reshape<const E: usize>(self, shape: [usize; E]) -> Var<E> {
        let reshaped = Var { id: self.id, shape };
        assert_eq!(self.size(), reshaped.size(), "{:?} as {shape:?}", self.shape);
        reshaped
    }
}

/// The values of one pass, and how gradients go back through them.
pub struct Tape<'a> {
    pool: &'a mut Pool,
    values: Vec<Value<'a>>,
    gradients: Vec<Slot<'a>>,
    steps: Vec<Step<'a>>,
}

enum Value<'a> {
    Borrowed(&'a [f32]),
    Owned(Vec<f32>),
}

impl Value<'_> {
    fn numbers(&self) -> &[f32] {
        match self {
            Self::Borrowed(numbers) => numbers,
            Self::Owned(numbers) => numbers,
        }
    }
}

/// Where the gradient of a value goes.
enum Slot<'a> {
    /// Nowhere: it depends on no parameter.
    Constant,
    /// Into the caller's memory.
    Param { target: &'a mut [f32], is_written: bool },
    /// Into a buffer, from the first operation that has something for it on.
    Inner(Option<Vec<f32>>),
}

type Back<'a> = Box<dyn FnOnce(&mut Backward<'_, 'a>, &mut [f32]) + 'a>;

struct Step<'a> {
    output: Id,
    back: Back<'a>,
}

impl<'a> Tape<'a> {
    #[must_use]
    pub fn new(pool: &'a mut Pool) -> Self {
        Self { pool, values: Vec::new(), gradients: Vec::new(), steps: Vec::new() }
    }

    /// Numbers without a gradient.
    ///
    /// # Panics
    ///
    /// If there are more or fewer than the shape says.
    pub fn constant<const D: usize>(&mut self, shape: [usize; D], values: &'a [f32]) -> Var<D> {
        self.push(shape, Value::Borrowed(values), Slot::Constant)
    }

    /// A constant that `fill` computes; it must write every number.
    pub fn computed<const D: usize>(
        &mut self,
        shape: [usize; D],
        fill: impl FnOnce(&mut [f32]),
    ) -> Var<D> {
        let mut values = self.pool.take(shape.iter().product());
        fill(&mut values);
        self.push(shape, Value::Owned(values), Slot::Constant)
    }

    /// Numbers whose gradient `backward` writes into `gradient`, every number of it.
    ///
    /// # Panics
    ///
    /// If there are more or fewer than the shape says.
    pub fn param<const D: usize>(
        &mut self,
        shape: [usize; D],
        values: &'a [f32],
        gradient: &'a mut [f32],
    ) -> Var<D> {
        assert_eq!(values.len(), gradient.len(), "a gradient has the shape of its values");
        let slot = Slot::Param { target: gradient, is_written: false };
        self.push(shape, Value::Borrowed(values), slot)
    }

    /// The numbers of a value.
    #[must_use]
    pub fn value<const D: usize>(&self, var: Var<D>) -> &[f32] {
        self.values[var.id.0].numbers()
    }

    /// Whether a value needs a gradient: it depends on a parameter.
    #[must_use]
    pub fn has_gradient(&self, id: Id) -> bool {
        !matches!(self.gradients[id.0], Slot::Constant)
    }

    /// A buffer to compute a value in; see [`Pool::take`].
    #[must_use]
    pub fn buffer(&mut self, len: usize) -> Vec<f32> {
        self.pool.take(len)
    }

    /// Adds the result of an operation on `inputs`.
    ///
    /// `back` gets the gradient of the loss by `values`, which it may overwrite, and writes those
    /// of its inputs. It is not called when the loss does not depend on the result, and dropped
    /// when no input has a gradient.
    ///
    /// # Panics
    ///
    /// If there are more or fewer `values` than the shape says.
    pub fn record<const D: usize>(
        &mut self,
        shape: [usize; D],
        values: Vec<f32>,
        inputs: &[Id],
        back: impl FnOnce(&mut Backward<'_, 'a>, &mut [f32]) + 'a,
    ) -> Var<D> {
        if inputs.iter().any(|id| self.has_gradient(*id)) {
            let var = self.push(shape, Value::Owned(values), Slot::Inner(None));
            self.steps.push(Step { output: var.id, back: Box::new(back) });
            var
        } else {
            self.push(shape, Value::Owned(values), Slot::Constant)
        }
    }

    fn push<const D: usize>(
        &mut self,
        shape: [usize; D],
        values: Value<'a>,
        slot: Slot<'a>,
    ) -> Var<D> {
        let var = Var { id: Id(self.values.len()), shape };
        assert_eq!(values.numbers().len(), var.size(), "the numbers of a value {shape:?}");
        self.values.push(values);
        self.gradients.push(slot);
        var
    }

    /// Writes the gradient of `loss` by every parameter: zeros where it does not depend on one.
    pub fn backward(mut self, loss: Var<0>) {
        let steps = std::mem::take(&mut self.steps);
        let mut backward = Backward {
            values: &self.values,
            gradients: &mut self.gradients,
            pool: self.pool,
            output: loss.id,
        };
        if !matches!(backward.gradients[loss.id.0], Slot::Constant) {
            backward.write(loss, |gradient| gradient.fill(1.0));
        }
        for Step { output, back } in steps.into_iter().rev() {
            let Slot::Inner(gradient) = &mut backward.gradients[output.0] else { continue };
            if let Some(mut gradient) = gradient.take() {
                backward.output = output;
                back(&mut backward, &mut gradient);
                backward.pool.give(gradient);
            }
        }
        for slot in &mut self.gradients {
            if let Slot::Param { target, is_written: false } = slot {
                target.fill(0.0);
            }
        }
    }
}

impl Drop for Tape<'_> {
    fn drop(&mut self) {
        for value in self.values.drain(..) {
            if let Value::Owned(numbers) = value {
                self.pool.give(numbers);
            }
        }
        for slot in self.gradients.drain(..) {
            if let Slot::Inner(Some(gradient)) = slot {
                self.pool.give(gradient);
            }
        }
    }
}

/// What an operation sees on the way back.
pub struct Backward<'t, 'a> {
    values: &'t [Value<'a>],
    gradients: &'t mut [Slot<'a>],
    pool: &'t mut Pool,
    output: Id,
}

impl<'t> Backward<'t, '_> {
    /// The numbers of a value.
    #[must_use]
    pub fn value<const D: usize>(&self, var: Var<D>) -> &'t [f32] {
        self.values[var.id.0].numbers()
    }

    /// The numbers of the operation's result.
    #[must_use]
    pub fn output(&self) -> &'t [f32] {
        self.values[self.output.0].numbers()
    }

    /// Where buffers come from and go back to.
    pub fn pool(&mut self) -> &mut Pool {
        self.pool
    }

    /// Whether a value needs a gradient.
    #[must_use]
    pub fn has_gradient(&self, id: Id) -> bool {
        !matches!(self.gradients[id.0], Slot::Constant)
    }

    /// Lets `gradient` write an operation's share of the gradient of an input, every number of it.
    /// Shares of several operations are added. Not called if the input needs no gradient.
    pub fn write<const D: usize>(&mut self, var: Var<D>, gradient: impl FnOnce(&mut [f32])) {
        let target: &mut [f32] = match &mut self.gradients[var.id.0] {
            Slot::Constant => return,
            Slot::Param { target, is_written: is_written @ false } => {
                *is_written = true;
                return gradient(target);
            }
            Slot::Inner(slot @ None) => {
                return gradient(slot.insert(self.pool.take(var.size())));
            }
            Slot::Param { target, is_written: true } => target,
            Slot::Inner(Some(target)) => target,
        };
        let mut share = self.pool.take(var.size());
        gradient(&mut share);
        target.iter_mut().zip(&share).for_each(|(sum, share)| *sum += share);
        self.pool.give(share);
    }
}

#[cfg(test)]
mod tests;
