// SPDX-License-Identifier: Apache-2.0
//! No planner: every job's pods exist from the start at full size, and Kubernetes places what
//! it can, pod by pod.

use crate::board::Board;
use crate::plan::{Reason, Waiting};

pub(crate) fn decide(board: &mut Board<'_>) {
    for job in 0..board.jobs.len() {
        let seat = &mut board.jobs[job];
        if let Some(fault) = seat.job.fault() {
            seat.waiting = Some(Waiting::Faulty(fault));
            continue;
        }
        let full = seat.job.counts_at(seat.job.roles.worker.max);
        seat.wanted = Some(full);
        if !seat.has_gang() {
            seat.waiting = Some(Waiting::LeftToKubernetes);
        }
        board.because(job, Reason::StartsWhole);
    }
}
