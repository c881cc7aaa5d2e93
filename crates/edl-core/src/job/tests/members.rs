// SPDX-License-Identifier: Apache-2.0
//! What the job makes of members whose results, steps or progress are not as they should be.
//! Real workers do not report such things to order; `edl-sim` simulates the rest.

use std::time::Duration;

use super::bench::{model, ps, worker};
use crate::activity::WaitingFor;
use crate::applied::AppliedSet;
use crate::id::{
    BatchId, Generation, Incarnation, PartitionId, PsId, RunId, Term, WorkerId, WorldId,
};
use crate::job::{
    Command, Config, Durable, Effect, End, Event, EventKind, Job, JobState, MemberReport, Peer,
};
use crate::platform::{Ended, Order, Process, Report};
use crate::server;
use crate::servers::{PartitionState, ServerMember};
use crate::spec::{JobSpec, OnNonfinite, SameBits, Strategy};
use crate::time::Time;
use crate::worker;
use crate::world::Announced;

/// A job with two workers, and everything that it has asked for.
pub(super) struct Members {
    pub job: Job,
    pub now: Time,
    pub effects: Vec<Effect>,
}

pub(super) fn spec() -> JobSpec {
    JobSpec {
        job_name: "members".into(),
        distribution_strategy: Strategy::Allreduce,
        num_ps_pods: 0,
        lanes: Some(4),
        num_workers: 2,
        minibatch_size: 2,
        partitions: 4,
        checkpoint_secs: 0,
        evaluation_epochs: false,
        task_timeout_secs: 20,
        ..JobSpec::default()
    }
}

impl Members {
    /// All workers are ready, unless their probes keep one of them out, and the members of the first
    /// world hold the state of step 0.
    pub(super) fn with_probes(spec: JobSpec, probes: &[u64]) -> Self {
        let n_ps = spec.num_ps_pods;
        let mut members = Self::starting(spec, probes.len());
        for (id, probe) in (0..).zip(probes) {
            members.join(id, *probe);
        }
        (0..n_ps).for_each(|id| members.join_ps(id));
        members.loaded(1);
        members.form();
        members
    }

    /// So many workers and all servers run, but none has connected.
    pub(super) fn starting(spec: JobSpec, n_workers: usize) -> Self {
        let n_ps = spec.num_ps_pods;
        let config = Config {
            spec,
            run: RunId::default(),
            term: Term(1),
            n_records: 160,
            n_validation_records: 0,
            n_prediction_records: 0,
            output: String::new(),
            evaluated_version: 0,
        };
        let job = Job::new(config, Durable::default(), Time::ZERO);
        let mut members = Self { job, now: Time::ZERO, effects: Vec::new() };
        let workers = (0..).take(n_workers).map(|id| (worker(id), id));
        let servers = (0..n_ps).map(|id| (ps(id), 10 + id));
        let process = |(instance, pid)| Process { instance, pid, age_ms: 0 };
        let running = workers.chain(servers).map(process).collect();
        members.handle(Event::Platform(Report::Running(running)));
        members
    }

    /// Whether another process must take the place of a worker.
    fn is_replaced(&self, id: u32) -> bool {
        let is_it = |effect: &Effect| {
            let Effect::Platform(Order::Stop { instance, .. }) = effect else { return false };
            *instance == worker(id)
        };
        self.effects.iter().any(is_it)
    }

    pub(super) fn new(spec: JobSpec) -> Self {
        Self::with_probes(spec, &[7, 7])
    }

    pub(super) fn handle(&mut self, event: Event) {
        let effects = self.job.handle(event, self.now);
        self.job.check_invariants();
        self.effects.extend(effects);
    }

    pub(super) fn join(&mut self, id: u32, probe: u64) {
        let (worker, incarnation) = (WorkerId(id), Incarnation(id.into()));
        self.handle(Event::WorkerConnected { worker, incarnation, pid: id });
        let (address, unix_path) = Default::default();
        let peer = Some(Box::new(Peer { address, unix_path, probe, step: None }));
        let (model, held) = (Box::new(model()), Vec::new());
        let report = worker::Report::Ready { model, capacity: 1, held, peer };
        self.handle(Event::FromWorker { worker, incarnation, report });
    }

