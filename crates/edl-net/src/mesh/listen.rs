// SPDX-License-Identifier: Apache-2.0
//! The listening side of a mesh: one thread that accepts, one short-lived one per handshake.

use std::io;
use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};

use super::abort::Bell;
use super::meet::Door;
use crate::wire::{self, Stream};

/// Handshakes at one time. More callers than a world has members are turned away.
const MAX_GREETED: usize = 64;
/// After an accept that failed for want of descriptors or memory.
const PAUSE: Duration = Duration::from_millis(20);

/// Both listeners and the thread that serves them.
pub(super) struct Listener {
    pub(super) address: String,
    pub(super) unix_path: PathBuf,
    stop: Arc<Bell>,
    thread: Option<JoinHandle<()>>,
}

impl Listener {
    pub(super) fn start(door: Arc<Door>, address: &str, unix_path: PathBuf) -> io::Result<Self> {
        let tcp = TcpListener::bind(address)?;
        tcp.set_nonblocking(true)?;
        let address = tcp.local_addr()?.to_string();
        let unix = bind_unix(&unix_path)?;
        unix.set_nonblocking(true)?;
        let stop = Arc::new(Bell::new()?);
        let seen = Arc::clone(&stop);
        let thread = std::thread::Builder::new()
            .name("mesh-listen".into())
            .spawn(move || serve(&door, &tcp, &unix, &seen))?;
        Ok(Self { address, unix_path, stop, thread: Some(thread) })
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.stop.ring();
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has said so itself.
            let _ = thread.join();
        }
        // Who removed it before did our work.
        let _ = std::fs::remove_file(&self.unix_path);
    }
}

fn bind_unix(path: &Path) -> io::Result<UnixListener> {
    match std::fs::remove_file(path) {
        // A worker of this number that died left it behind.
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    UnixListener::bind(path)
}

fn serve(door: &Arc<Door>, tcp: &TcpListener, unix: &UnixListener, stop: &Bell) {
    loop {
        let mut fds = [
            PollFd::new(stop, PollFlags::IN),
            PollFd::new(tcp, PollFlags::IN),
            PollFd::new(unix, PollFlags::IN),
        ];
        let polled = rustix::event::poll(&mut fds, None);
        if !fds[0].revents().is_empty() {
            return;
        }
        let accepted = [
            tcp.accept().and_then(|(stream, _)| Stream::tcp(stream).map_err(io::Error::other)),
            unix.accept().and_then(|(stream, _)| Stream::unix(stream).map_err(io::Error::other)),
        ];
        for stream in accepted {
            match stream {
                Ok(stream) => admit(door, stream),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection from another worker");
                    std::thread::sleep(PAUSE);
                }
            }
        }
        if polled.is_err() {
            std::thread::sleep(PAUSE);
        }
    }
}

/// Greets a caller in a thread of its own: one that says nothing must not keep others out.
fn admit(door: &Arc<Door>, stream: Stream) {
    let mut meeting = door.meeting();
    if meeting.is_closed || meeting.n_greeted >= MAX_GREETED {
        drop(meeting);
        stream.shutdown();
        return;
    }
    meeting.n_greeted += 1;
    drop(meeting);
    let greeter = Arc::clone(door);
    let greet = move || {
        match greeter.greet(stream) {
            Ok(link) => greeter.arrive(link),
            Err(wire::Error::Closed) => {}
            Err(error) => tracing::warn!(%error, "refused a connection from another worker"),
        }
        greeter.meeting().n_greeted -= 1;
    };
    // It ends by itself: a handshake has a time limit.
    if let Err(error) = std::thread::Builder::new().name("mesh-greet".into()).spawn(greet) {
        tracing::warn!(%error, "cannot complete the handshake with another worker");
        door.meeting().n_greeted -= 1;
    }
}
