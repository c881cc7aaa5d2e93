// SPDX-License-Identifier: Apache-2.0
//! What the session must know of the training loop: how others reach it, what state it holds,
//! and how to end its waits.

use std::sync::{Mutex, MutexGuard, OnceLock};

use edl_core::id::WorldId;
use edl_core::member::Claim;
use edl_net::proto;

use super::mesh::{Abort, Opened};
use crate::servers;

/// Shared by the session and the training loop.
#[derive(Default)]
pub(crate) struct Seat {
    ends: OnceLock<Ends>,
    /// The state that the loop holds.
    claim: Mutex<Option<Claim>>,
    /// Ends waits on parameter servers.
    servers: Mutex<Option<servers::Abort>>,
}

struct Ends {
    address: String,
    unix_path: String,
    probe: u64,
    abort: Box<dyn Abort>,
    waiting_for: Box<dyn Fn() -> String + Send + Sync>,
}

impl Seat {
    /// Called once, when the mesh listens and the probe is computed; gives the mesh back.
    pub(super) fn take(&self, opened: Opened, probe: u64) -> Box<dyn super::mesh::Mesh> {
        let Opened { mesh, address, unix_path, abort, waiting_for } = opened;
        let ends = Ends { address, unix_path, probe, abort, waiting_for };
        assert!(self.ends.set(ends).is_ok(), "a worker opens one mesh");
        mesh
    }

    pub(super) fn holds(&self, claim: Option<Claim>) {
        *self.claim() = claim;
    }

    /// What peers and master are told; nothing under other strategies.
    pub(crate) fn peer(&self) -> Option<proto::Peer> {
        let ends = self.ends.get()?;
        let (world, step) = self.claim().map_or((0, 0), |claim| (claim.world.0, claim.step));
        Some(proto::Peer {
            address: ends.address.clone(),
            unix_path: ends.unix_path.clone(),
            probe: ends.probe,
            world,
            step,
        })
    }

    /// Ends every blocked call of worlds before `world`.
    pub(crate) fn abort(&self, world: WorldId) {
        if let Some(ends) = self.ends.get() {
            ends.abort.abort(world);
        }
        self.abort_servers();
    }

    /// Ends every blocked call.
    pub(crate) fn close(&self) {
        if let Some(ends) = self.ends.get() {
            ends.abort.close();
        }
        self.abort_servers();
    }

    /// Names what ends waits on servers from now on.
    pub(super) fn waits_on(&self, abort: servers::Abort) {
        *self.servers() = Some(abort);
    }

    /// Once, because the connections are of no use then.
    fn abort_servers(&self) {
        if let Some(abort) = self.servers().take() {
            abort();
        }
    }

    fn servers(&self) -> MutexGuard<'_, Option<servers::Abort>> {
        self.servers.lock().expect("the lock on the waits is poisoned")
    }

    /// The members that a blocked call waits for.
    pub(crate) fn waiting_for(&self) -> String {
        self.ends.get().map_or_else(String::new, |ends| (ends.waiting_for)())
    }

    fn claim(&self) -> MutexGuard<'_, Option<Claim>> {
        self.claim.lock().expect("the lock on the seat is poisoned")
    }
}
