// SPDX-License-Identifier: Apache-2.0
//! The processes of a job: starts missing ones, stops surplus ones, and gives up on those that keep
//! crashing.
//!
//! A process that was killed from outside is always replaced at once and never counted; one
//! that crashed by itself is replaced a bounded number of times. One that ran out of memory gets
//! more of it, up to a limit. The job waits for processes that cannot be started yet.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::platform::{Ended, InstanceId, Order, Process, Report, Role};
use crate::pod::Wait;
use crate::time::{Time, millis};

/// How long a leaving process may take: under AllReduce it keeps training up to a step from which
/// the others can continue.
const GRACE: Duration = Duration::from_secs(12);
/// After a crash the next try waits this long, doubled by each further crash.
const FIRST_BACKOFF: Duration = Duration::from_millis(200);
const MAX_BACKOFF: Duration = Duration::from_secs(30);
/// The share of the memory asked for that a process gets after each time that its like ran out
/// of it, in percent. Running out of the last is a crash.
const MEMORY_PERCENT: [u32; 5] = [100, 150, 225, 340, 500];

/// The processes of one job, as the master wants them and as the platform has them.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Instances {
    /// Workers that train.
    workers_wanted: u32,
    /// Spare workers, which wait to replace one of these.
    n_spares: u32,
    n_ps: u32,
    /// Ids below are used up.
    next_worker: u32,
    running: BTreeMap<InstanceId, Instance>,
    /// Workers among them that will not run soon. Counted only when the platform reports something, as
    /// every step of a world asks for it.
    n_stuck_workers: usize,
    restarts: BTreeMap<InstanceId, u32>,
    n_worker_crashes: u32,
    n_ps_crashes: u32,
    /// How often processes of a part ran out of memory.
    n_memory_raises: BTreeMap<Role, usize>,
    max_crashes: u32,
    /// Why the last worker was counted, if it was not a crash.
    failed_start: Option<String>,
    not_before: Time,
    /// The platform has reported what runs.
    is_known: bool,
    /// Workers on resources that other jobs wait for.
    first_to_leave: BTreeSet<u32>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Instance {
    /// None until the platform has started it.
    pub pid: Option<u32>,
    pub is_leaving: bool,
    /// Why it does not run yet.
    pub waits: Option<Wait>,
}

impl Instance {
    fn new(pid: Option<u32>) -> Self {
        Self { pid, is_leaving: false, waits: None }
    }

    /// Whether it will not run soon.
    #[must_use]
    pub fn is_stuck(&self) -> bool {
        self.waits.as_ref().is_some_and(|why| !why.is_starting())
    }

    /// Whether a report is about this one, and not about an earlier one.
    fn is(&self, pid: u32) -> bool {
        self.pid.is_none_or(|known| known == pid)
    }
}

/// What the end of a process means.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cause {
    /// It was asked to go.
    Left,
    /// It exited by itself: someone else asked it to, or model code exited the process.
    Quit,
    /// It was stopped from outside: not its fault.
    Killed,
    /// It ended by itself without a reason: its work may be the cause.
    Crashed,
}

impl Instances {
    #[must_use]
    pub fn new(workers_wanted: u32, n_ps: u32, max_crashes: u32) -> Self {
        Self {
            workers_wanted,
            n_spares: 0,
            n_ps,
            next_worker: 0,
            running: BTreeMap::new(),
            n_stuck_workers: 0,
            restarts: BTreeMap::new(),
            n_worker_crashes: 0,
            n_ps_crashes: 0,
            n_memory_raises: BTreeMap::new(),
            max_crashes,
            failed_start: None,
            not_before: Time::ZERO,
            is_known: false,
            first_to_leave: BTreeSet::new(),
        }
    }

    /// Keeps this many spare workers ready.
    #[must_use]
    pub fn with_spares(self, n_spares: u32) -> Self {
        Self { n_spares, ..self }
    }

    /// Records a platform's report; returns what the end of a process means.
    pub fn report(&mut self, report: &Report, now: Time) -> Option<(InstanceId, Cause)> {
        let ended = self.record(report, now);
        let is_stuck = |(id, instance): &(&InstanceId, &Instance)| {
            id.role == Role::Worker && instance.is_stuck()
        };
        self.n_stuck_workers = self.running.iter().filter(is_stuck).count();
        ended
    }

