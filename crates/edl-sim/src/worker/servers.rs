// SPDX-License-Identifier: Apache-2.0
//! A worker with parameter servers: what its machine asks for, done in simulated time.

use std::collections::{BTreeMap, BTreeSet};

use edl_core::activity::WaitingFor;
use edl_core::id::{BatchId, LeaseId};
use edl_core::metric::{Measures, Metric};
use edl_core::platform::Ended;
use edl_core::spec::JobSpec;
use edl_core::worker::{
    Computed, Config, Effect, Event, Fault, Finished, Limits, Shard, Wants, WorkItem, Worker,
};
use edl_net::convert::worker as convert;
use edl_net::proto::worker_command;

use super::Control;
use super::shell::{Events, Shell};
use crate::client::{Ask, Limit, Link, News, Pulled, Source, Wish};
use crate::judge;
use crate::message::Timer;
use crate::network::ConnId;
use crate::process::{self, Context};

pub(crate) struct Trainer {
    machine: Worker,
    events: Events<Event>,
    link: Link,
    /// Items whose records are here.
    decoded: BTreeSet<WorkItem>,
    /// The item whose parameters are pulled, and on which connection.
    pulling: Option<WorkItem>,
    pulled: Option<(WorkItem, Pulled)>,
    /// Mean of the dense parameters, and where they come from.
    dense: f64,
    source: Source,
    /// The gradient that was computed last.
    gradient: Option<BatchId>,
    shards: BTreeMap<LeaseId, (Shard, Measures)>,
}

#[derive(Clone, Debug)]
pub(crate) enum Done {
    Decoded(WorkItem),
    Computed(WorkItem),
}

impl Trainer {
    pub(crate) fn new(spec: &JobSpec, n_records: u64) -> Self {
        Self {
            machine: Worker::new(Config::new(spec, n_records, Limits::default())),
            events: Events::default(),
            link: Link::default(),
            decoded: BTreeSet::new(),
            pulling: None,
            pulled: None,
            dense: 0.0,
            source: Source::default(),
            gradient: None,
            shards: BTreeMap::new(),
        }
    }

    pub(crate) fn progress(&self) -> u64 {
        self.machine.progress()
    }

    pub(crate) fn waiting_for(&self) -> WaitingFor {
        self.machine.activity().waiting_for
    }

    pub(crate) fn tick(&mut self, control: &mut Control, context: &mut Context<'_>) {
        self.handle(control, context, Event::Tick);
    }

    pub(crate) fn built(&mut self, control: &mut Control, context: &mut Context<'_>) {
        let model = Box::new((*context.model.model).clone());
        self.handle(control, context, Event::Built(model));
    }

    pub(crate) fn rejoined(&mut self, control: &mut Control, context: &mut Context<'_>) {
        self.handle(control, context, Event::Rejoined);
    }

    pub(crate) fn leave(&mut self, control: &mut Control, context: &mut Context<'_>) {
        self.handle(control, context, Event::Leave);
    }

    pub(crate) fn command(
        &mut self,
        control: &mut Control,
        context: &mut Context<'_>,
        command: worker_command::Kind,
    ) {
        let command = convert::command(command).expect("a command can be read");
        self.handle(control, context, Event::Command(command));
    }

    pub(crate) fn frame(
        &mut self,
        control: &mut Control,
        context: &mut Context<'_>,
        conn: ConnId,
        bytes: &[u8],
    ) {
        let news = self.link.frame(context, conn, bytes);
        self.news(control, context, news);
    }

    pub(crate) fn broken(
        &mut self,
        control: &mut Control,
        context: &mut Context<'_>,
        conn: ConnId,
    ) {
        let news = self.link.broken(context, conn);
        self.news(control, context, news);
    }

    pub(crate) fn limit(&mut self, control: &mut Control, context: &mut Context<'_>, limit: Limit) {
        let news = self.link.limit(context, limit);
        self.news(control, context, news);
    }

    fn news(&mut self, control: &mut Control, context: &mut Context<'_>, news: Vec<(u64, News)>) {
        for (connection, news) in news {
            let event = match news {
                News::Connected => Event::Connected { connection },
                News::Pulled(pulled) => {
                    let Some(item) = self.pulling.take() else { continue };
                    self.pulled = Some((item, pulled));
                    Event::Pulled { connection, item }
                }
                News::Acknowledged { batch, generation } => {
                    Event::Acknowledged { connection, batch, generation }
                }
                News::Broken { .. } => Event::Broken { connection },
            };
            self.handle(control, context, event);
        }
    }

    pub(crate) fn done(&mut self, control: &mut Control, context: &mut Context<'_>, done: Done) {
        let event = match done {
            Done::Decoded(item) => {
                let is_bad = context.kernel.chance(context.scenario.failures / 5);
                let result = if is_bad { Err("bad record".into()) } else { Ok(()) };
                self.decoded.insert(item);
                Event::Decoded { item, result }
            }
            Done::Computed(_) if control.is_stuck => return,
            Done::Computed(item) => {
                if context.crashes() {
                    return;
                }
                let result = self.compute(context, item);
                Event::Computed { item, result }
            }
        };
        self.handle(control, context, event);
    }

