// SPDX-License-Identifier: Apache-2.0
//! Which node a pod goes to: real vectors of real nodes, never sums over the cluster.

use crate::board::{Board, JobIx, NodeIx};
use crate::resources::Resources;
use crate::snapshot::{Counts, Job, NodeState, OnlinePods, Role};

/// How many kinds of nodes are compared for a pod, the tightest first.
const MOST_CLASSES: usize = 128;

/// Places one more worker: beside the job's other pods if it fits there, else where the least
/// room is left over. Says where.
pub fn put_worker(board: &mut Board<'_>, job: JobIx) -> Option<NodeIx> {
    let node = worker_spot(board, job)?;
    board.put(job, Role::Worker, node, 1);
    Some(node)
}

/// Where [`put_worker`] would go.
#[must_use]
pub fn worker_spot(board: &Board<'_>, job: JobIx) -> Option<NodeIx> {
    let seat = &board.jobs[job];
    let shape = seat.job.roles.worker.shape;
    let is_open = |node: &NodeIx| {
        board.nodes[*node].state == NodeState::Ready && shape.fits_in(board.free(*node))
    };
    let beside = seat.on.keys().copied().filter(is_open);
    let beside = beside.min_by_key(|node| (board.free(*node), *node));
    beside.or_else(|| tightest(board, seat.job, shape))
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

/// Roles with the largest pods first: small ones fit into what is left.
#[must_use]
pub fn largest_first(job: &Job) -> [Role; 3] {
    let mut roles = Role::ALL;
    roles.sort_by_key(|role| std::cmp::Reverse(job.roles.of(*role).shape));
    roles
}

/// Where up to `n` pods of a role cost the fewest workers that could be there instead, and how
/// many of them go there. Of equal places the one that costs fewest later on ([`Prospects`]),
/// then the one with fewest masters and servers (what a lost node takes with it), then the
/// tightest.
///
/// Four servers of 4 CPUs on a node of 28 leave room for fewer workers of 5 than three do: this
/// is where a cluster of mixed pods is won or lost.
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

/// Places online pods on free room; says how many found none.
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

/// Places `n` workers from the node with most free room on, as Tiresias and Optimus do; all or
/// none.
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

/// Places `n` workers on as few nodes as there is room for; all or none.
#[must_use]
pub fn put_packed(board: &mut Board<'_>, job: JobIx, n: u32) -> bool {
    let bookmark = board.bookmark();
    let shape = board.jobs[job].job.roles.worker.shape;
    let mut left = n;
    while left > 0 {
        // One node that holds the rest, the tightest; else as much as one holds, the roomiest.
        let whole = tightest(board, board.jobs[job].job, shape * u64::from(left));
        let Some((node, here)) = whole.map(|node| (node, left)).or_else(|| roomiest(board, job))
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

/// The node that holds most workers of a job now, and how many; the first of equals.
#[must_use]
pub fn roomiest(board: &Board<'_>, job: JobIx) -> Option<(NodeIx, u32)> {
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

/// How many workers of a job the roomiest node would hold if it were empty; at least 1.
#[must_use]
pub fn most_on_a_node(board: &Board<'_>, job: JobIx) -> u32 {
    let shape = board.jobs[job].job.roles.worker.shape;
    let most = board.nodes.iter().map(|node| shape.times_in(node.capacity)).max();
    u32::try_from(most.unwrap_or(1)).unwrap_or(u32::MAX).max(1)
}

/// Workers lost for each pod placed, now and later, compared without division.
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

/// What a node will have for workers as others (online services, mostly) leave it: as it is, by
/// a quarter, a half and three quarters. Never altogether: every node has agents that stay.
///
/// Workers come and go with the room there is, but a job's servers stay where they start: a place
/// that costs nothing in a full cluster may waste half a node as soon as others leave.
#[derive(Clone, Copy, Debug)]
pub struct Prospects {
    rooms: [Resources; 4],
    /// Masters and servers that are there.
    pub n_lasting: u32,
}

impl Prospects {
    #[must_use]
    pub fn of(board: &Board<'_>, node: NodeIx) -> Self {
        let (room, taken) = (board.lasting_room(node), board.held_by_others(node));
        let still_taken = [1000, 750, 500, 250].map(|permille| taken.permille(permille));
        let rooms = still_taken.map(|taken| room.saturating_sub(taken));
        Self { rooms, n_lasting: board.n_lasting(node) }
    }

    /// How many workers `k` pods of `shape` cost, summed over those levels.
    #[must_use]
    pub fn workers_lost(&self, shape: Resources, worker: Resources, k: u32) -> u64 {
        self.rooms.iter().map(|room| workers_lost(*room, shape, worker, k)).sum()
    }
}

fn workers_lost(free: Resources, shape: Resources, worker: Resources, k: u32) -> u64 {
    let after = free.saturating_sub(shape * u64::from(k));
    worker.times_in(free) - worker.times_in(after)
}
