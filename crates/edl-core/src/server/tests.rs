// SPDX-License-Identifier: Apache-2.0
//! Orders, requests and checkpoints of one server, event by event.

mod random;

use std::sync::Arc;
use std::time::Duration;

use super::*;
use crate::applied::AppliedSet;
use crate::id::BatchId;
use crate::job::{CheckpointFile, LoadFrom};
use crate::layout::Layout;
use crate::model::ModelSpec;
use crate::optimizer::OptimizerSpec;

const N_PARTITIONS: u32 = 2;
const N_BATCHES: u32 = 6;
const ANN: Client = Client([1; 16]);
const BOB: Client = Client([2; 16]);
const PAIRS: Mode = Mode::Sync { grads_to_wait: 2 };
const PATIENCE: Duration = Duration::from_secs(60);

fn load(generation: u64, mode: Mode) -> Event {
    let model = ModelSpec {
        name: "none".into(),
        params: Vec::new(),
        tables: Vec::new(),
        inputs: Vec::new(),
        metrics: Vec::new(),
        optimizer: OptimizerSpec::sgd(1.0),
    };
    Event::Order(Order::Load(Box::new(Load {
        generation: Generation(generation),
        partitions: 0..N_PARTITIONS,
        layout: Layout::shared(0, N_PARTITIONS),
        optimizer: model.optimizer.clone(),
        model: Arc::new(model),
        seed: 0,
        n_batches: N_BATCHES,
        mode,
        lr_staleness_modulation: false,
        from: LoadFrom { checkpoint: None, keep_applied: true },
    })))
}

fn states() -> Vec<PartitionState> {
    let state = |partition| PartitionState {
        partition: PartitionId(partition),
        applied: AppliedSet::new(N_BATCHES),
        updates: 0,
        n_rows: 0,
    };
    (0..N_PARTITIONS).map(state).collect()
}

fn loaded(generation: u64) -> Event {
    let progress = vec![Progress::default(); N_PARTITIONS as usize];
    Event::Loaded { generation: Generation(generation), progress, states: states() }
}

fn serve(generation: u64) -> Event {
    Event::Order(Order::Serve(Generation(generation)))
}

fn pull(request: u64, client: Client, generation: u64) -> Pull {
    Pull {
        request: Request(request),
        client,
        generation: Generation(generation),
        partitions: 0..N_PARTITIONS,
        min_round: None,
        step: None,
        will_push: true,
        patience: PATIENCE,
    }
}

fn push(request: u64, client: Client, generation: u64, index: u32) -> Push {
    Push {
        request: Request(request),
        client,
        generation: Generation(generation),
        batch: BatchId { epoch: 0, index },
        partitions: 0..N_PARTITIONS,
        base_version: 0,
    }
}

fn checkpoint(number: u64, generation: u64, at: Option<u64>) -> Event {
    let (checkpoint, generation) = (CheckpointId(number), Generation(generation));
    Event::Order(Order::Checkpoint { checkpoint, generation, folder: "folder".into(), at })
}

fn copied(number: u64, partition: u32, updates: u64) -> Event {
    Event::Copied { checkpoint: CheckpointId(number), partition: PartitionId(partition), updates }
}

fn written(number: u64, partition: u32) -> Event {
    let (name, checksum) = (String::new(), String::new());
    let file = CheckpointFile { partition, name, bytes: 0, checksum, updates: 0 };
    Event::Written { checkpoint: CheckpointId(number), file }
}

/// One owner's outcome for one partition.
fn part(partition: u32, outcome: Outcome, version: u64, round: u64) -> Vec<Part> {
    let progress = Progress { version, round, n_rows: 0 };
    vec![Part { partition: PartitionId(partition), outcome, progress }]
}

/// A server and its clock.
struct Bench {
    server: Server,
    now: Time,
}

impl Bench {
    fn empty() -> Self {
        Self { server: Server::new(), now: Time::ZERO }
    }

