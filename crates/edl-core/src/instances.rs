// SPDX-License-Identifier: Apache-2.0
//! Who shall run: starts what is missing, stops what is too many, and gives up on what keeps
//! crashing.
//!
//! A process that was killed from outside is replaced at once, for ever, without counting it; one
//! that crashed by itself is replaced a bounded number of times.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::platform::{Ended, InstanceId, Order, Report, Role};
use crate::time::Time;

/// How long a process that shall leave may take: under AllReduce it trains on to a step that the
/// others can go on from.
const GRACE: Duration = Duration::from_secs(12);
/// After a crash the next try waits this long, doubled by each further crash.
const FIRST_BACKOFF: Duration = Duration::from_millis(200);
const MAX_BACKOFF: Duration = Duration::from_secs(30);
const SIGNALS_FROM_OUTSIDE: [i32; 4] = [1, 2, 9, 15];

/// The processes of one job, as the master wants them and as the platform has them.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Instances {
    workers_wanted: u32,
    n_ps: u32,
    /// Ids below are used up.
    next_worker: u32,
    running: BTreeMap<InstanceId, Instance>,
    restarts: BTreeMap<InstanceId, u32>,
    n_worker_crashes: u32,
    n_ps_crashes: u32,
    max_crashes: u32,
    not_before: Time,
    /// The platform has told what runs.
    is_known: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Instance {
    /// None until the platform has started it.
    pub pid: Option<u32>,
    pub is_leaving: bool,
}

/// What the end of a process means.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cause {
    /// It was asked to go, or its work was over.
    Left,
    /// Somebody or something outside ended it: not its fault.
    Killed,
    /// It ended by itself without a reason: its work is under suspicion.
    Crashed,
}

impl Instances {
    #[must_use]
    pub fn new(workers_wanted: u32, n_ps: u32, max_crashes: u32) -> Self {
        Self {
            workers_wanted,
            n_ps,
            next_worker: 0,
            running: BTreeMap::new(),
            restarts: BTreeMap::new(),
            n_worker_crashes: 0,
            n_ps_crashes: 0,
            max_crashes,
            not_before: Time::ZERO,
            is_known: false,
        }
    }

    /// Takes note of a platform's report; tells what the end of a process means.
    pub fn report(&mut self, report: &Report, now: Time) -> Option<(InstanceId, Cause)> {
        match report {
            Report::Running(list) => {
                self.is_known = true;
                self.running = list
                    .iter()
                    .map(|(id, pid)| (*id, Instance { pid: Some(*pid), is_leaving: false }))
                    .collect();
                let used = list.iter().filter(|(id, _)| id.role == Role::Worker);
                let used = used.map(|(id, _)| id.id + 1).max().unwrap_or(0);
                self.next_worker = self.next_worker.max(used);
                None
            }
            Report::Started { instance, pid } => {
                if let Some(known) = self.running.get_mut(instance) {
                    known.pid = Some(*pid);
                }
                None
            }
            Report::NotStarted { instance, .. } => {
                self.running.remove(instance);
                self.count_crash(*instance, now);
                Some((*instance, Cause::Crashed))
            }
            Report::Ended { instance, pid, how } => {
                let known = self.running.get(instance)?;
                if known.pid.is_some_and(|known| known != *pid) {
                    return None;
                }
                let was_leaving = known.is_leaving;
                self.running.remove(instance);
                let cause = match how {
                    _ if was_leaving => Cause::Left,
                    Ended::Exit(0) => Cause::Left,
                    Ended::Signal(signal) if SIGNALS_FROM_OUTSIDE.contains(signal) => Cause::Killed,
                    Ended::Exit(_) | Ended::Signal(_) => Cause::Crashed,
                };
                if cause == Cause::Crashed {
                    self.count_crash(*instance, now);
                }
                Some((*instance, cause))
            }
        }
    }

