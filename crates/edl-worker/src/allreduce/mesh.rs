// SPDX-License-Identifier: Apache-2.0
//! The other workers as the training loop sees them: the edge that tests replace.

pub(crate) mod real;

use edl_core::id::{Incarnation, RunId, WorkerId, WorldId};
use edl_core::member::{Failure, Move};
use edl_core::model::ModelSpec;
use edl_core::spec::JobSpec;
use edl_net::mesh::Peer;

use crate::progress::IsBlocked;

pub(crate) use real::open_mesh;

/// Links to the members of a world, used by one thread. Every call of a world ends at once when
/// that world is aborted. After any failure the world must be left.
pub(crate) trait Mesh: Send {
    /// Begins to make links that a coming world will need.
    fn prepare(&mut self, members: &[Peer]);

    /// Enters a world as its member number `me`, and waits until all are linked.
    fn enter(&mut self, world: WorldId, me: usize, members: &[Peer]) -> Result<(), Failure>;

    /// How the members are linked, for people.
    fn transport(&self) -> String;

    /// Sends a few bytes to all members, and returns theirs in the order of the members.
    fn exchange(&mut self, number: u64, mine: &[u8]) -> Result<Vec<Vec<u8>>, Failure>;

    /// Moves items between members, who all call it with the same list.
    fn transfer(
        &mut self,
        moves: &[Move],
        encode: &mut dyn FnMut(u32) -> Vec<u8>,
        accept: &mut dyn FnMut(u32, Vec<u8>) -> Result<(), String>,
    ) -> Result<(), Failure>;

    /// Where my nodes of the tree over `n_active` lanes are summed up: one buffer of `len`
    /// numbers per node. They hold anything at first, and keep what is written until the sum.
    fn buffers(&mut self, n_active: u32, len: usize) -> Vec<&mut [f32]>;

    /// Adds up all nodes in the tree's order and divides by `divisor`. Nodes of one lane, and the
    /// result, are rounded if the job says so; other nodes must consist of rounded lanes. The first
    /// places hold numbers of 64 bits if the model says so.
    fn all_reduce(
        &mut self,
        step: u64,
        n_active: u32,
        divisor: f32,
        out: &mut [f32],
    ) -> Result<(), Failure>;
}

/// Ends every call of worlds before this one, now and later, from any thread.
pub(crate) type AbortMesh = Box<dyn Fn(WorldId) + Send + Sync>;

/// A mesh that listens, and how other workers reach it.
pub(crate) struct Opened {
    pub(crate) mesh: Box<dyn Mesh>,
    pub(crate) address: String,
    pub(crate) unix_path: String,
    pub(crate) abort: AbortMesh,
    pub(crate) is_blocked: IsBlocked,
}

/// The worker that opens a mesh.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Identity {
    pub(crate) run: RunId,
    pub(crate) worker: WorkerId,
    pub(crate) incarnation: Incarnation,
}

pub(crate) type OpenMesh =
    Box<dyn FnOnce(Identity, &JobSpec, &ModelSpec) -> Result<Opened, String> + Send>;
