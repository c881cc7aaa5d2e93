// SPDX-License-Identifier: Apache-2.0
//! What a job does, as spans of one trace: a pure function of effects and times.
//!
//! The trace is the job's run, so all masters of a run add to one trace. The span of the job is the
//! root, and every master derives its id from the run. Steps are too many for a span each: one span
//! covers all steps of some seconds.

use std::collections::BTreeSet;

use edl_core::id::{RunId, Term, WorldId};
use edl_core::job::{Command, Effect, End, EventKind, JobState, LoadFrom, Note};
use edl_core::rng::mix;
use edl_core::server::Order;
use edl_core::world::World;
use edl_net::otlp::{KeyValue, Span};
use edl_net::proto::JobStatus;

use self::open_span::OpenSpan;
use crate::history::{History, ProcessRecord};

mod open_span;

/// One span of steps covers at least this much, so the number of spans does not grow with speed.
const STEPS_NANOS: Nanos = 5_000_000_000;

/// Unix time in nanoseconds.
type Nanos = u64;

/// Records the spans of one master, and holds those that have not ended.
#[derive(Debug)]
pub(crate) struct Recorder {
    run: RunId,
    term: Term,
    /// Numbers of spans of this master.
    next: u64,
    trains_in_steps: bool,
    job: OpenSpan,
    world: Option<(WorldId, OpenSpan)>,
    checkpoint: Option<OpenSpan>,
    evaluation: Option<OpenSpan>,
    heal: Option<(Healed, OpenSpan)>,
    restore: Option<OpenSpan>,
    steps: Option<(u64, OpenSpan)>,
    /// Processes that were there at the last poll, by name and number.
    alive: BTreeSet<(String, u32)>,
    done: Vec<Span>,
}

/// What ends a heal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Healed {
    /// The next world trains.
    World,
    /// Servers that serve again.
    Servers,
    /// A worker in place of the one that was lost.
    Worker,
}

impl Recorder {
    /// `began` is when the job was first seen to run, if another master was there before.
    pub(crate) fn new(run: RunId, term: Term, trains_in_steps: bool, began: Nanos) -> Self {
        // Its id is the same for every master of the run.
        let job = OpenSpan::new("job", span_id(run, 0, 0), Vec::new(), began);
        Self {
            run,
            term,
            next: 0,
            trains_in_steps,
            job,
            world: None,
            checkpoint: None,
            evaluation: None,
            heal: None,
            restore: None,
            steps: None,
            alive: BTreeSet::new(),
            done: Vec::new(),
        }
    }

    /// Spans that have ended since it was last asked.
    pub(crate) fn take(&mut self) -> Vec<Span> {
        std::mem::take(&mut self.done)
    }

    /// Records an effect of the job.
    pub(crate) fn effect(&mut self, effect: &Effect, now: Nanos) {
        match effect {
            Effect::Note(note) => self.note(note, now),
            Effect::ToWorker(_, Command::World(announced)) => {
                self.world(&announced.world, announced.load.as_ref(), now);
            }
            Effect::ToPs(_, Order::Load(load)) => self.load(&load.from, now),
            Effect::ToPs(_, Order::Serve(_)) => {
                self.restored(now, None);
                self.healed(Healed::Servers, now);
            }
            Effect::PrepareCheckpoint { folder, .. } => {
                self.end_checkpoint(now, Some("abandoned".into()));
                let open =
                    self.open("checkpoint", now, [KeyValue::text("elasticdl.folder", folder)]);
                self.checkpoint = Some(open);
            }
            Effect::Commit { version, generation, .. } => {
                if let Some(open) = &mut self.checkpoint {
                    open.add([
                        KeyValue::number("elasticdl.step", *version),
                        KeyValue::number("elasticdl.generation", generation.0),
                    ]);
                }
            }
            Effect::EvaluationStarted { version } => {
                self.end_evaluation(now, Some("restarted".into()));
                let open =
                    self.open("evaluation", now, [KeyValue::number("elasticdl.step", *version)]);
                self.evaluation = Some(open);
            }
            Effect::Evaluated(evaluated) => {
                if let Some(open) = &mut self.evaluation {
                    let metrics = evaluated.metrics.iter();
                    open.add(metrics.map(|(name, value)| {
                        KeyValue::real(&format!("elasticdl.metric.{name}"), *value)
                    }));
                }
                self.end_evaluation(now, None);
            }
            Effect::Ended(end) => self.ended(end, now),
            Effect::Persist(_)
            | Effect::ToWorker(..)
            | Effect::ToPs(..)
            | Effect::CloseWorker(..)
            | Effect::RefuseWorker(..)
            | Effect::ClosePs(_)
            | Effect::Platform(_)
            | Effect::Delete(_)
            | Effect::Export { .. }
            | Effect::JoinPredictions { .. }
            | Effect::Reply(_) => {}
        }
    }

