// SPDX-License-Identifier: Apache-2.0
//! The input of a plan: nodes, jobs, queues and waiting online pods, as plain numbers.
//!
//! The observer of the cluster numbers every node, job, queue and service, and keeps their names.
//! Plans depend on the numbers, never on the order of these lists.

use std::fmt;
use std::time::Duration;

pub use edl_core::platform::Role;
use edl_core::time::Time;
use serde::{Deserialize, Serialize};

use crate::resources::Resources;
use crate::speed::Speed;

/// The whole cluster at one moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Snapshot {
    pub nodes: Vec<Node>,
    pub jobs: Vec<Job>,
    /// A queue that is not listed has no quota.
    pub queues: Vec<Queue>,
    /// Pods of online services without a node.
    pub waiting: Vec<OnlinePods>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    pub id: NodeId,
    /// What pods can have (`allocatable`).
    pub capacity: Resources,
    /// Used by pods of others. Leaving pods do not count: pods placed on their capacity start when
    /// they are gone.
    pub taken: Resources,
    /// Still held by leaving pods of any kind.
    pub leaving: Resources,
    pub taints: Marks,
    pub labels: Marks,
    pub state: NodeState,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum NodeState {
    #[default]
    Ready,
    /// Keeps what it has and takes nothing new.
    Cordoned,
    /// Being removed (spot reclaim, drain): its pods must move.
    Leaving,
}

/// A set of at most 64 taints or labels, as bits; the observer keeps their names.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct Marks(pub u64);

/// A training job: a master, parameter servers and workers.
#[derive(Clone, Debug, PartialEq)]
pub struct Job {
    pub id: JobId,
    pub submitted: Time,
    /// Jobs of higher priority go first, and may take from lower ones.
    pub priority: i32,
    /// How much of a queue's share the job gets compared with others; at least 1.
    pub weight: u32,
    pub queue: QueueId,
    pub roles: Roles,
    pub tolerates: Marks,
    pub selects: Marks,
    /// The nodes of its pods, including pods that are being created.
    pub placed: Vec<Placed>,
    /// Pods that exist but have no node, by role (only where Kubernetes places them).
    pub unplaced: Counts,
    /// Its running pods.
    pub running: Counts,
    /// How long it has held workers, in all.
    pub ran: Duration,
    /// The measured cost of a resize.
    pub resize_cost: Duration,
    pub speed: Option<Speed>,
}

/// One value for each role.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct PerRole<T> {
    pub master: T,
    pub ps: T,
    pub worker: T,
}

/// What each role asks for and how many there may be.
pub type Roles = PerRole<RoleSpec>;
/// A number of pods for each role.
pub type Counts = PerRole<u32>;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RoleSpec {
    pub shape: Resources,
    pub min: u32,
    pub max: u32,
}

/// A number of pods of one role on one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Placed {
    pub role: Role,
    pub node: NodeId,
    pub n: u32,
}

/// What the jobs of a team may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Queue {
    pub id: QueueId,
    /// Its share beside other queues; at least 1.
    pub weight: u32,
    /// Guaranteed resources; none for no limit.
    pub quota: Option<Resources>,
    /// What it may use beyond its quota while other queues do not need theirs; none for no limit.
    pub borrow: Option<Resources>,
}

/// Equal pods of an online service that have no node yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OnlinePods {
    pub service: ServiceId,
    pub shape: Resources,
    pub n: u32,
    pub priority: i32,
    pub tolerates: Marks,
    pub selects: Marks,
}

macro_rules! number {
    ($(#[$doc:meta])* $name:ident, $kind:literal) => {
        $(#[$doc])*
        #[derive(
            Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
        )]
        #[serde(transparent)]
        pub struct $name(pub u32);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($kind, " {}"), self.0)
            }
        }
    };
}

number!(NodeId, "node");
number!(
    /// A job of one namespace: two jobs of one name in two namespaces are two numbers.
    JobId, "job"
);
number!(QueueId, "queue");
number!(ServiceId, "service");

