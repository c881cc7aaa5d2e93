// SPDX-License-Identifier: Apache-2.0
//! Properties of every plan, checked on thousands of random clusters with running jobs.

use std::collections::BTreeMap;
use std::time::Duration;

use edl_core::rng::Rng;
use edl_core::time::Time;
use edl_sched::plan::{AllocationPlan, Placing};
use edl_sched::resources::Resources;
use edl_sched::snapshot::{
    Counts, Job, JobId, Marks, Node, NodeId, NodeState, OnlinePods, Queue, QueueId, Role, RoleSpec,
    Roles, ServiceId, Snapshot,
};
use edl_sched::speed::Speed;
use edl_sched::state::{Options, PlannerState, Policy};
use edl_sched::{applied, plan};
use proptest::prelude::*;

/// Policies that choose nodes themselves; Pollux, which is slow, has its own test.
const PLACING: [Policy; 7] = [
    Policy::Fifo,
    Policy::Drf,
    Policy::Tiresias,
    Policy::Optimus,
    Policy::Edl,
    Policy::ElasticFair,
    Policy::Goodput,
];

/// Policies that also guarantee that a second plan changes nothing, for pods of any size.
const OURS: [Policy; 5] =
    [Policy::Fifo, Policy::Drf, Policy::Edl, Policy::ElasticFair, Policy::Goodput];

proptest! {
    // 10,000 clusters, which is fast enough for every run.
    #![proptest_config(ProptestConfig { cases: 10_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_plan_is_valid(
        seed: u64,
        n_nodes in 0_u32..9,
        n_jobs in 0_u32..8,
        pods_per_node in 0_u64..12,
    ) {
        let mut random = RandomCluster { rng: Rng::new(seed), n_nodes, n_jobs, pods_per_node };
        let (snapshot, state, now) = random.running_cluster();
        for policy in [Policy::ElasticFair, PLACING[usize::try_from(seed % 7).expect("small")]] {
            let state = with_policy(&state, policy);
            let made = plan(&snapshot, &state, now);
            check_plan(&snapshot, &made);
            check_order_does_not_matter(&snapshot, &state, now, &made);
            if OURS.contains(&policy) {
                let again = plan(&applied(&snapshot, &made), &made.state, now);
                prop_assert!(again.changes.is_empty(), "{policy}: {:?} after {made:?}", again.changes);
            }
        }
    }

    #[test]
    fn more_capacity_never_lowers_the_number_of_running_jobs(
        seed: u64,
        n_nodes in 1_u32..9,
        n_jobs in 0_u32..12,
    ) {
        // With pods of one size; for pods of different sizes, no greedy rule can guarantee it.
        let mut random = RandomCluster::of(seed, n_nodes, n_jobs);
        let fewer = random.slots();
        let mut more = fewer.clone();
        more.nodes.push(slot_node(1000, 1 + random.below(8)));
        for policy in [Policy::ElasticFair, Policy::Edl, Policy::Goodput] {
            let n_running = |snapshot: &Snapshot| {
                let made = plan(snapshot, &PlannerState::of(policy), Time::ZERO);
                let after = applied(snapshot, &made);
                after.jobs.iter().filter(|job| has_gang(job)).count()
            };
            prop_assert!(n_running(&more) >= n_running(&fewer), "{policy}");
        }
    }
}

/// A queue without a quota took resources from a job, another queue then borrowed them, and the
/// job grew again, endlessly.
#[test]
fn a_plan_converges_although_borrowed_resources_are_returned() {
    let mut random = RandomCluster::of(4_828_375_221_883_373_942, 5, 7);
    let (snapshot, state, now) = random.running_cluster();
    let state = with_policy(&state, Policy::ElasticFair);
    let made = plan(&snapshot, &state, now);
    check_plan(&snapshot, &made);
    assert_eq!(plan(&applied(&snapshot, &made), &made.state, now).changes, []);
}

proptest! {
    // A genetic search is slow.
    #![proptest_config(ProptestConfig { cases: 100, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn plans_of_a_genetic_search_are_valid(seed: u64, n_nodes in 0_u32..6, n_jobs in 0_u32..5) {
        let mut random = RandomCluster::of(seed, n_nodes, n_jobs);
        let (snapshot, state, now) = random.running_cluster();
        check_plan(&snapshot, &plan(&snapshot, &with_policy(&state, Policy::Pollux), now));
    }
}

