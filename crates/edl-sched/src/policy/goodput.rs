// SPDX-License-Identifier: Apache-2.0
//! Workers go where they help most, by each job's own measured speed-up.
//!
//! Jobs start as under `elastic-fair`. Capacity above the minimums is distributed by marginal gain:
//! the loss of a job is the inverse of its speed-up over an equal share, so the slowest jobs gain
//! most, and jobs that finish soon count more. A job is resized only if that saves it clearly more
//! time than the resize costs, and packed on as few nodes as possible.

use std::cmp::Reverse;
use std::collections::binary_heap::PeekMut;
use std::collections::{BTreeMap, BinaryHeap};

use edl_core::time::Time;

use crate::admission;
use crate::board::{Board, JobIx};
use crate::fairness::OrderedF64;
use crate::packing;
use crate::plan::Reason;
use crate::policy::elastic_fair;
use crate::quota;
use crate::resources::Resources;
use crate::snapshot::Role;
use crate::speed::Speed;
use crate::state::PlannerState;
use crate::{growth, trim};

/// The most passes of one plan.
const MOST_PASSES: u32 = 16;
/// How far ahead a job's curve is searched for the best gain for each worker.
const MOST_AHEAD: u32 = 16;
/// A running job's size is left alone if it would change by less than one part in this.
const DEAD_BAND: u32 = 4;
/// How much more jobs count that finish sooner: 0 for not at all, 1 for twice for half the time.
const URGENCY: f64 = 0.6;

pub(crate) fn decide(board: &mut Board<'_>, next: &mut PlannerState) {
    // Sizes are only distributed from time to time; jobs start and shrink at any time.
    let is_frozen = |then: Time| board.now.since(then) < board.options.freeze;
    let is_due = !board.state.shared_out.is_some_and(is_frozen);
    let begin = board.bookmark();
    for pass in 0..MOST_PASSES {
        let bookmark = board.bookmark();
        elastic_fair::clear_obligations(board);
        admission::admit(board);
        trim::above_quota(board);
        trim::above_load(board);
        if is_due && pass == 0 {
            resize(board);
        }
        growth::follow_with_servers(board);
        if board.is_at(bookmark) {
            break;
        }
    }
    // Sizes were computed with these changes. An immediate second plan, which would see the jobs
    // that start now as running, must not find a better distribution.
    if is_due && !board.is_at(begin) {
        next.shared_out = Some(board.now);
    }
}

/// One job while workers are distributed.
#[derive(Clone, Debug)]
struct Bid<'a> {
    job: JobIx,
    /// Current and planned workers.
    has: u32,
    wants: u32,
    max: u32,
    is_fixed: bool,
    weight: f64,
    rates: Rates<'a>,
    /// The rate with an equal share of the cluster.
    fair_rate: f64,
    shape: Resources,
}

impl Bid<'_> {
    /// The inverse of the job's speed-up over an equal share with `n` workers, which is minimized.
    fn loss(&self, n: u32) -> f64 {
        self.fair_rate / self.rates.at(n).max(1e-12)
    }
}

/// Units of work per second by number of packed workers; a job of unknown speed is assumed to scale
/// linearly.
#[derive(Clone, Copy, Debug)]
struct Rates<'a> {
    speed: Option<&'a Speed>,
    /// How many workers the largest node holds.
    per_node: u32,
}

impl Rates<'_> {
    fn at(&self, n: u32) -> f64 {
        self.speed.map_or(f64::from(n), |speed| speed.packed(n, self.per_node))
    }
}

/// Distributes capacity above the minimums.
fn resize(board: &mut Board<'_>) {
    let mut bids = bids(board);
    let mut left = capacity_for(board, &bids);
    share_out(board, &mut bids, &mut left, |_| true);
    keep_what_is_not_worth_it(board, &mut bids, &mut left);
    // Jobs that are resized anyway also get what is left.
    share_out(board, &mut bids, &mut left, |bid| bid.wants != bid.has);
    place(board, &bids);
}

