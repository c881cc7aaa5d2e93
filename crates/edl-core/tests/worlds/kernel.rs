// SPDX-License-Identifier: Apache-2.0
//! Time, chance and connections: everything that happens is an action in one queue.
//!
//! A connection keeps its order; different connections do not keep step with each other. When one
//! breaks, what was under way may or may not have arrived. Between two processes that are cut off
//! from each other everything waits until they are not, as TCP does.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use edl_core::rng::{self, Rng};
use edl_core::time::Time;

use crate::message::{Message, Timer};

pub(crate) type Pid = u32;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ConnId(u64);

/// Something that happens to a process, or to the site (process zero).
#[derive(Debug)]
pub(crate) enum Action {
    Deliver { conn: ConnId, from: Pid, message: Message },
    Broken { conn: ConnId },
    Timer(Timer),
}

#[derive(Debug)]
struct Conn {
    ends: [Pid; 2],
    is_open: bool,
    /// What would arrive later than this is lost.
    cut_at: Option<Time>,
    /// When the last message to each end arrives.
    last: [Time; 2],
}

pub(crate) struct Kernel {
    pub(crate) now: Time,
    pub(crate) rng: Rng,
    queue: BTreeMap<(Time, u64), (Pid, Action)>,
    conns: BTreeMap<ConnId, Conn>,
    /// Pairs that are cut off from each other, and until when.
    blocked: BTreeMap<[Pid; 2], Time>,
    next: u64,
    trace: u64,
    pub(crate) log_lines: usize,
    /// The last things that happened, and how often each kind was.
    pub(crate) log: VecDeque<String>,
    pub(crate) counts: BTreeMap<&'static str, u64>,
}

/// The site itself, as a process.
pub(crate) const SITE: Pid = 0;
const LOG_LINES: usize = 120;

pub(crate) fn millis(n: u64) -> Duration {
    Duration::from_millis(n)
}

impl Kernel {
    pub(crate) fn new(seed: u64) -> Self {
        Self {
            now: Time::ZERO,
            rng: Rng::new(rng::key(&[seed, 1])),
            queue: BTreeMap::new(),
            conns: BTreeMap::new(),
            blocked: BTreeMap::new(),
            next: 0,
            trace: seed,
            log_lines: LOG_LINES,
            log: VecDeque::new(),
            counts: BTreeMap::new(),
        }
    }

    /// The next action in time, and whom it concerns.
    pub(crate) fn next(&mut self) -> Option<(Pid, Action)> {
        let ((at, number), (pid, action)) = self.queue.pop_first()?;
        self.now = at;
        self.note(rng::key(&[number, nanos(at), u64::from(pid)]));
        Some((pid, action))
    }

    /// Mixes a word into the trace.
    pub(crate) fn note(&mut self, word: u64) {
        self.trace = rng::key(&[self.trace, word]);
    }

    pub(crate) fn trace(&self) -> u64 {
        self.trace
    }

    pub(crate) fn count(&mut self, kind: &'static str) {
        *self.counts.entry(kind).or_default() += 1;
    }

    /// Keeps a line for whoever has to find out what went wrong.
    pub(crate) fn note_text(&mut self, pid: Pid, kind: &'static str, text: &str) {
        self.count(kind);
        if self.log.len() >= self.log_lines {
            self.log.pop_front();
        }
        let at = self.now.since(Time::ZERO);
        self.log.push_back(format!("{at:>12.3?} {pid:>4} {kind}: {text}"));
    }

    pub(crate) fn chance(&mut self, per_thousand: u64) -> bool {
        per_thousand > 0 && self.rng.below(1000) < per_thousand
    }

    pub(crate) fn between(&mut self, low_ms: u64, high_ms: u64) -> Duration {
        Duration::from_micros(low_ms * 1000 + self.rng.below((high_ms - low_ms) * 1000 + 1))
    }

    pub(crate) fn schedule(&mut self, pid: Pid, after: Duration, timer: Timer) {
        let at = self.now + after;
        self.enqueue(at, pid, Action::Timer(timer));
    }

