// SPDX-License-Identifier: Apache-2.0
//! What a plan is made from: nodes, jobs, queues and the online pods that wait, as plain numbers.
//!
//! Whoever observes the cluster gives every node, job, queue and service a number and keeps the
//! names. Plans depend on the numbers, never on the order of these lists.

use std::fmt;
use std::time::Duration;

use edl_core::time::Time;
use serde::{Deserialize, Serialize};

use crate::resources::Resources;

/// The whole cluster at one moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Snapshot {
    pub nodes: Vec<Node>,
    pub jobs: Vec<Job>,
    /// Jobs of a queue that is not listed are bound by nothing but room.
    pub queues: Vec<Queue>,
    /// Pods of online services that found no node.
    pub waiting: Vec<OnlinePods>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    pub id: NodeId,
    /// What pods can have (`allocatable`).
    pub capacity: Resources,
    /// What pods that are not ours have. Pods that are leaving do not count: what is placed on
    /// their room starts when they are gone.
    pub taken: Resources,
    /// What pods that are leaving still hold, ours and others.
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
    /// Going away (spot reclaim, drain): what is on it must move.
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
    /// Higher goes first, and may take from lower.
    pub priority: i32,
    /// How much of a queue's share the job gets compared with others; at least 1.
    pub weight: u32,
    pub queue: QueueId,
    pub roles: Roles,
    pub tolerates: Marks,
    pub selects: Marks,
    /// Where its pods are now, those on their way included.
    pub placed: Vec<Placed>,
    /// Pods that exist but have no node, by role (only where Kubernetes places them).
    pub unplaced: Counts,
    /// How many of its pods run.
    pub running: Counts,
    /// How long it has held workers, in all.
    pub ran: Duration,
    /// What a change of size costs it, if that was measured.
    pub resize_cost: Duration,
    pub speed: Option<Speed>,
}

/// What each role asks for and how many there may be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Roles {
    pub master: RoleSpec,
    pub ps: RoleSpec,
    pub worker: RoleSpec,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RoleSpec {
    pub shape: Resources,
    pub min: u32,
    pub max: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Role {
    Master,
    Ps,
    Worker,
}

/// So many pods of one role on one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Placed {
    pub role: Role,
    pub node: NodeId,
    pub n: u32,
}

/// A number of pods for each role.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Counts {
    pub master: u32,
    pub ps: u32,
    pub worker: u32,
}

/// How quickly a job gets on, measured or foretold, in units of work a second.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Speed {
    /// With 1, 2, … workers that share one node.
    pub together: Vec<f64>,
    /// With 1, 2, … workers on more than one node.
    pub apart: Vec<f64>,
    /// Units of work that are left.
    pub remaining: f64,
    /// The largest number of workers that was measured; beyond it the curve is a guess.
    pub measured_to: u32,
}

/// What a team may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Queue {
    pub id: QueueId,
    /// Its share beside other queues; at least 1.
    pub weight: u32,
    /// What it is promised; none: as much as there is.
    pub quota: Option<Resources>,
    /// What it may use beyond its quota while others do not need theirs; none: as much as is left.
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
    ($(#[$doc:meta])* $name:ident, $word:literal) => {
        $(#[$doc])*
        #[derive(
            Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
        )]
        #[serde(transparent)]
        pub struct $name(pub u32);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!($word, " {}"), self.0)
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

impl Role {
    pub const ALL: [Self; 3] = [Self::Master, Self::Ps, Self::Worker];

    #[must_use]
    pub fn index(self) -> usize {
        match self {
            Self::Master => 0,
            Self::Ps => 1,
            Self::Worker => 2,
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Master => "master",
            Self::Ps => "ps",
            Self::Worker => "worker",
        })
    }
}

impl Roles {
    #[must_use]
    pub fn of(&self, role: Role) -> &RoleSpec {
        match role {
            Role::Master => &self.master,
            Role::Ps => &self.ps,
            Role::Worker => &self.worker,
        }
    }
}

impl Counts {
    #[must_use]
    pub fn of(&self, role: Role) -> u32 {
        match role {
            Role::Master => self.master,
            Role::Ps => self.ps,
            Role::Worker => self.worker,
        }
    }

    pub fn of_mut(&mut self, role: Role) -> &mut u32 {
        match role {
            Role::Master => &mut self.master,
            Role::Ps => &mut self.ps,
            Role::Worker => &mut self.worker,
        }
    }

    #[must_use]
    pub fn sum(&self) -> u32 {
        self.master + self.ps + self.worker
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { master, ps, worker } = self;
        write!(f, "{worker} workers, {ps} ps, {master} master")
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
    /// A job that was just submitted: of no special rank, with no pods yet.
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

    /// The smallest set of pods with which it can run.
    #[must_use]
    pub fn gang(&self) -> Counts {
        self.counts_at(self.roles.worker.min)
    }

    /// The pods it wants when it has so many workers: servers grow in step with workers.
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

    /// Whether it may have different numbers of workers.
    #[must_use]
    pub fn is_elastic(&self) -> bool {
        self.roles.worker.min < self.roles.worker.max
    }

    /// What is wrong with it, if it can never be planned.
    #[must_use]
    pub fn fault(&self) -> Option<Fault> {
        if Role::ALL.into_iter().any(|role| self.roles.of(role).min > self.roles.of(role).max) {
            Some(Fault::MinAboveMax)
        } else if self.roles.worker.min == 0 {
            Some(Fault::NoWorkers)
        } else if self.roles.worker.shape == Resources::ZERO {
            Some(Fault::AsksForNothing)
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
pub enum Fault {
    #[error("minimum exceeds maximum; lower the minimum")]
    MinAboveMax,
    #[error("minimum number of workers is 0; it must be at least 1")]
    NoWorkers,
    #[error("workers request no resources; set their resource requests")]
    AsksForNothing,
}

impl Speed {
    /// Units of work a second with `n` workers on one node, or on several.
    #[must_use]
    pub fn at(&self, n: u32, is_together: bool) -> f64 {
        let curve = if is_together { &self.together } else { &self.apart };
        let last = curve.last().copied().unwrap_or(0.0);
        match n {
            0 => 0.0,
            n => curve.get(n as usize - 1).copied().unwrap_or(last),
        }
    }

    /// The same when `n` workers are packed on nodes that hold `per_node` of them.
    #[must_use]
    pub fn packed(&self, n: u32, per_node: u32) -> f64 {
        self.at(n, n <= per_node)
    }
}
