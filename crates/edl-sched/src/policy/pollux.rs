// SPDX-License-Identifier: Apache-2.0
//! Pollux, for comparison: a genetic search over the workers of each job on each node, for the best
//! mean speed-up over an equal share.
//!
//! The published version has two objectives and keeps its population between rounds. This one has
//! the first objective, by which the published one chooses, and starts from the current placement.

use edl_core::rng::{Rng, key};

use crate::admission;
use crate::board::{Board, JobIx, NodeIx};
use crate::packing;
use crate::plan::{Reason, Waiting};
use crate::policy::elastic_fair;
use crate::quota;
use crate::resources::ResourceKind;
use crate::snapshot::{NodeState, Role};
use crate::speed::Speed;

const POPULATION: usize = 64;
const GENERATIONS: usize = 60;
/// The assumed cost of a restart, in seconds.
const RESTART_SECS: f64 = 30.0;

/// Workers of one job on each node.
type Row = Vec<u16>;
/// One way to distribute the cluster: a row for each job.
type Genome = Vec<Row>;

struct Problem<'a> {
    jobs: Vec<JobIx>,
    nodes: Vec<NodeIx>,
    /// The most workers of each job on each node.
    most: Vec<Row>,
    max: Vec<u32>,
    base: Genome,
    /// The speed of each job, if it is known.
    speeds: Vec<Option<&'a Speed>>,
    /// The rate of each job with an equal share.
    fair_rates: Vec<f64>,
    /// The factor on the speed-up of a restarted job.
    restart: Vec<f64>,
}

pub(crate) fn decide(board: &mut Board<'_>) {
    elastic_fair::clear_obligations(board);
    let Some(problem) = Problem::of(board) else { return };
    let now = board.now.since(edl_core::time::Time::ZERO).as_secs();
    let mut rng = Rng::new(key(&[board.options.seed, now]));
    let best = problem.search(&mut rng);
    problem.carry_out(board, &best);
}

impl<'a> Problem<'a> {
    fn of(board: &mut Board<'a>) -> Option<Self> {
        let mut jobs = board.sound_jobs();
        let is_ready = |node: &NodeIx| board.nodes[*node].state == NodeState::Ready;
        let nodes: Vec<NodeIx> = (0..board.nodes.len()).filter(is_ready).collect();
        if nodes.is_empty() {
            for job in jobs.drain(..) {
                if !board.jobs[job].has_gang() {
                    admission::suspend(board, job, Waiting::NoCapacity(ResourceKind::Cpu));
                }
            }
        }
        if jobs.is_empty() {
            return None;
        }
        jobs.sort_by_key(|job| (board.jobs[*job].job.ran, board.jobs[*job].job.submitted, *job));
        let n_jobs = jobs.len();
        let mut problem = Self {
            most: Vec::new(),
            max: Vec::new(),
            base: Vec::new(),
            speeds: Vec::new(),
            fair_rates: Vec::new(),
            restart: Vec::new(),
            jobs,
            nodes,
        };
        for job in problem.jobs.clone() {
            problem.add(board, job, n_jobs);
        }
        Some(problem)
    }

    fn add(&mut self, board: &Board<'a>, job: JobIx, n_jobs: usize) {
        let entry = &board.jobs[job];
        let spec = entry.job;
        let shape = spec.roles.worker.shape;
        let small = |n: u64| u16::try_from(n).unwrap_or(u16::MAX);
        let most = |node: &NodeIx| {
            let node = board.nodes[*node];
            let capacity = node.capacity.saturating_sub(node.taken);
            if spec.may_use(node) { small(shape.times_in(capacity)) } else { 0 }
        };
        self.most.push(self.nodes.iter().map(most).collect());
        let has =
            |node: &NodeIx| small(entry.on.get(node).map_or(0, |counts| counts.worker).into());
        self.base.push(self.nodes.iter().map(has).collect());
        let max = spec.roles.worker.max;
        self.max.push(max);
        let all = shape.times_in(board.total);
        let fair = u32::try_from(all.div_ceil(n_jobs as u64)).unwrap_or(max).clamp(1, max);
        let per_node = packing::most_on_a_node(board, job);
        let speed = spec.speed.as_ref();
        self.fair_rates.push(rate(speed, fair, fair <= per_node).max(1e-12));
        self.speeds.push(speed);
        let age = board.now.since(spec.submitted).as_secs_f64();
        let n_restarts = board.state.jobs.get(&spec.id).map_or(0, |memory| memory.n_resizes);
        let spent = (age - f64::from(n_restarts) * RESTART_SECS).max(0.0);
        self.restart.push(spent / (age + RESTART_SECS));
    }

    fn search(&self, rng: &mut Rng) -> Genome {
        let mut first = self.base.clone();
        self.repair(&mut first, rng);
        let mut population = vec![(self.fitness(&first), first)];
        for _ in 0..GENERATIONS {
            let n_parents = population.len() as u64;
            let mut children: Vec<(f64, Genome)> = Vec::new();
            for _ in 0..POPULATION {
                let one = &population[index(rng, n_parents)].1;
                let other = &population[index(rng, n_parents)].1;
                let split = index(rng, self.jobs.len() as u64);
                let mut child: Genome =
                    one[..split].iter().chain(&other[split..]).cloned().collect();
                self.mutate(&mut child, rng);
                self.repair(&mut child, rng);
                children.push((self.fitness(&child), child));
            }
            population.append(&mut children);
            population.sort_by(|a, b| b.0.total_cmp(&a.0));
            population.truncate(POPULATION);
        }
        population.swap_remove(0).1
    }

