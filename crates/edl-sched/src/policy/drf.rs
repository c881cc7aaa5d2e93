// SPDX-License-Identifier: Apache-2.0
//! Dominant resource fairness: the next pod goes to the job with least; no job gives one back.

use std::cmp::Reverse;

use crate::admission;
use crate::board::{Board, JobIx};
use crate::fairness::{Measure, OrderedF64, queue_level};
use crate::growth::{self, Rules};
use crate::packing;
use crate::plan::Reason;
use crate::policy::elastic_fair;

pub(crate) fn decide(board: &mut Board<'_>) {
    loop {
        let bookmark = board.bookmark();
        elastic_fair::clear_obligations(board);
        while admit_once(board) {}
        growth::fill(board, Rules { measure: Measure::Share, has_hysteresis: false });
        growth::follow_with_servers(board);
        if board.is_at(bookmark) {
            return;
        }
    }
}

/// One pass over the waiting jobs; returns whether it stopped an incomplete one.
fn admit_once(board: &mut Board<'_>) -> bool {
    let mut has_stopped = false;
    let mut waiting = board.sound_jobs();
    waiting.retain(|job| !board.jobs[*job].has_gang());
    while let Some(job) = least_served(board, &waiting) {
        waiting.retain(|other| *other != job);
        let missing = admission::missing(board.jobs[job].job, board.jobs[job].counts);
        let put = |board: &mut Board<'_>| packing::put_gang(board, job, missing);
        if let Err(waiting) = admission::try_start(board, job, missing, Reason::Starts, put) {
            has_stopped |= admission::suspend(board, job, waiting);
        }
    }
    has_stopped
}

/// Of the highest priority and the queue with the smallest share, the job that came first.
fn least_served(board: &Board<'_>, waiting: &[JobIx]) -> Option<JobIx> {
    waiting.iter().copied().min_by_key(|job| {
        let spec = board.jobs[*job].job;
        let queue = queue_level(board, spec.queue, board.queues[&spec.queue].used);
        (Reverse(spec.priority), OrderedF64(queue), spec.submitted, spec.id)
    })
}
