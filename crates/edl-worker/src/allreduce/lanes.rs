// SPDX-License-Identifier: Apache-2.0
//! The lanes of one step through the model, added up in the tree's order.

use std::hash::Hasher as _;

use edl_core::id::{BatchId, WorldId};
use edl_core::lanes::{Span, children};
use edl_core::model::ModelSpec;
use edl_core::optimizer::Clip;
use edl_core::rng;
use edl_core::spec::AllreduceDtype;
use edl_net::mesh::round_to_bf16;
use edl_tensor::clip;
use edl_tensor::model::{Error, Gradient, Inputs, Memory, Model};
use edl_tensor::push::Lane;
use twox_hash::XxHash3_64;

use super::inbox::Halt;
use super::tables::{FirstRows, Tables};
use crate::feed::Decoded;

/// The model with its buffers.
pub(super) struct Lanes {
    model: Box<dyn Model>,
    seed: u64,
    dtype: AllreduceDtype,
    gradient: Gradient,
    tables: Tables,
    /// With tables: what is made of a lane's gradient, of which nobody sees the whole sum.
    clip: Option<Clip>,
    summed: Vec<f32>,
    /// For sums that must be whole before they are added to another.
    spare: Vec<Vec<f32>>,
}

/// What the lanes of one step have in common.
#[derive(Clone, Copy)]
pub(super) struct Step<'a> {
    pub(super) batch: BatchId,
    /// Lanes that have records.
    pub(super) n_active: u32,
    /// The parameters before the step.
    pub(super) dense: &'a [f32],
    /// Steps before it.
    pub(super) number: u64,
    /// Who trains it; none for a probe.
    pub(super) world: WorldId,
    pub(super) n_lanes: u32,
}

impl Step<'_> {
    pub(super) fn lane(&self, number: u32) -> Lane {
        Lane { world: self.world, number, of: self.n_lanes }
    }
}

/// Whether a lane begins a sum or is added to one.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Put {
    First,
    Add,
}

impl Lanes {
    pub(super) fn new(
        model: Box<dyn Model>,
        seed: u64,
        dtype: AllreduceDtype,
        tables: Tables,
        clip: Option<Clip>,
    ) -> Self {
        // Models write into it; one that keeps its pieces to itself leaves it untouched.
        let dense = vec![0.0; model.spec().dense_len()];
        let gradient = Gradient { dense, rows: vec![Vec::new(); model.spec().tables.len()] };
        let (summed, spare) = (Vec::new(), Vec::new());
        Self { model, seed, dtype, gradient, tables, clip, summed, spare }
    }

    pub(super) fn tables(&mut self) -> &mut Tables {
        &mut self.tables
    }

    pub(super) fn spec(&self) -> &ModelSpec {
        self.model.spec()
    }

    /// How many numbers a lane yields: its gradient and its loss.
    pub(super) fn len(&self) -> usize {
        self.spec().dense_len() + 1
    }

    /// Memory for parameters, where the model reads them without a copy.
    pub(super) fn memory(&self) -> Box<dyn Memory> {
        self.model.memory()
    }

    /// Hands the last parameters to the model.
    pub(super) fn finish(&mut self, dense: &[f32]) {
        self.model.finish(dense);
    }