    fn record(&mut self, report: &Report, now: Time) -> Option<(InstanceId, Cause)> {
        match report {
            Report::Running(list) => {
                self.is_known = true;
                let running =
                    |process: &Process| (process.instance, Instance::new(Some(process.pid)));
                self.running = list.iter().map(running).collect();
                let workers = list.iter().filter(|process| process.instance.role == Role::Worker);
                let used = workers.map(|process| process.instance.id + 1).max().unwrap_or(0);
                self.next_worker = self.next_worker.max(used);
                None
            }
            Report::Waiting { instance, why } => {
                if let Some(known) = self.running.get_mut(instance) {
                    known.waits = Some(why.clone());
                }
                None
            }
            Report::Started { instance, pid } => {
                if let Some(known) = self.running.get_mut(instance) {
                    (known.pid, known.waits) = (Some(*pid), None);
                }
                None
            }
            Report::NotStarted { instance, .. } => {
                self.running.remove(instance);
                self.count_crash(*instance, now);
                Some((*instance, Cause::Crashed))
            }
            Report::Leaving { instance, pid, .. } => {
                let known = self.running.get_mut(instance);
                if let Some(known) = known.filter(|known| known.is(*pid)) {
                    known.is_leaving = true;
                }
                None
            }
            Report::Ended { instance, pid, how } => {
                let known = self.running.get(instance).filter(|known| known.is(*pid))?;
                let was_leaving = known.is_leaving;
                self.running.remove(instance);
                let cause = match was_leaving {
                    true => Cause::Left,
                    false => self.cause(instance.role, *how),
                };
                if cause == Cause::Crashed {
                    self.count_crash(*instance, now);
                }
                Some((*instance, cause))
            }
            Report::MasterDeleted
            | Report::AllDeleted { .. }
            | Report::Trouble(_)
            | Report::Granted { .. } => None,
        }
    }

    /// The meaning of an end that was not requested.
    fn cause(&mut self, role: Role, how: Ended) -> Cause {
        if how == Ended::OutOfMemory {
            let n_raises = self.n_memory_raises.entry(role).or_default();
            if *n_raises + 1 == MEMORY_PERCENT.len() {
                return Cause::Crashed;
            }
            *n_raises += 1;
            return Cause::Killed;
        }
        if how == Ended::CLEAN {
            Cause::Quit
        } else if how.is_from_outside() {
            Cause::Killed
        } else {
            Cause::Crashed
        }
    }

    /// What a new process of this part gets of the memory that the job asks for.
    #[must_use]
    pub fn memory_percent(&self, role: Role) -> u32 {
        MEMORY_PERCENT[self.n_memory_raises.get(&role).copied().unwrap_or(0)]
    }

    /// Counts a crash; the next process is started after a pause.
    pub fn count_crash(&mut self, instance: InstanceId, now: Time) {
        self.failed_start = None;
        let n_crashes = match instance.role {
            Role::Ps => &mut self.n_ps_crashes,
            Role::Worker | Role::Master => &mut self.n_worker_crashes,
        };
        *n_crashes += 1;
        let doubled = FIRST_BACKOFF * 2u32.saturating_pow((*n_crashes).min(8));
        self.not_before = now + doubled.min(MAX_BACKOFF);
    }

    /// Explains the last crash that was counted: a worker never became ready.
    pub fn explain_crash(&mut self, why: String) {
        self.failed_start = Some(why);
    }

    /// Orders that bring what runs to what is wanted.
    pub fn reconcile(&mut self, now: Time) -> Vec<Order> {
        if !self.is_known {
            return Vec::new();
        }
        let mut orders = Vec::new();
        let can_launch = now >= self.not_before;
        for id in 0..self.n_ps {
            let instance = InstanceId { role: Role::Ps, id };
            if can_launch && !self.running.contains_key(&instance) {
                self.launch(instance, false, &mut orders);
            }
        }
        let workers = self.staying_workers();
        let n_spares = self.max_trainers().map_or(0, |_| self.n_spares);
        let wanted = self.workers_wanted.saturating_add(n_spares) as usize;
        if can_launch && workers.len() < wanted {
            for place in workers.len()..wanted {
                let instance = InstanceId { role: Role::Worker, id: self.next_worker };
                self.next_worker += 1;
                let is_spare = place >= self.workers_wanted as usize;
                self.launch(instance, is_spare, &mut orders);
            }
        }
        for instance in workers.iter().skip(wanted) {
            orders.push(self.stop(*instance, GRACE));
        }
        orders
    }

    fn launch(&mut self, instance: InstanceId, is_spare: bool, orders: &mut Vec<Order>) {
        self.running.insert(instance, Instance::new(None));
        *self.restarts.entry(instance).or_default() += 1;
        let memory_percent = self.memory_percent(instance.role);
        orders.push(Order::Launch { instance, memory_percent, is_spare });
    }

    fn stop(&mut self, instance: InstanceId, grace: Duration) -> Order {
        if let Some(known) = self.running.get_mut(&instance) {
            known.is_leaving = true;
        }
        Order::Stop { instance, grace_ms: millis(grace) }
    }