    /// A server that serves generation 1.
    fn serving(mode: Mode) -> Self {
        let mut bench = Self::empty();
        assert!(matches!(bench.on(load(1, mode))[..], [Effect::Load(_)]));
        assert!(matches!(bench.on(loaded(1))[..], [Effect::Report(Report::Loaded { .. })]));
        assert_eq!(bench.on(serve(1)), [Effect::Note(Note::Serving(Generation(1)))]);
        bench
    }

    fn on(&mut self, event: Event) -> Vec<Effect> {
        let effects = self.server.handle(event, self.now);
        self.server.check_invariants();
        effects
    }

    fn pull(&mut self, pull: Pull) -> Vec<Effect> {
        self.on(Event::Pull(pull))
    }

    fn push(&mut self, push: Push) {
        let request = push.request;
        assert_eq!(self.on(Event::Push(push)), [Effect::Apply(request)]);
    }

    fn pushed(&mut self, request: u64, generation: u64, parts: Vec<Part>) -> Vec<Effect> {
        let (generation, request) = (Generation(generation), Request(request));
        self.on(Event::Pushed { generation, request, parts })
    }

    /// Waits for the next deadline.
    fn tick(&mut self) -> Vec<Effect> {
        let next = self.server.next_deadline().expect("something waits");
        assert!(next > self.now);
        self.now = next;
        self.on(Event::Tick)
    }
}

fn refused(request: u64, refusal: Refusal) -> Effect {
    Effect::Refuse(Request(request), refusal)
}

fn failed(number: u64, error: &Error) -> Effect {
    let (checkpoint, error) = (CheckpointId(number), error.to_string());
    Effect::Report(Report::CheckpointFailed { checkpoint, error })
}

fn started(checkpoint: u64) -> Effect {
    let checkpoint = CheckpointId(checkpoint);
    Effect::Report(Report::CheckpointStarted { checkpoint })
}

fn load_failed(generation: u64, error: &Error) -> Effect {
    let (generation, error) = (Generation(generation), error.to_string());
    Effect::Report(Report::LoadFailed { generation, error })
}

#[test]
fn a_push_is_acknowledged_when_the_last_partition_has_it() {
    let mut bench = Bench::serving(Mode::Async);
    bench.push(push(1, ANN, 1, 0));
    assert_eq!(bench.pushed(1, 1, part(1, Outcome::Applied, 1, 0)), []);
    let acknowledged = [Effect::Acknowledge(Request(1))];
    assert_eq!(bench.pushed(1, 1, part(0, Outcome::Already, 1, 0)), acknowledged);
    assert_eq!(bench.server.held().map_or(0, Held::version), 1);
}

#[test]
fn a_staged_push_is_acknowledged_when_its_round_is_applied_everywhere() {
    let mut bench = Bench::serving(PAIRS);
    bench.push(push(1, ANN, 1, 0));
    bench.push(push(2, BOB, 1, 1));
    let round =
        || Outcome::Round(vec![BatchId { epoch: 0, index: 0 }, BatchId { epoch: 0, index: 1 }]);
    for partition in 0..2 {
        assert_eq!(bench.pushed(1, 1, part(partition, Outcome::Staged, 0, 0)), []);
    }
    assert_eq!(bench.pushed(2, 1, part(0, round(), 1, 1)), []);
    let both = [Effect::Acknowledge(Request(1)), Effect::Acknowledge(Request(2))];
    assert_eq!(bench.pushed(2, 1, part(1, round(), 1, 1)), both);
}

#[test]
fn a_lane_is_acknowledged_when_it_is_kept_and_an_empty_one_when_its_step_is_applied() {
    let mut bench = Bench::serving(Mode::Steps { lanes: 2 });
    let both = |outcome: Outcome| [part(0, outcome.clone(), 0, 0), part(1, outcome, 0, 0)].concat();
    bench.push(push(1, ANN, 1, 0));
    assert_eq!(bench.pushed(1, 1, both(Outcome::Staged)), []);
    bench.push(push(2, BOB, 1, 0));
    assert_eq!(bench.pushed(2, 1, both(Outcome::Kept)), [Effect::Acknowledge(Request(2))]);
    bench.push(push(3, BOB, 1, 0));
    let step = Outcome::Round(vec![BatchId { epoch: 0, index: 0 }]);
    let acknowledged = [1, 3].map(|request| Effect::Acknowledge(Request(request)));
    assert_eq!(bench.pushed(3, 1, both(step)), acknowledged);
}