impl<T: Copy> PerRole<T> {
    #[must_use]
    pub fn of(&self, role: Role) -> T {
        match role {
            Role::Master => self.master,
            Role::Ps => self.ps,
            Role::Worker => self.worker,
        }
    }

    pub fn of_mut(&mut self, role: Role) -> &mut T {
        match role {
            Role::Master => &mut self.master,
            Role::Ps => &mut self.ps,
            Role::Worker => &mut self.worker,
        }
    }
}

impl Counts {
    #[must_use]
    pub fn sum(&self) -> u32 {
        self.master + self.ps + self.worker
    }
}

impl Marks {
    pub const NONE: Self = Self(0);

    #[must_use]
    pub fn all_in(self, other: Self) -> bool {
        self.0 & !other.0 == 0
    }
}

impl Node {
    /// A node that is ready and empty, with no taints or labels.
    #[must_use]
    pub fn new(id: NodeId, capacity: Resources) -> Self {
        Self {
            id,
            capacity,
            taken: Resources::ZERO,
            leaving: Resources::ZERO,
            taints: Marks::NONE,
            labels: Marks::NONE,
            state: NodeState::Ready,
        }
    }
}

impl Job {
    /// A new job with default priority and no pods.
    #[must_use]
    pub fn new(id: JobId, submitted: Time, roles: Roles) -> Self {
        Self {
            id,
            submitted,
            priority: 0,
            weight: 1,
            queue: QueueId(0),
            roles,
            tolerates: Marks::NONE,
            selects: Marks::NONE,
            placed: Vec::new(),
            unplaced: Counts::default(),
            running: Counts::default(),
            ran: Duration::ZERO,
            resize_cost: Duration::ZERO,
            speed: None,
        }
    }

    /// How many pods of each role it has, placed and not.
    #[must_use]
    pub fn counts(&self) -> Counts {
        let mut counts = self.unplaced;
        for placed in &self.placed {
            *counts.of_mut(placed.role) += placed.n;
        }
        counts
    }

    /// The minimum set of pods with which it can run.
    #[must_use]
    pub fn gang(&self) -> Counts {
        self.counts_at(self.roles.worker.min)
    }

    /// Its pods with `n_workers` workers: servers scale with workers.
    #[must_use]
    pub fn counts_at(&self, n_workers: u32) -> Counts {
        let Roles { master, ps, worker } = &self.roles;
        let above = u64::from(n_workers.saturating_sub(worker.min));
        let span = u64::from(worker.max.saturating_sub(worker.min)).max(1);
        let more = u64::from(ps.max.saturating_sub(ps.min)) * above / span;
        let ps = ps.min + u32::try_from(more).unwrap_or(0).min(ps.max.saturating_sub(ps.min));
        Counts { master: master.min, ps, worker: n_workers }
    }

    #[must_use]
    pub fn resources(&self, counts: Counts) -> Resources {
        let of = |role| self.roles.of(role).shape * u64::from(counts.of(role));
        Role::ALL.into_iter().map(of).sum()
    }

    /// Whether its number of workers can vary.
    #[must_use]
    pub fn is_elastic(&self) -> bool {
        self.roles.worker.min < self.roles.worker.max
    }

    /// Why it can never be planned, if so.
    #[must_use]
    pub fn fault(&self) -> Option<JobFault> {
        if Role::ALL.into_iter().any(|role| self.roles.of(role).min > self.roles.of(role).max) {
            Some(JobFault::MinAboveMax)
        } else if self.roles.worker.min == 0 {
            Some(JobFault::NoWorkers)
        } else if self.roles.worker.shape.is_nothing() {
            Some(JobFault::AsksForNothing)
        } else {
            None
        }
    }

    #[must_use]
    pub fn may_use(&self, node: &Node) -> bool {
        node.taints.all_in(self.tolerates) && self.selects.all_in(node.labels)
    }
}

/// Why a job cannot be planned at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
pub enum JobFault {
    #[error("minimum exceeds maximum; lower the minimum")]
    MinAboveMax,
    #[error("minimum number of workers is 0; it must be at least 1")]
    NoWorkers,
    #[error("workers request no resources; set their resource requests")]
    AsksForNothing,
}
