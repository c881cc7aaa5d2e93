// SPDX-License-Identifier: Apache-2.0
//! Lanes: how one step's records are shared out, and in which order its gradients are added.
//!
//! A step trains a fixed number of lanes, no matter which worker runs them. Sums of floating-point numbers
//! depend on their order, so the order is one canonical binary tree over the lanes: a member adds
//! up the subtrees that it owns whole, others add the rest, and the bits are always the same.

use std::ops::Range;

/// Consecutive lanes; a node of the tree, or what one member runs.
pub type Span = Range<u32>;

/// The lanes of each of `n_members` members: contiguous, in order, as equal as possible.
#[must_use]
pub fn assign(n_lanes: u32, n_members: u32) -> Vec<Span> {
    let border = |member: u32| {
        let wide = u64::from(n_lanes) * u64::from(member) / u64::from(n_members.max(1));
        u32::try_from(wide).expect("at most n_lanes")
    };
    (0..n_members).map(|member| border(member)..border(member + 1)).collect()
}

/// The lanes of each member when they differ in speed: the slowest member's time is as short as
/// it can be. `secs` is what a lane takes each of them; every member gets at least one.
///
/// # Panics
/// If there are more members than lanes.
#[must_use]
pub fn assign_by_speed(n_lanes: u32, secs: &[f64]) -> Vec<Span> {
    let n_members = u32::try_from(secs.len()).expect("members are counted in 32 bits");
    assert!(n_members <= n_lanes, "every member gets a lane");
    let mut n_of = vec![1_u32; secs.len()];
    for _ in n_members..n_lanes {
        // The next lane goes where it is done soonest; the first of equals, so all agree.
        let done_at = |member: &usize| f64::from(n_of[*member] + 1) * secs[*member];
        let soonest = (0..secs.len()).min_by(|a, b| done_at(a).total_cmp(&done_at(b)));
        if let Some(member) = soonest {
            n_of[member] += 1;
        }
    }
    let mut next = 0;
    let span = |n: u32| {
        next += n;
        next - n..next
    };
    n_of.into_iter().map(span).collect()
}

/// How long a step takes the slowest member.
#[must_use]
pub fn step_secs(spans: &[Span], secs: &[f64]) -> f64 {
    let of = |(span, secs): (&Span, &f64)| f64::from(span.end - span.start) * secs;
    spans.iter().zip(secs).map(of).fold(0.0, f64::max)
}

/// The places of each lane's records among the `n_records` of a step. The last step of an epoch
/// may be short: its records go to as many lanes as get two each, because one record alone has
/// no statistics; lanes behind those get nothing and are left out of the sum.
#[must_use]
pub fn share_out(n_records: usize, n_lanes: u32, minibatch: u32) -> Vec<Range<usize>> {
    let share = |lane| share_of(lane, n_records, n_lanes, minibatch);
    (0..n_lanes).map_while(share).collect()
}

/// The places of one lane's records; none for a lane without records.
#[must_use]
pub fn share_of(lane: u32, n_records: usize, n_lanes: u32, minibatch: u32) -> Option<Range<usize>> {
    let n_active = n_active(n_records, n_lanes, minibatch);
    let border = |lane: u32| n_records * lane as usize / n_active as usize;
    (lane < n_active).then(|| border(lane)..border(lane + 1))
}

/// Lanes that have records, in a step of `n_records`.
#[must_use]
pub fn n_active(n_records: usize, n_lanes: u32, minibatch: u32) -> u32 {
    if n_records == n_lanes as usize * minibatch as usize {
        return n_lanes;
    }
    u32::try_from((n_records / 2).max(1)).map_or(n_lanes, |n_pairs| n_lanes.min(n_pairs))
}

/// The two nodes that are added to make `node`; none for a single lane. The left one is the
/// largest full tree that leaves something for the right one, so the tree of the first lanes is
/// the same however many follow.
#[must_use]
pub fn children(node: &Span) -> Option<(Span, Span)> {
    let len = node.end - node.start;
    if len < 2 {
        return None;
    }
    let left = 1 << (u32::BITS - 1 - (len - 1).leading_zeros());
    Some((node.start..node.start + left, node.start + left..node.end))
}

/// The largest nodes of the tree over `n_active` lanes that lie inside `span`, in order.
#[must_use]
pub fn nodes_within(n_active: u32, span: &Span) -> Vec<Span> {
    let mut found = Vec::new();
    collect_within(0..n_active, span, &mut found);
    found
}

fn collect_within(node: Span, span: &Span, found: &mut Vec<Span>) {
    if node.start >= span.end || node.end <= span.start || node.is_empty() {
        return;
    }
    if span.start <= node.start && node.end <= span.end {
        found.push(node);
    } else if let Some((left, right)) = children(&node) {
        collect_within(left, span, found);
        collect_within(right, span, found);
    }
}

/// Where a lane goes when the lanes of a node are added up one after another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// The sum that it goes to: 0 for the one of the whole node, others are added to the sum
    /// before them once they are complete.
    pub depth: usize,
    /// It begins that sum; otherwise it is added to it.
    pub is_first: bool,
    /// With this lane, this many sums are complete.
    pub n_complete: usize,
}

