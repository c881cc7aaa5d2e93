// SPDX-License-Identifier: Apache-2.0
//! Time, chance and the log: everything that happens is an action in one queue.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use edl_core::rng::{self, Rng};
use edl_core::time::Time;

use crate::message::{Message, Timer};
use crate::network::{ConnId, Network, NewConnection, Purpose};
use crate::script::MasterDeath;

/// A process by its number, which is never used again.
pub(crate) type Pid = u32;

/// The site itself, as a process.
pub(crate) const SITE: Pid = 0;
const LOG_LINES: usize = 120;

/// Something that happens to a process, or to the site.
#[derive(Debug)]
pub(crate) enum Action {
    Deliver { conn: ConnId, purpose: Purpose, from: Pid, message: Message },
    Broken { conn: ConnId },
    Timer(Timer),
}

pub(crate) struct Kernel {
    pub(crate) now: Time,
    pub(crate) rng: Rng,
    pub(crate) network: Network,
    /// How the master is to die, in a script.
    pub(crate) master_death: Option<MasterDeath>,
    queue: BTreeMap<(Time, u64), (Pid, Action)>,
    next: u64,
    trace: u64,
    /// Messages that take long, per thousand.
    slow_messages: u64,
    pub(crate) log_lines: usize,
    /// The last things that happened, and how often each kind did.
    pub(crate) log: VecDeque<String>,
    pub(crate) counts: BTreeMap<&'static str, u64>,
}

pub(crate) fn millis(n: u64) -> Duration {
    Duration::from_millis(n)
}

impl Kernel {
    pub(crate) fn new(seed: u64, slow_messages: u64) -> Self {
        Self {
            now: Time::ZERO,
            rng: Rng::new(rng::key(&[seed, 1])),
            network: Network::default(),
            master_death: None,
            queue: BTreeMap::new(),
            next: 0,
            trace: seed,
            slow_messages,
            log_lines: LOG_LINES,
            log: VecDeque::new(),
            counts: BTreeMap::new(),
        }
    }

    /// The next action in time, and the process that it concerns.
    pub(crate) fn next(&mut self) -> Option<(Pid, Action)> {
        let ((at, number), (pid, action)) = self.queue.pop_first()?;
        self.now = at;
        let length = match &action {
            Action::Deliver { message, .. } => message.len() as u64,
            Action::Broken { .. } | Action::Timer(_) => 0,
        };
        self.trace(rng::key(&[number, nanos(at), u64::from(pid), length]));
        Some((pid, action))
    }

    /// Mixes a number into the trace.
    pub(crate) fn trace(&mut self, number: u64) {
        self.trace = rng::key(&[self.trace, number]);
    }

    pub(crate) fn trace_of_all(&self) -> u64 {
        self.trace
    }

    pub(crate) fn count(&mut self, kind: &'static str) {
        *self.counts.entry(kind).or_default() += 1;
    }

    /// Counts `kind` and keeps a line of the log.
    pub(crate) fn note(&mut self, pid: Pid, kind: &'static str, text: &str) {
        self.count(kind);
        if self.log_lines == 0 {
            return;
        }
        if self.log.len() >= self.log_lines {
            self.log.pop_front();
        }
        let at = self.now.since(Time::ZERO);
        self.log.push_back(format!("{at:>12.3?} {pid:>4} {kind}: {text}"));
    }

    /// A line that only a replay shows.
    pub(crate) fn detail(&mut self, pid: Pid, text: impl FnOnce() -> String) {
        if self.log_lines == usize::MAX {
            let at = self.now.since(Time::ZERO);
            self.log.push_back(format!("{at:>12.3?} {pid:>4}   {}", text()));
        }
    }

    pub(crate) fn chance(&mut self, per_thousand: u64) -> bool {
        per_thousand > 0 && self.rng.below(1000) < per_thousand
    }

    pub(crate) fn between(&mut self, low_ms: u64, high_ms: u64) -> Duration {
        Duration::from_micros(low_ms * 1000 + self.rng.below((high_ms - low_ms) * 1000 + 1))
    }

    /// One of `n` things.
    pub(crate) fn pick(&mut self, n: usize) -> usize {
        usize::try_from(self.rng.below(n as u64)).expect("an index")
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

    /// Opens a connection. One to a dead process breaks when something is sent.
    pub(crate) fn connect(&mut self, open: NewConnection) -> ConnId {
        self.next += 1;
        let conn = ConnId(self.next);
        self.network.insert(conn, open, self.now);
        conn
    }

    /// Sends over a connection, which keeps the order of its messages.
    pub(crate) fn send(&mut self, conn: ConnId, from: Pid, message: Message) {
        let is_slow = self.chance(self.slow_messages);
        let delay = if is_slow { self.between(20, 300) } else { self.between(0, 3) };
        if let Some((to, at, purpose)) = self.network.arrival(conn, from, self.now, delay) {
            self.enqueue(at, to, Action::Deliver { conn, purpose, from, message });
        }
    }

    /// Breaks a connection: what is under way may be lost, and both ends notice later.
    pub(crate) fn hang_up(&mut self, conn: ConnId) {
        let (lost_after, noticed_after) = (self.between(0, 4), self.between(0, 30));
        let Some((ends, at)) = self.network.close(conn, self.now, lost_after) else { return };
        for pid in ends {
            self.enqueue(at + noticed_after, pid, Action::Broken { conn });
        }
    }

    /// Breaks all connections of a process that is gone.
    pub(crate) fn hang_up_all(&mut self, pid: Pid) {
        for conn in self.network.open_of(pid) {
            self.hang_up(conn);
        }
    }

    /// Any open connection.
    pub(crate) fn any_conn(&mut self) -> Option<ConnId> {
        let open = self.network.open();
        (!open.is_empty()).then(|| open[self.pick(open.len())])
    }

    /// Disconnects two processes from each other for some time.
    pub(crate) fn block(&mut self, a: Pid, b: Pid, time: Duration) {
        self.network.block(a, b, self.now + time);
    }
}

fn nanos(time: Time) -> u64 {
    u64::try_from(time.since(Time::ZERO).as_nanos()).expect("a simulation is short")
}
