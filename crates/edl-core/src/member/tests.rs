// SPDX-License-Identifier: Apache-2.0
//! A member against a test in the place of everything around it.

mod random;

use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

use super::*;
use crate::activity::WaitingFor;
use crate::goodput::TimeKind;
use crate::id::{EvalId, PsId};
use crate::job::{LoadFrom, MemberReport};
use crate::metric::Measures;
use crate::optimizer::OptimizerSpec;
use crate::route::ServerRoute;
use crate::worker::{Finished, Pass, Report, Shard, Task};
use crate::world::{self, World};

const ME: WorkerId = WorkerId(1);
const OTHER: WorkerId = WorkerId(2);
const GENERATION: Generation = Generation(4);

/// Two lanes of two records; three steps per epoch, of which the last has one lane.
fn config() -> Config {
    let plan = BatchPlan {
        version: crate::batch::NEWEST,
        n_records: 10,
        minibatch_size: 4,
        batches_per_shard: 8,
        seed: 1,
        shuffle: false,
    };
    Config {
        worker: ME,
        incarnation: incarnation(ME),
        plan,
        n_lanes: 2,
        num_epochs: 100,
        minibatch_size: 2,
        n_partitions: 3,
        has_tables: false,
        is_balanced: false,
        capacity: 2,
        limits: Limits { finish: Duration::from_secs(1), ..Limits::default() },
    }
}

fn announce(announced: Announced) -> Event {
    Event::Command(Command::World(Arc::new(announced)))
}

fn built() -> Event {
    let peer = Peer { address: "me:1".into(), unix_path: String::new(), probe: 7, step: None };
    let model = ModelSpec {
        name: "toy".into(),
        params: Vec::new(),
        tables: Vec::new(),
        inputs: Vec::new(),
        metrics: Vec::new(),
        optimizer: OptimizerSpec::sgd(0.1),
    };
    Event::Built { model: Box::new(model), peer: Box::new(peer) }
}

fn incarnation(worker: WorkerId) -> Incarnation {
    Incarnation(100 + u64::from(worker.0))
}

/// A world that all members bring their state to.
fn world(id: u64, workers: &[WorkerId], after: Option<u64>, until: u64) -> Announced {
    let spans = crate::lanes::assign(2, u32::try_from(workers.len()).unwrap());
    let member = |(worker, lanes): (&WorkerId, _)| world::Member {
        worker: *worker,
        incarnation: incarnation(*worker),
        lanes,
        has_state: true,
    };
    let members = workers.iter().zip(spans).map(member).collect();
    let world = World { id: WorldId(id), members, after };
    Announced { world, until, generation: GENERATION, load: None, skipped: BTreeSet::new() }
}

fn loading(announced: Announced) -> Announced {
    let load = Some(LoadFrom { checkpoint: None, keep_applied: true });
    let mut announced = Announced { load, ..announced };
    announced.world.members.iter_mut().for_each(|member| member.has_state = false);
    announced
}

fn void(mut announced: Announced, worker: WorkerId) -> Announced {
    let members = announced.world.members.iter_mut();
    members.filter(|member| member.worker == worker).for_each(|member| member.has_state = false);
    announced
}

fn route(generation: u64) -> Route {
    let server = ServerRoute {
        ps: PsId(0),
        address: "host:1".into(),
        unix_path: String::new(),
        partitions: 3..6,
    };
    Route { generation: Generation(generation), servers: vec![server] }
}

fn stop() -> Event {
    Event::Command(Command::Stop("the job is over".into()))
}

fn shard(version: u64, number: u32) -> Task {
    let pass = Pass::Evaluate { eval: EvalId(7), version };
    Task::Shard(Shard { number, records: 0..5, pass })
}

fn order(checkpoint: u64, at: u64) -> MemberCheckpoint {
    let folder = "folder".into();
    MemberCheckpoint {
        checkpoint: CheckpointId(checkpoint),
        generation: GENERATION,
        folder,
        at,
        partitions: 0..3,
    }
}

/// A member, and what it has asked for.
struct Bench {
    member: Member,
    now: Time,
    /// What is to be answered, in order.
    asked: VecDeque<Event>,
    doing: Option<Activity>,
    /// The step of the state, as the shell would hold it.
    step: u64,
    log: Vec<String>,
    reports: Vec<Report>,
    is_cancelled: bool,
    has_ended: bool,
}

