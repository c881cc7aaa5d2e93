// SPDX-License-Identifier: Apache-2.0
//! `PaddlePaddle` EDL's rules: more workers for the least fulfilled job while the cluster is below
//! its load, fewer for the most fulfilled one while it is above.
//!
//! There are two versions. The fixed one runs on the board: growing and shrinking share one limit,
//! nodes are counted correctly, the order follows what is *planned*, gangs are whole, and resized jobs
//! are left alone for a while. The published one, with its faults, reproduces the experiment.

use crate::board::Board;
use crate::fairness::Measure;
use crate::growth::Rules;
use crate::plan::{Reason, Waiting};
use crate::policy::elastic_fair;
use crate::resources::Resources;
use crate::snapshot::Counts;

/// Rounds after which the published rules count as endless.
const MOST_ROUNDS: u32 = 10_000;

pub(crate) fn decide(board: &mut Board<'_>) {
    let rules = Rules { measure: Measure::Fulfillment, has_hysteresis: true };
    board.options.load_band_permille = 0;
    elastic_fair::share_out(board, rules);
}

/// Numbers of workers by the published rules; Kubernetes chooses nodes and victims.
pub(crate) fn decide_as_published(board: &mut Board<'_>) {
    let mut totals = ClusterTotals::of(board);
    let mut trainers: Vec<(usize, Trainer)> = Vec::new();
    let is_pending = |counts: Counts, running: Counts| counts.worker == 0 || running.worker == 0;
    let has_pending = board.jobs.iter().any(|s| is_pending(s.job.counts(), s.job.running));
    for (job, entry) in board.jobs.iter_mut().enumerate() {
        let counts = entry.job.counts();
        if let Some(fault) = entry.job.fault() {
            entry.waiting = Some(Waiting::Faulty(fault));
            continue;
        }
        // All pods of a new job's minimum are created, whether they fit or not.
        if counts.sum() == 0 {
            entry.wanted = Some(entry.job.gang());
            entry.reasons.push(Reason::Starts);
            entry.waiting = Some(Waiting::LeftToKubernetes);
            continue;
        }
        let is_stable = counts.worker == entry.job.running.worker;
        if entry.job.is_elastic() && (is_stable || has_pending) {
            trainers.push((job, Trainer::new(entry.job, counts.worker)));
        }
    }
    trainers.sort_by(|(_, a), (_, b)| a.order(b));
    let mut only: Vec<Trainer> = trainers.iter().map(|(_, trainer)| *trainer).collect();
    let load = board.options.max_load_permille;
    // An endless dry run hung the published controller; here it decides nothing.
    if totals.dry_run(&mut only, load).is_err() {
        return;
    }
    for ((job, before), after) in trainers.iter().zip(&only) {
        let planned = u32::try_from(after.planned).unwrap_or(0);
        if after.planned == before.planned {
            continue;
        }
        let counts = board.jobs[*job].job.counts();
        board.jobs[*job].wanted = Some(Counts { worker: planned, ..counts });
        let is_more = after.planned > before.planned;
        board.because(*job, if is_more { Reason::LeastFulfilled } else { Reason::MostFulfilled });
    }
}

/// What the published controller knew about the cluster: sums, and idle CPU and memory by node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterTotals {
    pub total: Resources,
    pub asked: Resources,
    pub idle: Vec<Resources>,
}

/// What it knew about a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trainer {
    pub min: i64,
    pub max: i64,
    /// Planned workers.
    pub planned: i64,
    pub shape: Resources,
    current: i64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    Up,
    Down,
}

/// The dry run never ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the dry run does not terminate: it alternates between scaling up and scaling down")]
pub struct Endless;

impl Trainer {
    #[must_use]
    pub fn of(min: i64, max: i64, current: i64, shape: Resources) -> Self {
        Self { min, max, planned: current, shape, current }
    }

    fn new(job: &crate::snapshot::Job, n_workers: u32) -> Self {
        let worker = &job.roles.worker;
        Self::of(worker.min.into(), worker.max.into(), n_workers.into(), worker.shape)
    }