#[test]
fn a_push_that_one_partition_refuses_is_refused() {
    let mut bench = Bench::serving(Mode::Async);
    bench.push(push(1, ANN, 1, 0));
    let refusal = refused(1, Refusal::Other("no".into()));
    assert_eq!(bench.pushed(1, 1, part(0, Outcome::Refused("no".into()), 0, 0)), [refusal]);
    assert_eq!(bench.pushed(1, 1, part(1, Outcome::Applied, 1, 0)), []);
    bench.push(push(2, ANN, 1, 1));
    let unfit = Event::Unfit { request: Request(2), error: "other model".into() };
    assert_eq!(bench.on(unfit), [refused(2, Refusal::Other("other model".into()))]);
}

#[test]
fn other_partitions_than_those_held_are_refused() {
    let mut bench = Bench::serving(Mode::Async);
    let text = "requested partitions 0..1; this server holds 0..2";
    let refusal = |request| [refused(request, Refusal::Other(text.into()))];
    assert_eq!(bench.pull(Pull { partitions: 0..1, ..pull(1, ANN, 1) }), refusal(1));
    let push = Push { partitions: 0..1, ..push(2, ANN, 1, 0) };
    assert_eq!(bench.on(Event::Push(push)), refusal(2));
}

#[test]
fn a_new_generation_ends_everything_of_the_old_one() {
    let mut bench = Bench::serving(PAIRS);
    bench.push(push(1, ANN, 1, 0));
    assert_eq!(bench.pull(Pull { min_round: Some(1), ..pull(2, BOB, 1) }), []);
    assert_eq!(bench.pull(pull(3, BOB, 2)), [], "the next generation is not loaded yet");
    assert!(matches!(bench.on(checkpoint(7, 1, None))[..], [Effect::Copy { .. }]));
    let effects = bench.on(load(2, PAIRS));
    let current = Generation(2);
    let [first, second, third, Effect::Load(_), fifth] = &effects[..] else {
        panic!("{effects:?}")
    };
    assert_eq!(*first, refused(1, Refusal::NotServing));
    assert_eq!(*second, failed(7, &Error::Overtaken));
    assert_eq!(*third, Effect::Drop(Generation(1)));
    assert_eq!(*fifth, refused(2, Refusal::Generation { current }));
    // What the owners were still doing changes nothing.
    assert_eq!(bench.pushed(1, 1, part(0, Outcome::Applied, 9, 9)), []);
    assert_eq!(bench.on(copied(7, 0, 0)), []);
    bench.on(loaded(2));
    assert_eq!(bench.pushed(1, 1, part(0, Outcome::Applied, 9, 9)), []);
    assert_eq!(bench.server.held().map_or(0, Held::version), 0);
    let effects = bench.on(serve(2));
    assert_eq!(effects, [Effect::Note(Note::Serving(current)), Effect::Answer(Request(3))]);
}

#[test]
fn an_older_generation_is_neither_loaded_nor_served() {
    let mut bench = Bench::serving(Mode::Async);
    bench.on(load(3, Mode::Async));
    let (asked, ours) = (Generation(2), Generation(3));
    let older = || load_failed(2, &Error::Older { asked, ours });
    assert_eq!(bench.on(load(2, Mode::Async)), [older()]);
    bench.on(loaded(3));
    assert_eq!(bench.on(load(2, Mode::Async)), [older()]);
    assert_eq!(bench.on(serve(2)), [Effect::Note(Note::CannotServe(asked))]);
    assert!(matches!(&bench.server.phase, ServerPhase::Held(held) if !held.is_served));
    assert_eq!(bench.pull(pull(1, ANN, 2)), [refused(1, Refusal::Generation { current: ours })]);
}

