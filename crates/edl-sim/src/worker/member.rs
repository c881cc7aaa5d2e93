// SPDX-License-Identifier: Apache-2.0
//! A worker under AllReduce or Hybrid: what its machine asks for, done in simulated time. What
//! takes long or waits for others is in `activity`.

mod activity;

use std::collections::BTreeMap;

use edl_core::activity::WaitingFor;
use edl_core::id::{CheckpointId, LeaseId, WorldId};
use edl_core::job::{CheckpointFile, Command, MemberCheckpoint, MemberReport, Peer};
use edl_core::member::{self, Activity, Config, Effect, Event, Failure, Outcome, Place};
use edl_core::metric::{Measures, Metric};
use edl_core::platform::Ended;
use edl_core::spec::JobSpec;
use edl_core::time::Time;
use edl_core::worker::{Finished, Limits, Report, Shard, Task};
use edl_net::convert::worker as convert;
use edl_net::proto::worker_command::Kind;

use super::Control;
use super::shell::{Events, Shell};
use crate::client::{Limit, Link, News};
use crate::disk::WriteId;
use crate::history::DenseState;
use crate::kernel::Pid;
use crate::mesh::{self, Mesh, pid_of};
use crate::message::Timer;
use crate::network::ConnId;
use crate::process::{self, Context};

/// Every worker of a simulated job computes the same gradients.
const PROBE: u64 = 7;

pub(crate) struct Member {
    pid: Pid,
    machine: member::Member,
    events: Events<Event>,
    mesh: Mesh,
    link: Link,
    /// The last connection to the servers.
    connection: u64,
    n_unacknowledged: u32,
    /// Why the connection to the servers broke since the last activity that used it.
    servers_failed: Option<Failure>,
    state: Option<DenseState>,
    /// Lanes of the step under way that are trained, and what they were trained on.
    trained: Vec<(u32, u64)>,
    /// The sum of the last step.
    gradient: u64,
    shards: BTreeMap<LeaseId, (Shard, Measures)>,
    current: Option<Activity>,
    /// All sums of a step are there, and it reads them from the memory of the other members.
    is_reading: bool,
    /// The activity under way ends if members that owe something are silent for too long.
    is_watching: bool,
    /// Counts activities, so late timers are recognized.
    act: u64,
    /// It leaves its world without waiting for all members: the next one is due at once, or a
    /// member was lost.
    is_forced: bool,
    /// The last world that it entered in this way.
    forced: WorldId,
    /// Another world will take over after a step that has not come.
    is_planned: bool,
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
    Write(CheckpointId, Vec<(WriteId, CheckpointFile)>),
}

impl Member {
    pub(crate) fn new(spec: &JobSpec, n_records: u64, control: &Control, now: Time) -> Self {
        let worker = (control.id, control.incarnation);
        let config = Config::new(spec, n_records, worker, Limits::default());
        let config = Config { is_balanced: false, ..config };
        Self {
            pid: pid_of(control.incarnation),
            machine: member::Member::new(config, now),
            events: Events::default(),
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
            is_reading: false,
            is_watching: false,
            act: 0,
            is_forced: false,
            forced: WorldId(0),
            is_planned: false,
        }
    }

    pub(crate) fn step(&self) -> Option<u64> {
        self.state.map(|state| state.step)
    }

    pub(crate) fn progress(&self) -> u64 {
        self.machine.progress()
    }

    pub(crate) fn waiting_for(&self) -> WaitingFor {
        match self.owing() {
            Some(_) => WaitingFor::Members,
            None => self.machine.activity().waiting_for,
        }
    }

    pub(crate) fn tick(&mut self, control: &mut Control, context: &mut Context<'_>) {
        self.handle(control, context, Event::Tick);
    }

    pub(crate) fn built(&mut self, control: &mut Control, context: &mut Context<'_>) {
        let peer = Peer {
            address: context.pid.to_string(),
            unix_path: String::new(),
            probe: PROBE,
            step: None,
        };
        let model = Box::new((*context.model.model).clone());
        self.handle(control, context, Event::Built { model, peer: Box::new(peer) });
    }

    pub(crate) fn rejoined(&mut self, control: &mut Control, context: &mut Context<'_>) {
        self.handle(control, context, Event::Rejoined);
    }

