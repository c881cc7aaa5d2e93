// SPDX-License-Identifier: Apache-2.0
//! A worker under AllReduce or Hybrid: what its machine asks for, done in simulated time. What
//! takes long or waits for others is in `activity`.

mod activity;

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use edl_core::id::{LeaseId, WorldId};
use edl_core::job::{News as WorldNews, Peer};
use edl_core::member::{self, Activity, Config, Effect, Event, Failure, Order, Outcome, Place};
use edl_core::metric::{Measures, Metric};
use edl_core::platform::Ended;
use edl_core::spec::JobSpec;
use edl_core::time::Time;
use edl_core::worker::{Finished, Report, Shard, Task};
use edl_net::convert::member as convert;
use edl_net::proto::worker_command::Kind;

use super::Control;
use crate::client::{Limit, Link, News};
use crate::history::State;
use crate::kernel::Pid;
use crate::mesh::{self, Mesh, pid_of};
use crate::message::Timer;
use crate::network::ConnId;
use crate::process::{self, Context};

/// How long a member that leaves waits for a world without it, and how long without a master.
const HAND_OVER: Duration = Duration::from_secs(10);
/// Every worker of a simulated job computes the same gradients.
const PROBE: u64 = 7;

pub(crate) struct Member {
    pid: Pid,
    machine: member::Member,
    /// Events that wait for the effects of the one before.
    events: VecDeque<Event>,
    is_handling: bool,
    mesh: Mesh,
    link: Link,
    /// The last connection to the servers.
    connection: u64,
    n_unacknowledged: u32,
    /// Why the connection to the servers broke since the last activity that used it.
    servers_failed: Option<Failure>,
    state: Option<State>,
    /// Lanes of the step under way that are trained, and what they were trained on.
    trained: Vec<(u32, u64)>,
    /// The sum of the last step.
    gradient: u64,
    shards: BTreeMap<LeaseId, (Shard, Measures)>,
    current: Option<Activity>,
    /// Counts activities, so late timers are recognized.
    act: u64,
    is_leaving: bool,
}

#[derive(Clone, Debug)]
pub(crate) enum Done {
    Decoded(Place),
    /// The computation of an activity is over.
    Computed {
        act: u64,
    },
    /// A wait of an activity has lasted too long.
    Silent {
        act: u64,
    },
    Cancelled {
        act: u64,
    },
    Write(Order, State),
    GiveUpLeaving,
}

impl Member {
    pub(crate) fn new(spec: &JobSpec, n_records: u64, control: &Control, now: Time) -> Self {
        let plan = spec.plan(n_records);
        let config = Config {
            worker: control.id,
            incarnation: control.incarnation,
            plan,
            n_lanes: spec.n_lanes(),
            num_epochs: spec.num_epochs,
            minibatch_size: spec.minibatch_size,
            n_partitions: spec.partitions,
            has_tables: spec.is_hybrid(),
            is_balanced: false,
        };
        Self {
            pid: pid_of(control.incarnation),
            machine: member::Member::new(config, now),
            events: VecDeque::new(),
            is_handling: false,
            mesh: Mesh::default(),
            link: Link::default(),
            connection: 0,
            n_unacknowledged: 0,
            servers_failed: None,
            state: None,
            trained: Vec::new(),
            gradient: 0,
            shards: BTreeMap::new(),
            current: None,
            act: 0,
            is_leaving: false,
        }
    }

    pub(crate) fn step(&self) -> Option<u64> {
        self.state.map(|state| state.step)
    }

    pub(crate) fn waiting_for(&self) -> String {
        match self.owing() {
            Some((worker, _)) => format!("worker-{worker}"),
            None => self.machine.status().waiting_for.to_owned(),
        }
    }

    pub(crate) fn tick(&mut self, control: &mut Control, context: &mut Context<'_>) {
        self.handle(control, context, Event::Tick);
    }

    /// Says that it is ready, how others reach it, and what it holds.
    pub(crate) fn announce(&mut self, control: &mut Control, context: &mut Context<'_>) {
        let claim = self.machine.claim();
        let peer = Peer {
            address: context.pid.to_string(),
            unix_path: String::new(),
            probe: PROBE,
            step: claim.map(|claim| claim.step),
        };
        let ready = Report::Ready {
            model: Box::new((*context.model.model).clone()),
            capacity: 2,
            held: Vec::new(),
            peer: Some(Box::new(peer)),
            world: claim.map_or(WorldId(0), |claim| claim.world),
        };
        control.report(context, ready);
    }

    pub(crate) fn rejoined(&mut self, control: &mut Control, context: &mut Context<'_>) {
        self.announce(control, context);
        self.handle(control, context, Event::Rejoined);
        if self.is_leaving {
            control.report(context, Report::Leaving);
        }
    }

    pub(crate) fn leave(&mut self, control: &mut Control, context: &mut Context<'_>) {
        if std::mem::replace(&mut self.is_leaving, true) {
            return;
        }
        let done = process::Done::Worker(super::Done::Member(Done::GiveUpLeaving));
        context.kernel.schedule(context.pid, HAND_OVER, Timer::Done(Box::new(done)));
        control.report(context, Report::Leaving);
        self.handle(control, context, Event::Leave);
    }

    pub(crate) fn command(
        &mut self,
        control: &mut Control,
        context: &mut Context<'_>,
        command: Kind,
    ) {
        let event = convert::event(command).expect("a command for members");
        if let Event::Lease { lease, task: Task::Shard(shard) } = &event {
            self.shards.insert(*lease, (shard.clone(), Measures::new(&[Metric::loss()])));
        }
        self.handle(control, context, event);
    }

