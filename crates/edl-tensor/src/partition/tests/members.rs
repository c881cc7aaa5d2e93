// SPDX-License-Identifier: Apache-2.0
//! Real partitions under members that die: the survivors find the rows of the step that they hold.
//!
//! Members are played by the protocol's rules alone. Pushes arrive late and out of order, those of
//! the dead, too; a member finishes a step when all of its world have their lanes acknowledged;
//! when a member dies, the others continue in the old world until they learn of the new one.

use std::collections::BTreeSet;

use edl_core::id::WorldId;
use edl_core::lanes::assign;
use edl_core::rng::Rng;

use super::*;
use crate::push::Lane;

const LANES: u32 = 3;
const SEEDS: u64 = 400;
const N_ACTIONS: u32 = 400;

struct Member {
    step: u64,
    lanes: std::ops::Range<u32>,
    /// Lanes of its step that it has sent, and those that every partition has.
    sent: BTreeSet<u32>,
    acknowledged: BTreeSet<u32>,
    is_alive: bool,
}

/// A push on its way to one partition.
struct Letter {
    to: usize,
    from: (u64, usize),
    step: u64,
    lane: u32,
}

struct Play {
    job: Job,
    partitions: Vec<Partition>,
    world: u64,
    members: Vec<Member>,
    letters: Vec<Letter>,
    rng: Rng,
}

impl Play {
    fn new(seed: u64) -> Self {
        let job = Job::new(Mode::Steps { lanes: LANES }).with_adam();
        let rows = job.layout().with_rows();
        let partitions = rows.take(2).map(|p| Partition::new(job.config(p))).collect();
        let rng = Rng::new(seed);
        let mut play =
            Self { job, partitions, world: 0, members: Vec::new(), letters: Vec::new(), rng };
        play.form(0, 3);
        play
    }

    /// The next world: those who live, brought to the furthest of them, and perhaps newcomers.
    fn form(&mut self, step: u64, n_members: usize) {
        self.world += 1;
        let spans = assign(LANES, u32::try_from(n_members).unwrap());
        let member = |lanes| Member {
            step,
            lanes,
            sent: BTreeSet::new(),
            acknowledged: BTreeSet::new(),
            is_alive: true,
        };
        self.members = spans.into_iter().map(member).collect();
    }

    fn pick(&mut self, n: usize) -> usize {
        usize::try_from(self.rng.below(n as u64)).unwrap()
    }

    fn act(&mut self) {
        let who = self.pick(self.members.len());
        match self.rng.below(40) {
            0 => self.kill(who),
            1..6 => self.send(who),
            6..9 => self.finish(who),
            _ => self.deliver(),
        }
        self.expect_rows();
    }

    /// One dies; the others learn of it at once, or continue for a while.
    fn kill(&mut self, who: usize) {
        let n_alive = self.members.iter().filter(|member| member.is_alive).count();
        if n_alive > 1 {
            self.members[who].is_alive = false;
        }
        if self.rng.below(2) == 0 {
            self.reform();
        }
    }

    fn reform(&mut self) {
        let alive = self.members.iter().filter(|member| member.is_alive);
        let (n, step) = alive.fold((0, 0), |(n, step), m| (n + 1, m.step.max(step)));
        let n_members = (n + self.pick(2)).min(LANES as usize);
        self.form(step, n_members);
    }

    fn send(&mut self, who: usize) {
        let member = &mut self.members[who];
        let missing = member.lanes.clone().find(|lane| !member.sent.contains(lane));
        let (Some(lane), true) = (missing, member.is_alive) else { return };
        member.sent.insert(lane);
        let step = member.step;
        let letter = |to| Letter { to, from: (self.world, who), step, lane };
        self.letters.extend((0..self.partitions.len()).map(letter));
    }

    fn deliver(&mut self) {
        if self.letters.is_empty() {
            return;
        }
        let place = self.pick(self.letters.len());
        let Letter { to, from: (world, who), step, lane } = self.letters.swap_remove(place);
        let index = u32::try_from(step).unwrap();
        let part = Lane { world: WorldId(world), number: lane, of: LANES };
        let rows = self.job.layout().with_rows();
        let batch = BatchId { epoch: index / 7, index: index % 7 };
        let pushed = self.partitions[to].try_push(&self.job.push_lane(batch, part, rows));
        self.partitions[to].check_invariants();
        let is_on_its_way =
            self.letters.iter().any(|l| (l.from, l.step, l.lane) == ((world, who), step, lane));
        if world != self.world {
            assert!(matches!(pushed, Ok(_) | Err(Refusal::OldWorld { .. })), "{pushed:?}");
            return;
        }
        assert!(pushed.is_ok(), "a lane of the world that trains is taken: {pushed:?}");
        let member = &mut self.members[who];
        if member.step == step && !is_on_its_way {
            member.acknowledged.insert(lane);
        }
    }

    /// The sum of the dense gradients is complete for one of them.
    fn finish(&mut self, who: usize) {
        let step = self.members[who].step;
        let is_kept = |m: &Member| m.acknowledged.len() == m.lanes.len();
        let has_given = |m: &Member| m.step > step || m.step == step && is_kept(m);
        if !self.members[who].is_alive || !self.members.iter().all(has_given) {
            if self.members.iter().any(|member| !member.is_alive) && self.rng.below(8) == 0 {
                self.reform();
            }
            return;
        }
        let member = &mut self.members[who];
        member.step += 1;
        member.sent.clear();
        member.acknowledged.clear();
    }

    /// Any survivor can be the only one left, and must find the rows of its step.
    fn expect_rows(&self) {
        for member in self.members.iter().filter(|member| member.is_alive) {
            for partition in &self.partitions {
                let at = partition.updates();
                assert!(partition.has_step(member.step), "step {} at {at}", member.step);
            }
        }
    }
}

#[test]
fn no_surviving_member_is_two_steps_behind_the_servers() {
    let mut furthest = 0;
    for seed in 0..SEEDS {
        let mut play = Play::new(seed);
        (0..N_ACTIONS).for_each(|_| play.act());
        let mut undisturbed = Partition::new(play.job.config(play.partitions[0].id().0));
        let rows = play.job.layout().with_rows();
        for index in 0..u32::try_from(play.partitions[0].updates()).unwrap() {
            let batch = BatchId { epoch: index / 7, index: index % 7 };
            for number in 0..LANES {
                let lane = Lane { world: WorldId(1), number, of: LANES };
                undisturbed.push(&play.job.push_lane(batch, lane, rows.clone()));
            }
        }
        assert_eq!(visible(&play.partitions[0]), visible(&undisturbed), "seed {seed}");
        furthest = furthest.max(undisturbed.updates());
    }
    assert!(furthest > 5, "the play comes further than {furthest} steps");
}