    /// Ends a process that shows no sign of life; it is replaced after the platform's report.
    pub fn replace(&mut self, instance: InstanceId) -> Option<Order> {
        let is_ours = self.running.contains_key(&instance);
        is_ours.then_some(Order::Stop { instance, grace_ms: 0 })
    }

    /// The workers that were not asked to leave. Those to remove first come last: workers on
    /// contended resources, then workers that do not run, then the youngest.
    fn staying_workers(&self) -> Vec<InstanceId> {
        let stays = |(id, instance): &(&InstanceId, &Instance)| {
            id.role == Role::Worker && !instance.is_leaving
        };
        let mut staying: Vec<_> = self.running.iter().filter(stays).collect();
        staying.sort_by_key(|(id, instance)| {
            (self.first_to_leave.contains(&id.id), instance.waits.is_some(), **id)
        });
        staying.into_iter().map(|(id, _)| *id).collect()
    }

    /// The reason to give up the job, if something keeps crashing.
    #[must_use]
    pub fn give_up_reason(&self) -> Option<String> {
        let give_up_reason = |n: u32, what: String| {
            (n > self.max_crashes).then(|| {
                let times = if n == 1 { "once".to_owned() } else { format!("{n} times") };
                format!(
                    "{what} {times}, more than --relaunch_on_worker_failure={} allows; see their \
                     logs",
                    self.max_crashes
                )
            })
        };
        let workers = match &self.failed_start {
            Some(why) => format!("{why}; workers failed to start or crashed"),
            None => "workers crashed".into(),
        };
        give_up_reason(self.n_ps_crashes, "parameter servers crashed".into())
            .or_else(|| give_up_reason(self.n_worker_crashes, workers))
    }

    /// After progress, earlier crashes of workers no longer count: only those in a row add up.
    pub fn progressed(&mut self) {
        self.n_worker_crashes = 0;
    }

    /// It is not clear yet which work crashes workers. Until that has been found out, their crashes
    /// count as one.
    pub fn crash_is_unclear(&mut self) {
        self.n_worker_crashes = self.n_worker_crashes.min(1);
    }

    /// The job has made new progress, so earlier crashes of servers no longer count. Work that only
    /// repeats what an earlier crash took away does not: else a server that always crashes at
    /// the same place would be restarted forever.
    pub fn went_further(&mut self) {
        self.n_ps_crashes = 0;
    }

    /// Names the workers that go first when there are too many.
    pub fn let_first_leave(&mut self, workers: &[u32]) {
        self.first_to_leave = workers.iter().copied().collect();
    }

    /// Changes the number of workers; returns the number before.
    pub fn scale(&mut self, workers: u32) -> u32 {
        std::mem::replace(&mut self.workers_wanted, workers)
    }

    /// Workers that are wanted, without spares.
    #[must_use]
    pub fn workers_wanted(&self) -> u32 {
        self.workers_wanted
    }

    /// The most workers that train at a time; none if all of them do. If no worker is wanted, there
    /// is nothing to replace, and existing workers were started manually.
    #[must_use]
    pub fn max_trainers(&self) -> Option<u32> {
        Some(self.workers_wanted).filter(|wanted| self.keeps_spares() && *wanted > 0)
    }

    #[must_use]
    pub fn keeps_spares(&self) -> bool {
        self.n_spares > 0
    }

    #[must_use]
    pub fn next_deadline(&self) -> Option<Time> {
        Some(self.not_before)
    }

    /// Whether the platform has reported what runs.
    #[must_use]
    pub fn is_known(&self) -> bool {
        self.is_known
    }

    #[must_use]
    pub fn running(&self) -> &BTreeMap<InstanceId, Instance> {
        &self.running
    }

    /// The workers that train or may join them soon, those that leave included, if all servers run.
    #[must_use]
    pub fn n_workers(&self) -> usize {
        let n_idle = self.n_ps as usize + self.n_stuck_workers;
        let n_workers = self.running.len().saturating_sub(n_idle);
        // Spares join only in place of a worker that is lost.
        self.max_trainers().map_or(n_workers, |most| n_workers.min(most as usize))
    }

    /// How often an instance was started again.
    #[must_use]
    pub fn restarts(&self, instance: InstanceId) -> u32 {
        self.restarts.get(&instance).copied().unwrap_or(0).saturating_sub(1)
    }

    /// A worker connected that no platform started: its number is used up, too.
    pub fn seen_worker(&mut self, id: u32) {
        self.next_worker = self.next_worker.max(id.saturating_add(1));
    }
}

#[cfg(test)]
mod tests;
