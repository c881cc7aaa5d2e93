// SPDX-License-Identifier: Apache-2.0
//! Training in steps: the world, how many steps it may train, and whether it makes progress.
//!
//! A worker trains up to the last step that it is allowed, then it waits. No worker has passed a
//! step that is not allowed yet, so anything can be ordered for it: a checkpoint, a change of
//! members. Without a master, all workers stop there.
//!
//! These steps may take long, so a change of members does not wait for them. The members are asked
//! to pause, and answer with the last step that each of them has begun. When all have answered, the
//! steps after the highest of these are no longer allowed, and the change takes place there. No
//! member begins a step that it has ruled out before the master allows it again.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::time::Duration;

use crate::activity::WaitingFor;
use crate::id::{Incarnation, WorkerId, WorldId};
use crate::spec::JobSpec;
use crate::time::Time;
use crate::world::{Candidate, Formed, Member, World, Worlds};

/// Steps are allowed in advance for about this much training time.
const AHEAD: Duration = Duration::from_secs(1);
const MIN_AHEAD: u64 = 8;
const MAX_AHEAD: u64 = 100_000;
/// The speed is measured over at least this long.
const MEASURED: Duration = Duration::from_millis(200);
/// A change of members waits this long for all members to pause. Then they train on, and it takes
/// place after the last step that is allowed.
const PAUSE_TIMEOUT: Duration = Duration::from_millis(500);
/// Hashes of this many steps are kept for comparison.
const MAX_HASHES: usize = 64;
/// The hash that a worker reports when it no longer knows the one of a step.
const UNKNOWN_HASH: u64 = 0;
/// The last members that leave try this many checkpoints until one is complete.
const MAX_DRAIN_CHECKPOINTS: u32 = 3;
/// A world is formed again this many times before members that wait for each other are replaced.
const MAX_STUCK: u32 = 4;
/// The job fails if workers and servers disagree this many times without a step in between.
const MAX_MISMATCHES: u32 = 3;
/// A note about a world names this many of its members.
const MAX_NAMED: usize = 16;

/// The world, its speed, and what is known of the last steps.
#[derive(Clone, Debug)]
pub(super) struct StepControl {
    worlds: Worlds,
    measured_at: Time,
    n_measured: u64,
    /// Steps that are trained in the time for which steps are allowed in advance.
    ahead: u64,
    /// When the world last made progress.
    progressed_at: Time,
    /// When it last finished a step, unless it has paused since.
    stepped_at: Option<Time>,
    /// Since when workers wait for a first world.
    gathering_since: Option<Time>,
    hashes: BTreeMap<u64, u64>,
    pause_secs: f64,
    state_bytes: u64,
    /// Times in a row without progress although no worker was busy.
    n_stuck: u32,
    /// All members leave: no step is allowed, and this many checkpoints were begun for it.
    n_drain_checkpoints: Option<u32>,
    /// Workers that ran before this master did; they may hold the state.
    survivors: BTreeSet<WorkerId>,
    /// Times in a row that workers and servers disagreed on the step.
    n_mismatches: u32,
    /// The last step that the members may train, if that is lower than what was ever allowed: steps
    /// are under suspicion.
    held_back: Option<u64>,
    pause: Option<Pause>,
    /// Steps that may have crashed a worker. Each is allowed when the one before it is done, so the
    /// next crash shows which one.
    isolated: Range<u64>,
}

/// The members of a world were asked to pause: for a change of members, or because the job stops.
#[derive(Clone, Debug)]
struct Pause {
    world: WorldId,
    /// Of the request. A late answer to an earlier one says nothing: steps were allowed since.
    number: u64,
    since: Time,
    /// The last step that each member begins.
    last: BTreeMap<WorkerId, u64>,
    /// Not all members answered in time, and they train on.
    has_failed: bool,
}

