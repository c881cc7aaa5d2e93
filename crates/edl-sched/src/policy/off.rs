// SPDX-License-Identifier: Apache-2.0
//! No planner: all pods of every job exist from the start, and Kubernetes schedules them one by one.

use crate::board::Board;
use crate::plan::{Reason, Waiting};

pub(crate) fn decide(board: &mut Board<'_>) {
    for job in 0..board.jobs.len() {
        let entry = &mut board.jobs[job];
        if let Some(fault) = entry.job.fault() {
            entry.waiting = Some(Waiting::Faulty(fault));
            continue;
        }
        let full = entry.job.counts_at(entry.job.roles.worker.max);
        entry.wanted = Some(full);
        if !entry.has_gang() {
            entry.waiting = Some(Waiting::LeftToKubernetes);
        }
        board.because(job, Reason::StartsWhole);
    }
}