impl Bench {
    fn new(config: Config) -> Self {
        let mut bench = Self {
            member: Member::new(config, Time::ZERO),
            now: Time::ZERO,
            asked: VecDeque::new(),
            doing: None,
            step: 0,
            log: Vec::new(),
            reports: Vec::new(),
            is_cancelled: false,
            has_ended: false,
        };
        bench.feed(built());
        assert_eq!(std::mem::take(&mut bench.log), ["ready"]);
        bench
    }

    /// Trains alone from first values up to `until`.
    fn alone(until: u64) -> Self {
        let mut bench = Self::new(config());
        bench.feed(announce(loading(world(1, &[ME], None, until))));
        bench.run();
        assert_eq!(bench.member.step(), Some(until));
        bench.reports.clear();
        bench.log.clear();
        bench
    }

    fn feed(&mut self, event: Event) {
        for effect in self.member.handle(event, self.now) {
            self.perform(effect);
        }
        self.member.check_invariants();
    }

    fn perform(&mut self, effect: Effect) {
        match effect {
            Effect::Report(report) => {
                self.log.push(name(&report));
                self.reports.push(report);
            }
            Effect::Read { place, .. } => {
                self.asked.push_back(Event::Decoded { place, result: Ok(()) });
            }
            Effect::Finish(lease) => {
                let result = Ok(Finished::Evaluation(Box::new(Measures::new(&[]))));
                self.asked.push_back(Event::Finished { lease, result });
            }
            Effect::Start(activity) => {
                assert_eq!(self.doing, None, "one activity at a time");
                self.log.push(activity_name(&activity));
                self.doing = Some(activity);
            }
            Effect::Cancel(_) => {
                assert!(self.doing.is_some(), "something is cancelled");
                self.is_cancelled = true;
            }
            Effect::End | Effect::ExitNow => self.has_ended = true,
            Effect::Write(order) => self.log.push(format!("write {}", order.checkpoint.0)),
            Effect::HangUp => self.log.push("hang up".into()),
            Effect::Prepare(_)
            | Effect::Forget(_)
            | Effect::DropShard(_)
            | Effect::DropState
            | Effect::Waste(_) => {}
        }
    }

    /// Ends the activity that is under way.
    fn end(&mut self, result: Result<Outcome, Failure>) {
        self.doing.take().expect("an activity is under way");
        self.is_cancelled = false;
        self.feed(Event::Ended(result));
    }

    /// Ends it well, with every other member at the same step.
    fn succeed(&mut self) {
        let outcome = match self.doing.as_ref().expect("an activity is under way") {
            Activity::Load { .. } => {
                self.step = 0;
                Outcome::Loaded { step: 0 }
            }
            Activity::Exchange { .. } => Outcome::Levels(vec![Some(self.step); 2]),
            Activity::Transfer { .. } => {
                Outcome::Transferred(Transferred { step: self.step, state_bytes: 0 })
            }
            Activity::Reduce(_) => Outcome::Reduced { loss: 0.5 },
            Activity::Hash => Outcome::Hashed(self.step + 1000),
            Activity::Apply(step) | Activity::Pass(step) => {
                self.step = step.number + 1;
                Outcome::Done
            }
            Activity::Farewell { .. }
            | Activity::Enter { .. }
            | Activity::Connect(_)
            | Activity::Train { .. }
            | Activity::Skip { .. }
            | Activity::Settle(_)
            | Activity::Evaluate { .. } => Outcome::Done,
        };
        self.end(Ok(outcome));
    }

    /// Answers everything until there is nothing left to do.
    fn run(&mut self) {
        self.run_to("never");
    }

    /// The same, until an activity of this name is under way.
    fn run_to(&mut self, name: &str) {
        for _ in 0..10_000 {
            if self.doing.as_ref().is_some_and(|activity| activity_name(activity) == name) {
                return;
            }
            if let Some(event) = self.asked.pop_front() {
                self.feed(event);
            } else if self.doing.is_some() {
                self.succeed();
            } else {
                return;
            }
        }
        panic!("it never rests: {:?}", self.log);
    }

    fn later(&mut self, millis: u64) {
        self.now = self.now + Duration::from_millis(millis);
    }

