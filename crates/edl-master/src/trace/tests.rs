// SPDX-License-Identifier: Apache-2.0
//! Effects in, spans out.

use std::collections::BTreeMap;
use std::sync::Arc;

use edl_core::evaluation::Evaluated;
use edl_core::id::{CheckpointId, Generation, Incarnation, PsId, WorkerId};
use edl_core::layout::Layout;
use edl_core::model::ModelSpec;
use edl_core::optimizer::OptimizerSpec;
use edl_core::platform::{InstanceState, Role};
use edl_core::server::Load;
use edl_core::spec::Mode;
use edl_core::world::{Announced, Member};
use edl_net::otlp::any_value::Value;
use edl_net::otlp::status::StatusCode;
use edl_net::proto;

use super::open_span::MAX_EVENTS;
use super::*;

const RUN: RunId = RunId([7; 16]);

fn recorder(term: u64, trains_in_steps: bool) -> Recorder {
    Recorder::new(RUN, Term(term), trains_in_steps, 1)
}

fn note(kind: EventKind, text: &str) -> Effect {
    Effect::Note(Note { kind, text: text.into() })
}

fn world(number: u64, workers: &[u32], load: Option<&str>) -> Effect {
    let member = |worker: &u32| Member {
        worker: WorkerId(*worker),
        incarnation: Incarnation(1),
        lanes: *worker..*worker + 1,
        has_state: false,
    };
    let world =
        World { id: WorldId(number), members: workers.iter().map(member).collect(), after: None };
    let load = load.map(|folder| LoadFrom { checkpoint: Some(folder.into()), keep_applied: true });
    let announced =
        Announced { world, until: 9, generation: Generation(1), load, skipped: Default::default() };
    let command = Command::World(Arc::new(announced));
    Effect::ToWorker(WorkerId(0), command)
}

fn named<'a>(spans: &'a [Span], name: &str) -> Vec<&'a Span> {
    spans.iter().filter(|span| span.name == name).collect()
}

fn attribute(span: &Span, key: &str) -> Option<Value> {
    let found = span.attributes.iter().find(|attribute| attribute.key == key)?;
    found.value.clone()?.value
}

fn times(span: &Span) -> (u64, u64) {
    (span.start_time_unix_nano, span.end_time_unix_nano)
}

#[test]
fn a_world_heals_and_its_spans_are_children_of_the_job() {
    let mut recorder = recorder(1, true);
    let effects = [
        (10, world(1, &[0, 1], None)),
        (10, world(1, &[0, 1], None)),
        (20, note(EventKind::World, "worker-0, worker-1 continue")),
        (30, note(EventKind::WorkerKilled, "worker-1 was killed")),
        (31, note(EventKind::PeerLost, "worker-0 lost worker-1")),
        (32, world(2, &[0], Some("version-4"))),
        (40, note(EventKind::World, "worker-0 continues")),
        (90, Effect::Ended(End::Succeeded)),
    ];
    for (now, effect) in &effects {
        recorder.effect(effect, *now);
    }
    let spans = recorder.take();
    let names: Vec<&str> = spans.iter().map(|span| &*span.name).collect();
    assert_eq!(names, ["world", "restore", "heal", "world", "job"]);
    let job = named(&spans, "job")[0];
    assert_eq!((times(job), job.parent_span_id.is_empty()), ((1, 90), true));
    assert!(spans.iter().all(|span| span.trace_id == RUN.0 && span.span_id.len() == 8));
    let (worlds, heal) = (named(&spans, "world"), named(&spans, "heal")[0]);
    assert_eq!(worlds.iter().map(|span| times(span)).collect::<Vec<_>>(), [(10, 32), (32, 90)]);
    let members = attribute(worlds[0], "elasticdl.members");
    assert_eq!(members, Some(Value::StringValue("worker-0 worker-1".into())));
    assert_eq!((times(heal), heal.events.len()), ((30, 40), 2));
    assert_eq!(named(&spans, "restore")[0].parent_span_id, heal.span_id);
    assert!([worlds[0], worlds[1], heal].iter().all(|span| span.parent_span_id == job.span_id));
    assert!(recorder.take().is_empty());
}

fn load(from: LoadFrom) -> Order {
    let optimizer = OptimizerSpec::sgd(1.0);
    let model = ModelSpec {
        name: "none".into(),
        params: Vec::new(),
        tables: Vec::new(),
        inputs: Vec::new(),
        metrics: Vec::new(),
        optimizer: optimizer.clone(),
    };
    Order::Load(Box::new(Load {
        generation: Generation(2),
        partitions: 0..1,
        layout: Layout::shared(0, 2),
        model: Arc::new(model),
        optimizer,
        seed: 0,
        n_batches: 1,
        mode: Mode::Async,
        lr_staleness_modulation: false,
        from,
    }))
}