/// What has come of a request to pause for a change of members.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Paused {
    /// There was no request.
    NotAsked,
    /// Not all members have answered.
    Waiting,
    /// No member begins a step after this one.
    At(u64),
    /// Not all of them have answered in time.
    Late,
    /// That was known before.
    Failed,
}

impl StepControl {
    pub(super) fn new(
        spec: &JobSpec,
        holders: Option<&[(WorkerId, Incarnation)]>,
        now: Time,
    ) -> Self {
        let holders = holders.map(|holders| holders.iter().copied().collect());
        let worlds = Worlds::new(spec.n_lanes(), spec.min_workers, holders);
        Self {
            worlds: if spec.lane_balance { worlds.balanced() } else { worlds },
            measured_at: now,
            n_measured: 0,
            ahead: MIN_AHEAD,
            progressed_at: now,
            stepped_at: None,
            gathering_since: None,
            hashes: BTreeMap::new(),
            pause_secs: 0.0,
            state_bytes: 0,
            n_stuck: 0,
            n_drain_checkpoints: None,
            survivors: BTreeSet::new(),
            n_mismatches: 0,
            held_back: None,
            pause: None,
            isolated: 0..0,
        }
    }

    pub(super) fn worlds(&self) -> &Worlds {
        &self.worlds
    }

    pub(super) fn worlds_mut(&mut self) -> &mut Worlds {
        &mut self.worlds
    }

    pub(super) fn survivors(&self) -> &BTreeSet<WorkerId> {
        &self.survivors
    }

    pub(super) fn set_survivors(&mut self, workers: impl Iterator<Item = WorkerId>) {
        self.survivors = workers.collect();
    }

    /// The world made progress, or could not be expected to.
    pub(super) fn progressed(&mut self, now: Time) {
        (self.progressed_at, self.n_stuck) = (now, 0);
    }

    /// The last step that the members of the world may train.
    pub(super) fn until(&self) -> u64 {
        self.held_back.unwrap_or_else(|| self.worlds.until())
    }

    /// Trains these steps one by one from now on.
    pub(super) fn isolate(&mut self, steps: Range<u64>) {
        self.isolated = steps;
    }

    /// Whether members may not train all steps that others were allowed before.
    pub(super) fn is_careful(&self) -> bool {
        self.until() < self.worlds.until()
    }

    /// How many steps are allowed in advance.
    fn n_ahead(&self) -> u64 {
        self.ahead.max(MIN_AHEAD)
    }

    /// The last step that can be allowed when `n_done` are done and training pauses at `end`.
    fn allowed(&self, n_done: u64, end: u64) -> u64 {
        let most = match &self.isolated {
            steps if steps.contains(&n_done) => n_done + 1,
            steps if n_done < steps.start => steps.start,
            _ => u64::MAX,
        };
        end.min(n_done.saturating_add(self.n_ahead())).min(most)
    }

    /// Allows further steps after `n_done`.
    pub(super) fn allow_after(&mut self, n_done: u64, end: u64) {
        self.allow(self.allowed(n_done, end), n_done);
    }

    /// What was allowed once is taken back only for steps under suspicion, or if all members have
    /// ruled it out (`shorten`, `end_at`).
    fn allow(&mut self, until: u64, n_done: u64) {
        self.worlds.allow(until);
        if n_done >= self.isolated.end {
            self.isolated = 0..0;
        }
        self.held_back = (n_done < self.isolated.end).then_some(until);
    }

    /// All workers load the state of `step`.
    pub(super) fn start_over(&mut self, step: u64, end: u64) {
        self.worlds.start_over(step);
        self.allow_after(step, end);
    }

