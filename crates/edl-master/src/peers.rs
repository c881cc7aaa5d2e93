// SPDX-License-Identifier: Apache-2.0
//! The open streams to workers and parameter servers.
//!
//! A peer has at most one stream: a newer one of the same number takes its place. The older one
//! is closed with that reason, and its own end is ignored.

use std::collections::BTreeMap;

use edl_core::id::Incarnation;
use tokio::sync::mpsc;
use tonic::Status;

/// Commands waiting for one peer; a peer that lets this many pile up is disconnected.
pub(crate) const QUEUE: usize = 4096;

/// The sending half of a stream to a peer.
pub(crate) type Outbound<C> = mpsc::Sender<Result<C, Status>>;

/// The streams to all peers of one kind.
pub(crate) struct Peers<K, C> {
    streams: BTreeMap<K, Stream<C>>,
}

struct Stream<C> {
    number: u64,
    incarnation: Incarnation,
    outbound: Outbound<C>,
}

impl<K: Ord + Copy, C> Peers<K, C> {
    pub(crate) fn new() -> Self {
        Self { streams: BTreeMap::new() }
    }

    pub(crate) fn insert(
        &mut self,
        peer: K,
        number: u64,
        incarnation: Incarnation,
        outbound: Outbound<C>,
    ) {
        self.close(peer, Status::unavailable("a newer stream has replaced this one"));
        self.streams.insert(peer, Stream { number, incarnation, outbound });
    }

    /// Stream `number` has ended, with the reason if its peer is `refused`. Returns its incarnation if
    /// it was the peer's current stream.
    pub(crate) fn closed(
        &mut self,
        peer: K,
        number: u64,
        refused: Option<Status>,
    ) -> Option<Incarnation> {
        let stream = self.streams.get(&peer).filter(|stream| stream.number == number)?;
        let incarnation = stream.incarnation;
        match refused {
            Some(status) => self.close(peer, status),
            None => drop(self.streams.remove(&peer)),
        }
        Some(incarnation)
    }

    /// Whether `number` is the stream that counts.
    pub(crate) fn is_current(&self, peer: K, number: u64) -> bool {
        self.streams.get(&peer).is_some_and(|stream| stream.number == number)
    }

    /// Sends, unless the peer is gone or does not listen.
    pub(crate) fn send(&mut self, peer: K, command: C) {
        let Some(stream) = self.streams.get(&peer) else { return };
        if stream.outbound.try_send(Ok(command)).is_err() {
            self.streams.remove(&peer);
        }
    }

    /// Ends a stream with a reason.
    pub(crate) fn close(&mut self, peer: K, status: Status) {
        if let Some(stream) = self.streams.remove(&peer) {
            // A full queue ends the stream just as well: the sender is dropped here.
            let _ = stream.outbound.try_send(Err(status));
        }
    }

    pub(crate) fn keys(&self) -> impl Iterator<Item = K> + '_ {
        self.streams.keys().copied()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.streams.is_empty()
    }
}
