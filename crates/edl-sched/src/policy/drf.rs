// SPDX-License-Identifier: Apache-2.0
//! Dominant resource fairness: the next pod goes to whoever has least; nobody gives one back.

use std::cmp::Reverse;

use crate::admission;
use crate::board::{Board, JobIx};
use crate::fairness::{Measure, Sorted, queue_level};
use crate::growth::{self, Rules};
use crate::packing;
use crate::plan::{Reason, Waiting};
use crate::policy::elastic_fair;
use crate::quota;

pub(crate) fn decide(board: &mut Board<'_>) {
    loop {
        let bookmark = board.bookmark();
        elastic_fair::make_room(board);
        while admit_once(board) {}
        growth::fill(board, Rules { measure: Measure::Share, has_hysteresis: false });
        growth::follow_with_servers(board);
        if board.is_at(bookmark) {
            return;
        }
    }
}

/// Looks at every job that waits; says whether a broken gang gave up its room.
fn admit_once(board: &mut Board<'_>) -> bool {
    let mut has_stopped = false;
    let mut waiting = board.sound_jobs();
    waiting.retain(|job| !board.jobs[*job].has_gang());
    while let Some(job) = least_served(board, &waiting) {
        waiting.retain(|other| *other != job);
        has_stopped |= admit(board, job);
    }
    has_stopped
}

/// Of the highest priority and the queue with the smallest share, the job that came first.
fn least_served(board: &Board<'_>, waiting: &[JobIx]) -> Option<JobIx> {
    waiting.iter().copied().min_by_key(|job| {
        let spec = board.jobs[*job].job;
        let queue = queue_level(board, spec.queue, board.queues[&spec.queue].used);
        (Reverse(spec.priority), Sorted(queue), spec.submitted, spec.id)
    })
}

/// Makes one job whole, or lets it wait; says whether it had to give up a broken gang.
fn admit(board: &mut Board<'_>, job: JobIx) -> bool {
    let spec = board.jobs[job].job;
    let missing = admission::missing(spec, board.jobs[job].counts);
    let more = spec.resources(missing);
    let waiting = if let Some(kind) = admission::never_fits(board, spec) {
        Waiting::NeverFits(kind)
    } else if !quota::allows(board, spec.queue, more) {
        Waiting::QuotaUsed(spec.queue)
    } else if packing::put_gang(board, job, missing) {
        board.because(job, Reason::Starts);
        board.jobs[job].waiting = None;
        return false;
    } else {
        let free = board.total.saturating_sub(board.asked);
        more.lacks(free).map_or(Waiting::Fragmented, Waiting::NoRoom)
    };
    let is_broken = board.jobs[job].counts.sum() > 0;
    if is_broken {
        board.take_all(job);
        board.because(job, Reason::Incomplete);
    }
    board.jobs[job].waiting = Some(waiting);
    is_broken
}