    fn compute(&mut self, context: &mut Context<'_>, item: WorkItem) -> Result<Computed, Fault> {
        if context.kernel.chance(context.scenario.failures) {
            return Err(Fault::Failed("user code failed".into()));
        }
        match item {
            WorkItem::Batch(batch) if !context.model.is_finite(batch) => {
                Err(Fault::NonFinite("the loss is not finite".into()))
            }
            WorkItem::Batch(batch) => {
                self.gradient = Some(batch);
                context.judge.computed(context.scenario, batch, 0);
                Ok(Computed::Batch { loss: 0.5 })
            }
            WorkItem::Piece { lease, piece } => {
                let minibatch = u64::from(context.scenario.spec.minibatch_size);
                if let Some((shard, measures)) = self.shards.get_mut(&lease) {
                    let first = shard.records.start + u64::from(piece) * minibatch;
                    let n_records = minibatch.min(shard.records.end - first);
                    let sign = if context.scenario.improves { -1.0 } else { 1.0 };
                    let n_records = u32::try_from(n_records).expect("a piece is small");
                    measures.add_loss(sign * self.dense, n_records);
                }
                Ok(Computed::Piece)
            }
        }
    }

    #[expect(clippy::cast_precision_loss, reason = "counts stay small")]
    fn begin_compute(&mut self, context: &mut Context<'_>, item: WorkItem) {
        let (of, pulled) = self.pulled.take().expect("parameters are pulled first");
        assert_eq!(of, item, "the item pulled last is computed");
        assert!(self.decoded.remove(&item), "{item:?} is computed before it is read");
        if let WorkItem::Batch(batch) = item {
            judge::started(context.model, batch, &pulled);
        }
        if !pulled.dense.is_empty() {
            let sum: f64 = pulled.dense.iter().copied().map(f64::from).sum();
            self.dense = sum / pulled.dense.len() as f64;
            self.source.versions = pulled.source.versions;
        }
        self.source.generation = pulled.source.generation;
        let most = context.scenario.step_ms;
        later(context, most, Done::Computed(item));
    }
}

impl Shell for Trainer {
    type Machine = Worker;
    const NAME: &'static str = "worker";

    fn machine(&mut self) -> &mut Worker {
        &mut self.machine
    }

    fn events(&mut self) -> &mut Events<Event> {
        &mut self.events
    }

    fn perform(&mut self, control: &mut Control, context: &mut Context<'_>, effect: Effect) {
        match effect {
            Effect::Read { item, .. } => {
                let most = context.scenario.read_ms;
                later(context, most, Done::Decoded(item));
            }
            Effect::Forget(item) => {
                self.decoded.remove(&item);
                self.pulled.take_if(|(pulled, _)| *pulled == item);
            }
            Effect::Connect { connection, route } => {
                self.pulling = None;
                self.link.ask(context, connection, Ask::Connect(route));
            }
            Effect::Abort { connection } => self.link.abort(context, connection),
            Effect::Pull { connection, item, wants } => {
                assert!(self.decoded.contains(&item), "{item:?} is pulled before it is read");
                self.pulling = Some(item);
                let ask = Ask::Pull(wish(context, item, wants));
                self.link.ask(context, connection, ask);
            }
            Effect::Push { connection, batch } => {
                assert_eq!(self.gradient.take(), Some(batch), "the batch computed last is pushed");
                let ask = Ask::Push { batch, source: self.source.clone() };
                self.link.ask(context, connection, ask);
            }
            Effect::Skip { connection, batch } => {
                self.link.ask(context, connection, Ask::Skip { batch, lane: None });
            }
            Effect::Compute(item) => self.begin_compute(context, item),
            Effect::Begin { lease, shard } => {
                self.shards.insert(lease, (shard, Measures::new(&[Metric::loss()])));
            }
            Effect::Finish(lease) => {
                let (_, measures) = self.shards.remove(&lease).expect("a shard that was begun");
                let finished = Finished::Evaluation(Box::new(measures));
                self.handle(control, context, Event::Finished { lease, result: Ok(finished) });
            }
            Effect::Drop(lease) => {
                self.shards.remove(&lease);
            }
            Effect::Report(report) => control.report(context, report),
            Effect::End => context.exit = Some(Ended::CLEAN),
        }
    }
}

fn wish(context: &Context<'_>, item: WorkItem, wants: Wants) -> Wish {
    let ids = match item {
        WorkItem::Batch(batch) => context.model.plan.records(batch),
        WorkItem::Piece { .. } => Vec::new(),
    };
    let Wants { dense, will_push, min_round } = wants;
    Wish { ids, wants_dense: dense, will_push, min_round, step: None }
}

fn later(context: &mut Context<'_>, most_ms: u64, done: Done) {
    let done = process::Done::Worker(super::Done::Trainer(done));
    context.after(0, most_ms, Timer::Done(Box::new(done)));
}