/// All running jobs, each at its minimum, or at its size if it must not change.
fn bids<'a>(board: &Board<'a>) -> Vec<Bid<'a>> {
    let runs = |job: &JobIx| board.jobs[*job].has_gang() && board.jobs[*job].job.fault().is_none();
    let running: Vec<JobIx> = (0..board.jobs.len()).filter(runs).collect();
    let n_running = running.len();
    // Once per shape: it looks at all nodes.
    let mut per_node = BTreeMap::new();
    let mut rates_of = |job: &JobIx| {
        let spec = board.jobs[*job].job;
        let per_node = per_node.entry(spec.roles.worker.shape);
        let per_node = *per_node.or_insert_with(|| packing::most_on_a_node(board, *job));
        Rates { speed: spec.speed.as_ref(), per_node }
    };
    let rates: Vec<Rates<'a>> = running.iter().map(&mut rates_of).collect();
    let fair_rates: Vec<f64> = (running.iter().zip(&rates))
        .map(|(job, rates)| fair_rate(board, *job, *rates, n_running))
        .collect();
    let urgencies: Vec<Option<f64>> = (rates.iter().zip(&fair_rates))
        .map(|(rates, fair)| Some(urgency(rates.speed?, *fair)))
        .collect();
    // A job of unknown speed counts as much as the average of the others.
    let known: Vec<f64> = urgencies.iter().copied().flatten().collect();
    let usual = known.iter().sum::<f64>() / (known.len() as f64).max(1.0);
    let bid = |(which, job): (usize, JobIx)| {
        let entry = &board.jobs[job];
        let worker = &entry.job.roles.worker;
        let is_frozen =
            entry.ran_before && entry.was_resized_within(board.options.freeze, board.now);
        let is_fixed = is_frozen || worker.min == worker.max;
        let wants = if is_fixed { entry.counts.worker } else { worker.min };
        let urgency = urgencies[which].unwrap_or(usual.max(1e-12));
        let weight = urgency * f64::from(entry.job.weight.max(1));
        Bid {
            job,
            has: entry.counts.worker,
            wants,
            max: worker.max.max(wants),
            is_fixed,
            weight,
            rates: rates[which],
            fair_rate: fair_rates[which],
            shape: worker.shape,
        }
    };
    running.into_iter().enumerate().map(bid).collect()
}

/// The rate of a job that has an equal share of the cluster.
fn fair_rate(board: &Board<'_>, job: JobIx, rates: Rates<'_>, n_running: usize) -> f64 {
    let worker = &board.jobs[job].job.roles.worker;
    let all = worker.shape.times_in(board.total);
    let fair = u32::try_from(all / (n_running as u64).max(1)).unwrap_or(worker.max);
    let fair = fair.clamp(1, worker.max.max(1));
    (1..=fair).map(|n| rates.at(n)).fold(1e-12, f64::max)
}

/// How much a job counts: more if it finishes sooner.
fn urgency(speed: &Speed, fair_rate: f64) -> f64 {
    (speed.remaining / fair_rate).max(1.0).powf(-URGENCY)
}

/// What is left when every job has its planned workers so far.
fn capacity_for(board: &Board<'_>, bids: &[Bid<'_>]) -> Resources {
    let freed: Resources =
        bids.iter().map(|bid| bid.shape * u64::from(bid.has.saturating_sub(bid.wants))).sum();
    let line = board.total.permille(board.options.max_load_permille);
    (line + freed).saturating_sub(board.asked)
}

