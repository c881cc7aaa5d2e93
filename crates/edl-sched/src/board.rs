// SPDX-License-Identifier: Apache-2.0
//! The cluster while a plan is made: the free capacity and pods of each node, with undo.
//!
//! Every change goes through [`Board::put`] and [`Board::take`], which reject pods that do not fit.
//! So no policy can exceed a node, and the plan is the difference between the board at the end and at
//! the beginning.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::time::Duration;

use edl_core::time::Time;

use crate::plan::{OnlinePlacement, Reason, Waiting};
use crate::resources::Resources;
use crate::snapshot::{
    Counts, Job, JobId, Marks, Node, NodeState, OnlinePods, Queue, QueueId, Role, Snapshot,
};
use crate::state::{Options, PlannerState};

/// The index of a node on the board.
pub type NodeIx = usize;
/// The index of a job on the board.
pub type JobIx = usize;

#[derive(Clone, Debug)]
pub struct Board<'a> {
    pub options: Options,
    pub state: &'a PlannerState,
    pub now: Time,
    /// In order of their ids, like the jobs.
    pub nodes: Vec<&'a Node>,
    pub jobs: Vec<JobEntry<'a>>,
    pub queues: BTreeMap<QueueId, QueueUse>,
    pub online: Vec<OnlinePods>,
    pub online_placements: Vec<OnlinePlacement>,
    /// The capacity of all nodes that are not being removed.
    pub total: Resources,
    /// What all pods on them request.
    pub asked: Resources,
    free: Vec<Resources>,
    on_node: Vec<Vec<(JobIx, Counts)>>,
    index: FreeIndex,
    journal: Vec<JournalEntry>,
}

/// One job on the board.
#[derive(Clone, Debug)]
pub struct JobEntry<'a> {
    pub job: &'a Job,
    pub on: BTreeMap<NodeIx, Counts>,
    pub counts: Counts,
    pub before: BTreeMap<NodeIx, Counts>,
    pub reasons: Vec<Reason>,
    pub waiting: Option<Waiting>,
    /// Whether it had its whole minimum before this plan.
    pub ran_before: bool,
    /// Workers that it had before this plan.
    pub n_before: u32,
    /// When an earlier plan last changed it.
    resized: Option<Time>,
    /// Its target, if Kubernetes chooses nodes and victims.
    pub wanted: Option<Counts>,
}

/// A queue and what its jobs have on the board.
#[derive(Clone, Copy, Debug)]
pub struct QueueUse {
    pub queue: Queue,
    pub used: Resources,
    /// False once it had to return borrowed resources too often in this plan.
    pub may_borrow: bool,
}

impl QueueUse {
    fn new(queue: Queue) -> Self {
        Self { queue, used: Resources::ZERO, may_borrow: true }
    }
}

#[derive(Clone, Copy, Debug)]
struct JournalEntry {
    job: JobIx,
    role: Role,
    node: NodeIx,
    n: u32,
    is_put: bool,
}

/// A point to which [`Board::rewind`] can return.
#[derive(Clone, Copy, Debug)]
pub struct Bookmark(usize);

/// Ready nodes by their free capacity, to find the tightest fit without a search. Equivalent nodes
/// share one entry.
#[derive(Clone, Debug, Default)]
struct FreeIndex {
    by_gpu: BTreeMap<u64, BTreeMap<ClassKey, BTreeSet<NodeIx>>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct ClassKey {
    cpu_milli: u64,
    memory_mib: u64,
    pods: u64,
    taints: Marks,
    labels: Marks,
    /// The total capacity: equally free nodes may have different prospects.
    capacity: Resources,
}

/// Equal nodes: the first of them, and what is free on each.
#[derive(Clone, Copy, Debug)]
pub struct NodeClass {
    pub first: NodeIx,
    pub free: Resources,
}

impl<'a> Board<'a> {
    #[must_use]
    pub fn new(snapshot: &'a Snapshot, state: &'a PlannerState, now: Time) -> Self {
        let mut nodes: Vec<&Node> = snapshot.nodes.iter().collect();
        nodes.sort_by_key(|node| node.id);
        nodes.dedup_by_key(|node| node.id);
        let mut jobs: Vec<&Job> = snapshot.jobs.iter().collect();
        jobs.sort_by_key(|job| job.id);
        jobs.dedup_by_key(|job| job.id);
        let mut online = snapshot.waiting.clone();
        online.sort_by_key(|pods| (std::cmp::Reverse(pods.priority), pods.service));

        let stays = |node: &&&Node| node.state != NodeState::Leaving;
        let total = nodes.iter().filter(stays).map(|node| node.capacity).sum();
        let taken =
            |node: &&Node| node.capacity.saturating_sub(node.capacity.saturating_sub(node.taken));
        let asked = nodes.iter().filter(stays).map(taken).sum();
        let free = nodes.iter().map(|node| node.capacity.saturating_sub(node.taken)).collect();
        let queue_use = |queue: &Queue| (queue.id, QueueUse::new(*queue));
        let mut board = Self {
            options: state.options,
            state,
            now,
            on_node: vec![Vec::new(); nodes.len()],
            jobs: Vec::with_capacity(jobs.len()),
            queues: snapshot.queues.iter().map(queue_use).collect(),
            online,
            online_placements: Vec::new(),
            total,
            asked,
            free,
            index: FreeIndex::default(),
            journal: Vec::new(),
            nodes,
        };
        for job in jobs {
            let unlisted = Queue { id: job.queue, weight: 1, quota: None, borrow: None };
            board.queues.entry(job.queue).or_insert(QueueUse::new(unlisted));
            board.add_job(job);
        }
        // Indexed last, because most nodes change several times while jobs are added.
        for node in 0..board.nodes.len() {
            board.file(node);
        }
        board
    }

