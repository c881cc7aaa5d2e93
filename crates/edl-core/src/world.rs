// SPDX-License-Identifier: Apache-2.0
//! The world: which workers train together under AllReduce, and how far they may go.
//!
//! There is one path for every change of members. A world that lost a member is replaced at once.
//! If a worker joins or leaves, the world is replaced after a step that no worker has passed yet, so
//! nothing is trained twice. A worker's state is a function of its step alone: it does not matter
//! which worker finished a step, and the most advanced member passes its state on.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::id::{Generation, Incarnation, WorkerId, WorldId};
use crate::job::LoadFrom;
use crate::lanes::{self, Span};
use crate::spec::MAX_MEMBERS;

/// Lanes are assigned again if that shortens a step to less than this share of its time.
const WORTH_IT: f64 = 0.8;

/// Members in the order of their lanes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct World {
    pub id: WorldId,
    pub members: Vec<Member>,
    /// Takes over after this step; at once if none is named.
    pub after: Option<u64>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Member {
    pub worker: WorkerId,
    pub incarnation: Incarnation,
    pub lanes: Span,
    pub has_state: bool,
}

/// A world as the master announces it to a worker.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Announced {
    pub world: World,
    /// Members may train up to this step without another grant.
    pub until: u64,
    pub generation: Generation,
    /// Set if no member has state: every member loads it.
    pub load: Option<LoadFrom>,
    /// Steps, counted from zero, that change no parameters.
    pub skipped: BTreeSet<u64>,
}

impl World {
    /// The place of a worker among the members.
    #[must_use]
    pub fn place_of(&self, worker: WorkerId, incarnation: Incarnation) -> Option<usize> {
        let is_it = |member: &Member| (member.worker, member.incarnation) == (worker, incarnation);
        self.members.iter().position(is_it)
    }

    /// Whether a worker has nothing to finish before this world takes over. A worker whose state
    /// is void is not in the world that trains until then: the world that it believes to be in
    /// was replaced while it did not hear the master.
    #[must_use]
    pub fn is_due_at_once(&self, worker: WorkerId, incarnation: Incarnation) -> bool {
        let place = self.place_of(worker, incarnation);
        self.after.is_none() || place.is_some_and(|place| !self.members[place].has_state)
    }

    /// Whether a member of this world is not in `next`.
    #[must_use]
    pub fn loses_members_in(&self, next: &Self) -> bool {
        let stays = |member: &Member| next.place_of(member.worker, member.incarnation).is_some();
        !self.members.iter().all(stays)
    }
}

/// A worker that could be a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Candidate {
    pub incarnation: Incarnation,
    /// The step whose state it holds.
    pub step: Option<u64>,
    /// It may stay where it is, but must not join another world.
    pub is_unfit: bool,
    /// Others have lost it lately: it is used only if there is no other worker.
    pub is_banned: bool,
}

/// A change of the world.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Change {
    /// It is as it should be, or a change is under way.
    Nothing,
    /// These workers train, from now or after a step. Empty: there are too few workers.
    Form { workers: Vec<WorkerId>, after: Option<u64> },
}

/// The world of a job, and what is known of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Worlds {
    n_lanes: u32,
    min_workers: u32,
    current: Option<Placed>,
    /// The previous world, which keeps training until the current one takes over.
    previous: Option<Placed>,
    /// Members that hold the state the current world begins with.
    formed: BTreeSet<WorkerId>,
    /// The workers whose state counts. The state of others may be inconsistent: the members that it
    /// was read from keep training without waiting. None before a job's first world: all counts.
    holders: Option<BTreeMap<WorkerId, Incarnation>>,
    is_broken: bool,
    /// The highest step that any worker was ever allowed to train, unless all have given up those
    /// after it.
    until: u64,
    /// Shifts the lanes among the members, so another one tries work that failed.
    rotation: usize,
    /// Nanoseconds that a lane takes each worker, where lanes follow speed.
    speeds: Option<BTreeMap<WorkerId, u64>>,
    /// Grows with everything here that `next` depends on, except for speeds.
    n_changes: u64,
}

/// A world, and the place of each worker in it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Placed {
    world: World,
    places: BTreeMap<WorkerId, usize>,
}

impl Placed {
    fn new(world: World) -> Self {
        let places = world.members.iter().zip(0..).map(|(member, place)| (member.worker, place));
        Self { places: places.collect(), world }
    }

