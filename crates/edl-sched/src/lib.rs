// SPDX-License-Identifier: Apache-2.0
//! How many workers each job gets, and on which nodes:
//! `plan(&Snapshot, &PlannerState, now) -> AllocationPlan`.
//!
//! A plan is a pure function of what was observed. The operator and the simulator call the same
//! function. Nothing here does I/O, reads a clock, waits, logs or depends on hash order. Every change
//! has a typed [`plan::Reason`].
//!
//! [`board`] holds the cluster while a plan is made; [`packing`], [`victims`], [`fairness`],
//! [`quota`], [`admission`], [`trim`] and [`growth`] are the pieces that [`policy`] puts together.

pub mod admission;
pub mod board;
pub mod fairness;
pub mod growth;
pub mod names;
pub mod packing;
pub mod plan;
pub mod policy;
pub mod quota;
pub mod resources;
pub mod sim;
pub mod snapshot;
pub mod speed;
pub mod state;
pub mod throughput;
pub mod trim;
pub mod victims;

use std::collections::BTreeMap;

use edl_core::time::Time;

use crate::board::{Board, JobEntry, NodeIx};
use crate::plan::{AllocationPlan, Change, Placing, Reason};
use crate::snapshot::{Counts, Node, Placed, Role, Snapshot};
use crate::state::{JobMemory, PlannerState};

/// Decides how many pods every job should have now.
///
/// The plan exceeds no node of the snapshot. Planning again at the same time, after the plan is
/// applied, changes nothing.
#[must_use]
pub fn plan(snapshot: &Snapshot, state: &PlannerState, now: Time) -> AllocationPlan {
    let mut board = Board::new(snapshot, state, now);
    let mut next = state.clone();
    policy::decide(&mut board, state.options.policy, &mut next);
    remember_only_present(&mut next, &board);
    let changes: Vec<Change> =
        board.jobs.iter().filter_map(|entry| change(&board.nodes, entry)).collect();
    for change in &changes {
        let is_first = board.job_ix(change.job).is_some_and(|job| !board.jobs[job].ran_before);
        remember_change(next.jobs.entry(change.job).or_default(), now, is_first);
    }
    let waiting: BTreeMap<_, _> =
        board.jobs.iter().filter_map(|entry| Some((entry.job.id, entry.waiting?))).collect();
    AllocationPlan { changes, waiting, online: board.online_placements, state: next, made: now }
}

fn remember_only_present(state: &mut PlannerState, board: &Board<'_>) {
    state.jobs.retain(|job, _| board.job_ix(*job).is_some());
}

fn remember_change(memory: &mut JobMemory, now: Time, is_first: bool) {
    memory.resized = Some(now);
    memory.n_resizes += u32::from(!is_first);
}

/// The difference between a job's pods before and after the plan, if any.
fn change(nodes: &[&Node], entry: &JobEntry<'_>) -> Option<Change> {
    let job = entry.job.id;
    if let Some(target) = entry.wanted {
        let differs = target != entry.job.counts();
        let change = |target| Change {
            job,
            target,
            placing: Placing::Kubernetes,
            reasons: entry.reasons.clone(),
        };
        return differs.then(|| change(target));
    }
    let (mut start, mut stop) = (Vec::new(), Vec::new());
    let places: std::collections::BTreeSet<NodeIx> =
        entry.before.keys().chain(entry.on.keys()).copied().collect();
    for place in places {
        let before = entry.before.get(&place).copied().unwrap_or_default();
        let after = entry.on.get(&place).copied().unwrap_or_default();
        for role in Role::ALL {
            let (had, has) = (before.of(role), after.of(role));
            let placed = |n| Placed { role, node: nodes[place].id, n };
            if has > had {
                start.push(placed(has - had));
            } else if had > has {
                stop.push(placed(had - has));
            }
        }
    }
    if start.is_empty() && stop.is_empty() {
        return None;
    }
    let mut reasons = entry.reasons.clone();
    if reasons.is_empty() {
        // The snapshot showed more pods on a node than fit.
        reasons.push(Reason::Incomplete);
    }
    Some(Change { job, target: entry.counts, placing: Placing::Named { start, stop }, reasons })
}

/// The snapshot after a plan is carried out, with all pods running.
#[must_use]
pub fn applied(snapshot: &Snapshot, plan: &AllocationPlan) -> Snapshot {
    let mut after = snapshot.clone();
    for job in &mut after.jobs {
        let Some(change) = plan.change_of(job.id) else { continue };
        if let Placing::Named { start, stop } = &change.placing {
            job.placed = moved(&job.placed, start, stop);
        }
        job.running = job.counts();
    }
    for placed in &plan.online {
        let Some(pods) = after.waiting.iter_mut().find(|pods| pods.service == placed.service)
        else {
            continue;
        };
        pods.n -= placed.n;
        let taken = pods.shape * u64::from(placed.n);
        for node in after.nodes.iter_mut().filter(|node| node.id == placed.node) {
            node.taken += taken;
        }
    }
    after
}

fn moved(placed: &[Placed], start: &[Placed], stop: &[Placed]) -> Vec<Placed> {
    let mut on: BTreeMap<_, Counts> = BTreeMap::new();
    for Placed { role, node, n } in placed.iter().chain(start) {
        *on.entry(*node).or_default().of_mut(*role) += n;
    }
    for Placed { role, node, n } in stop {
        *on.entry(*node).or_default().of_mut(*role) -= n;
    }
    let each = on
        .into_iter()
        .flat_map(|(node, counts)| Role::ALL.map(|role| Placed { role, node, n: counts.of(role) }));
    each.filter(|placed| placed.n > 0).collect()
}