#[test]
fn a_load_of_the_generation_held_changes_nothing() {
    let mut bench = Bench::serving(Mode::Async);
    bench.push(push(1, ANN, 1, 0));
    let inspect = Effect::Inspect(Inspection::Load, Generation(1));
    assert_eq!(bench.on(load(1, Mode::Async)), [inspect]);
    let (inspection, generation) = (Inspection::Load, Generation(1));
    let inspected = Event::Inspected { inspection, generation, states: states() };
    let loaded = Report::Loaded { generation, states: states() };
    assert_eq!(bench.on(inspected), [Effect::Report(loaded)]);
    let parts = [part(0, Outcome::Applied, 1, 0), part(1, Outcome::Applied, 1, 0)].concat();
    assert_eq!(bench.pushed(1, 1, parts), [Effect::Acknowledge(Request(1))]);
}

#[test]
fn one_load_at_a_time_and_the_last_order_counts() {
    let mut bench = Bench::empty();
    bench.on(load(1, Mode::Async));
    assert_eq!(bench.on(load(1, Mode::Async)), [], "it is under way");
    assert_eq!(bench.on(load(2, Mode::Async)), []);
    assert_eq!(bench.on(load(3, Mode::Async)), [load_failed(2, &Error::Superseded)]);
    let effects = bench.on(loaded(1));
    let [drop, superseded, Effect::Load(next)] = &effects[..] else { panic!("{effects:?}") };
    assert_eq!(*drop, Effect::Drop(Generation(1)));
    assert_eq!(*superseded, load_failed(1, &Error::Superseded));
    assert_eq!(next.generation, Generation(3));
    assert_eq!(bench.on(loaded(1)), [Effect::Drop(Generation(1))], "not what was ordered");
    let (generation, error) = (Generation(3), "unreadable".to_owned());
    let event = Event::LoadFailed { generation, error: error.clone() };
    assert_eq!(bench.on(event), [Effect::Report(Report::LoadFailed { generation, error })]);
    assert_eq!(bench.server.phase, ServerPhase::Failed(generation));
    assert!(matches!(bench.on(load(3, Mode::Async))[..], [Effect::Load(_)]), "a second try");
}

#[test]
fn a_request_for_a_generation_that_does_not_come_is_refused_in_time() {
    let mut bench = Bench::empty();
    assert_eq!(bench.pull(pull(1, ANN, 1)), []);
    assert_eq!(bench.on(Event::Push(push(2, ANN, 1, 0))), []);
    let hasty = Pull { patience: Duration::from_millis(10), ..pull(3, BOB, 1) };
    assert_eq!(bench.pull(hasty), []);
    assert_eq!(bench.tick(), [refused(3, Refusal::NotServing)]);
    assert_eq!(bench.tick(), [refused(1, Refusal::NotServing), refused(2, Refusal::NotServing)]);
    assert_eq!(bench.server.next_deadline(), None);
    assert!(bench.now.since(Time::ZERO) < PATIENCE, "no server takes that long to load");
}

#[test]
fn a_pull_waits_for_its_round_and_not_forever() {
    let mut bench = Bench::serving(PAIRS);
    let early = |request| Pull { min_round: Some(1), ..pull(request, ANN, 1) };
    assert_eq!(bench.pull(early(1)), []);
    bench.push(push(2, BOB, 1, 0));
    assert_eq!(bench.pushed(2, 1, part(0, Outcome::Staged, 1, 1)), []);
    let waited = Refusal::Waited("1 rounds: partition 1 has applied 0".into());
    assert_eq!(bench.tick(), [refused(1, waited)]);
    assert_eq!(bench.pull(early(3)), []);
    assert_eq!(bench.pushed(2, 1, part(1, Outcome::Staged, 1, 1)), [Effect::Answer(Request(3))]);
}

