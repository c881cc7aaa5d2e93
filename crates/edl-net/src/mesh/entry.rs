// SPDX-License-Identifier: Apache-2.0
//! How the members of a world come together: links that are kept, links that are made, and the
//! entry that all pass at once.

use std::sync::Arc;
use std::time::{Duration, Instant};

use edl_core::id::WorkerId;
use rustix::event::{PollFd, PollFlags, Timespec};

use super::connector::{Connector, MemberId};
use super::drive::{Members, Op as _};
use super::exchange::Enter;
use super::link::Link;
use super::{Error, Peer, dial};

/// How often a blocked entry looks at the clock.
const TICK: Duration = Duration::from_millis(50);
/// How long a member may take to come back whose link broke at the entry, and how often it may.
const GRACE: Duration = Duration::from_secs(1);
const MAX_BREAKS: u32 = 4;
/// Members that come together call each other at once; one that has not called is probed.
const PROBE_AFTER: Duration = Duration::from_millis(100);
/// Members that link with each other in this time; in larger worlds, it takes longer.
const LINKED_AT_ONCE: usize = 16;

/// Dials the members of a future world that are not linked yet, if it is our turn to dial.
pub(super) fn prepare<'a>(
    connector: &Arc<Connector>,
    links: impl Iterator<Item = &'a Link>,
    peers: &[Peer],
) {
    let linked: Vec<MemberId> = links.map(|link| (link.worker, link.incarnation)).collect();
    for peer in peers.iter().filter(|peer| connector.me.0 < peer.worker) {
        if !linked.contains(&(peer.worker, peer.incarnation)) {
            dial::start(connector, peer);
        }
    }
}

/// The links that serve the new world, by member. Others are closed.
pub(super) fn keep(
    connector: &Connector,
    old: impl Iterator<Item = Link>,
    me: usize,
    peers: &[Peer],
) -> Vec<Option<Link>> {
    let mut links: Vec<Option<Link>> = peers.iter().map(|_| None).collect();
    for link in old {
        let place = place_of(peers, (link.worker, link.incarnation)).filter(|place| *place != me);
        if let Some(place) = place {
            links[place] = Some(link);
        }
    }
    // No other member is dialled any longer, or remembered as unreachable.
    let mut pending = connector.pending();
    pending.dialing.retain(|id, _| place_of(peers, *id).is_some());
    pending.failed.clear();
    links
}

/// The entry of one world.
pub(super) struct WorldEntry<'a> {
    connector: &'a Arc<Connector>,
    me: usize,
    peers: &'a [Peer],
    entered: Instant,
    /// Since when the members that are waited for could be there.
    start: Instant,
    /// When a member's link last broke on the way, and how often.
    breaks: Vec<Option<(Instant, u32)>>,
}

impl<'a> WorldEntry<'a> {
    pub(super) fn new(connector: &'a Arc<Connector>, me: usize, peers: &'a [Peer]) -> Self {
        let now = Instant::now();
        Self { connector, me, peers, entered: now, start: now, breaks: vec![None; peers.len()] }
    }

    /// Makes the links that are missing and passes the entry with all members.
    pub(super) fn pass(&mut self, members: &mut Members<'_>) -> Result<(), Error> {
        let passed = self.try_pass(members);
        // Only members that are waited for are probed.
        self.connector.pending().dialing.retain(|id, _| self.connector.me.0 < id.0);
        passed
    }

    fn try_pass(&mut self, members: &mut Members<'_>) -> Result<(), Error> {
        loop {
            self.gather(members)?;
            let mut entry = self.of(members);
            let driven = members.drive(&mut entry);
            if entry.is_early() {
                self.start = Instant::now();
            }
            match driven {
                // It may have closed a link that it took for dead, and come back over another.
                Err(Error::Lost { peer, error }) if self.may_come_back(peer) => {
                    tracing::debug!(%peer, error, "a link broke while entering a world");
                }
                ended => return ended,
            }
        }
    }

