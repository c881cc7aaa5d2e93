// SPDX-License-Identifier: Apache-2.0
//! Shares of jobs and queues compared with each other, and Jain's index of fairness.

use std::cmp::Ordering;

use crate::board::{Board, JobIx};
use crate::resources::Resources;
use crate::snapshot::{Counts, QueueId};

/// How the size of a job is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Measure {
    /// Its dominant share of the cluster over its weight.
    Share,
    /// Its position between its minimum and its maximum (EDL).
    Fulfillment,
}

/// The size of a job with `counts`.
#[must_use]
pub fn level(board: &Board<'_>, job: JobIx, counts: Counts, measure: Measure) -> f64 {
    let spec = board.jobs[job].job;
    match measure {
        Measure::Share => {
            spec.resources(counts).dominant_share(board.total) / f64::from(spec.weight.max(1))
        }
        Measure::Fulfillment => {
            let worker = &spec.roles.worker;
            let span = worker.max.saturating_sub(worker.min);
            match span {
                0 => 1.0,
                _ => f64::from(counts.worker.saturating_sub(worker.min)) / f64::from(span),
            }
        }
    }
}

/// The size of a queue that uses `used`.
#[must_use]
pub fn queue_level(board: &Board<'_>, queue: QueueId, used: Resources) -> f64 {
    let weight = board.queues.get(&queue).map_or(1, |one| one.queue.weight.max(1));
    used.dominant_share(board.total) / f64::from(weight)
}

/// Whether moving a worker from `rich` to `poor` is fair: afterwards, the giver still has at least as
/// much as the taker.
#[must_use]
pub fn is_fairer(board: &Board<'_>, rich: JobIx, poor: JobIx, measure: Measure) -> bool {
    let (giver, taker) = (&board.jobs[rich], &board.jobs[poor]);
    let (from, to) = (giver.job.queue, taker.job.queue);
    let (given, taken) = (giver.job.roles.worker.shape, taker.job.roles.worker.shape);
    if from != to && measure == Measure::Share {
        let used = |queue: QueueId| board.queues.get(&queue).map_or(Resources::ZERO, |q| q.used);
        let after_from = queue_level(board, from, used(from).saturating_sub(given));
        let after_to = queue_level(board, to, used(to) + taken);
        return at_least(after_from, after_to);
    }
    let less = Counts { worker: giver.counts.worker - 1, ..giver.counts };
    let more = Counts { worker: taker.counts.worker + 1, ..taker.counts };
    at_least(level(board, rich, less, measure), level(board, poor, more, measure))
}

/// Jain's index: 1 when all are equal, 1/n when one has everything.
#[must_use]
pub fn jain(shares: &[f64]) -> f64 {
    let sum: f64 = shares.iter().sum();
    let squares: f64 = shares.iter().map(|share| share * share).sum();
    if squares > 0.0 { sum * sum / (shares.len() as f64 * squares) } else { 1.0 }
}

/// A totally ordered number; never NaN.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OrderedF64(pub f64);

impl Eq for OrderedF64 {}

impl PartialOrd for OrderedF64 {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for OrderedF64 {
    fn cmp(&self, other: &Self) -> Ordering {
        self.0.total_cmp(&other.0)
    }
}

/// Ignores rounding differences between sums in different orders.
fn at_least(a: f64, b: f64) -> bool {
    a >= b * (1.0 - 1e-9)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jain_is_one_for_equals_and_small_for_a_monopoly() {
        assert!((jain(&[3.0, 3.0, 3.0]) - 1.0).abs() < 1e-12);
        assert!((jain(&[1.0, 0.0, 0.0, 0.0]) - 0.25).abs() < 1e-12);
        assert!((jain(&[]) - 1.0).abs() < 1e-12);
    }
}
