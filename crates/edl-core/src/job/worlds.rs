// SPDX-License-Identifier: Apache-2.0
//! AllReduce and Hybrid: informs the members of a world, grants them steps, and records what they
//! commit. When a member is lost, the others repeat the step.

mod blame;
mod gather;

pub(super) use self::gather::GATHERING;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use super::step_control::{Paused, StepControl};
use super::strategy::Strategy;
use super::{Command, Effect, EventKind, Job, LoadFrom, MemberReport, Peer, Stage, Suspect};
use crate::id::{WorkerId, WorldId};
use crate::time::Time;
use crate::world::{Announced, Candidate, Change, Formed, World, Worlds};

impl Job {
    /// Changes the world to fit the available workers.
    pub(super) fn advance_world(&mut self, now: Time) {
        if !self.strategy.trains_in_steps() || self.durable.model.is_none() {
            return;
        }
        if self.strategy.lacks_rows() {
            return self.suspend_world();
        }
        self.check_progress(now);
        if self.is_ended() {
            return;
        }
        self.change_world(now);
        let needs_checkpoint = *self.stages.stage() == Stage::BestCheckpoint;
        if needs_checkpoint && !self.checkpoints.is_writing() && self.steps().worlds().is_settled()
        {
            self.begin_checkpoint(None, now);
        }
    }

    /// Forms the next world if one is needed. As long as only routine reports come, the answer is
    /// that of the last time: a report must not cost more the more members there are.
    fn change_world(&mut self, now: Time) {
        let most = self.instances.max_trainers();
        let facts = (self.steps().worlds().n_changes(), most);
        if self.unchanged_world == Some(facts) {
            return;
        }
        let candidates = self.candidates(now);
        match self.steps().worlds().next(&candidates, most) {
            Change::Nothing => {
                self.steps_mut().end_drain();
                self.cancel_pause();
                self.unchanged_world = Some(facts);
            }
            // Steps under suspicion come first, and a job that stops waits for no change.
            Change::Form { after: Some(_), .. }
                if self.steps().is_careful() || self.stages.stopping().is_some() =>
            {
                self.cancel_pause();
            }
            Change::Form { after: Some(_), .. } if !self.pause_for_change(now) => {
                self.unchanged_world = Some(facts);
            }
            Change::Form { workers, after } => {
                let after = after.map(|_| self.steps().worlds().until());
                let keeps =
                    after.is_some() && workers.is_empty() && self.keep_last(&candidates, now);
                if !keeps && !self.must_gather(&workers, &candidates, now) {
                    self.form_world(&workers, after, &candidates, now);
                }
            }
        }
    }

    /// Makes a planned change of members take place after the steps that they have begun, instead
    /// of after all that they are allowed: those may take long. True once that is decided.
    fn pause_for_change(&mut self, now: Time) -> bool {
        let ordered = self.checkpoints.in_progress().unwrap_or(0);
        let soon = self.ledger().n_done() + 1;
        match self.steps_mut().pause_for_change(now) {
            Paused::Failed => return true,
            Paused::NotAsked if self.steps().until() <= ordered.max(soon) => return true,
            Paused::NotAsked => {
                self.ask_to_pause(now);
                return false;
            }
            Paused::Waiting => return false,
            Paused::Late => {}
            Paused::At(step) => {
                // A checkpoint that was ordered for a step is written there. No honest member
                // pauses before a step that is done.
                let step = step.max(ordered).max(self.ledger().n_done());
                if step < self.steps().until() {
                    self.steps_mut().shorten(step);
                }
            }
        }
        let until = self.steps().until();
        self.send_go(until);
        true
    }

    /// Asks the members of the world to pause, unless they were asked before.
    pub(super) fn ask_to_pause(&mut self, now: Time) -> bool {
        if self.steps().is_asked_to_pause() {
            return false;
        }
        let number = self.number();
        let Some(world) = self.steps_mut().begin_pause(number, now) else { return false };
        self.send_to_members(Command::Pause { world, number });
        true
    }

    /// No change of members is planned anymore: they train on. A job that stops asks for itself.
    pub(super) fn cancel_pause(&mut self) {
        if self.stages.stopping().is_none() && self.steps_mut().cancel_pause() {
            let until = self.steps().until();
            self.send_go(until);
        }
    }

    /// Only a job that trains in steps gets here.
    fn steps(&self) -> &StepControl {
        self.strategy.steps().expect("the job trains in steps")
    }

