// SPDX-License-Identifier: Apache-2.0
//! The other workers as the training loop sees them: the edge that tests replace.

pub(crate) mod real;

use edl_core::id::{Incarnation, RunId, WorkerId, WorldId};
use edl_core::spec::JobSpec;

use super::world::Member;

pub(crate) use real::open_mesh;

/// Links to the members of a world, used by one thread. Every call of a world ends at once when
/// that world is aborted.
pub(crate) trait Mesh: Send {
    /// Begins to make links that a coming world will need.
    fn prepare(&mut self, members: &[Member]);

    /// Enters a world as its member number `me`, and waits until all are linked.
    fn enter(&mut self, world: WorldId, me: usize, members: &[Member]) -> Result<(), Error>;

    /// How the members are linked, for people.
    fn transport(&self) -> String;

    /// Tells everybody a few bytes, and hears theirs in the order of the members.
    fn exchange(&mut self, number: u64, mine: &[u8]) -> Result<Vec<Vec<u8>>, Error>;

    /// Moves items between members, who all call it with the same list.
    fn transfer(
        &mut self,
        moves: &[Move],
        encode: &mut dyn FnMut(u32) -> Vec<u8>,
        accept: &mut dyn FnMut(u32, Vec<u8>) -> Result<(), String>,
    ) -> Result<(), Error>;

    /// Where my nodes of the tree over `n_active` lanes are summed up: one buffer of `len`
    /// numbers per node, with anything in it.
    fn buffers(&mut self, n_active: u32, len: usize) -> Vec<&mut [f32]>;

    /// Adds up all nodes in the tree's order and divides by `divisor`. Nodes of one lane, and the
    /// result, are rounded if the job says so; other nodes must consist of rounded lanes.
    fn all_reduce(
        &mut self,
        step: u64,
        n_active: u32,
        divisor: f32,
        out: &mut [f32],
    ) -> Result<(), Error>;
}

/// One item that one member sends to another; members by their place in the world.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Move {
    pub(crate) from: usize,
    pub(crate) to: usize,
    pub(crate) item: u32,
}

/// Why a call of a world ended early. In every case the world is left.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Error {
    /// Another world came, or the end.
    #[error("the world has ended")]
    Aborted,
    #[error("lost worker {peer}: {error}")]
    Lost { peer: WorkerId, error: String },
    #[error("{0}")]
    Other(String),
}

/// Ends blocked calls of a mesh from another thread.
pub(crate) trait Abort: Send + Sync {
    /// Ends every call of worlds before `world`, now and later.
    fn abort(&self, world: WorldId);

    /// Ends every call, for good.
    fn close(&self);
}

/// A mesh that listens, and what others must know of it.
pub(crate) struct Opened {
    pub(crate) mesh: Box<dyn Mesh>,
    pub(crate) address: String,
    pub(crate) unix_path: String,
    pub(crate) abort: Box<dyn Abort>,
    /// Names the members that a blocked call waits for; empty while none is.
    pub(crate) waiting_for: Box<dyn Fn() -> String + Send + Sync>,
}

/// Who opens a mesh.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Identity {
    pub(crate) run: RunId,
    pub(crate) worker: WorkerId,
    pub(crate) incarnation: Incarnation,
}

pub(crate) type OpenMesh = Box<dyn FnOnce(Identity, &JobSpec) -> Result<Opened, String> + Send>;
