// SPDX-License-Identifier: Apache-2.0
//! Any order of events, against the rules written down once more.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

/// The shell's numbers, and what it was ordered to do.
struct Shell {
    member: Member,
    now: Time,
    doing: Option<Activity>,
    state: Option<u64>,
    /// Worlds as they were announced, and grants.
    announced: BTreeMap<WorldId, Announced>,
    granted: BTreeMap<WorldId, u64>,
    entered: WorldId,
    /// The world in which each step was trained last.
    trained: BTreeMap<u64, WorldId>,
    /// Lanes of the step that is under way, trained or skipped.
    lanes: Vec<u32>,
    is_settled: bool,
    has_sum: bool,
    records: BTreeSet<Place>,
    reading: BTreeSet<Place>,
    unreadable: BTreeSet<Place>,
    /// Orders that were not answered, and what is being written.
    orders: BTreeMap<CheckpointId, MemberCheckpoint>,
    writing: Option<CheckpointId>,
    leases: BTreeMap<LeaseId, u64>,
    finishing: Vec<LeaseId>,
    has_ended: bool,
    n_events: u64,
    /// What was met, so that a test that meets nothing is noticed.
    met: BTreeMap<String, u32>,
}

impl Shell {
    fn new(has_tables: bool) -> Self {
        let mut shell = Self {
            member: Member::new(Config { has_tables, ..config() }, Time::ZERO),
            now: Time::ZERO,
            doing: None,
            state: None,
            announced: BTreeMap::new(),
            granted: BTreeMap::new(),
            entered: WorldId(0),
            trained: BTreeMap::new(),
            lanes: Vec::new(),
            is_settled: false,
            has_sum: false,
            records: BTreeSet::new(),
            reading: BTreeSet::new(),
            unreadable: BTreeSet::new(),
            orders: BTreeMap::new(),
            writing: None,
            leases: BTreeMap::new(),
            finishing: Vec::new(),
            has_ended: false,
            n_events: 0,
            met: BTreeMap::new(),
        };
        shell.feed(built());
        shell
    }

    fn feed(&mut self, event: Event) {
        if self.has_ended {
            return;
        }
        let before = self.member.claim();
        for effect in self.member.handle(event, self.now) {
            self.perform(effect);
        }
        self.member.check_invariants();
        let claim = self.member.claim();
        assert!(claim.is_none_or(|claim| Some(claim.step) == self.state), "{claim:?}");
        assert!(claim.map(|c| c.world) >= before.map(|c| c.world) || claim.is_none());
        assert!(self.member.next_deadline().is_none_or(|at| at > self.now), "it waits for nothing");
    }

    fn perform(&mut self, effect: Effect) {
        let text = format!("{effect:?}").replace("Report(", "").replace("Member(", "");
        let text = text.trim_start_matches("Start(");
        let kind = text.split(|c: char| !c.is_alphanumeric()).next().unwrap_or_default();
        *self.met.entry(kind.to_owned()).or_default() += 1;
        assert!(!self.has_ended, "nothing comes after the end: {effect:?}");
        match effect {
            Effect::Report(report) => self.reported(report),
            Effect::Read { place, .. } => {
                self.unreadable.remove(&place);
                assert!(self.reading.insert(place), "read once");
            }
            Effect::Forget(place) => {
                let sets = [&mut self.reading, &mut self.records, &mut self.unreadable];
                let n_known = sets.into_iter().filter_map(|set| set.take(&place)).count();
                assert_eq!(n_known, 1, "only what was read is forgotten");
            }
            Effect::Finish(lease) => {
                assert_eq!(Some(self.leases[&lease]), self.state);
                self.finishing.push(lease);
            }
            Effect::DropShard(lease) => self.finishing.retain(|finishing| *finishing != lease),
            Effect::Write(order) => {
                assert_eq!(Some(order.at), self.state, "an exact step");
                assert_eq!(self.writing.replace(order.checkpoint), None, "one at a time");
                assert!(self.orders.remove(&order.checkpoint).is_some(), "ordered once");
            }
            Effect::DropState => self.state = None,
            Effect::Start(activity) => {
                assert_eq!(self.doing, None, "one activity at a time");
                self.check_start(&activity);
                self.doing = Some(activity);
            }
            Effect::Cancel(_) => assert!(self.doing.is_some()),
            Effect::End => {
                assert!(self.doing.is_none() && self.writing.is_none());
                self.has_ended = true;
            }
            Effect::ExitNow => panic!("no time has passed since it was stopped"),
            Effect::Prepare(_) | Effect::HangUp | Effect::Waste(_) => {}
        }
    }