    pub(super) fn join_ps(&mut self, id: u32) {
        let member = ServerMember {
            incarnation: Incarnation(10 + u64::from(id)),
            address: String::new(),
            unix_path: String::new(),
            generation: Generation(0),
            sets: Vec::new(),
        };
        self.handle(Event::PsConnected { ps: PsId(id), pid: 10 + id, member: Box::new(member) });
    }

    /// All servers have loaded first values.
    fn loaded(&mut self, generation: u64) {
        let n_ps = self.job.config().spec.num_ps_pods;
        let state = |partition| PartitionState {
            partition: PartitionId(partition),
            applied: AppliedSet::new(20),
            updates: 0,
            n_rows: 0,
        };
        for id in 0..n_ps {
            let states = (4 + 4 / n_ps * id..4 + 4 / n_ps * (id + 1)).map(state).collect();
            let generation = Generation(generation);
            let (incarnation, report) =
                (Incarnation(0), server::Report::Loaded { generation, states });
            self.handle(Event::FromPs { ps: PsId(id), incarnation, report });
        }
    }

    pub(super) fn world(&self) -> WorldId {
        self.job.worlds().and_then(|worlds| worlds.current()).expect("a world").id
    }

    pub(super) fn members(&self) -> Vec<u32> {
        let world = self.job.worlds().and_then(|worlds| worlds.current()).expect("a world");
        world.members.iter().map(|member| member.worker.0).collect()
    }

    pub(super) fn report(&mut self, id: u32, report: MemberReport) {
        let (worker, incarnation) = (WorkerId(id), Incarnation(id.into()));
        self.handle(Event::FromWorker {
            worker,
            incarnation,
            report: worker::Report::Member(report),
        });
    }

    pub(super) fn form(&mut self) {
        self.pass(Duration::from_secs(2), &[WaitingFor::Master; 4]);
        for id in self.members() {
            let (world, pause_secs, state_bytes) = (self.world(), 0.0, 0);
            self.report(id, MemberReport::Formed { world, step: 0, pause_secs, state_bytes });
        }
    }

    /// The number of the last request to pause, which all of these members got.
    pub(super) fn asked_to_pause<const N: usize>(&self, ids: [u32; N]) -> u64 {
        let request = |effect: &Effect| {
            let Effect::ToWorker(worker, Command::Pause { number, .. }) = effect else {
                return None;
            };
            Some((*number, worker.0))
        };
        let last = self.effects.iter().rev().find_map(request).expect("a request").0;
        let asked = self.effects.iter().filter_map(request).filter(|(number, _)| *number == last);
        assert_eq!(asked.map(|(_, worker)| worker).collect::<Vec<_>>(), ids);
        last
    }

    /// These members begin no step after theirs.
    pub(super) fn pause<const N: usize>(&mut self, last: [(u32, u64); N]) {
        let (world, number) = (self.world(), self.asked_to_pause(last.map(|(id, _)| id)));
        for (id, step) in last {
            self.report(id, MemberReport::Paused { world, number, step });
        }
    }

    fn lost(&mut self, id: u32, world: WorldId, suspect: u32) {
        let suspect = WorkerId(suspect);
        self.report(id, MemberReport::PeerLost { world, suspect, error: "silent".into() });
    }

    /// Time passes; all processes send heartbeats.
    pub(super) fn pass(&mut self, time: Duration, waiting_for: &[WaitingFor]) {
        let end = self.now + time;
        while self.now < end {
            self.now = self.now + Duration::from_millis(100);
            for (id, waiting_for) in (0..).zip(waiting_for) {
                let (worker, incarnation) = (WorkerId(id), Incarnation(id.into()));
                let waiting_for = *waiting_for;
                let report = worker::Report::Heartbeat { waiting_for, progress: 0 };
                self.handle(Event::FromWorker { worker, incarnation, report });
            }
            for id in 0..self.job.config().spec.num_ps_pods {
                let incarnation = Incarnation(10 + u64::from(id));
                let report = server::Report::Heartbeat;
                self.handle(Event::FromPs { ps: PsId(id), incarnation, report });
            }
            self.handle(Event::Tick);
        }
    }

