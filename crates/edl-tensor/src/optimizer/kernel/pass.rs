// SPDX-License-Identifier: Apache-2.0
//! The loops: plain passes over slices that the compiler vectorises.

use super::super::Slots;

/// A run of weights with all that a formula sees of each.
pub(in super::super) struct Pass<'a> {
    pub(in super::super) weights: &'a mut [f32],
    pub(in super::super) slots: Slots<'a>,
    pub(in super::super) gradient: &'a [f32],
    /// The factor of the weight that joins its gradient.
    pub(in super::super) l2: f32,
}

impl Pass<'_> {
    /// Calls `step(weight, gradient)` for each weight.
    pub(super) fn alone(self, step: impl Fn(&mut f32, f32)) {
        let Self { weights, gradient, l2, .. } = self;
        for (w, g) in weights.iter_mut().zip(gradient) {
            let g = g + l2 * *w;
            step(w, g);
        }
    }

    pub(super) fn with_one(self, step: impl Fn(&mut f32, &mut f32, f32)) {
        let Self { weights, slots: [a, ..], gradient, l2 } = self;
        for ((w, a), g) in weights.iter_mut().zip(a).zip(gradient) {
            let g = g + l2 * *w;
            step(w, a, g);
        }
    }

    pub(super) fn with_two(self, step: impl Fn(&mut f32, &mut f32, &mut f32, f32)) {
        let Self { weights, slots: [a, b, ..], gradient, l2 } = self;
        for (((w, a), b), g) in weights.iter_mut().zip(a).zip(b).zip(gradient) {
            let g = g + l2 * *w;
            step(w, a, b, g);
        }
    }

    pub(super) fn with_three(self, step: impl Fn(&mut f32, &mut f32, &mut f32, &mut f32, f32)) {
        let Self { weights, slots: [a, b, c], gradient, l2 } = self;
        for ((((w, a), b), c), g) in weights.iter_mut().zip(a).zip(b).zip(c).zip(gradient) {
            let g = g + l2 * *w;
            step(w, a, b, c, g);
        }
    }
}
