// SPDX-License-Identifier: Apache-2.0
//! Chooses surplus to stop when capacity is needed: few pods, of the largest jobs, on nodes where the
//! newcomer then fits.

use std::cmp::{Ordering, Reverse};
use std::collections::{BTreeMap, BTreeSet};

use crate::board::{Board, Bookmark, JobIx, NodeIx};
use crate::fairness::{Measure, OrderedF64, level};
use crate::packing;
use crate::plan::Reason;
use crate::quota;
use crate::resources::Resources;
use crate::snapshot::{Counts, JobId, Marks, NodeState, OnlinePods, Role};

/// A claim clears one node per this many pods before nodes are compared again.
const PODS_PER_CLEARED_NODE: u32 = 8;

/// Pods that need capacity, and what they may take it from.
#[derive(Clone, Copy, Debug)]
pub struct Claim {
    /// The job of the pods, which gives nothing to itself.
    pub job: Option<JobId>,
    pub shape: Resources,
    pub n: u32,
    /// For pods that stay (masters and servers): the shape of the job's workers, and where the search
    /// began. Nodes are also compared by their long-term cost.
    pub staying: Option<(Resources, Bookmark)>,
    /// Jobs of a higher priority give nothing.
    pub priority: i32,
    pub tolerates: Marks,
    pub selects: Marks,
}

/// A way to clear one node: the workers to stop, and how many pods of the claim fit then.
#[derive(Clone, Debug)]
struct Clearing {
    node: NodeIx,
    victims: Vec<JobIx>,
    n: u32,
    long_term: Option<LongTermCost>,
    /// How good a choice the victims are; lower is better.
    rank: usize,
}

/// What pods that stay cost other jobs.
#[derive(Clone, Copy, Debug)]
struct LongTermCost {
    /// Workers displaced in the long run.
    later: u64,
    /// Masters and servers on the node afterwards.
    beside: u32,
    /// Victims that have given nothing to the same newcomer before.
    disturbed: usize,
}

/// Places the whole minimum of `job`, taking surplus of others if necessary; all or nothing.
#[must_use]
pub fn put_gang_by_taking(board: &mut Board<'_>, job: JobIx, wanted: Counts) -> bool {
    let bookmark = board.bookmark();
    let spec = board.jobs[job].job;
    for role in packing::largest_first(spec) {
        let mut left = wanted.of(role);
        while left > 0 {
            if let Some((node, n)) = packing::cheapest_spot(board, job, role, left) {
                board.put(job, role, node, n);
                left -= n;
                continue;
            }
            let claim = Claim {
                job: Some(spec.id),
                shape: spec.roles.of(role).shape,
                n: left,
                staying: (role != Role::Worker).then_some((spec.roles.worker.shape, bookmark)),
                priority: spec.priority,
                tolerates: spec.tolerates,
                selects: spec.selects,
            };
            let cleared = clear_nodes(board, &claim);
            if cleared.is_empty() {
                board.rewind(bookmark);
                return false;
            }
            for (node, n) in cleared {
                board.put(job, role, node, n);
                left -= n;
            }
        }
    }
    for victim in board.taken_since(bookmark) {
        board.because(victim, Reason::FreesCapacityForJob(spec.id));
    }
    true
}

/// Places online pods, taking surplus of training jobs if necessary; returns how many are left.
pub fn put_online_by_taking(board: &mut Board<'_>, pods: &OnlinePods) -> u32 {
    let mut left = packing::put_online(board, pods);
    while left > 0 {
        let claim = Claim {
            job: None,
            shape: pods.shape,
            n: left,
            staying: None,
            priority: i32::MAX,
            tolerates: pods.tolerates,
            selects: pods.selects,
        };
        let bookmark = board.bookmark();
        let cleared = clear_nodes(board, &claim);
        if cleared.is_empty() {
            return left;
        }
        for victim in board.taken_since(bookmark) {
            board.because(victim, Reason::FreesCapacityForService(pods.service));
        }
        for (node, n) in cleared {
            board.put_online(pods, node, n);
            left -= n;
        }
    }
    0
}