    fn member(&self, worker: WorkerId) -> Option<&Member> {
        self.places.get(&worker).map(|place| &self.world.members[*place])
    }
}

impl Worlds {
    /// The world of a job, with the workers whose state counted under an earlier master.
    #[must_use]
    pub fn new(
        n_lanes: u32,
        min_workers: u32,
        holders: Option<BTreeMap<WorkerId, Incarnation>>,
    ) -> Self {
        Self {
            n_lanes,
            min_workers: min_workers.max(1),
            current: None,
            previous: None,
            formed: BTreeSet::new(),
            holders,
            is_broken: false,
            until: 0,
            rotation: 0,
            speeds: None,
            n_changes: 0,
        }
    }

    /// Lets the number of a member's lanes follow its speed.
    #[must_use]
    pub fn balanced(self) -> Self {
        Self { speeds: Some(BTreeMap::new()), ..self }
    }

    /// `worker` takes this long to train a lane.
    pub fn measured(&mut self, worker: WorkerId, lane: Duration) {
        if let Some(speeds) = &mut self.speeds {
            speeds.insert(worker, u64::try_from(lane.as_nanos()).unwrap_or(u64::MAX).max(1));
        }
    }

    /// What a lane takes each of `workers`, once all of them were measured.
    #[expect(clippy::cast_precision_loss, reason = "a measure needs no more than 53 bits")]
    fn lane_secs(&self, workers: impl Iterator<Item = WorkerId>) -> Option<Vec<f64>> {
        let speeds = self.speeds.as_ref()?;
        workers.map(|worker| speeds.get(&worker).map(|nanos| *nanos as f64)).collect()
    }

    /// Whether other lanes would make the members' step much shorter.
    fn is_uneven(&self, world: &World) -> bool {
        let Some(secs) = self.lane_secs(world.members.iter().map(|member| member.worker)) else {
            return false;
        };
        let spans: Vec<Span> = world.members.iter().map(|member| member.lanes.clone()).collect();
        let best = lanes::assign_by_speed(self.n_lanes, &secs);
        lanes::step_secs(&best, &secs) < WORTH_IT * lanes::step_secs(&spans, &secs)
    }

    /// The change that the world needs, given the available workers. If it has `most` members,
    /// the others are spares.
    #[must_use]
    pub fn next(&self, candidates: &BTreeMap<WorkerId, Candidate>, most: Option<u32>) -> Change {
        let wanted = self.wanted(candidates, most);
        let Some(current) = self.current() else {
            return match wanted.is_empty() {
                true => Change::Nothing,
                false => Change::Form { workers: wanted, after: None },
            };
        };
        let is_there = |member: &Member| {
            candidates.get(&member.worker).is_some_and(|c| c.incarnation == member.incarnation)
        };
        if self.is_broken || !current.members.iter().all(is_there) {
            let is_kept = candidates.values().any(|c| c.step.is_some() && !c.is_unfit);
            let workers = match wanted.is_empty() && !is_kept {
                // Leaving members are the last that hold the state: it must be saved first.
                true => self.able_members(candidates),
                false => wanted,
            };
            return Change::Form { workers, after: None };
        }
        let members: BTreeSet<WorkerId> = current.members.iter().map(|m| m.worker).collect();
        let is_wanted = wanted.iter().copied().collect::<BTreeSet<_>>() == members;
        if !self.is_settled() || is_wanted && !self.is_uneven(current) {
            return Change::Nothing;
        }
        Change::Form { workers: wanted, after: Some(self.until) }
    }