    fn handle(&mut self, control: &mut Control, context: &mut Context<'_>, event: Event) {
        self.events.push_back(event);
        if std::mem::replace(&mut self.is_handling, true) {
            return; // It follows the effects of the event before.
        }
        while let Some(event) = self.events.pop_front().filter(|_| context.exit.is_none()) {
            let now = control.now(context);
            context.kernel.detail(context.pid, || format!("member <- {event:?}"));
            let effects = self.machine.handle(event, now);
            self.machine.check_invariants();
            for effect in effects {
                context.kernel.detail(context.pid, || format!("member -> {effect:?}"));
                self.perform(control, context, effect);
            }
        }
        self.is_handling = false;
        let deadline = self.machine.next_deadline();
        control.clock.wake_at(context, deadline);
    }

    fn perform(&mut self, control: &mut Control, context: &mut Context<'_>, effect: Effect) {
        match effect {
            Effect::Report(report) => {
                if let Report::Member(WorldNews::Formed { world, step, .. }) = &report
                    && let Some(state) = self.state.filter(|state| state.step == *step)
                {
                    context.judge.formed.insert((control.id, *world), state);
                }
                control.report(context, report);
            }
            Effect::Prepare(_) | Effect::Forget(_) | Effect::Waste(_) => {}
            Effect::Read { place, .. } => {
                let most = context.scenario.read_ms;
                later(context, 0, most, Done::Decoded(place));
            }
            Effect::Finish(lease) => {
                let (shard, measures) = self.shards.remove(&lease).expect("an assigned shard");
                let n_records = shard.records.end - shard.records.start;
                let finished = Finished::Evaluation { measures: Box::new(measures), n_records };
                self.handle(control, context, Event::Finished { lease, result: Ok(finished) });
            }
            Effect::DropShard(lease) => drop(self.shards.remove(&lease)),
            Effect::Write(order) => {
                let state = self.state.expect("a state to write");
                later(context, 2, 150, Done::Write(order, state));
            }
            Effect::DropState => self.state = None,
            Effect::HangUp => self.link.abort(context, self.connection),
            Effect::Start(activity) => self.start(control, context, activity),
            Effect::Cancel => later(context, 0, 2, Done::Cancelled { act: self.act }),
            Effect::End => context.exit = Some(Ended::Exit(0)),
        }
    }

    pub(crate) fn done(&mut self, control: &mut Control, context: &mut Context<'_>, done: Done) {
        match done {
            Done::Decoded(place) => {
                let is_bad = context.kernel.chance(context.scenario.failures / 5);
                let result = if is_bad { Err("bad record".into()) } else { Ok(()) };
                self.handle(control, context, Event::Decoded { place, result });
            }
            Done::Computed { act } if act == self.act => self.computed(control, context),
            Done::Silent { act } if act == self.act && !control.is_stuck => {
                if let Some((peer, _)) = self.owing() {
                    let error = "it is silent".into();
                    self.end(control, context, Err(Failure::Lost { peer, error }));
                }
            }
            Done::Cancelled { act } if act == self.act => self.cancelled(control, context),
            Done::Computed { .. } | Done::Silent { .. } | Done::Cancelled { .. } => {}
            Done::Write(order, state) => self.write(control, context, &order, state),
            Done::GiveUpLeaving => context.exit = Some(Ended::Exit(0)),
        }
    }

    fn write(
        &mut self,
        control: &mut Control,
        context: &mut Context<'_>,
        order: &Order,
        state: State,
    ) {
        let Order { cut, folder, partitions, .. } = order;
        let write = |id| context.disk.write(folder, id, state.encode(), state.step);
        let result = partitions.clone().map(write).collect();
        self.handle(control, context, Event::Written { cut: *cut, result });
    }

    pub(crate) fn hear(
        &mut self,
        control: &mut Control,
        context: &mut Context<'_>,
        (conn, from): (ConnId, Pid),
        message: mesh::Message,
    ) {
        self.mesh.hear(from, conn, message);
        self.advance(control, context);
    }

    pub(crate) fn broken(
        &mut self,
        control: &mut Control,
        context: &mut Context<'_>,
        conn: ConnId,
    ) {
        if self.mesh.broken(conn) {
            return self.advance(control, context);
        }
        let news = self.link.broken(context, conn);
        self.news(control, context, news);
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

    pub(crate) fn limit(&mut self, control: &mut Control, context: &mut Context<'_>, limit: Limit) {
        let news = self.link.limit(context, limit);
        self.news(control, context, news);
    }

    /// The servers have answered, or the connection to them broke.
    fn news(&mut self, control: &mut Control, context: &mut Context<'_>, news: Vec<(u64, News)>) {
        for (connection, news) in news {
            if connection != self.connection {
                continue;
            }
            match news {
                News::Connected => {
                    if matches!(self.current, Some(Activity::Connect(_))) {
                        self.end(control, context, Ok(Outcome::Done));
                    }
                }
                News::Pulled(pulled) => self.pulled(context, &pulled.rows),
                News::Acknowledged { .. } => self.n_unacknowledged -= 1,
                News::Broken { error, is_other_step: true } => {
                    self.servers_failed = Some(Failure::OtherStep(error));
                }
                News::Broken { error, is_other_step: false } => {
                    self.servers_failed = Some(Failure::Servers(error));
                }
            }
            self.advance(control, context);
        }
    }
}

fn later(context: &mut Context<'_>, low_ms: u64, high_ms: u64, done: Done) {
    let done = process::Done::Worker(super::Done::Member(done));
    context.after(low_ms, high_ms, Timer::Done(Box::new(done)));
}