    fn news(&self) -> Vec<&MemberReport> {
        let mut found = Vec::new();
        for report in &self.reports {
            if let Report::Member(news) = report {
                found.push(news);
            }
        }
        found
    }
}

fn name(report: &Report) -> String {
    if let Report::Member(MemberReport::Formed { world, step, .. }) = report {
        return format!("formed {} at {step}", world.0);
    }
    if let Report::Member(MemberReport::Stepped { step, hash, .. }) = report {
        return format!("stepped {step} ({hash})");
    }
    first_word(&format!("{report:?}").replace("Member(", ""))
}

fn activity_name(activity: &Activity) -> String {
    let word = first_word(&format!("{activity:?}"));
    if let Activity::Train { step, lane } | Activity::Skip { step, lane } = activity {
        return format!("{word} {}.{lane}", step.number);
    }
    word
}

fn first_word(text: &str) -> String {
    text.split([' ', '(']).next().unwrap_or_default().to_lowercase()
}

#[test]
fn a_world_is_entered_and_trained_as_far_as_it_is_allowed() {
    let mut bench = Bench::new(config());
    bench.feed(announce(loading(world(1, &[ME], None, 3))));
    bench.run();
    let forming = ["load", "enter", "exchange", "transfer", "formed 1 at 0"];
    let first = ["train 0.0", "train 0.1", "reduce", "apply", "hash", "stepped 1 (1001)"];
    let second = ["train 1.0", "train 1.1", "reduce", "apply"];
    // The last step of the epoch has two records, which are one lane.
    let third = ["train 2.0", "reduce", "apply", "hash", "stepped 3 (1003)"];
    let all = [&forming[..], &first, &second, &third].concat();
    assert_eq!(bench.log, all);
    assert_eq!(bench.member.claim(), Some(Claim { world: WorldId(1), step: 3 }));
    bench.log.clear();
    bench.feed(Event::Command(Command::Go { world: WorldId(0), until: 4 }));
    assert_eq!(bench.doing, None, "another world's grant");
    bench.feed(Event::Command(Command::Go { world: WorldId(1), until: 4 }));
    bench.run();
    assert_eq!(bench.member.step(), Some(4));
    bench.feed(Event::Command(Command::Go { world: WorldId(1), until: 2 }));
    assert_eq!(bench.doing, None);
}

fn pause(world: u64, number: u64) -> Event {
    Event::Command(Command::Pause { world: WorldId(world), number })
}

fn paused(world: u64, number: u64, step: u64) -> Report {
    Report::Member(MemberReport::Paused { world: WorldId(world), number, step })
}

#[test]
fn a_member_that_pauses_finishes_the_step_that_it_has_begun_and_those_of_others() {
    let mut bench = Bench::new(config());
    bench.feed(pause(1, 1));
    assert_eq!(bench.reports.len(), 1, "it is in no world");
    bench.feed(announce(loading(world(1, &[ME], None, 9))));
    bench.run_to("train 2.0");
    let n_before = bench.reports.len();
    bench.feed(pause(2, 2));
    assert_eq!(bench.reports.len(), n_before, "it is not in that world");
    bench.feed(pause(1, 3));
    assert_eq!(bench.reports.last(), Some(&paused(1, 3, 3)));
    bench.run();
    assert_eq!(bench.member.step(), Some(3));
    // Another member has begun one more step.
    bench.feed(Event::Command(Command::Go { world: WorldId(1), until: 4 }));
    bench.run();
    assert_eq!(bench.member.step(), Some(4));
    bench.feed(pause(1, 4));
    assert_eq!(bench.reports.last(), Some(&paused(1, 4, 4)));
    bench.feed(announce(world(2, &[ME], None, 9)));
    bench.run();
    assert_eq!(bench.member.step(), Some(9), "the next world was not asked to pause");
}

#[test]
fn a_member_that_may_train_on_pauses_again_after_what_it_has_begun() {
    let mut bench = Bench::new(config());
    bench.feed(announce(loading(world(1, &[ME], None, 9))));
    bench.run_to("train 2.0");
    bench.feed(pause(1, 1));
    bench.feed(Event::Command(Command::Go { world: WorldId(1), until: 9 }));
    bench.run_to("train 4.0");
    bench.feed(pause(1, 2));
    assert_eq!(bench.reports.last(), Some(&paused(1, 2, 5)), "though nine were allowed");
    bench.run();
    assert_eq!(bench.member.step(), Some(5));
}

