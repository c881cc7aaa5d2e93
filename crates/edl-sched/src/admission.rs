// SPDX-License-Identifier: Apache-2.0
//! Which jobs run: as many whole minimums as possible, and no job is overtaken forever.

use std::cmp::Reverse;

use crate::board::{Board, JobIx};
use crate::fairness::OrderedF64;
use crate::packing;
use crate::plan::{Reason, Waiting};
use crate::quota;
use crate::resources::{ResourceKind, Resources};
use crate::snapshot::{Counts, Job, NodeState, Role};
use crate::victims;

/// Starts every job whose minimum fits, taking surplus of others if necessary, and stops jobs that
/// lost pods and cannot get them back.
pub fn admit(board: &mut Board<'_>) {
    // The pods of an incomplete job may help a job that was tried before it. A stopped job has no
    // more pods, so there are at most as many passes as jobs.
    while admit_once(board) {}
}

/// One pass over the waiting jobs; returns whether it stopped an incomplete one.
fn admit_once(board: &mut Board<'_>) -> bool {
    let mut has_stopped = false;
    let mut behind: Option<(JobIx, i32)> = None;
    let mut order = order(board);
    let mut next = 0;
    while let Some(job) = order.get(next).copied() {
        next += 1;
        let spec = board.jobs[job].job;
        let is_behind = behind.filter(|(_, priority)| spec.priority <= *priority);
        let outcome = match is_behind {
            Some((head, _)) if board.jobs[job].counts.sum() == 0 => {
                Err(Waiting::Behind(board.jobs[head].job.id))
            }
            _ => start(board, job, &mut order),
        };
        let Err(waiting) = outcome else { continue };
        has_stopped |= suspend(board, job, waiting);
        let has_waited = board.now.since(spec.submitted) >= board.options.patience;
        let could_run = matches!(waiting, Waiting::NoCapacity(_) | Waiting::Fragmented);
        if has_waited && could_run && behind.is_none() {
            behind = Some((job, spec.priority));
        }
    }
    has_stopped
}

/// Jobs without their minimum: by priority, then those that waited too long, then those whose queue
/// is within its quota, then the smallest, so most jobs run.
fn order(board: &mut Board<'_>) -> Vec<JobIx> {
    let mut order = board.sound_jobs();
    order.retain(|job| !board.jobs[*job].has_gang());
    order.sort_by_cached_key(|job| {
        let entry = &board.jobs[*job];
        let spec = entry.job;
        let gang = spec.resources(spec.gang());
        let has_waited = board.now.since(spec.submitted) >= board.options.patience;
        let waited_since = has_waited.then_some(spec.submitted);
        let is_incomplete = entry.counts.sum() > 0;
        let is_own = quota::is_own(board, spec.queue, gang);
        let size = OrderedF64(gang.dominant_share(board.total));
        (
            Reverse(spec.priority),
            Reverse(is_incomplete),
            Reverse(has_waited),
            waited_since,
            Reverse(is_own),
            size,
            spec.submitted,
            spec.id,
        )
    });
    order
}

/// Completes the minimum of one job, or returns why not. Jobs that it displaces are added to `order`.
fn start(board: &mut Board<'_>, job: JobIx, order: &mut Vec<JobIx>) -> Result<(), Waiting> {
    let missing = missing(board.jobs[job].job, board.jobs[job].counts);
    let is_new = board.jobs[job].before.is_empty();
    let reason = if is_new { Reason::Starts } else { Reason::Incomplete };
    try_start(board, job, missing, reason, |board| {
        packing::put_gang(board, job, missing)
            || (may_fit_by_taking(board, job, missing)
                && victims::put_gang_by_taking(board, job, missing))
            || displace(board, job, missing, order)
    })
}