#[test]
fn servers_and_workers_heal_by_what_was_lost() {
    let mut recorder = recorder(1, false);
    recorder.effect(&note(EventKind::WorkerCrashed, "worker-0 exited"), 10);
    recorder.effect(&note(EventKind::WorkerJoined, "worker-0 joined"), 20);
    recorder.effect(&note(EventKind::PsLost, "ps-0 was killed"), 30);
    recorder.effect(&note(EventKind::WorkerJoined, "worker-2 joined"), 35);
    let from = LoadFrom { checkpoint: Some("version-2".into()), keep_applied: true };
    for ps in 0..2 {
        recorder.effect(&Effect::ToPs(PsId(ps), load(from.clone())), 40);
    }
    for ps in 0..2 {
        let serve = Order::Serve(Generation(2));
        recorder.effect(&Effect::ToPs(PsId(ps), serve), 50);
    }
    let spans = recorder.take();
    let heals: Vec<_> = named(&spans, "heal").into_iter().map(times).collect();
    assert_eq!(heals, [(10, 20), (30, 50)]);
    let restores: Vec<_> = named(&spans, "restore").into_iter().map(times).collect();
    assert_eq!(restores, [(40, 50)]);
}

#[test]
fn spans_of_checkpoints_and_evaluations_have_their_results() {
    let mut recorder = recorder(1, false);
    let prepare = |number| Effect::PrepareCheckpoint {
        checkpoint: CheckpointId(number),
        folder: format!("version-{number}"),
    };
    recorder.effect(&prepare(1), 10);
    let commit = Effect::Commit {
        checkpoint: CheckpointId(1),
        folder: "version-1".into(),
        version: 64,
        exact: None,
        generation: Generation(1),
        files: Vec::new(),
    };
    recorder.effect(&commit, 15);
    recorder.effect(&note(EventKind::Checkpoint, "checkpoint 7 saved"), 20);
    recorder.effect(&prepare(2), 30);
    recorder.effect(&note(EventKind::CheckpointFailed, "the disk is full"), 40);
    recorder.effect(&Effect::EvaluationStarted { version: 64 }, 50);
    let metrics = BTreeMap::from([("accuracy".to_owned(), 0.5)]);
    let evaluated = Evaluated { version: 64, epoch: 1, metrics, is_best: true };
    recorder.effect(&Effect::Evaluated(evaluated), 60);
    // Spans that are open at the end are sent, too.
    recorder.effect(&Effect::EvaluationStarted { version: 70 }, 70);
    recorder.effect(&Effect::Ended(End::Failed("no".into())), 80);
    let spans = recorder.take();
    let (checkpoints, evaluations) = (named(&spans, "checkpoint"), named(&spans, "evaluation"));
    assert_eq!(attribute(checkpoints[0], "elasticdl.step"), Some(Value::IntValue(64)));
    let codes = |span: &&Span| span.status.clone().unwrap_or_default().code();
    assert_eq!(
        checkpoints.iter().map(codes).collect::<Vec<_>>(),
        [StatusCode::Ok, StatusCode::Error]
    );
    let accuracy = attribute(evaluations[0], "elasticdl.metric.accuracy");
    assert_eq!(accuracy, Some(Value::DoubleValue(0.5)));
    let ends: Vec<_> = evaluations.iter().map(codes).collect();
    assert_eq!(ends, [StatusCode::Ok, StatusCode::Error]);
    assert_eq!(named(&spans, "job").iter().map(codes).collect::<Vec<_>>(), [StatusCode::Error]);
}

#[test]
fn steps_are_recorded_together_and_processes_when_they_are_gone() {
    let mut recorder = recorder(1, false);
    let mut history = History::new();
    let instance = proto::Instance {
        role: Role::Worker.into(),
        pid: 42,
        state: InstanceState::Working.into(),
        ..proto::Instance::default()
    };
    let second = 1_000_000_000;
    for half in 0..30_u64 {
        let instances = if half < 20 { vec![instance.clone()] } else { Vec::new() };
        let state = JobState::Running.into();
        let status = JobStatus { step: half * 100, state, instances, ..JobStatus::default() };
        let at = half as f64 / 2.0;
        history.sample(&status, at);
        recorder.poll(&status, &history, half * second / 2);
    }
    recorder.effect(&Effect::Ended(End::Succeeded), 15 * second);
    let spans = recorder.take();
    // Three of five seconds each: thousands of steps, except for the moments between two of them.
    let steps = named(&spans, "steps");
    assert_eq!(steps.len(), 3, "{steps:#?}");
    assert_eq!(attribute(steps[0], "elasticdl.steps"), Some(Value::IntValue(1000)));
    let process = named(&spans, "process")[0];
    let name = attribute(process, "elasticdl.instance");
    assert_eq!(name, Some(Value::StringValue("worker-0".into())));
    assert_eq!(times(process), (0, 10 * second));
}

#[test]
fn masters_of_a_run_share_the_job_and_no_other_id() {
    let ids = |term: u64| -> BTreeSet<Vec<u8>> {
        let mut recorder = recorder(term, true);
        for number in 0..100 {
            recorder.effect(&world(number, &[0], None), number);
        }
        recorder.effect(&Effect::Ended(End::Stopped("by hand".into())), 200);
        recorder.take().into_iter().map(|span| span.span_id).collect()
    };
    let (first, second) = (ids(1), ids(2));
    assert_eq!((first.len(), second.len()), (101, 101));
    assert_eq!(first.intersection(&second).count(), 1, "that of the job");
}

#[test]
fn the_events_of_a_span_are_bounded() {
    let mut recorder = recorder(1, true);
    for number in 0..100 {
        recorder.effect(&note(EventKind::PeerLost, "again"), number);
    }
    recorder.effect(&note(EventKind::World, "on"), 100);
    let heal = &recorder.take()[0];
    assert_eq!(heal.events.len() + heal.dropped_events_count as usize, 100);
    assert_eq!(heal.events.len(), MAX_EVENTS);
}
