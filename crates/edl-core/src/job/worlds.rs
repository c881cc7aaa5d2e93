// SPDX-License-Identifier: Apache-2.0
//! AllReduce: worlds are formed, steps are allowed, committed and, when a member is lost, repeated.
//!
//! A worker may train to the step that it was allowed, then it waits. So a step that was not yet
//! allowed is one that nobody has passed, and anything can be ordered for it: a cut, a change of
//! members. Without a master everybody stops there.

mod blame;
mod gather;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::roster::Worker;
use super::{Command, Effect, Job, LoadFrom, News, Peer, Stage, Suspect};
use crate::id::{WorkerId, WorldId};
use crate::time::Time;
use crate::world::{Candidate, Change, Member, World, Worlds};

/// Steps that are allowed in advance: about so much time of training.
const AHEAD: Duration = Duration::from_secs(1);
const MIN_AHEAD: u64 = 8;
const MAX_AHEAD: u64 = 100_000;
/// The speed is measured over at least so long.
const MEASURED: Duration = Duration::from_millis(200);
/// Hashes of so many steps are kept to be compared.
const MAX_HASHES: usize = 64;
/// What a worker says that does not know the hash of a step any more.
const UNTOLD: u64 = 0;

/// How fast steps are committed, and what is known of the last ones.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Pace {
    measured_at: Time,
    n_done: u64,
    ahead: u64,
    /// When the world last came further.
    progressed_at: Time,
    /// Since when somebody waits for a first world.
    gathering_since: Option<Time>,
    hashes: BTreeMap<u64, u64>,
    pause_secs: f64,
    state_bytes: u64,
    /// Times in a row that nobody came further although nobody seemed busy.
    n_stuck: u32,
    /// Everybody leaves: no further step is allowed, and so many checkpoints were begun for it.
    farewells: Option<u32>,
    /// Workers of an earlier master's time, which may hold the state.
    pub(super) survivors: BTreeSet<WorkerId>,
    /// Hybrid: times in a row that workers and servers did not fit together.
    pub(super) n_torn: u32,
}

impl Pace {
    pub(super) fn new(now: Time) -> Self {
        Self {
            measured_at: now,
            n_done: 0,
            ahead: MIN_AHEAD,
            progressed_at: now,
            gathering_since: None,
            hashes: BTreeMap::new(),
            pause_secs: 0.0,
            state_bytes: 0,
            n_stuck: 0,
            farewells: None,
            survivors: BTreeSet::new(),
            n_torn: 0,
        }
    }

    /// The world came further, or cannot be expected to have.
    pub(super) fn progressed(&mut self, now: Time) {
        (self.progressed_at, self.n_stuck) = (now, 0);
    }

    /// Adapts the steps allowed in advance to the speed at which they are committed.
    fn measure(&mut self, n_done: u64, now: Time) {
        let elapsed = now.since(self.measured_at);
        if elapsed < MEASURED {
            return;
        }
        let n_new = n_done.saturating_sub(self.n_done);
        if n_new > 0 {
            let ahead = u128::from(n_new) * AHEAD.as_nanos() / elapsed.as_nanos().max(1);
            self.ahead = u64::try_from(ahead).unwrap_or(MAX_AHEAD).clamp(MIN_AHEAD, MAX_AHEAD);
        }
        (self.measured_at, self.n_done) = (now, n_done);
    }
}

impl Job {
    /// Brings the world to what it should be, given who is there.
    pub(super) fn advance_world(&mut self, now: Time) {
        if !self.is_allreduce() || self.durable.model.is_none() {
            return;
        }
        if self.is_hybrid() && !self.servers.is_serving() {
            return self.suspend_world();
        }
        self.check_progress(now);
        if self.is_ended() {
            return;
        }
        let candidates = self.candidates(now);
        match self.worlds.next(&candidates) {
            Change::Nothing => self.pace.farewells = None,
            Change::Form { workers, after } => {
                let keeps =
                    after.is_some() && workers.is_empty() && self.keep_last(&candidates, now);
                if !keeps && !self.must_gather(&workers, &candidates, now) {
                    self.form_world(&workers, after, &candidates, now);
                }
            }
        }
        let needs_cut = matches!(self.stage, Stage::BestCut | Stage::Stopping { .. });
        if needs_cut && !self.checkpoints.is_writing() && self.worlds.is_settled() {
            self.begin_cut(None, now);
        }
    }