/// No node is ready, and a job has lost its master.
#[test]
fn a_genetic_search_stops_an_incomplete_job_without_nodes() {
    let mut random = RandomCluster::of(3_524_466_554_831_654_536, 2, 2);
    let (snapshot, state, now) = random.running_cluster();
    check_plan(&snapshot, &plan(&snapshot, &with_policy(&state, Policy::Pollux), now));
}

fn check_plan(before: &Snapshot, made: &AllocationPlan) {
    let after = applied(before, made);
    check_nodes(&after);
    for change in &made.changes {
        assert!(!change.reasons.is_empty(), "a change without a reason: {change:?}");
        assert!(matches!(change.placing, Placing::Named { .. }), "these policies choose nodes");
        check_starts(before, made);
    }
    for job in after.jobs.iter().filter(|job| job.fault().is_none()) {
        let counts = job.counts();
        if counts.sum() == 0 {
            assert!(made.waiting.contains_key(&job.id), "{} waits without a reason", job.id);
            continue;
        }
        for role in Role::ALL {
            let (n, spec) = (counts.of(role), job.roles.of(role));
            assert!(
                (spec.min..=spec.max).contains(&n),
                "{}: {n} pods of {role}, outside {}..{}",
                job.id,
                spec.min,
                spec.max
            );
        }
    }
    check_quotas(before, &after);
}

/// No node exceeds its capacity, and nodes that are leaving run no pods of jobs.
fn check_nodes(after: &Snapshot) {
    let mut used: BTreeMap<NodeId, Resources> = BTreeMap::new();
    for job in &after.jobs {
        for placed in &job.placed {
            let requested = job.roles.of(placed.role).shape * u64::from(placed.n);
            *used.entry(placed.node).or_default() += requested;
        }
    }
    for node in &after.nodes {
        let ours = used.remove(&node.id).unwrap_or_default();
        assert!((ours + node.taken).fits_in(node.capacity), "{} exceeds its capacity", node.id);
        assert!(node.state != NodeState::Leaving || ours == Resources::ZERO, "{}", node.id);
    }
    assert!(used.is_empty(), "pods on unknown nodes: {used:?}");
}

/// Pods start only on ready nodes that their job can use.
fn check_starts(before: &Snapshot, made: &AllocationPlan) {
    for change in &made.changes {
        let Placing::Named { start, .. } = &change.placing else { continue };
        let job = before.jobs.iter().find(|job| job.id == change.job).expect("it is there");
        for placed in start {
            let node = before.nodes.iter().find(|node| node.id == placed.node).expect("there");
            assert!(node.state == NodeState::Ready && job.may_use(node), "{placed:?}");
        }
    }
}

/// Jobs of a queue that exceeds its quota have no workers above their minimums.
fn check_quotas(before: &Snapshot, after: &Snapshot) {
    for queue in &after.queues {
        let (Some(quota), Some(borrow)) = (queue.quota, queue.borrow) else { continue };
        let of_queue = |job: &&Job| job.queue == queue.id;
        let used: Resources =
            after.jobs.iter().filter(of_queue).map(|job| job.resources(job.counts())).sum();
        if used.fits_in(quota + borrow) {
            continue;
        }
        for job in after.jobs.iter().filter(of_queue) {
            let had = before.jobs.iter().find(|one| one.id == job.id).map(Job::counts);
            let has = job.counts();
            assert!(
                has.sum() == 0 || has.worker <= had.unwrap_or_default().worker,
                "{} grows although {} is full",
                job.id,
                queue.id
            );
        }
    }
}

fn check_order_does_not_matter(
    snapshot: &Snapshot,
    state: &PlannerState,
    now: Time,
    made: &AllocationPlan,
) {
    let mut turned = snapshot.clone();
    turned.nodes.reverse();
    turned.jobs.reverse();
    turned.queues.reverse();
    turned.waiting.reverse();
    for job in &mut turned.jobs {
        job.placed.reverse();
    }
    assert_eq!(&plan(&turned, state, now), made, "the plan depends on the order of lists");
}

