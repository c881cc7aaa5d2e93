// SPDX-License-Identifier: Apache-2.0
//! The machine of a worker under AllReduce and Hybrid: which world it is in, what it does next,
//! and what it tells the master.
//!
//! A worker is *in* a world when it trains with its members, and *between* worlds otherwise:
//! before the first, after a member was lost or a step failed here, or when it is not a member.
//! One activity is under way at a time. Events of the master may come at any time; most of them
//! take effect when the activity ends. Numbers stay with the caller, found by step, lane, lease
//! and partition.

mod effect;
mod event;
mod level;
mod report;

use crate::batch::BatchPlan;
use crate::id::{Incarnation, WorkerId};

pub use self::effect::{Activity, Effect, Step};
pub use self::event::{Event, Failure, Order, Outcome, Place, Shard};
pub use self::level::Move;
pub use self::report::Report;

/// What does not change while the process lives.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    pub worker: WorkerId,
    pub incarnation: Incarnation,
    /// A batch is one step of all lanes.
    pub plan: BatchPlan,
    pub n_lanes: u32,
    /// 0 trains until stopped.
    pub num_epochs: u32,
    /// Records of a minibatch of a shard.
    pub minibatch: u32,
    /// Partitions that workers hold.
    pub n_partitions: u32,
    /// Hybrid: servers hold embedding tables.
    pub has_tables: bool,
    /// The number of a member's lanes follows its speed.
    pub is_balanced: bool,
}