#[test]
fn a_step_that_was_begun_in_a_world_that_broke_is_finished_in_the_next_one() {
    let mut bench = Bench::alone(2);
    bench.feed(announce(world(2, &[ME, OTHER], None, 5)));
    bench.run_to("reduce");
    bench.end(Err(Failure::Lost { peer: OTHER, error: "silent".into() }));
    bench.feed(announce(world(3, &[ME], None, 5)));
    bench.run_to("transfer");
    bench.succeed();
    bench.feed(pause(3, 1));
    let answer = paused(3, 1, 3);
    assert_eq!(bench.reports.last(), Some(&answer), "servers may have applied it");
    bench.run();
    assert_eq!(bench.member.step(), Some(3));
}

/// A member that has begun it with this state may be gone.
#[test]
fn a_member_that_received_its_state_pauses_after_the_step_that_servers_may_have() {
    for (until, last) in [(9, 4), (3, 3)] {
        let mut bench = Bench::new(Config { has_tables: true, ..config() });
        bench.feed(announce(void(world(2, &[ME, OTHER], None, until), ME)));
        bench.run_to("exchange");
        bench.step = 3;
        bench.end(Ok(Outcome::Levels(vec![None, Some(3)])));
        bench.succeed();
        assert_eq!(bench.member.step(), Some(3));
        bench.feed(pause(2, 1));
        assert_eq!(bench.reports.last(), Some(&paused(2, 1, last)), "of {until}");
    }
}

#[test]
fn steps_are_reported_once_in_a_while_and_before_every_wait() {
    let mut bench = Bench::new(config());
    bench.feed(announce(loading(world(1, &[ME], None, 9))));
    bench.run_to("train 3.0");
    bench.later(20);
    bench.run();
    let stepped = |report: &&MemberReport| matches!(report, MemberReport::Stepped { .. });
    let steps: Vec<String> = bench.log.iter().filter(|l| l.starts_with("st")).cloned().collect();
    assert_eq!(steps, ["stepped 1 (1001)", "stepped 4 (1004)", "stepped 9 (1009)"]);
    assert_eq!(bench.news().into_iter().filter(stepped).count(), 3);
}

#[test]
fn what_a_master_may_have_missed_is_repeated() {
    let mut bench = Bench::alone(2);
    bench.feed(Event::Rejoined);
    assert_eq!(bench.log, ["ready", "formed 1 at 0", "stepped 2 (1002)"]);
    let Report::Ready { peer: Some(peer), .. } = &bench.reports[0] else { panic!() };
    assert_eq!((peer.step, peer.probe), (Some(2), 7));
    bench.log.clear();
    bench.feed(Event::Command(Command::Go { world: WorldId(1), until: 3 }));
    bench.run_to("train 2.0");
    bench.feed(Event::Rejoined);
    bench.run();
    assert_eq!(bench.log.last().unwrap(), "stepped 3 (1003)");
}

#[test]
fn a_later_world_interrupts_what_is_under_way() {
    let mut bench = Bench::alone(2);
    bench.feed(Event::Command(Command::Go { world: WorldId(1), until: 9 }));
    bench.run_to("train 2.0");
    bench.feed(announce(world(2, &[ME, OTHER], None, 9)));
    assert!(bench.is_cancelled);
    bench.succeed();
    assert_eq!(bench.log.last().unwrap(), "enter", "the step is thrown away");
    // The same while it forms: only the highest world counts.
    bench.feed(announce(world(4, &[ME], None, 9)));
    bench.feed(announce(world(3, &[ME], None, 9)));
    bench.end(Err(Failure::Cancelled));
    let Some(Activity::Enter { world, place: 0 }) = &bench.doing else { panic!("it enters") };
    assert_eq!(world.id, WorldId(4));
    assert!(bench.news().is_empty(), "the master knows");
}