/// Stops the fewest workers per pod that then fits; returns the nodes, and how many pods fit there.
///
/// The largest job gives first, so the order changes with every stopped worker. For a large claim,
/// the best few nodes are cleared before the order is computed again.
fn clear_nodes(board: &mut Board<'_>, claim: &Claim) -> Vec<(NodeIx, u32)> {
    let ranks = ranks(board, claim);
    if ranks.iter().all(Option::is_none) {
        return Vec::new();
    }
    let may_use = |node: &NodeIx| {
        let node = board.nodes[*node];
        node.state == NodeState::Ready
            && node.taints.all_in(claim.tolerates)
            && claim.selects.all_in(node.labels)
            && claim.shape.fits_in(node.capacity)
    };
    let given = claim.staying.map(|(_, since)| board.taken_since(since)).unwrap_or_default();
    let nodes = (0..board.nodes.len()).filter(may_use);
    let mut found: Vec<Clearing> =
        nodes.filter_map(|node| clearing(board, claim, &ranks, &given, node)).collect();
    let n_nodes = (claim.n / PODS_PER_CLEARED_NODE).max(1) as usize;
    if n_nodes < found.len() {
        found.select_nth_unstable_by(n_nodes - 1, Clearing::order);
        found.truncate(n_nodes);
    }
    found.sort_by(Clearing::order);
    let mut left = claim.n;
    let mut cleared = Vec::new();
    for Clearing { node, victims, n, .. } in found {
        // A victim may have given its last surplus on an earlier node.
        let mut gives = victims.iter().fold(BTreeMap::new(), |mut gives, victim| {
            *gives.entry(*victim).or_insert(0_u32) += 1;
            gives
        });
        gives.retain(|victim, n| board.jobs[*victim].surplus() < *n);
        if left == 0 || !gives.is_empty() {
            continue;
        }
        for victim in victims {
            board.take(victim, Role::Worker, node, 1);
        }
        cleared.push((node, n.min(left)));
        left -= n.min(left);
    }
    cleared
}

/// The best way to clear one node, if there is one.
fn clearing(
    board: &Board<'_>,
    claim: &Claim,
    ranks: &[Option<usize>],
    given: &BTreeSet<JobIx>,
    node: NodeIx,
) -> Option<Clearing> {
    let mut candidates: Vec<(usize, JobIx, u32)> = board
        .on_node(node)
        .iter()
        .filter_map(|(job, counts)| Some((ranks[*job]?, *job, counts.worker)))
        .filter(|(.., n)| *n > 0)
        .collect();
    if candidates.is_empty() {
        return None;
    }
    candidates.sort_unstable();
    let mut free = board.free(node);
    let mut victims = Vec::new();
    let mut rank_sum = 0;
    let prospects = claim.staying.map(|(worker, _)| (packing::Prospects::of(board, node), worker));
    let mut best: Option<Clearing> = None;
    for (rank, job, on_node) in candidates {
        let entry = &board.jobs[job];
        for _ in 0..on_node.min(entry.surplus()) {
            free += entry.job.roles.worker.shape;
            victims.push(job);
            rank_sum += rank;
            let fit = claim.shape.times_in(free).min(u64::from(claim.n));
            let n = u32::try_from(fit).unwrap_or(u32::MAX);
            if n == 0 {
                continue;
            }
            let found = Clearing {
                node,
                n,
                long_term: prospects.map(|(prospects, worker)| LongTermCost {
                    later: prospects.workers_lost(claim.shape, worker, n),
                    beside: prospects.n_lasting + n,
                    disturbed: n_disturbed(given, &victims),
                }),
                victims: victims.clone(),
                rank: rank_sum,
            };
            if best.as_ref().is_none_or(|best| found.is_better_than(best)) {
                best = Some(found);
            }
            if n == claim.n {
                return best;
            }
        }
    }
    best
}

impl Clearing {
    fn is_better_than(&self, other: &Self) -> bool {
        self.order(other).is_lt()
    }

    /// Fewer victims per placed pod, without division; then the lower long-term cost; then the
    /// better victims; then the node.
    fn order(&self, other: &Self) -> Ordering {
        let key = |one: &Self, n: u32| {
            let n = u64::from(n);
            let cost = one.long_term.map(|cost| (cost.later * n, cost.beside, cost.disturbed));
            let rank = one.rank / one.victims.len().max(1);
            (one.victims.len() as u64 * n, cost, rank, one.node)
        };
        key(self, other.n).cmp(&key(other, self.n))
    }
}

/// How many of the victims' jobs have given nothing to this newcomer so far. Victims of one job are
/// adjacent.
fn n_disturbed(given: &BTreeSet<JobIx>, victims: &[JobIx]) -> usize {
    victims.chunk_by(|a, b| a == b).filter(|same| !given.contains(&same[0])).count()
}

/// The rank in which jobs give surplus to a claim; none for jobs that give nothing.
fn ranks(board: &Board<'_>, claim: &Claim) -> Vec<Option<usize>> {
    let gives = |job: &JobIx| {
        let entry = &board.jobs[*job];
        entry.surplus() > 0
            && entry.has_gang()
            && entry.job.priority <= claim.priority
            && claim.job != Some(entry.job.id)
    };
    let mut order: Vec<JobIx> = (0..board.jobs.len()).filter(gives).collect();
    order.sort_by_cached_key(|job| {
        let entry = &board.jobs[*job];
        let borrows = !quota::is_own(board, entry.job.queue, Resources::ZERO);
        let share = OrderedF64(level(board, *job, entry.counts, Measure::Share));
        (entry.job.priority, Reverse(borrows), Reverse(share), entry.job.id)
    });
    let mut ranks = vec![None; board.jobs.len()];
    for (rank, job) in order.into_iter().enumerate() {
        ranks[job] = Some(rank);
    }
    ranks
}
