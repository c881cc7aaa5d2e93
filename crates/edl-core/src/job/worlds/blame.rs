// SPDX-License-Identifier: Apache-2.0
//! Members that lose each other, delay the others, or compute different results.
//!
//! A worker is not replaced because one other worker lost it: it is kept out for a while and can
//! come back.

use std::ops::Range;

use crate::id::WorkerId;
use crate::job::{Effect, End, EventKind, Job, Peer, Suspect};
use crate::spec::SameBits;
use crate::time::Time;

impl Job {
    /// A member lost another one, which may be dead, stopped or disconnected. The rest continues
    /// without it; if it is alive, it can come back.
    pub(super) fn peer_lost(
        &mut self,
        worker: WorkerId,
        suspect: WorkerId,
        error: &str,
        now: Time,
    ) {
        let what = match suspect == worker {
            true => "left its world".to_owned(),
            false => format!("lost worker-{suspect}"),
        };
        self.note(
            EventKind::PeerLost,
            format!("worker-{worker} {what} ({error}); the others continue"),
        );
        if suspect == worker {
            // It could not use the state that it holds or received.
            self.steps_mut().worlds_mut().disown(worker);
            self.keep_holders();
            return self.roster.ban_as_unfit(worker, now);
        }
        // A new worker that cannot reach the holders of the state must not displace them.
        let is_newcomer = !self.is_holding(worker) && self.is_holding(suspect);
        self.roster.ban(if is_newcomer { worker } else { suspect }, now);
        if self.roster.is_lost_too_often(suspect) {
            self.note(
                EventKind::Stuck,
                format!("other workers keep losing worker-{suspect}; replacing it"),
            );
            self.roster.pardon_all(now);
            self.replace(suspect);
        }
    }

    /// The steps of which a member was training one; it may have caused a crash. Its reports about
    /// the first of them may be lost.
    pub(in crate::job) fn steps_of(&self, worker: WorkerId) -> Option<Range<u64>> {
        let (steps, n_done) = (self.strategy.steps()?, self.ledger().n_done());
        // A member that has not entered its world yet may have crashed in an earlier one.
        let has_entered = steps.worlds().has_formed(worker);
        let until = if has_entered { steps.until() } else { steps.worlds().until() };
        (steps.is_member(worker) && n_done < until).then_some(n_done..until)
    }

    /// Replaces members that delay the others.
    pub(super) fn check_progress(&mut self, now: Time) {
        let timeout = self.hang_timeout();
        if !self.steps().is_late(timeout, now) {
            return;
        }
        let is_owed = self.ledger().n_done() < self.steps().until() || !self.is_together();
        let Self { strategy, roster, .. } = self;
        let waits_for = |worker| roster.waiting_for(worker);
        let steps = strategy.steps_mut().filter(|_| is_owed);
        let stuck = steps.and_then(|steps| steps.find_stuck(timeout, waits_for, now));
        let Some(stuck) = stuck else { return };
        if stuck.is_empty() {
            let text =
                format!("no step completed for {timeout:?} although no worker is busy; retrying");
            return self.note(EventKind::Stuck, text);
        }
        for worker in stuck {
            self.roster.ban_until(worker, now + timeout);
            if let Some(steps) = self.steps_of(worker) {
                let suspect = Suspect::Batch(self.ledger().batch_at(steps.start));
                let why = self.hang(worker, suspect, timeout, now);
                self.blame(suspect, worker, &why);
            }
            if self.is_ended() {
                return;
            }
            self.replace(worker);
        }
    }

    /// Admits a worker only if its results are bit-identical to those of the others.
    pub(in crate::job) fn accept_probe(&mut self, worker: WorkerId, peer: Option<&Peer>) -> bool {
        let Some(peer) = peer else {
            let why = format!("other workers cannot reach worker-{worker}");
            self.note(EventKind::Refused, why.clone());
            self.effects.push(Effect::RefuseWorker(worker, why));
            return false;
        };
        match self.durable.probe {
            None => {
                self.change(|facts| facts.probe = Some(peer.probe));
                true
            }
            Some(known) if known == peer.probe => true,
            Some(_) => match self.config.spec.same_bits {
                SameBits::Strict => {
                    let why = format!(
                        "worker-{worker}: results differ bitwise from the other workers (another \
                         processor, build or copy of the data?); use the same kind of machine, the \
                         same build and the same data, or allow the difference with \
                         --same_bits=report"
                    );
                    self.note(EventKind::Refused, why.clone());
                    self.effects.push(Effect::RefuseWorker(worker, why));
                    false
                }
                SameBits::Report => {
                    self.bits_differ(&format!(
                        "worker-{worker}: results differ bitwise from the other workers"
                    ));
                    true
                }
            },
        }
    }

    /// The same step gave two results.
    pub(super) fn bits_differ(&mut self, what: &str) {
        if self.config.spec.same_bits == SameBits::Strict {
            let why = format!("{what}; the result would depend on which worker computed it");
            return self.end_with(End::Failed(why), |facts| facts.bits_differ = true);
        }
        if !self.durable.bits_differ {
            self.change(|facts| facts.bits_differ = true);
            self.note(
                EventKind::BitsDiffer,
                format!("{what}; the result depends on which worker computed it"),
            );
        }
    }
}