#[test]
fn a_planned_world_is_entered_after_its_step_and_members_leave_first() {
    let mut bench = Bench::new(config());
    bench.feed(announce(world(1, &[ME, OTHER], None, 2)));
    bench.succeed();
    bench.end(Ok(Outcome::Levels(vec![None, Some(2)])));
    let Some(Activity::Transfer { moves, is_behind: true, .. }) = bench.doing.clone() else {
        panic!("the state is transferred")
    };
    assert_eq!(moves.len(), 3);
    bench.end(Ok(Outcome::Transferred(Transferred { step: 2, state_bytes: 9 })));
    bench.step = 2;
    bench.feed(announce(world(2, &[ME], Some(4), 9)));
    assert_eq!(bench.doing, None, "not before its step");
    bench.feed(Event::Command(Command::Go { world: WorldId(1), until: 4 }));
    bench.run_to("farewell");
    assert_eq!(bench.member.step(), Some(4));
    // Whatever went wrong with that.
    bench.end(Err(Failure::Lost { peer: OTHER, error: "gone".into() }));
    assert_eq!(bench.log.last().unwrap(), "enter");
    let lost = |news: &&MemberReport| matches!(news, MemberReport::PeerLost { .. });
    assert_eq!(bench.news().into_iter().filter(lost).count(), 0);
}

/// Another member may still read the sums of the last step from its memory.
#[test]
fn a_member_whose_step_failed_does_not_enter_the_world_that_is_planned() {
    for failure in [
        Failure::Lost { peer: OTHER, error: "gone".into() },
        Failure::Failed("user code failed".into()),
        Failure::NonFinite("the loss is not finite".into()),
    ] {
        for is_planned_before in [true, false] {
            let mut bench = Bench::alone(2);
            bench.feed(announce(world(2, &[ME, OTHER], None, 4)));
            bench.run_to("reduce");
            let planned = announce(world(3, &[ME], Some(4), 9));
            if is_planned_before {
                bench.feed(planned);
                bench.end(Err(failure.clone()));
            } else {
                bench.end(Err(failure.clone()));
                bench.feed(planned);
            }
            assert_eq!(bench.doing, None, "{:?}", bench.log);
            bench.feed(announce(world(4, &[ME], None, 9)));
            assert_eq!(bench.log.last().unwrap(), "enter", "the master has replaced it");
        }
    }
}

#[test]
fn a_void_state_is_dropped_and_its_world_is_not_waited_for() {
    let mut bench = Bench::alone(2);
    bench.feed(announce(void(world(2, &[ME, OTHER], Some(7), 9), ME)));
    assert_eq!(bench.log, ["enter"], "at once, without a farewell");
    assert_eq!((bench.member.step(), bench.member.claim()), (None, None));
    bench.succeed();
    bench.end(Ok(Outcome::Levels(vec![None, None])));
    let [MemberReport::PeerLost { world: WorldId(2), suspect: ME, .. }] = bench.news()[..] else {
        panic!("there is no state: {:?}", bench.reports)
    };
}

#[test]
fn a_worker_that_is_left_out_keeps_its_state_and_leaves_if_asked() {
    let mut bench = Bench::alone(2);
    bench.feed(Event::Leave);
    assert!(!bench.has_ended, "others may need its state");
    bench.feed(announce(world(2, &[OTHER], None, 9)));
    assert_eq!(bench.member.claim(), Some(Claim { world: WorldId(1), step: 2 }));
    assert!(bench.has_ended);
}

#[test]
fn a_worker_that_leaves_waits_for_its_successors_but_not_for_long() {
    let mut bench = Bench::alone(2);
    bench.feed(Event::Leave);
    assert_eq!(bench.log, ["leaving"]);
    assert_eq!(bench.member.next_deadline(), Some(bench.now + Duration::from_secs(10)));
    bench.feed(Event::Rejoined);
    assert_eq!(bench.log, ["leaving", "ready", "leaving", "formed 1 at 0", "stepped 2 (1002)"]);
    bench.feed(Event::MasterLost);
    assert_eq!(bench.member.next_deadline(), Some(bench.now + Duration::from_secs(1)));
    bench.later(1000);
    bench.feed(Event::Tick);
    assert!(bench.has_ended);
    assert_eq!(bench.member.next_deadline(), None);
}

#[test]
fn a_worker_that_is_stopped_does_not_wait_long_for_what_is_under_way() {
    let mut bench = Bench::alone(2);
    bench.feed(Event::Command(Command::Go { world: WorldId(1), until: 9 }));
    bench.run_to("reduce");
    bench.feed(stop());
    bench.later(999);
    bench.feed(Event::Tick);
    assert!(bench.is_cancelled && !bench.has_ended);
    bench.later(1);
    bench.feed(Event::Tick);
    assert!(bench.has_ended);
}

