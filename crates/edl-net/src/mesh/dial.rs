// SPDX-License-Identifier: Apache-2.0
//! The calling side of a mesh: one thread per member that is being called, or probed.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use edl_core::error::chain;

use super::connector::{Connector, MemberId};
use super::link::Link;
use super::{Peer, Transport};
use crate::wire::{Error, Stream};

/// For one connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// Between calls: at first, and at most.
const PAUSES: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(200));
/// A host that cannot be reached for this long is given up.
const LOST_FOR: Duration = Duration::from_secs(30);
/// A member listens from its start to its end, so a host that refuses for this long has lost it.
const REFUSED_FOR: Duration = Duration::from_millis(250);

/// Calls `peer` until it answers, cannot exist anymore, or is no longer needed. A peer
/// that will call us is only probed, to learn whether it exists. Does nothing if this is under way,
/// or if a link has arrived that is not fetched yet.
pub(super) fn start(connector: &Arc<Connector>, peer: &Peer) {
    let id = (peer.worker, peer.incarnation);
    let mut pending = connector.pending();
    // A second call would make the peer drop the link of the first one, which we may already use.
    if pending.is_closed || pending.dialing.contains_key(&id) || pending.has_arrived(id) {
        return;
    }
    pending.failed.remove(&id);
    let ticket = pending.next_call();
    pending.dialing.insert(id, ticket);
    drop(pending);
    let (caller, peer) = (Arc::clone(connector), peer.clone());
    let call = move || {
        let called = call_until(&caller, &peer, id, ticket);
        // Atomically: the member is dialled, or its link exists.
        let mut pending = caller.pending();
        if pending.dialing.get(&id) != Some(&ticket) {
            return;
        }
        pending.dialing.remove(&id);
        match called {
            Ok(Some(link)) => pending.arrive(link),
            Ok(None) => {}
            Err(error) => {
                pending.failed.insert(id, error);
            }
        }
        drop(pending);
        caller.abort.bell().ring();
    };
    // It ends by itself: it looks before every call whether it is wanted.
    if let Err(error) = std::thread::Builder::new().name("mesh-dial".into()).spawn(call) {
        let mut pending = connector.pending();
        pending.dialing.remove(&id);
        pending.failed.insert(id, error.to_string());
    }
}

/// None if the member is no longer needed.
fn call_until(
    connector: &Connector,
    peer: &Peer,
    id: MemberId,
    ticket: u64,
) -> Result<Option<Link>, String> {
    let is_caller = connector.me.0 < peer.worker;
    let limit = LOST_FOR.min(connector.silence);
    let mut pause = PAUSES.0;
    let (mut failed_since, mut refused_since): (Option<Instant>, Option<Instant>) = (None, None);
    loop {
        let mut pending = connector.pending();
        if pending.dialing.get(&id) != Some(&ticket) {
            return Ok(None);
        }
        // Here, so that a thread that took over calls later than this one ever did.
        let attempt = pending.next_call();
        drop(pending);
        let called = match is_caller {
            true => call(connector, peer, id, attempt).map(Some),
            false => probe(connector, peer).map(|()| None),
        };
        let error = match called {
            Ok(Some(link)) => return Ok(Some(link)),
            Ok(None) => None,
            Err(error) => Some(error),
        };
        let is_refusal = error.as_ref().is_some_and(is_refusal);
        failed_since = error.is_some().then(|| failed_since.unwrap_or_else(Instant::now));
        refused_since = is_refusal.then(|| refused_since.unwrap_or_else(Instant::now));
        if let Some(error) = error {
            let is_over =
                |since: Option<Instant>, limit| since.is_some_and(|s| s.elapsed() > limit);
            let is_gone = is_over(refused_since, REFUSED_FOR) || is_over(failed_since, limit);
            let is_final = matches!(error, Error::Refused(_) | Error::Version { .. });
            if is_final || is_gone {
                return Err(chain(&error));
            }
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(PAUSES.1);
    }
}

fn call(connector: &Connector, peer: &Peer, id: MemberId, attempt: u64) -> Result<Link, Error> {
    let over_tcp =
        || connector.call(connect(connector, peer, Transport::Tcp)?, id, attempt, Transport::Tcp);
    let over_unix =
        |transport| connector.call(connect(connector, peer, transport)?, id, attempt, transport);
    match connector.transport {
        Some(Transport::Tcp) => over_tcp(),
        Some(transport) => over_unix(transport),
        // On another host the path leads nowhere, or to another process, which refuses us.
        None if Path::new(&peer.unix_path).exists() => {
            over_unix(Transport::SharedMemory).or_else(|_| over_tcp())
        }
        None => over_tcp(),
    }
}

/// Connects and hangs up. Every member listens on both sockets, so the address will do.
fn probe(connector: &Connector, peer: &Peer) -> Result<(), Error> {
    let transport = connector.transport.unwrap_or(Transport::Tcp);
    connect(connector, peer, transport).map(|stream| stream.shutdown())
}

fn connect(connector: &Connector, peer: &Peer, transport: Transport) -> Result<Stream, Error> {
    let timeout = CONNECT_TIMEOUT.min(connector.silence);
    match transport {
        Transport::Tcp => Stream::connect_tcp(&peer.address, timeout),
        Transport::SharedMemory | Transport::Unix => {
            Stream::connect_unix(Path::new(&peer.unix_path), timeout)
        }
    }
}

fn is_refusal(error: &Error) -> bool {
    let kinds = [io::ErrorKind::ConnectionRefused, io::ErrorKind::NotFound];
    matches!(error, Error::Io { source, .. } if kinds.contains(&source.kind()))
}

#[cfg(test)]
mod tests {
    use edl_core::id::{Incarnation, RunId, WorkerId};

    use super::*;
    use crate::handshake::Encryption;
    use crate::key::JobKey;
    use crate::mesh::{Mesh, MeshConfig};

    fn open(folder: &Path, worker: u32) -> Mesh {
        let config = MeshConfig {
            key: JobKey::from_bytes([7; 32]),
            run: RunId([3; 16]),
            worker: WorkerId(worker),
            incarnation: Incarnation(1),
            folder: folder.into(),
            listen: "127.0.0.1:0".into(),
            transport: None,
            encryption: Encryption::default(),
            silence: Duration::from_secs(60),
            on_phase: None,
        };
        Mesh::open(config).unwrap()
    }

    #[test]
    fn a_member_whose_link_has_arrived_is_not_dialled_again() {
        let folder = tempfile::tempdir().unwrap();
        let (caller, other) = (open(folder.path(), 0), open(folder.path(), 1));
        let peer = Peer {
            worker: WorkerId(1),
            incarnation: Incarnation(1),
            address: other.address().into(),
            unix_path: other.unix_path().to_str().unwrap().into(),
            span: 0..1,
            is_busy: false,
        };
        start(&caller.connector, &peer);
        let deadline = Instant::now() + Duration::from_secs(60);
        while caller.connector.pending().arrived.is_empty() {
            assert!(Instant::now() < deadline, "no link has arrived");
            std::thread::sleep(Duration::from_millis(1));
        }
        start(&caller.connector, &peer);
        assert!(caller.connector.pending().dialing.is_empty());
    }
}