    pub(super) fn steps_mut(&mut self) -> &mut StepControl {
        self.strategy.steps_mut().expect("the job trains in steps")
    }

    fn candidates(&self, now: Time) -> BTreeMap<WorkerId, Candidate> {
        let worlds = self.steps().worlds();
        self.roster.candidates(|worker, incarnation| worlds.is_holder(worker, incarnation), now)
    }

    fn form_world(
        &mut self,
        workers: &[WorkerId],
        after: Option<u64>,
        candidates: &BTreeMap<WorkerId, Candidate>,
        now: Time,
    ) {
        let before: Vec<WorkerId> = self.steps().worlds().involved().into_iter().collect();
        let furthest = workers.iter().filter_map(|w| candidates.get(w)?.step).max();
        if !self.stages.has_started() {
            // An earlier master has allowed these steps.
            self.steps_mut().worlds_mut().allow(furthest.unwrap_or(0));
        }
        let until = self.steps().worlds().until();
        let has_state = workers.iter().any(|w| {
            candidates.get(w).and_then(|candidate| candidate.step).is_some_and(|s| s <= until)
        });
        let needs_load = !workers.is_empty() && !has_state;
        if needs_load && self.strategy.must_servers_load_first() {
            return self.restore_servers(now);
        }
        let load = needs_load.then(|| self.load_checkpoint(now));
        assert!(load.is_none() || after.is_none(), "workers that continue hold the state");
        let id = WorldId::of(self.config.term, self.number());
        let formed = self.steps_mut().form(id, workers, after, candidates, now);
        self.keep_holders();
        if after.is_none() {
            self.take_back_from(&before, workers);
        }
        let Some(world) = formed else {
            self.note(EventKind::WaitingForWorkers, self.describe_waiting());
            // Members that leave can exit; the others keep what they hold.
            let empty = World { id, members: Vec::new(), after };
            return self.send_world(&before, &empty, None);
        };
        if after.is_none() && self.stages.is_working() && !self.checkpoints.must_not_pass() {
            let (n_done, end) = (self.ledger().n_done(), self.stages.next_stop());
            self.steps_mut().allow_after(n_done, end);
        }
        let mut informed: Vec<WorkerId> =
            world.members.iter().map(|member| member.worker).collect();
        let workers: BTreeSet<WorkerId> = workers.iter().copied().collect();
        informed.extend(before.into_iter().filter(|worker| !workers.contains(worker)));
        self.send_world(&informed, &world, load.as_ref());
    }

    pub(super) fn send_world(
        &mut self,
        workers: &[WorkerId],
        world: &World,
        load: Option<&LoadFrom>,
    ) {
        let skipped = self.durable.skipped.iter().map(|batch| self.ledger().position(*batch));
        let skipped: BTreeSet<u64> = skipped.collect();
        let announced = Arc::new(Announced {
            world: world.clone(),
            until: self.steps().until(),
            generation: self.durable.generation,
            load: load.cloned(),
            skipped,
        });
        let command = Command::World(announced);
        self.effects.extend(workers.iter().map(|w| Effect::ToWorker(*w, command.clone())));
    }

    /// Members that are removed at once finish nothing: takes their work back.
    pub(super) fn take_back_from(&mut self, before: &[WorkerId], workers: &[WorkerId]) {
        let stay: BTreeSet<&WorkerId> = workers.iter().collect();
        for worker in before.iter().filter(|worker| !stay.contains(worker)) {
            self.abandon_checkpoint_of(*worker);
            if !workers.is_empty() {
                self.assignments.release_shards(*worker);
            }
        }
    }

    /// Makes the holders of the state durable before they train without the other workers: the
    /// next master must not use the state of those.
    pub(super) fn keep_holders(&mut self) {
        let Some(worlds) = self.strategy.worlds() else { return };
        let holders = worlds.holders().map(|all| all.iter().map(|(w, i)| (*w, *i)).collect());
        if self.durable.holders != holders {
            self.change(|facts| facts.holders = holders);
        }
    }

    fn describe_waiting(&self) -> String {
        let least = self.config.spec.min_workers.max(1);
        format!("training is waiting for workers; it needs at least {least} (--min_workers)")
    }

