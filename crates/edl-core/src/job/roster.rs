// SPDX-License-Identifier: Apache-2.0
//! The processes that take part: which are connected, silent, or kept out of worlds.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::time::Duration;

use super::{HeldLease, Peer, Suspect};
use crate::activity::WaitingFor;
use crate::id::{Incarnation, PsId, WorkerId};
use crate::platform::{InstanceId, InstanceState, Role};
use crate::spec::JobSpec;
use crate::time::Time;
use crate::world::Candidate;

/// A process that was started but never connected is replaced after this and the heartbeat's time.
const START_TIMEOUT: Duration = Duration::from_secs(10);
/// The libraries of a model may load slowly, no matter how short its batches are.
const READY_TIMEOUT: Duration = Duration::from_secs(300);
/// A worker that others lost is kept out of worlds for this long, doubled by each further loss.
const FIRST_BAN: Duration = Duration::from_millis(500);
const MAX_BAN: Duration = Duration::from_secs(60);
/// A busy worker is replaced when others lost it this often without a step in between.
const MAX_LOST: u32 = 3;

/// A worker to replace.
pub(super) struct Lost {
    pub worker: WorkerId,
    pub why: String,
    /// It is alive, but was never ready.
    pub is_start: bool,
}

/// What may have crashed a worker: steps of which it trained one, or work that it held.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Suspects {
    pub steps: Option<Range<u64>>,
    pub work: BTreeSet<Suspect>,
}

impl Suspects {
    pub(super) fn is_empty(&self) -> bool {
        self.steps.is_none() && self.work.is_empty()
    }
}

#[derive(Clone, Debug, PartialEq)]
struct Worker {
    incarnation: Incarnation,
    pid: u32,
    is_connected: bool,
    is_leaving: bool,
    /// With servers and spares: it is not a spare.
    is_trainer: bool,
    /// Leases that it can hold at once; zero until it is ready.
    capacity: u32,
    /// What it waits for, by its last heartbeat.
    waiting_for: WaitingFor,
    waiting_since: Time,
    /// Under AllReduce, its address and what it holds.
    peer: Option<Peer>,
    /// The highest step that it ever held.
    furthest: u64,
    last_heard: Time,
    /// When it was pinged, and the ticks since; none if it was heard since.
    pinged: Option<(Time, u32)>,
    /// It did not answer.
    is_frozen: bool,
    /// What it has computed, and since when, by its heartbeats.
    progress: Option<(u64, Time)>,
    connected_at: Time,
    /// It gets no work before this.
    not_before: Time,
    /// What it claims to work on, until the servers are known to continue.
    held: Vec<HeldLease>,
    /// What it worked on last.
    suspects: Suspects,
    /// Others lost it: it is in no world before this.
    banned_until: Time,
    n_bans: u32,
    /// How often others lost it since its last step.
    n_lost: u32,
    /// It could not use its own state: it is in no world before this, even alone.
    unfit_until: Time,
}

impl Worker {
    fn new(incarnation: Incarnation, pid: u32, now: Time) -> Self {
        Self {
            incarnation,
            pid,
            is_connected: true,
            is_leaving: false,
            is_trainer: false,
            capacity: 0,
            waiting_for: WaitingFor::Nothing,
            waiting_since: now,
            peer: None,
            furthest: 0,
            last_heard: now,
            pinged: None,
            is_frozen: false,
            progress: None,
            connected_at: now,
            not_before: now,
            held: Vec::new(),
            suspects: Suspects::default(),
            banned_until: now,
            n_bans: 0,
            n_lost: 0,
            unfit_until: now,
        }
    }

    fn is_ready(&self) -> bool {
        self.has_model() && !self.is_frozen
    }

    fn has_model(&self) -> bool {
        self.is_connected && self.capacity > 0 && !self.is_leaving
    }

    fn heard(&mut self, now: Time) {
        (self.last_heard, self.pinged, self.is_frozen) = (now, None, false);
    }
}

/// What is known of a busy worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Watch {
    Heard,
    /// It was silent for a while, and should be pinged.
    Silent,
    /// It has just become clear that it does not answer.
    Frozen,
}