/// Starts the pods `missing` of a job if `place` finds nodes for them, or returns why it waits.
pub(crate) fn try_start<'a>(
    board: &mut Board<'a>,
    job: JobIx,
    missing: Counts,
    reason: Reason,
    place: impl FnOnce(&mut Board<'a>) -> bool,
) -> Result<(), Waiting> {
    let spec = board.jobs[job].job;
    let needed = spec.resources(missing);
    if let Some(kind) = never_fits(board, spec) {
        return Err(Waiting::NeverFits(kind));
    }
    if !quota::allows(board, spec.queue, needed) {
        return Err(Waiting::QuotaUsed(spec.queue));
    }
    if !place(board) {
        return Err(needed.lacks(free(board)).map_or(Waiting::Fragmented, Waiting::NoCapacity));
    }
    board.because(job, reason);
    board.jobs[job].waiting = None;
    Ok(())
}

/// Lets a job wait. If it has part of its minimum, these pods are stopped, and the result is true.
pub(crate) fn suspend(board: &mut Board<'_>, job: JobIx, waiting: Waiting) -> bool {
    let is_incomplete = board.jobs[job].counts.sum() > 0;
    if is_incomplete {
        board.take_all(job);
        board.because(job, Reason::Incomplete);
    }
    board.jobs[job].waiting = Some(waiting);
    is_incomplete
}

/// Stops jobs of lower priority, the lowest and newest first, until the minimum of `job` fits.
fn displace(board: &mut Board<'_>, job: JobIx, missing: Counts, order: &mut Vec<JobIx>) -> bool {
    let spec = board.jobs[job].job;
    let is_lower = |other: &JobIx| {
        let entry = &board.jobs[*other];
        entry.job.priority < spec.priority && entry.counts.sum() > 0 && entry.job.fault().is_none()
    };
    let mut lower: Vec<JobIx> = (0..board.jobs.len()).filter(is_lower).collect();
    if lower.is_empty() {
        return false;
    }
    lower.sort_by_key(|other| {
        let other = board.jobs[*other].job;
        (other.priority, Reverse(other.submitted), Reverse(other.id))
    });
    let bookmark = board.bookmark();
    let mut stopped = Vec::new();
    for other in lower {
        board.take_all(other);
        stopped.push(other);
        let enough = spec.resources(missing).fits_in(free(board));
        if enough
            && (packing::put_gang(board, job, missing)
                || victims::put_gang_by_taking(board, job, missing))
        {
            for other in stopped {
                board.because(other, Reason::Preempted { by: spec.id });
                order.push(other);
            }
            return true;
        }
    }
    board.rewind(bookmark);
    false
}

/// The pods that a job lacks for its minimum.
#[must_use]
pub fn missing(job: &Job, has: Counts) -> Counts {
    let gang = job.gang();
    let lacks = |role: Role| gang.of(role).saturating_sub(has.of(role));
    Counts { master: lacks(Role::Master), ps: lacks(Role::Ps), worker: lacks(Role::Worker) }
}

/// Whether free capacity and the surplus of others are enough in total: a quick check for the many
/// waiting jobs of a full cluster.
fn may_fit_by_taking(board: &Board<'_>, job: JobIx, missing: Counts) -> bool {
    let spec = board.jobs[job].job;
    let gives = |entry: &&crate::board::JobEntry<'_>| entry.job.priority <= spec.priority;
    let surplus = |entry: &crate::board::JobEntry<'_>| {
        entry.job.roles.worker.shape * u64::from(entry.surplus())
    };
    let surplus: Resources = board.jobs.iter().filter(gives).map(surplus).sum();
    surplus != Resources::ZERO && spec.resources(missing).fits_in(free(board) + surplus)
}

fn free(board: &Board<'_>) -> Resources {
    board.total.saturating_sub(board.asked)
}

/// The kind of which no usable node has enough for one of the job's pods.
fn never_fits(board: &Board<'_>, job: &Job) -> Option<ResourceKind> {
    let needed = Role::ALL.into_iter().filter(|role| job.roles.of(*role).min > 0);
    for role in needed {
        let shape = job.roles.of(role).shape;
        let usable = board.nodes.iter().filter(|node| node.state == NodeState::Ready);
        let mut lacks = Some(ResourceKind::Cpu);
        for node in usable.filter(|node| job.may_use(node)) {
            lacks = shape.lacks(node.capacity);
            if lacks.is_none() {
                break;
            }
        }
        if lacks.is_some() {
            return lacks;
        }
    }
    None
}
