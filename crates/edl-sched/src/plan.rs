// SPDX-License-Identifier: Apache-2.0
//! What should change, and why: the answer of every policy.

use std::collections::BTreeMap;
use std::fmt;

use edl_core::time::Time;

use crate::resources::Kind;
use crate::snapshot::{Counts, Fault, JobId, NodeId, Placed, QueueId, ServiceId};
use crate::state::State;

/// What to do next. Applying it leaves nothing to decide.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// One entry for each job whose pods change, in order of job.
    pub changes: Vec<Change>,
    /// Why each job that has less than its minimum waits.
    pub waiting: BTreeMap<JobId, Waiting>,
    /// Where the waiting online pods can go once the plan is applied.
    pub room: Vec<OnlineRoom>,
    /// What the next plan must remember.
    pub state: State,
    pub made: Time,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    pub job: JobId,
    /// How many pods it has then.
    pub target: Counts,
    pub placing: Placing,
    /// Never empty; in the order in which they came up.
    pub reasons: Vec<Reason>,
}

/// Who chooses nodes and victims.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Placing {
    /// The plan: these pods are started and these are stopped.
    Named { start: Vec<Placed>, stop: Vec<Placed> },
    /// Kubernetes: the plan gives numbers alone, as EDL did.
    Kubernetes,
}

/// Why a job's pods change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reason {
    /// Its whole minimum fits: it starts.
    Starts,
    /// It is started with the size it asked for.
    StartsWhole,
    /// Room that nobody needs.
    FreeRoom,
    /// It has less than its fair share, and `from` has more.
    BelowFairShare { from: JobId },
    /// It has more than its fair share, and `to` has less.
    AboveFairShare { to: JobId },
    /// Its surplus makes room for the minimum of a job that waits.
    MakesRoomForJob(JobId),
    /// Its surplus makes room for pods of an online service.
    MakesRoomForService(ServiceId),
    /// A job of higher priority takes its place.
    Preempted { by: JobId },
    /// It takes from a job of lower priority.
    HigherPriority { than: JobId },
    /// The cluster is above the load that was asked for.
    AboveLoad,
    /// Its queue uses more than it may.
    AboveQuota(QueueId),
    /// It has more pods than its maximum.
    AboveMaximum,
    /// It has fewer pods than its minimum (some were lost), and cannot run so.
    Incomplete,
    /// The node that some of its pods are on is going away.
    NodeLeaves(NodeId),
    /// It cannot run as it was written.
    Faulty(Fault),
    /// Another worker helps it more than any other job.
    LargestGain,
    /// Its workers help others more.
    SmallestLoss,
    /// It has had more GPU time than jobs that wait.
    LessServedFirst,
    /// Least fulfilled of all (EDL's rule for more).
    LeastFulfilled,
    /// Most fulfilled of all (EDL's rule for fewer).
    MostFulfilled,
    /// Its servers keep step with its workers.
    ServersFollow,
}

/// Why a job has less than its minimum.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Waiting {
    Faulty(Fault),
    /// One of its pods is larger than any node that it may use.
    NeverFits(Kind),
    /// Not enough of this, even with all surplus of others.
    NoRoom(Kind),
    /// There would be enough in all, but not on nodes that hold its pods.
    Fragmented,
    QuotaUsed(QueueId),
    /// A job that has waited for long comes first.
    Behind(JobId),
    /// Others are to run first.
    Outranked,
    /// Its pods are made; Kubernetes has not placed them.
    LeftToKubernetes,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OnlineRoom {
    pub service: ServiceId,
    pub node: NodeId,
    pub n: u32,
}

impl Plan {
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.changes.is_empty()
    }

    #[must_use]
    pub fn change_of(&self, job: JobId) -> Option<&Change> {
        let at = self.changes.binary_search_by_key(&job, |change| change.job).ok()?;
        Some(&self.changes[at])
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Starts => f.write_str("enough free capacity for its minimum"),
            Self::StartsWhole => f.write_str("enough free capacity for all its workers"),
            Self::FreeRoom => f.write_str("free capacity available"),
            Self::BelowFairShare { from } => {
                write!(f, "below its fair share while {from} is above")
            }
            Self::AboveFairShare { to } => write!(f, "above its fair share while {to} is below"),
            Self::MakesRoomForJob(job) => write!(f, "freeing capacity for {job} to start"),
            Self::MakesRoomForService(service) => write!(f, "freeing capacity for {service}"),
            Self::Preempted { by } => write!(f, "preempted by {by}, which has a higher priority"),
            Self::HigherPriority { than } => write!(f, "higher priority than {than}"),
            Self::AboveLoad => f.write_str("cluster load is above its limit"),
            Self::AboveQuota(queue) => write!(f, "{queue} exceeds its quota"),
            Self::AboveMaximum => f.write_str("above its maximum"),
            Self::Incomplete => f.write_str("lost pods and fell below its minimum"),
            Self::NodeLeaves(node) => write!(f, "{node} is being removed"),
            Self::Faulty(fault) => fault.fmt(f),
            Self::LargestGain => f.write_str("gains most from another worker"),
            Self::SmallestLoss => f.write_str("other jobs gain more from its workers"),
            Self::LessServedFirst => f.write_str("jobs with less accumulated GPU time go first"),
            Self::LeastFulfilled => f.write_str("furthest below its maximum"),
            Self::MostFulfilled => f.write_str("closest to its maximum"),
            Self::ServersFollow => f.write_str("parameter servers scale with the workers"),
        }
    }
}

impl fmt::Display for Waiting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Faulty(fault) => fault.fmt(f),
            Self::NeverFits(kind) => write!(f, "no node has enough {kind} for one of its pods"),
            Self::NoRoom(kind) => write!(f, "not enough {kind} for its minimum"),
            Self::Fragmented => f.write_str("free capacity is spread over too many nodes"),
            Self::QuotaUsed(queue) => write!(f, "quota of {queue} exhausted"),
            Self::Behind(job) => write!(f, "{job} has waited longer and goes first"),
            Self::Outranked => f.write_str("other jobs go first"),
            Self::LeftToKubernetes => f.write_str("waiting for Kubernetes to schedule its pods"),
        }
    }
}