#[test]
fn rows_of_a_step_are_refused_unless_every_partition_has_them() {
    let mut bench = Bench::serving(Mode::Steps { lanes: 1 });
    bench.push(push(1, ANN, 1, 0));
    bench.pushed(1, 1, part(0, Outcome::Applied, 1, 0));
    let at = |request, step| Pull { step: Some(step), ..pull(request, ANN, 1) };
    assert_eq!(bench.pull(at(2, 0)), [Effect::Answer(Request(2))]);
    let mismatch =
        |at| Refusal::StepMismatch(format!("requested step 1; this server is at step {at}"));
    assert_eq!(bench.pull(at(3, 1)), [refused(3, mismatch(0))]);
    let effects = bench.pushed(1, 1, part(1, Outcome::Applied, 1, 0));
    assert_eq!(effects, [Effect::Acknowledge(Request(1))]);
    assert_eq!(bench.pull(at(4, 1)), [Effect::Answer(Request(4))]);
    bench.push(push(5, ANN, 1, 0));
    bench.pushed(5, 1, [part(0, Outcome::Applied, 3, 0), part(1, Outcome::Applied, 3, 0)].concat());
    assert_eq!(bench.pull(at(6, 1)), [refused(6, mismatch(3))]);
}

#[test]
fn bounded_the_fast_wait_for_the_slow_until_it_pushes_or_leaves_or_is_overdue() {
    let wait = || {
        let mut bench = Bench::serving(Mode::Bounded { versions: 1 });
        assert_eq!(bench.pull(pull(1, ANN, 1)), [Effect::Answer(Request(1))]);
        bench.push(push(2, BOB, 1, 0));
        let parts = [part(0, Outcome::Applied, 1, 0), part(1, Outcome::Applied, 1, 0)].concat();
        bench.pushed(2, 1, parts);
        assert_eq!(bench.pull(pull(3, BOB, 1)), []);
        bench
    };
    let answer = || Effect::Answer(Request(3));
    let mut bench = wait();
    let effects = bench.on(Event::Push(push(4, ANN, 1, 1)));
    assert_eq!(effects, [Effect::Apply(Request(4))], "the fast one sees the push");
    assert_eq!(bench.pushed(4, 1, part(0, Outcome::Applied, 2, 0)), []);
    let effects = bench.pushed(4, 1, part(1, Outcome::Applied, 2, 0));
    assert_eq!(effects, [Effect::Acknowledge(Request(4)), answer()]);
    assert_eq!(wait().on(Event::Left(ANN)), [answer()]);
    assert_eq!(wait().on(Event::Left(BOB)), [refused(3, Refusal::NotServing)]);
    let mut bench = wait();
    assert_eq!(bench.tick(), [answer()], "its open pull is overdue");
    assert!(bench.now.since(Time::ZERO) < PATIENCE);

    let mut bench = wait();
    let hasty = Pull { patience: Duration::ZERO, ..pull(4, BOB, 1) };
    let note = Effect::Note(Note::GaveUpWaiting { version: 0 });
    assert_eq!(bench.pull(hasty), [note, Effect::Answer(Request(4))]);
}

#[test]
fn bounded_two_that_would_wait_for_each_other_do_not() {
    let mut bench = Bench::serving(Mode::Bounded { versions: 1 });
    bench.pull(pull(1, ANN, 1));
    bench.pull(pull(2, BOB, 1));
    bench.push(push(3, Client([3; 16]), 1, 0));
    let parts = [part(0, Outcome::Applied, 1, 0), part(1, Outcome::Applied, 1, 0)].concat();
    bench.pushed(3, 1, parts);
    assert_eq!(bench.pull(pull(4, ANN, 1)), []);
    assert_eq!(bench.pull(pull(5, BOB, 1)), [Effect::Answer(Request(5))], "Ann waits herself");
}

#[test]
fn a_checkpoint_is_done_when_every_partition_is_written() {
    let mut bench = Bench::serving(Mode::Async);
    assert_eq!(bench.on(checkpoint(1, 2, None)).len(), 1, "not held");
    let copy = Effect::Copy { checkpoint: CheckpointId(2), at: None };
    assert_eq!(bench.on(checkpoint(2, 1, None)), [copy]);
    assert_eq!(bench.on(checkpoint(3, 1, None)), [failed(3, &Error::CheckpointRunning)]);
    for partition in 0..2 {
        assert!(matches!(bench.on(copied(2, partition, 5))[..], [Effect::Write { .. }]));
    }
    assert_eq!(bench.on(copied(2, 0, 5)), [], "once is enough");
    assert_eq!(bench.on(written(2, 1)), []);
    assert!(bench.server.is_writing(CheckpointId(2)));
    let effects = bench.on(written(2, 0));
    let [Effect::Report(Report::CheckpointDone { files, .. })] = &effects[..] else {
        panic!("{effects:?}")
    };
    assert!(files.iter().map(|file| file.partition).eq(0..2));
}