    /// Adds a job with its pods; pods on missing nodes are lost.
    fn add_job(&mut self, job: &'a Job) {
        let ix = self.jobs.len();
        self.jobs.push(JobEntry {
            job,
            on: BTreeMap::new(),
            counts: Counts::default(),
            before: BTreeMap::new(),
            reasons: Vec::new(),
            waiting: None,
            ran_before: false,
            n_before: 0,
            resized: self.state.jobs.get(&job.id).and_then(|memory| memory.resized),
            wanted: None,
        });
        for placed in &job.placed {
            let Ok(node) = self.nodes.binary_search_by_key(&placed.node, |node| node.id) else {
                continue;
            };
            *self.jobs[ix].before.entry(node).or_default().of_mut(placed.role) += placed.n;
            // A snapshot may show more than fits (a node lost memory); the rest is dropped.
            let shape = job.roles.of(placed.role).shape;
            let fits = u32::try_from(shape.times_in(self.free[node])).unwrap_or(u32::MAX);
            self.count_in(ix, placed.role, node, placed.n.min(fits));
        }
        let entry = &mut self.jobs[ix];
        entry.ran_before = entry.has_gang();
        let workers = job.placed.iter().filter(|placed| placed.role == Role::Worker);
        entry.n_before = workers.map(|placed| placed.n).sum();
    }

    #[must_use]
    pub fn free(&self, node: NodeIx) -> Resources {
        self.free[node]
    }

    /// A node's capacity for workers: all but what masters and servers hold.
    #[must_use]
    pub fn lasting_capacity(&self, node: NodeIx) -> Resources {
        let lasting = |(job, counts): &(JobIx, Counts)| {
            self.jobs[*job].job.resources(Counts { worker: 0, ..*counts })
        };
        let held = self.on_node[node].iter().map(lasting).sum();
        self.nodes[node].capacity.saturating_sub(held)
    }

    /// What pods of others hold on a node, including online pods of this plan.
    #[must_use]
    pub fn held_by_others(&self, node: NodeIx) -> Resources {
        let ours = self.on_node[node].iter();
        let ours = ours.map(|(job, counts)| self.jobs[*job].job.resources(*counts)).sum();
        self.nodes[node].capacity.saturating_sub(self.free[node]).saturating_sub(ours)
    }

    /// How many masters and servers a node holds.
    #[must_use]
    pub fn n_lasting(&self, node: NodeIx) -> u32 {
        self.on_node[node].iter().map(|(_, counts)| counts.master + counts.ps).sum()
    }

    /// The jobs that have pods on a node.
    #[must_use]
    pub fn on_node(&self, node: NodeIx) -> &[(JobIx, Counts)] {
        &self.on_node[node]
    }

    /// The jobs that can be planned. The others wait if they have no pods, and keep running if they
    /// do, until their owner fixes their description.
    pub fn sound_jobs(&mut self) -> Vec<JobIx> {
        let mut sound = Vec::new();
        for (job, entry) in self.jobs.iter_mut().enumerate() {
            match entry.job.fault() {
                Some(fault) if entry.counts.sum() == 0 => {
                    entry.waiting = Some(Waiting::Faulty(fault));
                }
                Some(_) => {}
                None => sound.push(job),
            }
        }
        sound
    }