    /// The workers that should be in a world, in order. If there are too many, those that hold the
    /// state come first, then members.
    fn wanted(
        &self,
        candidates: &BTreeMap<WorkerId, Candidate>,
        most: Option<u32>,
    ) -> Vec<WorkerId> {
        let fit = candidates.iter().filter(|(_, candidate)| !candidate.is_unfit);
        // A member that trains well stays.
        let is_settled = |worker: &WorkerId| self.is_settled() && self.member(*worker).is_some();
        let welcome = fit.clone().filter(|(worker, c)| !c.is_banned || is_settled(worker));
        let mut ranked: Vec<(bool, bool, WorkerId)> = welcome
            .map(|(worker, c)| (c.step.is_none(), !self.is_involved(*worker), *worker))
            .collect();
        ranked.sort_unstable();
        let most = most.unwrap_or(u32::MAX).min(self.n_lanes).min(MAX_MEMBERS);
        ranked.truncate(most as usize);
        let mut wanted: Vec<WorkerId> = ranked.into_iter().map(|(.., worker)| worker).collect();
        wanted.sort_unstable();
        if wanted.is_empty() {
            // A worker that others have lost can at least train alone.
            let alone = fit.max_by_key(|(worker, candidate)| (candidate.step, Reverse(**worker)));
            wanted.extend(alone.map(|(worker, _)| *worker));
        }
        if wanted.len() < self.min_workers as usize {
            wanted.clear();
        }
        let has_state = |worker: &WorkerId| candidates[worker].step.is_some();
        if !wanted.is_empty() && !wanted.iter().any(has_state) {
            // Leaving members first pass on state that no other worker has.
            wanted.extend(self.able_members(candidates));
            wanted.sort_unstable();
            wanted.dedup();
        }
        wanted
    }

    /// The workers that train, and those that train next.
    #[must_use]
    pub fn involved(&self) -> BTreeSet<WorkerId> {
        let worlds = self.current.iter().chain(&self.previous);
        worlds.flat_map(|placed| placed.places.keys()).copied().collect()
    }

    /// Whether `worker` trains, or trains next.
    #[must_use]
    pub fn is_involved(&self, worker: WorkerId) -> bool {
        let mut worlds = self.current.iter().chain(&self.previous);
        worlds.any(|placed| placed.member(worker).is_some())
    }

    /// A member of the current world.
    #[must_use]
    pub fn member(&self, worker: WorkerId) -> Option<&Member> {
        self.current.as_ref()?.member(worker)
    }

    /// Grows whenever another change of the world may have become necessary.
    #[must_use]
    pub fn n_changes(&self) -> u64 {
        self.n_changes
    }

    /// Members that can still pass on their state.
    fn able_members(&self, candidates: &BTreeMap<WorkerId, Candidate>) -> Vec<WorkerId> {
        let is_able = |member: &&Member| {
            let known = candidates.get(&member.worker);
            let known = known.filter(|c| c.step.is_some() && !c.is_banned);
            known.is_some_and(|c| c.incarnation == member.incarnation)
        };
        let worlds = self.current.iter().chain(&self.previous);
        let members = worlds.flat_map(|placed| &placed.world.members);
        let able: BTreeSet<WorkerId> = members.filter(is_able).map(|m| m.worker).collect();
        able.into_iter().collect()
    }

    /// The workers whose state counts; none: all of them.
    #[must_use]
    pub fn holders(&self) -> Option<&BTreeMap<WorkerId, Incarnation>> {
        self.holders.as_ref()
    }

    /// Whether the state of this worker counts.
    #[must_use]
    pub fn is_holder(&self, worker: WorkerId, incarnation: Incarnation) -> bool {
        let holders = self.holders.as_ref();
        holders.is_none_or(|holders| holders.get(&worker) == Some(&incarnation))
    }

    /// The state of `worker` no longer counts.
    pub fn disown(&mut self, worker: WorkerId) {
        if let Some(holders) = &mut self.holders {
            holders.remove(&worker);
            self.n_changes += 1;
        }
    }

    /// No worker's state counts anymore.
    pub fn void(&mut self) {
        self.holders = Some(BTreeMap::new());
        self.n_changes += 1;
    }

    /// Replaces the current world by one of `workers`.
    pub fn form(
        &mut self,
        id: WorldId,
        workers: &[WorkerId],
        after: Option<u64>,
        candidates: &BTreeMap<WorkerId, Candidate>,
    ) -> Option<&World> {
        self.previous = after.and(self.current.take());
        self.formed.clear();
        self.is_broken = false;
        self.n_changes += 1;
        let n_members = u32::try_from(workers.len()).expect("at most one member per lane");
        let mut order = workers.to_vec();
        order.rotate_left(self.rotation.checked_rem(workers.len()).unwrap_or(0));
        let member = |(worker, lanes): (WorkerId, Span)| {
            let candidate = candidates.get(&worker)?;
            let has_state = candidate.step.is_some_and(|step| step <= self.until)
                && self.is_holder(worker, candidate.incarnation);
            Some(Member { worker, incarnation: candidate.incarnation, lanes, has_state })
        };
        let spans = match self.lane_secs(order.iter().copied()) {
            Some(secs) => lanes::assign_by_speed(self.n_lanes, &secs),
            None => lanes::assign(self.n_lanes, n_members),
        };
        let members: Vec<Member> = order.into_iter().zip(spans).filter_map(member).collect();
        if members.is_empty() {
            // No worker trains after that, so all state stays as it is.
            return None;
        }
        let with_state = members.iter().filter(|member| member.has_state);
        let with_state = with_state.map(|member| (member.worker, member.incarnation));
        match &mut self.holders {
            // The previous world keeps training until the new one has formed.
            Some(holders) if after.is_some() => holders.extend(with_state),
            holders => *holders = Some(with_state.collect()),
        }
        self.current = Some(Placed::new(World { id, members, after }));
        self.current()
    }

