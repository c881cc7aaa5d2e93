// SPDX-License-Identifier: Apache-2.0
//! The body of a request, read in pieces as the connection accepts them.

use std::fs::File;
use std::io::{self, Cursor, Read};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Instant;

use hyper::body::{Body, Bytes, Frame, SizeHint};

use super::Limits;

const PIECE: usize = 64 << 10;

pub(super) struct Upload {
    source: Box<dyn Read + Send>,
    n_left: u64,
    pace: Pace,
}

/// When an upload last made progress, shared by the connection and the caller.
#[derive(Clone, Debug)]
pub(super) struct Pace {
    limits: Limits,
    state: Arc<Mutex<State>>,
}

#[derive(Debug)]
struct State {
    last: Instant,
    is_sent: bool,
}

impl Pace {
    pub(super) fn new(limits: Limits) -> Self {
        let state = State { last: Instant::now(), is_sent: false };
        Self { limits, state: Arc::new(Mutex::new(state)) }
    }

    /// The current deadline of the upload, or of the answer to it.
    pub(super) fn deadline(&self) -> Instant {
        let State { last, is_sent } = *self.lock();
        last + if is_sent { self.limits.answer } else { self.limits.progress }
    }

    pub(super) fn is_sent(&self) -> bool {
        self.lock().is_sent
    }

    fn note(&self, is_sent: bool) {
        *self.lock() = State { last: Instant::now(), is_sent };
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Upload {
    pub(super) fn of_bytes(bytes: &[u8], pace: &Pace) -> Self {
        Self::new(Box::new(Cursor::new(bytes.to_vec())), bytes.len() as u64, pace)
    }

    pub(super) fn of_file(file: File, pace: &Pace) -> io::Result<Self> {
        let n_bytes = file.metadata()?.len();
        Ok(Self::new(Box::new(file), n_bytes, pace))
    }

    fn new(source: Box<dyn Read + Send>, n_left: u64, pace: &Pace) -> Self {
        pace.note(n_left == 0);
        Self { source, n_left, pace: pace.clone() }
    }

    pub(super) fn n_left(&self) -> u64 {
        self.n_left
    }

    fn read(&mut self) -> io::Result<Bytes> {
        let mut piece = vec![0; usize::try_from(self.n_left).map_or(PIECE, |n| n.min(PIECE))];
        let n_read = self.source.read(&mut piece)?;
        if n_read == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        piece.truncate(n_read);
        self.n_left -= n_read as u64;
        self.pace.note(self.n_left == 0);
        Ok(piece.into())
    }
}

impl Body for Upload {
    type Data = Bytes;
    type Error = io::Error;

    /// Blocks while it reads, because nothing else runs on this thread.
    fn poll_frame(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        let this = self.get_mut();
        if this.n_left == 0 {
            return Poll::Ready(None);
        }
        Poll::Ready(Some(this.read().map(Frame::data)))
    }

    fn is_end_stream(&self) -> bool {
        self.n_left == 0
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.n_left)
    }
}