    /// Runs `pass` on records with these parameters, which are those after `step` steps.
    pub(super) fn pass<R>(
        &mut self,
        records: &Decoded,
        (step, dense): (u64, &[f32]),
        pass: impl FnOnce(&mut dyn Model, Inputs<'_>) -> R,
    ) -> Result<R, Halt> {
        self.tables.fetch(&*self.model, &records.batch, step)?;
        let inputs = Inputs { batch: &records.batch, dense, rows: &self.tables.rows };
        Ok(pass(&mut *self.model, inputs))
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
            return self.fetch_lane(step, node.start, &records(node.start)?, out, Put::First);
        };
        self.sum(step, &left, out, records)?;
        if right.len() == 1 {
            return self.fetch_lane(step, right.start, &records(right.start)?, out, Put::Add);
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

    /// Trains a lane on the rows that the servers hold, and tells them its row gradients.
    fn fetch_lane(
        &mut self,
        step: Step<'_>,
        lane: u32,
        records: &Decoded,
        out: &mut [f32],
        put: Put,
    ) -> Result<(), Halt> {
        self.tables.fetch(&*self.model, &records.batch, step.number)?;
        self.lane(step, lane, records, out, put)?;
        if self.tables.is_empty() {
            return Ok(());
        }
        let n_records = u32::try_from(records.batch.len()).expect("a lane has a 32-bit size");
        self.tables.push((step.batch, step.lane(lane)), n_records, &mut self.gradient.rows)
    }

    /// Trains a step that has one lane, whose value is its mean gradient: `pieces` finds it where
    /// the model made it. Returns the loss.
    pub(super) fn alone(&mut self, step: Step<'_>, records: &Decoded) -> Result<f32, Halt> {
        assert_eq!(
            (step.n_active, self.dtype),
            (1, AllreduceDtype::F32),
            "nothing to add or round"
        );
        self.train(step, 0, records)
    }

    /// The gradient of the last lane that was trained, until the next pass.
    pub(super) fn pieces(&self) -> Vec<&[f32]> {
        if self.tables.is_empty() {
            self.model.pieces(&self.gradient)
        } else {
            vec![&self.gradient.dense]
        }
    }

    /// Whether the mean of a single lane is what the model made, as it is.
    pub(super) fn is_plain(&self) -> bool {
        self.dtype == AllreduceDtype::F32 && self.tables.is_empty()
    }

    /// A lane's value is the gradient of its mean loss times its records, so that the sum over
    /// all lanes divided by all records is the mean; its loss likewise, behind the gradient.
    /// A lane that is alone is the mean already, and is not multiplied.
    fn lane(
        &mut self,
        step: Step<'_>,
        lane: u32,
        records: &Decoded,
        out: &mut [f32],
        put: Put,
    ) -> Result<(), Halt> {
        let loss = self.train(step, lane, records)?;
        self.tables.sum(&mut self.gradient, &mut self.summed);
        if let Some(limit) = self.clip {
            clip::clip(&mut self.gradient, self.model.spec(), limit);
        }
        let weight = weight(step.n_active, records.batch.len());
        if self.dtype == AllreduceDtype::F32 {
            put_all(self.pieces(), loss, weight, out, put);
            return Ok(());
        }
        // What is rounded is what a lane that travels by itself would be.
        let mut rounded = self.spare.pop().unwrap_or_default();
        rounded.resize(out.len(), 0.0);
        put_all(self.pieces(), loss, weight, &mut rounded, Put::First);
        round_to_bf16(&mut rounded);
        let (last, numbers) = rounded.split_last().expect("the loss rides along");
        put_all(vec![numbers], *last, 1.0, out, put);
        self.spare.push(rounded);
        Ok(())
    }

    /// Leaves the lane's gradient with the model; returns its loss.
    fn train(&mut self, step: Step<'_>, lane: u32, records: &Decoded) -> Result<f32, Halt> {
        let batch = step.batch;
        self.pass_lane(step, lane, records).map_err(|error| {
            Halt::Failed(format!("{error} (batch {batch}, lane {lane}: {})", records.describe()))
        })
    }

    fn pass_lane(&mut self, step: Step<'_>, lane: u32, records: &Decoded) -> Result<f32, Error> {
        let Step { batch, dense, .. } = step;
        let rows = &self.tables.rows;
        for (grads, rows) in self.gradient.rows.iter_mut().zip(rows) {
            grads.resize(rows.len(), 0.0);
        }
        let words = [self.seed, batch.epoch.into(), batch.index.into(), lane.into()];
        let inputs = Inputs { batch: &records.batch, dense, rows };
        let (seed, gradient) = (rng::key(&words), &mut self.gradient);
        let outcome = match self.tables.is_empty() {
            true => self.model.train_in_place(inputs, seed, gradient)?,
            // Rows and the dense part are clipped together, so both must be in one place.
            false => self.model.train(inputs, seed, gradient)?,
        };
        let lens = |rows: &[Vec<f32>]| rows.iter().map(Vec::len).collect::<Vec<_>>();
        let rows_fit = lens(&self.gradient.rows) == lens(rows);
        let n_numbers: usize = self.pieces().iter().map(|piece| piece.len()).sum();
        if n_numbers != dense.len() || !rows_fit {
            return Err(Error::Other(
                "the shape of the model's gradient differs from that of its inputs".into(),
            ));
        }
        if outcome.loss.is_finite() { Ok(outcome.loss) } else { Err(Error::NotANumber) }
    }

    /// A hash of the bits that this machine computes for one lane: where it differs between two
    /// workers, their sums would depend on who computed them. `first` makes rows of tables.
    pub(super) fn probe(
        &mut self,
        step: Step<'_>,
        records: &Decoded,
        first: FirstRows<'_>,
    ) -> Result<u64, String> {
        let mut out = vec![0.0; self.len()];
        // Rounded bits would hide others.
        let dtype = std::mem::take(&mut self.dtype);
        let has_tables = !self.tables.is_empty();
        let invented = match has_tables {
            true => self.tables.invent(&*self.model, &records.batch, first),
            false => Ok(()),
        };
        let trained = invented.and_then(|()| self.lane(step, 0, records, &mut out, Put::First));
        self.dtype = dtype;
        match trained {
            Ok(()) => {
                out.extend(self.gradient.rows.iter().flatten());
                Ok(hash(&[&out]))
            }
            Err(Halt::Failed(error) | Halt::Servers(error) | Halt::Torn(error)) => Err(error),
            Err(Halt::Interrupted | Halt::Died(_)) => Err("interrupted".into()),
        }
    }
}

/// What a lane counts for in the sum.
#[expect(clippy::cast_precision_loss, reason = "a lane has few records")]
fn weight(n_active: u32, n_records: usize) -> f32 {
    if n_active == 1 { 1.0 } else { n_records as f32 }
}

/// What the sum of all lanes is divided by.
pub(super) fn divisor(n_active: u32, n_records: u32) -> f32 {
    weight(n_active, n_records as usize)
}

/// Puts a gradient and the loss behind it, times `weight`, into `out` or adds them to it.
fn put_all(pieces: Vec<&[f32]>, loss: f32, weight: f32, out: &mut [f32], put: Put) {
    let loss = std::slice::from_ref(&loss);
    let mut rest = out;
    for piece in pieces.into_iter().chain([loss]) {
        let (sums, behind) = rest.split_at_mut(piece.len());
        let pairs = sums.iter_mut().zip(piece);
        match put {
            Put::First => pairs.for_each(|(sum, number)| *sum = number * weight),
            Put::Add => pairs.for_each(|(sum, number)| *sum += number * weight),
        }
        rest = behind;
    }
    assert!(rest.is_empty(), "a lane is as long as its sum");
}

/// Equal for equal bits, however they are cut into pieces.
pub(super) fn hash(pieces: &[&[f32]]) -> u64 {
    let mut hasher = XxHash3_64::new();
    pieces.iter().for_each(|piece| hasher.write(bytemuck::cast_slice(piece)));
    hasher.finish()
}