    /// Allows further steps before those allowed are used up; returns the last one.
    pub(super) fn grant(&mut self, n_done: u64, end: u64, now: Time) -> Option<u64> {
        if self.n_drain_checkpoints.is_some() || !self.worlds.is_settled() || self.is_pausing() {
            return None;
        }
        self.measure(n_done, now);
        let (until, allowed) = (self.until(), self.allowed(n_done, end));
        let is_due = until.saturating_sub(n_done) <= self.n_ahead() / 2 || allowed == end;
        if allowed <= until || !is_due {
            return None;
        }
        if n_done >= until {
            self.progressed(now); // The workers had nothing to do until now.
            self.stepped_at = None;
        }
        self.allow(allowed, n_done);
        Some(self.until())
    }

    /// Adapts the steps allowed in advance to the speed of training.
    fn measure(&mut self, n_done: u64, now: Time) {
        let elapsed = now.since(self.measured_at);
        if elapsed < MEASURED {
            return;
        }
        let n_new = n_done.saturating_sub(self.n_measured);
        if n_new > 0 {
            let ahead = u128::from(n_new) * AHEAD.as_nanos() / elapsed.as_nanos().max(1);
            self.ahead = u64::try_from(ahead).unwrap_or(MAX_AHEAD).min(MAX_AHEAD);
        }
        (self.measured_at, self.n_measured) = (now, n_done);
    }

    pub(super) fn form(
        &mut self,
        id: WorldId,
        workers: &[WorkerId],
        after: Option<u64>,
        candidates: &BTreeMap<WorkerId, Candidate>,
        now: Time,
    ) -> Option<World> {
        (self.progressed_at, self.stepped_at) = (now, None);
        self.n_drain_checkpoints = None;
        (self.pause_secs, self.state_bytes) = (0.0, 0);
        self.pause = None;
        self.worlds.form(id, workers, after, candidates).cloned()
    }

    /// A member holds the state that its world begins with.
    pub(super) fn formed(
        &mut self,
        world: WorldId,
        worker: WorkerId,
        (pause_secs, state_bytes): (f64, u64),
        now: Time,
    ) -> Option<Formed> {
        self.pause_secs = self.pause_secs.max(pause_secs);
        self.state_bytes += state_bytes;
        let formed = self.worlds.formed(world, worker)?;
        self.progressed(now);
        Some(formed)
    }

    /// Describes the world that continues after `step`.
    pub(super) fn describe(&self, step: u64) -> Option<String> {
        let lanes = |m: &Member| match m.lanes.len() {
            0 => format!("worker-{} (no lanes)", m.worker),
            1 => format!("worker-{} (lane {})", m.worker, m.lanes.start),
            _ => format!("worker-{} (lanes {}-{})", m.worker, m.lanes.start, m.lanes.end - 1),
        };
        let members = &self.worlds.current()?.members;
        let named: Vec<String> = members.iter().take(MAX_NAMED).map(lanes).collect();
        let more = match members.len() - named.len() {
            0 => String::new(),
            n => format!(" and {n} more"),
        };
        let mut text = format!(
            "{}{more} continued after step {step}; training paused for {:.3} s",
            named.join(", "),
            self.pause_secs
        );
        if self.state_bytes > 0 {
            text.push_str(&format!(", {} bytes of state were transferred", self.state_bytes));
        }
        Some(text)
    }

    /// So many steps were done for the first time; how long one took, if that is known.
    pub(super) fn stepped(&mut self, n_new: u64, now: Time) -> Option<Duration> {
        self.progressed(now);
        self.n_mismatches = 0;
        let before = self.stepped_at.replace(now)?;
        Some(now.since(before) / u32::try_from(n_new).unwrap_or(u32::MAX))
    }

    /// Workers and servers disagree on the step; whether that happened too often.
    pub(super) fn is_mismatched_too_often(&mut self) -> bool {
        self.n_mismatches += 1;
        self.n_mismatches >= MAX_MISMATCHES
    }

    /// Whether every report of this step had the same gradient.
    pub(super) fn is_same_hash(&mut self, step: u64, hash: u64) -> bool {
        if hash == UNKNOWN_HASH {
            return true;
        }
        let is_same = *self.hashes.entry(step).or_insert(hash) == hash;
        while self.hashes.len() > MAX_HASHES {
            self.hashes.pop_first();
        }
        is_same
    }

