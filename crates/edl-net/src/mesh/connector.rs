// SPDX-License-Identifier: Apache-2.0
//! How links come to be: what the listening and the dialling threads share with the mesh.
//!
//! Of two members the one with the lower number dials, so they never call each other at once.
//! A caller that lost its link calls again; its later call replaces the earlier one. A member that
//! waits to be called probes the caller: it connects, sends nothing, and learns whether it exists.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use edl_core::id::{Incarnation, RunId, WorkerId};
use edl_core::server::Refusal;

use super::abort::Abort;
use super::link::{Ends, Link};
use super::{MAX_MEMBERS, Transport};
use crate::data::session::{Connection, Party, receive_frame, send_frame};
use crate::frame::{FrameKind, encode_refusal};
use crate::handshake::{ClientId, Encryption, Join, Role};
use crate::key::JobKey;
use crate::strangers::Strangers;
use crate::wire::{Error, Stream};

/// How long a handshake may take.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Links that are not fetched yet. A process that has the key could make any number of them.
const MAX_ARRIVED: usize = 2 * MAX_MEMBERS;

/// A member's number, and which start of its process is meant.
pub(super) type MemberId = (WorkerId, Incarnation);

/// Makes links with other members. Shared by all threads of a mesh.
pub(super) struct Connector {
    pub(super) key: JobKey,
    pub(super) run: RunId,
    pub(super) encryption: Encryption,
    pub(super) me: MemberId,
    pub(super) transport: Option<Transport>,
    pub(super) silence: Duration,
    /// Its bell rings when a link has arrived.
    pub(super) abort: Abort,
    /// Callers that have not proven the key.
    pub(super) strangers: Arc<Strangers>,
    pending: Mutex<Pending>,
}

#[derive(Default)]
pub(super) struct Pending {
    pub(super) arrived: Vec<Link>,
    /// Members that cannot be reached, and why.
    pub(super) failed: BTreeMap<MemberId, String>,
    /// Members that a thread dials, by the number of its first call. The thread stops, and its
    /// result is ignored, when that number is removed or replaced.
    pub(super) dialing: BTreeMap<MemberId, u64>,
    /// Calls that were begun. Of two links with one member the one of the later call counts.
    pub(super) n_calls: u64,
    pub(super) is_closed: bool,
}

impl Pending {
    pub(super) fn arrive(&mut self, link: Link) {
        if !self.is_closed && self.arrived.len() < MAX_ARRIVED {
            self.arrived.push(link);
        }
    }

    /// Whether there is a link with this member that is not fetched yet.
    pub(super) fn has_arrived(&self, id: MemberId) -> bool {
        self.arrived.iter().any(|link| (link.worker, link.incarnation) == id)
    }

    /// The number of the next call.
    pub(super) fn next_call(&mut self) -> u64 {
        self.n_calls += 1;
        self.n_calls
    }
}

impl Connector {
    pub(super) fn new(
        (key, run, encryption): (JobKey, RunId, Encryption),
        me: MemberId,
        transport: Option<Transport>,
        silence: Duration,
        abort: Abort,
    ) -> Self {
        let (strangers, pending) = (Strangers::new(), Mutex::default());
        Self { key, run, encryption, me, transport, silence, abort, strangers, pending }
    }

    pub(super) fn pending(&self) -> MutexGuard<'_, Pending> {
        self.pending.lock().expect("the lock on the pending links is poisoned")
    }

    pub(super) fn arrive(&self, link: Link) {
        self.pending().arrive(link);
        self.abort.bell().ring();
    }

    fn party(&self) -> Party<'_> {
        let timeout = HANDSHAKE_TIMEOUT.min(self.silence);
        let (key, run, encryption) = (&self.key, self.run, self.encryption);
        Party { key, run, encryption, timeout, patience: timeout }
    }

    /// The caller's half.
    pub(super) fn call(
        &self,
        stream: Stream,
        to: MemberId,
        attempt: u64,
        transport: Transport,
    ) -> Result<Link, Error> {
        let me = ClientId::of_member(self.me.0, self.me.1);
        let mut connection = self.party().dial(stream, Role::Member, me)?;
        let is_shared = transport == Transport::SharedMemory;
        let join = Join { from: self.me, to, attempt, is_shared };
        send_frame(&mut connection.sender, FrameKind::Join, &join.encode())?;
        let answer = self.receive_join(&mut connection)?;
        if (answer.from, answer.to) != (to, self.me) {
            return Err(Error::Refused("a different worker answered".into()));
        }
        self.link(connection, to, attempt, transport)
    }

    /// The listener's half, up to the proof that the caller holds the key.
    pub(super) fn accept(&self, stream: Arc<Stream>) -> Result<Connection, Error> {
        self.party().accept(stream)
    }

    /// The rest of the listener's half.
    pub(super) fn join(&self, mut connection: Connection) -> Result<Link, Error> {
        let is_local = connection.sender.stream().is_local();
        let join = self.receive_join(&mut connection)?;
        let transport = self.examine(&connection, &join, is_local).inspect_err(|error| {
            let refusal = encode_refusal(&Refusal::Other(error.to_string()), 0);
            // The caller may be gone, or not worth waiting for.
            let _ = send_frame(&mut connection.sender, FrameKind::Refused, &refusal);
        })?;
        let answer = Join { from: self.me, to: join.from, ..join };
        send_frame(&mut connection.sender, FrameKind::Join, &answer.encode())?;
        self.link(connection, join.from, join.attempt, transport)
    }

    /// Whether a caller that holds the key is one for us, and how data will travel.
    fn examine(
        &self,
        connection: &Connection,
        join: &Join,
        is_local: bool,
    ) -> Result<Transport, Error> {
        let is_proven = connection.client == ClientId::of_member(join.from.0, join.from.1);
        if connection.role != Role::Member || !is_proven {
            return Err(Error::Refused("the caller's identity is not verified".into()));
        }
        if join.to != self.me {
            let ((worker, incarnation), (ours, is)) = (join.to, self.me);
            return Err(Error::Refused(format!(
                "the connection is for worker {worker} (incarnation {incarnation}), but this is \
                 worker {ours} (incarnation {is})"
            )));
        }
        let transport = match (is_local, join.is_shared) {
            (true, true) => Transport::SharedMemory,
            (true, false) => Transport::Unix,
            (false, false) => Transport::Tcp,
            (false, true) => return Err(Error::Refused("shared memory over a network".into())),
        };
        if self.transport.is_some_and(|forced| forced != transport) {
            return Err(Error::Refused(format!("transport {transport} is not allowed")));
        }
        Ok(transport)
    }

    fn receive_join(&self, connection: &mut Connection) -> Result<Join, Error> {
        let timeout = HANDSHAKE_TIMEOUT.min(self.silence);
        connection.receiver.set_deadline(Some(Instant::now() + timeout));
        let bytes = receive_frame(&mut connection.receiver, FrameKind::Join)?;
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
            (sender.into_guard(), receiver.into_guard())
        else {
            return Err(Error::Closed);
        };
        let ends = Ends { stream, run: self.run, out: (out, next_out), into: (into, next_in) };
        Ok(Link::new(peer, attempt, transport, ends))
    }
}
