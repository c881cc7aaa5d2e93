// SPDX-License-Identifier: Apache-2.0
//! Keeps the books of where the time went: what happens to the job, as `goodput` must hear it.

use std::time::Duration;

use super::{Effect, Event, Job};
use crate::applied::AppliedSet;
use crate::goodput::Goodput;
use crate::id::{BatchId, WorkerId};
use crate::platform::{Ended, InstanceId, Order, Report, Role};
use crate::time::Time;

/// Where the time went, and which work was done before.
#[derive(Clone, Debug)]
pub(super) struct Books {
    pub(super) goodput: Goodput,
    /// Batches that somebody has finished, whatever became of them since.
    seen: AppliedSet,
    /// Steps that all take again, under AllReduce.
    redo: std::ops::Range<u64>,
}

impl Books {
    pub(super) fn new(n_batches: u32) -> Self {
        Self { goodput: Goodput::default(), seen: AppliedSet::new(n_batches.max(1)), redo: 0..0 }
    }
}

impl Job {
    /// Hears of an event before it is acted upon.
    #[expect(clippy::wildcard_enum_match_arm, reason = "few events are about anybody's time")]
    pub(super) fn book(&mut self, event: &Event, now: Time) {
        let goodput = &mut self.books.goodput;
        match event {
            Event::WorkerConnected { worker: id, incarnation, .. } => {
                goodput.connected((*id).into(), *incarnation, now);
            }
            Event::PsConnected { ps, member, .. } => {
                goodput.connected((*ps).into(), member.incarnation, now);
            }
            Event::Told { instance, incarnation, told } => {
                goodput.tell(*instance, *incarnation, *told, &self.books.redo, now);
            }
            Event::BatchDone { worker: id, batch, .. } => {
                let is_ours = batch.index < self.books.seen.n_batches();
                if is_ours {
                    let is_repeated = !self.books.seen.insert(*batch);
                    goodput.finished((*id).into(), is_repeated);
                }
            }
            Event::Platform(Report::Ended { instance, pid, how }) => {
                let known = self.instances.running().get(instance);
                let Some(known) = known.filter(|known| known.pid.is_none_or(|of| of == *pid))
                else {
                    return;
                };
                if known.is_leaving || *how == Ended::Exit(0) {
                    goodput.left(*instance, now);
                } else {
                    goodput.lost(*instance, now);
                }
            }
            Event::Platform(Report::NotStarted { instance, .. }) => goodput.lost(*instance, now),
            _ => {}
        }
    }

    /// Looks at what has become of an event. `n_done` is what was done before it.
    pub(super) fn book_after(&mut self, n_done: u64, is_tick: bool, now: Time) {
        for effect in &self.effects {
            if let Effect::Platform(Order::Launch { instance, .. }) = effect {
                self.books.goodput.launched(*instance, now);
            }
        }
        let n_now = self.ledger().n_done();
        if self.strategy.trains_in_steps() && n_now != n_done {
            match n_done.checked_sub(n_now) {
                Some(lost) => {
                    self.books.redo = n_now..self.books.redo.end.max(n_done);
                    self.books.goodput.lost_work(lost);
                }
                None => {
                    self.books.goodput.found(n_now - n_done.max(self.books.redo.end.min(n_now)))
                }
            }
        }
        if is_tick {
            self.book_strangers(now);
        }
    }

    /// Workers that no platform runs are gone when nobody has heard of them for long.
    fn book_strangers(&mut self, now: Time) {
        if !self.instances.is_known() {
            return;
        }
        let is_gone = |instance: &InstanceId| {
            instance.role == Role::Worker
                && !self.instances.running().contains_key(instance)
                && self.roster.worker(WorkerId(instance.id)).is_none()
        };
        let gone: Vec<InstanceId> = self.books.goodput.instances().filter(is_gone).collect();
        gone.into_iter().for_each(|instance| self.books.goodput.left(instance, now));
        let wanted = self.instances.workers_wanted() as usize;
        let running = self.instances.running().iter();
        let running = running.filter(|(id, known)| id.role == Role::Worker && !known.is_leaving);
        self.books.goodput.expect(wanted.saturating_sub(running.count()));
    }

    /// The servers hold these batches: what nobody has told us of was finished all the same.
    pub(super) fn book_found(&mut self, done: &AppliedSet) {
        let first = self.books.seen.epoch();
        let indices = |epoch| (0..done.n_batches()).map(move |index| BatchId { epoch, index });
        let all = (first..=done.epoch()).flat_map(indices);
        let n_found = all.filter(|batch| done.contains(*batch) && self.books.seen.insert(*batch));
        let n_found = n_found.count() as u64;
        self.books.goodput.found(n_found);
    }

    /// Where the time of workers and servers went.
    #[must_use]
    pub fn goodput(&self) -> &Goodput {
        &self.books.goodput
    }

    /// Goes on with what the master before has written down, `gap` ago.
    pub fn resume_books(&mut self, before: Goodput, gap: Duration, now: Time) {
        self.books.goodput = before.resumed(gap, now);
    }
}
