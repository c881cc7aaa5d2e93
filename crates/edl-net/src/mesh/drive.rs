// SPDX-License-Identifier: Apache-2.0
//! The loop that runs one collective: it reads and writes all links at once and never blocks on
//! one of them, so members that send to each other cannot wait for each other.
//!
//! All members call the same collectives in the same order, and each takes a known number of
//! frames from each peer. A link whose peer is done with this one is not read until the next,
//! so nothing has to be kept for later.

use std::time::{Duration, Instant};

use edl_core::error::chain;
use edl_core::id::{WorkerId, WorldId};
use rustix::event::{PollFd, PollFlags, Timespec};

use super::abort::{Abort, Blocked};
use super::link::{Got, Link, PeerRegion, Target};
use super::shm::Mapped;
use super::{Error, Transport};
use crate::frame::{FrameKind, Header, array};
use crate::isolation;
use crate::wire;

/// How often a blocked call looks at the clock.
const TICK: Duration = Duration::from_millis(50);
/// A peer that is read for this many frames lets others have their turn.
const FRAMES_AT_ONCE: usize = 8;
/// A peer that waits itself is given this many times the silence.
const PATIENCE: u32 = 4;

/// One collective, as seen by the loop. Peers are numbered as members of the world.
pub(super) trait Op {
    /// Whether the next frame of `peer` is wanted now.
    fn wants(&self, peer: usize) -> bool;

    /// Memory of the op for the whole payload of a frame; without it the link has some. The
    /// header is not believed yet. Must give the same memory until the frame is taken.
    fn buffer(&mut self, _peer: usize, _header: &Header) -> Option<&mut [u8]> {
        None
    }

    /// Takes a genuine frame; `payload` is empty if it went to the op's own memory.
    fn take(&mut self, peer: usize, frame: Frame<'_>) -> Result<(), wire::Error>;

    /// Posts the next frame for `peer`, whose link is idle. Returns whether there was one.
    fn post(&mut self, peer: usize, link: &mut Link) -> bool;

    /// The payload of the frame that was begun for `peer`.
    fn tail(&self, _peer: usize) -> &[u8] {
        &[]
    }

    /// Does some of the op's own work. Returns whether there is more to do at once.
    fn work(&mut self) -> Result<bool, Error> {
        Ok(false)
    }

    /// Whether nothing is left to be taken, posted or done.
    fn is_done(&self) -> bool;

    /// Whether peers still have other work to finish first. The master knows whether they do it.
    fn is_early(&self) -> bool {
        false
    }
}

/// A genuine frame of this world.
pub(super) struct Frame<'a> {
    pub(super) header: &'a Header,
    pub(super) payload: &'a [u8],
    /// The peer's memory, where it shares some.
    pub(super) region: Option<&'a PeerRegion>,
}

/// What a collective runs on.
pub(super) struct Members<'a> {
    pub(super) world: WorldId,
    /// `None` for oneself.
    pub(super) links: &'a mut [Option<Link>],
    pub(super) abort: &'a Abort,
    pub(super) blocked: &'a Blocked,
    pub(super) silence: Duration,
}