/// Where `lane` goes in the sum of `node`.
#[must_use]
pub fn slot(node: &Span, lane: u32) -> Slot {
    let (mut node, mut depth, mut n_complete) = (node.clone(), 0, 0);
    while let Some((left, right)) = children(&node) {
        if left.contains(&lane) {
            (node, n_complete) = (left, 0);
        } else if right.len() == 1 {
            return Slot { depth, is_first: false, n_complete };
        } else {
            (node, depth, n_complete) = (right, depth + 1, n_complete + 1);
        }
    }
    Slot { depth, is_first: true, n_complete }
}

/// Adds up `node` in the tree's order: `known` yields a node that is complete, `add` adds the
/// right one to the left one.
pub fn fold<T>(
    node: &Span,
    known: &mut impl FnMut(&Span) -> Option<T>,
    add: &mut impl FnMut(T, T) -> T,
) -> Option<T> {
    if let Some(value) = known(node) {
        return Some(value);
    }
    let (left, right) = children(node)?;
    let left = fold(&left, known, add)?;
    let right = fold(&right, known, add)?;
    Some(add(left, right))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The order of additions, written out.
    fn written(node: &Span) -> String {
        let mut leaf = |node: &Span| (node.end - node.start == 1).then(|| node.start.to_string());
        fold(node, &mut leaf, &mut |a, b| format!("({a}+{b})")).expect("no lane is missing")
    }

    #[test]
    fn the_tree_of_the_first_lanes_does_not_depend_on_how_many_follow() {
        assert_eq!(written(&(0..4)), "((0+1)+(2+3))");
        assert_eq!(written(&(0..5)), "(((0+1)+(2+3))+4)");
        assert_eq!(written(&(0..6)), "(((0+1)+(2+3))+(4+5))");
        assert_eq!(written(&(0..1)), "0");
    }

    #[test]
    fn a_slow_member_gets_fewer_lanes() {
        assert_eq!(assign_by_speed(8, &[1.0, 1.0]), [0..4, 4..8]);
        assert_eq!(assign_by_speed(8, &[3.0, 1.0]), [0..2, 2..8]);
        assert_eq!(assign_by_speed(4, &[100.0, 1.0, 1.0]), [0..1, 1..3, 3..4]);
        let (spans, secs) = (assign(8, 2), [3.0, 1.0]);
        assert!(step_secs(&assign_by_speed(8, &secs), &secs) < step_secs(&spans, &secs));
    }

    #[test]
    fn a_short_step_gives_two_records_to_as_many_lanes_as_it_can() {
        assert_eq!(share_out(8, 4, 2), [0..2, 2..4, 4..6, 6..8]);
        assert_eq!(share_out(7, 4, 2), [0..2, 2..4, 4..7]);
        assert_eq!(share_out(3, 4, 2), vec![0..3; 1]);
        assert_eq!(share_out(1, 4, 2), vec![0..1; 1], "one record is a lane by itself");
        assert_eq!(share_out(40, 4, 16), [0..10, 10..20, 20..30, 30..40]);
    }

    proptest! {
        #[test]
        fn any_mapping_adds_in_the_same_order(
            n_lanes in 1_u32..40,
            n_members in 1_u32..17,
            n_active in 1_u32..40,
        ) {
            let n_active = n_active.min(n_lanes);
            let spans = assign(n_lanes, n_members);
            prop_assert_eq!(spans.len(), n_members as usize);
            prop_assert_eq!(spans.iter().map(ExactSizeIterator::len).sum::<usize>(), n_lanes as usize);
            let nodes: Vec<Span> =
                spans.iter().flat_map(|span| nodes_within(n_active, span)).collect();
            let mut known = |node: &Span| nodes.contains(node).then(|| written(node));
            let sum = fold(&(0..n_active), &mut known, &mut |a, b| format!("({a}+{b})"));
            prop_assert_eq!(sum, Some(written(&(0..n_active))));
            let lens: Vec<usize> = spans.iter().map(ExactSizeIterator::len).collect();
            prop_assert!(lens.iter().max() <= lens.iter().min().map(|least| least + 1).as_ref());
        }

        #[test]
        fn lanes_that_come_one_after_another_are_added_in_the_same_order(
            start in 0_u32..70,
            len in 1_u32..40,
        ) {
            let node = start..start + len;
            let mut sums: Vec<String> = Vec::new();
            for lane in node.clone() {
                let Slot { depth, is_first, n_complete } = slot(&node, lane);
                prop_assert_eq!(sums.len(), depth + usize::from(!is_first));
                match is_first {
                    true => sums.push(lane.to_string()),
                    false => sums[depth] = format!("({}+{lane})", sums[depth]),
                }
                for _ in 0..n_complete {
                    let right = sums.pop().expect("a complete sum");
                    let left = sums.last_mut().expect("the sum around it");
                    *left = format!("({left}+{right})");
                }
            }
            prop_assert_eq!(sums, [written(&node)]);
        }

        #[test]
        fn every_record_of_a_step_is_in_one_lane(
            n_lanes in 1_u32..20,
            minibatch in 1_u32..9,
            left_out in 0_usize..100,
        ) {
            let full = (n_lanes * minibatch) as usize;
            let n_records = full.saturating_sub(left_out).max(1);
            let shares = share_out(n_records, n_lanes, minibatch);
            prop_assert!(shares.len() <= n_lanes as usize);
            let all: Vec<usize> = shares.iter().cloned().flatten().collect();
            prop_assert_eq!(all, (0..n_records).collect::<Vec<_>>());
            let least = shares.iter().map(ExactSizeIterator::len).min();
            prop_assert!(least >= Some(2.min(minibatch as usize).min(n_records)));
        }
    }
}