    fn count_crash(&mut self, instance: InstanceId, now: Time) {
        let n_crashes = match instance.role {
            Role::Ps => &mut self.n_ps_crashes,
            Role::Worker | Role::Master => &mut self.n_worker_crashes,
        };
        *n_crashes += 1;
        let doubled = FIRST_BACKOFF * 2u32.saturating_pow((*n_crashes).min(8));
        self.not_before = now + doubled.min(MAX_BACKOFF);
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
                self.launch(instance, &mut orders);
            }
        }
        let workers = self.staying_workers();
        let wanted = self.workers_wanted as usize;
        if can_launch && workers.len() < wanted {
            for _ in workers.len()..wanted {
                let instance = InstanceId { role: Role::Worker, id: self.next_worker };
                self.next_worker += 1;
                self.launch(instance, &mut orders);
            }
        }
        for instance in workers.iter().skip(wanted) {
            orders.push(self.stop(*instance, GRACE));
        }
        orders
    }

    fn launch(&mut self, instance: InstanceId, orders: &mut Vec<Order>) {
        self.running.insert(instance, Instance { pid: None, is_leaving: false });
        *self.restarts.entry(instance).or_default() += 1;
        orders.push(Order::Launch(instance));
    }

    fn stop(&mut self, instance: InstanceId, grace: Duration) -> Order {
        if let Some(known) = self.running.get_mut(&instance) {
            known.is_leaving = true;
        }
        let grace_ms = u64::try_from(grace.as_millis()).unwrap_or(u64::MAX);
        Order::Stop { instance, grace_ms }
    }

    /// Ends a process that gives no sign of life; the platform's report makes it be replaced.
    pub fn replace(&mut self, instance: InstanceId) -> Option<Order> {
        let is_ours = self.running.contains_key(&instance);
        is_ours.then_some(Order::Stop { instance, grace_ms: 0 })
    }

    fn staying_workers(&self) -> BTreeSet<InstanceId> {
        let stays = |(id, instance): &(&InstanceId, &Instance)| {
            id.role == Role::Worker && !instance.is_leaving
        };
        self.running.iter().filter(stays).map(|(id, _)| *id).collect()
    }

    /// A reason to give the job up: something crashes again and again.
    #[must_use]
    pub fn hopeless(&self) -> Option<String> {
        let hopeless = |n: u32, what: &str| {
            (n > self.max_crashes).then(|| {
                format!("{what} crashed {n} times, more than --relaunch_on_worker_failure={} allows; see its log", self.max_crashes)
            })
        };
        hopeless(self.n_ps_crashes, "a parameter server")
            .or_else(|| hopeless(self.n_worker_crashes, "a worker"))
    }

    /// Progress pardons crashes of workers: only those without work in between add up.
    pub fn progressed(&mut self) {
        self.n_worker_crashes = 0;
    }

    /// The job has come further than ever, which pardons crashes of servers. Work that only
    /// repeats what an earlier crash took away does not: else a server that always crashes at
    /// the same place would be started for ever.
    pub fn went_further(&mut self) {
        self.n_ps_crashes = 0;
    }

    /// Changes the number of workers; returns the number before.
    pub fn scale(&mut self, workers: u32) -> u32 {
        std::mem::replace(&mut self.workers_wanted, workers)
    }

    #[must_use]
    pub fn workers_wanted(&self) -> u32 {
        self.workers_wanted
    }

    #[must_use]
    pub fn next_deadline(&self) -> Option<Time> {
        Some(self.not_before)
    }

    /// Whether the platform has told what runs.
    #[must_use]
    pub fn is_known(&self) -> bool {
        self.is_known
    }

    #[must_use]
    pub fn running(&self) -> &BTreeMap<InstanceId, Instance> {
        &self.running
    }

    /// How often an instance was started again.
    #[must_use]
    pub fn restarts(&self, instance: InstanceId) -> u32 {
        self.restarts.get(&instance).copied().unwrap_or(0).saturating_sub(1)
    }

    /// A worker came that no platform started: its number is used up too.
    pub fn seen_worker(&mut self, id: u32) {
        self.next_worker = self.next_worker.max(id.saturating_add(1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const W0: InstanceId = InstanceId { role: Role::Worker, id: 0 };

    fn started(workers: u32) -> Instances {
        let mut instances = Instances::new(workers, 1, 2);
        instances.report(&Report::Running(Vec::new()), Time::ZERO);
        for order in instances.reconcile(Time::ZERO) {
            let Order::Launch(instance) = order else { panic!("nothing is too many") };
            instances.report(&Report::Started { instance, pid: 100 + instance.id }, Time::ZERO);
        }
        instances
    }

    fn ended(instance: InstanceId, pid: u32, how: Ended) -> Report {
        Report::Ended { instance, pid, how }
    }

    #[test]
    fn a_killed_worker_is_replaced_at_once_under_a_new_number_and_not_counted() {
        let mut instances = started(2);
        for round in 0..10 {
            let id = InstanceId { role: Role::Worker, id: round };
            let pid = instances.running()[&id].pid.expect("it runs");
            let cause = instances.report(&ended(id, pid, Ended::Signal(9)), Time::ZERO);
            assert_eq!(cause, Some((id, Cause::Killed)));
            let next = InstanceId { role: Role::Worker, id: round + 2 };
            assert_eq!(instances.reconcile(Time::ZERO), [Order::Launch(next)]);
            instances.report(&Report::Started { instance: next, pid: 200 + round }, Time::ZERO);
        }
        assert_eq!(instances.hopeless(), None);
    }

    #[test]
    fn a_worker_that_crashes_again_and_again_is_given_up() {
        let mut instances = started(1);
        let mut now = Time::ZERO;
        for round in 0..3 {
            assert_eq!(instances.hopeless(), None);
            let id = InstanceId { role: Role::Worker, id: round };
            let pid = instances.running()[&id].pid.expect("it runs");
            instances.report(&ended(id, pid, Ended::Exit(101)), now);
            assert!(instances.reconcile(now).is_empty(), "a crash is followed by a pause");
            now = now + MAX_BACKOFF;
            for order in instances.reconcile(now) {
                let Order::Launch(instance) = order else { panic!() };
                instances.report(&Report::Started { instance, pid: 300 + round }, now);
            }
        }
        assert!(instances.hopeless().is_some());
    }

    #[test]
    fn a_report_about_a_process_of_before_is_ignored() {
        let mut instances = started(1);
        assert_eq!(instances.report(&ended(W0, 999, Ended::Signal(9)), Time::ZERO), None);
        assert!(instances.running().contains_key(&W0));
    }

    #[test]
    fn scaling_down_asks_the_youngest_to_leave() {
        let mut instances = started(3);
        instances.scale(1);
        let stops = instances.reconcile(Time::ZERO);
        assert_eq!(stops.len(), 2);
        assert!(matches!(stops[0], Order::Stop { instance, .. } if instance.id == 1));
        assert!(instances.reconcile(Time::ZERO).is_empty(), "they are leaving already");
    }
}
