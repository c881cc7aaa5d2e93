// SPDX-License-Identifier: Apache-2.0
//! The arithmetic: adds up one block of all nodes in the tree's order.

use edl_tensor::double;

use super::bf16;
use super::plan::SumStep;
use super::shm::Mapped;

/// Numbers that are added at once: a few strips stay in the first cache.
const STRIP: usize = 1024;

/// One node's numbers of the block.
#[derive(Clone, Copy)]
pub(super) enum Term<'a> {
    Floats(&'a [f32]),
    Halves(&'a [u16]),
    /// In a peer's memory, from this place on.
    Shared(&'a Mapped, usize),
}

/// Adds up blocks of one vector.
pub(super) struct Summer<'a> {
    pub(super) steps: &'a [SumStep],
    /// By node: whether it is a single lane that travels as 16 bits.
    pub(super) is_half: &'a [bool],
    pub(super) divisor: f32,
    /// Whether the result is rounded to 16 bits.
    pub(super) is_half_sum: bool,
    /// Places at the start of the block that hold numbers of 64 bits.
    pub(super) n_double: usize,
}

impl Summer<'_> {
    /// Adds up `terms`, divides, and writes the result to `out`, and to `copy` if there is one.
    pub(super) fn sum(&self, terms: &[Term<'_>], out: &mut [f32], mut copy: Option<&mut [f32]>) {
        let n_levels = 1 + self.steps.iter().map(|step| step.level()).max().unwrap_or(0);
        let mut levels = vec![[0.0_f32; STRIP]; n_levels + 1];
        let mut at = 0;
        while at < out.len() {
            let is_double = at < self.n_double;
            let end = if is_double { self.n_double } else { out.len() };
            let n = STRIP.min(end - at);
            if is_double {
                self.sum_doubles(terms, at, n, &mut levels);
            } else {
                self.sum_singles(terms, at, n, &mut levels);
            }
            // Sums stay in the first cache; the result is written once, and not read again.
            let sum = &levels[0][..n];
            out[at..at + n].copy_from_slice(sum);
            if let Some(copy) = &mut copy {
                copy[at..at + n].copy_from_slice(sum);
            }
            at += n;
        }
    }

    /// Leaves the result of `n` places in the first level.
    fn sum_singles(&self, terms: &[Term<'_>], at: usize, n: usize, levels: &mut [[f32; STRIP]]) {
        for step in self.steps {
            match *step {
                SumStep::Load { level, node } => {
                    terms[node].load(at, &mut levels[level][..n], self.is_half[node]);
                }
                SumStep::Add { level, node } => {
                    terms[node].add(at, &mut levels[level][..n], self.is_half[node]);
                }
                SumStep::Join { level } => {
                    let (below, above) = levels.split_at_mut(level + 1);
                    let above = &above[0][..n];
                    below[level][..n].iter_mut().zip(above).for_each(|(sum, term)| *sum += term);
                }
            }
        }
        let sum = &mut levels[0][..n];
        if self.is_half_sum {
            sum.iter_mut().for_each(|sum| *sum = bf16::round(*sum / self.divisor));
        } else {
            sum.iter_mut().for_each(|sum| *sum /= self.divisor);
        }
    }

    /// The same for numbers of 64 bits, which are never rounded to 16.
    fn sum_doubles(&self, terms: &[Term<'_>], at: usize, n: usize, levels: &mut [[f32; STRIP]]) {
        let add = |sum: f64, term: f64| sum + term;
        let mut copied = [0.0; STRIP];
        for step in self.steps {
            match *step {
                SumStep::Load { level, node } => {
                    terms[node].load(at, &mut levels[level][..n], false);
                }
                SumStep::Add { level, node } => {
                    terms[node].load(at, &mut copied[..n], false);
                    double::each_with(&mut levels[level][..n], &copied, add);
                }
                SumStep::Join { level } => {
                    let (below, above) = levels.split_at_mut(level + 1);
                    double::each_with(&mut below[level][..n], &above[0], add);
                }
            }
        }
        let divisor = f64::from(self.divisor);
        double::each(&mut levels[0][..n], |sum| sum / divisor);
    }
}

impl SumStep {
    fn level(self) -> usize {
        match self {
            Self::Load { level, .. } | Self::Add { level, .. } | Self::Join { level } => level,
        }
    }
}

impl Term<'_> {
    fn load(self, at: usize, out: &mut [f32], is_half: bool) {
        match self {
            Self::Floats(floats) => out.copy_from_slice(&floats[at..at + out.len()]),
            Self::Shared(map, start) => map.load(start + at, out),
            Self::Halves(halves) => {
                let halves = &halves[at..at + out.len()];
                out.iter_mut().zip(halves).for_each(|(out, half)| *out = bf16::to_f32(*half));
                return;
            }
        }
        if is_half {
            bf16::round_all(out);
        }
    }

    fn add(self, at: usize, out: &mut [f32], is_half: bool) {
        match self {
            Self::Floats(floats) => {
                let pairs = out.iter_mut().zip(&floats[at..]);
                if is_half {
                    pairs.for_each(|(sum, term)| *sum += bf16::round(*term));
                } else {
                    pairs.for_each(|(sum, term)| *sum += term);
                }
            }
            Self::Shared(map, start) => map.add(start + at, out, is_half),
            Self::Halves(halves) => {
                let halves = &halves[at..];
                out.iter_mut().zip(halves).for_each(|(sum, half)| *sum += bf16::to_f32(*half));
            }
        }
    }
}
