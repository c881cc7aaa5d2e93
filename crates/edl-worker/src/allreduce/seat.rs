// SPDX-License-Identifier: Apache-2.0
//! What the session must know of the training loop: how others reach it, what state it holds,
//! and how to end its waits.

use std::sync::{Mutex, MutexGuard, OnceLock};

use edl_core::id::WorldId;
use edl_net::proto;

use super::mesh::{Abort, Opened};
use crate::servers;

/// Shared by the session and the training loop.
#[derive(Default)]
pub(crate) struct Seat {
    ends: OnceLock<Ends>,
    held: Mutex<Held>,
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

/// The state that the loop holds.
#[derive(Clone, Copy, Debug, Default)]
struct Held {
    /// The last world that it was in; 0 if there is no state.
    world: WorldId,
    step: u64,
}

impl Seat {
    /// Called once, when the mesh listens and the probe is computed; gives the mesh back.
    pub(super) fn take(&self, opened: Opened, probe: u64) -> Box<dyn super::mesh::Mesh> {
        let Opened { mesh, address, unix_path, abort, waiting_for } = opened;
        let ends = Ends { address, unix_path, probe, abort, waiting_for };
        assert!(self.ends.set(ends).is_ok(), "a worker opens one mesh");
        mesh
    }

    pub(super) fn holds(&self, world: WorldId, step: u64) {
        *self.held() = Held { world, step };
    }

    /// What peers and master are told; nothing under other strategies.
    pub(crate) fn peer(&self) -> Option<proto::Peer> {
        let ends = self.ends.get()?;
        let Held { world, step } = *self.held();
        Some(proto::Peer {
            address: ends.address.clone(),
            unix_path: ends.unix_path.clone(),
            probe: ends.probe,
            world: world.0,
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

    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().expect("the lock on the seat is poisoned")
    }
}