    pub(super) fn notes(&self, kind: EventKind) -> Vec<&str> {
        let mut texts = Vec::new();
        for effect in &self.effects {
            if let Effect::Note(note) = effect
                && note.kind == kind
            {
                texts.push(note.text.as_str());
            }
        }
        texts
    }

    fn end(&self) -> Option<&End> {
        self.job.durable().end.as_ref()
    }
}

#[test]
fn the_report_of_a_lost_member_names_both_members() {
    for (suspect, expected) in [
        (0, "worker-0 left its world (silent); the others continue"),
        (1, "worker-0 lost worker-1 (silent); the others continue"),
    ] {
        let mut members = Members::new(spec());
        members.lost(0, members.world(), suspect);
        assert_eq!(members.notes(EventKind::PeerLost), [expected]);
    }
}

#[test]
fn routine_reports_do_not_make_the_job_look_for_another_world() {
    let mut members = Members::new(spec());
    let unchanged = members.job.unchanged_world;
    assert!(unchanged.is_some());
    let world = members.world();
    for id in [0, 1] {
        members.report(id, MemberReport::Stepped { world, step: 1, hash: 7, loss: 0.5 });
        members.lost(id, WorldId(1), 1 - id);
    }
    assert_eq!(members.job.unchanged_world, unchanged, "the lost member was in an earlier world");
    members.join(2, 7);
    members.pause([(0, 1), (1, 1)]);
    assert!(members.job.unchanged_world != unchanged && members.members() == [0, 1, 2]);
}

#[test]
fn a_large_world_is_formed_with_few_writes_and_a_short_note() {
    let mut members = Members::new(JobSpec { lanes: Some(64), ..spec() });
    (2..50).for_each(|id| members.join(id, 7));
    members.pause([(0, 0), (1, 0)]);
    members.effects.clear();
    members.form();
    assert_eq!(members.members().len(), 50);
    let n_facts = |effect: &Effect| {
        if let Effect::Persist(facts) = effect { Some(facts.len()) } else { None }
    };
    let writes: Vec<usize> = members.effects.iter().filter_map(n_facts).collect();
    assert!(writes.len() <= 3 && writes.iter().sum::<usize>() <= 50, "{writes:?}");
    let holders = members.job.worlds().and_then(|worlds| worlds.holders()).map(|all| all.len());
    let stored = members.job.durable().holders.as_ref().map(Vec::len);
    assert_eq!((holders, stored), (Some(50), Some(50)));
    let notes = members.notes(EventKind::World);
    assert!(notes.last().is_some_and(|note| note.contains(" and 34 more continued")), "{notes:?}");
}

#[test]
fn a_report_from_an_earlier_world_changes_nothing() {
    let mut members = Members::new(spec());
    let (world, earlier) = (members.world(), WorldId(1));
    members.lost(0, earlier, 1);
    members.report(0, MemberReport::Stepped { world: earlier, step: 8, hash: 8, loss: 0.5 });
    assert_eq!((members.world(), members.job.ledger().n_done()), (world, 0));
    assert!(members.notes(EventKind::PeerLost).is_empty());
}

#[test]
fn a_worker_with_another_probe_is_refused_or_reported() {
    let members = Members::with_probes(spec(), &[7, 8]);
    let is_refusal = |effect: &Effect| {
        let says_why = |why: &str| why.contains("--same_bits");
        matches!(effect, Effect::RefuseWorker(WorkerId(1), why) if says_why(why))
    };
    assert_eq!((members.members(), members.notes(EventKind::Refused).len()), (vec![0], 1));
    assert!(members.effects.iter().any(is_refusal) && !members.job.durable().bits_differ);

    let spec = JobSpec { same_bits: SameBits::Report, ..spec() };
    let members = Members::with_probes(spec, &[7, 8]);
    assert_eq!((members.members(), members.notes(EventKind::BitsDiffer).len()), (vec![0, 1], 1));
    assert!(members.job.durable().bits_differ, "the next master knows it too");
}

