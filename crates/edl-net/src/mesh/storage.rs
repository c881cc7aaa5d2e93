// SPDX-License-Identifier: Apache-2.0
//! Where a member's nodes lie: in memory that peers can read, if any of them does.

use super::plan::stride;
use super::reduce::{Mine, Shown};
use super::shm::Region;

/// The memory of one member, kept from sum to sum and grown when it is too small.
#[derive(Default)]
pub(super) struct Storage {
    memory: Memory,
    /// Counts the regions, so that peers know a new one.
    n_regions: u64,
}

enum Memory {
    Private(Vec<f32>),
    /// The sum of our chunk lies before the nodes. Its space never shrinks or moves: a peer may
    /// still copy the last sum from it while the nodes of the next step are written.
    Shared {
        region: Region,
        n_sum: usize,
    },
}

impl Default for Memory {
    fn default() -> Self {
        Self::Private(Vec::new())
    }
}

impl Storage {
    /// Allocates memory for `n_nodes` nodes of `len` numbers.
    pub(super) fn fit(&mut self, is_shared: bool, n_nodes: usize, len: usize) {
        let n_nodes_floats = n_nodes * stride(len);
        // The chunk of a member that is alone on its host may be nearly all of the vector.
        let n_sum_wanted = stride(len).max(1);
        match &mut self.memory {
            Memory::Shared { region, n_sum }
                if *n_sum >= n_sum_wanted && region.n_floats() - *n_sum >= n_nodes_floats => {}
            Memory::Private(floats) if !is_shared => {
                if floats.len() < n_nodes_floats {
                    floats.resize(n_nodes_floats, 0.0);
                }
            }
            Memory::Shared { .. } | Memory::Private(_) => {
                let region = Region::new(n_sum_wanted + n_nodes_floats)
                    .expect("the system has memory for the model");
                self.n_regions += 1;
                self.memory = Memory::Shared { region, n_sum: n_sum_wanted };
            }
        }
    }

    pub(super) fn nodes_mut(&mut self, n_nodes: usize, len: usize) -> Vec<&mut [f32]> {
        let floats = match &mut self.memory {
            Memory::Private(floats) => floats.as_mut_slice(),
            Memory::Shared { region, n_sum } => &mut region.floats_mut()[*n_sum..],
        };
        let nodes = floats.chunks_mut(stride(len).max(1));
        let mut nodes: Vec<&mut [f32]> =
            nodes.take(n_nodes).map(|node| node.split_at_mut(len).0).collect();
        // Of nodes without numbers there is no memory at all.
        nodes.resize_with(n_nodes, || &mut []);
        nodes
    }

    /// The memory as a sum needs it.
    ///
    /// # Panics
    /// If there is no memory for `n_nodes` nodes of `len` numbers.
    pub(super) fn mine(&mut self, n_nodes: usize, len: usize) -> Mine<'_> {
        let n_floats = n_nodes * stride(len);
        match &mut self.memory {
            Memory::Private(floats) => Mine { nodes: &floats[..n_floats], sum: None, region: None },
            Memory::Shared { region, n_sum } => {
                let shown = Shown {
                    number: self.n_regions,
                    n_floats: region.n_floats(),
                    n_sum: *n_sum,
                    fd: region.fd(),
                };
                let (sum, nodes) = region.floats_mut().split_at_mut(*n_sum);
                Mine { nodes: &nodes[..n_floats], sum: Some(sum), region: Some(shown) }
            }
        }
    }
}