    /// No worker has the state: all of them load the last checkpoint.
    fn load_checkpoint(&mut self, now: Time) -> LoadFrom {
        if let Strategy::Hybrid { .. } = self.strategy {
            return self.load_fresh();
        }
        let before = self.ledger().n_done();
        self.abandon_checkpoint();
        self.assignments.end_evaluation();
        self.change(|facts| facts.generation = facts.generation.next());
        let checkpoint = self.durable.latest_checkpoint();
        let step = checkpoint.map_or(0, |checkpoint| checkpoint.version);
        let folder = checkpoint.map(|checkpoint| checkpoint.folder.clone());
        self.strategy.group_mut().begin_load(folder, now);
        self.go_back_to(step);
        let end = self.stages.next_stop();
        self.steps_mut().start_over(step, end);
        if self.stages.has_started() {
            let lost = before.saturating_sub(step);
            let text = format!(
                "no worker has a copy of the model; restoring step {step}; steps to train again: \
                 {lost}"
            );
            self.note(EventKind::Restored, text);
        }
        self.load_from()
    }

    /// The ledger follows what the workers hold.
    pub(super) fn go_back_to(&mut self, step: u64) {
        self.assignments.restore_first(step);
        self.checkpoints.go_back_to(step);
        self.forget_lost_evaluations();
        self.set_limits();
    }

    /// Allows further steps before those allowed are used up.
    pub(super) fn grant(&mut self, now: Time) {
        let (n_done, end) = (self.ledger().n_done(), self.stages.next_stop());
        let may_grant = self.stages.is_working() && !self.checkpoints.must_not_pass();
        let Some(steps) = self.strategy.steps_mut().filter(|_| may_grant) else { return };
        if let Some(until) = steps.grant(n_done, end, now) {
            self.send_go(until);
        }
    }

    pub(super) fn send_go(&mut self, until: u64) {
        let Some(world) = self.strategy.worlds().and_then(Worlds::current) else { return };
        self.send_to_members(Command::Go { world: world.id, until });
    }

    fn send_to_members(&mut self, command: Command) {
        let members = self.strategy.members().iter();
        self.effects.extend(members.map(|m| Effect::ToWorker(m.worker, command.clone())));
    }

    pub(super) fn member_reported(&mut self, worker: WorkerId, report: MemberReport, now: Time) {
        if let MemberReport::StepFailed { world: WorldId(0), error, .. } = &report {
            // It failed on the lane that every worker is tested on before its first world.
            return self.blame(Suspect::Batch(self.ledger().batch_at(0)), worker, error);
        }
        let Some(steps) = self.strategy.steps_mut() else { return };
        match report {
            MemberReport::Formed { world, step, pause_secs, state_bytes } => {
                if let Some(formed) = steps.formed(world, worker, (pause_secs, state_bytes), now) {
                    self.formed(worker, formed, step, now);
                }
            }
            MemberReport::Stepped { world, step, hash, loss } => {
                if steps.worlds().is_heard(world) && step <= steps.worlds().until() {
                    self.roster.set_step(worker, step);
                    self.stepped(worker, step, hash, loss, now);
                }
            }
            MemberReport::Paused { world, number, step } => {
                steps.paused(world, worker, number, step);
                if !steps.is_pausing() {
                    self.unchanged_world = None;
                }
            }
            MemberReport::Pace { lane_secs } => {
                let lane = Duration::try_from_secs_f64(lane_secs).unwrap_or_default();
                steps.worlds_mut().measured(worker, lane);
            }
            MemberReport::PeerLost { world, suspect, error } => {
                if steps.worlds_mut().broken(world) {
                    self.peer_lost(worker, suspect, &error, now);
                }
            }
            // Another worker tries it next.
            MemberReport::StepFailed { world, step, error } => {
                if steps.worlds_mut().broken(world) {
                    steps.worlds_mut().rotate();
                    self.blame(Suspect::Batch(self.ledger().batch_at(step)), worker, &error);
                }
            }
            MemberReport::NonFinite { world, step, error } => {
                if steps.worlds_mut().broken(world) {
                    let batch = self.ledger().batch_at(step);
                    self.nonfinite(batch, worker, &error, now);
                }
            }
            MemberReport::Quit { world, step } => {
                if steps.worlds_mut().broken(world) {
                    self.quit(worker, step);
                }
            }
            MemberReport::StepMismatch { world, error } => {
                if steps.worlds().is_heard(world) {
                    self.step_mismatch(worker, &error, now);
                }
            }
            MemberReport::NotLoaded { generation, error } => {
                let world = steps.worlds().current().map(|world| world.id);
                let is_now = generation == self.durable.generation;
                if is_now && world.is_some_and(|world| steps.worlds_mut().broken(world)) {
                    self.give_up_load(&format!("worker-{worker}"), &error);
                }
            }
        }
    }

