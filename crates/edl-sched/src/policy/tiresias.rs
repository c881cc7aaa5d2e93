// SPDX-License-Identifier: Apache-2.0
//! Tiresias: jobs at full size; those that have had less GPU time go first.
//!
//! There are two queues. After 16 GPU-hours, a job moves to the second queue for good. Each plan
//! goes through both in order: jobs that fit in what is left run, and the others are stopped.

use std::time::Duration;

use crate::board::{Board, JobIx};
use crate::packing;
use crate::plan::{Reason, Waiting};
use crate::policy::elastic_fair;
use crate::quota;
use crate::state::PlannerState;

/// Worker time after which a job moves to the second queue.
const THRESHOLD: Duration = Duration::from_secs(16 * 3600);

pub(crate) fn decide(board: &mut Board<'_>, next: &mut PlannerState) {
    elastic_fair::clear_obligations(board);
    let order = order(board, next);
    let ours = board.jobs.iter().map(|entry| entry.used()).sum();
    let mut left = board.total.saturating_sub(board.asked) + ours;
    let mut runs: Vec<JobIx> = Vec::new();
    for job in order {
        let entry = &board.jobs[job];
        let full = entry.job.counts_at(entry.job.roles.worker.max);
        let need = entry.job.resources(full);
        if need.fits_in(left) {
            left -= need;
            runs.push(job);
            continue;
        }
        if entry.counts.sum() > 0 {
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

/// First the jobs with little GPU time, in order of arrival, then the demoted, in order of demotion.
fn order(board: &mut Board<'_>, next: &mut PlannerState) -> Vec<JobIx> {
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
    // A stable sort, which keeps the order of arrival.
    order.sort_by_key(|job| next.jobs[&board.jobs[*job].job.id].demoted);
    order
}

fn start(board: &mut Board<'_>, job: JobIx) {
    let spec = board.jobs[job].job;
    let full = spec.counts_at(spec.roles.worker.max);
    let put = |board: &mut Board<'_>| packing::put_spread(board, job, full.worker);
    board.jobs[job].waiting = if !quota::allows(board, spec.queue, spec.resources(full)) {
        Some(Waiting::QuotaUsed(spec.queue))
    } else if !packing::put_job(board, job, full, put) {
        Some(Waiting::Fragmented)
    } else {
        board.because(job, Reason::StartsWhole);
        None
    };
}