    fn note(&mut self, note: &Note, now: Nanos) {
        let Note { kind, text } = note;
        #[expect(clippy::wildcard_enum_match_arm, reason = "few kinds begin or end a span")]
        match *kind {
            EventKind::Checkpoint => self.end_checkpoint(now, None),
            EventKind::CheckpointFailed => self.end_checkpoint(now, Some(text.clone())),
            EventKind::WorkerKilled
            | EventKind::WorkerCrashed
            | EventKind::WorkerSilent
            | EventKind::PeerLost
            | EventKind::PsLost
            | EventKind::WorkersLost
            | EventKind::StepMismatch => self.lost(*kind, text, now),
            EventKind::WorkerJoined => self.healed(Healed::Worker, now),
            EventKind::World => {
                if let Some((_, open)) = &mut self.world {
                    open.note(*kind, text, now);
                }
                self.restored(now, None);
                self.healed(Healed::World, now);
            }
            EventKind::Chaos
            | EventKind::Scaled
            | EventKind::Resumed
            | EventKind::Restored
            | EventKind::CheckpointBad
            | EventKind::EarlyStop => self.job.note(*kind, text, now),
            _ => {}
        }
    }

    fn lost(&mut self, kind: EventKind, text: &str, now: Nanos) {
        let healed = match kind == EventKind::PsLost {
            _ if self.trains_in_steps => Healed::World,
            true => Healed::Servers,
            false => Healed::Worker,
        };
        // A server that is lost while a worker is missing is the greater loss.
        let (by, mut open) = match self.heal.take() {
            Some((Healed::Worker, open)) => (healed, open),
            Some(healing) => healing,
            None => {
                (healed, self.open("heal", now, [KeyValue::text("elasticdl.cause", kind.name())]))
            }
        };
        open.note(kind, text, now);
        self.heal = Some((by, open));
    }

    fn healed(&mut self, by: Healed, now: Nanos) {
        let healed = self.heal.take_if(|(wanted, _)| *wanted == by);
        self.close(healed.map(|(_, open)| open), now, None);
    }

    /// Members are informed one by one. A world without members ends the one before.
    fn world(&mut self, world: &World, load: Option<&LoadFrom>, now: Nanos) {
        if self.world.as_ref().is_some_and(|(id, _)| *id == world.id) {
            return;
        }
        self.end_steps(now);
        self.end_world(now);
        if world.members.is_empty() {
            return;
        }
        let members: Vec<String> =
            world.members.iter().map(|member| format!("worker-{}", member.worker)).collect();
        let open = self.open(
            "world",
            now,
            [
                KeyValue::text("elasticdl.world", &world.id.to_string()),
                KeyValue::text("elasticdl.members", &members.join(" ")),
                KeyValue::number("elasticdl.n_members", members.len() as u64),
            ],
        );
        self.world = Some((world.id, open));
        if let Some(from) = load {
            self.load(from, now);
        }
    }

    /// Loading initial values is not a restore.
    fn load(&mut self, from: &LoadFrom, now: Nanos) {
        let Some(checkpoint) = &from.checkpoint else { return };
        // Servers are informed one by one.
        if self.restore.is_some() {
            return;
        }
        let parent = self.heal.as_ref().map(|(_, open)| open.id.clone());
        let mut open =
            self.open("restore", now, [KeyValue::text("elasticdl.checkpoint", checkpoint)]);
        open.parent = parent.unwrap_or(open.parent);
        self.restore = Some(open);
    }

    fn restored(&mut self, now: Nanos, error: Option<String>) {
        let open = self.restore.take();
        self.close(open, now, error);
    }

    fn end_checkpoint(&mut self, now: Nanos, error: Option<String>) {
        let open = self.checkpoint.take();
        self.close(open, now, error);
    }

    fn end_evaluation(&mut self, now: Nanos, error: Option<String>) {
        let open = self.evaluation.take();
        self.close(open, now, error);
    }

    fn end_world(&mut self, now: Nanos) {
        let world = self.world.take();
        self.close(world.map(|(_, open)| open), now, None);
    }

