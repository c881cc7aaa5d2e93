// SPDX-License-Identifier: Apache-2.0
//! Tiresias: jobs at full size; those that have had less GPU time go first.
//!
//! Two queues. A job falls to the second when it has had 16 GPU-hours, and never rises again.
//! Each plan walks both in order: who fits in what is left runs, everybody else is stopped.

use std::time::Duration;

use crate::board::{Board, JobIx};
use crate::packing;
use crate::plan::{Reason, Waiting};
use crate::policy::elastic_fair;
use crate::quota;
use crate::snapshot::Role;
use crate::state::State;

/// Worker time after which a job falls to the second queue.
const THRESHOLD: Duration = Duration::from_secs(16 * 3600);

pub(crate) fn decide(board: &mut Board<'_>, next: &mut State) {
    elastic_fair::make_room(board);
    let order = order(board, next);
    let ours = board.jobs.iter().map(|seat| seat.used()).sum();
    let mut left = board.total.saturating_sub(board.asked) + ours;
    let mut runs: Vec<JobIx> = Vec::new();
    for job in order {
        let seat = &board.jobs[job];
        let full = seat.job.counts_at(seat.job.roles.worker.max);
        let need = seat.job.resources(full);
        if need.fits_in(left) {
            left -= need;
            runs.push(job);
            continue;
        }
        if seat.counts.sum() > 0 {
            board.take_all(job);
            board.because(job, Reason::LessServedFirst);
        }
        board.jobs[job].waiting = Some(Waiting::Outranked);
    }
    for job in &runs {
        if !board.jobs[*job].has_gang() && board.jobs[*job].counts.sum() > 0 {
            board.take_all(*job);
            board.because(*job, Reason::Incomplete);
        }
    }
    for job in runs {
        if board.jobs[job].counts.sum() == 0 {
            start(board, job);
        }
    }
}

/// First those that have had little, as they came; then the demoted, as they fell.
fn order(board: &mut Board<'_>, next: &mut State) -> Vec<JobIx> {
    let mut order = board.sound_jobs();
    order.sort_by_key(|job| (board.jobs[*job].job.submitted, board.jobs[*job].job.id));
    for job in &order {
        let spec = board.jobs[*job].job;
        let had = spec.ran.saturating_mul(spec.roles.worker.max);
        let memory = next.jobs.entry(spec.id).or_default();
        if had >= THRESHOLD && memory.demoted.is_none() {
            memory.demoted = Some(next.n_demoted);
            next.n_demoted += 1;
        }
    }
    // Stable: the order of arrival stays where nobody was demoted.
    order.sort_by_key(|job| next.jobs[&board.jobs[*job].job.id].demoted);
    order
}

fn start(board: &mut Board<'_>, job: JobIx) {
    let spec = board.jobs[job].job;
    let full = spec.counts_at(spec.roles.worker.max);
    let bookmark = board.bookmark();
    let mut others = full;
    *others.of_mut(Role::Worker) = 0;
    let waiting = if !quota::allows(board, spec.queue, spec.resources(full)) {
        Waiting::QuotaUsed(spec.queue)
    } else if packing::put_spread(board, job, full.worker) && packing::put_gang(board, job, others)
    {
        board.because(job, Reason::StartsWhole);
        board.jobs[job].waiting = None;
        return;
    } else {
        Waiting::Fragmented
    };
    board.rewind(bookmark);
    board.jobs[job].waiting = Some(waiting);
}
