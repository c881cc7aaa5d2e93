// SPDX-License-Identifier: Apache-2.0
//! Removes pods that cannot stay: on leaving nodes, and above a maximum, a quota or the load limit.

use std::cmp::Reverse;

use crate::board::{Board, JobIx, NodeIx};
use crate::fairness::{Measure, OrderedF64, level};
use crate::packing;
use crate::plan::Reason;
use crate::quota;
use crate::resources::ResourceKind;
use crate::snapshot::{NodeState, QueueId, Role};

/// Moves pods off nodes that are being removed, as far as there is free capacity.
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
            // Admission completes its minimum, and may also take from others.
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
        let entry = &board.jobs[job];
        if entry.job.fault().is_some() {
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

/// Stops surplus of queues that exceed their limit (their quota was lowered, or other queues need
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

/// Stops surplus while the load exceeds its limit and band.
pub fn above_load(board: &mut Board<'_>) {
    let options = board.options;
    let line = board.total.permille(options.max_load_permille + options.load_band_permille);
    loop {
        let over = board.asked.saturating_sub(line);
        if over.is_nothing() {
            return;
        }
        let helps = |board: &Board<'_>, job: JobIx| {
            let shape = board.jobs[job].job.roles.worker.shape;
            ResourceKind::SHARED.into_iter().any(|kind| shape.of(kind) > 0 && over.of(kind) > 0)
        };
        let Some(job) = most_surplus(board, helps) else { return };
        drop_one(board, job, Role::Worker);
        board.because(job, Reason::AboveLoad);
    }
}

/// Stops one pod of a job: first on nodes that accept no new pods, then where the job has fewest.
pub fn drop_one(board: &mut Board<'_>, job: JobIx, role: Role) {
    let entry = &board.jobs[job];
    let with_role = entry.on.iter().filter(|(_, counts)| counts.of(role) > 0);
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
        let entry = &board.jobs[*job];
        entry.surplus() > 0 && entry.has_gang() && may_give(board, *job)
    };
    (0..board.jobs.len()).filter(gives).min_by_key(|job| {
        let entry = &board.jobs[*job];
        let share = OrderedF64(level(board, *job, entry.counts, Measure::Share));
        (entry.job.priority, Reverse(share), entry.job.id)
    })
}
