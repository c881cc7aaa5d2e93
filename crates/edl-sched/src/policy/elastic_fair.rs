// SPDX-License-Identifier: Apache-2.0
//! The default: nobody waits while others have more than they need, and nothing idles.
//!
//! In this order: online pods get their room; most jobs run at their minimum, as whole gangs;
//! what is left is shared out evenly, by weight, inside the quotas of queues and up to the load.
//! A job that was resized is left alone for a while unless its room is needed.

use crate::admission;
use crate::board::Board;
use crate::fairness::Measure;
use crate::growth::{self, Rules};
use crate::trim;
use crate::victims;

/// How often one plan goes through its steps. Twice is the rule: what the last step frees (a
/// server that follows its workers) may let a job start. The limit is for the case that nobody
/// has thought of.
const MOST_PASSES: u32 = 16;
/// From this pass on, a queue that must return what it borrowed borrows no more in this plan. A
/// queue without a quota can take from a lender's job, which lets another queue borrow the
/// difference until the lender's job grows back: without this the passes would never settle.
const LOANS_END: u32 = 4;

pub(crate) fn decide(board: &mut Board<'_>) {
    share_out(board, Rules { measure: Measure::Share, has_hysteresis: true });
}

/// Goes through all steps until none of them changes anything.
pub(crate) fn share_out(board: &mut Board<'_>, rules: Rules) {
    for pass in 0..MOST_PASSES {
        let bookmark = board.bookmark();
        make_room(board);
        admission::admit(board);
        for queue in trim::above_quota(board) {
            let queue = board.queues.get_mut(&queue).expect("it was on the board");
            queue.may_borrow &= pass < LOANS_END;
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

/// What comes before any training job: pods that must go, and online pods that must have room.
pub(crate) fn make_room(board: &mut Board<'_>) {
    trim::leave_nodes(board);
    trim::above_maximum(board);
    for which in 0..board.online.len() {
        let pods = board.online[which];
        board.online[which].n = victims::put_online_by_taking(board, &pods);
    }
}
