// SPDX-License-Identifier: Apache-2.0
//! How the members of a world come to hold the same state.

/// A partition that one member sends to another; members by their place in the world.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Move {
    pub from: usize,
    pub to: usize,
    pub item: u32,
}

/// How all members get the highest of their steps: that step, and which partitions move. The
/// members that have it share the work. None if no member has state.
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
    fn members_that_are_ahead_share_the_work_of_bringing_the_others_up() {
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
}