    /// A member holds the state that `world` begins with.
    pub fn formed(&mut self, world: WorldId, worker: WorkerId) -> Option<Formed> {
        let current = self.current.as_ref().filter(|current| current.world.id == world)?;
        let member = current.member(worker).filter(|_| !self.is_broken)?;
        let is_first = self.formed.is_empty();
        if !self.formed.insert(worker) {
            return None;
        }
        let members = &current.world.members;
        let is_last = self.formed.len() == members.len();
        if is_last {
            self.holders = Some(members.iter().map(|m| (m.worker, m.incarnation)).collect());
            self.previous = None;
        } else {
            self.holders.get_or_insert_default().insert(worker, member.incarnation);
        }
        self.n_changes += u64::from(is_first || is_last);
        Some(Formed { is_first, is_last })
    }

    /// Whether a report from `world` comes from workers that train now.
    #[must_use]
    pub fn is_heard(&self, world: WorldId) -> bool {
        let mut worlds = self.current.iter().chain(&self.previous);
        worlds.any(|placed| placed.world.id == world)
    }

    /// A member cannot continue in `world`, which must be replaced. False if it was already.
    pub fn broken(&mut self, world: WorldId) -> bool {
        if !self.is_heard(world) || self.is_broken {
            return false;
        }
        self.is_broken = true;
        self.n_changes += 1;
        true
    }

    /// Work failed: another member tries it next.
    pub fn rotate(&mut self) {
        self.rotation += 1;
    }

    /// Allows steps up to `until`; never fewer than before.
    pub fn allow(&mut self, until: u64) {
        self.until = self.until.max(until);
    }

    /// No worker whose state counts holds or trains a step after `until`: all state is loaded again,
    /// or all members have paused.
    pub fn start_over(&mut self, until: u64) {
        self.until = until;
    }

    /// All members are together and no change is under way.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        let is_whole = self.current().is_some_and(|world| self.formed.len() == world.members.len());
        is_whole && self.previous.is_none() && !self.is_broken
    }

    /// Whether any worker trains.
    #[must_use]
    pub fn is_running(&self) -> bool {
        self.current.is_some()
            && !self.is_broken
            && (self.previous.is_some() || !self.formed.is_empty())
    }

    #[must_use]
    pub fn current(&self) -> Option<&World> {
        self.current.as_ref().map(|placed| &placed.world)
    }

    #[must_use]
    pub fn is_current(&self, world: WorldId) -> bool {
        self.current().is_some_and(|current| current.id == world)
    }

    /// Whether `worker` holds the state of the current world.
    #[must_use]
    pub fn has_formed(&self, worker: WorkerId) -> bool {
        self.formed.contains(&worker)
    }

    /// Whether `worker` trains, possibly in the world that the current one has yet to replace.
    #[must_use]
    pub fn is_training(&self, worker: WorkerId) -> bool {
        let previous = self.previous.as_ref();
        self.has_formed(worker) || previous.is_some_and(|placed| placed.member(worker).is_some())
    }

    #[must_use]
    pub fn until(&self) -> u64 {
        self.until
    }

    /// Panics if a lane would be trained twice or not at all.
    pub fn check_invariants(&self) {
        let Some(world) = self.current() else {
            assert!(self.formed.is_empty());
            return;
        };
        let mut next = 0;
        for member in &world.members {
            assert_eq!(member.lanes.start, next, "lanes follow each other");
            next = member.lanes.end;
        }
        assert_eq!(next, self.n_lanes, "every lane has a member");
        let members: BTreeSet<WorkerId> = world.members.iter().map(|m| m.worker).collect();
        assert_eq!(members.len(), world.members.len(), "no worker is in a world twice");
        assert!(self.formed.is_subset(&members));
    }
}