    fn reported(&mut self, report: Report) {
        match report {
            Report::Member(MemberReport::Stepped { world, step, .. }) => {
                assert_eq!(self.trained.get(&step), Some(&world), "the world that trained it");
            }
            Report::Member(MemberReport::Formed { world, step, .. }) => {
                assert!(world <= self.entered && self.announced.contains_key(&world));
                assert!(world < self.entered || Some(step) <= self.state);
            }
            Report::CheckpointFailed { checkpoint, .. } => {
                assert!(self.orders.remove(&checkpoint).is_some() || self.writing.is_none());
            }
            Report::EvalDone { shard: index, .. } | Report::Failed { index, .. } => {
                let lease = LeaseId(index.into());
                assert!(self.leases.remove(&lease).is_some(), "a lease is answered once");
            }
            Report::Member(
                MemberReport::Paused { .. }
                | MemberReport::Pace { .. }
                | MemberReport::PeerLost { .. }
                | MemberReport::StepFailed { .. }
                | MemberReport::NonFinite { .. }
                | MemberReport::Quit { .. }
                | MemberReport::StepMismatch { .. }
                | MemberReport::NotLoaded { .. },
            )
            | Report::Ready { .. }
            | Report::BatchPushed { .. }
            | Report::BatchDone { .. }
            | Report::NonFinite { .. }
            | Report::DiskFull { .. }
            | Report::PredictDone { .. }
            | Report::Returned { .. }
            | Report::Leaving
            | Report::Heartbeat { .. }
            | Report::Spending(_)
            | Report::CheckpointDone { .. } => {}
        }
    }

    fn check_start(&mut self, activity: &Activity) {
        let has_tables = self.member.config.has_tables;
        match activity {
            Activity::Enter { world, place } => {
                assert!(world.id > self.entered, "worlds only grow");
                assert_eq!(world.members[*place].worker, ME);
                self.entered = world.id;
            }
            Activity::Exchange { world, step } => {
                assert_eq!((*world, *step), (self.entered, self.state));
            }
            Activity::Train { step, lane } | Activity::Skip { step, lane } => {
                self.check_step(step);
                let is_trained = matches!(activity, Activity::Train { .. });
                assert_eq!(is_trained, *lane < step.n_active, "lanes without records are skipped");
                assert!(has_tables || is_trained);
                if *lane == step.mine.start {
                    self.lanes.clear();
                }
                assert!(!is_trained || self.records.remove(&Place::Lane(step.batch, *lane)));
                (self.is_settled, self.has_sum) = (false, false);
                self.lanes.push(*lane);
            }
            Activity::Settle(step) => {
                self.check_step(step);
                assert_eq!(self.lanes, step.mine.clone().collect::<Vec<_>>(), "every lane");
            }
            Activity::Reduce(step) => {
                self.check_step(step);
                assert!(!has_tables || self.is_settled, "the servers have the step");
                assert!(step.mine_active().all(|lane| self.lanes.contains(&lane)));
                if step.mine_active().is_empty() {
                    self.lanes.clear();
                }
            }
            Activity::Apply(step) => {
                assert_eq!((step.world, Some(step.number)), (self.entered, self.state));
                assert!(self.has_sum);
            }
            Activity::Pass(step) => {
                self.check_step(step);
                assert!(self.announced[&step.world].skipped.contains(&step.number));
                assert!(!has_tables || self.is_settled, "the servers have the step");
            }
            Activity::Evaluate { lease, version, piece } => {
                assert_eq!(Some(*version), self.state, "an exact step");
                assert_eq!(self.leases.get(lease), Some(version));
                assert!(self.records.remove(&Place::Piece(*lease, *piece)));
            }
            Activity::Connect(route) => assert!(has_tables && route.generation == GENERATION),
            Activity::Farewell { .. }
            | Activity::Load { .. }
            | Activity::Transfer { .. }
            | Activity::Hash => {}
        }
    }

