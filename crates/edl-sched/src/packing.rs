// SPDX-License-Identifier: Apache-2.0
//! Chooses the node of a pod, by the resources of each node.

use crate::board::{Board, JobIx, NodeIx};
use crate::resources::Resources;
use crate::snapshot::{Counts, Job, NodeState, OnlinePods, Role};

/// How many classes of nodes are compared for a pod, the tightest first.
const MOST_CLASSES: usize = 128;

/// Places one more worker: beside the job's other pods if it fits there, or else where the least
/// capacity is left over. Returns the node.
pub fn put_worker(board: &mut Board<'_>, job: JobIx) -> Option<NodeIx> {
    let node = worker_spot(board, job)?;
    board.put(job, Role::Worker, node, 1);
    Some(node)
}

/// The node that [`put_worker`] would choose.
#[must_use]
pub fn worker_spot(board: &Board<'_>, job: JobIx) -> Option<NodeIx> {
    let entry = &board.jobs[job];
    let shape = entry.job.roles.worker.shape;
    let is_open = |node: &NodeIx| {
        board.nodes[*node].state == NodeState::Ready && shape.fits_in(board.free(*node))
    };
    let beside = entry.on.keys().copied().filter(is_open);
    let beside = beside.min_by_key(|node| (board.free(*node), *node));
    beside.or_else(|| tightest(board, entry.job, shape))
}

/// The node that `shape` fills best.
#[must_use]
pub fn tightest(board: &Board<'_>, job: &Job, shape: Resources) -> Option<NodeIx> {
    let mut classes = board.classes(shape);
    classes.find(|class| job.may_use(board.nodes[class.first])).map(|class| class.first)
}

/// Places all pods of `wanted`, or none of them.
#[must_use]
pub fn put_gang(board: &mut Board<'_>, job: JobIx, wanted: Counts) -> bool {
    let bookmark = board.bookmark();
    for role in largest_first(board.jobs[job].job) {
        let mut left = wanted.of(role);
        while left > 0 {
            let Some((node, n)) = cheapest_spot(board, job, role, left) else {
                board.rewind(bookmark);
                return false;
            };
            board.put(job, role, node, n);
            left -= n;
        }
    }
    true
}

/// Places a job's workers by `put_workers`, and its other pods where they cost least; all or none.
#[must_use]
pub(crate) fn put_job<'a>(
    board: &mut Board<'a>,
    job: JobIx,
    counts: Counts,
    put_workers: impl FnOnce(&mut Board<'a>) -> bool,
) -> bool {
    let bookmark = board.bookmark();
    let others = Counts { worker: 0, ..counts };
    let is_placed = put_workers(board) && put_gang(board, job, others);
    if !is_placed {
        board.rewind(bookmark);
    }
    is_placed
}

/// Roles with the largest pods first: small ones fit into what is left.
#[must_use]
pub fn largest_first(job: &Job) -> [Role; 3] {
    let mut roles = Role::ALL;
    roles.sort_by_key(|role| std::cmp::Reverse(job.roles.of(*role).shape));
    roles
}

/// The node where up to `n` pods of a role displace the fewest workers, and how many of the pods go
/// there. Ties go to the node that costs the fewest workers later ([`Prospects`]), then to the one
/// with the fewest masters and servers (which are lost with the node), then to the tightest.
///
/// For example, on a node of 28 CPUs, four servers of 4 leave space for two workers of 5, and three
/// servers for three. This decides how well a cluster of mixed pods is used.
#[must_use]
pub fn cheapest_spot(board: &Board<'_>, job: JobIx, role: Role, n: u32) -> Option<(NodeIx, u32)> {
    let spec = board.jobs[job].job;
    let (shape, worker) = (spec.roles.of(role).shape, spec.roles.worker.shape);
    let mut best: Option<(Cost, NodeIx, u32)> = None;
    for class in board.classes(shape).take(MOST_CLASSES) {
        if !spec.may_use(board.nodes[class.first]) {
            continue;
        }
        let most = u32::try_from(shape.times_in(class.free)).unwrap_or(u32::MAX).min(n);
        if shape == worker {
            return Some((class.first, most));
        }
        let prospects = Prospects::of(board, class.first);
        for k in (1..=most).rev() {
            let lost = workers_lost(class.free, shape, worker, k);
            let pods = u64::from(k);
            let is_worse = |(least, ..): &(Cost, _, _)| lost * least.pods > least.lost * pods;
            if best.as_ref().is_some_and(is_worse) {
                continue;
            }
            let later = prospects.workers_lost(shape, worker, k);
            let cost = Cost { lost, later, beside: prospects.n_lasting + k, pods };
            if best.as_ref().is_none_or(|(least, ..)| cost.is_less_than(*least)) {
                best = Some((cost, class.first, k));
            }
        }
        if best.as_ref().is_some_and(|(least, ..)| least.lost == 0 && least.later == 0) {
            break;
        }
    }
    best.map(|(_, node, k)| (node, k))
}

