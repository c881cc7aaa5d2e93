// SPDX-License-Identifier: Apache-2.0
//! Who gets how many workers, and on which nodes: `plan(&Snapshot, &State, now) -> Plan`.
//!
//! A plan is a pure function of what was observed. The operator and the simulator call
//! the same one, so what is simulated is what ships. Nothing here does I/O, reads a clock, waits,
//! logs or depends on hash order. Every change has a typed [`plan::Reason`].
//!
//! [`board`] keeps the books while a plan is made; [`packing`], [`victims`], [`fairness`],
//! [`quota`], [`admission`], [`trim`] and [`growth`] are the pieces that [`policy`] puts together.

pub mod admission;
pub mod board;
pub mod fairness;
pub mod growth;
pub mod packing;
pub mod plan;
pub mod policy;
pub mod quota;
pub mod resources;
pub mod sim;
pub mod snapshot;
pub mod state;
pub mod throughput;
pub mod trim;
pub mod victims;

use std::collections::BTreeMap;

use edl_core::time::Time;

use crate::board::{Board, NodeIx, Seat};
use crate::plan::{Change, Placing, Plan, Reason};
use crate::snapshot::{Counts, Node, Placed, Role, Snapshot};
use crate::state::{Memory, State};

/// Decides what every job should have now.
///
/// Applied to the cluster that `snapshot` shows, the plan exceeds no node, and planned again at
/// the same time it changes nothing.
#[must_use]
pub fn plan(snapshot: &Snapshot, state: &State, now: Time) -> Plan {
    let mut board = Board::new(snapshot, state, now);
    let mut next = state.clone();
    policy::decide(&mut board, state.options.policy, &mut next);
    remember_only_present(&mut next, &board);
    let changes: Vec<Change> =
        board.jobs.iter().filter_map(|seat| change(&board.nodes, seat)).collect();
    for change in &changes {
        let is_first = board.job_ix(change.job).is_some_and(|job| !board.jobs[job].ran_before);
        remember_change(next.jobs.entry(change.job).or_default(), now, is_first);
    }
    let waiting: BTreeMap<_, _> =
        board.jobs.iter().filter_map(|seat| Some((seat.job.id, seat.waiting?))).collect();
    Plan { changes, waiting, room: board.room, state: next, made: now }
}

fn remember_only_present(state: &mut State, board: &Board<'_>) {
    state.jobs.retain(|job, _| board.job_ix(*job).is_some());
}

fn remember_change(memory: &mut Memory, now: Time, is_first: bool) {
    memory.resized = Some(now);
    memory.n_resizes += u32::from(!is_first);
}

/// The difference between where a job's pods were and where they shall be; none if there is none.
fn change(nodes: &[&Node], seat: &Seat<'_>) -> Option<Change> {
    let job = seat.job.id;
    if let Some(target) = seat.wanted {
        let differs = target != seat.job.counts();
        let change = |target| Change {
            job,
            target,
            placing: Placing::Kubernetes,
            reasons: seat.reasons.clone(),
        };
        return differs.then(|| change(target));
    }
    let (mut start, mut stop) = (Vec::new(), Vec::new());
    let places: std::collections::BTreeSet<NodeIx> =
        seat.before.keys().chain(seat.on.keys()).copied().collect();
    for place in places {
        let before = seat.before.get(&place).copied().unwrap_or_default();
        let after = seat.on.get(&place).copied().unwrap_or_default();
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
    let mut reasons = seat.reasons.clone();
    if reasons.is_empty() {
        // The snapshot showed more on a node than the node has.
        reasons.push(Reason::Incomplete);
    }
    Some(Change { job, target: seat.counts, placing: Placing::Named { start, stop }, reasons })
}

/// The snapshot as it is once a plan is carried out, with everything running.
#[must_use]
pub fn applied(snapshot: &Snapshot, plan: &Plan) -> Snapshot {
    let mut after = snapshot.clone();
    for job in &mut after.jobs {
        let Some(change) = plan.change_of(job.id) else { continue };
        if let Placing::Named { start, stop } = &change.placing {
            job.placed = moved(&job.placed, start, stop);
        }
        job.running = job.counts();
    }
    for room in &plan.room {
        let Some(pods) = after.waiting.iter_mut().find(|pods| pods.service == room.service) else {
            continue;
        };
        pods.n -= room.n;
        let taken = pods.shape * u64::from(room.n);
        for node in after.nodes.iter_mut().filter(|node| node.id == room.node) {
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