fn has_gang(job: &Job) -> bool {
    let counts = job.counts();
    job.fault().is_none() && Role::ALL.iter().all(|r| counts.of(*r) >= job.roles.of(*r).min)
}

fn with_policy(state: &PlannerState, policy: Policy) -> PlannerState {
    let mut state = state.clone();
    state.options = Options { policy, ..state.options };
    state
}

/// Generates random clusters.
struct RandomCluster {
    rng: Rng,
    n_nodes: u32,
    n_jobs: u32,
    /// 0 for no limit.
    pods_per_node: u64,
}

impl RandomCluster {
    /// A generator with this seed and no limit of pods per node.
    fn of(seed: u64, n_nodes: u32, n_jobs: u32) -> Self {
        Self { rng: Rng::new(seed), n_nodes, n_jobs, pods_per_node: 0 }
    }

    /// The request of a pod, including one of the node's pod slots.
    fn pod(&self, shape: Resources) -> Resources {
        shape.with_pods(self.pods_per_node.min(1))
    }

    fn below(&mut self, limit: u32) -> u32 {
        u32::try_from(self.rng.below(u64::from(limit))).expect("below a u32")
    }

    fn one_in(&mut self, n: u32) -> bool {
        self.below(n) == 0
    }

    /// A cluster with running jobs: planned twice by a random policy, with changes in between.
    fn running_cluster(&mut self) -> (Snapshot, PlannerState, Time) {
        let nodes = (0..self.n_nodes).map(|id| self.node(id)).collect();
        let queues = (0..3).map(|id| self.queue(id)).collect();
        let mut snapshot = Snapshot { nodes, queues, ..Snapshot::default() };
        let first = PLACING[self.below(7) as usize];
        let mut state = PlannerState::of(first);
        let mut now = Time::ZERO;
        for round in 0..3 {
            for id in 0..self.n_jobs {
                if !self.one_in(3) {
                    let job = self.job(round * 100 + id, now);
                    snapshot.jobs.push(job);
                }
            }
            if round < 2 {
                let made = plan(&snapshot, &state, now);
                snapshot = applied(&snapshot, &made);
                state = made.state;
                self.change(&mut snapshot);
                now = now + Duration::from_secs(u64::from(self.below(900)));
            }
        }
        if self.one_in(2) {
            snapshot.waiting = (0..self.below(3)).map(|id| self.online(id)).collect();
        }
        (snapshot, state, now)
    }

    /// Jobs end, nodes fail or leave, and users edit jobs.
    fn change(&mut self, snapshot: &mut Snapshot) {
        snapshot.jobs.retain(|_| !self.one_in(4));
        if self.one_in(3) && !snapshot.nodes.is_empty() {
            let at = self.below(u32::try_from(snapshot.nodes.len()).expect("few"));
            let at = usize::try_from(at).expect("small");
            match self.below(4) {
                0 => {
                    let lost = snapshot.nodes.remove(at).id;
                    for job in &mut snapshot.jobs {
                        job.placed.retain(|placed| placed.node != lost);
                    }
                }
                1 => snapshot.nodes[at].state = NodeState::Cordoned,
                2 => snapshot.nodes[at].state = NodeState::Leaving,
                _ => snapshot.nodes[at].state = NodeState::Ready,
            }
        }
        for job in &mut snapshot.jobs {
            if self.one_in(10) {
                job.roles.worker.max = self.below(6);
            }
            if self.one_in(10) {
                job.priority = i32::try_from(self.below(3)).expect("small");
            }
            job.ran += Duration::from_secs(u64::from(self.below(40_000)));
        }
    }

    fn node(&mut self, id: u32) -> Node {
        let gpu = if self.one_in(2) { 0 } else { u64::from(self.below(5)) };
        let cpu_milli = 1000 * u64::from(4 + self.below(29));
        let memory_mib = 1024 * u64::from(4 + self.below(61));
        let taints = if self.one_in(5) { Marks(1) } else { Marks::NONE };
        let labels = if self.one_in(2) { Marks(1) } else { Marks::NONE };
        let taken = Resources::new(0, 250 * u64::from(self.below(5)), 128);
        let capacity = Resources::new(gpu, cpu_milli, memory_mib).with_pods(self.pods_per_node);
        Node { taken, taints, labels, ..Node::new(NodeId(id), capacity) }
    }