    /// Records the progress of the job, and processes that came and went.
    pub(crate) fn poll(&mut self, status: &JobStatus, history: &History, now: Nanos) {
        for process in &history.processes {
            self.process(process);
        }
        let is_running = status.state() == JobState::Running;
        if let Some((from, open)) = &mut self.steps {
            let is_back = status.step < *from;
            if !is_back {
                Self::progress(open, *from, status);
            }
            if is_running && !is_back && now.saturating_sub(open.start) < STEPS_NANOS {
                return;
            }
            self.end_steps(now);
        }
        if is_running {
            let mut open = self.open("steps", now, []);
            let world = self.world.as_ref().map(|(_, world)| world.id.clone());
            open.parent = world.unwrap_or(open.parent);
            self.steps = Some((status.step, open));
        }
    }

    /// How far a span of steps is by now.
    fn progress(open: &mut OpenSpan, from: u64, status: &JobStatus) {
        open.attributes = vec![
            KeyValue::number("elasticdl.steps", status.step.saturating_sub(from)),
            KeyValue::number("elasticdl.step", status.step),
            KeyValue::number("elasticdl.epoch", u64::from(status.epoch)),
            KeyValue::real("elasticdl.loss", f64::from(status.loss)),
            KeyValue::real("elasticdl.records_per_second", status.records_per_second),
            KeyValue::real(
                "elasticdl.goodput",
                status.goodput.as_ref().map_or(0.0, |goodput| goodput.share),
            ),
        ];
    }

    fn end_steps(&mut self, now: Nanos) {
        // Nothing is known about a span that was not polled a second time.
        let steps = self.steps.take().map(|(_, open)| open);
        self.close(steps.filter(|open| !open.attributes.is_empty()), now, None);
    }

    /// A process is recorded when it is gone.
    fn process(&mut self, process: &ProcessRecord) {
        let key = (process.name.clone(), process.pid);
        let Some(to) = process.to else {
            self.alive.insert(key);
            return;
        };
        if !self.alive.remove(&key) {
            return;
        }
        let mut open = self.open(
            "process",
            nanos(process.from),
            [
                KeyValue::text("elasticdl.instance", &process.name),
                KeyValue::number("process.pid", u64::from(process.pid)),
            ],
        );
        if !process.why.is_empty() {
            open.add([KeyValue::text("elasticdl.why", &process.why)]);
        }
        self.close(Some(open), nanos(to), None);
    }

    fn ended(&mut self, end: &End, now: Nanos) {
        let has_failed = end.state() == JobState::Failed;
        let error = end.reason().filter(|_| has_failed).map(Into::into);
        let over = || Some("the job ended first".to_owned());
        self.end_steps(now);
        self.end_world(now);
        self.end_checkpoint(now, over());
        self.end_evaluation(now, over());
        self.restored(now, over());
        let heal = self.heal.take().map(|(_, open)| open);
        self.close(heal, now, over());
        let mut job = self.job.clone();
        job.add([
            KeyValue::text("elasticdl.end", end.state().name()),
            KeyValue::number("elasticdl.term", self.term.0),
        ]);
        self.done.push(job.end(self.run, now, error));
    }

    fn open<const N: usize>(
        &mut self,
        name: &'static str,
        start: Nanos,
        attributes: [KeyValue; N],
    ) -> OpenSpan {
        self.next += 1;
        let id = span_id(self.run, self.term.0, self.next);
        let mut open = OpenSpan::new(name, id, self.job.id.clone(), start);
        open.add(attributes);
        open
    }

    fn close(&mut self, open: Option<OpenSpan>, now: Nanos, error: Option<String>) {
        let Some(mut open) = open else { return };
        open.add([KeyValue::number("elasticdl.term", self.term.0)]);
        self.done.push(open.end(self.run, now, error));
    }
}

/// Unique among all masters of a run; never zero, which would be no id.
fn span_id(run: RunId, term: u64, number: u64) -> Vec<u8> {
    let [a, b, c, d, e, f, g, h, ..] = run.0;
    let run = u64::from_be_bytes([a, b, c, d, e, f, g, h]);
    mix(mix(mix(run) ^ term) ^ number).max(1).to_be_bytes().to_vec()
}

/// Nanoseconds of a time in seconds.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a time after 1970, to the microsecond"
)]
pub(crate) fn nanos(unix_secs: f64) -> Nanos {
    (unix_secs.max(0.0) * 1e6) as u64 * 1000
}

#[cfg(test)]
mod tests;