    fn check_step(&self, step: &Step) {
        assert_eq!(step.world, self.entered);
        assert_eq!(Some(step.number), self.state);
        let until = self.announced[&step.world].until;
        let granted = self.granted.get(&step.world).copied().unwrap_or(0);
        assert!(step.number < until.max(granted), "not further than allowed");
        let is_due = |world: &Announced| world.world.is_due_at_once(ME, incarnation(ME));
        let later = self.announced.range(step.world.next()..).next_back();
        assert!(later.is_none_or(|(_, world)| !is_due(world)), "a later world comes first");
    }

    /// Ends what is under way: well if `a` is not 0.
    fn end(&mut self, a: u64, b: u64) {
        let Some(activity) = self.doing.take() else { return };
        let result = match activity {
            _ if a == 0
                && !matches!(activity, Activity::Hash | Activity::Apply(_) | Activity::Pass(_)) =>
            {
                Err(match b % 6 {
                    0 => Failure::Cancelled,
                    1 => Failure::Lost { peer: OTHER, error: "gone".into() },
                    2 => Failure::Servers("refused".into()),
                    3 => Failure::OtherStep("ahead".into()),
                    4 => Failure::NonFinite("nan".into()),
                    // Only user code can leave its loop.
                    5 if matches!(activity, Activity::Train { .. }) && b % 4 == 1 => Failure::Quit,
                    _ => Failure::Failed("no".into()),
                })
            }
            Activity::Load { .. } => {
                self.state = Some(b % 6);
                Ok(Outcome::Loaded { step: b % 6 })
            }
            Activity::Exchange { world, step } => {
                let n_members = self.announced[&world].world.members.len();
                let other = [None, step, step.map(|step| step + 1), Some(3)][(b % 4) as usize];
                let place = self.announced[&world].world.place_of(ME, incarnation(ME)).unwrap();
                let of = |at: usize| if at == place { step } else { other };
                Ok(Outcome::Levels((0..n_members).map(of).collect()))
            }
            Activity::Transfer { is_behind, .. } => {
                if is_behind {
                    // The only step that the machine expects.
                    let Some(Doing::Forming(_, Forming::Transfer { step, .. })) =
                        &self.member.doing
                    else {
                        panic!()
                    };
                    self.state = Some(*step);
                }
                let step = self.state.unwrap();
                Ok(Outcome::Transferred(Transferred { step, state_bytes: 0 }))
            }
            Activity::Reduce(_) => {
                self.has_sum = !b.is_multiple_of(9);
                Ok(Outcome::Reduced { loss: if self.has_sum { 0.5 } else { f32::NAN } })
            }
            Activity::Apply(step) | Activity::Pass(step) => {
                self.state = Some(step.number + 1);
                self.trained.insert(step.number + 1, step.world);
                Ok(Outcome::Done)
            }
            Activity::Hash => Ok(Outcome::Hashed(b)),
            Activity::Settle(_) => {
                self.is_settled = true;
                Ok(Outcome::Done)
            }
            Activity::Farewell { .. }
            | Activity::Enter { .. }
            | Activity::Connect(_)
            | Activity::Train { .. }
            | Activity::Skip { .. }
            | Activity::Evaluate { .. } => Ok(Outcome::Done),
        };
        self.feed(Event::Ended(result));
    }

    fn announce(&mut self, a: u64, b: u64) {
        let id = WorldId(self.announced.keys().next_back().map_or(0, |id| id.0) + 1 + a % 2);
        let workers = [&[ME][..], &[ME, OTHER], &[OTHER, ME], &[OTHER]][(a % 4) as usize];
        let step = self.state.unwrap_or(0);
        let after = [None, Some(step), Some(step + 2)][(b % 3) as usize];
        let mut announced = world(id.0, workers, after, step + b % 4);
        if b.is_multiple_of(5) {
            announced = void(announced, ME);
        }
        if after.is_none() && (self.state.is_none() || a.is_multiple_of(7)) {
            announced = loading(announced);
        }
        if b.is_multiple_of(4) {
            announced.skipped = BTreeSet::from([step, step + 1]);
        }
        self.announced.insert(id, announced.clone());
        self.feed(announce(announced));
    }

