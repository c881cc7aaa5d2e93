// SPDX-License-Identifier: Apache-2.0
//! Workers go where they help most, by each job's own measured speed-up.
//!
//! Jobs start as under `elastic-fair`. What is above the minimums is shared out by marginal gain:
//! each job is worth the inverse of its speed-up over an equal share, so the slowest gain most,
//! and jobs that end soon count for more. A job is resized only if that saves it clearly more
//! time than the resize costs, and packed on as few nodes as there is room for.

use edl_core::time::Time;

use crate::admission;
use crate::board::{Board, JobIx};
use crate::packing;
use crate::plan::Reason;
use crate::policy::elastic_fair;
use crate::quota;
use crate::resources::Resources;
use crate::snapshot::Role;
use crate::state::State;
use crate::{growth, trim};

/// A plan looks at what it has made this often at most.
const MOST_PASSES: u32 = 16;
/// How far ahead a job's curve is searched for the best gain for each worker.
const MOST_AHEAD: u32 = 16;
/// A running job's size is left alone if it would change by less than one part in this.
const DEAD_BAND: u32 = 4;
/// How much more jobs count that end sooner: 0 not at all, 1 twice for half the time.
const URGENCY: f64 = 0.6;

pub(crate) fn decide(board: &mut Board<'_>, next: &mut State) {
    // Sizes are looked at once in a while; jobs start and give way at any time.
    let is_frozen = |then: Time| board.now.since(then) < board.options.freeze;
    let is_due = !board.state.shared_out.is_some_and(is_frozen);
    let begin = board.bookmark();
    for pass in 0..MOST_PASSES {
        let bookmark = board.bookmark();
        elastic_fair::make_room(board);
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
    // Whatever has changed, sizes were looked at with it: a plan made again at once, which would
    // see those that start now as running, must not find a better share.
    if is_due && !board.is_at(begin) {
        next.shared_out = Some(board.now);
    }
}

/// One job while workers are shared out.
#[derive(Clone, Debug)]
struct Bid {
    job: JobIx,
    /// Workers that it has, and shall have.
    has: u32,
    wants: u32,
    max: u32,
    is_fixed: bool,
    weight: f64,
    /// What is lost to slowness with 0, 1, … workers: to be made small.
    loss: Vec<f64>,
    shape: Resources,
}

/// Shares out what is above the minimums.
fn resize(board: &mut Board<'_>) {
    let mut bids = bids(board);
    let mut left = room_for(board, &bids);
    share_out(board, &mut bids, &mut left, |_| true);
    keep_what_is_not_worth_it(board, &mut bids, &mut left);
    // Whoever is resized anyway may as well take what is left over.
    share_out(board, &mut bids, &mut left, |bid| bid.wants != bid.has);
    place(board, &bids);
}

/// All jobs that run, each at its minimum, or as it is if it must not be touched.
fn bids(board: &Board<'_>) -> Vec<Bid> {
    let runs = |job: &JobIx| board.jobs[*job].has_gang() && board.jobs[*job].job.fault().is_none();
    let running: Vec<JobIx> = (0..board.jobs.len()).filter(runs).collect();
    let n_running = running.len();
    // A job that nothing is known of counts as much as the others do on average.
    let known: Vec<f64> =
        running.iter().filter_map(|job| urgency(board, *job, n_running)).collect();
    let usual = known.iter().sum::<f64>() / (known.len() as f64).max(1.0);
    let bid = |job: JobIx| {
        let seat = &board.jobs[job];
        let worker = &seat.job.roles.worker;
        let is_frozen = seat.ran_before && board.state.is_frozen(seat.job.id, board.now);
        let is_fixed = is_frozen || worker.min == worker.max;
        let wants = if is_fixed { seat.counts.worker } else { worker.min };
        let urgency = urgency(board, job, n_running).unwrap_or(usual.max(1e-12));
        let weight = urgency * f64::from(seat.job.weight.max(1));
        let loss = losses(board, job, n_running);
        Bid {
            job,
            has: seat.counts.worker,
            wants,
            max: worker.max.max(wants),
            is_fixed,
            weight,
            loss,
            shape: worker.shape,
        }
    };
    running.into_iter().map(bid).collect()
}

/// Units of work a second by number of workers, packed; a job that nothing is known of is taken
/// to be as much faster as it has more workers.
fn rate(board: &Board<'_>, job: JobIx, n: u32) -> f64 {
    match &board.jobs[job].job.speed {
        Some(speed) => speed.packed(n, packing::most_on_a_node(board, job)),
        None => f64::from(n),
    }
}

/// The rate of a job that has an equal share of the cluster.
fn fair_rate(board: &Board<'_>, job: JobIx, n_running: usize) -> f64 {
    let worker = &board.jobs[job].job.roles.worker;
    let all = worker.shape.times_in(board.total);
    let fair = u32::try_from(all / (n_running as u64).max(1)).unwrap_or(worker.max);
    let fair = fair.clamp(1, worker.max.max(1));
    (1..=fair).map(|n| rate(board, job, n)).fold(1e-12, f64::max)
}

/// How much a job counts: more if it ends sooner. None if that is not known.
fn urgency(board: &Board<'_>, job: JobIx, n_running: usize) -> Option<f64> {
    let speed = board.jobs[job].job.speed.as_ref()?;
    let secs = (speed.remaining / fair_rate(board, job, n_running)).max(1.0);
    Some(secs.powf(-URGENCY))
}

/// The inverse of a job's speed-up over an equal share, by number of workers.
fn losses(board: &Board<'_>, job: JobIx, n_running: usize) -> Vec<f64> {
    let at_fair = fair_rate(board, job, n_running);
    let max = board.jobs[job].job.roles.worker.max;
    (0..=max).map(|n| at_fair / rate(board, job, n).max(1e-12)).collect()
}

/// What is left when everybody has what it wants so far.
fn room_for(board: &Board<'_>, bids: &[Bid]) -> Resources {
    let freed: Resources =
        bids.iter().map(|bid| bid.shape * u64::from(bid.has.saturating_sub(bid.wants))).sum();
    let line = board.total.permille(board.options.max_load_permille);
    (line + freed).saturating_sub(board.asked)
}

/// Gives workers, a few at a time, to whoever gains most for each of them.
fn share_out(
    board: &Board<'_>,
    bids: &mut [Bid],
    left: &mut Resources,
    may_grow: impl Fn(&Bid) -> bool,
) {
    let mut offers: Vec<(f64, u32)> =
        bids.iter().map(|bid| if may_grow(bid) { offer(bid) } else { (0.0, 0) }).collect();
    loop {
        let best = (0..bids.len()).rev().max_by(|a, b| offers[*a].0.total_cmp(&offers[*b].0));
        let Some(best) = best.filter(|best| offers[*best].0 > 0.0) else { return };
        let (_, n) = offers[best];
        let bid = &mut bids[best];
        let more = bid.shape * u64::from(n);
        let queue = board.jobs[bid.job].job.queue;
        let beyond = bid.shape * u64::from((bid.wants + n).saturating_sub(bid.has));
        if more.fits_in(*left) && quota::allows(board, queue, beyond) {
            *left -= more;
            bid.wants += n;
            offers[best] = offer(bid);
        } else if n > 1 {
            // Perhaps a smaller step fits.
            offers[best] = offer_up_to(bid, n - 1);
        } else {
            offers[best] = (0.0, 0);
        }
    }
}

/// The best gain for each worker, and for how many.
fn offer(bid: &Bid) -> (f64, u32) {
    offer_up_to(bid, MOST_AHEAD)
}

fn offer_up_to(bid: &Bid, most: u32) -> (f64, u32) {
    if bid.is_fixed {
        return (0.0, 0);
    }
    let mut best = (0.0, 0);
    let now = bid.loss[bid.wants as usize];
    for n in 1..=most.min(bid.max - bid.wants) {
        let gain = now - bid.loss[(bid.wants + n) as usize];
        let each = bid.weight * gain / f64::from(n);
        if each > best.0 {
            best = (each, n);
        }
    }
    best
}

/// Leaves running jobs as they are where a change is small or costs more than it saves.
fn keep_what_is_not_worth_it(board: &Board<'_>, bids: &mut [Bid], left: &mut Resources) {
    let mut order: Vec<usize> = (0..bids.len()).collect();
    // First who would grow, so that those who would shrink for nothing need not.
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

fn saves_enough(board: &Board<'_>, bid: &Bid) -> bool {
    let spec = board.jobs[bid.job].job;
    let Some(speed) = &spec.speed else { return true };
    let per_node = packing::most_on_a_node(board, bid.job);
    let secs = |n: u32| speed.remaining / speed.packed(n, per_node).max(1e-12);
    let cost = spec.resize_cost.as_secs_f64() * f64::from(board.options.gain);
    secs(bid.has) - secs(bid.wants) > cost
}

/// Carries the new sizes out on the board: all that change are placed anew, the largest first.
fn place(board: &mut Board<'_>, bids: &[Bid]) {
    let mut changing: Vec<&Bid> = bids.iter().filter(|bid| bid.wants != bid.has).collect();
    changing.sort_by_key(|bid| (std::cmp::Reverse(bid.wants), bid.job));
    let bookmark = board.bookmark();
    for bid in &changing {
        take_workers(board, bid.job);
    }
    if !changing.iter().all(|bid| place_one(board, bid)) {
        // Somebody would fall below its minimum: one by one then, those that shrink first.
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

/// Places a job at the size it wants, or at a smaller one that is as quick where it fits.
fn place_one(board: &mut Board<'_>, bid: &Bid) -> bool {
    let spec = board.jobs[bid.job].job;
    let per_node = packing::most_on_a_node(board, bid.job);
    let on_one = packing::roomiest(board, bid.job).map_or(0, |(_, n)| n.min(bid.wants));
    let is_split = bid.wants <= per_node && on_one < bid.wants;
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