#[test]
fn a_stop_saves_the_last_step_that_a_member_has_begun() {
    let mut members = Members::new(spec());
    let world = members.world();
    members.report(0, MemberReport::Stepped { world, step: 2, hash: 0, loss: 0.5 });
    members.effects.clear();
    let within = Duration::from_secs(5);
    members.handle(Event::Stop { reason: "enough".into(), within });
    for id in [0, 1] {
        let drain = Effect::ToWorker(WorkerId(id), Command::Drain { within });
        assert!(members.effects.contains(&drain));
    }
    let number = members.asked_to_pause([0, 1]);
    members.report(0, MemberReport::Paused { world: WorldId(1), number, step: 7 });
    members.report(1, MemberReport::Paused { world, number, step: 3 });
    members.report(0, MemberReport::Paused { world, number: number - 1, step: 3 });
    members.report(0, MemberReport::Paused { world, number, step: 4 });
    for id in [0, 1] {
        let go = Effect::ToWorker(WorkerId(id), Command::Go { world, until: 4 });
        assert!(members.effects.contains(&go), "worker 1 trains one more step");
        let is_order = |effect: &Effect| {
            let Effect::ToWorker(worker, Command::Checkpoint(order)) = effect else { return false };
            worker.0 == id && order.at == 4
        };
        assert!(members.effects.iter().any(is_order));
    }
    members.pass(within, &[WaitingFor::Nothing; 2]);
    let why = "enough; no time to save a checkpoint after step 0";
    assert_eq!(members.end(), Some(&End::Stopped(why.into())));
}

#[test]
fn a_stop_saves_steps_of_a_world_that_has_formed_but_not_reported_it_yet() {
    for (begun, is_saved) in [(0, false), (1, true)] {
        let mut members = Members::starting(spec(), 2);
        [0, 1].into_iter().for_each(|id| members.join(id, 7));
        let world = members.world();
        let within = Duration::from_secs(5);
        members.handle(Event::Stop { reason: "enough".into(), within });
        assert_eq!(members.end(), None, "the members may train");
        members.form();
        assert!(members.effects.iter().any(|effect| {
            matches!(effect, Effect::ToWorker(WorkerId(1), Command::Drain { .. }))
        }));
        let number = members.asked_to_pause([0, 1]);
        members.report(0, MemberReport::Paused { world, number, step: 0 });
        members.report(1, MemberReport::Paused { world, number, step: begun });
        let is_order =
            |effect: &Effect| matches!(effect, Effect::ToWorker(_, Command::Checkpoint(_)));
        assert_eq!(members.effects.iter().any(is_order), is_saved);
        assert_eq!(members.end().is_some(), !is_saved, "there is nothing to save at step 0");
    }
}

#[test]
fn a_stop_does_not_wait_for_members_of_a_first_world_that_fail() {
    let mut members = Members::starting(JobSpec { num_workers: 1, ..spec() }, 1);
    members.join(0, 7);
    members.handle(Event::Stop { reason: "enough".into(), within: Duration::from_secs(5) });
    assert_eq!(members.end(), None);
    let (worker, incarnation) = (WorkerId(0), Incarnation(0));
    members.handle(Event::WorkerGone { worker, incarnation });
    let (instance, pid, how) = (super::bench::worker(0), 0, Ended::Signal(9));
    members.handle(Event::Platform(Report::Ended { instance, pid, how }));
    assert!(matches!(members.end(), Some(End::Stopped(_))), "{:?}", members.end());
}

#[test]
fn two_results_of_one_step_fail_a_job_that_promised_equal_bits() {
    let mut members = Members::new(spec());
    let world = members.world();
    members.report(0, MemberReport::Stepped { world, step: 1, hash: 1, loss: 0.5 });
    members.report(1, MemberReport::Stepped { world, step: 1, hash: 99, loss: 0.5 });
    assert!(matches!(members.end(), Some(End::Failed(why)) if why.contains("different gradient")));
}

#[test]
fn a_member_that_hangs_is_replaced_and_one_that_waits_for_it_is_not() {
    let mut members = Members::new(spec());
    members.pass(Duration::from_secs(22), &[WaitingFor::Nothing, WaitingFor::Members]);
    let stopped = |effect: &Effect| {
        let Effect::Platform(Order::Stop { instance, .. }) = effect else { return None };
        Some(*instance)
    };
    let stopped: Vec<_> = members.effects.iter().filter_map(stopped).collect();
    assert_eq!(stopped, [worker(0)]);
}

