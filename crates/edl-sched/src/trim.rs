// SPDX-License-Identifier: Apache-2.0
//! What has to go whatever else happens: pods on leaving nodes, above a maximum, a quota or the
//! load that was asked for.

use std::cmp::Reverse;

use crate::board::{Board, JobIx, NodeIx};
use crate::fairness::{Measure, Sorted, level};
use crate::packing;
use crate::plan::Reason;
use crate::quota;
use crate::resources::Resources;
use crate::snapshot::{NodeState, QueueId, Role};

/// Moves pods off nodes that are going away, as far as there is free room for them.
pub fn leave_nodes(board: &mut Board<'_>) {
    for job in 0..board.jobs.len() {
        let leaving: Vec<(NodeIx, _)> = board.jobs[job]
            .on
            .iter()
            .filter(|(node, _)| board.nodes[**node].state == NodeState::Leaving)
            .map(|(node, counts)| (*node, *counts))
            .collect();
        for (node, counts) in leaving {
            for role in Role::ALL {
                board.take(job, role, node, counts.of(role));
            }
            board.because(job, Reason::NodeLeaves(board.nodes[node].id));
            // Its minimum is made whole by admission, which may also take from others.
            for _ in 0..counts.worker.min(board.jobs[job].surplus() + counts.worker) {
                if packing::put_worker(board, job).is_none() {
                    break;
                }
            }
        }
    }
}

/// Stops pods above a job's maximum.
pub fn above_maximum(board: &mut Board<'_>) {
    for job in 0..board.jobs.len() {
        let seat = &board.jobs[job];
        if seat.job.fault().is_some() {
            continue;
        }
        for role in Role::ALL {
            let max = board.jobs[job].job.roles.of(role).max;
            while board.jobs[job].counts.of(role) > max {
                drop_one(board, job, role);
                board.because(job, Reason::AboveMaximum);
            }
        }
    }
}

/// Stops surplus of queues that use more than they may (their quota was lowered, or others need
/// theirs again), and returns these queues.
pub fn above_quota(board: &mut Board<'_>) -> Vec<QueueId> {
    let beyond = |queue: &QueueId| quota::is_beyond(board, *queue);
    let queues: Vec<QueueId> = board.queues.keys().copied().filter(beyond).collect();
    for &queue in &queues {
        while quota::is_beyond(board, queue) {
            let of_queue = |board: &Board<'_>, job: JobIx| board.jobs[job].job.queue == queue;
            let Some(job) = most_surplus(board, of_queue) else { break };
            drop_one(board, job, Role::Worker);
            board.because(job, Reason::AboveQuota(queue));
        }
    }
    queues
}

/// Stops surplus while more is asked for than the load and its band allow.
pub fn above_load(board: &mut Board<'_>) {
    let options = board.options;
    let line = board.total.permille(options.max_load_permille + options.load_band_permille);
    loop {
        let over = board.asked.saturating_sub(line);
        if over == Resources::ZERO {
            return;
        }
        let helps =
            |board: &Board<'_>, job: JobIx| overlaps(board.jobs[job].job.roles.worker.shape, over);
        let Some(job) = most_surplus(board, helps) else { return };
        drop_one(board, job, Role::Worker);
        board.because(job, Reason::AboveLoad);
    }
}

/// Stops one pod of a job: on nodes that take nothing new first, then where the job has fewest.
pub fn drop_one(board: &mut Board<'_>, job: JobIx, role: Role) {
    let seat = &board.jobs[job];
    let with_role = seat.on.iter().filter(|(_, counts)| counts.of(role) > 0);
    let worst = with_role.min_by_key(|(node, counts)| {
        (board.nodes[**node].state == NodeState::Ready, counts.sum(), Reverse(**node))
    });
    if let Some(node) = worst.map(|(node, _)| *node) {
        board.take(job, role, node, 1);
    }
}

/// The job with surplus that should give first: the lowest priority, then the largest share.
fn most_surplus(board: &Board<'_>, may_give: impl Fn(&Board<'_>, JobIx) -> bool) -> Option<JobIx> {
    let gives = |job: &JobIx| {
        let seat = &board.jobs[*job];
        seat.surplus() > 0 && seat.has_gang() && may_give(board, *job)
    };
    (0..board.jobs.len()).filter(gives).min_by_key(|job| {
        let seat = &board.jobs[*job];
        let share = Sorted(level(board, *job, seat.counts, Measure::Share));
        (seat.job.priority, Reverse(share), seat.job.id)
    })
}

fn overlaps(a: Resources, b: Resources) -> bool {
    (a.gpu > 0 && b.gpu > 0)
        || (a.cpu_milli > 0 && b.cpu_milli > 0)
        || (a.memory_mib > 0 && b.memory_mib > 0)
}
