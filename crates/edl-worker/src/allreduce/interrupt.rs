// SPDX-License-Identifier: Apache-2.0
//! How the waits of the training loop are ended from other threads.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock};

use edl_core::id::WorldId;

use super::mesh::AbortMesh;
use crate::servers;

#[derive(Default)]
pub(crate) struct Interrupt {
    mesh: OnceLock<AbortMesh>,
    servers: Mutex<Option<servers::Abort>>,
    /// Set until the next activity starts.
    is_cancelled: AtomicBool,
}

impl Interrupt {
    pub(super) fn set_mesh(&self, abort: AbortMesh) {
        assert!(self.mesh.set(abort).is_ok(), "a worker opens one mesh");
    }

    /// Waits on parameter servers are ended by this from now on.
    pub(super) fn set_servers(&self, abort: servers::Abort) {
        *self.servers() = Some(abort);
    }

    /// Ends every blocked call of worlds before `world`; without one, of all worlds.
    pub(crate) fn cancel(&self, world: Option<WorldId>) {
        self.is_cancelled.store(true, Ordering::SeqCst);
        if let Some(abort) = self.mesh.get() {
            abort(world.unwrap_or(WorldId(u64::MAX)));
        }
        // Connections are of no use after that, so it is called once.
        if let Some(abort) = self.servers().take() {
            abort();
        }
    }

    pub(super) fn reset(&self) {
        self.is_cancelled.store(false, Ordering::SeqCst);
    }

    pub(super) fn is_cancelled(&self) -> bool {
        self.is_cancelled.load(Ordering::SeqCst)
    }

    fn servers(&self) -> MutexGuard<'_, Option<servers::Abort>> {
        self.servers.lock().expect("the lock on the connections is poisoned")
    }
}