/// Gives workers, a few at a time, to the job that gains most per worker.
fn share_out(
    board: &Board<'_>,
    bids: &mut [Bid<'_>],
    left: &mut Resources,
    may_grow: impl Fn(&Bid<'_>) -> bool,
) {
    // The best first; of equals, the first job.
    let growing = (0..bids.len()).filter(|which| may_grow(&bids[*which]));
    let offers = growing.filter_map(|which| {
        let (gain, n) = offer(&bids[which])?;
        Some((gain, Reverse(which), n))
    });
    let mut offers: BinaryHeap<(OrderedF64, Reverse<usize>, u32)> = offers.collect();
    while let Some(mut best) = offers.peek_mut() {
        let (_, Reverse(which), n) = *best;
        let bid = &mut bids[which];
        let more = bid.shape * u64::from(n);
        let queue = board.jobs[bid.job].job.queue;
        let beyond = bid.shape * u64::from((bid.wants + n).saturating_sub(bid.has));
        let next = if more.fits_in(*left) && quota::allows(board, queue, beyond) {
            *left -= more;
            bid.wants += n;
            offer(bid)
        } else {
            // A smaller step may fit.
            offer_up_to(bid, n - 1)
        };
        match next {
            Some((gain, n)) => *best = (gain, Reverse(which), n),
            None => _ = PeekMut::pop(best),
        }
    }
}

/// The best gain per worker, and for how many workers; none if there is no gain.
fn offer(bid: &Bid<'_>) -> Option<(OrderedF64, u32)> {
    offer_up_to(bid, MOST_AHEAD)
}

fn offer_up_to(bid: &Bid<'_>, most: u32) -> Option<(OrderedF64, u32)> {
    if bid.is_fixed {
        return None;
    }
    let mut best = (0.0, 0);
    let now = bid.loss(bid.wants);
    for n in 1..=most.min(bid.max - bid.wants) {
        let gain = now - bid.loss(bid.wants + n);
        let each = bid.weight * gain / f64::from(n);
        if each > best.0 {
            best = (each, n);
        }
    }
    let (gain, n) = best;
    (n > 0).then_some((OrderedF64(gain), n))
}

/// Keeps the size of running jobs if a change is small or costs more than it saves.
fn keep_what_is_not_worth_it(board: &Board<'_>, bids: &mut [Bid<'_>], left: &mut Resources) {
    let mut order: Vec<usize> = (0..bids.len()).collect();
    // First the jobs that would grow, so the others need not shrink for nothing.
    order.sort_by_key(|which| {
        let bid = &bids[*which];
        (bid.wants < bid.has, bid.has.abs_diff(bid.wants), bid.job)
    });
    for which in order {
        let bid = &mut bids[which];
        let ran_before = board.jobs[bid.job].ran_before;
        if bid.has == bid.wants || !ran_before || bid.has > bid.max {
            continue;
        }
        let is_small = bid.has.abs_diff(bid.wants) * DEAD_BAND < bid.has;
        if bid.has < bid.wants && (is_small || !saves_enough(board, bid)) {
            *left += bid.shape * u64::from(bid.wants - bid.has);
            bid.wants = bid.has;
        } else if bid.has > bid.wants {
            let needed = bid.shape * u64::from(bid.has - bid.wants);
            if needed.fits_in(*left) {
                *left -= needed;
                bid.wants = bid.has;
            }
        }
    }
}

fn saves_enough(board: &Board<'_>, bid: &Bid<'_>) -> bool {
    let spec = board.jobs[bid.job].job;
    let Some(speed) = &spec.speed else { return true };
    let secs = |n: u32| speed.remaining / bid.rates.at(n).max(1e-12);
    let cost = spec.resize_cost.as_secs_f64() * f64::from(board.options.gain);
    secs(bid.has) - secs(bid.wants) > cost
}

/// Applies the new sizes: all jobs that change are placed again, the largest first.
fn place(board: &mut Board<'_>, bids: &[Bid<'_>]) {
    let mut changing: Vec<&Bid<'_>> = bids.iter().filter(|bid| bid.wants != bid.has).collect();
    changing.sort_by_key(|bid| (Reverse(bid.wants), bid.job));
    let bookmark = board.bookmark();
    for bid in &changing {
        take_workers(board, bid.job);
    }
    if !changing.iter().all(|bid| place_one(board, bid)) {
        // A job would fall below its minimum, so change one by one, those that shrink first.
        board.rewind(bookmark);
        changing.sort_by_key(|bid| (bid.wants > bid.has, bid.job));
        changing.retain(|bid| {
            let bookmark = board.bookmark();
            take_workers(board, bid.job);
            let is_placed = place_one(board, bid);
            if !is_placed {
                board.rewind(bookmark);
            }
            is_placed
        });
    }
    for bid in changing {
        let reason = if bid.wants > bid.has { Reason::LargestGain } else { Reason::SmallestLoss };
        board.because(bid.job, reason);
    }
}

fn take_workers(board: &mut Board<'_>, job: JobIx) {
    let workers: Vec<_> = board.jobs[job].workers_on().collect();
    for (node, n) in workers {
        board.take(job, Role::Worker, node, n);
    }
}

/// Places a job at its planned size, or at a smaller one that fits and is as fast.
fn place_one(board: &mut Board<'_>, bid: &Bid<'_>) -> bool {
    let spec = board.jobs[bid.job].job;
    let on_one = packing::emptiest(board, bid.job).map_or(0, |(_, n)| n.min(bid.wants));
    let is_split = bid.wants <= bid.rates.per_node && on_one < bid.wants;
    if is_split && on_one >= spec.roles.worker.min.max(1) {
        let is_slower = spec
            .speed
            .as_ref()
            .is_some_and(|speed| speed.at(bid.wants, false) <= speed.at(on_one, true));
        if is_slower {
            return packing::put_packed(board, bid.job, on_one);
        }
    }
    let least = spec.roles.worker.min;
    (least..=bid.wants).rev().any(|n| packing::put_packed(board, bid.job, n))
}
