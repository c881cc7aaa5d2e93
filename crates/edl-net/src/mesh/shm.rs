// SPDX-License-Identifier: Apache-2.0
//! Memory that members of one host read from each other. The only unsafe code of this crate.
//!
//! A [`Region`] is a member's own: it alone writes it. Its peers map it read-only as a
//! [`Mapped`]. Seals keep both ends honest: the size never changes, so that no read can fault,
//! and only the owner can ever map it for writing.
//!
//! Why no torn number is ever used, though no lock guards the memory:
//! - A region begins with space for the sum of the owner's chunk; behind it lie the nodes.
//! - Nodes are written before `Ready` is sent and read after it came. They are written again
//!   only after `Summed` has come from every peer, which each sends when it has read them.
//! - The sum is written after `Ready` of this step has come from every peer, which each sends
//!   when it has copied the sum of the step before; it is read after `Summed` came.
//! - When a world is left in the middle, the first thing in the next one is that all members say
//!   `Enter`, which they do when they have stopped reading; no member writes before. A member that
//!   is left out may still read while others write: what it holds is void, and it learns that.
//! - Doorbells pass through a socket, whose locks order the memory on both sides.
//!
//! `make verify` tries these rules in every order of events (`verify/`, by loom).

#![expect(unsafe_code, reason = "shared memory has no safe form")]

mod numbers;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use memmap2::{MmapOptions, MmapRaw};
use rustix::fs::{MemfdFlags, SealFlags};

use self::numbers::Numbers;
use super::bf16;

/// Without these, a peer could shrink the memory while it is used, or write to it.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::FUTURE_WRITE);
const FLOAT: usize = size_of::<f32>();

/// Memory of this process that others may read.
#[derive(Debug)]
pub(super) struct Region {
    map: MmapRaw,
    n_floats: usize,
    fd: Arc<OwnedFd>,
}

impl Region {
    /// New memory of zeros.
    pub(super) fn new(n_floats: usize) -> io::Result<Self> {
        let n_bytes = n_floats * FLOAT;
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create("elasticdl-mesh", flags)?;
        rustix::fs::ftruncate(&fd, n_bytes as u64)?;
        let map = MmapOptions::new().len(n_bytes).map_raw(&fd)?;
        // After the one writable mapping there is.
        rustix::fs::fcntl_add_seals(&fd, SEALS | SealFlags::SEAL)?;
        Ok(Self { map, n_floats, fd: Arc::new(fd) })
    }

    /// What a peer needs to map it.
    pub(super) fn fd(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.fd)
    }

    pub(super) fn n_floats(&self) -> usize {
        self.n_floats
    }

    pub(super) fn floats_mut(&mut self) -> &mut [f32] {
        // SAFETY: the mapping is page-aligned and `n_floats` long, its size is sealed, every bit
        // pattern is a number, and `self` is borrowed exclusively. No other process can write: this is
        // the one writable mapping there is.
        unsafe { std::slice::from_raw_parts_mut(self.map.as_mut_ptr().cast(), self.n_floats) }
    }
}

/// Memory of another process. It may change at any time: only copies are returned.
#[derive(Debug)]
pub(super) struct Mapped {
    map: MmapRaw,
    n_floats: usize,
}

impl Mapped {
    /// Maps what a peer passed. Memory that could shrink is refused.
    pub(super) fn new(fd: BorrowedFd<'_>, n_floats: usize) -> io::Result<Self> {
        let seals = rustix::fs::fcntl_get_seals(fd)?;
        let size = u64::try_from(rustix::fs::fstat(fd)?.st_size).unwrap_or(0);
        let n_bytes = n_floats.checked_mul(FLOAT).filter(|n| *n > 0 && *n as u64 == size);
        let (true, Some(n_bytes)) = (seals.contains(SealFlags::SHRINK), n_bytes) else {
            return Err(io::Error::other("the peer's memory is not sealed or has the wrong size"));
        };
        let map = MmapOptions::new().len(n_bytes).map_raw_read_only(&fd.as_fd())?;
        Ok(Self { map, n_floats })
    }

    pub(super) fn n_floats(&self) -> usize {
        self.n_floats
    }

    /// Copies the numbers from `at` on. If the owner writes meanwhile, they are torn; the module's
    /// documentation explains why they are not used then.
    pub(super) fn load(&self, at: usize, out: &mut [f32]) {
        self.numbers().load(at, out);
    }

    /// Adds the numbers from `at` on, each rounded first if `is_half`.
    pub(super) fn add(&self, at: usize, out: &mut [f32], is_half: bool) {
        if is_half {
            self.numbers().add(at, out, bf16::round);
        } else {
            self.numbers().add(at, out, |number| number);
        }
    }

    fn numbers(&self) -> Numbers {
        // SAFETY: the mapping is page-aligned, `n_floats` long and sealed against shrinking; it
        // lives as long as `self`, and no reference to the numbers is kept.
        unsafe { Numbers::new(self.map.as_ptr().cast(), self.n_floats) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_reads_what_the_owner_wrote() {
        let mut region = Region::new(3000).unwrap();
        region.floats_mut()[2999] = 1.5;
        let mapped = Mapped::new(region.fd().as_fd(), 3000).unwrap();
        let mut out = [0.0; 2];
        mapped.load(2998, &mut out);
        mapped.add(2998, &mut out, true);
        assert_eq!(out.map(f32::to_bits), [0.0_f32, 3.0].map(f32::to_bits));
    }

    #[test]
    fn memory_that_could_shrink_is_refused() {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = rustix::fs::memfd_create("loose", flags).unwrap();
        rustix::fs::ftruncate(&fd, 4096).unwrap();
        assert!(Mapped::new(fd.as_fd(), 1024).is_err());
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK).unwrap();
        assert!(Mapped::new(fd.as_fd(), 1024).is_ok());
        for n_floats in [0, 1023, 1025, usize::MAX] {
            assert!(Mapped::new(fd.as_fd(), n_floats).is_err(), "{n_floats}");
        }
    }

    #[test]
    fn only_the_owner_can_write() {
        let region = Region::new(1024).unwrap();
        assert!(MmapOptions::new().len(4096).map_raw(&*region.fd()).is_err());
        assert!(rustix::io::write(&*region.fd(), &[1]).is_err());
        assert!(rustix::fs::ftruncate(&*region.fd(), 0).is_err());
    }
}