    #[must_use]
    pub fn job_ix(&self, id: JobId) -> Option<JobIx> {
        self.jobs.binary_search_by_key(&id, |entry| entry.job.id).ok()
    }

    /// Starts `n` pods of a job on a node.
    ///
    /// # Panics
    /// If they do not fit or the node takes none.
    pub fn put(&mut self, job: JobIx, role: Role, node: NodeIx, n: u32) {
        assert!(self.nodes[node].state == NodeState::Ready, "pods only start on ready nodes");
        if n == 0 {
            return;
        }
        self.put_anywhere(job, role, node, n);
        self.journal.push(JournalEntry { job, role, node, n, is_put: true });
    }

    /// Stops `n` pods of a job on a node.
    ///
    /// # Panics
    /// If there are fewer.
    pub fn take(&mut self, job: JobIx, role: Role, node: NodeIx, n: u32) {
        if n == 0 {
            return;
        }
        self.take_anywhere(job, role, node, n);
        self.journal.push(JournalEntry { job, role, node, n, is_put: false });
    }

    /// Stops all pods of a job.
    pub fn take_all(&mut self, job: JobIx) {
        let on: Vec<(NodeIx, Counts)> = self.jobs[job].on.iter().map(|(n, c)| (*n, *c)).collect();
        for (node, counts) in on {
            for role in Role::ALL {
                if counts.of(role) > 0 {
                    self.take(job, role, node, counts.of(role));
                }
            }
        }
    }

    /// Reserves capacity for online pods.
    pub fn put_online(&mut self, pods: &OnlinePods, node: NodeIx, n: u32) {
        let asked = pods.shape * u64::from(n);
        self.unfile(node);
        self.free[node] -= asked;
        self.file(node);
        self.asked += asked;
        let id = self.nodes[node].id;
        match self.online_placements.last_mut() {
            Some(last) if last.service == pods.service && last.node == id => last.n += n,
            _ => {
                self.online_placements.push(OnlinePlacement { service: pods.service, node: id, n })
            }
        }
    }

    #[must_use]
    pub fn bookmark(&self) -> Bookmark {
        Bookmark(self.journal.len())
    }

    /// Whether nothing has changed since the bookmark.
    #[must_use]
    pub fn is_at(&self, bookmark: Bookmark) -> bool {
        self.journal.len() == bookmark.0
    }

    /// Undoes every `put` and `take` since the bookmark.
    pub fn rewind(&mut self, to: Bookmark) {
        while self.journal.len() > to.0 {
            let Some(JournalEntry { job, role, node, n, is_put }) = self.journal.pop() else {
                return;
            };
            if is_put {
                self.take_anywhere(job, role, node, n);
            } else {
                self.put_anywhere(job, role, node, n);
            }
        }
    }

    /// The jobs whose pods were stopped since the bookmark, each once.
    #[must_use]
    pub fn taken_since(&self, bookmark: Bookmark) -> BTreeSet<JobIx> {
        let taken = self.journal[bookmark.0..].iter().filter(|entry| !entry.is_put);
        taken.map(|entry| entry.job).collect()
    }

    pub fn because(&mut self, job: JobIx, reason: Reason) {
        let reasons = &mut self.jobs[job].reasons;
        if !reasons.contains(&reason) {
            reasons.push(reason);
        }
    }

    /// Classes of equal ready nodes with at least `need` free, the tightest first.
    pub fn classes(&self, need: Resources) -> impl Iterator<Item = NodeClass> {
        let from = ClassKey {
            cpu_milli: need.cpu_milli,
            memory_mib: 0,
            pods: 0,
            taints: Marks::NONE,
            labels: Marks::NONE,
            capacity: Resources::ZERO,
        };
        let by_gpu = self.index.by_gpu.range(need.gpu..);
        let all = by_gpu.flat_map(move |(gpu, classes)| {
            let range = classes.range((Bound::Included(from), Bound::Unbounded));
            range.map(move |(key, nodes)| (*gpu, key, nodes))
        });
        all.filter_map(move |(gpu, key, nodes)| {
            let ClassKey { cpu_milli, memory_mib, pods, .. } = *key;
            let free = Resources { gpu, cpu_milli, memory_mib, pods };
            let first = *nodes.first()?;
            need.fits_in(free).then_some(NodeClass { first, free })
        })
    }

    fn put_anywhere(&mut self, job: JobIx, role: Role, node: NodeIx, n: u32) {
        self.unfile(node);
        self.count_in(job, role, node, n);
        self.file(node);
    }

