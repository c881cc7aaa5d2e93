// SPDX-License-Identifier: Apache-2.0
//! The lanes of one step through the model, added up in the tree's order.

use std::hash::Hasher as _;

use edl_core::batch::BatchPlan;
use edl_core::id::WorldId;
use edl_core::lanes::{Slot, nodes_within, slot};
use edl_core::member::{Failure, Step};
use edl_core::model::ModelSpec;
use edl_core::optimizer::{Clip, OptimizerKind};
use edl_core::rng;
use edl_core::spec::{AllreduceDtype, JobSpec};
use edl_core::upcoming::{Upcoming, lane_seed};
use edl_net::mesh::round_to_bf16;
use edl_tensor::model::{Error, Gradient, Inputs, Mean, Memory, Model, is_finite};
use edl_tensor::push::Lane;
use edl_tensor::{clip, double};
use twox_hash::XxHash3_64;

use super::tables::{FirstRows, Tables};
use crate::feed::Decoded;
use crate::train::other_shape;

/// The probe of a lane whose loss or gradient is not finite.
const NONFINITE_PROBE: u64 = 1;

/// Stands for a lane in the seed of a step that the training script takes: no lane has this number.
const STEP_SEED: u64 = u64::MAX;

/// The model with its buffers.
pub(super) struct Lanes {
    model: Box<dyn Model>,
    seed: u64,
    plan: BatchPlan,
    num_epochs: u32,
    dtype: AllreduceDtype,
    gradient: Gradient,
    tables: Tables,
    /// With tables, each lane is clipped: no process sees the norm of the whole gradient.
    clip: Option<Clip>,
    summed: Vec<f32>,
    /// For sums that must be complete before they are added to another, the outermost first.
    sums: Vec<Vec<f32>>,
    rounded: Vec<f32>,
    /// Of every step, with or without records.
    n_lanes: u32,
    /// The places at the start of the gradient that hold numbers of 64 bits.
    n_double: usize,
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
        (spec, plan): (&JobSpec, &BatchPlan),
        tables: Tables,
        clip: Option<Clip>,
    ) -> Self {
        // Models write into it; one that keeps its pieces to itself leaves it untouched.
        let dense = vec![0.0; model.spec().dense_len()];
        let gradient = Gradient { dense, rows: vec![Vec::new(); model.spec().tables.len()] };
        Self {
            n_double: model.spec().n_double_places(),
            model,
            seed: spec.seed,
            plan: plan.clone(),
            num_epochs: spec.num_epochs,
            dtype: spec.allreduce_dtype,
            gradient,
            tables,
            clip,
            summed: Vec::new(),
            sums: Vec::new(),
            rounded: Vec::new(),
            n_lanes: spec.n_lanes(),
        }
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

    /// Has the training script take a step by the mean gradient of all lanes.
    pub(super) fn step(
        &mut self,
        step: &Step,
        mean: Mean<'_>,
        dense: &mut [f32],
    ) -> Result<(), Failure> {
        self.model.at(step.number, step.is_leader());
        let batch = step.batch;
        let seed = rng::key(&[self.seed, batch.epoch.into(), batch.index.into(), STEP_SEED]);
        let stepped = self.model.step(mean, seed, dense);
        stepped.map_err(|error| match error {
            Error::Quit => Failure::Quit,
            Error::Column { .. } | Error::Record { .. } | Error::NonFinite(_) | Error::Other(_) => {
                Failure::Failed(format!("{error} (the step of batch {batch})"))
            }
        })
    }

    /// The state of the training script after the last step.
    pub(super) fn state(&mut self) -> Result<Vec<u8>, String> {
        let state = self.model.state();
        state.map_err(|error| format!("cannot get the state of the training script: {error}"))
    }

    pub(super) fn load_state(&mut self, state: &[u8]) -> Result<(), String> {
        let loaded = self.model.load_state(state);
        loaded.map_err(|error| format!("cannot load the state of the training script: {error}"))
    }

    /// Passes the last parameters, those after `step` steps, to the model.
    pub(super) fn finish(&mut self, step: u64, is_leader: bool, dense: &[f32]) {
        self.model.at(step, is_leader);
        self.model.finish(dense);
    }

    /// Runs `pass` on records with these parameters, which are those after `step` steps.
    pub(super) fn pass<R>(
        &mut self,
        records: &Decoded,
        (step, dense): (u64, &[f32]),
        pass: impl FnOnce(&mut dyn Model, Inputs<'_>) -> R,
    ) -> Result<R, Failure> {
        self.tables.fetch(&*self.model, &records.batch, step)?;
        let inputs = Inputs { batch: &records.batch, dense, rows: &self.tables.rows };
        Ok(pass(&mut *self.model, inputs))
    }

    /// Trains a lane and adds it to the sums of the nodes that this member owns, one buffer per
    /// node. Lanes come in order. Rows are read from the servers, which get their gradients.
    pub(super) fn add(
        &mut self,
        step: &Step,
        (lane, dense): (u32, &[f32]),
        records: &Decoded,
        buffers: Vec<&mut [f32]>,
    ) -> Result<(), Failure> {
        self.tables.fetch(&*self.model, &records.batch, step.number)?;
        let nodes = nodes_within(step.n_active, &step.mine).into_iter().zip(buffers);
        let mut nodes = nodes.filter(|(node, _)| node.contains(&lane));
        let (node, out) = nodes.next().expect("a member owns its lanes");
        let slot = slot(&node, lane);
        self.add_at(slot, step, (lane, dense), records, out)?;
        self.complete(slot, out);
        if self.tables.is_empty() {
            return Ok(());
        }
        let n_records = u32::try_from(records.batch.len()).expect("a lane has a 32-bit size");
        let lane = self.lane_of(step, lane);
        self.tables.push((step.batch, lane), n_records, &mut self.gradient.rows)
    }

    fn add_at(
        &mut self,
        slot: Slot,
        step: &Step,
        lane: (u32, &[f32]),
        records: &Decoded,
        out: &mut [f32],
    ) -> Result<(), Failure> {
        let put = if slot.is_first { Put::First } else { Put::Add };
        if slot.depth == 0 {
            return self.lane(step, lane, records, out, put);
        }
        self.sums.resize_with(self.sums.len().max(slot.depth), Vec::new);
        let mut sum = std::mem::take(&mut self.sums[slot.depth - 1]);
        sum.resize(out.len(), 0.0);
        let added = self.lane(step, lane, records, &mut sum, put);
        self.sums[slot.depth - 1] = sum;
        added
    }

    /// Adds sums that are complete to those around them, the innermost first.
    fn complete(&mut self, slot: Slot, out: &mut [f32]) {
        for depth in (slot.depth - slot.n_complete..slot.depth).rev() {
            let (around, complete) = self.sums.split_at_mut(depth);
            let sum = around.last_mut().map_or(&mut *out, Vec::as_mut_slice);
            let (doubles, singles) = sum.split_at_mut(self.n_double);
            let (terms, others) = complete[0].split_at(self.n_double);
            double::each_with(doubles, terms, |sum, term| sum + term);
            singles.iter_mut().zip(others).for_each(|(sum, number)| *sum += number);
        }
    }

    /// A lane as the servers know it.
    fn lane_of(&self, step: &Step, number: u32) -> Lane {
        Lane { world: step.world, number, of: self.n_lanes }
    }

    /// Tells the servers that a lane has no records in this step.
    pub(super) fn skip(&mut self, step: &Step, lane: u32) -> Result<(), Failure> {
        let lane = self.lane_of(step, lane);
        self.tables.push_nothing(step.batch, lane)
    }

    /// Trains a step that has one lane, whose value is its mean gradient: `pieces` finds it where
    /// the model made it. Returns the loss.
    pub(super) fn alone(
        &mut self,
        step: &Step,
        dense: &[f32],
        records: &Decoded,
    ) -> Result<f32, Failure> {
        assert_eq!(
            (step.n_active, self.dtype),
            (1, AllreduceDtype::F32),
            "nothing to add or round"
        );
        self.train(step, (0, dense), records)
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
    /// all lanes divided by all records is the mean; so is its loss, after the gradient.
    /// A lane that is alone is the mean already, and is not multiplied.
    fn lane(
        &mut self,
        step: &Step,
        lane: (u32, &[f32]),
        records: &Decoded,
        out: &mut [f32],
        put: Put,
    ) -> Result<(), Failure> {
        let loss = self.train(step, lane, records)?;
        self.tables.sum(&mut self.gradient, &mut self.summed);
        if let Some(limit) = self.clip {
            clip::clip(&mut self.gradient, self.model.spec(), limit);
        }
        let weight = weight(step.n_active, records.batch.len());
        if self.dtype == AllreduceDtype::F32 {
            put_all((self.pieces(), self.n_double), loss, weight, out, put);
            return Ok(());
        }
        // What is rounded is what a lane that travels by itself would be.
        let mut rounded = std::mem::take(&mut self.rounded);
        rounded.resize(out.len(), 0.0);
        put_all((self.pieces(), 0), loss, weight, &mut rounded, Put::First);
        round_to_bf16(&mut rounded);
        let (last, numbers) = rounded.split_last().expect("the loss rides along");
        put_all((vec![numbers], 0), *last, 1.0, out, put);
        self.rounded = rounded;
        Ok(())
    }

    /// Leaves the lane's gradient with the model; returns its loss.
    fn train(
        &mut self,
        step: &Step,
        (lane, dense): (u32, &[f32]),
        records: &Decoded,
    ) -> Result<f32, Failure> {
        let batch = step.batch;
        self.pass_lane(step, (lane, dense), records).map_err(|error| {
            let text = format!("{error} (batch {batch}, lane {lane}: {})", records.describe());
            match error {
                Error::Quit => Failure::Quit,
                Error::NonFinite(_) => Failure::NonFinite(text),
                Error::Column { .. } | Error::Record { .. } | Error::Other(_) => {
                    Failure::Failed(text)
                }
            }
        })
    }

    fn pass_lane(
        &mut self,
        step: &Step,
        (lane, dense): (u32, &[f32]),
        records: &Decoded,
    ) -> Result<f32, Error> {
        self.model.upcoming(self.upcoming(step, lane));
        let rows = &self.tables.rows;
        for (grads, rows) in self.gradient.rows.iter_mut().zip(rows) {
            grads.resize(rows.len(), 0.0);
        }
        let inputs = Inputs { batch: &records.batch, dense, rows };
        let (seed, gradient) = (lane_seed(self.seed, step.batch, lane), &mut self.gradient);
        self.model.at(step.number, step.is_leader());
        let outcome = match self.tables.is_empty() {
            true => self.model.train_in_place(inputs, seed, gradient)?,
            // Rows and the dense part are clipped together, so both must be in one place.
            false => self.model.train(inputs, seed, gradient)?,
        };
        let lens = |rows: &[Vec<f32>]| rows.iter().map(Vec::len).collect::<Vec<_>>();
        let rows_fit = lens(&self.gradient.rows) == lens(rows);
        let n_numbers: usize = self.pieces().iter().map(|piece| piece.len()).sum();
        if n_numbers != dense.len() || !rows_fit {
            return Err(other_shape());
        }
        if !outcome.loss.is_finite() {
            return Err(Error::NonFinite("loss"));
        }
        if let OptimizerKind::Script { nonfinite: true } = self.spec().optimizer.kind {
            return Ok(outcome.loss);
        }
        let mut pieces = split(self.pieces(), self.n_double);
        pieces.extend(self.gradient.rows.iter().map(|rows| (&rows[..0], rows.as_slice())));
        let is_finite =
            |(doubles, singles): (&[f32], &[f32])| double::is_finite(doubles) && is_finite(singles);
        if pieces.into_iter().all(is_finite) {
            Ok(outcome.loss)
        } else {
            Err(Error::NonFinite("gradient"))
        }
    }

    /// What this member trains after a lane, as long as the world stays as it is.
    fn upcoming(&self, step: &Step, lane: u32) -> Upcoming {
        if step.world == WorldId(0) {
            return Upcoming::Unknown; // A probe.
        }
        Upcoming::Lanes {
            plan: self.plan.clone(),
            n_lanes: self.n_lanes,
            num_epochs: self.num_epochs,
            step: step.number,
            lane,
            mine: step.mine.clone(),
        }
    }

    /// A hash of the bits that this machine computes for one lane: where it differs between two
    /// workers, their sums would depend on which of them computed it. `first` creates rows of tables.
    pub(super) fn probe(
        &mut self,
        step: &Step,
        dense: &[f32],
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
        let trained =
            invented.and_then(|()| self.lane(step, (0, dense), records, &mut out, Put::First));
        self.dtype = dtype;
        match trained {
            Ok(()) => {
                out.extend(self.gradient.rows.iter().flatten());
                Ok(hash(&[&out]))
            }
            // This is no property of the machine; the step that trains the lane reports it.
            Err(Failure::NonFinite(_)) => Ok(NONFINITE_PROBE),
            Err(
                Failure::Failed(error)
                | Failure::Servers(error)
                | Failure::OtherStep(error)
                | Failure::Lost { error, .. },
            ) => Err(error),
            Err(Failure::Cancelled) => Err("interrupted".into()),
            Err(Failure::Quit) => Err(Error::Quit.to_string()),
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

/// Clips a mean gradient, at whose end the loss is.
pub(super) fn clip_mean(mean: &mut Vec<f32>, model: &ModelSpec, limit: Clip) {
    let mut gradient = Gradient { dense: std::mem::take(mean), rows: Vec::new() };
    let loss = gradient.dense.pop();
    clip::clip(&mut gradient, model, limit);
    *mean = gradient.dense;
    mean.extend(loss);
}

/// Divides the sum of all lanes, whose first places hold numbers of 64 bits.
pub(super) fn divide(sum: &mut [f32], n_double: usize, divisor: f32) {
    let (doubles, singles) = sum.split_at_mut(n_double);
    double::each(doubles, |number| number / f64::from(divisor));
    singles.iter_mut().for_each(|number| *number /= divisor);
}

/// Splits each piece into places of numbers of 64 bits, of which there are `n_double` at the start,
/// and those of 32.
fn split(pieces: Vec<&[f32]>, mut n_double: usize) -> Vec<(&[f32], &[f32])> {
    let pieces = pieces.into_iter().map(|piece| {
        let (doubles, singles) = piece.split_at(n_double.min(piece.len()));
        n_double -= doubles.len();
        (doubles, singles)
    });
    pieces.collect()
}

/// Puts a gradient, with places of 64-bit numbers at its start, and the loss behind it, times
/// `weight`, into `out` or adds them to it.
fn put_all(
    (pieces, n_double): (Vec<&[f32]>, usize),
    loss: f32,
    weight: f32,
    out: &mut [f32],
    put: Put,
) {
    let loss = std::slice::from_ref(&loss);
    let mut rest = out;
    for (doubles, singles) in split(pieces, n_double).into_iter().chain([(&loss[..0], loss)]) {
        let (sums, behind) = rest.split_at_mut(doubles.len());
        let wide = f64::from(weight);
        match put {
            Put::First => double::each_with(sums, doubles, |_, number| number * wide),
            Put::Add => double::each_with(sums, doubles, |sum, number| sum + number * wide),
        }
        let (sums, behind) = behind.split_at_mut(singles.len());
        let pairs = sums.iter_mut().zip(singles);
        match put {
            Put::First => pairs.for_each(|(sum, number)| *sum = number * weight),
            Put::Add => pairs.for_each(|(sum, number)| *sum += number * weight),
        }
        rest = behind;
    }
    assert!(rest.is_empty(), "a lane is as long as its sum");
}

/// Equal for equal bits, regardless of how they are split into pieces.
pub(super) fn hash(pieces: &[&[f32]]) -> u64 {
    let mut hasher = XxHash3_64::new();
    pieces.iter().for_each(|piece| hasher.write(bytemuck::cast_slice(piece)));
    hasher.finish()
}