    /// Whether a worker is a member that has steps to train, or has yet to enter the world.
    pub(super) fn is_awaited(&self, worker: WorkerId, n_done: u64) -> bool {
        self.is_member(worker) && (n_done < self.until() || !self.worlds.has_formed(worker))
    }

    pub(super) fn is_member(&self, worker: WorkerId) -> bool {
        self.worlds.member(worker).is_some()
    }

    /// Whether every member holds the last step: then it cannot be lost with one of them.
    pub(super) fn is_together(&self, n_done: u64, step: impl Fn(WorkerId) -> Option<u64>) -> bool {
        let is_there = |member: &Member| step(member.worker) >= Some(n_done);
        let world = self.worlds.current().filter(|_| self.worlds.is_settled());
        world.is_some_and(|world| world.members.iter().all(is_there))
    }

    /// Whether the world made no progress for `timeout`.
    pub(super) fn is_late(&self, timeout: Duration, now: Time) -> bool {
        now.since(self.progressed_at) >= timeout
    }

    /// Looks for members that delay the others if the world owes a step for longer than `timeout`.
    /// Nothing is returned if it is in time, and no member if all wait and should retry. A member
    /// that waits for another one is not at fault.
    pub(super) fn find_stuck(
        &mut self,
        timeout: Duration,
        waits_for: impl Fn(WorkerId) -> WaitingFor,
        now: Time,
    ) -> Option<Vec<WorkerId>> {
        if !self.is_late(timeout, now) {
            return None;
        }
        let world = self.worlds.current()?;
        let members: Vec<WorkerId> = world.members.iter().map(|member| member.worker).collect();
        let id = world.id;
        self.progressed_at = now;
        self.worlds.broken(id);
        self.n_stuck += 1;
        let that_wait_for = |what: WaitingFor| {
            let waits = members.iter().copied().filter(|worker| waits_for(*worker) == what);
            waits.collect::<Vec<_>>()
        };
        let mut stuck = that_wait_for(WaitingFor::Nothing);
        if stuck.is_empty() && self.n_stuck > 1 {
            // They were informed twice and still wait for the master: they do not listen.
            stuck = that_wait_for(WaitingFor::Master);
        }
        if stuck.is_empty() && self.n_stuck >= MAX_STUCK {
            stuck = members; // They wait for each other, world after world.
        }
        Some(stuck)
    }

    /// When a world without progress is stuck after `timeout`, and when waits for workers end.
    pub(super) fn deadlines(
        &self,
        timeout: Duration,
        waits: [Duration; 2],
    ) -> impl Iterator<Item = Time> {
        let gathering = self.gathering_since.map(|since| waits.map(|wait| since + wait));
        let pause = self.asked().filter(|pause| !pause.has_failed);
        let pause = pause.map(|pause| pause.since + PAUSE_TIMEOUT);
        let gathering = gathering.into_iter().flatten();
        [self.progressed_at + timeout].into_iter().chain(gathering).chain(pause)
    }

    /// Since when workers wait for a first world.
    pub(super) fn gathering_since(&mut self, now: Time) -> Time {
        *self.gathering_since.get_or_insert(now)
    }

    pub(super) fn stop_gathering(&mut self) {
        self.gathering_since = None;
    }

    /// Members of the current world are asked to pause, by the request with this number.
    pub(super) fn begin_pause(&mut self, number: u64, now: Time) -> Option<WorldId> {
        let world = self.worlds.current()?.id;
        let last = BTreeMap::new();
        self.pause = Some(Pause { world, number, since: now, last, has_failed: false });
        Some(world)
    }

    pub(super) fn is_asked_to_pause(&self) -> bool {
        self.asked().is_some()
    }

    /// How the members of the current world were asked to pause, if they were.
    fn asked(&self) -> Option<&Pause> {
        self.pause.as_ref().filter(|pause| self.worlds.is_current(pause.world))
    }

