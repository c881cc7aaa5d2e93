// SPDX-License-Identifier: Apache-2.0
//! The default policy: no job waits while others have more than their minimum, and no capacity is
//! left unused.
//!
//! In this order: online pods get their capacity; as many jobs as possible run at their minimum, as
//! whole gangs; the rest is distributed evenly, by weight, within the quotas of queues and the load
//! limit. A resized job is left alone for a while, unless its capacity is needed.

use crate::admission;
use crate::board::Board;
use crate::fairness::Measure;
use crate::growth::{self, Rules};
use crate::trim;
use crate::victims;

/// The most passes of one plan. Two are usual: what the last step frees (a server that follows its
/// workers) may let a job start. The limit is a safeguard.
const MOST_PASSES: u32 = 16;
/// From this pass on, a queue that must return what it borrowed borrows no more in this plan. A
/// queue without a quota can take from a job whose queue then lets another queue borrow the
/// difference, until that job grows back: without this limit, the passes would never settle.
const BORROWING_ENDS: u32 = 4;

pub(crate) fn decide(board: &mut Board<'_>) {
    share_out(board, Rules { measure: Measure::Share, has_hysteresis: true });
}

/// Repeats all steps until none of them changes anything.
pub(crate) fn share_out(board: &mut Board<'_>, rules: Rules) {
    for pass in 0..MOST_PASSES {
        let bookmark = board.bookmark();
        clear_obligations(board);
        admission::admit(board);
        for queue in trim::above_quota(board) {
            let queue = board.queues.get_mut(&queue).expect("it was on the board");
            queue.may_borrow &= pass < BORROWING_ENDS;
        }
        trim::above_load(board);
        growth::fill(board, rules);
        growth::rebalance(board, rules);
        growth::follow_with_servers(board);
        if board.is_at(bookmark) {
            return;
        }
    }
}

/// What comes before training jobs: pods that cannot stay are removed, and online pods are placed.
pub(crate) fn clear_obligations(board: &mut Board<'_>) {
    trim::leave_nodes(board);
    trim::above_maximum(board);
    for which in 0..board.online.len() {
        let pods = board.online[which];
        board.online[which].n = victims::put_online_by_taking(board, &pods);
    }
}
