// SPDX-License-Identifier: Apache-2.0
//! Whole jobs at full size, strictly in order of arrival: a job that does not fit blocks the rest.

use std::cmp::Reverse;

use crate::admission;
use crate::board::Board;
use crate::packing;
use crate::plan::{Reason, Waiting};
use crate::policy::elastic_fair;

pub(crate) fn decide(board: &mut Board<'_>) {
    loop {
        let bookmark = board.bookmark();
        elastic_fair::clear_obligations(board);
        // The pods of an incomplete job may help the first job in the queue.
        while admit_once(board) {}
        if board.is_at(bookmark) {
            return;
        }
    }
}

/// One pass over the jobs that wait; returns whether it stopped an incomplete one.
fn admit_once(board: &mut Board<'_>) -> bool {
    let mut order = board.sound_jobs();
    order.retain(|job| !board.jobs[*job].has_gang());
    order.sort_by_key(|job| {
        let spec = board.jobs[*job].job;
        (Reverse(spec.priority), spec.submitted, spec.id)
    });
    let mut has_stopped = false;
    let mut behind = None;
    for job in order {
        let spec = board.jobs[job].job;
        let has = board.jobs[job].counts;
        let missing = match has.sum() {
            0 => spec.counts_at(spec.roles.worker.max),
            _ => admission::missing(spec, has),
        };
        let put = |board: &mut Board<'_>| packing::put_gang(board, job, missing);
        let started = match behind {
            Some(head) => Err(Waiting::Behind(head)),
            None => admission::try_start(board, job, missing, Reason::StartsWhole, put),
        };
        let Err(waiting) = started else { continue };
        if matches!(waiting, Waiting::NoCapacity(_) | Waiting::Fragmented) {
            behind = Some(spec.id);
        }
        has_stopped |= admission::suspend(board, job, waiting);
    }
    has_stopped
}