    fn candidates(&self, now: Time) -> BTreeMap<WorkerId, Candidate> {
        let all = self.roster.workers().iter();
        let ready = all.filter(|(_, w)| w.is_connected && w.capacity > 0);
        let candidate = |(id, worker): (&WorkerId, &Worker)| {
            let incarnation = worker.incarnation;
            let step = worker.step().filter(|_| self.worlds.is_holder(*id, incarnation));
            let (is_unfit, is_shunned) = (worker.is_unfit(now), worker.is_banned(now));
            (*id, Candidate { incarnation, step, is_unfit, is_shunned })
        };
        ready.map(candidate).collect()
    }

    fn form_world(
        &mut self,
        workers: &[WorkerId],
        after: Option<u64>,
        candidates: &BTreeMap<WorkerId, Candidate>,
        now: Time,
    ) {
        let before: Vec<WorkerId> = self.worlds.involved().into_iter().collect();
        let furthest = workers.iter().filter_map(|w| candidates.get(w)?.step).max();
        if self.started_at.is_none() {
            // Of an earlier master's time: what it allowed, it allowed.
            self.worlds.allow(furthest.unwrap_or(0));
        }
        let has_state = furthest.is_some_and(|_| {
            workers.iter().any(|w| candidates[w].step.is_some_and(|s| s <= self.worlds.until()))
        });
        let needs_load = !workers.is_empty() && !has_state;
        if needs_load && self.is_hybrid() && !self.is_fresh {
            return self.restore_servers(now);
        }
        let load = needs_load.then(|| self.load_anew(now));
        assert!(load.is_none() || after.is_none(), "those who train on hold the state");
        let id = WorldId::of(self.config.term, self.number());
        let formed = self.worlds.form(id, workers, after, candidates).cloned();
        self.keep_holders();
        self.pace.progressed_at = now;
        self.pace.farewells = None;
        (self.pace.pause_secs, self.pace.state_bytes) = (0.0, 0);
        if after.is_none() {
            self.take_back_from(&before, workers);
        }
        let Some(world) = formed else {
            self.note("world_waits", self.describe_waiting());
            // Those who leave are free to go; the others keep what they hold.
            let nobody = World { id, members: Vec::new(), after };
            return self.tell_world(&before, &nobody, None);
        };
        if after.is_none() && self.stage == Stage::Working {
            self.worlds.allow(self.allowed(self.ledger().n_done()));
        }
        let mut told: Vec<WorkerId> = world.members.iter().map(|member| member.worker).collect();
        told.extend(before.into_iter().filter(|worker| !workers.contains(worker)));
        self.tell_world(&told, &world, load.as_ref());
    }

    pub(super) fn tell_world(
        &mut self,
        workers: &[WorkerId],
        world: &World,
        load: Option<&LoadFrom>,
    ) {
        for worker in workers {
            let command = Command::World {
                world: world.clone(),
                until: self.worlds.until(),
                generation: self.durable.generation,
                load: load.cloned(),
            };
            self.effects.push(Effect::ToWorker(*worker, command));
        }
    }

    /// Members that are left out at once finish nothing any more.
    pub(super) fn take_back_from(&mut self, before: &[WorkerId], workers: &[WorkerId]) {
        for worker in before.iter().filter(|worker| !workers.contains(worker)) {
            self.lose_cut_of(*worker);
            if !workers.is_empty() {
                self.lending.release_evaluation(*worker);
            }
        }
    }

    /// Makes it durable whose state counts, before anybody trains on without the others: the next
    /// master must not believe one of them.
    pub(super) fn keep_holders(&mut self) {
        let holders = self.worlds.holders().map(|all| all.iter().map(|(w, i)| (*w, *i)).collect());
        if self.durable.holders != holders {
            self.change(|facts| facts.holders = holders);
        }
    }

    fn describe_waiting(&self) -> String {
        let least = self.config.spec.min_workers.max(1);
        format!("training is waiting for workers; it needs at least {least} (--min_workers)")
    }

