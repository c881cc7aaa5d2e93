// SPDX-License-Identifier: Apache-2.0
//! One connection between two members, kept across worlds: frames in and out, never blocking.
//!
//! A frame that was begun is always finished, even if its world is over by then: its sender keeps
//! the bytes that are left, and its receiver discards them. So a link is never closed because a
//! world ended in the middle of a frame.
//!
//! What a link holds is bounded: one block in either direction and a few small frames. A frame that
//! is encrypted is held as a whole, and its payload is one chunk.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use edl_core::id::{BatchId, Generation, Incarnation, RunId, WorkerId, WorldId};
use rustix::io::{Errno, IoSliceMut};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};

use super::Transport;
use super::shm::Mapped;
use crate::cipher::{Buffer, n_tag};
use crate::frame::{self, FrameKind, HEADER_LEN, Header, MAX_BLOCK, TAG_LEN};
use crate::isolation;
use crate::seal::Guard;
use crate::wire::{Error, Stream};

/// A peer's memory, and how it is divided.
#[derive(Clone, Debug)]
pub(super) struct PeerRegion {
    pub(super) map: Arc<Mapped>,
    pub(super) number: u64,
    /// Its nodes begin here; before them is space for the sum of its chunk.
    pub(super) n_sum: usize,
}

pub(super) struct Link {
    pub(super) worker: WorkerId,
    pub(super) incarnation: Incarnation,
    /// Of two links with one peer the one with the higher number counts.
    pub(super) attempt: u64,
    pub(super) transport: Transport,
    /// The latest world that the peer has entered.
    pub(super) entered: Option<WorldId>,
    /// The latest world for which `Enter` was sent to the peer.
    pub(super) enter_sent: Option<WorldId>,
    /// The number of our memory that the peer knows.
    pub(super) shown_region: u64,
    pub(super) region: Option<PeerRegion>,
    /// When bytes last came.
    pub(super) heard: Instant,
    /// When the peer last took bytes.
    pub(super) taken: Instant,
    stream: Arc<Stream>,
    run: RunId,
    outbox: Outbox,
    inbox: Inbox,
}

struct Outbox {
    guard: Guard,
    next: u64,
    /// What goes out first.
    bytes: Buffer,
    n_sent: usize,
    /// A descriptor that goes out with the byte at this place.
    fd: Option<(usize, Arc<OwnedFd>)>,
    /// The payload that goes out then, which lies elsewhere: its length and what is sent of it.
    tail: usize,
    n_tail_sent: usize,
}

struct Inbox {
    guard: Guard,
    next: u64,
    head: [u8; HEADER_LEN],
    n_head: usize,
    incoming: Option<IncomingFrame>,
    scratch: Vec<u8>,
    fd: Option<OwnedFd>,
}

/// A frame whose payload is being read.
struct IncomingFrame {
    header: Header,
    /// Of the payload and the tag behind it.
    n_read: usize,
    /// What follows a payload that is encrypted.
    tag: [u8; TAG_LEN],
    target: Target,
}

/// Where a payload is read to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Target {
    /// The link's own memory.
    Scratch,
    /// Memory of the caller's.
    Caller,
    /// The frame is of a world that is over.
    Discard,
}

/// What one read came to.
pub(super) enum Got {
    /// The peer has sent no more.
    Nothing,
    /// More of a frame, but not its end.
    More,
    /// The header of a frame; `place` must decide where its payload goes.
    Header,
    /// A genuine frame, whole. Its payload is `link.payload()` if it went to the scratch.
    Frame(Header),
    /// A frame that is discarded has ended.
    Dropped,
}

/// What a link is made from.
pub(super) struct Ends {
    pub(super) stream: Arc<Stream>,
    pub(super) run: RunId,
    pub(super) out: (Guard, u64),
    pub(super) into: (Guard, u64),
}

