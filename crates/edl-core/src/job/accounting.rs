// SPDX-License-Identifier: Apache-2.0
//! Accounts for the time of all processes: passes what happens to the job on to `goodput`.

use std::collections::BTreeSet;
use std::time::Duration;

use super::{Effect, Event, Job};
use crate::applied::AppliedSet;
use crate::goodput::Goodput;
use crate::id::WorkerId;
use crate::platform::{Ended, InstanceId, Order, Report, Role};
use crate::server;
use crate::time::Time;
use crate::worker;

/// Where the time went, and which work was done before.
#[derive(Clone, Debug)]
pub(super) struct Accounting {
    goodput: Goodput,
    /// Batches that were ever finished, also those that were lost since.
    seen: AppliedSet,
    /// Under AllReduce, steps that all workers train again.
    redo: std::ops::Range<u64>,
}

impl Accounting {
    pub(super) fn new(n_batches: u32) -> Self {
        Self { goodput: Goodput::default(), seen: AppliedSet::new(n_batches.max(1)), redo: 0..0 }
    }

    /// Only these workers are spares now.
    pub(super) fn set_spares(&mut self, spares: &BTreeSet<WorkerId>, now: Time) {
        self.goodput.set_spares(spares, now);
    }
}

impl Job {
    /// Accounts an event before the job handles it.
    #[expect(clippy::wildcard_enum_match_arm, reason = "few events affect time accounting")]
    pub(super) fn account(&mut self, event: &Event, now: Time) {
        let goodput = &mut self.accounting.goodput;
        match event {
            Event::WorkerConnected { worker, incarnation, .. } => {
                goodput.connected((*worker).into(), *incarnation, now);
            }
            Event::PsConnected { ps, member, .. } => {
                goodput.connected((*ps).into(), member.incarnation, now);
            }
            Event::FromWorker { worker, incarnation, report: worker::Report::Spending(report) } => {
                let redo = &self.accounting.redo;
                goodput.report((*worker).into(), *incarnation, *report, redo, now);
            }
            Event::FromPs { ps, incarnation, report: server::Report::Spending(report) } => {
                let redo = &self.accounting.redo;
                goodput.report((*ps).into(), *incarnation, *report, redo, now);
            }
            Event::FromWorker {
                worker, report: worker::Report::BatchDone { batch, .. }, ..
            } => {
                let is_ours = batch.index < self.accounting.seen.n_batches();
                if is_ours {
                    let is_repeated = !self.accounting.seen.insert(*batch);
                    goodput.finished((*worker).into(), is_repeated);
                }
            }
            Event::Platform(Report::Ended { instance, pid, how }) => {
                let known = self.instances.running().get(instance);
                let Some(known) = known.filter(|known| known.pid.is_none_or(|of| of == *pid))
                else {
                    return;
                };
                if known.is_leaving || *how == Ended::CLEAN {
                    goodput.left(*instance, now);
                } else {
                    goodput.lost(*instance, now);
                }
            }
            Event::Platform(Report::NotStarted { instance, .. }) => goodput.lost(*instance, now),
            _ => {}
        }
    }

    /// Accounts the outcome of an event. `n_done` is what was done before it.
    pub(super) fn account_after(&mut self, n_done: u64, is_tick: bool, now: Time) {
        for effect in &self.effects {
            if let Effect::Platform(Order::Launch { instance, is_spare, .. }) = effect {
                self.accounting.goodput.launched(*instance, *is_spare, now);
            }
        }
        let n_now = self.ledger().n_done();
        if self.strategy.trains_in_steps() && n_now != n_done {
            match n_done.checked_sub(n_now) {
                Some(lost) => {
                    self.accounting.redo = n_now..self.accounting.redo.end.max(n_done);
                    self.accounting.goodput.lost_work(lost);
                }
                None => self
                    .accounting
                    .goodput
                    .found(n_now - n_done.max(self.accounting.redo.end.min(n_now))),
            }
        }
        if is_tick {
            self.account_departures(now);
        }
    }

    /// Workers that no platform runs count as gone after a long silence.
    fn account_departures(&mut self, now: Time) {
        if !self.instances.is_known() {
            return;
        }
        let is_gone = |instance: &InstanceId| {
            instance.role == Role::Worker
                && !self.instances.running().contains_key(instance)
                && self.roster.incarnation(WorkerId(instance.id)).is_none()
        };
        let gone: Vec<InstanceId> = self.accounting.goodput.instances().filter(is_gone).collect();
        gone.into_iter().for_each(|instance| self.accounting.goodput.left(instance, now));
        let wanted = self.instances.workers_wanted() as usize;
        let running = self.instances.running().iter();
        let running = running.filter(|(id, known)| id.role == Role::Worker && !known.is_leaving);
        self.accounting.goodput.expect(wanted.saturating_sub(running.count()));
    }

    /// The servers hold these batches: they were finished, even without a report.
    pub(super) fn account_found(&mut self, done: &AppliedSet) {
        let n_found = self.accounting.seen.add(done);
        self.accounting.goodput.found(n_found);
    }

    /// Where the time of workers and servers went.
    #[must_use]
    pub fn goodput(&self) -> &Goodput {
        &self.accounting.goodput
    }

    /// Continues the accounting of the master before, saved `gap` ago.
    pub fn resume_accounting(&mut self, before: Goodput, gap: Duration, now: Time) {
        self.accounting.goodput = before.resumed(gap, now);
    }
}