#[test]
fn only_a_member_with_every_step_of_its_world_has_the_final_parameters() {
    let mut bench = Bench::alone(2);
    assert_eq!(bench.member.leads_at_end(), Some(true));
    bench.feed(Event::Command(Command::Go { world: WorldId(1), until: 9 }));
    assert_eq!(bench.member.leads_at_end(), None, "it has two of nine steps");
    let mut bench = Bench::alone(2);
    bench.feed(announce(world(2, &[OTHER], None, 9)));
    assert_eq!(bench.member.leads_at_end(), None, "it is in no world");
}

#[test]
fn nothing_is_decided_before_the_model_is_built() {
    let mut member = Member::new(config(), Time::ZERO);
    assert_eq!(member.handle(Event::Leave, Time::ZERO), [Effect::Report(Report::Leaving)]);
    assert_eq!(member.activity().spends, TimeKind::Idle);
    assert_eq!(member.handle(built(), Time::ZERO).last(), Some(&Effect::End));
}

#[test]
fn failures_of_a_step_are_reported_and_end_the_world() {
    let lost = Failure::Lost { peer: OTHER, error: "gone".into() };
    let failed = Failure::Failed("user code".into());
    let nonfinite = Failure::NonFinite("nan".into());
    let cases = [("reduce", lost), ("train 2.0", failed), ("train 2.0", nonfinite)];
    for (at, failure) in cases.into_iter().chain([("train 2.0", Failure::Quit)]) {
        let mut bench = Bench::alone(2);
        bench.feed(Event::Command(Command::Go { world: WorldId(1), until: 9 }));
        bench.run_to(at);
        bench.end(Err(failure.clone()));
        match (bench.news()[0], failure) {
            (MemberReport::PeerLost { world, suspect, .. }, Failure::Lost { peer, .. }) => {
                assert_eq!((*world, *suspect), (WorldId(1), peer));
            }
            (MemberReport::StepFailed { world, step, .. }, Failure::Failed(_))
            | (MemberReport::NonFinite { world, step, .. }, Failure::NonFinite(_))
            | (MemberReport::Quit { world, step }, Failure::Quit) => {
                assert_eq!((*world, *step), (WorldId(1), 2));
            }
            (news, failure) => panic!("{failure:?} is reported as {news:?}"),
        }
        assert_eq!((bench.doing.clone(), bench.news().len()), (None, 1));
        assert_eq!(bench.member.claim(), Some(Claim { world: WorldId(1), step: 2 }));
    }
}

#[test]
fn the_more_members_the_less_often_they_report() {
    let every = |workers: std::ops::Range<u32>| {
        let mut member = Member::new(config(), Time::ZERO);
        let workers: Vec<WorkerId> = workers.map(WorkerId).collect();
        member.world = Some(world(1, &workers, None, 9));
        member.report_every().as_millis()
    };
    assert_eq!([every(0..2), every(0..80), every(0..400), every(0..9_000)], [20, 20, 100, 250]);
    assert_eq!(every(ME.0..9_000), 20, "the first member reports for all");
}

#[test]
fn a_step_that_is_skipped_trains_no_lane_and_counts() {
    for has_tables in [false, true] {
        let mut bench = Bench::new(Config { has_tables, ..config() });
        if has_tables {
            bench.feed(Event::Command(Command::Route(route(GENERATION.0))));
        }
        let skipped = BTreeSet::from([1]);
        bench.feed(announce(Announced { skipped, ..loading(world(1, &[ME], None, 3)) }));
        bench.run();
        let count = |what: &str| bench.log.iter().filter(|line| line.starts_with(what)).count();
        assert_eq!(
            (count("pass"), count("apply"), count("train 1.")),
            (1, 2, 0),
            "{:?}",
            bench.log
        );
        assert_eq!(count("skip 1."), if has_tables { 2 } else { 0 }, "{:?}", bench.log);
        assert_eq!(bench.member.claim(), Some(Claim { world: WorldId(1), step: 3 }));
        let hashed = |report: &&MemberReport| matches!(report, MemberReport::Stepped { step: 2, hash, .. } if *hash != 0);
        assert!(!bench.news().iter().any(hashed), "there is no gradient to hash");
    }
}