/// What a worker does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Doing {
    /// Its model is built.
    pub has_model: bool,
    pub waiting_for: WaitingFor,
    /// Without progress.
    pub time: Duration,
    pub silence: Duration,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Server {
    pub incarnation: Incarnation,
    pub is_connected: bool,
    pid: u32,
    last_heard: Time,
}

/// Workers and servers that have connected, and processes that have not yet.
#[derive(Clone, Debug)]
pub(super) struct Roster {
    timeout: Duration,
    ready_timeout: Duration,
    /// A custom training loop connects after its imports, when it is ready.
    worker_start_timeout: Duration,
    workers: BTreeMap<WorkerId, Worker>,
    servers: BTreeMap<PsId, Server>,
    /// Started, but not yet connected.
    awaited: BTreeMap<InstanceId, Awaited>,
}

/// A process that should connect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Awaited {
    since: Time,
    /// It is replaced after this long.
    limit: Duration,
}

impl Roster {
    pub(super) fn new(spec: &JobSpec) -> Self {
        let timeout = spec.heartbeat_timeout();
        let to_start = if spec.is_custom_loop() { READY_TIMEOUT } else { START_TIMEOUT };
        Self {
            timeout,
            ready_timeout: spec.task_timeout().max(READY_TIMEOUT),
            worker_start_timeout: timeout + to_start,
            workers: BTreeMap::new(),
            servers: BTreeMap::new(),
            awaited: BTreeMap::new(),
        }
    }

