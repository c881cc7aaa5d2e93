// SPDX-License-Identifier: Apache-2.0
//! The result of every policy: what changes, and why.

use std::collections::BTreeMap;

use edl_core::time::Time;

use crate::resources::ResourceKind;
use crate::snapshot::{Counts, JobFault, JobId, NodeId, Placed, QueueId, ServiceId};
use crate::state::PlannerState;

/// What to do next. Applying it needs no further decisions.
#[derive(Clone, Debug, PartialEq)]
pub struct AllocationPlan {
    /// One entry for each job whose pods change, in order of job.
    pub changes: Vec<Change>,
    /// Why each job with less than its minimum waits.
    pub waiting: BTreeMap<JobId, Waiting>,
    /// Nodes for waiting online pods once the plan is applied.
    pub online: Vec<OnlinePlacement>,
    /// What the next plan must remember.
    pub state: PlannerState,
    pub made: Time,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    pub job: JobId,
    /// Its pods after the change.
    pub target: Counts,
    pub placing: Placing,
    /// Never empty; in the order in which they occurred.
    pub reasons: Vec<Reason>,
}

/// What chooses nodes and victims.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Placing {
    /// The plan: these pods are started and these are stopped.
    Named { start: Vec<Placed>, stop: Vec<Placed> },
    /// Kubernetes: the plan only gives numbers, as EDL did.
    Kubernetes,
}

/// Why a job's pods change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reason {
    /// Its whole minimum fits, so it starts.
    Starts,
    /// It is started with the size it asked for.
    StartsWhole,
    /// There is unused capacity.
    FreeCapacity,
    /// It has less than its fair share, and `from` has more.
    BelowFairShare { from: JobId },
    /// It has more than its fair share, and `to` has less.
    AboveFairShare { to: JobId },
    /// Its surplus is needed for the minimum of a waiting job.
    FreesCapacityForJob(JobId),
    /// Its surplus is needed for pods of an online service.
    FreesCapacityForService(ServiceId),
    /// A job of higher priority needs its capacity.
    Preempted { by: JobId },
    /// It takes from a job of lower priority.
    HigherPriority { than: JobId },
    /// The cluster is above its load limit.
    AboveLoad,
    /// Its queue exceeds its quota.
    AboveQuota(QueueId),
    /// It has more pods than its maximum.
    AboveMaximum,
    /// It lost pods and cannot run with less than its minimum.
    Incomplete,
    /// The node of some of its pods is being removed.
    NodeLeaves(NodeId),
    /// Its description is invalid.
    Faulty(JobFault),
    /// It gains more from another worker than any other job.
    LargestGain,
    /// Other jobs gain more from its workers.
    SmallestLoss,
    /// It has had more GPU time than jobs that wait.
    LessServedFirst,
    /// Least fulfilled of all (EDL's rule for more).
    LeastFulfilled,
    /// Most fulfilled of all (EDL's rule for fewer).
    MostFulfilled,
    /// Its servers scale with its workers.
    ServersFollow,
}

/// Why a job has less than its minimum.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Waiting {
    Faulty(JobFault),
    /// One of its pods is larger than every node that it may use.
    NeverFits(ResourceKind),
    /// Not enough of this, even with the surplus of other jobs.
    NoCapacity(ResourceKind),
    /// There is enough in total, but not on nodes that fit its pods.
    Fragmented,
    QuotaUsed(QueueId),
    /// A job that has waited longer goes first.
    Behind(JobId),
    /// Other jobs go first.
    Outranked,
    /// Its pods exist, but Kubernetes has not scheduled them.
    LeftToKubernetes,
}

impl Waiting {
    /// The reason in one word, for conditions.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Faulty(_) => "Invalid",
            Self::NeverFits(_) => "NeverFits",
            Self::NoCapacity(_) => "NoRoom",
            Self::Fragmented => "Fragmented",
            Self::QuotaUsed(_) => "QuotaUsed",
            Self::Behind(_) => "Behind",
            Self::Outranked => "Outranked",
            Self::LeftToKubernetes => "LeftToKubernetes",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OnlinePlacement {
    pub service: ServiceId,
    pub node: NodeId,
    pub n: u32,
}

impl AllocationPlan {
    #[must_use]
    pub fn change_of(&self, job: JobId) -> Option<&Change> {
        let at = self.changes.binary_search_by_key(&job, |change| change.job).ok()?;
        Some(&self.changes[at])
    }
}
