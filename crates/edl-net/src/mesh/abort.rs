// SPDX-License-Identifier: Apache-2.0
//! What other threads may do to a mesh: end its blocked calls, and see whether one is blocked.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use edl_core::id::WorldId;
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

    pub(super) fn clear(&self) {
        // It can only fail when the bell was silent.
        let _ = rustix::io::read(&self.0, &mut [0_u8; 8]);
    }
}

impl AsFd for Bell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Whether a call waits for other members, as other threads see it.
#[derive(Clone, Debug, Default)]
pub struct Blocked(Arc<AtomicBool>);

impl Blocked {
    #[must_use]
    pub fn get(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }

    pub(super) fn set(&self, is_blocked: bool) {
        self.0.store(is_blocked, Ordering::SeqCst);
    }
}
