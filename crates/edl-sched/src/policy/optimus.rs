// SPDX-License-Identifier: Apache-2.0
//! Optimus: one worker for every job, then one more for the job whose remaining time it reduces most.

use crate::board::{Board, JobIx};
use crate::packing;
use crate::plan::{Reason, Waiting};
use crate::policy::elastic_fair;
use crate::quota;

pub(crate) fn decide(board: &mut Board<'_>) {
    elastic_fair::clear_obligations(board);
    let wanted = wanted(board);
    // A job whose size does not change keeps its nodes; the others are placed again, smallest first.
    let mut moving: Vec<(u32, JobIx)> = Vec::new();
    for (job, n) in wanted {
        let entry = &board.jobs[job];
        if entry.has_gang() && entry.counts.worker == n {
            continue;
        }
        moving.push((n, job));
    }
    for (_, job) in &moving {
        board.take_all(*job);
    }
    moving.sort_by_key(|(n, job)| (*n, board.jobs[*job].job.submitted, board.jobs[*job].job.id));
    for (n, job) in moving {
        place(board, job, n);
    }
}

/// How many workers each job should have.
fn wanted(board: &mut Board<'_>) -> Vec<(JobIx, u32)> {
    let ours = board.jobs.iter().map(|entry| entry.used()).sum();
    let mut left = board.total.saturating_sub(board.asked) + ours;
    let mut order = board.sound_jobs();
    order.sort_by_key(|job| {
        let spec = board.jobs[*job].job;
        (spec.roles.worker.min, spec.submitted, spec.id)
    });
    let mut wanted: Vec<(JobIx, u32)> = Vec::new();
    for job in order {
        let spec = board.jobs[job].job;
        let gang = spec.resources(spec.gang());
        if gang.fits_in(left) {
            left -= gang;
            wanted.push((job, spec.roles.worker.min));
        } else {
            wanted.push((job, 0));
        }
    }
    let mut gains: Vec<f64> = wanted.iter().map(|(job, n)| gain(board, *job, *n)).collect();
    loop {
        // The first of equals, as `max_by` would give the last.
        let best = (0..gains.len()).rev().max_by(|a, b| gains[*a].total_cmp(&gains[*b]));
        let Some(best) = best.filter(|best| gains[*best] > 0.0) else { return wanted };
        let (job, n) = wanted[best];
        let shape = board.jobs[job].job.roles.worker.shape;
        if !shape.fits_in(left) {
            gains[best] = 0.0;
            continue;
        }
        left -= shape;
        wanted[best] = (job, n + 1);
        gains[best] = gain(board, job, n + 1);
    }
}

/// The time that one more worker saves a job.
fn gain(board: &Board<'_>, job: JobIx, n: u32) -> f64 {
    let spec = board.jobs[job].job;
    if n == 0 || n >= spec.roles.worker.max {
        return 0.0;
    }
    let Some(speed) = &spec.speed else {
        // Unknown speed: assume that it scales linearly.
        return 1.0 / f64::from(n) - 1.0 / f64::from(n + 1);
    };
    let per_node = packing::most_on_a_node(board, job);
    let secs = |n: u32| 1.0 / speed.packed(n, per_node).max(1e-12);
    (secs(n) - secs(n + 1)) * speed.remaining
}

/// Places a job with `n` workers, or with as many as fit.
fn place(board: &mut Board<'_>, job: JobIx, n: u32) {
    let spec = board.jobs[job].job;
    let reason = match board.jobs[job].n_before {
        0 => Reason::Starts,
        before if before < n => Reason::LargestGain,
        _ => Reason::SmallestLoss,
    };
    board.because(job, reason);
    for n in (spec.roles.worker.min..=n).rev() {
        let counts = spec.counts_at(n);
        let put = |board: &mut Board<'_>| packing::put_spread(board, job, n);
        if quota::allows(board, spec.queue, spec.resources(counts))
            && packing::put_job(board, job, counts, put)
        {
            board.jobs[job].waiting = None;
            return;
        }
    }
    let waiting = if n == 0 { Waiting::Outranked } else { Waiting::Fragmented };
    board.jobs[job].waiting = Some(waiting);
}