    fn shape(&mut self) -> Resources {
        let gpu = if self.one_in(3) { 1 + u64::from(self.below(2)) } else { 0 };
        let cpu_milli = 500 * u64::from(1 + self.below(12));
        let memory_mib = 256 * u64::from(1 + self.below(32));
        self.pod(Resources::new(gpu, cpu_milli, memory_mib))
    }

    fn job(&mut self, id: u32, now: Time) -> Job {
        let min = 1 + self.below(3);
        let max = if self.one_in(12) { min - 1 } else { min + self.below(8) };
        let n_ps = self.below(3);
        let more_ps = if self.one_in(4) { self.below(3) } else { 0 };
        let fixed = |n: u32, shape| RoleSpec { shape, min: n, max: n };
        let n_masters = self.below(2);
        let master = fixed(n_masters, self.pod(Resources::new(0, 500, 512)));
        let ps = RoleSpec { max: n_ps + more_ps, ..fixed(n_ps, self.shape()) };
        let worker = RoleSpec { shape: self.shape(), min, max };
        Job {
            id: JobId(id),
            submitted: now,
            priority: if self.one_in(3) { 1 } else { 0 },
            weight: 1 + self.below(2),
            queue: QueueId(self.below(4)),
            roles: Roles { master, ps, worker },
            tolerates: if self.one_in(2) { Marks(1) } else { Marks::NONE },
            selects: if self.one_in(6) { Marks(1) } else { Marks::NONE },
            placed: Vec::new(),
            unplaced: Counts::default(),
            running: Counts::default(),
            ran: Duration::ZERO,
            resize_cost: Duration::from_secs(u64::from(self.below(30))),
            speed: self.one_in(2).then(|| self.speed()),
        }
    }

    fn speed(&mut self) -> Speed {
        let bend = 0.5 + self.rng.unit() / 2.0;
        let curve = |slow: f64| (1..=16).map(|n| f64::from(n).powf(bend) * slow).collect();
        Speed {
            together: curve(1.0),
            apart: curve(0.9),
            remaining: 1.0 + 10_000.0 * self.rng.unit(),
            measured_to: 1 + self.below(8),
        }
    }

    fn queue(&mut self, id: u32) -> Queue {
        let quota = |random: &mut Self| {
            let gpu = u64::from(random.below(8));
            Resources::new(
                gpu,
                1000 * u64::from(random.below(60)),
                1024 * u64::from(random.below(99)),
            )
            .with_pods(1000)
        };
        let has_quota = self.one_in(2);
        Queue {
            id: QueueId(id),
            weight: 1 + self.below(3),
            quota: has_quota.then(|| quota(self)),
            borrow: self.one_in(2).then(|| quota(self)),
        }
    }

    fn online(&mut self, id: u32) -> OnlinePods {
        OnlinePods {
            service: ServiceId(id),
            shape: self.shape(),
            n: self.below(9),
            priority: i32::try_from(id).expect("small"),
            tolerates: Marks::NONE,
            selects: Marks::NONE,
        }
    }

    /// A cluster of slots: all pods are equal.
    fn slots(&mut self) -> Snapshot {
        let nodes = (0..self.n_nodes).map(|id| slot_node(id, 1 + self.below(8))).collect();
        let job = |random: &mut Self, id: u32| {
            let mut job = random.job(id, Time::ZERO);
            let min = 1 + random.below(6);
            let worker = RoleSpec { shape: SLOT, min, max: min + random.below(5) };
            job.roles = Roles { worker, ..Roles::default() };
            (job.priority, job.selects) = (0, Marks::NONE);
            job
        };
        let jobs = (0..self.n_jobs).map(|id| job(self, id)).collect();
        Snapshot { nodes, jobs, ..Snapshot::default() }
    }
}

const SLOT: Resources = Resources::new(1, 0, 0);

fn slot_node(id: u32, n_slots: u32) -> Node {
    Node::new(NodeId(id), SLOT * u64::from(n_slots))
}