#[test]
fn the_others_continue_without_a_member_that_does_not_answer() {
    let mut members = Members::new(spec());
    let beat = Duration::from_millis(100);
    for step in 1..=8 {
        let world = members.world();
        members.report(0, MemberReport::Stepped { world, step, hash: 0, loss: 0.5 });
        members.report(1, MemberReport::Stepped { world, step, hash: 0, loss: 0.5 });
        members.pass(beat, &[WaitingFor::Nothing; 2]);
    }
    // Both compute for long, and answer.
    members.pass(Duration::from_secs(5), &[WaitingFor::Nothing; 2]);
    assert_eq!(members.members(), [0, 1]);
    let since = members.now;
    while members.members() == [0, 1] {
        members.now = members.now + beat;
        let (worker, incarnation) = (WorkerId(0), Incarnation(0));
        let report = worker::Report::Heartbeat { waiting_for: WaitingFor::Members, progress: 0 };
        members.handle(Event::FromWorker { worker, incarnation, report });
        members.handle(Event::Tick);
    }
    let time = members.now.since(since);
    assert!((Duration::from_secs(1)..Duration::from_millis(1500)).contains(&time), "{time:?}");
    assert_eq!((members.members(), members.notes(EventKind::Stuck).len()), (vec![0], 1));
    let pinged = Effect::ToWorker(WorkerId(1), Command::Ping);
    assert!(members.effects.contains(&pinged));
}

#[test]
fn members_and_servers_at_different_steps_load_again_but_not_forever() {
    let spec = JobSpec { distribution_strategy: Strategy::Hybrid, num_ps_pods: 2, ..spec() };
    let mut members = Members::new(spec);
    let mismatch =
        |world| MemberReport::StepMismatch { world, error: "step 9 is wanted, 11 is here".into() };
    members.report(0, mismatch(WorldId(1)));
    assert_eq!(members.job.durable().generation, Generation(1), "of an unknown world");
    for generation in 2..4 {
        let world = members.world();
        for id in [0, 1] {
            members.report(id, mismatch(world));
            assert_eq!(members.job.durable().generation, Generation(generation), "once is enough");
        }
        members.loaded(generation);
        members.form();
    }
    members.report(0, mismatch(members.world()));
    assert!(matches!(members.end(), Some(End::Failed(_))), "{:?}", members.end());
}

/// The last world that was announced.
fn announced(members: &Members) -> &Announced {
    let world = |effect: &'_ Effect| matches!(effect, Effect::ToWorker(_, Command::World(_)));
    let last = members.effects.iter().rfind(|effect| world(effect)).expect("a world");
    let Effect::ToWorker(_, Command::World(announced)) = last else { unreachable!() };
    announced
}

fn nonfinite(members: &mut Members, step: u64) {
    let (world, error) = (members.world(), "the loss is not finite".into());
    members.report(1, MemberReport::NonFinite { world, step, error });
}

#[test]
fn all_members_of_the_next_world_skip_a_step_that_is_not_finite() {
    let mut members = Members::new(JobSpec { on_nonfinite: OnNonfinite::Skip, ..spec() });
    nonfinite(&mut members, 0);
    let next = announced(&members);
    assert_eq!((next.skipped.clone(), next.load.clone()), ([0].into(), None));
    assert!(next.world.members.iter().all(|member| member.has_state), "they keep their state");
    assert!(members.job.durable().skipped.contains(&BatchId { epoch: 0, index: 0 }));
}

#[test]
fn a_rollback_that_does_not_help_skips_the_step_before_too() {
    let mut members = Members::new(JobSpec { on_nonfinite: OnNonfinite::Rollback, ..spec() });
    for (step, expected) in [(5, &[5][..]), (6, &[4, 5, 6]), (7, &[3, 4, 5, 6, 7])] {
        let world = members.world();
        members.report(0, MemberReport::Stepped { world, step, hash: 0, loss: 0.5 });
        nonfinite(&mut members, step);
        let next = announced(&members);
        assert_eq!(next.skipped.iter().copied().collect::<Vec<_>>(), expected);
        assert!(next.load.is_some(), "what the members hold does not count");
        members.form();
        assert_eq!(members.job.ledger().n_done(), 0, "there is no checkpoint");
    }
}