impl Members<'_> {
    /// Runs `op` to its end. After an error, links can be used in the next world, except for that
    /// of a lost peer, which is closed.
    pub(super) fn drive(&mut self, op: &mut dyn Op) -> Result<(), Error> {
        let ended = self.run(op);
        if let Err(error) = &ended {
            for (peer, slot) in self.links.iter_mut().enumerate() {
                let Some(link) = slot else { continue };
                if matches!(error, Error::Lost { peer, .. } if *peer == link.worker) {
                    *slot = None;
                    continue;
                }
                // The op's memory is about to go.
                link.settle(op.tail(peer));
                link.discard_payload();
            }
        }
        self.blocked.set(false);
        ended
    }

    fn run(&mut self, op: &mut dyn Op) -> Result<(), Error> {
        let now = Instant::now();
        let mut watch = Watch { progress: now, reported: now };
        self.begin_watch(&mut watch);
        let n_members = self.links.len();
        // Each member begins with the one after it, so not all send to the first one first.
        let me = self.links.iter().position(Option::is_none).unwrap_or(0);
        loop {
            if self.abort.is_over(self.world) {
                return Err(Error::Aborted);
            }
            let mut is_busy = op.work()?;
            for peer in 0..n_members {
                is_busy |= self.send((me + peer) % n_members, op)?;
            }
            if op.is_done() && self.links.iter().flatten().all(Link::is_idle) {
                return Ok(());
            }
            let ready = self.poll(op, if is_busy { Duration::ZERO } else { self.tick() })?;
            if ready.is_empty() && !is_busy {
                self.check_silence(op, &mut watch)?;
            }
            for peer in ready {
                if self.receive(peer, op)? {
                    watch.progress = Instant::now();
                }
            }
        }
    }

    /// Sends to `peer` until it takes no more. Returns whether anything was posted.
    fn send(&mut self, peer: usize, op: &mut dyn Op) -> Result<bool, Error> {
        let Some(link) = &mut self.links[peer] else { return Ok(false) };
        let mut has_posted = false;
        loop {
            if !link.write(op.tail(peer)).map_err(|error| lost(link.worker, &error))? {
                return Ok(has_posted);
            }
            if !op.post(peer, link) {
                return Ok(has_posted);
            }
            has_posted = true;
        }
    }

    /// Waits until a peer that is wanted has sent, a peer takes more, or an abort comes. Returns
    /// the peers that can be read.
    fn poll(&self, op: &dyn Op, timeout: Duration) -> Result<Vec<usize>, Error> {
        let mut fds = vec![PollFd::new(self.abort.bell(), PollFlags::IN)];
        let mut peers = Vec::with_capacity(self.links.len());
        // An isolated process hears nothing, not even that a link is closed.
        let links = if isolation::remaining().is_some() { &[] } else { &*self.links };
        for (peer, link) in links.iter().enumerate() {
            let Some(link) = link else { continue };
            let mut events = PollFlags::empty();
            events.set(PollFlags::IN, op.wants(peer));
            events.set(PollFlags::OUT, !link.is_idle());
            // Without interest a closed link would be reported again and again.
            if !events.is_empty() {
                fds.push(PollFd::new(link, events));
                peers.push(peer);
            }
        }
        let timeout = Timespec::try_from(timeout).expect("a tick is short");
        match rustix::event::poll(&mut fds, Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => {
                return Err(Error::Io { action: "wait for members".into(), source: error.into() });
            }
        }
        if !fds[0].revents().is_empty() {
            self.abort.bell().clear();
        }
        let is_readable = |fd: &PollFd<'_>| !(fd.revents() - PollFlags::OUT).is_empty();
        let ready = fds[1..].iter().zip(peers).filter(|(fd, _)| is_readable(fd));
        Ok(ready.map(|(_, peer)| peer).collect())
    }

    /// Reads what `peer` has sent. Returns whether the op took a frame.
    fn receive(&mut self, peer: usize, op: &mut dyn Op) -> Result<bool, Error> {
        let link = self.links[peer].as_mut().expect("only links are polled");
        let worker = link.worker;
        let mut has_taken = false;
        let mut n_frames = 0;
        while n_frames < FRAMES_AT_ONCE && op.wants(peer) {
            let buffer = match link.incoming() {
                Some((header, Target::Caller)) => op.buffer(peer, header).expect("given before"),
                Some((_, Target::Scratch | Target::Discard)) | None => &mut [],
            };
            match link.read(buffer).map_err(|error| lost(worker, &error))? {
                // The rest has not come yet.
                Got::Nothing | Got::More => break,
                Got::Dropped => n_frames += 1,
                Got::Header => place(link, peer, op, self.world),
                Got::Frame(header) => {
                    n_frames += 1;
                    has_taken |= take(link, peer, op, &header, self.world)?;
                }
            }
        }
        Ok(has_taken)
    }

    /// The silence of peers counts from now on.
    fn begin_watch(&mut self, watch: &mut Watch) {
        watch.progress = Instant::now();
        for link in self.links.iter_mut().flatten() {
            (link.heard, link.taken) = (watch.progress, watch.progress);
        }
    }

    fn tick(&self) -> Duration {
        TICK.min(self.silence / 4)
    }

    /// After a tick without progress: publishes that it is blocked, shows peers that
    /// this one is alive, and gives up a peer that was silent for too long.
    fn check_silence(&mut self, op: &dyn Op, watch: &mut Watch) -> Result<(), Error> {
        if op.is_early() {
            self.begin_watch(watch);
        }
        let owing: Vec<(Instant, WorkerId)> = (self.links.iter().enumerate())
            .filter_map(|(peer, link)| Some((peer, link.as_ref()?)))
            .filter_map(|(peer, link)| {
                let heard = op.wants(peer).then_some(link.heard);
                let taken = (!link.is_idle()).then_some(link.taken);
                Some((heard.into_iter().chain(taken).min()?, link.worker))
            })
            .collect();
        self.blocked.set(!owing.is_empty());
        let Some((since, worker)) = owing.into_iter().min() else { return Ok(()) };
        let is_silent = since.elapsed() > self.silence;
        if is_silent || watch.progress.elapsed() > self.silence * PATIENCE {
            let error = if is_silent { "was silent for" } else { "made no progress for over" };
            return Err(Error::Lost { peer: worker, error: format!("{error} {:?}", self.silence) });
        }
        if watch.reported.elapsed() > self.silence / 4 {
            watch.reported = Instant::now();
            for link in self.links.iter_mut().flatten().filter(|link| link.is_idle()) {
                link.post(FrameKind::Waiting, self.world, 0, &[]);
            }
        }
        Ok(())
    }
}

