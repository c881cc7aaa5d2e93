// SPDX-License-Identifier: Apache-2.0
//! Workers that connect, fail and leave; processes that start, wait and exit.

use std::time::Duration;

use super::refusal::{check_chaos, check_scale};
use super::roster::{Lost, Suspects};
use super::{Command, Effect, End, EventKind, HeldLease, Job, Peer, Refusal, Suspect};
use crate::id::{Incarnation, PsId, WorkerId};
use crate::instances::Cause;
use crate::model::ModelSpec;
use crate::optimizer;
use crate::platform::{
    ChaosAction, Ended, InstanceId, InstanceState, Order, Process, Report, Role,
};
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
        self.abandon_checkpoint_of(worker);
        self.instances.seen_worker(worker.0);
        self.roster.worker_connected(worker, incarnation, pid, now);
        self.effects.push(Effect::ToWorker(worker, Command::Welcome));
    }

    pub(super) fn worker_ready(
        &mut self,
        worker: WorkerId,
        model: ModelSpec,
        capacity: u32,
        held: Vec<HeldLease>,
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
                self.note(EventKind::Refused, why.clone());
                return self.effects.push(Effect::RefuseWorker(worker, why));
            }
        }
        if self.strategy.trains_in_steps() && !self.accept_probe(worker, peer.as_ref()) {
            return;
        }
        self.roster.worker_ready(worker, capacity, held, peer);
        self.assignments.add_idle([worker]);
        self.note(EventKind::WorkerJoined, format!("worker-{worker} joined"));
        if self.servers().is_serving() {
            self.effects.push(Effect::ToWorker(worker, Command::Route(self.route())));
            self.adopt_held(worker, now);
        }
        self.drain_again(worker, now);
    }

    /// Counts what a worker holds of this generation as assigned to it.
    pub(super) fn adopt_held(&mut self, worker: WorkerId, now: Time) {
        let generation = self.servers().generation();
        let mut held = self.roster.take_held(worker);
        held.retain(|held| held.generation == generation);
        self.assignments.adopt(worker, &held, now);
    }

    pub(super) fn worker_gone(&mut self, worker: WorkerId, incarnation: Incarnation) {
        if self.roster.incarnation(worker) == Some(incarnation) {
            self.release_worker(worker);
            self.abandon_checkpoint_of(worker);
            self.roster.worker_disconnected(worker);
        }
    }

    pub(super) fn worker_leaving(&mut self, worker: WorkerId) {
        self.roster.worker_leaves(worker);
        self.release_worker(worker);
        self.roster.suspect(worker, Suspects::default());
        let text = match self.strategy.trains_in_steps() {
            true => format!("worker-{worker} is draining"),
            false => format!("worker-{worker} drained and returned its tasks"),
        };
        self.note(EventKind::WorkerLeft, text);
    }

    /// The platform reports which processes run, wait or have exited.
    pub(super) fn platform(&mut self, report: &Report, now: Time) {
        match report {
            Report::Started { instance, .. } => {
                self.roster.started(*instance, Duration::ZERO, now);
            }
            // They have a new master: those that do not connect to it are stuck.
            Report::Running(running) => {
                for Process { instance, age_ms, .. } in running {
                    self.roster.started(*instance, Duration::from_millis(*age_ms), now);
                }
                let instances = running.iter().map(|process| process.instance);
                let workers = instances.filter(|instance| instance.role == Role::Worker);
                if let Some(steps) = self.strategy.steps_mut() {
                    steps.set_survivors(workers.map(|instance| WorkerId(instance.id)));
                }
            }
            Report::MasterDeleted => self.keep_servers(),
            Report::AllDeleted { within_ms } => {
                let within = Duration::from_millis(*within_ms);
                self.stop("all pods of the job were deleted", within, now);
            }
            Report::NotStarted { instance, error } => {
                self.roster.not_running(*instance);
                self.note(
                    EventKind::NotStarted,
                    format!("{instance} could not be started: {error}"),
                );
            }
            Report::Waiting { instance, why } => self.waits(*instance, why),
            Report::Leaving { instance, how, .. } => {
                self.note(EventKind::Leaving, format!("{instance} is shutting down: it {how}"));
            }
            Report::Trouble(why) => self.platform_trouble(why.as_ref()),
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
                self.worker_ended(WorkerId(instance.id), cause, *how, now);
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
            self.note(EventKind::Waiting, format!("{instance} is waiting: {why}"));
        }
    }

    /// The platform cannot start processes, or can again.
    fn platform_trouble(&mut self, why: Option<&Wait>) {
        let is_news = match (&self.trouble, why) {
            (Some(before), Some(why)) => !before.is_like(why),
            (before, why) => before.is_some() != why.is_some(),
        };
        if is_news {
            let text = why.map_or_else(|| "processes can be started again".into(), Wait::to_string);
            self.note(EventKind::Platform, text);
        }
        self.trouble = why.cloned();
    }

    fn worker_ended(&mut self, worker: WorkerId, cause: Cause, how: Ended, now: Time) {
        let is_leaving = self.roster.is_leaving(worker);
        let is_known = self.roster.incarnation(worker).is_some();
        let is_tested = !self.strategy.trains_in_steps() || self.roster.peer(worker).is_some();
        self.release_worker(worker);
        self.abandon_checkpoint_of(worker);
        let suspects = self.roster.remove_worker(worker);
        // No worker must wait for the state that it held.
        if let Some(steps) = self.strategy.steps_mut() {
            steps.worlds_mut().disown(worker);
            self.keep_holders();
        }
        match cause {
            Cause::Quit
                if !is_leaving && !suspects.is_empty() && !self.config.spec.is_custom_loop() =>
            {
                self.instances.count_crash(worker.into(), now);
                let text = format!("worker-{worker} {how} before its work was done; see its log");
                self.note(EventKind::WorkerCrashed, text);
                self.worker_crashed(worker, suspects, "model code exited the process");
            }
            Cause::Left | Cause::Quit => {
                self.note(EventKind::WorkerEnded, format!("worker-{worker} {how}"));
            }
            Cause::Killed => self.note(
                EventKind::WorkerKilled,
                format!("worker-{worker} {how}; reassigning its work"),
            ),
            Cause::Crashed => {
                self.note(EventKind::WorkerCrashed, format!("worker-{worker} {how}; see its log"));
                if matches!(how, Ended::OutOfMemory | Ended::MachineOutOfMemory) {
                    // Too many or too large processes are the cause, not what one of them did last.
                    return self.instances.explain_crash(format!("worker-{worker} {how}"));
                }
                if is_known && !is_tested {
                    let first = self.describe(Suspect::Batch(self.ledger().batch_at(0)));
                    self.instances.explain_crash(format!(
                        "worker-{worker} {how} before it was ready, possibly on {first}, which \
                         every worker trains first as a test"
                    ));
                }
                self.worker_crashed(worker, suspects, &format!("the worker {how}"));
            }
        }
    }

    /// Replaces processes that are silent, never ready or never connect.
    pub(super) fn check_silence(&mut self, now: Time) {
        self.check_servers(now);
        for Lost { worker, why, is_start } in self.roster.lost_workers(now) {
            let why = format!("worker-{worker} {why}");
            self.release_worker(worker);
            self.abandon_checkpoint_of(worker);
            let is_connected = self.roster.is_connected(worker);
            self.roster.remove_worker(worker);
            if is_connected {
                self.note(EventKind::WorkerSilent, why.clone());
                self.effects.push(Effect::CloseWorker(worker, why.clone()));
            }
            if is_start {
                // The next one may hang, too: if that were not counted, the job would never end.
                self.instances.count_crash(worker.into(), now);
                self.instances.explain_crash(why);
            }
            self.replace(worker);
        }
        for instance in self.roster.take_late(now) {
            let why = format!("{instance} started but never connected");
            self.note(EventKind::NotConnected, format!("{why}; replacing it"));
            // A custom training loop connects after its imports, which may hang forever.
            if instance.role == Role::Worker && self.config.spec.is_custom_loop() {
                self.instances.count_crash(instance, now);
                self.instances.explain_crash(why);
            }
            self.replace(instance);
        }
    }

    /// Stops a process; another one takes its place.
    pub(super) fn replace(&mut self, instance: impl Into<InstanceId>) {
        self.effects.extend(self.instances.replace(instance.into()).map(Effect::Platform));
    }

    pub(super) fn note_order(&mut self, order: &Order, now: Time) {
        match order {
            Order::Launch { instance, memory_percent, .. } => {
                self.roster.launched(*instance, now);
                if *memory_percent > 100 {
                    let text = format!(
                        "{instance} is starting with {memory_percent} % of the requested memory"
                    );
                    self.note(EventKind::Launched, text);
                } else if self.stages.has_started() {
                    self.note(EventKind::Launched, format!("{instance} is starting"));
                }
            }
            Order::Stop { instance, .. } | Order::Dismiss { instance, .. } => {
                self.note(EventKind::Stopping, format!("{instance} is being stopped"))
            }
            Order::Chaos { .. } => {}
        }
    }

    /// A chaos action.
    pub(super) fn chaos(
        &mut self,
        instance: InstanceId,
        action: ChaosAction,
    ) -> Result<(), Refusal> {
        check_chaos(&self.config.spec, action)?;
        if !self.instances.running().contains_key(&instance) {
            return Err(Refusal::NotRunning(instance));
        }
        self.note(EventKind::Chaos, format!("{instance} {action}"));
        self.effects.push(Effect::Platform(Order::Chaos { instance, action }));
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
            self.note(
                EventKind::Scaled,
                format!("number of workers changed from {before} to {workers}"),
            );
        }
    }

    /// The workers that hold a stream, with their process ids and states.
    pub fn connected_workers(&self) -> impl Iterator<Item = (WorkerId, u32, InstanceState)> + '_ {
        let is_spare = |worker| self.spares.contains(&worker);
        self.roster.connected_workers(is_spare, |worker| self.strategy.is_training(worker))
    }

    /// The servers that hold a stream, with their process ids.
    pub fn connected_servers(&self) -> impl Iterator<Item = (PsId, u32)> + '_ {
        self.roster.connected_servers()
    }
}
