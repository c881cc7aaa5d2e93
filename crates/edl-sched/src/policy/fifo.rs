// SPDX-License-Identifier: Apache-2.0
//! Whole jobs at full size, strictly in order of arrival: who does not fit holds up the rest.

use std::cmp::Reverse;

use crate::admission;
use crate::board::{Board, JobIx};
use crate::packing;
use crate::plan::{Reason, Waiting};
use crate::policy::elastic_fair;
use crate::quota;

pub(crate) fn decide(board: &mut Board<'_>) {
    loop {
        let bookmark = board.bookmark();
        elastic_fair::make_room(board);
        // What a broken gang gives up may help the head of the line.
        while admit_once(board) {}
        if board.is_at(bookmark) {
            return;
        }
    }
}

/// One walk along the line; says whether it stopped a broken gang.
fn admit_once(board: &mut Board<'_>) -> bool {
    let n_before = n_broken(board);
    let mut order: Vec<JobIx> = (0..board.jobs.len()).collect();
    order.sort_by_key(|job| {
        let seat = &board.jobs[*job];
        (Reverse(seat.job.priority), seat.job.submitted, seat.job.id)
    });
    let mut behind = None;
    for job in order {
        let seat = &board.jobs[job];
        let spec = seat.job;
        if seat.has_gang() {
            continue;
        }
        if let Some(fault) = spec.fault() {
            board.jobs[job].waiting = Some(Waiting::Faulty(fault));
            continue;
        }
        if let Some(head) = behind {
            stop(board, job, Waiting::Behind(head));
            continue;
        }
        let has = seat.counts;
        let mut wanted = admission::missing(spec, has);
        let full = spec.counts_at(spec.roles.worker.max);
        if has.sum() == 0 {
            wanted = full;
        }
        let more = spec.resources(wanted);
        if let Some(kind) = admission::never_fits(board, spec) {
            stop(board, job, Waiting::NeverFits(kind));
        } else if !quota::allows(board, spec.queue, more) {
            stop(board, job, Waiting::QuotaUsed(spec.queue));
        } else if packing::put_gang(board, job, wanted) {
            board.because(job, Reason::StartsWhole);
            board.jobs[job].waiting = None;
        } else {
            let free = board.total.saturating_sub(board.asked);
            stop(board, job, more.lacks(free).map_or(Waiting::Fragmented, Waiting::NoRoom));
            behind = Some(spec.id);
        }
    }
    n_broken(board) < n_before
}

fn n_broken(board: &Board<'_>) -> usize {
    board.jobs.iter().filter(|seat| seat.counts.sum() > 0 && !seat.has_gang()).count()
}

/// Lets a job wait; pods of a broken gang are of no use meanwhile.
fn stop(board: &mut Board<'_>, job: JobIx, waiting: Waiting) {
    if board.jobs[job].counts.sum() > 0 {
        board.take_all(job);
        board.because(job, Reason::Incomplete);
    }
    board.jobs[job].waiting = Some(waiting);
}
