// SPDX-License-Identifier: Apache-2.0
//! Whose surplus goes when room is needed: few pods, of those who have most, and on nodes where
//! the newcomer then fits.

use std::cmp::{Ordering, Reverse};
use std::collections::{BTreeMap, BTreeSet};

use crate::board::{Board, Bookmark, JobIx, NodeIx};
use crate::fairness::{Measure, Sorted, level};
use crate::packing;
use crate::plan::Reason;
use crate::quota;
use crate::resources::Resources;
use crate::snapshot::{Counts, JobId, Marks, NodeState, OnlinePods, Role, ServiceId};

/// A claim of so many pods takes one node from each look at the cluster.
const NODES_A_LOOK: u32 = 8;

/// Who needs room.
#[derive(Clone, Copy, Debug)]
pub enum Newcomer {
    Job(JobId),
    Service(ServiceId),
}

/// Pods that need room, and whom they may take it from.
#[derive(Clone, Copy, Debug)]
pub struct Claim {
    pub newcomer: Newcomer,
    pub shape: Resources,
    pub n: u32,
    /// A worker of the job and where its search began, if the pods are of another role and stay:
    /// places are also judged by what they cost later on and whom they disturb.
    pub staying: Option<(Resources, Bookmark)>,
    /// Jobs of a higher priority give nothing.
    pub priority: i32,
    pub tolerates: Marks,
    pub selects: Marks,
}

/// How one node could be cleared: whose workers go, and how many pods of the claim fit then.
#[derive(Clone, Debug)]
struct Clearing {
    node: NodeIx,
    victims: Vec<JobIx>,
    n: u32,
    /// What pods that stay do there.
    harm: Option<Harm>,
    /// How good a choice the victims are; lower is better.
    rank: usize,
}

/// What pods that stay where they are put do to others.
#[derive(Clone, Copy, Debug)]
struct Harm {
    /// Workers that they cost in the long run.
    later: u64,
    /// Masters and servers on the node then.
    beside: u32,
    /// Jobs that give for them and have given nothing to the same newcomer before.
    disturbed: usize,
}

/// Places the whole minimum of `job`, taking surplus of others where it must; all or nothing.
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
                newcomer: Newcomer::Job(spec.id),
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
        board.because(victim, Reason::MakesRoomForJob(spec.id));
    }
    true
}

/// Places online pods, taking surplus of training jobs where it must; says how many are left.
pub fn put_online_by_taking(board: &mut Board<'_>, pods: &OnlinePods) -> u32 {
    let mut left = packing::put_online(board, pods);
    while left > 0 {
        let claim = Claim {
            newcomer: Newcomer::Service(pods.service),
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
            board.because(victim, Reason::MakesRoomForService(pods.service));
        }
        for (node, n) in cleared {
            board.put_online(pods, node, n);
            left -= n;
        }
    }
    0
}

/// Stops the fewest workers for each pod that then fits; says where, and how many fit there.
///
/// Whoever has most gives first, so the order changes with every worker that goes. For a large
/// claim the best few nodes of one look are taken before the next look.
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
    let n_nodes = (claim.n / NODES_A_LOOK).max(1) as usize;
    if n_nodes < found.len() {
        found.select_nth_unstable_by(n_nodes - 1, Clearing::order);
        found.truncate(n_nodes);
    }
    found.sort_by(Clearing::order);
    let mut left = claim.n;
    let mut cleared = Vec::new();
    for Clearing { node, victims, n, .. } in found {
        // Somebody may have given its last surplus on the node before.
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
        let seat = &board.jobs[job];
        for _ in 0..on_node.min(seat.surplus()) {
            free += seat.job.roles.worker.shape;
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
                harm: prospects.map(|(prospects, worker)| Harm {
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

    /// Fewer victims for each pod placed, without division; then less harm of pods that stay; then
    /// the better victims; then the node.
    fn order(&self, other: &Self) -> Ordering {
        let key = |one: &Self, n: u32| {
            let n = u64::from(n);
            let harm = one.harm.map(|harm| (harm.later * n, harm.beside, harm.disturbed));
            let rank = one.rank / one.victims.len().max(1);
            (one.victims.len() as u64 * n, harm, rank, one.node)
        };
        key(self, other.n).cmp(&key(other, self.n))
    }
}

/// How many of the victims' jobs have given nothing to this newcomer so far. Victims of one job
/// stand together.
fn n_disturbed(given: &BTreeSet<JobIx>, victims: &[JobIx]) -> usize {
    victims.chunk_by(|a, b| a == b).filter(|same| !given.contains(&same[0])).count()
}

/// In which order jobs give surplus to a claim; none for those that give nothing.
fn ranks(board: &Board<'_>, claim: &Claim) -> Vec<Option<usize>> {
    let gives = |job: &JobIx| {
        let seat = &board.jobs[*job];
        seat.surplus() > 0
            && seat.has_gang()
            && seat.job.priority <= claim.priority
            && !matches!(claim.newcomer, Newcomer::Job(id) if id == seat.job.id)
    };
    let mut order: Vec<JobIx> = (0..board.jobs.len()).filter(gives).collect();
    order.sort_by_cached_key(|job| {
        let seat = &board.jobs[*job];
        let borrows = !quota::is_own(board, seat.job.queue, Resources::ZERO);
        let share = Sorted(level(board, *job, seat.counts, Measure::Share));
        (seat.job.priority, Reverse(borrows), Reverse(share), seat.job.id)
    });
    let mut ranks = vec![None; board.jobs.len()];
    for (rank, job) in order.into_iter().enumerate() {
        ranks[job] = Some(rank);
    }
    ranks
}