    /// Nobody has the state any more, or yet: everybody loads the last checkpoint.
    fn load_anew(&mut self, now: Time) -> LoadFrom {
        if self.is_hybrid() {
            return self.load_fresh();
        }
        let before = self.ledger().n_done();
        self.abandon_cut();
        self.lending.end_evaluation();
        self.change(|facts| facts.generation = facts.generation.next());
        let checkpoint = self.durable.latest_checkpoint();
        let step = checkpoint.map_or(0, |checkpoint| checkpoint.version);
        self.loading_from = checkpoint.map(|checkpoint| checkpoint.folder.clone());
        self.loading_since = now;
        self.go_back_to(step);
        self.worlds.start_over(step);
        self.worlds.allow(self.allowed(step));
        if self.started_at.is_some() {
            let lost = before.saturating_sub(step);
            let text = format!(
                "all workers that held the model are gone; restoring step {step}; steps to train \
                 again: {lost}"
            );
            self.note("restored", text);
        }
        self.load_from()
    }

    /// The ledger follows what the workers hold.
    pub(super) fn go_back_to(&mut self, step: u64) {
        self.lending.restore_first(step);
        self.checkpoints.go_back_to(step);
        self.forget_lost_evaluations();
        self.set_limits();
    }

    /// The furthest step that may be allowed when `n_done` are done.
    pub(super) fn allowed(&self, n_done: u64) -> u64 {
        self.barrier.min(self.limit).min(n_done.saturating_add(self.pace.ahead))
    }

    /// Allows further steps before those allowed are used up.
    pub(super) fn grant(&mut self, now: Time) {
        let is_open = self.stage == Stage::Working && self.pace.farewells.is_none();
        if !self.is_allreduce() || !is_open || !self.worlds.is_settled() {
            return;
        }
        let n_done = self.ledger().n_done();
        self.pace.measure(n_done, now);
        let (until, allowed) = (self.worlds.until(), self.allowed(n_done));
        let is_final = allowed == self.barrier.min(self.limit);
        let is_due = until.saturating_sub(n_done) <= self.pace.ahead / 2;
        if allowed <= until || !(is_due || is_final) {
            return;
        }
        if n_done >= until {
            // They had nothing to do until now.
            self.pace.progressed(now);
        }
        self.worlds.allow(allowed);
        let Some(world) = self.worlds.current() else { return };
        let command = Command::Go { world: world.id, until: allowed };
        let members = world.members.iter();
        self.effects.extend(members.map(|m| Effect::ToWorker(m.worker, command.clone())));
    }

    pub(super) fn world_news(&mut self, worker: WorkerId, news: News, now: Time) {
        match news {
            News::Formed { world, step, pause_secs, state_bytes } => {
                self.pace.pause_secs = self.pace.pause_secs.max(pause_secs);
                self.pace.state_bytes += state_bytes;
                self.formed(worker, world, step, now);
            }
            News::Stepped { world, step, hash, loss } => {
                if self.worlds.is_heard(world) && step <= self.worlds.until() {
                    self.roster.set_step(worker, step);
                    self.stepped(worker, step, hash, loss, now);
                }
            }
            News::Pace { lane_secs } => {
                let lane = Duration::try_from_secs_f64(lane_secs).unwrap_or_default();
                self.worlds.measured(worker, lane);
            }
            News::PeerLost { world, suspect, error } => {
                if self.worlds.broken(world) {
                    self.peer_lost(worker, suspect, &error, now);
                }
            }
            // Somebody else tries it next.
            News::StepFailed { world, step, error } => {
                // No world: it failed on the lane that every worker is tried on before its first.
                if world == WorldId(0) {
                    self.blame(Suspect::Batch(self.ledger().batch_at(0)), worker, &error);
                } else if self.worlds.broken(world) {
                    self.worlds.rotate();
                    self.blame(Suspect::Batch(self.ledger().batch_at(step)), worker, &error);
                }
            }
            News::Torn { world, error } => {
                if self.worlds.is_heard(world) {
                    self.torn(worker, &error, now);
                }
            }
            News::NotLoaded { generation, error } => {
                let world = self.worlds.current().map(|world| world.id);
                let is_now = generation == self.durable.generation;
                if is_now && world.is_some_and(|world| self.worlds.broken(world)) {
                    self.give_up_load(&format!("worker-{worker}"), &error);
                }
            }
        }
    }

