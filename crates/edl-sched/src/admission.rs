// SPDX-License-Identifier: Apache-2.0
//! Which jobs run at all: whole minimums, as many as can be, and nobody overtaken for ever.

use std::cmp::Reverse;

use crate::board::{Board, JobIx};
use crate::fairness::Sorted;
use crate::packing;
use crate::plan::{Reason, Waiting};
use crate::quota;
use crate::resources::{Kind, Resources};
use crate::snapshot::{Counts, Job, NodeState, Role};
use crate::victims;

/// Starts every job whose minimum finds room, by taking surplus if need be, and stops those that
/// lost pods and cannot be made whole.
pub fn admit(board: &mut Board<'_>) {
    // What a broken gang gives up may help a job that was looked at before it. A gang that is
    // stopped has no pods left to give up, so there are not more passes than jobs.
    while admit_once(board) {}
}

/// One pass over the jobs that wait; says whether it stopped a broken gang.
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
        if board.jobs[job].counts.sum() > 0 {
            board.take_all(job);
            board.because(job, Reason::Incomplete);
            has_stopped = true;
        }
        let has_waited = board.now.since(spec.submitted) >= board.options.patience;
        let could_run = matches!(waiting, Waiting::NoRoom(_) | Waiting::Fragmented);
        if has_waited && could_run && behind.is_none() {
            behind = Some((job, spec.priority));
        }
        board.jobs[job].waiting = Some(waiting);
    }
    has_stopped
}

/// Jobs without their minimum: by priority, then those who waited too long, then those whose
/// queue is within its quota, then the smallest, so that most jobs run.
fn order(board: &mut Board<'_>) -> Vec<JobIx> {
    let mut order = Vec::new();
    for job in 0..board.jobs.len() {
        let seat = &mut board.jobs[job];
        match seat.job.fault() {
            Some(fault) if seat.counts.sum() == 0 => seat.waiting = Some(Waiting::Faulty(fault)),
            // Whoever runs goes on as it was, until its owner mends what it edited.
            Some(_) => {}
            None if !seat.has_gang() => order.push(job),
            None => {}
        }
    }
    order.sort_by_cached_key(|job| {
        let seat = &board.jobs[*job];
        let spec = seat.job;
        let gang = spec.resources(spec.gang());
        let has_waited = board.now.since(spec.submitted) >= board.options.patience;
        let waited_since = has_waited.then_some(spec.submitted);
        let is_incomplete = seat.counts.sum() > 0;
        let is_own = quota::is_own(board, spec.queue, gang);
        let size = Sorted(gang.dominant_share(board.total));
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

/// Makes one job whole, or says why not. Jobs that it displaces are added to `order`.
fn start(board: &mut Board<'_>, job: JobIx, order: &mut Vec<JobIx>) -> Result<(), Waiting> {
    let spec = board.jobs[job].job;
    let missing = missing(spec, board.jobs[job].counts);
    if let Some(kind) = never_fits(board, spec) {
        return Err(Waiting::NeverFits(kind));
    }
    if !quota::allows(board, spec.queue, spec.resources(missing)) {
        return Err(Waiting::QuotaUsed(spec.queue));
    }
    let was_whole = board.jobs[job].before.is_empty();
    let reason = if was_whole { Reason::Starts } else { Reason::Incomplete };
    let fits = packing::put_gang(board, job, missing)
        || (may_fit_by_taking(board, job, missing)
            && victims::put_gang_by_taking(board, job, missing))
        || displace(board, job, missing, order);
    if fits {
        board.because(job, reason);
        board.jobs[job].waiting = None;
        return Ok(());
    }
    Err(match spec.resources(missing).lacks(free(board)) {
        Some(kind) => Waiting::NoRoom(kind),
        None => Waiting::Fragmented,
    })
}

/// Stops jobs of lower priority, the lowest and youngest first, until the minimum of `job` fits.
fn displace(board: &mut Board<'_>, job: JobIx, missing: Counts, order: &mut Vec<JobIx>) -> bool {
    let spec = board.jobs[job].job;
    let is_lower = |other: &JobIx| {
        let seat = &board.jobs[*other];
        seat.job.priority < spec.priority && seat.counts.sum() > 0 && seat.job.fault().is_none()
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

/// Whether what is free and what others have above their minimum is enough in all: a quick
/// answer for the many jobs that wait in a full cluster.
fn may_fit_by_taking(board: &Board<'_>, job: JobIx, missing: Counts) -> bool {
    let spec = board.jobs[job].job;
    let gives = |seat: &&crate::board::Seat<'_>| seat.job.priority <= spec.priority;
    let surplus =
        |seat: &crate::board::Seat<'_>| seat.job.roles.worker.shape * u64::from(seat.surplus());
    let surplus: Resources = board.jobs.iter().filter(gives).map(surplus).sum();
    surplus != Resources::ZERO && spec.resources(missing).fits_in(free(board) + surplus)
}

fn free(board: &Board<'_>) -> Resources {
    board.total.saturating_sub(board.asked)
}

/// The kind of which no usable node has enough for one of the job's pods.
#[must_use]
pub fn never_fits(board: &Board<'_>, job: &Job) -> Option<Kind> {
    let needed = Role::ALL.into_iter().filter(|role| job.roles.of(*role).min > 0);
    for role in needed {
        let shape = job.roles.of(role).shape;
        let usable = board.nodes.iter().filter(|node| node.state == NodeState::Ready);
        let mut lacks = Some(Kind::Cpu);
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
