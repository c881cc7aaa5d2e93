// SPDX-License-Identifier: Apache-2.0
//! Isolates this process from all others of its job for a while, on purpose.
//!
//! Nothing that the process reads or writes over the job's connections passes: it is held back, as
//! if a cable were unplugged, and continues when the time is over. Connections stay open, and files
//! can still be used. If another process closes a connection meanwhile, it does notice; and a read
//! that was already waiting may still get what comes within its tick.
//!
//! Only the supervisor of the process turns it on, for a job that allows chaos. Until then, every
//! read and write checks one number.

use std::io;
use std::pin::Pin;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use edl_core::time::millis;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Sleep;

/// When it is over, in milliseconds since [`origin`]; zero while the process is not isolated.
static UNTIL: AtomicU64 = AtomicU64::new(0);

fn origin() -> Instant {
    static ORIGIN: OnceLock<Instant> = OnceLock::new();
    *ORIGIN.get_or_init(Instant::now)
}

fn now() -> u64 {
    millis(origin().elapsed())
}

/// Isolates this process from now on, for `time`.
pub fn isolate(time: Duration) {
    UNTIL.store(now().saturating_add(millis(time)).max(1), Ordering::SeqCst);
}

/// How long it is still isolated; `None` while it is not.
#[inline]
pub(crate) fn remaining() -> Option<Duration> {
    match UNTIL.load(Ordering::Relaxed) {
        0 => None,
        until => remaining_until(until),
    }
}

#[cold]
fn remaining_until(until: u64) -> Option<Duration> {
    let left = until.saturating_sub(now());
    if left == 0 {
        // It may have been isolated again; then the next call sees that.
        let _ = UNTIL.compare_exchange(until, 0, Ordering::SeqCst, Ordering::SeqCst);
        return None;
    }
    Some(Duration::from_millis(left))
}

/// For a blocking call: waits as such a call would, at most `tick`, if this process is isolated.
pub(crate) fn hold(tick: Duration) -> io::Result<()> {
    let Some(left) = remaining() else { return Ok(()) };
    std::thread::sleep(left.min(tick));
    Err(io::ErrorKind::WouldBlock.into())
}

/// A connection through which nothing passes while this process is isolated.
#[derive(Debug)]
pub(crate) struct Gate<S> {
    inner: S,
    // Reader and writer are woken apart, so each has its own.
    reads: Option<Pin<Box<Sleep>>>,
    writes: Option<Pin<Box<Sleep>>>,
}

impl<S> Gate<S> {
    pub(crate) fn new(inner: S) -> Self {
        Self { inner, reads: None, writes: None }
    }
}

/// Ready when this process is not isolated, or not any longer.
fn poll_open(sleep: &mut Option<Pin<Box<Sleep>>>, context: &mut Context<'_>) -> Poll<()> {
    while let Some(left) = remaining() {
        let nap = sleep.get_or_insert_with(|| Box::pin(tokio::time::sleep(left)));
        ready!(nap.as_mut().poll(context));
        *sleep = None;
    }
    *sleep = None;
    Poll::Ready(())
}

impl<S: AsyncRead + Unpin> AsyncRead for Gate<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        ready!(poll_open(&mut this.reads, context));
        Pin::new(&mut this.inner).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Gate<S> {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        ready!(poll_open(&mut this.writes, context));
        Pin::new(&mut this.inner).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        ready!(poll_open(&mut this.writes, context));
        Pin::new(&mut this.inner).poll_write_vectored(context, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_shutdown(context)
    }
}
