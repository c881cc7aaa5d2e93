// SPDX-License-Identifier: Apache-2.0
//! The policies, one file each. All work on the same board; none does I/O or reads a clock.

pub mod drf;
pub mod edl;
pub mod elastic_fair;
pub mod fifo;
pub mod goodput;
pub mod off;
pub mod optimus;
pub mod pollux;
pub mod tiresias;

use crate::board::Board;
use crate::state::{PlannerState, Policy};

/// Runs a policy on the board; `next` is the state for the next plan.
pub(crate) fn decide(board: &mut Board<'_>, policy: Policy, next: &mut PlannerState) {
    match policy {
        Policy::Off => off::decide(board),
        Policy::Fifo => fifo::decide(board),
        Policy::Drf => drf::decide(board),
        Policy::Tiresias => tiresias::decide(board, next),
        Policy::Optimus => optimus::decide(board),
        Policy::Pollux => pollux::decide(board),
        Policy::Goodput => goodput::decide(board, next),
        Policy::Edl => edl::decide(board),
        Policy::EdlPublished => edl::decide_as_published(board),
        Policy::ElasticFair => elastic_fair::decide(board),
    }
}