#[test]
fn a_step_that_is_not_finite_stops_the_job_by_default() {
    let mut members = Members::new(spec());
    nonfinite(&mut members, 2);
    let Some(End::Failed(why)) = members.end() else { panic!("{:?}", members.end()) };
    assert!(why.contains("step 3, worker-1: ") && why.ends_with("there is no checkpoint"), "{why}");
}

#[test]
fn a_script_that_leaves_its_loop_ends_the_job_at_the_last_step_of_any_member() {
    for furthest in [3, 4] {
        let mut members = Members::new(spec());
        let world = members.world();
        for id in [0, 1] {
            members.report(id, MemberReport::Stepped { world, step: 3, hash: 0, loss: 0.5 });
        }
        members.report(1, MemberReport::Quit { world, step: 3 });
        assert_eq!(until(&members), Some(3), "steps that were allowed are taken back");
        assert_eq!((members.members(), members.job.durable().last_step), (vec![0, 1], Some(3)));
        let next = members.world();
        members.report(0, MemberReport::Quit { world, step: 3 });
        assert_eq!(members.world(), next, "the other one leaves it, too");
        for id in [0, 1] {
            let (step, pause_secs, state_bytes) = (furthest, 0.0, 0);
            members.report(id, MemberReport::Formed { world: next, step, pause_secs, state_bytes });
        }
        assert_eq!(members.job.state(), JobState::Finishing);
        assert_eq!(members.job.durable().last_step, Some(furthest));
        let at = |effect: &Effect| {
            let Effect::ToWorker(_, Command::Checkpoint(order)) = effect else { return None };
            Some(order.at)
        };
        let orders: Vec<u64> = members.effects.iter().filter_map(at).collect();
        assert_eq!(orders, [furthest; 2], "the final checkpoint");
        assert_eq!(members.notes(EventKind::Quit).len(), 1);
    }
}

#[test]
fn a_script_that_left_its_loop_does_not_end_the_job_earlier_when_steps_are_trained_again() {
    for is_heard in [true, false] {
        let hybrid = JobSpec { distribution_strategy: Strategy::Hybrid, num_ps_pods: 2, ..spec() };
        let mut members = Members::new(hybrid);
        let world = members.world();
        for id in [0, 1] {
            members.report(id, MemberReport::Stepped { world, step: 3, hash: 0, loss: 0.5 });
        }
        if is_heard {
            members.report(1, MemberReport::Quit { world, step: 3 });
        }
        // The only state of the tables is lost, and there is no checkpoint.
        let (instance, pid, how) = (ps(1), 11, Ended::Signal(9));
        members.handle(Event::Platform(Report::Ended { instance, pid, how }));
        // A worker that lost its stream is still the same process.
        members.join(1, 7);
        members.join_ps(1);
        // Neither script returns to its loop.
        for id in [0, 1] {
            members.loaded(members.job.durable().generation.0);
            members.form();
            assert_eq!(members.job.ledger().n_done(), 0, "all steps are trained again");
            let world = members.world();
            members.report(id, MemberReport::Quit { world, step: 0 });
            assert_eq!(members.job.durable().last_step, is_heard.then_some(3));
            assert!(members.is_replaced(id), "the script of another process trains the steps");
            members.join(id, 7);
            assert_eq!(members.job.roster.furthest_step(WorkerId(id)), 3, "it is still known");
            let (instance, how) = (worker(id), Ended::Signal(15));
            members.handle(Event::Platform(Report::Ended { instance, pid: id, how }));
        }
        assert_eq!(members.notes(EventKind::Quit).len(), usize::from(is_heard));
        // The scripts of the new processes decide again.
        [2, 3].into_iter().for_each(|id| members.join(id, 7));
        members.loaded(members.job.durable().generation.0);
        members.form();
        let world = members.world();
        members.report(2, MemberReport::Quit { world, step: 1 });
        assert_eq!(members.job.durable().last_step, Some(1));
    }
}

#[test]
fn a_new_master_still_knows_where_training_ends() {
    let mut members = Members::new(spec());
    let world = members.world();
    members.report(0, MemberReport::Quit { world, step: 3 });
    let config = members.job.config().clone();
    let job = Job::new(config, members.job.durable().clone(), members.now);
    assert_eq!(job.progress(), (0, Some(3 * 8)));
}