/// Places online pods on free capacity; returns how many are left.
pub fn put_online(board: &mut Board<'_>, pods: &OnlinePods) -> u32 {
    let mut left = pods.n;
    while left > 0 {
        let may_use = |node: NodeIx| {
            let node = board.nodes[node];
            node.taints.all_in(pods.tolerates) && pods.selects.all_in(node.labels)
        };
        let Some(class) = board.classes(pods.shape).find(|class| may_use(class.first)) else {
            return left;
        };
        let n = u32::try_from(pods.shape.times_in(class.free)).unwrap_or(u32::MAX).min(left);
        board.put_online(pods, class.first, n);
        left -= n;
    }
    0
}

/// Places `n` workers, starting with the emptiest node, as Tiresias and Optimus do; all or none.
#[must_use]
pub fn put_spread(board: &mut Board<'_>, job: JobIx, n: u32) -> bool {
    let bookmark = board.bookmark();
    let shape = board.jobs[job].job.roles.worker.shape;
    let mut left = n;
    while left > 0 {
        let may_use = |node: &NodeIx| {
            board.nodes[*node].state == NodeState::Ready
                && board.jobs[job].job.may_use(board.nodes[*node])
        };
        let fits = |node: NodeIx| shape.times_in(board.free(node));
        let nodes = (0..board.nodes.len()).filter(may_use);
        // The first of equals, as `max_by_key` would give the last.
        let most = nodes.rev().max_by_key(|node| fits(*node));
        let Some((node, here)) = most.map(|node| (node, fits(node))).filter(|(_, n)| *n > 0) else {
            board.rewind(bookmark);
            return false;
        };
        let here = u32::try_from(here).unwrap_or(u32::MAX).min(left);
        board.put(job, Role::Worker, node, here);
        left -= here;
    }
    true
}

/// Places `n` workers on as few nodes as possible; all or none.
#[must_use]
pub fn put_packed(board: &mut Board<'_>, job: JobIx, n: u32) -> bool {
    let bookmark = board.bookmark();
    let shape = board.jobs[job].job.roles.worker.shape;
    let mut left = n;
    while left > 0 {
        // The tightest node that holds the rest, or else the emptiest node.
        let whole = tightest(board, board.jobs[job].job, shape * u64::from(left));
        let Some((node, here)) = whole.map(|node| (node, left)).or_else(|| emptiest(board, job))
        else {
            board.rewind(bookmark);
            return false;
        };
        let here = here.min(left);
        board.put(job, Role::Worker, node, here);
        left -= here;
    }
    true
}

/// The node that holds the most workers of a job now, and how many; the first of equals.
#[must_use]
pub fn emptiest(board: &Board<'_>, job: JobIx) -> Option<(NodeIx, u32)> {
    let spec = board.jobs[job].job;
    let shape = spec.roles.worker.shape;
    let mut best: Option<(NodeIx, u64)> = None;
    for class in board.classes(shape).filter(|class| spec.may_use(board.nodes[class.first])) {
        let n = shape.times_in(class.free);
        if best.is_none_or(|(_, most)| n > most) {
            best = Some((class.first, n));
        }
    }
    best.map(|(node, n)| (node, u32::try_from(n).unwrap_or(u32::MAX)))
}

/// How many workers of a job the largest empty node would hold; at least 1.
#[must_use]
pub fn most_on_a_node(board: &Board<'_>, job: JobIx) -> u32 {
    let shape = board.jobs[job].job.roles.worker.shape;
    let most = board.nodes.iter().map(|node| shape.times_in(node.capacity)).max();
    u32::try_from(most.unwrap_or(1)).unwrap_or(u32::MAX).max(1)
}

/// Workers lost per placed pod, now and later, compared without division.
#[derive(Clone, Copy, Debug)]
struct Cost {
    lost: u64,
    later: u64,
    /// Masters and servers on the node, these included.
    beside: u32,
    pods: u64,
}

impl Cost {
    fn is_less_than(self, other: Self) -> bool {
        let key = |one: Self, pods: u64| (one.lost * pods, one.later * pods, one.beside);
        key(self, other.pods) < key(other, self.pods)
    }
}

/// A node's capacity for workers as other pods (mostly online services) leave: now, and after a
/// quarter, half and three quarters of them have left. Some agents always stay.
///
/// Workers come and go with the free capacity, but a job's servers stay where they start. A node that
/// costs nothing in a full cluster may waste half its capacity when other pods leave.
#[derive(Clone, Copy, Debug)]
pub struct Prospects {
    capacities: [Resources; 4],
    /// Masters and servers on the node.
    pub n_lasting: u32,
}

impl Prospects {
    #[must_use]
    pub fn of(board: &Board<'_>, node: NodeIx) -> Self {
        let (capacity, taken) = (board.lasting_capacity(node), board.held_by_others(node));
        let still_taken = [1000, 750, 500, 250].map(|permille| taken.permille(permille));
        let capacities = still_taken.map(|taken| capacity.saturating_sub(taken));
        Self { capacities, n_lasting: board.n_lasting(node) }
    }

    /// How many workers `k` pods of `shape` cost, summed over those levels.
    #[must_use]
    pub fn workers_lost(&self, shape: Resources, worker: Resources, k: u32) -> u64 {
        self.capacities.iter().map(|capacity| workers_lost(*capacity, shape, worker, k)).sum()
    }
}

fn workers_lost(free: Resources, shape: Resources, worker: Resources, k: u32) -> u64 {
    let after = free.saturating_sub(shape * u64::from(k));
    worker.times_in(free) - worker.times_in(after)
}