#[test]
fn records_that_cannot_be_read_fail_their_step() {
    let mut bench = Bench::alone(2);
    bench.feed(Event::Command(Command::Go { world: WorldId(1), until: 9 }));
    bench.run_to("train 3.0");
    let place = Place::Lane(crate::id::BatchId { epoch: 1, index: 0 }, 1);
    bench.asked.retain(|event| !matches!(event, Event::Decoded { place: of, .. } if *of == place));
    bench.member.reads.insert(place, Reading::Asked);
    bench.feed(Event::Decoded { place, result: Err("corrupt".into()) });
    bench.run();
    let Some(MemberReport::StepFailed { step: 3, error, .. }) = bench.news().last() else {
        panic!("{:?}", bench.reports)
    };
    assert_eq!(error, "corrupt");
}

#[test]
fn a_state_that_cannot_be_loaded_is_reported() {
    let mut bench = Bench::new(config());
    bench.feed(announce(loading(world(1, &[ME], None, 3))));
    bench.end(Err(Failure::Failed("corrupt".into())));
    let [MemberReport::NotLoaded { generation: GENERATION, .. }] = bench.news()[..] else {
        panic!()
    };
    assert_eq!(bench.doing, None);
}

#[test]
fn a_checkpoint_is_copied_at_its_step_and_one_is_written_at_a_time() {
    let mut bench = Bench::alone(2);
    bench.feed(Event::Command(Command::Checkpoint(order(1, 3))));
    bench.feed(Event::Command(Command::Checkpoint(order(2, 4))));
    bench.feed(Event::Command(Command::Checkpoint(order(3, 1))));
    bench.feed(Event::Command(Command::Checkpoint(MemberCheckpoint {
        generation: Generation(3),
        ..order(4, 9)
    })));
    bench.feed(Event::Command(Command::Checkpoint(MemberCheckpoint {
        partitions: 0..4,
        ..order(5, 2)
    })));
    bench.feed(Event::Command(Command::Go { world: WorldId(1), until: 5 }));
    bench.run();
    let refused = |report: &Report| {
        let Report::CheckpointFailed { checkpoint, error, .. } = report else { return None };
        Some((checkpoint.0, error.clone()))
    };
    let refused: Vec<(u64, String)> = bench.reports.iter().filter_map(refused).collect();
    let expected = [
        (3, "step 1 has passed: this worker is at step 2"),
        (4, "this worker does not hold generation 3"),
        (5, "invalid partitions 0..4"),
        (2, "another checkpoint is still being written"),
    ];
    assert_eq!(refused, expected.map(|(checkpoint, error)| (checkpoint, error.to_owned())));
    let written = bench.log.iter().position(|line| line == "write 1").unwrap();
    assert_eq!(bench.log[written - 1], "stepped 3 (1003)");
    bench.feed(stop());
    assert!(!bench.has_ended, "the files are not complete");
    bench.feed(Event::Written { checkpoint: CheckpointId(1), result: Ok(Vec::new()) });
    assert!(bench.has_ended);
    assert!(matches!(
        bench.reports.last(),
        Some(Report::CheckpointDone { checkpoint: CheckpointId(1), .. })
    ));
}

#[test]
fn a_checkpoint_that_cannot_be_written_is_reported_and_the_next_one_is_written() {
    let mut bench = Bench::alone(2);
    bench.feed(Event::Command(Command::Checkpoint(order(1, 3))));
    bench.feed(Event::Command(Command::Go { world: WorldId(1), until: 5 }));
    bench.run();
    bench.feed(Event::Written { checkpoint: CheckpointId(1), result: Err("disk full".into()) });
    let failed = |report: &Report| {
        let Report::CheckpointFailed { checkpoint, error } = report else { return None };
        Some((checkpoint.0, error.clone()))
    };
    let failed: Vec<(u64, String)> = bench.reports.iter().filter_map(failed).collect();
    assert_eq!(failed, [(1, "disk full".to_owned())]);
    bench.feed(Event::Command(Command::Checkpoint(order(2, 7))));
    bench.feed(Event::Command(Command::Go { world: WorldId(1), until: 8 }));
    bench.run();
    assert!(bench.log.iter().any(|line| line == "write 2"), "{:?}", bench.log);
}