    /// Counts pods that are put on a node, everywhere but in the index.
    fn count_in(&mut self, job: JobIx, role: Role, node: NodeIx, n: u32) {
        if n == 0 {
            return;
        }
        let entry = &mut self.jobs[job];
        let asked = entry.job.roles.of(role).shape * u64::from(n);
        *entry.counts.of_mut(role) += n;
        *entry.on.entry(node).or_default().of_mut(role) += n;
        let queue = entry.job.queue;
        self.free[node] -= asked;
        let here = &mut self.on_node[node];
        match here.binary_search_by_key(&job, |(job, _)| *job) {
            Ok(at) => *here[at].1.of_mut(role) += n,
            Err(at) => {
                let mut counts = Counts::default();
                *counts.of_mut(role) = n;
                here.insert(at, (job, counts));
            }
        }
        if self.nodes[node].state != NodeState::Leaving {
            self.asked += asked;
        }
        if let Some(queue) = self.queues.get_mut(&queue) {
            queue.used += asked;
        }
    }

    fn take_anywhere(&mut self, job: JobIx, role: Role, node: NodeIx, n: u32) {
        if n == 0 {
            return;
        }
        let entry = &mut self.jobs[job];
        let asked = entry.job.roles.of(role).shape * u64::from(n);
        let on = entry.on.get_mut(&node).expect("a job has pods where they are taken");
        assert!(on.of(role) >= n, "a job has as many pods as are taken");
        *on.of_mut(role) -= n;
        if on.sum() == 0 {
            entry.on.remove(&node);
        }
        *entry.counts.of_mut(role) -= n;
        let queue = entry.job.queue;
        self.unfile(node);
        self.free[node] += asked;
        self.file(node);
        let here = &mut self.on_node[node];
        let at = here.binary_search_by_key(&job, |(job, _)| *job).expect("both indexes agree");
        *here[at].1.of_mut(role) -= n;
        if here[at].1.sum() == 0 {
            here.remove(at);
        }
        if self.nodes[node].state != NodeState::Leaving {
            self.asked -= asked;
        }
        if let Some(queue) = self.queues.get_mut(&queue) {
            queue.used -= asked;
        }
    }

    fn class_key(&self, node: NodeIx) -> (u64, ClassKey) {
        let Resources { gpu, cpu_milli, memory_mib, pods } = self.free[node];
        let Node { taints, labels, capacity, .. } = *self.nodes[node];
        (gpu, ClassKey { cpu_milli, memory_mib, pods, taints, labels, capacity })
    }

    fn file(&mut self, node: NodeIx) {
        if self.nodes[node].state == NodeState::Ready {
            let (gpu, key) = self.class_key(node);
            let classes = self.index.by_gpu.entry(gpu).or_default();
            classes.entry(key).or_default().insert(node);
        }
    }

    fn unfile(&mut self, node: NodeIx) {
        let (gpu, key) = self.class_key(node);
        let Some(classes) = self.index.by_gpu.get_mut(&gpu) else { return };
        let Some(nodes) = classes.get_mut(&key) else { return };
        nodes.remove(&node);
        if nodes.is_empty() {
            classes.remove(&key);
        }
    }
}

impl JobEntry<'_> {
    /// Whether every role has at least its minimum.
    #[must_use]
    pub fn has_gang(&self) -> bool {
        Role::ALL.into_iter().all(|role| self.counts.of(role) >= self.job.roles.of(role).min)
            && self.counts.worker > 0
    }

    /// Workers above the minimum, which can be removed without stopping the job.
    #[must_use]
    pub fn surplus(&self) -> u32 {
        self.counts.worker.saturating_sub(self.job.roles.worker.min)
    }

    /// Whether an earlier plan changed it within `window`.
    #[must_use]
    pub fn was_resized_within(&self, window: Duration, now: Time) -> bool {
        self.resized.is_some_and(|then| now.since(then) < window)
    }

    #[must_use]
    pub fn can_grow(&self) -> bool {
        self.has_gang() && self.counts.worker < self.job.roles.worker.max
    }

    #[must_use]
    pub fn used(&self) -> Resources {
        self.job.resources(self.counts)
    }

    /// Nodes with workers of this job, and how many.
    pub fn workers_on(&self) -> impl Iterator<Item = (NodeIx, u32)> {
        self.on.iter().map(|(node, counts)| (*node, counts.worker)).filter(|(_, n)| *n > 0)
    }
}
