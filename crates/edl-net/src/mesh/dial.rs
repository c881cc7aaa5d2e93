// SPDX-License-Identifier: Apache-2.0
//! The calling side of a mesh: one thread per member that is being called.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::link::Link;
use super::meet::{Door, MemberId};
use super::{Peer, Transport};
use crate::wire::{Error, Stream};

/// For one connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// Between calls: at first, and at most.
const PAUSES: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(200));
/// A member listens from its start on, so a host that refuses so often has lost it.
const MAX_REFUSALS: u32 = 15;

/// Calls `peer` until it answers, cannot be there any more, or nobody wants it any longer.
pub(super) fn start(door: &Arc<Door>, peer: &Peer) {
    let id = (peer.worker, peer.incarnation);
    let mut meeting = door.meeting();
    meeting.failed.remove(&id);
    if meeting.is_closed || !meeting.dialing.insert(id) {
        return;
    }
    drop(meeting);
    let (caller, peer) = (Arc::clone(door), peer.clone());
    let call = move || {
        let called = call_until(&caller, &peer, id);
        let mut meeting = caller.meeting();
        let is_wanted = meeting.dialing.remove(&id);
        match called {
            Ok(Some(link)) if is_wanted => {
                drop(meeting);
                caller.arrive(link);
            }
            Ok(_) => {}
            Err(error) => {
                meeting.failed.insert(id, error);
                drop(meeting);
                caller.abort.bell().ring();
            }
        }
    };
    // It ends by itself: it looks after every call whether it is wanted.
    if let Err(error) = std::thread::Builder::new().name("mesh-dial".into()).spawn(call) {
        let mut meeting = door.meeting();
        meeting.dialing.remove(&id);
        meeting.failed.insert(id, error.to_string());
    }
}

fn call_until(door: &Door, peer: &Peer, id: MemberId) -> Result<Option<Link>, String> {
    let start = Instant::now();
    let mut n_refusals = 0;
    let mut pause = PAUSES.0;
    loop {
        if !door.meeting().dialing.contains(&id) {
            return Ok(None);
        }
        let error = match call(door, peer, id) {
            Ok(link) => return Ok(Some(link)),
            Err(error) => error,
        };
        n_refusals += u32::from(is_refusal(&error));
        let is_final = matches!(error, Error::Refused(_) | Error::Version { .. });
        if is_final || n_refusals >= MAX_REFUSALS || start.elapsed() > door.silence {
            return Err(chain(&error));
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(PAUSES.1);
    }
}

fn call(door: &Door, peer: &Peer, id: MemberId) -> Result<Link, Error> {
    let timeout = CONNECT_TIMEOUT.min(door.silence);
    let path = Path::new(&peer.unix_path);
    let over_unix = |transport| {
        let stream = Stream::connect_unix(path, timeout)?;
        door.call(stream, id, transport)
    };
    let over_tcp = || {
        let stream = Stream::connect_tcp(&peer.address, timeout)?;
        door.call(stream, id, Transport::Tcp)
    };
    match door.transport {
        Some(Transport::Tcp) => over_tcp(),
        Some(transport) => over_unix(transport),
        // On another host the path leads nowhere, or to somebody else, who refuses us.
        None if path.exists() => over_unix(Transport::SharedMemory).or_else(|_| over_tcp()),
        None => over_tcp(),
    }
}

fn is_refusal(error: &Error) -> bool {
    let kinds = [io::ErrorKind::ConnectionRefused, io::ErrorKind::NotFound];
    matches!(error, Error::Io { source, .. } if kinds.contains(&source.kind()))
}

fn chain(error: &Error) -> String {
    match std::error::Error::source(error) {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}