    pub(crate) fn master_lost(&mut self, control: &mut Control, context: &mut Context<'_>) {
        self.handle(control, context, Event::MasterLost);
    }

    pub(crate) fn leave(&mut self, control: &mut Control, context: &mut Context<'_>) {
        self.handle(control, context, Event::Leave);
    }

    pub(crate) fn command(
        &mut self,
        control: &mut Control,
        context: &mut Context<'_>,
        command: Kind,
    ) {
        let command = convert::command(command).expect("a command can be read");
        if let Command::Lease { lease, task: Task::Shard(shard) } = &command {
            self.shards.insert(*lease, (shard.clone(), Measures::new(&[Metric::loss()])));
        }
        if let Command::World(announced) = &command {
            let is_forced = announced.world.is_due_at_once(control.id, control.incarnation);
            self.is_forced |= is_forced;
            self.is_planned = !is_forced;
        }
        self.handle(control, context, Event::Command(command));
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
            Done::Write(checkpoint, writes) => {
                let finish = |(write, file)| context.disk.finish(write).map(|()| file);
                // All files get their names, even if one fails.
                let results: Vec<_> = writes.into_iter().map(finish).collect();
                let result = results.into_iter().collect();
                self.handle(control, context, Event::Written { checkpoint, result });
            }
        }
    }

    /// Begins to write the files that were ordered.
    fn begin_write(&self, context: &mut Context<'_>, order: MemberCheckpoint) -> Done {
        let MemberCheckpoint { checkpoint, folder, at, partitions, .. } = order;
        let state = self.state.expect("a state to write");
        assert_eq!(state.step, at, "{folder} gets a file of another step");
        let begin = |partition| {
            let snapshot = state.snapshot(partition, &context.model.layout);
            context.disk.begin_file(context.pid, &folder, &snapshot)
        };
        Done::Write(checkpoint, partitions.map(begin).collect())
    }

    pub(crate) fn hear(
        &mut self,
        control: &mut Control,
        context: &mut Context<'_>,
        (conn, from): (ConnId, Pid),
        message: mesh::MeshMessage,
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

impl Shell for Member {
    type Machine = member::Member;
    const NAME: &'static str = "member";

    fn machine(&mut self) -> &mut member::Member {
        &mut self.machine
    }

    fn events(&mut self) -> &mut Events<Event> {
        &mut self.events
    }

    fn perform(&mut self, control: &mut Control, context: &mut Context<'_>, effect: Effect) {
        match effect {
            Effect::Report(report) => {
                if let Report::Member(MemberReport::Formed { world, step, .. }) = &report
                    && let Some(state) = self.state.filter(|state| state.step == *step)
                {
                    let planned = self.mesh.world().filter(|entered| entered.id == *world);
                    let after = planned.and_then(|planned| planned.after);
                    assert!(Some(*step) >= after, "{world} is planned after step {after:?}");
                    context.judge.formed.insert((control.id, *world), state);
                    if std::mem::take(&mut self.is_forced) {
                        self.forced = *world;
                    }
                }
                control.report(context, report);
            }
            Effect::Prepare(_) | Effect::Forget(_) | Effect::Waste(_) => {}
            Effect::Read { place, .. } => {
                let most = context.scenario.read_ms;
                later(context, 0, most, Done::Decoded(place));
            }
            Effect::Finish(lease) => {
                let (_, measures) = self.shards.remove(&lease).expect("an assigned shard");
                let finished = Finished::Evaluation(Box::new(measures));
                self.handle(control, context, Event::Finished { lease, result: Ok(finished) });
            }
            Effect::DropShard(lease) => drop(self.shards.remove(&lease)),
            Effect::Write(order) => {
                let done = self.begin_write(context, order);
                later(context, 2, context.scenario.write_ms, done);
            }
            Effect::DropState => self.state = None,
            Effect::HangUp => self.link.abort(context, self.connection),
            Effect::Start(activity) => self.start(control, context, activity),
            Effect::Cancel(_) => later(context, 0, 2, Done::Cancelled { act: self.act }),
            Effect::End | Effect::ExitNow => context.exit = Some(Ended::CLEAN),
        }
    }
}

fn later(context: &mut Context<'_>, low_ms: u64, high_ms: u64, done: Done) {
    let done = process::Done::Worker(super::Done::Member(done));
    context.after(low_ms, high_ms, Timer::Done(Box::new(done)));
}