    /// A member begins no step after `step`.
    pub(super) fn paused(&mut self, world: WorldId, worker: WorkerId, number: u64, step: u64) {
        let is_member = self.is_member(worker);
        let asked = self.pause.as_mut().filter(|pause| pause.world == world && is_member);
        if let Some(pause) = asked.filter(|pause| pause.number == number) {
            pause.last.insert(worker, step);
        }
    }

    /// Members are asked again: one may have missed what it was asked, or it is for something else.
    pub(super) fn pause_again(&mut self) {
        self.pause = None;
    }

    /// The last step that any member begins, once all of them have paused.
    pub(super) fn paused_at(&self) -> Option<u64> {
        let pause = self.asked().filter(|pause| !pause.has_failed)?;
        let has_all = pause.last.len() == self.worlds.current()?.members.len();
        pause.last.values().copied().max().filter(|_| has_all)
    }

    /// Whether members were asked to pause, and not all have answered.
    pub(super) fn is_pausing(&self) -> bool {
        self.asked().is_some_and(|pause| !pause.has_failed) && self.paused_at().is_none()
    }

    /// What has come of the request to pause for a change of members.
    pub(super) fn pause_for_change(&mut self, now: Time) -> Paused {
        let step = self.paused_at();
        self.pause.take_if(|pause| !self.worlds.is_current(pause.world));
        let Some(pause) = &mut self.pause else { return Paused::NotAsked };
        if let Some(step) = step {
            self.pause = None;
            return Paused::At(step);
        }
        if pause.has_failed {
            return Paused::Failed;
        }
        pause.has_failed = now >= pause.since + PAUSE_TIMEOUT;
        if pause.has_failed { Paused::Late } else { Paused::Waiting }
    }

    /// The members need not pause after all. Whether they were asked to.
    pub(super) fn cancel_pause(&mut self) -> bool {
        let is_asked = self.asked().is_some_and(|pause| !pause.has_failed);
        self.pause.take_if(|_| is_asked).is_some()
    }

    /// Takes back the steps after `step`, which all members have ruled out.
    pub(super) fn shorten(&mut self, step: u64) {
        self.worlds.start_over(step);
        self.held_back = self.held_back.map(|until| until.min(step));
    }

    /// Takes back the steps after `step`: no member has begun them.
    pub(super) fn end_at(&mut self, step: u64) {
        self.worlds.start_over(step);
        (self.held_back, self.isolated) = (None, 0..0);
    }

    /// Whether members stay only until a checkpoint is complete.
    pub(super) fn is_draining(&self) -> bool {
        self.n_drain_checkpoints.is_some()
    }

    /// All members leave.
    pub(super) fn begin_drain(&mut self) {
        self.n_drain_checkpoints.get_or_insert(0);
    }

    /// Whether members that leave should take one more checkpoint.
    pub(super) fn next_drain_checkpoint(&mut self) -> bool {
        let n_before = self.n_drain_checkpoints.unwrap_or(0);
        let is_next = n_before < MAX_DRAIN_CHECKPOINTS;
        self.n_drain_checkpoints = Some(n_before + u32::from(is_next));
        is_next
    }

    pub(super) fn end_drain(&mut self) {
        self.n_drain_checkpoints = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many steps are allowed after a second of training at this speed.
    fn n_allowed(steps_per_second: u64) -> u64 {
        let mut steps = StepControl::new(&JobSpec::default(), None, Time::ZERO);
        steps.measure(steps_per_second, Time::ZERO + Duration::from_secs(1));
        steps.allowed(steps_per_second, u64::MAX) - steps_per_second
    }

    #[test]
    fn steps_of_about_a_second_are_allowed() {
        for (steps_per_second, allowed) in [(1000, 1000), (10, 10), (1, 8)] {
            assert_eq!(n_allowed(steps_per_second), allowed);
        }
    }
}
