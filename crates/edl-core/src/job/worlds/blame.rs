// SPDX-License-Identifier: Apache-2.0
//! Members that lose each other, hold the others up, or compute other bits.
//!
//! Whoever waits for another is not at fault. Nobody is evicted on one word of another: it is kept
//! out for a while and may come back.

use crate::id::WorkerId;
use crate::job::{Effect, End, Job, Peer, Suspect};
use crate::spec::SameBits;
use crate::time::Time;

/// So often a world is formed anew before those who wait for each other are replaced.
const MAX_STUCK: u32 = 4;

impl Job {
    /// A member lost another one. It may be dead, stopped or cut off: the rest goes on without
    /// it, and if it lives it may come back.
    pub(super) fn peer_lost(
        &mut self,
        worker: WorkerId,
        suspect: WorkerId,
        error: &str,
        now: Time,
    ) {
        let text = format!("worker-{worker} lost worker-{suspect} ({error}); the others continue");
        self.note("peer_lost", text);
        if suspect == worker {
            // It could not make sense of what it holds or got.
            self.worlds.disown(worker);
            self.keep_holders();
            return self.roster.shun_as_unfit(worker, now);
        }
        // A newcomer that cannot reach those who hold the state must not drive them out.
        let is_newcomer = !self.is_holding(worker) && self.is_holding(suspect);
        self.roster.shun(if is_newcomer { worker } else { suspect }, now);
        if self.roster.is_lost_too_often(suspect) {
            self.note("stuck", format!("other workers keep losing worker-{suspect}; replacing it"));
            self.roster.pardon_all(now);
            self.replace(suspect);
        }
    }

    /// The step that a member was training: it may be why it crashed.
    pub(in crate::job) fn step_of(&self, worker: WorkerId) -> Option<Suspect> {
        let world = self.worlds.current().filter(|_| self.is_allreduce())?;
        let is_member = world.members.iter().any(|member| member.worker == worker);
        let is_training = self.ledger().n_done() < self.worlds.until();
        (is_member && is_training)
            .then(|| Suspect::Batch(self.ledger().batch_at(self.ledger().n_done())))
    }

    /// Replaces members that hold the others up. One that waits for another is never at fault.
    pub(super) fn check_progress(&mut self, now: Time) {
        let timeout = self.config.spec.task_timeout();
        let is_owed = self.ledger().n_done() < self.worlds.until() || !self.is_together();
        if !is_owed || now.since(self.pace.progressed_at) < timeout {
            return;
        }
        let Some(world) = self.worlds.current().cloned() else { return };
        self.pace.progressed_at = now;
        self.worlds.broken(world.id);
        self.pace.n_stuck += 1;
        let waits_for = |worker: &WorkerId| {
            self.roster.worker(*worker).map_or("", |entry| entry.waiting_for.as_str())
        };
        let members: Vec<WorkerId> = world.members.iter().map(|member| member.worker).collect();
        let is_busy = |worker: &WorkerId| waits_for(worker).is_empty();
        let mut stuck: Vec<WorkerId> = members.iter().copied().filter(is_busy).collect();
        if stuck.is_empty() && self.pace.n_stuck > 1 {
            // Told twice, they still say that they wait for us: they do not listen.
            let is_deaf = |worker: &WorkerId| waits_for(worker) == "master";
            stuck = members.iter().copied().filter(is_deaf).collect();
        }
        if stuck.is_empty() && self.pace.n_stuck >= MAX_STUCK {
            stuck = members; // They wait for each other, world after world.
        }
        if stuck.is_empty() {
            let text = format!("no step for {timeout:?} although no worker is busy; retrying");
            return self.note("stuck", text);
        }
        for worker in stuck {
            self.roster.ban(worker, now + timeout);
            if let Some(suspect) = self.step_of(worker) {
                self.blame(suspect, worker, &format!("no progress for {timeout:?}"));
            }
            if self.is_ended() {
                return;
            }
            self.replace(worker);
        }
    }

    /// Takes a worker in only if it computes what the others compute, bit for bit.
    pub(in crate::job) fn accept_probe(&mut self, worker: WorkerId, peer: Option<&Peer>) -> bool {
        let Some(peer) = peer else {
            let why = format!("other workers cannot reach worker-{worker}");
            self.note("refused", why.clone());
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
                    self.note("refused", why.clone());
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

    /// The same step gave two results: the promise of equal bits is broken, or was waived.
    pub(super) fn bits_differ(&mut self, what: &str) {
        if self.config.spec.same_bits == SameBits::Strict {
            let why = format!("{what}; the result would depend on which worker computed it");
            return self.end_with(End::Failed(why), |facts| facts.bits_differ = true);
        }
        if !self.durable.bits_differ {
            self.change(|facts| facts.bits_differ = true);
            self.note(
                "bits_differ",
                format!("{what}; the result depends on which worker computed it"),
            );
        }
    }
}
