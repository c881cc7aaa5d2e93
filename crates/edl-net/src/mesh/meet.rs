// SPDX-License-Identifier: Apache-2.0
//! How links come to be: what the listening and the dialling threads share with the mesh.
//!
//! Of two members the one with the lower number dials, so they never call each other at once.
//! A caller that lost its link calls again; its later call replaces the earlier one.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use edl_core::id::{Incarnation, RunId, WorkerId};

use super::Transport;
use super::abort::Abort;
use super::link::{Ends, Link};
use crate::data::session::{Connection, Party, hear, say};
use crate::frame::Kind;
use crate::handshake::{ClientId, Join, Role};
use crate::key::JobKey;
use crate::wire::{Error, Stream};

/// How long a handshake may take.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Links that nobody has fetched. Who holds the key could make any number of them.
const MAX_ARRIVED: usize = 256;

/// A member's number, and which start of its process is meant.
pub(super) type MemberId = (WorkerId, Incarnation);

/// Where members meet. Shared by all threads of a mesh.
pub(super) struct Door {
    pub(super) key: JobKey,
    pub(super) run: RunId,
    pub(super) me: MemberId,
    pub(super) transport: Option<Transport>,
    pub(super) silence: Duration,
    /// Its bell rings when a link has arrived.
    pub(super) abort: Abort,
    attempts: AtomicU64,
    meeting: Mutex<Meeting>,
}

#[derive(Default)]
pub(super) struct Meeting {
    pub(super) arrived: Vec<Link>,
    /// Members that cannot be reached, and why.
    pub(super) failed: BTreeMap<MemberId, String>,
    /// Members that a thread dials; it stops when its member is taken out.
    pub(super) dialing: BTreeSet<MemberId>,
    pub(super) n_greeted: usize,
    pub(super) is_closed: bool,
}

impl Door {
    pub(super) fn new(
        (key, run): (JobKey, RunId),
        me: MemberId,
        transport: Option<Transport>,
        silence: Duration,
        abort: Abort,
    ) -> Self {
        let (attempts, meeting) = (AtomicU64::new(1), Mutex::default());
        Self { key, run, me, transport, silence, abort, attempts, meeting }
    }

    pub(super) fn meeting(&self) -> MutexGuard<'_, Meeting> {
        self.meeting.lock().expect("nobody panics with the meeting in hand")
    }

    pub(super) fn arrive(&self, link: Link) {
        let mut meeting = self.meeting();
        if !meeting.is_closed && meeting.arrived.len() < MAX_ARRIVED {
            meeting.arrived.push(link);
        }
        drop(meeting);
        self.abort.bell().ring();
    }

    fn party(&self) -> Party<'_> {
        let timeout = HANDSHAKE_TIMEOUT.min(self.silence);
        Party { key: &self.key, run: self.run, timeout, patience: timeout }
    }

    /// The caller's half.
    pub(super) fn call(
        &self,
        stream: Stream,
        to: MemberId,
        transport: Transport,
    ) -> Result<Link, Error> {
        let attempt = self.attempts.fetch_add(1, Ordering::Relaxed);
        let me = ClientId::of_member(self.me.0, self.me.1);
        let mut connection = self.party().dial(stream, Role::Member, me)?;
        let is_shared = transport == Transport::SharedMemory;
        let join = Join { from: self.me, to, attempt, is_shared };
        say(&mut connection.sender, Kind::Join, &join.encode())?;
        let answer = self.hear_join(&mut connection)?;
        if (answer.from, answer.to) != (to, self.me) {
            return Err(Error::Refused("another member answers".into()));
        }
        self.link(connection, to, attempt, transport)
    }

    /// The listener's half.
    pub(super) fn greet(&self, stream: Stream) -> Result<Link, Error> {
        let is_local = stream.is_local();
        let mut connection = self.party().accept(Arc::new(stream))?;
        let join = self.hear_join(&mut connection)?;
        let is_proven = connection.client == ClientId::of_member(join.from.0, join.from.1);
        if connection.role != Role::Member || !is_proven || join.to != self.me {
            return Err(Error::Refused("a call for another member".into()));
        }
        let transport = match (is_local, join.is_shared) {
            (true, true) => Transport::SharedMemory,
            (true, false) => Transport::Unix,
            (false, false) => Transport::Tcp,
            (false, true) => return Err(Error::Refused("shared memory over a network".into())),
        };
        if self.transport.is_some_and(|forced| forced != transport) {
            return Err(Error::Refused("a call over another transport than the forced one".into()));
        }
        let answer = Join { from: self.me, to: join.from, ..join };
        say(&mut connection.sender, Kind::Join, &answer.encode())?;
        self.link(connection, join.from, join.attempt, transport)
    }

    fn hear_join(&self, connection: &mut Connection) -> Result<Join, Error> {
        let timeout = HANDSHAKE_TIMEOUT.min(self.silence);
        let bytes = hear(&mut connection.receiver, Kind::Join, Instant::now(), timeout)?;
        Ok(Join::decode(&bytes)?)
    }

    fn link(
        &self,
        connection: Connection,
        peer: MemberId,
        attempt: u64,
        transport: Transport,
    ) -> Result<Link, Error> {
        let Connection { sender, receiver, .. } = connection;
        let stream = Arc::clone(sender.stream());
        let ((Some(out), next_out), (Some(into), next_in)) =
            (sender.into_seal(), receiver.into_seal())
        else {
            return Err(Error::Closed);
        };
        let ends = Ends { stream, run: self.run, out: (out, next_out), into: (into, next_in) };
        Ok(Link::new(peer, attempt, transport, ends))
    }
}