/// What a member's report that it has formed means.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Formed {
    pub is_first: bool,
    pub is_last: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidates(workers: &[(u32, Option<u64>)]) -> BTreeMap<WorkerId, Candidate> {
        let candidate = |(worker, step): &(u32, Option<u64>)| {
            let incarnation = Incarnation(u64::from(*worker));
            (
                WorkerId(*worker),
                Candidate { incarnation, step: *step, is_unfit: false, is_banned: false },
            )
        };
        workers.iter().map(candidate).collect()
    }

    fn form(worlds: &mut Worlds, id: u64, there: &BTreeMap<WorkerId, Candidate>) -> World {
        let Change::Form { workers, after } = worlds.next(there, None) else {
            panic!("a change is due")
        };
        let world = worlds.form(WorldId(id), &workers, after, there).expect("members").clone();
        worlds.check_invariants();
        world
    }

    fn settle(worlds: &mut Worlds) {
        let world = worlds.current().expect("a world").clone();
        for member in &world.members {
            worlds.formed(world.id, member.worker);
        }
        assert!(worlds.is_settled());
    }

    #[test]
    fn what_a_worker_has_loaded_does_not_count_before_it_has_formed_a_world() {
        let mut worlds = Worlds::new(4, 1, None);
        let first = form(&mut worlds, 1, &candidates(&[(0, None), (1, None)]));
        worlds.formed(first.id, WorkerId(0));
        worlds.broken(first.id);
        let second = form(&mut worlds, 2, &candidates(&[(0, Some(0)), (1, Some(0))]));
        let has_state: Vec<bool> = second.members.iter().map(|member| member.has_state).collect();
        assert_eq!(has_state, [true, false], "the second worker only claims it");
    }

    #[test]
    fn workers_beyond_those_that_can_connect_to_each_other_do_not_train() {
        let mut worlds = Worlds::new(4096, 1, None);
        let too_many: Vec<(u32, Option<u64>)> = (0..MAX_MEMBERS + 1).map(|id| (id, None)).collect();
        let world = form(&mut worlds, 1, &candidates(&too_many));
        assert_eq!(world.members.len(), MAX_MEMBERS as usize);
    }

    #[test]
    fn a_lost_member_makes_the_next_world_at_once() {
        let mut worlds = Worlds::new(4, 1, None);
        form(&mut worlds, 1, &candidates(&[(0, None), (1, None), (2, None)]));
        settle(&mut worlds);
        worlds.allow(20);
        let left = candidates(&[(0, Some(12)), (2, Some(13))]);
        let world = form(&mut worlds, 2, &left);
        assert_eq!(world.after, None);
        assert!(world.members.iter().all(|member| member.has_state));
        assert!(!worlds.is_heard(WorldId(1)), "the previous world commits nothing anymore");
    }

    #[test]
    fn a_spare_is_in_the_very_next_world_and_the_worker_that_it_replaced_is_the_next_spare() {
        let mut worlds = Worlds::new(4, 1, None);
        let two = Some(2);
        let three = candidates(&[(0, None), (1, None), (2, None)]);
        let next = |workers: [u32; 2], after| Change::Form {
            workers: workers.map(WorkerId).to_vec(),
            after,
        };
        assert_eq!(worlds.next(&three, two), next([0, 1], None));
        worlds.form(WorldId(1), &[WorkerId(0), WorkerId(1)], None, &three);
        settle(&mut worlds);
        worlds.allow(20);
        let three = candidates(&[(0, Some(12)), (1, Some(12)), (2, None)]);
        assert_eq!(worlds.next(&three, two), Change::Nothing, "a spare is not needed");
        // The first worker is frozen.
        let mut without = three;
        without.get_mut(&WorkerId(0)).unwrap().is_banned = true;
        assert!(worlds.broken(WorldId(1)));
        assert_eq!(worlds.next(&without, two), next([1, 2], None));
        let world = worlds.form(WorldId(2), &[WorkerId(1), WorkerId(2)], None, &without).unwrap();
        assert_eq!(world.members.iter().map(|m| m.has_state).collect::<Vec<_>>(), [true, false]);
        settle(&mut worlds);
        let back = candidates(&[(0, None), (1, Some(20)), (2, Some(20))]);
        assert_eq!(worlds.next(&back, two), Change::Nothing, "its place is taken");
        assert_eq!(
            worlds.next(&back, Some(3)),
            Change::Form { workers: [0, 1, 2].map(WorkerId).to_vec(), after: Some(20) }
        );
    }

    #[test]
    fn a_new_worker_joins_after_a_step_that_no_worker_has_passed() {
        let mut worlds = Worlds::new(4, 1, None);
        form(&mut worlds, 1, &candidates(&[(0, None)]));
        settle(&mut worlds);
        worlds.allow(20);
        let both = candidates(&[(0, Some(12)), (1, None)]);
        let world = form(&mut worlds, 2, &both);
        assert_eq!(world.after, Some(20));
        assert_eq!(world.members.iter().map(|m| m.has_state).collect::<Vec<_>>(), [true, false]);
        assert!(worlds.is_heard(WorldId(1)), "the previous world keeps training until then");
        let training = [0, 1].map(|id| worlds.is_training(WorkerId(id)));
        assert_eq!(training, [true, false], "only the newcomer does not train yet");
        assert_eq!(worlds.next(&both, None), Change::Nothing, "one change at a time");
        settle(&mut worlds);
        assert!(!worlds.is_heard(WorldId(1)));
    }

    #[test]
    fn a_death_overtakes_a_planned_change() {
        let mut worlds = Worlds::new(4, 1, None);
        form(&mut worlds, 1, &candidates(&[(0, None), (1, None)]));
        settle(&mut worlds);
        worlds.allow(20);
        form(&mut worlds, 2, &candidates(&[(0, Some(12)), (1, Some(12)), (2, None)]));
        let world = form(&mut worlds, 3, &candidates(&[(0, Some(12)), (2, None)]));
        assert_eq!(world.after, None);
        assert!(!worlds.is_heard(WorldId(1)) && !worlds.is_heard(WorldId(2)));
    }

    #[test]
    fn too_few_workers_wait_with_what_they_hold() {
        let mut worlds = Worlds::new(4, 2, None);
        assert_eq!(worlds.next(&candidates(&[(0, None)]), None), Change::Nothing);
        form(&mut worlds, 1, &candidates(&[(0, None), (1, None)]));
        settle(&mut worlds);
        worlds.allow(9);
        let one = candidates(&[(0, Some(5))]);
        assert_eq!(worlds.next(&one, None), Change::Form { workers: Vec::new(), after: None });
        assert_eq!(worlds.form(WorldId(2), &[], None, &one), None);
        assert!(!worlds.is_running());
        let world = form(&mut worlds, 3, &candidates(&[(0, Some(5)), (2, None)]));
        assert!(world.members[0].has_state, "it waited with its state");
    }

    #[test]
    fn workers_that_train_on_to_the_last_step_are_known_when_the_next_world_comes_earlier() {
        let mut worlds = Worlds::new(4, 2, None);
        form(&mut worlds, 1, &candidates(&[(0, None), (1, None)]));
        settle(&mut worlds);
        worlds.allow(9);
        let mut leaving = candidates(&[(0, Some(5)), (1, Some(5))]);
        leaving.entry(WorkerId(1)).and_modify(|candidate| candidate.is_unfit = true);
        assert_eq!(
            worlds.next(&leaving, None),
            Change::Form { workers: Vec::new(), after: Some(9) }
        );
        assert_eq!(worlds.form(WorldId(2), &[], Some(9), &leaving), None);
        worlds.check_invariants();
        assert!(worlds.is_heard(WorldId(1)) && !worlds.is_running());
        assert_eq!(worlds.involved(), BTreeSet::from([WorkerId(0), WorkerId(1)]));
        leaving.extend(candidates(&[(2, None)]));
        let world = form(&mut worlds, 3, &leaving);
        assert_eq!(world.after, None);
        assert!(!worlds.is_heard(WorldId(1)) && !worlds.is_holder(WorkerId(1), Incarnation(1)));
    }

    #[test]
    fn what_was_trained_past_a_load_is_void() {
        let mut worlds = Worlds::new(2, 1, None);
        worlds.allow(50);
        worlds.start_over(30);
        let world = form(&mut worlds, 1, &candidates(&[(0, Some(40)), (1, Some(30))]));
        assert_eq!(world.members.iter().map(|m| m.has_state).collect::<Vec<_>>(), [false, true]);
    }

    #[test]
    fn a_slow_member_gives_lanes_to_others_if_lanes_follow_speed() {
        let both = candidates(&[(0, Some(5)), (1, Some(5))]);
        for (is_balanced, mut worlds) in
            [(false, Worlds::new(8, 1, None)), (true, Worlds::new(8, 1, None).balanced())]
        {
            worlds.allow(9);
            form(&mut worlds, 1, &both);
            settle(&mut worlds);
            worlds.measured(WorkerId(0), Duration::from_millis(30));
            assert_eq!(worlds.next(&both, None), Change::Nothing, "one of them was not measured");
            worlds.measured(WorkerId(1), Duration::from_millis(10));
            if is_balanced {
                let world = form(&mut worlds, 2, &both);
                assert_eq!((world.after, world.members[0].lanes.clone()), (Some(9), 0..2));
                settle(&mut worlds);
            }
            assert_eq!(worlds.next(&both, None), Change::Nothing);
        }
    }

    #[test]
    fn work_that_failed_is_tried_by_another_member() {
        let mut worlds = Worlds::new(2, 1, None);
        let both = candidates(&[(0, None), (1, None)]);
        assert_eq!(form(&mut worlds, 1, &both).members[0].worker, WorkerId(0));
        settle(&mut worlds);
        worlds.rotate();
        assert!(worlds.broken(WorldId(1)));
        assert!(!worlds.broken(WorldId(1)), "once is enough");
        assert_eq!(form(&mut worlds, 2, &both).members[0].worker, WorkerId(1));
    }

    #[test]
    fn a_worker_that_others_lost_trains_if_no_other_can_and_stays_when_others_come() {
        let mut worlds = Worlds::new(4, 1, None);
        let mut there = candidates(&[(0, Some(3)), (1, Some(5)), (2, None)]);
        there.values_mut().for_each(|candidate| candidate.is_banned = true);
        worlds.allow(8);
        let world = form(&mut worlds, 1, &there);
        assert_eq!(world.members.len(), 1, "together they would only lose each other again");
        assert_eq!(world.members[0].worker, WorkerId(1), "the furthest of them");
        settle(&mut worlds);
        there.get_mut(&WorkerId(2)).unwrap().is_banned = false;
        let next = Change::Form { workers: vec![WorkerId(1), WorkerId(2)], after: Some(8) };
        assert_eq!(worlds.next(&there, None), next);
    }

    #[test]
    fn what_one_that_was_left_out_holds_is_void_until_it_has_formed_again() {
        let mut worlds = Worlds::new(4, 1, None);
        let both = candidates(&[(0, Some(5)), (1, Some(5))]);
        worlds.allow(8);
        form(&mut worlds, 1, &both);
        settle(&mut worlds);
        form(&mut worlds, 2, &candidates(&[(0, Some(5))]));
        settle(&mut worlds);
        assert!(!worlds.is_holder(WorkerId(1), Incarnation(1)));
        let world = form(&mut worlds, 3, &both);
        assert_eq!(world.members.iter().map(|m| m.has_state).collect::<Vec<_>>(), [true, false]);
        settle(&mut worlds);
        assert!(worlds.is_holder(WorkerId(1), Incarnation(1)));
        assert!(!worlds.is_holder(WorkerId(1), Incarnation(9)), "another process");
    }

    #[test]
    fn workers_that_leave_pass_on_state_that_no_other_has() {
        let mut worlds = Worlds::new(1, 1, None);
        let mut there = candidates(&[(0, Some(5))]);
        worlds.allow(8);
        form(&mut worlds, 1, &there);
        settle(&mut worlds);
        there.extend(candidates(&[(1, None)]));
        there.get_mut(&WorkerId(0)).unwrap().is_unfit = true;
        let world = form(&mut worlds, 2, &there);
        assert_eq!(world.members.len(), 2, "though there is but one lane");
        settle(&mut worlds);
        there.get_mut(&WorkerId(1)).unwrap().step = Some(8);
        assert_eq!(form(&mut worlds, 3, &there).members[0].worker, WorkerId(1));
    }
}