    pub(super) fn worker_ids(&self) -> impl ExactSizeIterator<Item = WorkerId> + '_ {
        self.workers.keys().copied()
    }

    /// The workers that are ready or frozen.
    pub(super) fn workers_with_model(&self) -> impl Iterator<Item = WorkerId> + '_ {
        self.workers.iter().filter(|(_, worker)| worker.has_model()).map(|(id, _)| *id)
    }

    pub(super) fn ready_workers(&self) -> impl Iterator<Item = WorkerId> + '_ {
        self.workers.iter().filter(|(_, worker)| worker.is_ready()).map(|(id, _)| *id)
    }

    pub(super) fn is_ready(&self, worker: WorkerId) -> bool {
        self.workers.get(&worker).is_some_and(Worker::is_ready)
    }

    pub(super) fn is_trainer(&self, worker: WorkerId) -> bool {
        self.workers.get(&worker).is_some_and(|known| known.is_trainer)
    }

    /// Chooses the workers that are assigned work, `most` of them. One that was chosen before stays
    /// as long as it can work. Returns the new ones.
    pub(super) fn choose_trainers(&mut self, most: usize, now: Time) -> Vec<WorkerId> {
        let able = self.workers.iter().filter(|(_, w)| w.is_ready() && w.not_before <= now);
        let mut able: Vec<_> = able.map(|(id, worker)| (!worker.is_trainer, *id)).collect();
        able.sort_unstable();
        able.truncate(most);
        self.workers.values_mut().for_each(|worker| worker.is_trainer = false);
        able.iter().for_each(|(_, id)| self.edit(*id, |worker| worker.is_trainer = true));
        able.into_iter().filter(|(is_new, _)| *is_new).map(|(_, id)| id).collect()
    }

    /// The workers that hold a stream, with their process ids and states.
    pub(super) fn connected_workers(
        &self,
        is_spare: impl Fn(WorkerId) -> bool,
        has_joined: impl Fn(WorkerId) -> bool,
    ) -> impl Iterator<Item = (WorkerId, u32, InstanceState)> {
        let connected = self.workers.iter().filter(|(_, worker)| worker.is_connected);
        connected.map(move |(id, worker)| {
            let state = match worker {
                _ if worker.is_leaving => InstanceState::Leaving,
                _ if worker.is_ready() && is_spare(*id) => InstanceState::Spare,
                _ if worker.is_ready() && has_joined(*id) => InstanceState::Working,
                _ => InstanceState::Joining,
            };
            (*id, worker.pid, state)
        })
    }

    /// The workers that could be in a world, if their state counts for `is_holder`.
    pub(super) fn candidates(
        &self,
        is_holder: impl Fn(WorkerId, Incarnation) -> bool,
        now: Time,
    ) -> BTreeMap<WorkerId, Candidate> {
        let ready = self.workers.iter().filter(|(_, w)| w.is_connected && w.capacity > 0);
        let candidate = |(id, worker): (&WorkerId, &Worker)| {
            let incarnation = worker.incarnation;
            let step = self.step(*id).filter(|_| is_holder(*id, incarnation));
            let is_unfit = worker.is_leaving || worker.unfit_until > now;
            let is_banned = worker.banned_until > now || worker.is_frozen;
            (*id, Candidate { incarnation, step, is_unfit, is_banned })
        };
        ready.map(candidate).collect()
    }

    pub(super) fn incarnation(&self, worker: WorkerId) -> Option<Incarnation> {
        self.workers.get(&worker).map(|known| known.incarnation)
    }

    pub(super) fn is_connected(&self, worker: WorkerId) -> bool {
        self.workers.get(&worker).is_some_and(|known| known.is_connected)
    }

    pub(super) fn is_leaving(&self, worker: WorkerId) -> bool {
        self.workers.get(&worker).is_some_and(|known| known.is_leaving)
    }

    /// Whether a worker did not answer, and was not heard since.
    pub(super) fn is_frozen(&self, worker: WorkerId) -> bool {
        self.workers.get(&worker).is_some_and(|known| known.is_frozen)
    }

    /// Whether a worker is not ready, but may become so.
    pub(super) fn is_away(&self, worker: WorkerId) -> bool {
        self.workers.get(&worker).is_some_and(|known| known.capacity == 0 && !known.is_leaving)
    }

    pub(super) fn waiting_for(&self, worker: WorkerId) -> WaitingFor {
        self.workers.get(&worker).map_or(WaitingFor::Nothing, |known| known.waiting_for)
    }

    pub(super) fn peer(&self, worker: WorkerId) -> Option<&Peer> {
        self.workers.get(&worker)?.peer.as_ref()
    }

    /// The step whose state a worker holds.
    pub(super) fn step(&self, worker: WorkerId) -> Option<u64> {
        self.peer(worker).and_then(|peer| peer.step)
    }

    fn edit(&mut self, worker: WorkerId, change: impl FnOnce(&mut Worker)) {
        if let Some(entry) = self.workers.get_mut(&worker) {
            change(entry);
        }
    }

    pub(super) fn worker_connected(
        &mut self,
        worker: WorkerId,
        incarnation: Incarnation,
        pid: u32,
        now: Time,
    ) {
        self.awaited.remove(&worker.into());
        let before = self.workers.insert(worker, Worker::new(incarnation, pid, now));
        if let Some(before) = before.filter(|before| before.incarnation == incarnation) {
            self.edit(worker, |entry| entry.furthest = before.furthest);
        }
    }

    /// Whether this is the known incarnation of the worker; if so, it is alive.
    pub(super) fn hears_worker(&mut self, worker: WorkerId, of: Incarnation, now: Time) -> bool {
        let known = self.workers.get_mut(&worker).filter(|known| known.incarnation == of);
        known.map(|known| known.heard(now)).is_some()
    }

    /// The ready workers that [`Roster::watch`] may do anything about.
    pub(super) fn quiet_workers(
        &self,
        timeout: Duration,
        now: Time,
    ) -> impl Iterator<Item = WorkerId> + '_ {
        let is_quiet = move |known: &Worker| {
            known.is_ready()
                && (known.pinged.is_some() || now.since(known.last_heard) >= timeout / 2)
        };
        self.workers.iter().filter(move |(_, known)| is_quiet(known)).map(|(id, _)| *id)
    }

    /// Watches a busy worker, once per `tick`. Ticks are counted as well as time: a master that was
    /// stopped itself has not listened.
    pub(super) fn watch(
        &mut self,
        worker: WorkerId,
        timeout: Duration,
        tick: Duration,
        now: Time,
    ) -> Watch {
        let Some(known) = self.workers.get_mut(&worker) else { return Watch::Heard };
        let silence = now.since(known.last_heard);
        match &mut known.pinged {
            None if silence >= timeout / 2 => {
                known.pinged = Some((now, 0));
                Watch::Silent
            }
            None => Watch::Heard,
            Some((since, n_ticks)) => {
                *n_ticks += 1;
                let unanswered = now.since(*since).min(tick * *n_ticks);
                known.is_frozen = silence >= timeout && unanswered >= timeout / 2;
                if known.is_frozen { Watch::Frozen } else { Watch::Heard }
            }
        }
    }

    /// By its heartbeat, what a worker waits for and what it has computed so far; how long one item
    /// took it, if there is a new one.
    pub(super) fn worker_heartbeat(
        &mut self,
        worker: WorkerId,
        waiting_for: WaitingFor,
        progress: u64,
        now: Time,
    ) -> Option<Duration> {
        let known = self.workers.get_mut(&worker)?;
        if known.waiting_for != waiting_for {
            (known.waiting_for, known.waiting_since) = (waiting_for, now);
        }
        let (before, since) = *known.progress.get_or_insert((progress, now));
        let n_new = progress.checked_sub(before).filter(|n_new| *n_new > 0)?;
        known.progress = Some((progress, now));
        Some(now.since(since) / u32::try_from(n_new).unwrap_or(u32::MAX))
    }

    /// What a connected worker does, for how long without progress, and how long it is silent.
    pub(super) fn doing(&self, worker: WorkerId, now: Time) -> Option<Doing> {
        let known = self.workers.get(&worker).filter(|known| known.is_connected)?;
        let progressed = known.progress.map_or(known.connected_at, |(_, since)| since);
        Some(Doing {
            has_model: known.capacity > 0,
            waiting_for: known.waiting_for,
            time: now.since(known.waiting_since.max(progressed)),
            silence: now.since(known.last_heard),
        })
    }

    pub(super) fn worker_ready(
        &mut self,
        worker: WorkerId,
        capacity: u32,
        held: Vec<HeldLease>,
        peer: Option<Peer>,
    ) {
        let capacity = capacity.max(1);
        let step = peer.as_ref().and_then(|peer| peer.step).unwrap_or(0);
        self.edit(worker, |w| {
            (w.peer, w.capacity, w.held) = (peer, capacity, held);
            w.furthest = w.furthest.max(step);
        });
    }

    /// What a worker claims to work on, once.
    pub(super) fn take_held(&mut self, worker: WorkerId) -> Vec<HeldLease> {
        self.workers.get_mut(&worker).map(|w| std::mem::take(&mut w.held)).unwrap_or_default()
    }

    pub(super) fn worker_disconnected(&mut self, worker: WorkerId) {
        self.edit(worker, |entry| (entry.is_connected, entry.capacity) = (false, 0));
    }

    pub(super) fn worker_leaves(&mut self, worker: WorkerId) {
        self.edit(worker, |entry| entry.is_leaving = true);
    }

    /// Sets what a worker was working on.
    pub(super) fn suspect(&mut self, worker: WorkerId, suspects: Suspects) {
        self.edit(worker, |entry| entry.suspects = suspects);
    }

    /// Forgets a worker; returns what it was working on.
    pub(super) fn remove_worker(&mut self, worker: WorkerId) -> Suspects {
        self.workers.remove(&worker).map(|known| known.suspects).unwrap_or_default()
    }

    /// How many leases a worker can hold; none if it can take no work now.
    pub(super) fn capacity(&self, worker: WorkerId, now: Time) -> Option<u32> {
        let known = self.workers.get(&worker).filter(|w| w.is_ready() && w.not_before <= now);
        known.map(|worker| worker.capacity)
    }

    /// Assigns nothing to a worker before `until`.
    pub(super) fn pause(&mut self, worker: WorkerId, until: Time) {
        self.edit(worker, |entry| entry.not_before = until);
    }

    /// A worker holds the state of `step`.
    pub(super) fn set_step(&mut self, worker: WorkerId, step: u64) {
        let Some(entry) = self.workers.get_mut(&worker) else { return };
        entry.n_lost = 0;
        entry.furthest = entry.furthest.max(step);
        if let Some(peer) = &mut entry.peer {
            peer.step = Some(step);
        }
    }

    /// The highest step that the process of a worker ever held; it may have gone back since.
    pub(super) fn furthest_step(&self, worker: WorkerId) -> u64 {
        self.workers.get(&worker).map_or(0, |entry| entry.furthest)
    }

    /// Keeps a worker out of worlds until `until`.
    pub(super) fn ban_until(&mut self, worker: WorkerId, until: Time) {
        self.edit(worker, |entry| entry.banned_until = until);
    }

    /// Keeps a worker out of worlds for a while, longer each time.
    pub(super) fn ban(&mut self, worker: WorkerId, now: Time) {
        let Some(entry) = self.workers.get_mut(&worker) else { return };
        let doubled = FIRST_BAN * 2_u32.saturating_pow(entry.n_bans.min(8));
        entry.n_bans += 1;
        entry.banned_until = now + doubled.min(MAX_BAN);
    }

    /// The same, even for a world with no other member: it could not use its own state.
    pub(super) fn ban_as_unfit(&mut self, worker: WorkerId, now: Time) {
        self.ban(worker, now);
        self.edit(worker, |entry| entry.unfit_until = entry.banned_until);
    }

    /// Another worker lost this one; whether that happened too often. A worker that waits for
    /// others gets more chances, but one that never finishes a step must not delay the job.
    pub(super) fn is_lost_too_often(&mut self, worker: WorkerId) -> bool {
        let Some(entry) = self.workers.get_mut(&worker) else { return false };
        entry.n_lost += 1;
        let is_busy = entry.waiting_for == WaitingFor::Nothing;
        entry.n_lost >= if is_busy { MAX_LOST } else { 2 * MAX_LOST }
    }

    /// Lifts all bans: the process that caused them may be gone.
    pub(super) fn pardon_all(&mut self, now: Time) {
        for worker in self.workers.values_mut() {
            (worker.banned_until, worker.n_bans) = (now, 0);
        }
    }

    /// A process has connected as this server; returns the process before it.
    pub(super) fn server_connected(
        &mut self,
        ps: PsId,
        incarnation: Incarnation,
        pid: u32,
        now: Time,
    ) -> Option<Server> {
        self.awaited.remove(&ps.into());
        let server = Server { incarnation, is_connected: true, pid, last_heard: now };
        self.servers.insert(ps, server).filter(|before| before.incarnation != incarnation)
    }

    fn edit_server(&mut self, ps: PsId, of: Incarnation, change: impl FnOnce(&mut Server)) {
        if let Some(known) = self.servers.get_mut(&ps).filter(|known| known.incarnation == of) {
            change(known);
        }
    }

    pub(super) fn server_disconnected(&mut self, ps: PsId, incarnation: Incarnation) {
        self.edit_server(ps, incarnation, |known| known.is_connected = false);
    }

    pub(super) fn hears_server(&mut self, ps: PsId, incarnation: Incarnation, now: Time) {
        self.edit_server(ps, incarnation, |known| known.last_heard = now);
    }

    /// Forgets a server; returns which process it was.
    pub(super) fn remove_server(&mut self, ps: PsId) -> Option<Incarnation> {
        self.servers.remove(&ps).map(|lost| lost.incarnation)
    }

    /// Whether the process with this id is the known server, or none is known.
    pub(super) fn is_server(&self, ps: PsId, pid: u32) -> bool {
        self.servers.get(&ps).is_none_or(|known| known.pid == pid)
    }

    /// The servers that hold a stream, with their process ids.
    pub(super) fn connected_servers(&self) -> impl Iterator<Item = (PsId, u32)> + '_ {
        self.servers.iter().filter(|(_, known)| known.is_connected).map(|(ps, s)| (*ps, s.pid))
    }

    /// A process was ordered, and is expected to connect.
    pub(super) fn launched(&mut self, instance: InstanceId, now: Time) {
        self.awaited.insert(instance, Awaited { since: now, limit: self.limit(&instance) });
    }

    /// A process runs, and has done so for `age`. It may have connected before the platform
    /// reported it. One that ran long before this master has had its time to start.
    pub(super) fn started(&mut self, instance: InstanceId, age: Duration, now: Time) {
        let is_here = match instance.role {
            Role::Worker => self.workers.contains_key(&WorkerId(instance.id)),
            Role::Ps => self.servers.contains_key(&PsId(instance.id)),
            Role::Master => true,
        };
        if !is_here {
            let limit = self.limit(&instance).saturating_sub(age).max(self.timeout);
            self.awaited.insert(instance, Awaited { since: now, limit });
        }
    }

    /// A process cannot be expected to connect.
    pub(super) fn not_running(&mut self, instance: InstanceId) {
        self.awaited.remove(&instance);
    }

    /// Whether a process was started a short while ago and has not connected yet.
    pub(super) fn is_awaited(&self, instance: InstanceId, now: Time) -> bool {
        self.awaited.get(&instance).is_some_and(|awaited| now.since(awaited.since) < self.timeout)
    }

    /// The master was paused: others were not silent, it did not listen.
    pub(super) fn forgive_silence(&mut self, now: Time) {
        self.workers.values_mut().for_each(|worker| worker.heard(now));
        self.servers.values_mut().for_each(|server| server.last_heard = now);
        self.awaited.values_mut().for_each(|awaited| awaited.since = now);
    }

    /// Whether no process is connected or expected.
    pub(super) fn is_empty(&self) -> bool {
        self.workers.is_empty() && self.servers.is_empty() && self.awaited.is_empty()
    }

    /// When processes become silent or late, and when pauses and bans end.
    pub(super) fn deadlines(&self) -> impl Iterator<Item = Time> + '_ {
        let workers = self.workers.values().flat_map(|worker| {
            let Worker { last_heard, connected_at, .. } = worker;
            let ends = [worker.not_before, worker.banned_until, worker.unfit_until];
            let lost = [*last_heard + self.timeout, *connected_at + self.ready_timeout];
            ends.into_iter().chain(lost)
        });
        let servers = self.servers.values().map(|server| server.last_heard + self.timeout);
        let late = self
            .awaited
            .values()
            .flat_map(|Awaited { since, limit }| [*since + self.timeout, *since + *limit]);
        workers.chain(servers).chain(late)
    }

    /// How long a process may take to connect.
    fn limit(&self, instance: &InstanceId) -> Duration {
        match instance.role {
            Role::Worker => self.worker_start_timeout,
            Role::Ps | Role::Master => self.timeout + START_TIMEOUT,
        }
    }

    /// Servers that were silent for too long, with the reason.
    pub(super) fn silent_servers(&self, now: Time) -> Vec<(PsId, String)> {
        let is_silent = |server: &Server| now.since(server.last_heard) >= self.timeout;
        let silent = self.servers.iter().filter(|(_, server)| is_silent(server));
        let why = || format!("sent no heartbeat for {:?}", self.timeout);
        silent.map(|(ps, _)| (*ps, why())).collect()
    }

    /// Workers that were silent or not ready for too long, with the reason.
    pub(super) fn lost_workers(&self, now: Time) -> Vec<Lost> {
        let (timeout, ready_timeout) = (self.timeout, self.ready_timeout);
        let lost = |(id, worker): (&WorkerId, &Worker)| {
            let is_silent = now.since(worker.last_heard) >= timeout;
            let is_late = now.since(worker.connected_at) >= ready_timeout;
            let is_start = !is_silent && worker.capacity == 0 && is_late;
            if !is_silent && !is_start {
                return None;
            }
            let why = match is_silent {
                true => format!("sent no heartbeat for {timeout:?}; reassigning its work"),
                false => format!(
                    "was not ready after {ready_timeout:?}: importing or building the model takes \
                     too long or hangs"
                ),
            };
            Some(Lost { worker: *id, why, is_start })
        };
        self.workers.iter().filter_map(lost).collect()
    }

    /// Processes that were started but did not connect in time; they are no longer awaited.
    pub(super) fn take_late(&mut self, now: Time) -> Vec<InstanceId> {
        let is_late =
            |(_, awaited): &(&InstanceId, &Awaited)| now.since(awaited.since) >= awaited.limit;
        let late: Vec<InstanceId> =
            self.awaited.iter().filter(is_late).map(|(id, _)| *id).collect();
        late.iter().for_each(|id| _ = self.awaited.remove(id));
        late
    }
}
