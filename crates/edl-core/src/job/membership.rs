// SPDX-License-Identifier: Apache-2.0
//! Workers that connect, fail and leave; processes that start, wait and exit.

use super::refusal::{check_harm, check_scale};
use super::{Command, Effect, End, Held, Job, Peer, Refusal};
use crate::id::{Incarnation, PsId, WorkerId};
use crate::instances::Cause;
use crate::model::ModelSpec;
use crate::optimizer;
use crate::platform::{Ended, Harm, InstanceId, Order, Report, Role};
use crate::pod::Wait;
use crate::time::Time;

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
        self.roster.worker_connected(worker, incarnation, pid, now);
        self.effects.push(Effect::ToWorker(worker, Command::Welcome));
    }

    pub(super) fn worker_ready(
        &mut self,
        worker: WorkerId,
        model: ModelSpec,
        capacity: u32,
        held: Vec<Held>,
        peer: Option<Peer>,
        now: Time,
    ) {
        if let Err(error) = optimizer::resolve(&self.config.spec, &model) {
            return self.end(End::Failed(format!("invalid optimizer: {error}")));
        }
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
        if self.strategy.trains_in_steps() && !self.accept_probe(worker, peer.as_ref()) {
            return;
        }
        self.roster.worker_ready(worker, capacity, held, peer);
        self.lending.add_idle([worker]);
        self.note("worker_joined", format!("worker-{worker} joined"));
        if self.servers().is_serving() {
            self.effects.push(Effect::ToWorker(worker, Command::Route));
            self.adopt_held(worker, now);
        }
    }

    /// Counts what a worker says it holds as assigned to it.
    pub(super) fn adopt_held(&mut self, worker: WorkerId, now: Time) {
        self.lending.adopt(worker, self.roster.take_held(worker), now);
    }

    pub(super) fn worker_gone(&mut self, worker: WorkerId, incarnation: Incarnation) {
        if self.roster.worker(worker).is_some_and(|known| known.incarnation == incarnation) {
            self.release_worker(worker);
            self.lose_cut_of(worker);
            self.roster.worker_disconnected(worker);
        }
    }

    pub(super) fn worker_leaving(&mut self, worker: WorkerId) {
        self.roster.worker_leaves(worker);
        self.release_worker(worker);
        self.roster.suspect(worker, None);
        let text = match self.strategy.trains_in_steps() {
            true => format!("worker-{worker} is draining"),
            false => format!("worker-{worker} drained and returned its tasks"),
        };
        self.note("worker_left", text);
    }

    /// The platform reports which processes run, wait or have exited.
    pub(super) fn platform(&mut self, report: &Report, now: Time) {
        match report {
            Report::Started { instance, .. } => self.roster.started(*instance, now),
            // They have a new master: those that do not connect to it are stuck.
            Report::Running(running) => {
                running.iter().for_each(|(instance, _)| self.roster.started(*instance, now));
                let workers = running.iter().filter(|(id, _)| id.role == Role::Worker);
                if let Some(steps) = self.strategy.steps_mut() {
                    steps.set_survivors(workers.map(|(id, _)| WorkerId(id.id)));
                }
            }
            Report::NotStarted { instance, error } => {
                self.roster.not_running(*instance);
                self.note("not_started", format!("{instance} could not be started: {error}"));
            }
            Report::Waiting { instance, why } => self.waits(*instance, why),
            Report::Leaving { instance, how, .. } => {
                self.note("leaving", format!("{instance} is shutting down: it {how}"));
            }
            Report::Trouble(why) => self.trouble(why.as_ref()),
            Report::Granted { workers, leave } => {
                self.instances.let_first_leave(leave);
                self.set_workers(*workers);
            }
            Report::Ended { .. } => {}
        }
        let Some((instance, cause)) = self.instances.report(report, now) else { return };
        self.roster.not_running(instance);
        let Report::Ended { how, pid, .. } = report else { return };
        match instance.role {
            Role::Worker => {
                self.worker_ended(WorkerId(instance.id), cause, *how);
                self.roster.pardon_all(now);
            }
            Role::Ps => {
                let ps = PsId(instance.id);
                if self.roster.is_server(ps, *pid) {
                    self.ps_lost(ps, &how.to_string());
                }
            }
            Role::Master => {}
        }
    }

    /// A process does not run yet, so it cannot connect. Only a new reason is noted.
    fn waits(&mut self, instance: InstanceId, why: &Wait) {
        let Some(known) = self.instances.running().get(&instance) else { return };
        self.roster.not_running(instance);
        let is_known = known.waits.as_ref().is_some_and(|before| before.is_like(why));
        if !is_known && !why.is_starting() {
            self.note("waiting", format!("{instance} is waiting: {why}"));
        }
    }

    /// The platform cannot start processes, or can again.
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

    fn worker_ended(&mut self, worker: WorkerId, cause: Cause, how: Ended) {
        self.release_worker(worker);
        self.lose_cut_of(worker);
        let suspect = self.roster.remove_worker(worker);
        // No worker must wait for the state that it held.
        if let Some(steps) = self.strategy.steps_mut() {
            steps.worlds_mut().disown(worker);
            self.keep_holders();
        }
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

    /// Replaces processes that are silent, never ready or never connect.
    pub(super) fn check_silence(&mut self, now: Time) {
        self.check_servers(now);
        for (worker, why) in self.roster.lost_workers(now) {
            self.release_worker(worker);
            self.lose_cut_of(worker);
            let is_connected = self.roster.worker(worker).is_some_and(|known| known.is_connected);
            self.roster.remove_worker(worker);
            if is_connected {
                let why = format!("worker-{worker} {why}");
                self.note("worker_silent", why.clone());
                self.effects.push(Effect::CloseWorker(worker, why));
            }
            self.replace(worker);
        }
        for instance in self.roster.take_late(now) {
            self.note("not_heard", format!("{instance} started but never connected; replacing it"));
            self.replace(instance);
        }
    }

    /// Stops a process; another one takes its place.
    pub(super) fn replace(&mut self, instance: impl Into<InstanceId>) {
        self.effects.extend(self.instances.replace(instance.into()).map(Effect::Platform));
    }

    pub(super) fn note_order(&mut self, order: &Order, now: Time) {
        match order {
            Order::Launch { instance, memory_percent } => {
                self.roster.launched(*instance, now);
                if *memory_percent > 100 {
                    let text =
                        format!("{instance} is starting with {memory_percent} % of the memory");
                    self.note("launched", text);
                } else if self.stages.has_started() {
                    self.note("launched", format!("{instance} is starting"));
                }
            }
            Order::Stop { instance, .. } | Order::Dismiss { instance, .. } => {
                self.note("stopping", format!("{instance} is being stopped"))
            }
            Order::Harm { .. } => {}
        }
    }

    /// A chaos action.
    pub(super) fn harm(&mut self, instance: InstanceId, harm: Harm) -> Result<(), Refusal> {
        check_harm(&self.config.spec, harm)?;
        if !self.instances.running().contains_key(&instance) {
            return Err(Refusal::NotRunning(instance));
        }
        self.note("chaos", format!("{instance} {harm}"));
        self.effects.push(Effect::Platform(Order::Harm { instance, harm }));
        Ok(())
    }

    /// By request, unless the job's description forbids it.
    pub(super) fn scale(&mut self, workers: u32) -> Result<(), Refusal> {
        check_scale(&self.config.spec, workers)?;
        self.set_workers(workers);
        Ok(())
    }

    fn set_workers(&mut self, workers: u32) {
        let before = self.instances.scale(workers);
        if before != workers {
            self.change(|facts| facts.workers_wanted = Some(workers));
            self.note("scaled", format!("number of workers changed from {before} to {workers}"));
        }
    }

    /// The workers that hold a stream, with their process ids and states.
    pub fn connected_workers(&self) -> impl Iterator<Item = (WorkerId, u32, &'static str)> + '_ {
        let connected = self.roster.workers().iter().filter(|(_, worker)| worker.is_connected);
        connected.map(|(id, worker)| {
            let state = match worker {
                _ if worker.is_leaving => "leaving",
                _ if self.strategy.has_joined(*id) && worker.is_ready() => "working",
                _ => "joining",
            };
            (*id, worker.pid, state)
        })
    }

    /// The servers that hold a stream, with their process ids.
    pub fn connected_servers(&self) -> impl Iterator<Item = (PsId, u32)> + '_ {
        self.roster.connected_servers()
    }
}
