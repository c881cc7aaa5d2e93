// SPDX-License-Identifier: Apache-2.0
//! What the loop of AllReduce gets from the session and from other threads.

use edl_core::id::LeaseId;
use edl_core::route::Route;
use edl_net::proto;

use crate::allreduce;

/// Something that happened.
pub(crate) enum Event {
    Route(Route),
    Lease(LeaseId, Loan),
    Revoke(LeaseId),
    /// A master has admitted this worker again, and has assigned its shards to others meanwhile.
    Rejoined,
    AllReduce(Box<allreduce::Event>),
    /// Exit as soon as the other members do not need this worker.
    Leave,
    /// Exit now.
    Stop,
    /// A thread that is needed has panicked.
    Died(&'static str),
}

/// Work as the master assigns it.
#[derive(Debug)]
pub(crate) enum Loan {
    Evaluate(proto::EvalWork),
    /// Only workers with parameter servers do this.
    Other,
}

/// A thread that is needed has panicked.
#[derive(Debug, thiserror::Error)]
#[error("the {0} thread panicked")]
pub(crate) struct Died(pub(crate) &'static str);
