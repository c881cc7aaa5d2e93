// SPDX-License-Identifier: Apache-2.0
//! The processes that take part: who is connected, who is silent, who is kept out of worlds.

use std::collections::BTreeMap;
use std::time::Duration;

use super::{Held, Peer, Suspect};
use crate::id::{Incarnation, PsId, WorkerId};
use crate::platform::{InstanceId, Role};
use crate::spec::JobSpec;
use crate::time::Time;

/// A process that was started but never connected is replaced after this and the heartbeat's time.
const START_TIMEOUT: Duration = Duration::from_secs(10);
/// The libraries of a model may load slowly, no matter how short its batches are.
const READY_TIMEOUT: Duration = Duration::from_secs(300);
/// A worker that others lost is in no world for so long, doubled by each further loss.
const FIRST_BAN: Duration = Duration::from_millis(500);
const MAX_BAN: Duration = Duration::from_secs(60);
/// A busy worker is replaced when others lost it so often without a step in between.
const MAX_LOST: u32 = 3;

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Worker {
    pub incarnation: Incarnation,
    pub pid: u32,
    pub is_connected: bool,
    pub is_leaving: bool,
    /// Leases that it can hold at once; zero until it is ready.
    pub capacity: u32,
    /// The worker that it waits for, by its last heartbeat; empty while it is busy.
    pub waiting_for: String,
    /// Under AllReduce, its address and what it holds.
    pub peer: Option<Peer>,
    last_heard: Time,
    connected_at: Time,
    /// It gets no work before this.
    not_before: Time,
    /// What it said it works on, until the servers are known to continue.
    held: Vec<Held>,
    /// What it worked on last.
    suspect: Option<Suspect>,
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
            capacity: 0,
            waiting_for: String::new(),
            peer: None,
            last_heard: now,
            connected_at: now,
            not_before: now,
            held: Vec::new(),
            suspect: None,
            banned_until: now,
            n_bans: 0,
            n_lost: 0,
            unfit_until: now,
        }
    }

    pub(super) fn is_ready(&self) -> bool {
        self.is_connected && self.capacity > 0 && !self.is_leaving
    }

    /// The step whose state it holds.
    pub(super) fn step(&self) -> Option<u64> {
        self.peer.as_ref().and_then(|peer| peer.step)
    }

    /// Whether it may stay where it is, but can join no other world.
    pub(super) fn is_unfit(&self, now: Time) -> bool {
        self.is_leaving || self.unfit_until > now
    }

    pub(super) fn is_banned(&self, now: Time) -> bool {
        self.banned_until > now
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Server {
    incarnation: Incarnation,
    pid: u32,
    last_heard: Time,
    is_connected: bool,
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
    awaited: BTreeMap<InstanceId, Time>,
}

impl Roster {
    pub(super) fn new(spec: &JobSpec) -> Self {
        let timeout = spec.heartbeat_timeout();
        let to_start = if spec.is_own_loop() { READY_TIMEOUT } else { START_TIMEOUT };
        Self {
            timeout,
            ready_timeout: spec.task_timeout().max(READY_TIMEOUT),
            worker_start_timeout: timeout + to_start,
            workers: BTreeMap::new(),
            servers: BTreeMap::new(),
            awaited: BTreeMap::new(),
        }
    }

    pub(super) fn worker(&self, worker: WorkerId) -> Option<&Worker> {
        self.workers.get(&worker)
    }

    pub(super) fn workers(&self) -> &BTreeMap<WorkerId, Worker> {
        &self.workers
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
        self.workers.insert(worker, Worker::new(incarnation, pid, now));
    }

    /// Whether this is the known incarnation of the worker; if so, it is alive.
    pub(super) fn hears_worker(&mut self, worker: WorkerId, of: Incarnation, now: Time) -> bool {
        let known = self.workers.get_mut(&worker).filter(|known| known.incarnation == of);
        known.map(|known| known.last_heard = now).is_some()
    }

    pub(super) fn worker_waits(&mut self, worker: WorkerId, waiting_for: String) {
        self.edit(worker, |entry| entry.waiting_for = waiting_for);
    }

    pub(super) fn worker_ready(
        &mut self,
        worker: WorkerId,
        capacity: u32,
        held: Vec<Held>,
        peer: Option<Peer>,
    ) {
        let capacity = capacity.max(1);
        self.edit(worker, |w| (w.peer, w.capacity, w.held) = (peer, capacity, held));
    }

    /// What a worker said it works on, once.
    pub(super) fn take_held(&mut self, worker: WorkerId) -> Vec<Held> {
        self.workers.get_mut(&worker).map(|w| std::mem::take(&mut w.held)).unwrap_or_default()
    }

    pub(super) fn worker_disconnected(&mut self, worker: WorkerId) {
        self.edit(worker, |entry| (entry.is_connected, entry.capacity) = (false, 0));
    }

    pub(super) fn worker_leaves(&mut self, worker: WorkerId) {
        self.edit(worker, |entry| entry.is_leaving = true);
    }

    /// Sets what a worker was working on.
    pub(super) fn suspect(&mut self, worker: WorkerId, suspect: Option<Suspect>) {
        self.edit(worker, |entry| entry.suspect = suspect);
    }

    /// Forgets a worker; returns what it was working on.
    pub(super) fn remove_worker(&mut self, worker: WorkerId) -> Option<Suspect> {
        self.workers.remove(&worker)?.suspect
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
        if let Some(peer) = &mut entry.peer {
            peer.step = Some(step);
        }
    }

    /// Keeps a worker out of worlds until `until`.
    pub(super) fn ban(&mut self, worker: WorkerId, until: Time) {
        self.edit(worker, |entry| entry.banned_until = until);
    }

    /// Keeps a worker out of worlds for a while, longer each time.
    pub(super) fn shun(&mut self, worker: WorkerId, now: Time) {
        let Some(entry) = self.workers.get_mut(&worker) else { return };
        let doubled = FIRST_BAN * 2_u32.saturating_pow(entry.n_bans.min(8));
        entry.n_bans += 1;
        entry.banned_until = now + doubled.min(MAX_BAN);
    }

    /// The same, even for a world of its own: it could not use its own state.
    pub(super) fn shun_as_unfit(&mut self, worker: WorkerId, now: Time) {
        self.shun(worker, now);
        self.edit(worker, |entry| entry.unfit_until = entry.banned_until);
    }

    /// Another worker lost this one; whether that happened too often. A worker that waits for
    /// others gets more chances, but one that never finishes a step must not delay the job.
    pub(super) fn is_lost_too_often(&mut self, worker: WorkerId) -> bool {
        let Some(entry) = self.workers.get_mut(&worker) else { return false };
        entry.n_lost += 1;
        entry.n_lost >= if entry.waiting_for.is_empty() { MAX_LOST } else { 2 * MAX_LOST }
    }

    /// Lifts all bans: the process that caused them may be gone.
    pub(super) fn pardon_all(&mut self, now: Time) {
        for worker in self.workers.values_mut() {
            (worker.banned_until, worker.n_bans) = (now, 0);
        }
    }

    /// Whether the server was connected as another process until now.
    pub(super) fn server_connected(
        &mut self,
        ps: PsId,
        incarnation: Incarnation,
        pid: u32,
        now: Time,
    ) -> bool {
        self.awaited.remove(&ps.into());
        let server = Server { incarnation, pid, last_heard: now, is_connected: true };
        let before = self.servers.insert(ps, server);
        before.is_some_and(|before| before.is_connected && before.incarnation != incarnation)
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

    pub(super) fn remove_server(&mut self, ps: PsId) {
        self.servers.remove(&ps);
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
        self.awaited.insert(instance, now);
    }

    /// A process runs. It may have connected before the platform reported it.
    pub(super) fn started(&mut self, instance: InstanceId, now: Time) {
        let is_here = match instance.role {
            Role::Worker => self.workers.contains_key(&WorkerId(instance.id)),
            Role::Ps => self.servers.contains_key(&PsId(instance.id)),
            Role::Master => true,
        };
        if !is_here {
            self.awaited.insert(instance, now);
        }
    }

    /// A process cannot be expected to connect.
    pub(super) fn not_running(&mut self, instance: InstanceId) {
        self.awaited.remove(&instance);
    }

    /// Whether a process was started a short while ago and has not connected yet.
    pub(super) fn is_awaited(&self, instance: InstanceId, now: Time) -> bool {
        self.awaited.get(&instance).is_some_and(|since| now.since(*since) < self.timeout)
    }

    /// The master was paused: others were not silent, it did not listen.
    pub(super) fn forgive_silence(&mut self, now: Time) {
        self.workers.values_mut().for_each(|worker| worker.last_heard = now);
        self.servers.values_mut().for_each(|server| server.last_heard = now);
        self.awaited.values_mut().for_each(|since| *since = now);
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
        let awaited = self.awaited.iter();
        let late = awaited.flat_map(|(id, since)| [*since + self.timeout, *since + self.limit(id)]);
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
        let why = format!("sent no heartbeat for {:?}", self.timeout);
        silent.map(|(ps, _)| (*ps, why.clone())).collect()
    }

    /// Workers that were silent or not ready for too long, with the reason.
    pub(super) fn lost_workers(&self, now: Time) -> Vec<(WorkerId, String)> {
        let (timeout, ready_timeout) = (self.timeout, self.ready_timeout);
        let why = |worker: &Worker| {
            if now.since(worker.last_heard) >= timeout {
                return Some(format!("sent no heartbeat for {timeout:?}; reassigning its work"));
            }
            let is_late = now.since(worker.connected_at) >= ready_timeout;
            (worker.capacity == 0 && is_late)
                .then(|| format!("was not ready after {ready_timeout:?}; replacing it"))
        };
        self.workers.iter().filter_map(|(id, worker)| Some((*id, why(worker)?))).collect()
    }

    /// Processes that were started but did not connect in time; they are no longer awaited.
    pub(super) fn take_late(&mut self, now: Time) -> Vec<InstanceId> {
        let is_late = |(id, since): &(&InstanceId, &Time)| now.since(**since) >= self.limit(id);
        let late: Vec<InstanceId> =
            self.awaited.iter().filter(is_late).map(|(id, _)| *id).collect();
        late.iter().for_each(|id| _ = self.awaited.remove(id));
        late
    }
}
