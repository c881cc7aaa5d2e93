// SPDX-License-Identifier: Apache-2.0
//! Workers that come, fall silent, fail and leave; processes that are started and end.

use std::time::Duration;

use super::{Command, Effect, Held, Job, Peer, Suspect};
use crate::id::{Incarnation, PsId, WorkerId};
use crate::instances::Cause;
use crate::model::ModelSpec;
use crate::platform::{Ended, Harm, InstanceId, Order, Report, Role};
use crate::pod::Wait;
use crate::time::Time;

/// A process that was started but never called is replaced after this and the heartbeat's time.
const START_TIMEOUT: Duration = Duration::from_secs(10);
/// A model's libraries may take their time to load, however short its batches are.
const READY_TIMEOUT: Duration = Duration::from_secs(300);

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Worker {
    pub incarnation: Incarnation,
    pub pid: u32,
    pub last_heard: Time,
    pub connected_at: Time,
    pub is_connected: bool,
    pub is_leaving: bool,
    /// Leases it wants to hold at once; zero until it is ready.
    pub capacity: u32,
    pub not_before: Time,
    /// What it said it works on, until the servers are known to go on.
    pub held: Vec<Held>,
    /// What it worked on when it was last heard of.
    pub suspect: Option<Suspect>,
    /// Whom it waits for, by its last heartbeat; empty while it is busy itself.
    pub waiting_for: String,
    /// Under AllReduce, how others reach it and what it holds.
    pub peer: Option<Peer>,
    /// Others lost it: it is in no world before this.
    pub banned_until: Time,
    pub n_bans: u32,
    /// How often others lost it since it last came further.
    pub n_lost: u32,
    /// It could not use its own state: it is in no world before this, even alone.
    pub unfit_until: Time,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PsPeer {
    pub incarnation: Incarnation,
    pub pid: u32,
    pub last_heard: Time,
    pub is_connected: bool,
}

impl Worker {
    pub(super) fn is_ready(&self) -> bool {
        self.is_connected && self.capacity > 0 && !self.is_leaving
    }
}

impl Job {
    pub(super) fn worker_connected(
        &mut self,
        worker: WorkerId,
        incarnation: Incarnation,
        pid: u32,
        now: Time,
    ) {
        self.release_worker(worker);
        self.lose_cut_of(worker);
        self.instances.seen_worker(worker.0);
        self.awaited.remove(&InstanceId { role: Role::Worker, id: worker.0 });
        let fresh = Worker {
            incarnation,
            pid,
            last_heard: now,
            connected_at: now,
            is_connected: true,
            is_leaving: false,
            capacity: 0,
            not_before: now,
            held: Vec::new(),
            suspect: None,
            waiting_for: String::new(),
            peer: None,
            banned_until: now,
            n_bans: 0,
            n_lost: 0,
            unfit_until: now,
        };
        self.workers.insert(worker, fresh);
        self.effects.push(Effect::ToWorker(worker, Command::Welcome));
    }

    pub(super) fn worker_heard(&mut self, worker: WorkerId, waiting_for: String) {
        if let Some(entry) = self.workers.get_mut(&worker) {
            entry.waiting_for = waiting_for;
        }
    }

    /// Whether `incarnation` is the worker that we know; if so, it lives.
    pub(super) fn hears_worker(
        &mut self,
        worker: WorkerId,
        incarnation: Incarnation,
        now: Time,
    ) -> bool {
        let Some(known) = self.workers.get_mut(&worker) else { return false };
        if known.incarnation != incarnation {
            return false;
        }
        known.last_heard = now;
        true
    }

    pub(super) fn worker_ready(
        &mut self,
        worker: WorkerId,
        model: ModelSpec,
        capacity: u32,
        held: &[Held],
        peer: Option<Peer>,
        now: Time,
    ) {
        match &self.durable.model {
            None => {
                self.change(|facts| facts.model = Some(model));
            }
            Some(known) if *known == model => {}
            Some(known) => {
                let why = format!(
                    "worker-{worker} loaded model `{}`; this job trains `{}`; start the worker \
                     with the job's model and build",
                    model.name, known.name
                );
                self.note("refused", why.clone());
                return self.effects.push(Effect::RefuseWorker(worker, why));
            }
        }
        if self.is_allreduce() && !self.accept_probe(worker, peer.as_ref()) {
            return;
        }
        let entry = self.workers.get_mut(&worker).expect("it was heard");
        entry.peer = peer;
        entry.capacity = capacity.max(1);
        entry.held = held.to_vec();
        self.lending.add_idle([worker]);
        self.note("worker_joined", format!("worker-{worker} joined"));
        if self.servers.is_serving() {
            self.effects.push(Effect::ToWorker(worker, Command::Route));
            self.adopt_held(worker, now);
        }
    }

    /// Counts what a worker says it holds as lent to it.
    pub(super) fn adopt_held(&mut self, worker: WorkerId, now: Time) {
        if let Some(entry) = self.workers.get_mut(&worker) {
            self.lending.adopt(worker, std::mem::take(&mut entry.held), now);
        }
    }

    pub(super) fn worker_gone(&mut self, worker: WorkerId, incarnation: Incarnation) {
        if self.workers.get(&worker).is_some_and(|known| known.incarnation == incarnation) {
            self.release_worker(worker);
            self.lose_cut_of(worker);
            let entry = self.workers.get_mut(&worker).expect("just seen");
            entry.is_connected = false;
            entry.capacity = 0;
        }
    }

    pub(super) fn worker_leaving(&mut self, worker: WorkerId) {
        if let Some(entry) = self.workers.get_mut(&worker) {
            entry.is_leaving = true;
        }
        self.release_worker(worker);
        if let Some(entry) = self.workers.get_mut(&worker) {
            entry.suspect = None;
        }
        let text = match self.is_allreduce() {
            true => format!("worker-{worker} is draining"),
            false => format!("worker-{worker} drained and returned its tasks"),
        };
        self.note("worker_left", text);
    }

    /// The platform tells who runs and who ended.
    pub(super) fn platform(&mut self, report: &Report, now: Time) {
        match report {
            Report::Started { instance, .. } => self.await_call(*instance, now),
            // They have a new master: those that do not call it are stuck.
            Report::Running(running) => {
                running.iter().for_each(|(instance, _)| self.await_call(*instance, now));
                let workers = running.iter().filter(|(id, _)| id.role == Role::Worker);
                self.pace.survivors = workers.map(|(id, _)| WorkerId(id.id)).collect();
            }
            Report::NotStarted { instance, error } => {
                self.awaited.remove(instance);
                self.note("not_started", format!("{instance} could not be started: {error}"));
            }
            Report::Waiting { instance, why } => self.waits(*instance, why),
            Report::Leaving { instance, how, .. } => {
                self.note("leaving", format!("{instance} is shutting down: it {how}"));
            }
            Report::Trouble(why) => self.trouble(why.as_ref()),
            Report::Granted { workers, leave } => {
                self.instances.let_first_leave(leave);
                self.scale(*workers);
            }
            Report::Ended { .. } => {}
        }
        let Some((instance, cause)) = self.instances.report(report, now) else { return };
        self.awaited.remove(&instance);
        let Report::Ended { how, pid, .. } = report else { return };
        match instance.role {
            Role::Worker => {
                self.worker_ended(WorkerId(instance.id), cause, *how);
                self.pardon_all(now);
            }
            Role::Ps => {
                let ps = PsId(instance.id);
                if self.ps_peers.get(&ps).is_none_or(|peer| peer.pid == *pid) {
                    self.ps_lost(ps, &how.to_string());
                }
            }
            Role::Master => {}
        }
    }

    /// A process does not run yet: nobody can expect its call. Only news are noted.
    fn waits(&mut self, instance: InstanceId, why: &Wait) {
        let Some(known) = self.instances.running().get(&instance) else { return };
        self.awaited.remove(&instance);
        let is_known = known.waits.as_ref().is_some_and(|before| before.is_like(why));
        if !is_known && !why.is_starting() {
            self.note("waiting", format!("{instance} is waiting: {why}"));
        }
    }

    /// The platform can do nothing, or can again.
    fn trouble(&mut self, why: Option<&Wait>) {
        let is_news = match (&self.trouble, why) {
            (Some(before), Some(why)) => !before.is_like(why),
            (before, why) => before.is_some() != why.is_some(),
        };
        if is_news {
            let text = why.map_or_else(|| "processes can be started again".into(), Wait::to_string);
            self.note("platform", text);
        }
        self.trouble = why.cloned();
    }

    /// A process runs, and shall call us; it may have done so before the platform told of it.
    fn await_call(&mut self, instance: InstanceId, now: Time) {
        let has_called = match instance.role {
            Role::Worker => self.workers.contains_key(&WorkerId(instance.id)),
            Role::Ps => self.ps_peers.contains_key(&PsId(instance.id)),
            Role::Master => true,
        };
        if !has_called {
            self.awaited.insert(instance, now);
        }
    }

    fn worker_ended(&mut self, worker: WorkerId, cause: Cause, how: Ended) {
        self.release_worker(worker);
        self.lose_cut_of(worker);
        let suspect = self.workers.remove(&worker).and_then(|entry| entry.suspect);
        // Nobody shall wait for what it held.
        self.worlds.disown(worker);
        self.keep_holders();
        match cause {
            Cause::Left => self.note("worker_ended", format!("worker-{worker} {how}")),
            Cause::Killed => {
                self.note("worker_killed", format!("worker-{worker} {how}; reassigning its work"))
            }
            Cause::Crashed => {
                self.note("worker_crashed", format!("worker-{worker} {how}; see its log"));
                if let Some(suspect) = suspect {
                    self.blame(suspect, worker, &format!("the worker {how}"));
                }
            }
        }
    }

    /// Replaces processes that give no sign of life.
    pub(super) fn check_silence(&mut self, now: Time) {
        let timeout = Duration::from_secs_f64(self.config.spec.heartbeat_timeout_secs);
        self.check_silent_servers(timeout, now);
        let ready_timeout = self.config.spec.task_timeout().max(READY_TIMEOUT);
        let is_unready = |worker: &Worker| {
            worker.capacity == 0 && now.since(worker.connected_at) > ready_timeout
        };
        let is_silent = |worker: &Worker| now.since(worker.last_heard) > timeout;
        let lost: Vec<WorkerId> = self
            .workers
            .iter()
            .filter(|(_, worker)| is_silent(worker) || is_unready(worker))
            .map(|(id, _)| *id)
            .collect();
        for worker in lost {
            self.release_worker(worker);
            self.lose_cut_of(worker);
            let gone = self.workers.remove(&worker).expect("just seen");
            if gone.is_connected {
                let why = if is_silent(&gone) {
                    format!("sent no heartbeat for {timeout:?}; reassigning its work")
                } else {
                    format!("was not ready after {ready_timeout:?}; replacing it")
                };
                let why = format!("worker-{worker} {why}");
                self.note("worker_silent", why.clone());
                self.effects.push(Effect::CloseWorker(worker, why));
            }
            let instance = InstanceId { role: Role::Worker, id: worker.0 };
            self.effects.extend(self.instances.replace(instance).map(Effect::Platform));
        }
        let is_own_loop = self.config.spec.is_own_loop();
        // A script of the user's own calls after its imports, when it is ready.
        let limit = |instance: &InstanceId| match instance.role {
            Role::Worker if is_own_loop => timeout + READY_TIMEOUT,
            Role::Worker | Role::Ps | Role::Master => timeout + START_TIMEOUT,
        };
        let is_late = |instance: &InstanceId, since: Time| now.since(since) > limit(instance);
        let late = self.awaited.iter().filter(|(instance, since)| is_late(instance, **since));
        let late: Vec<InstanceId> = late.map(|(instance, _)| *instance).collect();
        for instance in late {
            self.awaited.remove(&instance);
            self.note("not_heard", format!("{instance} started but never connected; replacing it"));
            self.effects.extend(self.instances.replace(instance).map(Effect::Platform));
        }
    }

    pub(super) fn forget_awaited_ps(&mut self, ps: PsId) {
        self.awaited.remove(&InstanceId { role: Role::Ps, id: ps.0 });
    }

    pub(super) fn replace_ps(&mut self, ps: PsId) {
        let instance = InstanceId { role: Role::Ps, id: ps.0 };
        self.effects.extend(self.instances.replace(instance).map(Effect::Platform));
    }

    pub(super) fn note_order(&mut self, order: &Order, now: Time) {
        match order {
            Order::Launch { instance, memory_percent } => {
                self.awaited.insert(*instance, now);
                if *memory_percent > 100 {
                    let text =
                        format!("{instance} is starting with {memory_percent} % of the memory");
                    self.note("launched", text);
                } else if self.started_at.is_some() {
                    self.note("launched", format!("{instance} is starting"));
                }
            }
            Order::Stop { instance, .. } | Order::Dismiss { instance, .. } => {
                self.note("stopping", format!("{instance} is being stopped"))
            }
            Order::Harm { .. } => {}
        }
    }

    /// Somebody wants to see the job heal.
    pub(super) fn harm(&mut self, instance: InstanceId, harm: Harm) {
        if !self.instances.running().contains_key(&instance) {
            return;
        }
        self.note("chaos", format!("{instance} {harm}"));
        self.effects.push(Effect::Platform(Order::Harm { instance, harm }));
    }

    pub(super) fn scale(&mut self, workers: u32) {
        let before = self.instances.scale(workers);
        if before != workers {
            self.change(|facts| facts.workers_wanted = Some(workers));
            self.note("scaled", format!("number of workers changed from {before} to {workers}"));
        }
    }

    /// The processes of workers and servers that were heard of: address book of the status page.
    pub fn connected_workers(&self) -> impl Iterator<Item = (WorkerId, u32, &'static str)> + '_ {
        self.workers.iter().filter(|(_, worker)| worker.is_connected).map(|(id, worker)| {
            let state = match worker {
                _ if worker.is_leaving => "leaving",
                _ if self.is_allreduce() && !self.worlds.has_formed(*id) => "joining",
                _ if worker.is_ready() => "working",
                _ => "joining",
            };
            (*id, worker.pid, state)
        })
    }

    /// The servers that hold a stream, with their process ids.
    pub fn connected_servers(&self) -> impl Iterator<Item = (PsId, u32)> + '_ {
        self.ps_peers.iter().filter(|(_, peer)| peer.is_connected).map(|(id, peer)| (*id, peer.pid))
    }
}