    pub(crate) fn schedule_at(&mut self, pid: Pid, at: Time, timer: Timer) {
        self.enqueue(at.max(self.now), pid, Action::Timer(timer));
    }

    fn enqueue(&mut self, at: Time, pid: Pid, action: Action) {
        self.next += 1;
        self.queue.insert((at, self.next), (pid, action));
    }

    /// Opens a connection; one to a dead process breaks when something is sent.
    pub(crate) fn connect(&mut self, from: Pid, to: Pid) -> ConnId {
        self.next += 1;
        let conn = ConnId(self.next);
        let last = [self.now; 2];
        self.conns.insert(conn, Conn { ends: [from, to], is_open: true, cut_at: None, last });
        conn
    }

    /// The open connection between two processes; a new one if there is none.
    pub(crate) fn link(&mut self, from: Pid, to: Pid) -> ConnId {
        let is_link =
            |conn: &Conn| conn.is_open && (conn.ends == [from, to] || conn.ends == [to, from]);
        let open = self.conns.iter().find(|(_, conn)| is_link(conn)).map(|(id, _)| *id);
        open.unwrap_or_else(|| self.connect(from, to))
    }

    pub(crate) fn send(&mut self, conn: ConnId, from: Pid, message: Message) {
        let is_slow = self.chance(20);
        let delay = if is_slow { self.between(20, 300) } else { self.between(0, 3) };
        let now = self.now;
        let Some(known) = self.conns.get_mut(&conn).filter(|conn| conn.is_open) else { return };
        let to = usize::from(known.ends[0] == from);
        let healed = self.blocked.get(&pair(known.ends)).copied().unwrap_or(now);
        let at = known.last[to].max(healed.max(now) + delay);
        known.last[to] = at;
        let pid = known.ends[to];
        self.enqueue(at, pid, Action::Deliver { conn, from, message });
    }

    /// Whether a message that arrives now was not lost with its connection.
    pub(crate) fn arrives(&self, conn: ConnId) -> bool {
        self.conns.get(&conn).is_some_and(|c| c.cut_at.is_none_or(|cut| self.now <= cut))
    }

    /// Breaks a connection. Both ends hear of it, after what still arrives.
    pub(crate) fn hang_up(&mut self, conn: ConnId) {
        let (lost_after, heard_after) = (self.between(0, 4), self.between(0, 30));
        let now = self.now;
        let Some(known) = self.conns.get_mut(&conn).filter(|conn| conn.is_open) else { return };
        known.is_open = false;
        known.cut_at = Some(now + lost_after);
        let healed = self.blocked.get(&pair(known.ends)).copied().unwrap_or(now);
        let at = healed.max(now) + lost_after + heard_after;
        for pid in known.ends {
            self.enqueue(at, pid, Action::Broken { conn });
        }
    }

    /// All connections of a process that is no more.
    pub(crate) fn hang_up_all(&mut self, pid: Pid) {
        let its = |(_, conn): &(&ConnId, &Conn)| conn.is_open && conn.ends.contains(&pid);
        let conns: Vec<ConnId> = self.conns.iter().filter(its).map(|(id, _)| *id).collect();
        conns.into_iter().for_each(|conn| self.hang_up(conn));
    }

    /// Any open connection, by chance.
    pub(crate) fn any_conn(&mut self) -> Option<ConnId> {
        let open: Vec<ConnId> =
            self.conns.iter().filter(|(_, conn)| conn.is_open).map(|(id, _)| *id).collect();
        let n = open.len() as u64;
        (n > 0).then(|| open[usize::try_from(self.rng.below(n)).expect("an index")])
    }

    /// Cuts two processes off from each other for some time.
    pub(crate) fn block(&mut self, a: Pid, b: Pid, time: Duration) {
        let until = self.now + time;
        self.blocked.insert(pair([a, b]), until);
    }
}

fn pair(ends: [Pid; 2]) -> [Pid; 2] {
    [ends[0].min(ends[1]), ends[0].max(ends[1])]
}

fn nanos(time: Time) -> u64 {
    u64::try_from(time.since(Time::ZERO).as_nanos()).expect("a simulation is short")
}