#[test]
fn a_script_that_left_its_loop_trains_on_only_if_its_finished_job_is_resumed() {
    let mut members = Members::new(spec());
    let world = members.world();
    members.report(0, MemberReport::Quit { world, step: 3 });
    let (config, durable) = (members.job.config().clone(), members.job.durable().clone());
    let total = |end: Option<End>| {
        let mut durable = Durable { end, ..durable.clone() };
        durable.resume();
        Job::new(config.clone(), durable, members.now).progress().1
    };
    for unfinished in [None, Some(End::Stopped("by a user".into()))] {
        assert_eq!(total(unfinished), Some(3 * 8), "the result is still to be written");
    }
    assert_eq!(total(Some(End::Succeeded)), Some(160), "more is to be trained");
}

/// The last step that the members were allowed to train.
fn until(members: &Members) -> Option<u64> {
    let mut allowed = None;
    for effect in &members.effects {
        if let Effect::ToWorker(_, Command::World(world)) = effect
            && !world.world.members.is_empty()
        {
            allowed = Some(world.until);
        }
        if let Effect::ToWorker(_, Command::Go { until, .. }) = effect {
            allowed = Some(*until);
        }
    }
    allowed
}

#[test]
fn a_step_that_crashes_workers_is_named_although_their_last_reports_are_lost() {
    let mut members = Members::new(spec());
    assert_eq!(until(&members), Some(8), "steps are allowed in advance");
    let crash = |members: &mut Members, id: u32| {
        let how = Ended::Signal(6);
        members.handle(Event::Platform(Report::Ended { instance: worker(id), pid: id, how }));
    };
    // They crash in the sixth step, and only the first one was reported.
    let world = members.world();
    members.report(0, MemberReport::Stepped { world, step: 1, hash: 0, loss: 1.0 });
    crash(&mut members, 0);
    crash(&mut members, 1);
    assert_eq!(members.end(), None);
    for id in 2..5 {
        members.now = members.now + Duration::from_secs(20);
        members.handle(Event::Tick);
        members.handle(Event::Platform(Report::Started { instance: worker(id), pid: id }));
        members.join(id, 7);
        members.now = members.now + Duration::from_secs(2);
        members.handle(Event::Tick);
        let (world, pause_secs, state_bytes) = (members.world(), 0.0, 0);
        members.report(id, MemberReport::Formed { world, step: 0, pause_secs, state_bytes });
        for step in 1..=5 {
            let first = if id == 2 { 1 } else { 5 };
            let most = if step < first { first } else { step };
            let allowed = until(&members).expect("steps are allowed");
            assert!(
                (step..=most).contains(&allowed),
                "no step after one that may crash is allowed"
            );
            members.report(id, MemberReport::Stepped { world, step, hash: 0, loss: 1.0 });
        }
        assert_eq!(members.end(), None, "worker-{id}");
        crash(&mut members, id);
    }
    let Some(End::Failed(why)) = members.end() else { panic!("{:?}", members.end()) };
    assert!(why.starts_with("batch 0/5 (records ") && why.contains("failed 3 times"), "{why}");
    let blamed = members.notes(EventKind::WorkFailed);
    let is_right = |text: &&str| text.starts_with("one of ") || text.starts_with("batch 0/5");
    assert!(blamed.iter().all(is_right), "{blamed:?}");
}

#[test]
fn a_crash_before_the_first_world_names_the_batch_that_workers_are_tested_on() {
    let mut members = Members::new(spec());
    for id in 2..6 {
        let (worker_id, incarnation) = (WorkerId(id), Incarnation(id.into()));
        members.handle(Event::Scale { workers: id + 1 });
        members.handle(Event::Platform(Report::Started { instance: worker(id), pid: id }));
        members.handle(Event::WorkerConnected { worker: worker_id, incarnation, pid: id });
        assert_eq!(members.end(), None);
        let how = Ended::Signal(6);
        members.handle(Event::Platform(Report::Ended { instance: worker(id), pid: id, how }));
        members.now = members.now + Duration::from_secs(20);
    }
    let Some(End::Failed(why)) = members.end() else { panic!("{:?}", members.end()) };
    let expected =
        "worker-5 was killed by signal 6 before it was ready, possibly on batch 0/0 (records ";
    assert!(why.starts_with(expected) && why.contains("crashed 4 times"), "{why}");
}