struct Watch {
    /// When the op last took a frame.
    progress: Instant,
    /// When `Waiting` was last sent to peers.
    reported: Instant,
}

/// Decides where the payload of the frame goes whose header has just come.
fn place(link: &mut Link, peer: usize, op: &mut dyn Op, world: WorldId) {
    let Some((header, _)) = link.incoming() else { return };
    let length = header.length;
    let target = if header.kind == FrameKind::Region {
        // Memory outlives worlds, and it is shown only once.
        Target::Scratch
    } else if header.generation.0 < world.0 {
        Target::Discard
    } else if header.generation.0 > world.0 {
        Target::Scratch
    } else {
        let has_buffer =
            op.buffer(peer, header).is_some_and(|buffer| buffer.len() as u64 == length);
        if has_buffer { Target::Caller } else { Target::Scratch }
    };
    link.place(target);
}

/// Takes a genuine frame. Returns whether it was one for the op.
fn take(
    link: &mut Link,
    peer: usize,
    op: &mut dyn Op,
    header: &Header,
    world: WorldId,
) -> Result<bool, Error> {
    let theirs = WorldId(header.generation.0);
    let worker = link.worker;
    let fail = |error: wire::Error| lost(worker, &error);
    if header.kind == FrameKind::Enter {
        link.entered = link.entered.max(Some(theirs));
    }
    if header.kind == FrameKind::Region && theirs <= world {
        link.region = Some(map_region(link, header).map_err(fail)?);
        return Ok(false);
    }
    if theirs > world {
        // No member gets past the entry of a world that this one has not entered.
        return Err(if header.kind == FrameKind::Enter {
            Error::Aborted
        } else {
            fail(unexpected(header))
        });
    }
    if header.kind == FrameKind::Waiting {
        return Ok(false);
    }
    let payload =
        if op.buffer(peer, header).is_some_and(|buffer| buffer.len() as u64 == header.length) {
            &[]
        } else {
            link.payload(header)
        };
    op.take(peer, Frame { header, payload, region: link.region.as_ref() }).map_err(fail)?;
    Ok(true)
}

/// Maps the memory that came with a frame.
fn map_region(link: &mut Link, header: &Header) -> Result<PeerRegion, wire::Error> {
    let size = |bytes: &[u8; 24], at| usize::try_from(u64::from_le_bytes(array(bytes, at))).ok();
    let bytes: [u8; 24] = link.payload(header).try_into().map_err(|_| unexpected(header))?;
    let fd = link.take_fd().filter(|_| link.transport == Transport::SharedMemory);
    let (Some(fd), Some(n_floats), Some(n_sum)) = (fd, size(&bytes, 8), size(&bytes, 16)) else {
        return Err(unexpected(header));
    };
    let map = Mapped::new(rustix::fd::AsFd::as_fd(&fd), n_floats)
        .map_err(|source| wire::Error::Io { action: "map a peer's memory".into(), source })?;
    let number = u64::from_le_bytes(array(&bytes, 0));
    Ok(PeerRegion { map: std::sync::Arc::new(map), number, n_sum })
}

/// The error for a frame that was not expected.
pub(super) fn unexpected(header: &Header) -> wire::Error {
    wire::Error::Refused(format!(
        "unexpected frame: {:?} of {} bytes in world {}",
        header.kind,
        header.length,
        WorldId(header.generation.0)
    ))
}

/// A peer is lost because its link failed.
pub(super) fn lost(peer: WorkerId, error: &dyn std::error::Error) -> Error {
    Error::Lost { peer, error: chain(error) }
}
