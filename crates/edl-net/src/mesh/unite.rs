// SPDX-License-Identifier: Apache-2.0
//! How the members of a world come together: links that are kept, links that are made, and the
//! entry that all pass at once.

use std::sync::Arc;
use std::time::{Duration, Instant};

use edl_core::id::WorkerId;
use rustix::event::{PollFd, PollFlags, Timespec};

use super::drive::Crew;
use super::exchange::Enter;
use super::link::Link;
use super::meet::{Door, MemberId};
use super::{Error, Peer, dial};

/// How often a blocked entry looks at the clock.
const TICK: Duration = Duration::from_millis(50);
/// How long a link may take to be made. A member looks for links between two steps, so this is
/// longer than a step; one that is still missing then is given up, and the others go on.
const LINK_LIMIT: Duration = Duration::from_secs(30);
/// How long a member may take to come back whose link broke at the entry, and how often it may.
const GRACE: Duration = Duration::from_secs(1);
const MAX_BREAKS: u32 = 4;
/// Members that come together call each other at once; one that has not is knocked at.
const KNOCK_AFTER: Duration = Duration::from_millis(100);

/// Dials the members of a world to come that are not linked yet, if it is on us to dial.
pub(super) fn prepare<'a>(door: &Arc<Door>, links: impl Iterator<Item = &'a Link>, peers: &[Peer]) {
    let mut linked: Vec<MemberId> = links.map(|link| (link.worker, link.incarnation)).collect();
    linked.extend(door.meeting().arrived.iter().map(|link| (link.worker, link.incarnation)));
    for peer in peers.iter().filter(|peer| door.me.0 < peer.worker) {
        if !linked.contains(&(peer.worker, peer.incarnation)) {
            dial::start(door, peer);
        }
    }
}

/// The links that serve the new world, by member. Others are closed.
pub(super) fn keep(
    door: &Door,
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
    // Nobody else is to be dialled any longer, or to be remembered as unreachable.
    let mut meeting = door.meeting();
    meeting.dialing.retain(|id, _| place_of(peers, *id).is_some());
    meeting.failed.clear();
    links
}

/// The entry of one world.
pub(super) struct Entry<'a> {
    door: &'a Arc<Door>,
    me: usize,
    peers: &'a [Peer],
    start: Instant,
    /// When a member's link last broke on the way, and how often.
    breaks: Vec<Option<(Instant, u32)>>,
}

impl<'a> Entry<'a> {
    pub(super) fn new(door: &'a Arc<Door>, me: usize, peers: &'a [Peer]) -> Self {
        Self { door, me, peers, start: Instant::now(), breaks: vec![None; peers.len()] }
    }

    /// Makes the links that are missing and passes the entry with all members.
    pub(super) fn pass(&mut self, crew: &mut Crew<'_>) -> Result<(), Error> {
        let passed = self.try_pass(crew);
        // Nobody is knocked at who is not waited for.
        self.door.meeting().dialing.retain(|id, _| self.door.me.0 < id.0);
        passed
    }

    fn try_pass(&mut self, crew: &mut Crew<'_>) -> Result<(), Error> {
        loop {
            self.gather(crew)?;
            let mut entry = Enter::new(crew.world, crew.links);
            match crew.drive(&mut entry) {
                // It may have closed a link that it took for dead, and come back over another.
                Err(Error::Lost { peer, error }) if self.may_come_back(peer) => {
                    tracing::debug!(%peer, error, "a link broke while entering a world");
                }
                ended => return ended,
            }
        }
    }

    /// A link broke: counts that, and tells whether its member has a chance to make another.
    fn may_come_back(&mut self, peer: WorkerId) -> bool {
        let Some(place) = self.peers.iter().position(|known| known.worker == peer) else {
            return false;
        };
        let n_breaks = self.breaks[place].map_or(0, |(_, n_breaks)| n_breaks) + 1;
        self.breaks[place] = Some((Instant::now(), n_breaks));
        n_breaks <= MAX_BREAKS && self.start.elapsed() < self.limit()
    }

    /// Waits until there is a link to every member.
    fn gather(&self, crew: &mut Crew<'_>) -> Result<(), Error> {
        loop {
            if crew.abort.is_over(crew.world) {
                return Err(Error::Aborted);
            }
            self.fetch(crew.links);
            let missing: Vec<usize> = (0..self.peers.len())
                .filter(|place| *place != self.me && crew.links[*place].is_none())
                .collect();
            let Some(first) = missing.first() else { return Ok(()) };
            for place in &missing {
                self.look_for(*place)?;
            }
            crew.waiting.set(missing.iter().map(|place| self.peers[*place].worker).collect());
            let mut fds = [PollFd::new(crew.abort.bell(), PollFlags::IN)];
            let tick = Timespec::try_from(TICK).expect("a tick is short");
            match rustix::event::poll(&mut fds, Some(&tick)) {
                Ok(_) | Err(rustix::io::Errno::INTR) => crew.abort.bell().hush(),
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
        let mut meeting = self.door.meeting();
        let mut rest = Vec::new();
        for link in std::mem::take(&mut meeting.arrived) {
            match place_of(self.peers, (link.worker, link.incarnation)) {
                Some(place) if place != self.me => {
                    // It has called: nobody need knock any longer.
                    meeting.dialing.remove(&(link.worker, link.incarnation));
                    if links[place].as_ref().is_none_or(|old| old.attempt < link.attempt) {
                        links[place] = Some(link);
                    }
                }
                // Of a world that we have not heard of yet.
                _ => rest.push(link),
            }
        }
        meeting.arrived = rest;
    }

    /// Dials a member that is missing, or knocks at its door; gives it up after a while.
    fn look_for(&self, place: usize) -> Result<(), Error> {
        let peer = &self.peers[place];
        let lost = |error: String| Err(Error::Lost { peer: peer.worker, error });
        let failed = self.door.meeting().failed.remove(&(peer.worker, peer.incarnation));
        if let Some(error) = failed {
            return lost(error);
        }
        let is_broken = self.breaks[place].is_some();
        let (since, patience) = match self.breaks[place] {
            Some((broken, _)) => (broken, GRACE.min(self.door.silence)),
            None => (self.start, self.limit()),
        };
        if since.elapsed() > patience {
            return lost(format!("did not connect within {patience:?}"));
        }
        let is_caller = self.door.me.0 < peer.worker;
        if is_caller || is_broken || since.elapsed() > KNOCK_AFTER {
            dial::start(self.door, peer);
        }
        Ok(())
    }

    fn limit(&self) -> Duration {
        LINK_LIMIT.min(self.door.silence)
    }
}

fn place_of(peers: &[Peer], id: MemberId) -> Option<usize> {
    peers.iter().position(|peer| (peer.worker, peer.incarnation) == id)
}
