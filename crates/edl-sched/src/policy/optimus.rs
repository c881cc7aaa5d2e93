// SPDX-License-Identifier: Apache-2.0
//! Optimus: one worker for everybody, then one more for whoever's remaining time it shortens most.

use crate::board::{Board, JobIx};
use crate::packing;
use crate::plan::{Reason, Waiting};
use crate::policy::elastic_fair;
use crate::quota;
use crate::snapshot::Role;

pub(crate) fn decide(board: &mut Board<'_>) {
    elastic_fair::make_room(board);
    let wanted = wanted(board);
    // Who keeps its number keeps its places; all others are placed anew, the smallest first.
    let mut anew: Vec<(u32, JobIx)> = Vec::new();
    for (job, n) in wanted {
        let seat = &board.jobs[job];
        if seat.has_gang() && seat.counts.worker == n {
            continue;
        }
        anew.push((n, job));
    }
    for (_, job) in &anew {
        board.take_all(*job);
    }
    anew.sort_by_key(|(n, job)| (*n, board.jobs[*job].job.submitted, board.jobs[*job].job.id));
    for (n, job) in anew {
        place(board, job, n);
    }
}

/// How many workers each job should have.
fn wanted(board: &mut Board<'_>) -> Vec<(JobIx, u32)> {
    let ours = board.jobs.iter().map(|seat| seat.used()).sum();
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

/// The time that one worker more saves a job.
fn gain(board: &Board<'_>, job: JobIx, n: u32) -> f64 {
    let spec = board.jobs[job].job;
    if n == 0 || n >= spec.roles.worker.max {
        return 0.0;
    }
    let Some(speed) = &spec.speed else {
        // Nothing is known: as if twice as many were twice as fast.
        return 1.0 / f64::from(n) - 1.0 / f64::from(n + 1);
    };
    let per_node = packing::most_on_a_node(board, job);
    let secs = |n: u32| 1.0 / speed.packed(n, per_node).max(1e-12);
    (secs(n) - secs(n + 1)) * speed.remaining
}

/// Places a job with `n` workers, or fewer if so many do not fit on the nodes there are.
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
        let mut others = counts;
        *others.of_mut(Role::Worker) = 0;
        let bookmark = board.bookmark();
        if quota::allows(board, spec.queue, spec.resources(counts))
            && packing::put_spread(board, job, n)
            && packing::put_gang(board, job, others)
        {
            board.jobs[job].waiting = None;
            return;
        }
        board.rewind(bookmark);
    }
    let waiting = if n == 0 { Waiting::Outranked } else { Waiting::Fragmented };
    board.jobs[job].waiting = Some(waiting);
}
