// SPDX-License-Identifier: Apache-2.0
//! Which member adds up which part: a pure function of the world and the vector's length.

use std::ops::Range;

use edl_core::lanes::{Span, children, nodes_within};

/// Numbers that are moved and added at once. A block of each node stays in the cache.
pub(super) const BLOCK: usize = 64 << 10;
/// Chunks begin on page boundaries, so that no two members touch the same page. These are even, as
/// are the ends of blocks, so that a number of 64 bits is in one of them.
const ALIGN: usize = 1024;

/// The shares of all members in one vector.
#[derive(Debug)]
pub(super) struct ReducePlan {
    pub(super) len: usize,
    /// The nodes of each member, in the tree's order.
    pub(super) nodes: Vec<Vec<Span>>,
    /// The part of the vector that each member adds up.
    pub(super) chunks: Vec<Range<usize>>,
    pub(super) steps: Vec<SumStep>,
}

/// One step of adding up all nodes. Sums lie on a stack of levels; `node` counts the nodes of
/// all members in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SumStep {
    Load {
        level: usize,
        node: usize,
    },
    Add {
        level: usize,
        node: usize,
    },
    /// Adds the level above to `level`.
    Join {
        level: usize,
    },
}

impl ReducePlan {
    pub(super) fn new(n_active: u32, spans: &[Span], len: usize) -> Self {
        let nodes: Vec<Vec<Span>> = spans.iter().map(|span| nodes_within(n_active, span)).collect();
        let flat: Vec<Span> = nodes.iter().flatten().cloned().collect();
        let mut steps = Vec::new();
        if n_active > 0 {
            write_steps(&(0..n_active), &flat, 0, &mut steps);
        }
        let n_members = spans.len().max(1);
        let border = |member: usize| {
            if member == n_members { len } else { len * member / n_members / ALIGN * ALIGN }
        };
        let chunks = (0..n_members).map(|member| border(member)..border(member + 1)).collect();
        Self { len, nodes, chunks, steps }
    }

    /// From one node of a member to its next.
    pub(super) fn stride(&self) -> usize {
        stride(self.len)
    }

    pub(super) fn n_blocks(&self, member: usize) -> usize {
        self.chunks[member].len().div_ceil(BLOCK)
    }

    /// Numbers of a member's longest block. The more members there are, the shorter are their chunks.
    pub(super) fn longest_block(&self, member: usize) -> usize {
        self.chunks[member].len().min(BLOCK)
    }

    /// The places in the vector of a block of a member's chunk.
    pub(super) fn block(&self, member: usize, block: usize) -> Range<usize> {
        let chunk = &self.chunks[member];
        let start = chunk.start + block * BLOCK;
        start..chunk.end.min(start + BLOCK)
    }
}

/// From one node of a member to its next, in vectors of `len` numbers.
pub(super) fn stride(len: usize) -> usize {
    len.next_multiple_of(ALIGN)
}

/// # Panics
/// If a lane is in no node: the spans of a world cover all lanes.
fn write_steps(node: &Span, flat: &[Span], level: usize, steps: &mut Vec<SumStep>) {
    if let Some(node) = flat.iter().position(|known| known == node) {
        steps.push(SumStep::Load { level, node });
        return;
    }
    let (left, right) = children(node).expect("every lane has a member");
    write_steps(&left, flat, level, steps);
    if let Some(node) = flat.iter().position(|known| *known == right) {
        steps.push(SumStep::Add { level, node });
    } else {
        write_steps(&right, flat, level + 1, steps);
        steps.push(SumStep::Join { level });
    }
}

#[cfg(test)]
mod tests {
    use edl_core::lanes::assign;

    use super::*;

    #[test]
    fn nodes_are_added_in_the_order_of_the_tree() {
        let plan = ReducePlan::new(5, &assign(5, 5), 10);
        let expected = [
            SumStep::Load { level: 0, node: 0 },
            SumStep::Add { level: 0, node: 1 },
            SumStep::Load { level: 1, node: 2 },
            SumStep::Add { level: 1, node: 3 },
            SumStep::Join { level: 0 },
            SumStep::Add { level: 0, node: 4 },
        ];
        assert_eq!(plan.steps, expected);
    }

    #[test]
    fn chunks_cover_the_vector_and_begin_on_pages() {
        for len in [0, 1, 1023, 1024, 5000, 1 << 20] {
            for n_members in 1..=16 {
                let plan = ReducePlan::new(16, &assign(16, n_members), len);
                let mut end = 0;
                for (member, chunk) in plan.chunks.iter().enumerate() {
                    assert_eq!((chunk.start, chunk.start % ALIGN), (end, 0));
                    end = chunk.end;
                    let blocks = (0..plan.n_blocks(member)).map(|block| plan.block(member, block));
                    assert_eq!(blocks.map(|block| block.len()).sum::<usize>(), chunk.len());
                }
                assert_eq!(end, len);
            }
        }
    }
}
