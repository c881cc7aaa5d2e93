// SPDX-License-Identifier: Apache-2.0
//! What other threads may do to a mesh: end its blocked calls, and see for whom they wait.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use edl_core::id::{WorkerId, WorldId};
use rustix::event::{EventfdFlags, eventfd};

/// Ends the blocked calls of a mesh, from any thread.
#[derive(Clone, Debug)]
pub struct Abort(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    /// Worlds below this one are over.
    floor: AtomicU64,
    bell: Bell,
}

impl Abort {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self(Arc::new(Inner { floor: AtomicU64::new(0), bell: Bell::new()? })))
    }

    /// Every call for a world before `world`, blocked or to come, ends with `Error::Aborted`.
    pub fn abort(&self, world: WorldId) {
        self.0.floor.fetch_max(world.0, Ordering::SeqCst);
        self.0.bell.ring();
    }

    /// Every call ends with `Error::Aborted`.
    pub fn close(&self) {
        self.abort(WorldId(u64::MAX));
    }

    pub(super) fn is_over(&self, world: WorldId) -> bool {
        world.0 < self.0.floor.load(Ordering::SeqCst)
    }

    pub(super) fn bell(&self) -> &Bell {
        &self.0.bell
    }
}

/// Wakes one thread out of a poll. What is to be seen must be stored before it is rung, and
/// looked at after it is hushed: then nothing is missed.
#[derive(Debug)]
pub(super) struct Bell(OwnedFd);

impl Bell {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?))
    }

    pub(super) fn ring(&self) {
        // It can only fail when the count is full, and then the bell is ringing.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    pub(super) fn hush(&self) {
        // It can only fail when the bell was silent.
        let _ = rustix::io::read(&self.0, &mut [0_u8; 8]);
    }
}

impl AsFd for Bell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// The members that a blocked call waits for, as other threads see them.
#[derive(Clone, Debug, Default)]
pub struct WaitingFor(Arc<Mutex<Vec<WorkerId>>>);

impl WaitingFor {
    #[must_use]
    pub fn peers(&self) -> Vec<WorkerId> {
        self.0.lock().expect("the lock on the list is poisoned").clone()
    }

    pub(super) fn set(&self, peers: Vec<WorkerId>) {
        *self.0.lock().expect("the lock on the list is poisoned") = peers;
    }
}