impl Link {
    pub(super) fn new(
        (worker, incarnation): (WorkerId, Incarnation),
        attempt: u64,
        transport: Transport,
        ends: Ends,
    ) -> Self {
        let Ends { stream, run, out, into } = ends;
        Self {
            worker,
            incarnation,
            attempt,
            transport,
            entered: None,
            enter_sent: None,
            shown_region: 0,
            region: None,
            heard: Instant::now(),
            taken: Instant::now(),
            stream,
            run,
            outbox: Outbox {
                guard: out.0,
                next: out.1,
                bytes: Buffer::default(),
                n_sent: 0,
                fd: None,
                tail: 0,
                n_tail_sent: 0,
            },
            inbox: Inbox {
                guard: into.0,
                next: into.1,
                head: [0; HEADER_LEN],
                n_head: 0,
                incoming: None,
                scratch: Vec::new(),
                fd: None,
            },
        }
    }

    /// Whether everything that was posted is gone.
    pub(super) fn is_idle(&self) -> bool {
        self.outbox.n_sent == self.outbox.bytes.len() && !self.has_tail()
    }

    pub(super) fn is_encrypted(&self) -> bool {
        matches!(self.outbox.guard, Guard::Encrypted(_))
    }

    pub(super) fn has_tail(&self) -> bool {
        self.outbox.n_tail_sent < self.outbox.tail
    }

    /// Posts a frame whose payload is copied.
    pub(super) fn post(&mut self, kind: FrameKind, world: WorldId, number: u64, payload: &[u8]) {
        self.begin(kind, world, number, payload);
        self.settle(payload);
    }

    /// Posts a frame with a descriptor.
    pub(super) fn post_fd(
        &mut self,
        kind: FrameKind,
        world: WorldId,
        payload: &[u8],
        fd: Arc<OwnedFd>,
    ) {
        let at = self.outbox.bytes.len();
        self.post(kind, world, 0, payload);
        self.outbox.fd = Some((at, fd));
    }

    /// Posts a frame whose payload stays where it is: every `write` needs it until it is gone.
    pub(super) fn begin(&mut self, kind: FrameKind, world: WorldId, number: u64, payload: &[u8]) {
        assert!(!self.has_tail(), "the frame before is whole");
        let out = &mut self.outbox;
        let mut header = Header {
            kind,
            run: self.run,
            generation: Generation(world.0),
            sequence: out.next,
            batch: number_to_batch(number),
            length: payload.len() as u64,
            tag: [0; TAG_LEN],
        };
        out.next += 1;
        match &mut out.guard {
            Guard::Tagged(seal) => {
                let mut hasher = seal.begin();
                hasher.update(&header.encode());
                hasher.update(payload);
                header.tag = hasher.tag();
                out.bytes.extend(&header.encode());
                (out.tail, out.n_tail_sent) = (payload.len(), 0);
            }
            Guard::Encrypted(cipher) => {
                cipher.seal_header(&header.encode(), &mut out.bytes);
                if !payload.is_empty() {
                    cipher.seal(&[payload], &mut out.bytes);
                }
            }
        }
    }