    fn of(&self, members: &Members<'_>) -> Enter {
        Enter::new(members.world, self.me, self.peers, members.links)
    }

    /// A link broke: counts that; whether its member has a chance to make another.
    fn may_come_back(&mut self, peer: WorkerId) -> bool {
        let Some(place) = self.peers.iter().position(|known| known.worker == peer) else {
            return false;
        };
        let n_breaks = self.breaks[place].map_or(0, |(_, n_breaks)| n_breaks) + 1;
        self.breaks[place] = Some((Instant::now(), n_breaks));
        n_breaks <= MAX_BREAKS && self.start.elapsed() < self.connector.silence
    }

    /// Waits until there is a link to every member.
    fn gather(&mut self, members: &mut Members<'_>) -> Result<(), Error> {
        loop {
            if members.abort.is_over(members.world) {
                return Err(Error::Aborted);
            }
            self.fetch(members.links);
            if self.of(members).is_early() {
                self.start = Instant::now();
            }
            let missing: Vec<usize> = (0..self.peers.len())
                .filter(|place| *place != self.me && members.links[*place].is_none())
                .collect();
            let Some(first) = missing.first() else { return Ok(()) };
            for place in &missing {
                self.look_for(*place)?;
            }
            members.blocked.set(true);
            let mut fds = [PollFd::new(members.abort.bell(), PollFlags::IN)];
            let tick = Timespec::try_from(TICK).expect("a tick is short");
            match rustix::event::poll(&mut fds, Some(&tick)) {
                Ok(_) | Err(rustix::io::Errno::INTR) => members.abort.bell().clear(),
                Err(error) => {
                    let peer = self.peers[*first].worker;
                    return Err(Error::Lost {
                        peer,
                        error: format!("cannot wait for it: {error}"),
                    });
                }
            }
        }
    }

    /// Takes links that have arrived. A later one replaces an earlier one: its caller has given
    /// that up.
    fn fetch(&self, links: &mut [Option<Link>]) {
        let mut pending = self.connector.pending();
        let mut rest = Vec::new();
        for link in std::mem::take(&mut pending.arrived) {
            match place_of(self.peers, (link.worker, link.incarnation)) {
                Some(place) if place != self.me => {
                    // It has called, so it need not be probed any longer.
                    pending.dialing.remove(&(link.worker, link.incarnation));
                    if links[place].as_ref().is_none_or(|old| old.attempt < link.attempt) {
                        links[place] = Some(link);
                    }
                }
                // Of a world that we have not heard of yet.
                _ => rest.push(link),
            }
        }
        pending.arrived = rest;
    }

    /// A limit for few members, as it is in this world.
    fn at_size(&self, limit: Duration) -> Duration {
        let n_times = 1 + self.peers.len() / LINKED_AT_ONCE;
        limit * u32::try_from(n_times).unwrap_or(u32::MAX)
    }

    /// Dials or probes a member that is missing; gives it up after a while.
    fn look_for(&self, place: usize) -> Result<(), Error> {
        let peer = &self.peers[place];
        let lost = |error: String| Err(Error::Lost { peer: peer.worker, error });
        let failed = self.connector.pending().failed.remove(&(peer.worker, peer.incarnation));
        if let Some(error) = failed {
            return lost(error);
        }
        let is_broken = self.breaks[place].is_some();
        let (since, patience) = match self.breaks[place] {
            Some((broken, _)) => (broken, self.at_size(GRACE).min(self.connector.silence)),
            None => (self.start, self.connector.silence),
        };
        if since.elapsed() > patience {
            return lost(format!("did not connect within {patience:?}"));
        }
        let is_caller = self.connector.me.0 < peer.worker;
        if is_caller || is_broken || self.entered.elapsed() > self.at_size(PROBE_AFTER) {
            dial::start(self.connector, peer);
        }
        Ok(())
    }
}

fn place_of(peers: &[Peer], id: MemberId) -> Option<usize> {
    peers.iter().position(|peer| (peer.worker, peer.incarnation) == id)
}
