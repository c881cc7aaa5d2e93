// SPDX-License-Identifier: Apache-2.0
//! Connections: each keeps its order, but they do not keep step with each other.
//!
//! When a connection breaks, what is under way may or may not arrive. Between two processes that
//! are disconnected from each other everything waits, as it does with TCP.

use std::collections::BTreeMap;
use std::time::Duration;

use edl_core::time::Time;

use crate::kernel::Pid;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ConnId(pub(crate) u64);

/// What a connection is for; the one who accepts it learns this first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Control stream of a worker.
    Worker,
    /// Control stream of a parameter server.
    Ps,
    /// Data connection to a parameter server, of one client.
    Pull {
        client: u64,
    },
    Push {
        client: u64,
    },
    /// Link between two members of a world.
    Mesh,
}

/// A connection to be opened.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NewConnection {
    pub(crate) from: Pid,
    pub(crate) to: Pid,
    pub(crate) purpose: Purpose,
}

#[derive(Debug)]
struct Conn {
    ends: [Pid; 2],
    purpose: Purpose,
    is_open: bool,
    /// What would arrive later than this is lost.
    lost_after: Option<Time>,
    /// When the last message to each end arrives.
    last: [Time; 2],
    /// Ends that have not noticed that it broke.
    n_unaware: u8,
}

#[derive(Debug, Default)]
pub(crate) struct Network {
    conns: BTreeMap<ConnId, Conn>,
    /// Pairs that are disconnected from each other, and until when.
    blocked: BTreeMap<[Pid; 2], Time>,
}

impl Network {
    pub(crate) fn insert(&mut self, conn: ConnId, new: NewConnection, now: Time) {
        let NewConnection { from, to, purpose } = new;
        let ends = [from, to];
        let last = [now; 2];
        let new = Conn { ends, purpose, is_open: true, lost_after: None, last, n_unaware: 2 };
        self.conns.insert(conn, new);
    }

    /// Where and when a message that is sent now arrives; `None` if the connection is closed.
    pub(crate) fn arrival(
        &mut self,
        conn: ConnId,
        from: Pid,
        now: Time,
        delay: Duration,
    ) -> Option<(Pid, Time, Purpose)> {
        let known = self.conns.get_mut(&conn).filter(|conn| conn.is_open)?;
        let to = usize::from(known.ends[0] == from);
        let healed = self.blocked.get(&pair(known.ends)).copied().unwrap_or(now);
        let at = known.last[to].max(healed.max(now) + delay);
        known.last[to] = at;
        Some((known.ends[to], at, known.purpose))
    }

    /// Whether a message that arrives now was not lost with its connection.
    pub(crate) fn arrives(&self, conn: ConnId, now: Time) -> bool {
        let known = self.conns.get(&conn);
        known.is_some_and(|conn| conn.lost_after.is_none_or(|lost_after| now <= lost_after))
    }

    /// The ends of a connection that breaks now, and when they can notice it.
    pub(crate) fn close(
        &mut self,
        conn: ConnId,
        now: Time,
        lost_after: Duration,
    ) -> Option<([Pid; 2], Time)> {
        let known = self.conns.get_mut(&conn).filter(|conn| conn.is_open)?;
        known.is_open = false;
        known.lost_after = Some(now + lost_after);
        let healed = self.blocked.get(&pair(known.ends)).copied().unwrap_or(now);
        Some((known.ends, healed.max(now) + lost_after))
    }

    /// One end has noticed that the connection is broken; after the other it is forgotten.
    pub(crate) fn noticed(&mut self, conn: ConnId) {
        if let Some(known) = self.conns.get_mut(&conn) {
            known.n_unaware -= 1;
            if known.n_unaware == 0 {
                self.conns.remove(&conn);
            }
        }
    }

    pub(crate) fn purpose(&self, conn: ConnId) -> Option<Purpose> {
        self.conns.get(&conn).map(|conn| conn.purpose)
    }

    pub(crate) fn ends(&self, conn: ConnId) -> Option<[Pid; 2]> {
        self.conns.get(&conn).map(|conn| conn.ends)
    }

    /// The open connection of this purpose between two processes, opened by either.
    pub(crate) fn between(&self, a: Pid, b: Pid, purpose: Purpose) -> Option<ConnId> {
        let is_it = |conn: &Conn| {
            conn.is_open && conn.purpose == purpose && pair(conn.ends) == pair([a, b])
        };
        self.conns.iter().find(|(_, conn)| is_it(conn)).map(|(id, _)| *id)
    }

    pub(crate) fn open_of(&self, pid: Pid) -> Vec<ConnId> {
        let is_its = |conn: &Conn| conn.is_open && conn.ends.contains(&pid);
        self.conns.iter().filter(|(_, conn)| is_its(conn)).map(|(id, _)| *id).collect()
    }

    pub(crate) fn open(&self) -> Vec<ConnId> {
        self.conns.iter().filter(|(_, conn)| conn.is_open).map(|(id, _)| *id).collect()
    }

    pub(crate) fn block(&mut self, a: Pid, b: Pid, until: Time) {
        self.blocked.insert(pair([a, b]), until);
    }
}

fn pair(ends: [Pid; 2]) -> [Pid; 2] {
    [ends[0].min(ends[1]), ends[0].max(ends[1])]
}