#[test]
fn a_shard_is_evaluated_at_its_step_or_returned() {
    let mut bench = Bench::alone(2);
    bench.feed(Event::Command(Command::Lease { lease: LeaseId(1), task: shard(2, 5) }));
    bench.feed(Event::Command(Command::Lease { lease: LeaseId(2), task: shard(1, 6) }));
    bench.feed(Event::Command(Command::Lease { lease: LeaseId(3), task: shard(3, 7) }));
    bench.run();
    assert_eq!(bench.log, ["evaluate", "evaluate", "evaluate", "failed", "evaldone"]);
    bench.feed(Event::Command(Command::Revoke(LeaseId(3))));
    bench.feed(Event::Command(Command::Lease { lease: LeaseId(4), task: shard(3, 8) }));
    bench.feed(Event::Rejoined);
    bench.feed(Event::Command(Command::Go { world: WorldId(1), until: 4 }));
    bench.run();
    let done = |report: &Report| {
        let Report::EvalDone { shard, .. } = report else { return None };
        Some(*shard)
    };
    assert_eq!(bench.reports.iter().filter_map(done).collect::<Vec<_>>(), [5]);
}

fn hybrid() -> Bench {
    let mut bench = Bench::new(Config { has_tables: true, ..config() });
    bench.feed(announce(loading(world(1, &[ME], None, 9))));
    bench
}

#[test]
fn servers_acknowledge_every_lane_before_the_sum() {
    let mut bench = hybrid();
    bench.run();
    assert_eq!(bench.log.last().unwrap(), "formed 1 at 0", "there is no route");
    bench.feed(Event::Command(Command::Route(route(3))));
    assert_eq!(bench.doing, None, "another generation's servers");
    bench.log.clear();
    bench.feed(Event::Command(Command::Route(route(4))));
    bench.run_to("train 3.0");
    let last = ["train 2.0", "skip 2.1", "settle", "reduce", "apply", "train 3.0"];
    assert_eq!(bench.log[0], "connect");
    assert_eq!(bench.log[bench.log.len() - last.len()..], last);
}

#[test]
fn servers_that_cannot_be_reached_are_tried_again() {
    let mut bench = hybrid();
    bench.feed(Event::Command(Command::Route(route(4))));
    bench.run_to("settle");
    bench.end(Err(Failure::Servers("refused".into())));
    assert_eq!(bench.doing, None);
    let at = bench.member.next_deadline().unwrap();
    assert_eq!(at, bench.now + Duration::from_millis(50));
    assert_eq!(bench.member.activity().waiting_for, WaitingFor::Servers);
    bench.now = at;
    bench.feed(Event::Tick);
    assert_eq!(bench.log.last().unwrap(), "connect");
    assert_eq!(bench.member.next_deadline(), None);
    bench.run_to("train 0.1");
    assert!(bench.news().len() == 1, "nothing but that the world has formed");
}

#[test]
fn servers_at_another_step_end_the_world() {
    let mut bench = hybrid();
    bench.feed(Event::Command(Command::Route(route(4))));
    bench.run_to("train 1.0");
    bench.end(Err(Failure::OtherStep("step 7".into())));
    let Some(MemberReport::StepMismatch { world: WorldId(1), .. }) = bench.news().last() else {
        panic!()
    };
    assert_eq!((bench.doing.clone(), bench.member.next_deadline()), (None, None));
}

#[test]
fn a_complete_sum_is_applied_although_a_later_world_waits() {
    let mut bench = Bench::alone(2);
    bench.feed(Event::Command(Command::Go { world: WorldId(1), until: 9 }));
    bench.run_to("reduce");
    bench.feed(announce(world(2, &[ME], None, 9)));
    bench.succeed();
    assert_eq!(bench.log.last().unwrap(), "apply");
    bench.succeed();
    assert_eq!(bench.member.step(), Some(3));
    bench.run_to("enter");
    assert_eq!(bench.log[bench.log.len() - 2..], ["stepped 3 (1003)", "enter"]);
}

#[test]
fn the_end_waits_for_what_is_under_way() {
    let mut bench = Bench::alone(2);
    bench.feed(Event::Command(Command::Go { world: WorldId(1), until: 9 }));
    bench.run_to("reduce");
    bench.feed(stop());
    assert!(bench.is_cancelled && !bench.has_ended);
    bench.end(Err(Failure::Cancelled));
    assert!(bench.has_ended && bench.doing.is_none());
}