#[test]
fn a_checkpoint_that_cannot_be_written_is_given_up() {
    let mut bench = Bench::serving(Mode::Async);
    bench.on(checkpoint(1, 1, None));
    bench.on(copied(1, 0, 5));
    let full = Event::WriteFailed { checkpoint: CheckpointId(1), error: "disk full".into() };
    assert_eq!(bench.on(full.clone()), [failed(1, &Error::Model("disk full".into()))]);
    assert_eq!(bench.on(full), []);
    assert_eq!(bench.on(copied(1, 1, 5)), []);
    assert!(matches!(bench.on(checkpoint(2, 1, None))[..], [Effect::Copy { .. }]));
}

#[test]
fn a_checkpoint_of_a_step_gives_way_to_the_next_order_or_fails_when_the_step_has_passed() {
    let mut bench = Bench::serving(Mode::Steps { lanes: 1 });
    bench.on(checkpoint(1, 1, Some(4)));
    assert!(matches!(bench.on(copied(1, 0, 4))[..], [Effect::Write { .. }]));
    let effects = bench.on(checkpoint(2, 1, Some(5)));
    let copy = Effect::Copy { checkpoint: CheckpointId(2), at: Some(5) };
    assert_eq!(effects, [failed(1, &Error::Overtaken), copy, started(2)]);
    let past = Error::Past { at: 5, partition: PartitionId(1), step: 6 };
    assert_eq!(bench.on(copied(2, 1, 6)), [failed(2, &past)]);
    bench.on(checkpoint(3, 1, Some(6)));
    bench.on(copied(3, 0, 6));
    bench.on(copied(3, 1, 6));
    let copy = Effect::Copy { checkpoint: CheckpointId(4), at: Some(7) };
    let effects = bench.on(checkpoint(4, 1, Some(7)));
    assert_eq!(effects, [copy, started(4)], "the last copies are being written");
    bench.on(written(3, 0));
    let done = bench.on(written(3, 1));
    assert!(matches!(done[..], [Effect::Report(Report::CheckpointDone { .. })]));
}

#[test]
fn a_hello_names_what_is_held_when_it_is_sent() {
    let mut bench = Bench::serving(Mode::Async);
    let (inspection, generation) = (Inspection::Hello(1), Generation(1));
    assert_eq!(bench.on(Event::Inspect(inspection)), [Effect::Inspect(inspection, generation)]);
    let inspected = Event::Inspected { inspection, generation, states: states() };
    let hello = |generation, states| Effect::Hello { hello: 1, generation, states };
    assert_eq!(bench.on(inspected.clone()), [hello(generation, states())]);
    bench.on(load(2, Mode::Async));
    let nothing = || hello(Generation(0), Vec::new());
    assert_eq!(bench.on(inspected), [nothing()], "ended in the meantime");
    assert_eq!(bench.on(Event::Inspect(inspection)), [nothing()], "not loaded yet");
}

#[test]
fn a_stopped_server_answers_everything_and_holds_nothing() {
    let mut bench = Bench::serving(PAIRS);
    bench.push(push(1, ANN, 1, 0));
    bench.pull(Pull { min_round: Some(1), ..pull(2, BOB, 1) });
    let effects = bench.on(Event::Order(Order::Stop("done".into())));
    let refusal = |request| refused(request, Refusal::NotServing);
    assert_eq!(effects, [refusal(1), Effect::Drop(Generation(1)), refusal(2)]);
    assert_eq!(bench.pull(pull(3, ANN, 1)), [refusal(3)]);
    assert_eq!(bench.on(load(2, PAIRS)), [load_failed(2, &Error::Stopped)]);
    assert_eq!(bench.on(loaded(1)), [Effect::Drop(Generation(1))]);
    assert_eq!(bench.on(Event::Order(Order::Stop("done".into()))), []);
}