    fn formed(&mut self, worker: WorkerId, world: WorldId, step: u64, now: Time) {
        let Some(formed) = self.worlds.formed(world, worker) else { return };
        self.keep_holders();
        self.roster.set_step(worker, step);
        self.pace.progressed(now);
        self.lending.add_idle([worker]);
        if formed.is_first {
            self.begin_world(step, now);
        }
        if formed.is_last {
            self.note_world(step);
        }
    }

    /// The first member says with which step its world begins.
    fn begin_world(&mut self, step: u64, now: Time) {
        let n_done = self.ledger().n_done();
        let is_resumed = self.started_at.is_none() && step > 0;
        self.started_at.get_or_insert(now);
        // Under a new master it may have come further than it said at first.
        self.worlds.allow(step);
        if step > n_done {
            self.commit(step, None);
        } else if step < n_done {
            // The member that was furthest is gone; what it did is repeated with the same bits.
            self.go_back_to(step);
        }
        if is_resumed {
            self.set_limits();
            self.note("resumed", format!("resumed at step {step}"));
        }
        self.keep_best(now);
    }

    fn note_world(&mut self, step: u64) {
        let Some(world) = self.worlds.current() else { return };
        let lanes = |m: &Member| match m.lanes.len() {
            0 => format!("worker-{} (no lanes)", m.worker),
            1 => format!("worker-{} (lane {})", m.worker, m.lanes.start),
            _ => format!("worker-{} (lanes {}-{})", m.worker, m.lanes.start, m.lanes.end - 1),
        };
        let members: Vec<String> = world.members.iter().map(lanes).collect();
        let mut text = format!(
            "{} continued after step {step}; the pause was {:.3} s",
            members.join(", "),
            self.pace.pause_secs
        );
        if self.pace.state_bytes > 0 {
            text.push_str(&format!(", {} bytes of state were transferred", self.pace.state_bytes));
        }
        self.note("world", text);
    }

    fn stepped(&mut self, worker: WorkerId, step: u64, hash: u64, loss: f32, now: Time) {
        if !self.is_same_hash(step, hash) {
            self.bits_differ(&format!(
                "worker-{worker} computed a different gradient for step {step} than earlier workers"
            ));
        }
        if step > self.ledger().n_done() {
            self.pace.progressed(now);
            self.pace.n_torn = 0;
            self.commit(step, Some(loss));
        }
    }

    /// Whether this step had the same gradient whenever it was told of.
    fn is_same_hash(&mut self, step: u64, hash: u64) -> bool {
        if hash == UNTOLD {
            return true;
        }
        let is_same = *self.pace.hashes.entry(step).or_insert(hash) == hash;
        while self.pace.hashes.len() > MAX_HASHES {
            self.pace.hashes.pop_first();
        }
        is_same
    }

    /// All steps up to `step` are trained.
    fn commit(&mut self, step: u64, loss: Option<f32>) {
        while self.ledger().n_done() < step {
            let batch = self.ledger().batch_at(self.ledger().n_done());
            if !self.lending.batch_done(batch) {
                break;
            }
            if let Some(loss) = loss.or(self.loss) {
                self.trained(batch, loss);
            }
        }
    }

    /// Whether everybody holds the state of the last step: then it cannot be lost with one of them.
    pub(super) fn is_together(&self) -> bool {
        let n_done = self.ledger().n_done();
        let is_there = |m: &Member| self.peer(m.worker).is_some_and(|p| p.step >= Some(n_done));
        let members = self.worlds.current().map(|world| &world.members);
        self.worlds.is_settled() && members.is_some_and(|members| members.iter().all(is_there))
    }

    /// The world of a job that trains by AllReduce.
    #[must_use]
    pub fn worlds(&self) -> Option<&Worlds> {
        self.is_allreduce().then_some(&self.worlds)
    }

    /// How other workers reach `worker`.
    #[must_use]
    pub fn peer(&self, worker: WorkerId) -> Option<&Peer> {
        self.roster.worker(worker)?.peer.as_ref()
    }
}
