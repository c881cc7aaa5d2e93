// SPDX-License-Identifier: Apache-2.0
//! The calling side of a mesh: one thread per member that is being called, or knocked at.

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
/// A member listens from its start to its end, so a host that refuses for so long has lost it.
const REFUSED_FOR: Duration = Duration::from_millis(250);

/// Calls `peer` until it answers, cannot be there any more, or nobody wants it any longer. A peer
/// that is to call us is only knocked at, to learn whether it is there.
pub(super) fn start(door: &Arc<Door>, peer: &Peer) {
    let id = (peer.worker, peer.incarnation);
    let mut meeting = door.meeting();
    if meeting.is_closed || meeting.dialing.contains_key(&id) {
        return;
    }
    meeting.failed.remove(&id);
    let ticket = meeting.next_call();
    meeting.dialing.insert(id, ticket);
    drop(meeting);
    let (caller, peer) = (Arc::clone(door), peer.clone());
    let call = move || {
        let called = call_until(&caller, &peer, id, ticket);
        // At one stroke: the member is dialled, or its link is there.
        let mut meeting = caller.meeting();
        if meeting.dialing.get(&id) != Some(&ticket) {
            return;
        }
        meeting.dialing.remove(&id);
        match called {
            Ok(Some(link)) => meeting.arrive(link),
            Ok(None) => {}
            Err(error) => {
                meeting.failed.insert(id, error);
            }
        }
        drop(meeting);
        caller.abort.bell().ring();
    };
    // It ends by itself: it looks before every call whether it is wanted.
    if let Err(error) = std::thread::Builder::new().name("mesh-dial".into()).spawn(call) {
        let mut meeting = door.meeting();
        meeting.dialing.remove(&id);
        meeting.failed.insert(id, error.to_string());
    }
}

/// None if nobody wants the member any longer.
fn call_until(door: &Door, peer: &Peer, id: MemberId, ticket: u64) -> Result<Option<Link>, String> {
    let is_caller = door.me.0 < peer.worker;
    let (start, mut pause) = (Instant::now(), PAUSES.0);
    let mut refused_since: Option<Instant> = None;
    loop {
        let mut meeting = door.meeting();
        if meeting.dialing.get(&id) != Some(&ticket) {
            return Ok(None);
        }
        // Here, so that a thread that took over calls later than this one ever did.
        let attempt = meeting.next_call();
        drop(meeting);
        let called = match is_caller {
            true => call(door, peer, id, attempt).map(Some),
            false => knock(door, peer).map(|()| None),
        };
        let error = match called {
            Ok(Some(link)) => return Ok(Some(link)),
            Ok(None) => None,
            Err(error) => Some(error),
        };
        let is_refusal = error.as_ref().is_some_and(is_refusal);
        refused_since = is_refusal.then(|| refused_since.unwrap_or_else(Instant::now));
        if let Some(error) = error {
            let is_gone = refused_since.is_some_and(|since| since.elapsed() > REFUSED_FOR);
            let is_final = matches!(error, Error::Refused(_) | Error::Version { .. });
            if is_final || is_gone || start.elapsed() > door.silence {
                return Err(chain(&error));
            }
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(PAUSES.1);
    }
}

fn call(door: &Door, peer: &Peer, id: MemberId, attempt: u64) -> Result<Link, Error> {
    let over_tcp = || door.call(connect(door, peer, Transport::Tcp)?, id, attempt, Transport::Tcp);
    let over_unix = |transport| door.call(connect(door, peer, transport)?, id, attempt, transport);
    match door.transport {
        Some(Transport::Tcp) => over_tcp(),
        Some(transport) => over_unix(transport),
        // On another host the path leads nowhere, or to somebody else, who refuses us.
        None if Path::new(&peer.unix_path).exists() => {
            over_unix(Transport::SharedMemory).or_else(|_| over_tcp())
        }
        None => over_tcp(),
    }
}

/// Connects and hangs up. Every member listens on both sockets, so the address will do.
fn knock(door: &Door, peer: &Peer) -> Result<(), Error> {
    let transport = door.transport.unwrap_or(Transport::Tcp);
    connect(door, peer, transport).map(|stream| stream.shutdown())
}

fn connect(door: &Door, peer: &Peer, transport: Transport) -> Result<Stream, Error> {
    let timeout = CONNECT_TIMEOUT.min(door.silence);
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

fn chain(error: &Error) -> String {
    match std::error::Error::source(error) {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}
