// SPDX-License-Identifier: Apache-2.0
//! The arithmetic: adds up one block of all nodes in the tree's order.

use super::plan::SumStep;
use super::shm::Mapped;
use super::{Dtype, bf16};

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
    pub(super) dtype: Dtype,
}

impl Summer<'_> {
    /// Adds up `terms`, divides, and writes the result to `out`, and to `copy` if there is one.
    pub(super) fn sum(&self, terms: &[Term<'_>], out: &mut [f32], mut copy: Option<&mut [f32]>) {
        let n_levels = 1 + self.steps.iter().map(|step| step.level()).max().unwrap_or(0);
        let mut levels = vec![[0.0_f32; STRIP]; n_levels + 1];
        for (strip, out) in out.chunks_mut(STRIP).enumerate() {
            let at = strip * STRIP;
            let n = out.len();
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
                        below[level][..n]
                            .iter_mut()
                            .zip(above)
                            .for_each(|(sum, term)| *sum += term);
                    }
                }
            }
            // Sums stay in the first cache; the result is written once, and not read again.
            let sum = &mut levels[0][..n];
            match self.dtype {
                Dtype::F32 => sum.iter_mut().for_each(|sum| *sum /= self.divisor),
                Dtype::Bf16 => {
                    sum.iter_mut().for_each(|sum| *sum = bf16::round(*sum / self.divisor));
                }
            }
            out.copy_from_slice(sum);
            if let Some(copy) = &mut copy {
                copy[at..at + n].copy_from_slice(sum);
            }
        }
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
