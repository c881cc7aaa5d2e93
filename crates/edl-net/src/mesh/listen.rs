// SPDX-License-Identifier: Apache-2.0
//! The listening side of a mesh: one thread that accepts, one short-lived one per handshake.

use std::io;
use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use tempfile::TempDir;

use super::abort::Bell;
use super::connector::Connector;
use crate::socket::UnixSocket;
use crate::wire::{self, Stream};

/// After an accept that failed for want of descriptors or memory.
const PAUSE: Duration = Duration::from_millis(20);

/// Both listeners and the thread that serves them.
pub(super) struct Listener {
    pub(super) address: String,
    pub(super) unix_path: PathBuf,
    stop: Arc<Bell>,
    thread: Option<JoinHandle<()>>,
    _folder: Option<TempDir>,
}

impl Listener {
    pub(super) fn start(
        connector: Arc<Connector>,
        address: &str,
        socket: UnixSocket,
    ) -> io::Result<Self> {
        let tcp = TcpListener::bind(address)?;
        tcp.set_nonblocking(true)?;
        let address = tcp.local_addr()?.to_string();
        let UnixSocket { listener: unix, path: unix_path, folder } = socket;
        unix.set_nonblocking(true)?;
        let stop = Arc::new(Bell::new()?);
        let seen = Arc::clone(&stop);
        let thread = std::thread::Builder::new()
            .name("mesh-listen".into())
            .spawn(move || serve(&connector, &tcp, &unix, &seen))?;
        Ok(Self { address, unix_path, stop, thread: Some(thread), _folder: folder })
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.stop.ring();
        if let Some(thread) = self.thread.take() {
            // A panic has been printed.
            let _ = thread.join();
        }
        // It may have been removed before.
        let _ = std::fs::remove_file(&self.unix_path);
    }
}

fn serve(connector: &Arc<Connector>, tcp: &TcpListener, unix: &UnixListener, stop: &Bell) {
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
                Ok(stream) => admit(connector, stream),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => {
                    connector.strangers.log_failure(&error);
                    std::thread::sleep(PAUSE);
                }
            }
        }
        if polled.is_err() {
            std::thread::sleep(PAUSE);
        }
    }
}

/// Does the handshake in its own thread: a silent caller must not keep others out.
fn admit(connector: &Arc<Connector>, stream: Stream) {
    let stream = Arc::new(stream);
    if connector.pending().is_closed {
        stream.shutdown();
        return;
    }
    let displaced = Arc::clone(&stream);
    let place = connector.strangers.admit(move || displaced.shutdown());
    let acceptor = Arc::clone(connector);
    let accept = move || {
        let peer = stream.peer();
        let proven = acceptor.accept(stream);
        drop(place);
        match proven {
            Ok(connection) => match acceptor.join(connection) {
                Ok(link) => acceptor.arrive(link),
                Err(wire::Error::Closed) => {}
                Err(error) => tracing::warn!(%error, "refused a connection from another worker"),
            },
            Err(error) => {
                if let Some(reason) = error.reason() {
                    acceptor.strangers.log_refusal(peer, reason);
                }
            }
        }
    };
    // It ends by itself: a handshake has a time limit.
    if let Err(error) = std::thread::Builder::new().name("mesh-accept".into()).spawn(accept) {
        connector.strangers.log_failure(&error);
    }
}