    /// The job's current position between its minimum and maximum; the plan is ignored.
    #[must_use]
    pub fn fulfillment(&self) -> f64 {
        match self.max - self.min {
            0 => 1.0,
            span => (self.current - self.min) as f64 / span as f64,
        }
    }

    /// The least fulfilled first, then the least demanding.
    #[must_use]
    pub fn order(&self, other: &Self) -> std::cmp::Ordering {
        let by_size = |one: &Self| (one.shape.gpu, one.shape.cpu_milli, one.shape.memory_mib);
        let by_fulfillment = self.fulfillment().total_cmp(&other.fulfillment());
        by_fulfillment.then_with(|| by_size(self).cmp(&by_size(other)))
    }
}

impl ClusterTotals {
    fn of(board: &Board<'_>) -> Self {
        let unplaced = board.jobs.iter().map(|entry| entry.job.resources(entry.job.unplaced));
        let online = board.online.iter().map(|pods| pods.shape * u64::from(pods.n));
        let leaving = board.nodes.iter().map(|node| node.leaving);
        let idle = |node: usize| board.free(node).saturating_sub(board.nodes[node].leaving);
        Self {
            total: board.total,
            // Leaving pods still count, so more pods than necessary are removed.
            asked: board.asked + unplaced.sum() + online.sum() + leaving.sum(),
            idle: (0..board.nodes.len()).map(idle).collect(),
        }
    }

    /// Plans for all jobs: up in order, down against it, until nothing changes.
    /// Fails if it would never end, as the published code did with GPUs.
    pub fn dry_run(&mut self, trainers: &mut [Trainer], load_permille: u32) -> Result<(), Endless> {
        for _ in 0..MOST_ROUNDS {
            let mut has_changed = false;
            for trainer in trainers.iter_mut() {
                has_changed |= self.step(trainer, load_permille, Direction::Up) != 0;
            }
            for trainer in trainers.iter_mut().rev() {
                has_changed |= self.step(trainer, load_permille, Direction::Down) != 0;
            }
            if !has_changed {
                return Ok(());
            }
        }
        Err(Endless)
    }

    /// One step for one job: the change in workers, also applied to the totals and the trainer.
    pub fn step(&mut self, trainer: &mut Trainer, load_permille: u32, way: Direction) -> i64 {
        let more = match way {
            Direction::Down => self.down(trainer, load_permille),
            Direction::Up => {
                let (more, node) = self.up(trainer, load_permille);
                if let Some(node) = node.filter(|_| more > 0) {
                    // Published with the wrong sign: a node never fills.
                    self.idle[node] += trainer.shape * more.unsigned_abs();
                }
                more
            }
        };
        let change = trainer.shape * more.unsigned_abs();
        self.asked =
            if more >= 0 { self.asked + change } else { self.asked.saturating_sub(change) };
        trainer.planned += more;
        more
    }

    fn down(&self, trainer: &Trainer, load_permille: u32) -> i64 {
        if trainer.planned > trainer.max {
            return -1;
        }
        let line = self.total.permille(load_permille);
        let is_over = self.asked.gpu > line.gpu || self.asked.cpu_milli > line.cpu_milli;
        if is_over && trainer.planned > trainer.min { -1 } else { 0 }
    }

    fn up(&self, trainer: &Trainer, load_permille: u32) -> (i64, Option<usize>) {
        let Trainer { max, planned, shape, .. } = *trainer;
        if planned >= max {
            return (max - planned, None);
        }
        let free = self.total.saturating_sub(self.asked);
        if free.memory_mib <= shape.memory_mib {
            return (0, None);
        }
        let is_assignable = |idle: &Resources| {
            shape.cpu_milli <= idle.cpu_milli && shape.memory_mib <= idle.memory_mib
        };
        let Some(node) = self.idle.iter().position(is_assignable) else { return (0, None) };
        let line = self.total.permille(load_permille);
        let has_cpu = line.cpu_milli.saturating_sub(self.asked.cpu_milli) >= shape.cpu_milli;
        // CPUs are filled to the line, but GPUs to the last one: down then takes it away again.
        let has_gpu = shape.gpu == 0 || free.gpu >= shape.gpu;
        (i64::from(has_cpu && has_gpu), Some(node))
    }
}

#[cfg(test)]
mod tests;
