// SPDX-License-Identifier: Apache-2.0
//! One partition's segment of the flat dense vector, with its optimizer slots.

use std::ops::Range;

use edl_core::model::{Init, ModelSpec, Rule};

use crate::init::InitialValues;
use crate::optimizer::{MAX_SLOTS, Optimizer, Update};

/// Weights of a segment, and as many numbers in each slot.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Dense {
    pub weights: Vec<f32>,
    /// Slots that the optimizer does not keep are empty.
    pub slots: [Vec<f32>; MAX_SLOTS],
}

/// A piece of a segment under one rule.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct RuleRange {
    range: Range<usize>,
    rule: Rule,
}

/// The rules of a segment, neighbours with the same rule joined.
pub(super) fn runs(model: &ModelSpec, segment: &Range<usize>) -> Vec<RuleRange> {
    let mut runs: Vec<RuleRange> = Vec::new();
    each_param(model, segment, |index, _, range| {
        let rule = model.params[index].rule;
        match runs.last_mut() {
            Some(last) if last.rule == rule => last.range.end = range.end,
            Some(_) | None => runs.push(RuleRange { range, rule }),
        }
    });
    runs
}

impl Dense {
    /// The segment before its first update.
    pub(super) fn new(
        model: &ModelSpec,
        segment: &Range<usize>,
        seed: u64,
        optimizer: &Optimizer,
    ) -> Self {
        let mut weights = vec![0.0; segment.len()];
        each_param(model, segment, |index, first, range| {
            let param = &model.params[index];
            InitialValues::param(param.init, seed, &param.name).fill(first, &mut weights[range]);
        });
        let mut dense = Self { weights, slots: Default::default() };
        dense.reset_slots(optimizer);
        dense
    }

    /// Takes the parameters that are given from the flat vector of all of them.
    pub(super) fn give(&mut self, model: &ModelSpec, segment: &Range<usize>, values: &[f32]) {
        let values = &values[segment.clone()];
        each_param(model, segment, |index, _, range| {
            if model.params[index].init == Init::Given {
                self.weights[range.clone()].copy_from_slice(&values[range]);
            }
        });
    }

    /// Gives every slot its initial value.
    pub(super) fn reset_slots(&mut self, optimizer: &Optimizer) {
        for (slot, numbers) in self.slots.iter_mut().enumerate() {
            numbers.clear();
            if slot < optimizer.n_slots() {
                numbers.resize(self.weights.len(), optimizer.initial(slot));
            }
        }
    }

    pub(super) fn apply(&mut self, update: &Update, runs: &[RuleRange], gradient: &[f32]) {
        let Self { weights, slots } = self;
        for RuleRange { range, rule } in runs {
            apply(update, *rule, weights, slots, range.clone(), &gradient[range.clone()]);
        }
    }

    /// Like `apply`, to weights that lie elsewhere, by the pieces of a gradient of all segments;
    /// this one begins at `first`.
    pub(super) fn apply_to(
        &mut self,
        weights: &mut [f32],
        update: &Update,
        runs: &[RuleRange],
        first: usize,
        gradient: &[&[f32]],
    ) {
        for RuleRange { range, rule } in runs {
            let (from, to) = (first + range.start, first + range.end);
            let mut start = 0;
            for piece in gradient {
                let end = start + piece.len();
                let part = from.max(start)..to.min(end);
                if part.start < part.end {
                    let numbers = &piece[part.start - start..part.end - start];
                    let place = part.start - first..part.end - first;
                    apply(update, *rule, weights, &mut self.slots, place, numbers);
                }
                start = end;
            }
        }
    }

    /// Copies another segment, whose weights may lie elsewhere, reusing this one's memory.
    pub(crate) fn copy_from(&mut self, other: &Self, weights: &[f32]) {
        self.weights.clear();
        self.weights.extend_from_slice(weights);
        for (slot, source) in self.slots.iter_mut().zip(&other.slots) {
            slot.clone_from(source);
        }
    }
}

/// Changes the numbers of `range` under one rule. Each depends on its own gradient alone, so it does
/// not matter how a segment is split.
fn apply(
    update: &Update,
    rule: Rule,
    weights: &mut [f32],
    slots: &mut [Vec<f32>; MAX_SLOTS],
    range: Range<usize>,
    gradient: &[f32],
) {
    let weights = &mut weights[range.clone()];
    match rule {
        Rule::Trainable { decay } => {
            let slots = slots.each_mut().map(|slot| match slot.is_empty() {
                true => &mut [][..],
                false => &mut slot[range.clone()],
            });
            update.apply(weights, slots, gradient, decay);
        }
        Rule::MovingAverage => {
            for (weight, difference) in weights.iter_mut().zip(gradient) {
                *weight += difference;
            }
        }
    }
}

/// Visits the parameters that a segment overlaps: number of the parameter, its first element in the
/// segment, and the range within the segment.
fn each_param(
    model: &ModelSpec,
    segment: &Range<usize>,
    mut visit: impl FnMut(usize, usize, Range<usize>),
) {
    let mut start = 0;
    for (index, param) in model.params.iter().enumerate() {
        let end = start + param.len();
        let (first, last) = (start.max(segment.start), end.min(segment.end));
        if first < last {
            visit(index, first - start, first - segment.start..last - segment.start);
        }
        start = end;
    }
}