    /// The harmonic mean of speed-ups.
    fn fitness(&self, genome: &Genome) -> f64 {
        let mut sum = 0.0;
        for (which, row) in genome.iter().enumerate() {
            let n: u32 = row.iter().map(|n| u32::from(*n)).sum();
            let n_nodes = row.iter().filter(|n| **n > 0).count();
            let rate = rate(self.speeds[which], n.min(self.max[which]), n_nodes <= 1);
            let mut speedup = rate / self.fair_rates[which];
            if *row != self.base[which] {
                speedup *= self.restart[which];
            }
            sum += 1.0 / (speedup + 1e-3);
        }
        genome.len() as f64 / sum
    }

    fn mutate(&self, genome: &mut Genome, rng: &mut Rng) {
        let mut used = vec![0_u32; self.nodes.len()];
        for (which, row) in genome.iter_mut().enumerate() {
            if rng.below(10) == 0 {
                row.clone_from(&self.base[which]);
            }
            if rng.below(10) == 0 {
                for n in row.iter_mut() {
                    if rng.below(10) == 0 {
                        *n = 0;
                    }
                }
            }
            for (node, n) in row.iter().enumerate() {
                used[node] += u32::from(*n);
            }
        }
        for (which, row) in genome.iter_mut().enumerate() {
            // On average, one node with capacity, and one that the job already uses.
            let open = |node: usize| used[node] < u32::from(self.most[which][node]);
            let n_open = (0..row.len()).filter(|node| open(*node)).count() as u64;
            let n_own = (0..row.len()).filter(|node| open(*node) && row[*node] > 0).count() as u64;
            for (node, n) in row.iter_mut().enumerate() {
                let is_hit = open(node)
                    && (rng.below(n_open.max(1)) == 0 || (*n > 0 && rng.below(n_own.max(1)) == 0));
                if is_hit {
                    let span = u64::from(self.most[which][node].saturating_sub(*n)) + 1;
                    *n += u16::try_from(rng.below(span)).unwrap_or(0);
                }
            }
        }
    }

    /// Makes a genome feasible: one distributed job per node, no maximum and no node exceeded.
    fn repair(&self, genome: &mut Genome, rng: &mut Rng) {
        let n_nodes = self.nodes.len();
        let mut is_shared = vec![false; n_nodes];
        let mut left: Vec<f64> = vec![1.0; n_nodes];
        for (which, row) in genome.iter_mut().enumerate() {
            let is_distributed = row.iter().filter(|n| **n > 0).count() > 1;
            for (node, n) in row.iter_mut().enumerate() {
                if is_distributed && *n > 0 {
                    if is_shared[node] {
                        *n = 0;
                    }
                    is_shared[node] = true;
                }
            }
            let mut capacity = self.max[which];
            let start = index(rng, n_nodes as u64);
            for step in 0..n_nodes {
                let n = &mut row[(start + step) % n_nodes];
                *n = (*n).min(u16::try_from(capacity).unwrap_or(u16::MAX));
                capacity -= u32::from(*n);
            }
            for (node, n) in row.iter_mut().enumerate() {
                // In shares of a node, so pods of different shapes can be added.
                let each = 1.0 / f64::from(self.most[which][node].max(1));
                while *n > 0
                    && (self.most[which][node] == 0 || f64::from(*n) * each > left[node] + 1e-9)
                {
                    *n -= 1;
                }
                left[node] -= f64::from(*n) * each;
            }
        }
    }

    fn carry_out(&self, board: &mut Board<'_>, best: &Genome) {
        let changes: Vec<usize> =
            (0..self.jobs.len()).filter(|which| self.differs(board, best, *which)).collect();
        for which in &changes {
            board.take_all(self.jobs[*which]);
        }
        for which in changes {
            let job = self.jobs[which];
            let spec = board.jobs[job].job;
            let n: u32 = best[which].iter().map(|n| u32::from(*n)).sum();
            let counts = spec.counts_at(n);
            let put = |board: &mut Board<'_>| self.put_row(board, job, &best[which]);
            let is_placed = n >= spec.roles.worker.min
                && quota::allows(board, spec.queue, spec.resources(counts))
                && packing::put_job(board, job, counts, put);
            if is_placed {
                board.because(job, Reason::LargestGain);
                board.jobs[job].waiting = None;
            } else {
                board.because(job, Reason::SmallestLoss);
                board.jobs[job].waiting = Some(Waiting::Outranked);
            }
        }
    }

    fn differs(&self, board: &mut Board<'_>, best: &Genome, which: usize) -> bool {
        let job = self.jobs[which];
        let is_waiting = !board.jobs[job].has_gang();
        if is_waiting {
            board.jobs[job].waiting = Some(Waiting::Outranked);
        }
        best[which] != self.base[which] || (is_waiting && board.jobs[job].counts.sum() > 0)
    }

    fn put_row(&self, board: &mut Board<'_>, job: JobIx, row: &Row) -> bool {
        let shape = board.jobs[job].job.roles.worker.shape;
        for (node, n) in self.nodes.iter().zip(row) {
            if !(shape * u64::from(*n)).fits_in(board.free(*node)) {
                return false;
            }
            board.put(job, Role::Worker, *node, u32::from(*n));
        }
        true
    }
}

/// Units of work per second; a job of unknown speed is assumed to scale linearly.
fn rate(speed: Option<&Speed>, n: u32, is_together: bool) -> f64 {
    speed.map_or(f64::from(n), |speed| speed.at(n, is_together))
}

fn index(rng: &mut Rng, limit: u64) -> usize {
    usize::try_from(rng.below(limit.max(1))).unwrap_or(0)
}