    fn happen(&mut self, kind: u8, a: u64, b: u64) {
        self.n_events += 1;
        let n = self.n_events;
        match kind {
            0 => self.announce(a, b),
            1 => {
                let world = WorldId(self.entered.0 + a % 2);
                let until = self.state.unwrap_or(0) + b % 4;
                let granted = self.granted.entry(world).or_default();
                *granted = until.max(*granted);
                self.feed(Event::Command(Command::Go { world, until }));
            }
            2 => {
                let order = order(n, self.state.unwrap_or(0) + b % 4);
                self.orders.insert(order.checkpoint, order.clone());
                self.feed(Event::Command(Command::Checkpoint(order)));
            }
            3 => {
                let (lease, version) = (LeaseId(n), self.state.unwrap_or(0) + b % 3);
                self.leases.insert(lease, version);
                // Reports name the shard.
                let number = u32::try_from(n).unwrap();
                self.feed(Event::Command(Command::Lease { lease, task: shard(version, number) }));
            }
            4 => {
                if let Some(lease) = self.leases.keys().next().copied() {
                    self.leases.remove(&lease);
                    self.finishing.retain(|finishing| *finishing != lease);
                    self.feed(Event::Command(Command::Revoke(lease)));
                }
            }
            5 => {
                self.leases.clear();
                self.finishing.clear();
                self.feed(Event::Rejoined);
            }
            6 => self.feed(Event::Command(Command::Route(route(GENERATION.0 - a % 2)))),
            7 => {
                if let Some(checkpoint) = self.writing.take() {
                    let result = if a == 0 { Err("full".into()) } else { Ok(Vec::new()) };
                    self.feed(Event::Written { checkpoint, result });
                }
            }
            8 => {
                self.now = self.now + Duration::from_millis(a % 60);
                self.feed(Event::Tick);
            }
            9..14 => {
                let next = self.reading.iter().nth((b % 3) as usize).copied();
                let place = next.or(self.reading.first().copied());
                if let Some(place) = place {
                    self.reading.remove(&place);
                    let is_bad = a == 0 && b.is_multiple_of(5);
                    let set = if is_bad { &mut self.unreadable } else { &mut self.records };
                    set.insert(place);
                    let result = if is_bad { Err("corrupt".into()) } else { Ok(()) };
                    self.feed(Event::Decoded { place, result });
                }
            }
            14 => {
                if let Some(lease) = self.finishing.pop() {
                    let result = Ok(Finished::Evaluation(Box::new(Measures::new(&[]))));
                    self.feed(Event::Finished { lease, result });
                }
            }
            _ => self.end(a, b),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]

    #[test]
    fn any_order_of_events_keeps_the_rules(
        has_tables in any::<bool>(),
        events in prop::collection::vec((0_u8..40, 0_u64..12, 0_u64..60), 1..400),
    ) {
        let mut shell = Shell::new(has_tables);
        for (kind, a, b) in events {
            shell.happen(kind, a, b);
        }
        // However it stands, it ends when it is stopped and everything is answered.
        shell.feed(stop());
        for _ in 0..10 {
            shell.end(1, 1);
            shell.happen(7, 1, 1);
        }
        prop_assert!(shell.has_ended);
    }
}

#[test]
fn random_events_meet_everything() {
    let mut met: BTreeMap<String, u32> = BTreeMap::new();
    for seed in 0..400 {
        let mut rng = crate::rng::Rng::new(seed);
        let mut shell = Shell::new(seed.is_multiple_of(2));
        for _ in 0..400 {
            let kind = u8::try_from(rng.below(40)).unwrap();
            shell.happen(kind, rng.below(12), rng.below(60));
        }
        for (kind, n) in shell.met {
            *met.entry(kind).or_default() += n;
        }
    }
    let effects = ["Prepare", "Read", "Forget", "Finish", "DropShard", "Write", "DropState"];
    let others = ["HangUp", "Waste", "Cancel"];
    let forming = ["Farewell", "Load", "Enter", "Exchange", "Transfer", "Connect"];
    let training = ["Train", "Skip", "Settle", "Reduce", "Apply", "Pass", "Hash", "Evaluate"];
    let news = ["Formed", "Stepped", "PeerLost", "StepFailed", "NonFinite", "Quit"];
    let others_news = ["StepMismatch", "NotLoaded"];
    let reports = ["EvalDone", "Failed", "CheckpointDone", "CheckpointFailed"];
    let all = [&effects[..], &others, &forming, &training, &news, &others_news, &reports].concat();
    let missing: Vec<&str> =
        all.into_iter().filter(|kind| met.get(*kind).is_none_or(|n| *n < 5)).collect();
    assert!(missing.is_empty(), "never met: {missing:?} of {met:?}");
}