    /// The training script of a worker has left its loop: training ends with what is done. No
    /// other member has trained further without it, unless it had no lane.
    fn quit(&mut self, worker: WorkerId, step: u64) {
        let last = step.max(self.ledger().n_done());
        let left_at = self.roster.furthest_step(worker);
        if left_at > last {
            // A checkpoint was loaded since; another process of the script trains the steps again.
            return self.replace_script(worker, left_at, step);
        }
        self.abandon_checkpoint();
        self.steps_mut().end_at(last);
        self.set_last_step(last);
        let text = format!("the script of worker-{worker} left its loop; ending after step {last}");
        self.note(EventKind::Quit, text);
    }

    fn replace_script(&mut self, worker: WorkerId, left_at: u64, step: u64) {
        let why = format!(
            "the script of worker-{worker} left its loop after step {left_at} and cannot continue \
             at step {step}; replacing it"
        );
        self.release_worker(worker);
        self.abandon_checkpoint_of(worker);
        // If it reconnects before it ends, it is still known where it left the loop.
        self.roster.worker_disconnected(worker);
        self.note(EventKind::WorkerLeft, why.clone());
        self.effects.push(Effect::CloseWorker(worker, why));
        self.replace(worker);
    }

    fn set_last_step(&mut self, last: u64) {
        self.change(|facts| facts.last_step = Some(last));
        self.set_limits();
    }

    fn formed(&mut self, worker: WorkerId, formed: Formed, step: u64, now: Time) {
        // Those in between are made durable by the next tick: the state of one holder suffices.
        if formed.is_first || formed.is_last {
            self.keep_holders();
        }
        self.roster.set_step(worker, step);
        self.assignments.add_idle([worker]);
        if formed.is_first {
            self.begin_world(step, now);
        }
        if formed.is_last
            && let Some(text) = self.steps().describe(step)
        {
            self.note(EventKind::World, text);
        }
    }

    /// The first member reports the step that its world begins with.
    fn begin_world(&mut self, step: u64, now: Time) {
        let n_done = self.ledger().n_done();
        let is_first = !self.stages.has_started();
        self.stages.start(now);
        // Under a new master, it may have trained on since it connected.
        self.steps_mut().worlds_mut().allow(step);
        if step > n_done {
            self.commit(step, None);
        } else if step < n_done {
            // The most advanced member is gone; its steps are repeated with identical results.
            self.go_back_to(step);
        }
        if self.durable.last_step.is_some_and(|last| last < step) {
            self.set_last_step(step);
        }
        if is_first {
            self.set_limits();
            self.allow_begun(step);
            if step > 0 {
                self.note(EventKind::Resumed, format!("resumed at step {step}"));
            }
        }
        self.keep_best(now);
    }

    fn stepped(&mut self, worker: WorkerId, step: u64, hash: u64, loss: f32, now: Time) {
        if !self.steps_mut().is_same_hash(step, hash) {
            self.bits_differ(&format!(
                "worker-{worker} computed a different gradient for step {step} than earlier workers"
            ));
        }
        let n_new = step.saturating_sub(self.ledger().n_done());
        if n_new > 0 {
            if let Some(time) = self.steps_mut().stepped(n_new, now) {
                self.measured(time);
            }
            self.commit(step, Some(loss));
        }
    }

    /// All steps up to `step` are trained.
    fn commit(&mut self, step: u64, loss: Option<f32>) {
        while self.ledger().n_done() < step {
            let batch = self.ledger().batch_at(self.ledger().n_done());
            if !self.assignments.batch_done(batch) {
                break;
            }
            if let Some(loss) = loss.or(self.loss()) {
                self.trained(batch, loss);
            }
        }
    }

    /// Whether the last step cannot be lost with one worker.
    pub(super) fn is_together(&self) -> bool {
        let step = |worker| self.roster.step(worker);
        self.strategy.steps().is_none_or(|steps| steps.is_together(self.ledger().n_done(), step))
    }

    /// The world of a job that trains by AllReduce.
    #[must_use]
    pub fn worlds(&self) -> Option<&Worlds> {
        self.strategy.worlds()
    }

    /// How other workers reach `worker`.
    #[must_use]
    pub fn peer(&self, worker: WorkerId) -> Option<&Peer> {
        self.roster.peer(worker)
    }
}
