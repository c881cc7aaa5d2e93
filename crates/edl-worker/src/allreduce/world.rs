// SPDX-License-Identifier: Apache-2.0
//! A world as the master names it, and how its members come to hold the same state.

use edl_core::id::{Generation, Incarnation, WorkerId, WorldId};
use edl_core::lanes::Span;
use edl_net::proto;

use super::mesh::Move;

/// Who trains together.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct World {
    pub(crate) id: WorldId,
    /// In the order of their lanes.
    pub(crate) members: Vec<Member>,
    /// The world before goes on until its members hold the state after this step.
    pub(crate) after: Option<u64>,
    /// The master's word is waited for at this step.
    pub(crate) until: u64,
    pub(crate) generation: Generation,
    /// Set if nobody has state: everybody makes it from this.
    pub(crate) load: Option<proto::Load>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Member {
    pub(crate) worker: WorkerId,
    pub(crate) incarnation: Incarnation,
    pub(crate) address: String,
    pub(crate) unix_path: String,
    pub(crate) lanes: Span,
    /// What a member without this flag holds is void.
    pub(crate) has_state: bool,
}

impl From<proto::World> for World {
    fn from(world: proto::World) -> Self {
        let member = |member: proto::Member| Member {
            worker: WorkerId(member.worker),
            incarnation: Incarnation(member.incarnation),
            address: member.address,
            unix_path: member.unix_path,
            lanes: member.first_lane..member.end_lane,
            has_state: member.has_state,
        };
        Self {
            id: WorldId(world.world),
            members: world.members.into_iter().map(member).collect(),
            after: world.after,
            until: world.until,
            generation: Generation(world.generation),
            load: world.load,
        }
    }
}

impl World {
    /// The place of a worker among the members.
    pub(crate) fn place_of(&self, worker: WorkerId, incarnation: Incarnation) -> Option<usize> {
        let is_it = |member: &Member| (member.worker, member.incarnation) == (worker, incarnation);
        self.members.iter().position(is_it)
    }

    /// Whether a worker has nothing to finish before this world takes over. One whose state is
    /// void is not of the world that trains on until then: the world that it believes to be in
    /// was replaced while it did not hear the master.
    pub(crate) fn is_due_at_once(&self, worker: WorkerId, incarnation: Incarnation) -> bool {
        let place = self.place_of(worker, incarnation);
        self.after.is_none() || place.is_some_and(|place| !self.members[place].has_state)
    }

    /// Whether a member of this world is not in `next`.
    pub(crate) fn loses_members_in(&self, next: &Self) -> bool {
        let stays = |member: &Member| next.place_of(member.worker, member.incarnation).is_some();
        !self.members.iter().all(stays)
    }
}

/// What a member tells the others when a world begins: the step of its state, if it has one.
pub(super) fn tell_step(step: Option<u64>) -> Vec<u8> {
    step.map_or_else(Vec::new, |step| step.to_le_bytes().to_vec())
}

pub(super) fn hear_step(bytes: &[u8]) -> Option<u64> {
    bytes.try_into().ok().map(u64::from_le_bytes)
}

/// How all members get the highest of their steps: that step, and which partitions move. Those
/// who have it share the work. None if nobody has state.
pub(super) fn level(steps: &[Option<u64>], n_partitions: u32) -> Option<(u64, Vec<Move>)> {
    let highest = steps.iter().copied().flatten().max()?;
    let is_there = |place: &usize| steps[*place] == Some(highest);
    let (sources, behind): (Vec<usize>, Vec<usize>) = (0..steps.len()).partition(is_there);
    let moves = (0..n_partitions).flat_map(|item| {
        let from = sources[item as usize % sources.len()];
        behind.iter().map(move |to| Move { from, to: *to, item })
    });
    Some((highest, moves.collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn those_ahead_share_the_work_of_bringing_the_others_up() {
        let (step, moves) = level(&[Some(7), None, Some(8), Some(8)], 3).unwrap();
        assert_eq!(step, 8);
        let expected = [(2, 0, 0), (2, 1, 0), (3, 0, 1), (3, 1, 1), (2, 0, 2), (2, 1, 2)];
        assert_eq!(moves, expected.map(|(from, to, item)| Move { from, to, item }));
    }

    #[test]
    fn nothing_moves_among_equals_and_nothing_comes_from_nothing() {
        assert_eq!(level(&[Some(3), Some(3)], 4), Some((3, Vec::new())));
        assert_eq!(level(&[None, None], 4), None);
    }

    #[test]
    fn a_step_survives_being_told() {
        for step in [None, Some(0), Some(u64::MAX)] {
            assert_eq!(hear_step(&tell_step(step)), step);
        }
    }
}