    /// Sends as much as the peer takes. `tail` is the payload of the frame that was begun.
    /// Returns whether everything is gone.
    pub(super) fn write(&mut self, tail: &[u8]) -> Result<bool, Error> {
        if isolation::remaining().is_some() {
            return Ok(self.is_idle());
        }
        while !self.is_idle() {
            let Some(n) = self.send(tail)? else { return Ok(false) };
            self.taken = Instant::now();
            let out = &mut self.outbox;
            let n_bytes = n.min(out.bytes.len() - out.n_sent);
            let is_full = n < out.bytes.len() - out.n_sent + out.tail - out.n_tail_sent;
            out.n_sent += n_bytes;
            out.n_tail_sent += n - n_bytes;
            if out.fd.as_ref().is_some_and(|(at, _)| *at < out.n_sent) {
                out.fd = None;
            }
            if out.n_sent == out.bytes.len() {
                out.bytes.clear();
                out.n_sent = 0;
            }
            // A peer that took only some of it will not take more at once, and a descriptor
            // is not yet in the way of that.
            if is_full && out.fd.is_none() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn send(&self, tail: &[u8]) -> Result<Option<usize>, Error> {
        let out = &self.outbox;
        let tail = if self.has_tail() { &tail[out.n_tail_sent..out.tail] } else { &[] };
        let bytes = &out.bytes[out.n_sent..];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut beside = SendAncillaryBuffer::new(&mut space);
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let sent = match &out.fd {
            Some((at, _)) if *at > out.n_sent => {
                let before = IoSlice::new(&bytes[..at - out.n_sent]);
                rustix::net::sendmsg(&*self.stream, &[before], &mut beside, flags)
            }
            Some((_, fd)) => {
                let fds = [fd.as_fd()];
                let has_space = beside.push(SendAncillaryMessage::ScmRights(&fds));
                assert!(has_space, "space for one descriptor");
                rustix::net::sendmsg(&*self.stream, &[IoSlice::new(bytes)], &mut beside, flags)
            }
            None => {
                let parts = [IoSlice::new(bytes), IoSlice::new(tail)];
                rustix::net::sendmsg(&*self.stream, &parts, &mut beside, flags)
            }
        };
        moved(sent, "send a frame")
    }

    /// Keeps what is left of the payload of the frame that was begun: the caller's memory is
    /// about to change.
    pub(super) fn settle(&mut self, tail: &[u8]) {
        if self.has_tail() {
            let out = &mut self.outbox;
            out.bytes.extend(&tail[out.n_tail_sent..out.tail]);
        }
        (self.outbox.tail, self.outbox.n_tail_sent) = (0, 0);
    }

    /// The header of the frame whose payload is being read, and where it goes.
    pub(super) fn incoming(&self) -> Option<(&Header, Target)> {
        self.inbox.incoming.as_ref().map(|frame| (&frame.header, frame.target))
    }

    /// Decides where the payload of the frame goes whose header has just come.
    pub(super) fn place(&mut self, target: Target) {
        let inbox = &mut self.inbox;
        let frame = inbox.incoming.as_mut().expect("a header has come");
        frame.target = target;
        // The header has been checked against the longest payload of its kind.
        let length = usize::try_from(frame.header.length).expect("at most a block");
        if target != Target::Caller && inbox.scratch.len() < length {
            inbox.scratch.resize(length, 0);
        }
    }

    /// Discards the frame whose payload goes to the caller's memory.
    pub(super) fn discard_payload(&mut self) {
        if self.inbox.incoming.as_ref().is_some_and(|frame| frame.target == Target::Caller) {
            self.place(Target::Discard);
        }
    }

    /// The payload that went to the scratch.
    pub(super) fn payload(&self, header: &Header) -> &[u8] {
        let length = usize::try_from(header.length).expect("at most a block");
        &self.inbox.scratch[..length]
    }

    /// The descriptor that came last.
    pub(super) fn take_fd(&mut self) -> Option<OwnedFd> {
        self.inbox.fd.take()
    }

    /// Reads a header or more of a payload, once. `buffer` is the caller's memory for the whole
    /// payload, if it goes there.
    pub(super) fn read(&mut self, buffer: &mut [u8]) -> Result<Got, Error> {
        if self.inbox.incoming.is_none() {
            return self.read_header();
        }
        let inbox = &mut self.inbox;
        let frame = inbox.incoming.as_mut().expect("looked at above");
        let length = usize::try_from(frame.header.length).expect("at most a block");
        let payload = match frame.target {
            Target::Caller => buffer,
            Target::Scratch | Target::Discard => &mut inbox.scratch[..length],
        };
        let n_all = match inbox.guard {
            Guard::Tagged(_) => length,
            Guard::Encrypted(_) => length + n_tag(length),
        };
        if frame.n_read < n_all {
            let n_payload = frame.n_read.min(length);
            let tag = &mut frame.tag[frame.n_read - n_payload..n_all - length];
            let read = receive(&self.stream, [&mut payload[n_payload..], tag], None);
            match moved(read, "read a frame")? {
                None => return Ok(Got::Nothing),
                Some(n) => frame.n_read += n,
            }
            self.heard = Instant::now();
            if frame.n_read < n_all {
                return Ok(Got::More);
            }
        }
        let IncomingFrame { header, target, tag, .. } =
            inbox.incoming.take().expect("looked at above");
        let is_genuine = match &mut inbox.guard {
            // It is not used, so it need not be checked.
            Guard::Tagged(_) if target == Target::Discard => return Ok(Got::Dropped),
            Guard::Encrypted(cipher) if target == Target::Discard => {
                if length > 0 {
                    cipher.skip();
                }
                return Ok(Got::Dropped);
            }
            Guard::Tagged(seal) => {
                let mut hasher = seal.begin();
                hasher.update(&Header { tag: [0; TAG_LEN], ..header }.encode());
                hasher.update(payload);
                hasher.matches(header.tag)
            }
            Guard::Encrypted(cipher) => length == 0 || cipher.open(payload, &tag),
        };
        if !is_genuine {
            return Err(Error::Forged { sequence: header.sequence });
        }
        Ok(Got::Frame(header))
    }

    fn read_header(&mut self) -> Result<Got, Error> {
        let inbox = &mut self.inbox;
        let left = &mut inbox.head[inbox.n_head..];
        let is_shared = self.transport == Transport::SharedMemory;
        let read = receive(&self.stream, [left, &mut []], is_shared.then_some(&mut inbox.fd));
        match moved(read, "read a frame")? {
            None => return Ok(Got::Nothing),
            Some(n) => inbox.n_head += n,
        }
        self.heard = Instant::now();
        if inbox.n_head < HEADER_LEN {
            return Ok(Got::More);
        }
        inbox.n_head = 0;
        if let Guard::Encrypted(cipher) = &mut inbox.guard
            && !cipher.open_header(&mut inbox.head)
        {
            return Err(Error::Forged { sequence: inbox.next });
        }
        let header = Header::decode(&inbox.head)?;
        if header.run != self.run || header.sequence != inbox.next {
            return Err(Error::Forged { sequence: header.sequence });
        }
        let Header { kind, length, .. } = header;
        if length > MAX_BLOCK {
            // A frame of the servers, which may be longer.
            return Err(frame::Error::Length { kind, length, limit: MAX_BLOCK }.into());
        }
        inbox.next += 1;
        let tag = [0; TAG_LEN];
        inbox.incoming = Some(IncomingFrame { header, n_read: 0, tag, target: Target::Discard });
        Ok(Got::Header)
    }
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

impl Drop for Link {
    /// The peer sees the end at once, even if another thread holds the socket.
    fn drop(&mut self) {
        self.stream.shutdown();
    }
}

/// Reads bytes into `parts`, one after the other. Keeps a descriptor that comes with them, if one is
/// wanted; of several only the last.
fn receive(
    stream: &Stream,
    parts: [&mut [u8]; 2],
    fd: Option<&mut Option<OwnedFd>>,
) -> rustix::io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut beside = match fd {
        Some(_) => RecvAncillaryBuffer::new(&mut space),
        None => RecvAncillaryBuffer::default(),
    };
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let read = rustix::net::recvmsg(stream, &mut parts.map(IoSliceMut::new), &mut beside, flags)?;
    let mut last = None;
    for message in beside.drain() {
        if let RecvAncillaryMessage::ScmRights(fds) = message {
            last = fds.last();
        }
    }
    if let (Some(fd), Some(last)) = (fd, last) {
        *fd = Some(last);
    }
    Ok(read.bytes)
}

/// How many bytes moved; `None` if the peer is not ready.
fn moved(result: rustix::io::Result<usize>, action: &str) -> Result<Option<usize>, Error> {
    match result {
        Ok(0) => Err(Error::Closed),
        Ok(n) => Ok(Some(n)),
        Err(Errno::AGAIN | Errno::INTR) => Ok(None),
        Err(Errno::CONNRESET | Errno::PIPE | Errno::CONNABORTED) => Err(Error::Closed),
        Err(error) => Err(Error::Io { action: action.into(), source: error.into() }),
    }
}

fn number_to_batch(number: u64) -> BatchId {
    let [a, b, c, d, e, f, g, h] = number.to_be_bytes();
    BatchId { epoch: u32::from_be_bytes([a, b, c, d]), index: u32::from_be_bytes([e, f, g, h]) }
}

/// The number of the step or exchange that a frame is of.
pub(super) fn number(header: &Header) -> u64 {
    u64::from(header.batch.epoch) << 32 | u64::from(header.batch.index)
}

#[cfg(test)]
mod tests;
