// SPDX-License-Identifier: Apache-2.0
//! The shell of a parameter server around the real machine: owners with real partitions, each at
//! its own pace, and connections.

mod owners;

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use edl_core::exit::Exit;
use edl_core::id::{CheckpointId, Generation, Incarnation, PartitionId, PsId};
use edl_core::job::CheckpointFile;
use edl_core::machine::Machine;
use edl_core::platform::Ended;
use edl_core::server::{self, Client, Effect, Event, Inspection, Load, Order, Request};
use edl_core::time::Time;
use edl_net::convert::server as convert;
use edl_net::frame::FrameKind;
use edl_net::proto::{self, PsCommand, PsMessage, ps_command, ps_message};
use edl_tensor::checkpoint::Snapshot;
use edl_tensor::partition::Partition;
use edl_tensor::push::{Head, Push};
use prost::Message as _;

use crate::disk::WriteId;
use crate::frames::{self, Content, Label, Pull};
use crate::kernel::Action;
use crate::message::{Message, Timer};
use crate::model::DIMS;
use crate::network::{ConnId, Purpose};
use crate::process::{self, Clock, Context};
use crate::session::{Heard, Session};

pub(crate) struct Server {
    ps: PsId,
    incarnation: Incarnation,
    machine: server::Server,
    /// Events that wait for the effects of the one before.
    events: VecDeque<Event>,
    is_handling: bool,
    session: Session,
    clock: Clock,
    n_hellos: u64,
    next_request: u64,
    clients: BTreeMap<ConnId, Client>,
    requests: BTreeMap<Request, PendingRequest>,
    owners: Option<Owners>,
    copies: BTreeMap<(CheckpointId, PartitionId), Snapshot>,
    /// Reports that wait for a master.
    outbox: Vec<Vec<u8>>,
}

/// A request of the data plane that is not answered yet.
#[derive(Debug)]
struct PendingRequest {
    conn: ConnId,
    label: Label,
    body: Body,
}

#[derive(Debug)]
enum Body {
    Pull {
        pull: Pull,
        /// Partitions that have not been sent.
        n_left: usize,
    },
    Push(Arc<Push>),
}

/// The threads that own the partitions of one generation.
struct Owners {
    generation: Generation,
    hosted: Range<u32>,
    owners: Vec<Owner>,
}

#[derive(Default)]
struct Owner {
    parts: Vec<Partition>,
    busy_until: Time,
    /// The checkpoint that waits for a step, per partition.
    copy_at: BTreeMap<PartitionId, (CheckpointId, u64)>,
}

/// What an owner is asked to do, in the order in which it is asked.
#[derive(Clone, Debug)]
pub(crate) enum Task {
    Push(Request),
    Pull(Request),
    Copy(CheckpointId, Option<u64>),
    Inspect(Inspection),
}

#[derive(Clone, Debug)]
pub(crate) enum Done {
    Load(Box<Load>),
    Task { owner: usize, generation: Generation, task: Task },
    Write { checkpoint: CheckpointId, write: WriteId, file: CheckpointFile },
}

impl Server {
    pub(crate) fn start(ps: u32, context: &mut Context<'_>) -> Self {
        Self {
            ps: PsId(ps),
            incarnation: Incarnation(u64::from(context.pid)),
            machine: server::Server::new(),
            events: VecDeque::new(),
            is_handling: false,
            session: Session::new(context, Purpose::Ps),
            clock: Clock::new(context.kernel),
            n_hellos: 0,
            next_request: 0,
            clients: BTreeMap::new(),
            requests: BTreeMap::new(),
            owners: None,
            copies: BTreeMap::new(),
            outbox: Vec::new(),
        }
    }

    pub(crate) fn generation(&self) -> Generation {
        self.machine.generation()
    }

    pub(crate) fn partitions(&self) -> impl Iterator<Item = &Partition> {
        self.owners.iter().flat_map(|owners| &owners.owners).flat_map(|owner| &owner.parts)
    }

    pub(crate) fn act(&mut self, context: &mut Context<'_>, action: Action) {
        let now = self.clock.now(context.kernel);
        match action {
            Action::Deliver { conn, purpose, message: Message::Frame(bytes), .. } => {
                self.frame(context, (conn, purpose), &bytes);
            }
            Action::Deliver { conn, .. } if !self.session.is_stream(conn) => {}
            Action::Deliver { message: Message::Control(bytes), .. } => {
                let heard = self.session.received(context, &bytes, now);
                self.heard(context, heard);
            }
            Action::Deliver { message: Message::Close(status), .. } => {
                let heard = self.session.closed(context, status, now);
                self.heard(context, heard);
            }
            Action::Deliver { message: Message::Mesh(_), .. } => panic!("a server has no links"),
            Action::Broken { conn } if self.session.is_stream(conn) => {
                let heard = self.session.broken(context, now);
                self.heard(context, heard);
            }
            Action::Broken { conn } => {
                if let Some(client) = self.clients.remove(&conn) {
                    self.handle(context, Event::Left(client));
                }
            }
            Action::Timer(timer) => self.on_timer(context, timer),
        }
    }

    fn on_timer(&mut self, context: &mut Context<'_>, timer: Timer) {
        let now = self.clock.now(context.kernel);
        match timer {
            Timer::Wake => {
                if self.clock.woken(context.kernel) {
                    self.handle(context, Event::Tick);
                }
            }
            Timer::Terminate => context.exit = Some(Ended::CLEAN),
            Timer::Connect => {
                self.n_hellos += 1;
                self.handle(context, Event::Inspect(Inspection::Hello(self.n_hellos)));
            }
            Timer::Unanswered(conn) => {
                let heard = self.session.unanswered(context, conn, now);
                self.heard(context, heard);
            }
            Timer::Heartbeat(conn) => {
                if self.session.is_heartbeat_due(context, conn) {
                    let kind = Some(ps_message::Kind::Heartbeat(proto::Heartbeat::default()));
                    self.session.transmit(context, PsMessage { kind }.encode_to_vec());
                }
            }
            Timer::Done(done) => match *done {
                process::Done::Server(done) => self.done(context, done),
                process::Done::Worker(_) => {}
            },
            Timer::Master(_) | Timer::Site(_) => panic!("a server never set {timer:?}"),
        }
    }

    fn heard(&mut self, context: &mut Context<'_>, heard: Heard<PsCommand>) {
        match heard {
            Heard::Nothing | Heard::Lost => {}
            Heard::GivenUp(why) => {
                context.kernel.note(context.pid, "server gave up", &why);
                context.exit = Some(Exit::Failed.into());
            }
            Heard::Command(command) => match command.kind.expect("a command has a kind") {
                ps_command::Kind::Welcome(_) => {
                    for report in std::mem::take(&mut self.outbox) {
                        self.session.transmit(context, report);
                    }
                }
                kind @ (ps_command::Kind::Load(_)
                | ps_command::Kind::Serve(_)
                | ps_command::Kind::Checkpoint(_)
                | ps_command::Kind::Inspect(_)
                | ps_command::Kind::Drain(_)
                | ps_command::Kind::Stop(_)) => {
                    let spec = &self.session.follow.job().expect("a master is followed").spec;
                    let event = convert::event(kind, spec).expect("an order can be read");
                    let is_stop = matches!(event, Event::Order(Order::Stop(_)));
                    self.handle(context, event);
                    if is_stop {
                        context.exit = Some(Ended::CLEAN);
                    }
                }
            },
        }
    }

    fn frame(
        &mut self,
        context: &mut Context<'_>,
        (conn, purpose): (ConnId, Purpose),
        bytes: &[u8],
    ) {
        let (label, content) = frames::decode(bytes);
        let number = match purpose {
            Purpose::Pull { client } | Purpose::Push { client } => client,
            Purpose::Worker | Purpose::Ps | Purpose::Mesh => panic!("a frame on {purpose:?}"),
        };
        let mut name = [0; 16];
        name[..8].copy_from_slice(&number.to_le_bytes());
        let client = Client(name);
        let request = Request(self.next_request);
        self.next_request += 1;
        match content {
            Content::Hello if self.session.follow.job().is_none() => context.kernel.hang_up(conn),
            Content::Hello => {
                self.clients.insert(conn, client);
                context.send(conn, Message::Frame(frames::plain(FrameKind::Accepted, label)));
            }
            Content::Pull(pull) => {
                let event = server::Pull {
                    request,
                    client,
                    generation: label.generation,
                    partitions: pull.head.partitions.clone(),
                    min_round: pull.head.min_round,
                    step: pull.head.step,
                    will_push: pull.head.will_push,
                    patience: pull.head.patience,
                };
                let body = Body::Pull { n_left: pull.head.partitions.len(), pull };
                self.requests.insert(request, PendingRequest { conn, label, body });
                self.handle(context, Event::Pull(event));
            }
            Content::Push(head, body) => {
                let event = server::Push {
                    request,
                    client,
                    generation: label.generation,
                    batch: label.batch,
                    partitions: head.partitions.clone(),
                    base_version: head.base_version,
                };
                let head = Head {
                    batch: label.batch,
                    n_records: head.n_records,
                    base_version: head.base_version,
                    partitions: head.partitions,
                    layout: context.model.layout,
                    lane: head.lane,
                };
                let push = Push::new(head, &DIMS, body).expect("a push that fits");
                let body = Body::Push(Arc::new(push));
                self.requests.insert(request, PendingRequest { conn, label, body });
                self.handle(context, Event::Push(event));
            }
            Content::Accepted | Content::Piece(..) | Content::Ack(_) | Content::Refused(..) => {
                panic!("a server is never sent {content:?}")
            }
        }
    }

    fn handle(&mut self, context: &mut Context<'_>, event: Event) {
        self.events.push_back(event);
        if std::mem::replace(&mut self.is_handling, true) {
            return; // It follows the effects of the event before.
        }
        while let Some(event) = self.events.pop_front().filter(|_| context.exit.is_none()) {
            let now = self.clock.now(context.kernel);
            context.kernel.detail(context.pid, || format!("ps <- {event:?}"));
            let effects = self.machine.handle(event, now);
            self.machine.check_invariants();
            for effect in effects {
                context.kernel.detail(context.pid, || format!("ps -> {effect:?}"));
                self.perform(context, effect);
            }
        }
        self.is_handling = false;
        let deadline = self.machine.next_deadline();
        self.clock.wake_at(context, deadline);
    }

    fn perform(&mut self, context: &mut Context<'_>, effect: Effect) {
        match effect {
            Effect::Drop(generation) => self.drop_owners(context, generation),
            Effect::Load(load) => later(context, 5, 80, Done::Load(load)),
            Effect::Apply(request) => self.ask(context, &Task::Push(request)),
            Effect::Answer(request) => self.ask(context, &Task::Pull(request)),
            Effect::Acknowledge(request) => {
                if let Some(PendingRequest { conn, label, .. }) = self.requests.remove(&request) {
                    context.send(conn, Message::Frame(frames::ack(label, label.sequence)));
                }
            }
            Effect::Refuse(request, refusal) => self.refuse(context, request, refusal),
            Effect::Copy { checkpoint, at } => self.ask(context, &Task::Copy(checkpoint, at)),
            Effect::Write { checkpoint, folder, partition } => {
                let copy = self.copies.remove(&(checkpoint, partition)).expect("it was copied");
                let (write, file) = context.disk.begin_file(context.pid, &folder, &copy);
                let done = Done::Write { checkpoint, write, file };
                later(context, 0, context.scenario.write_ms, done);
            }
            Effect::Inspect(inspection, generation) => {
                if self.owners.as_ref().is_some_and(|owners| owners.generation == generation) {
                    self.ask(context, &Task::Inspect(inspection));
                } else {
                    let states = Vec::new();
                    self.handle(context, Event::Inspected { inspection, generation, states });
                }
            }
            Effect::Hello { hello, generation, states } => {
                if hello == self.n_hellos {
                    let identity = proto::PsHello {
                        protocol: edl_net::CONTROL_PROTOCOL,
                        ps: self.ps.0,
                        incarnation: self.incarnation.0,
                        pid: context.pid,
                        address: context.pid.to_string(),
                        ..proto::PsHello::default()
                    };
                    let hello = convert::hello(identity, generation, states);
                    let now = self.clock.now(context.kernel);
                    let heard = self.session.connect(context, || hello.encode_to_vec(), now);
                    self.heard(context, heard);
                }
            }
            Effect::Report(report) => {
                let report = convert::message(report).encode_to_vec();
                match self.session.follow.is_following() {
                    true => self.session.transmit(context, report),
                    false => self.outbox.push(report),
                }
            }
            Effect::Note(note) => context.kernel.detail(context.pid, || note.to_string()),
        }
    }

    fn refuse(&mut self, context: &mut Context<'_>, request: Request, refusal: server::Refusal) {
        if let Some(PendingRequest { conn, label, .. }) = self.requests.remove(&request) {
            let frame = frames::refusal(label, &refusal, label.sequence);
            context.send(conn, Message::Frame(frame));
        }
    }

    fn drop_owners(&mut self, context: &mut Context<'_>, generation: Generation) {
        self.owners.take_if(|owners| owners.generation == generation);
        self.copies.clear();
        let is_pull = |open: &PendingRequest| matches!(open.body, Body::Pull { .. });
        let of_it = |(_, open): &(&Request, &PendingRequest)| {
            is_pull(open) && open.label.generation == generation
        };
        let pulls: Vec<Request> = self.requests.iter().filter(of_it).map(|(id, _)| *id).collect();
        for pull in pulls {
            self.refuse(context, pull, server::Refusal::NotServing);
        }
    }

    /// Every owner gets to a task in its own time, but in the order of tasks.
    fn ask(&mut self, context: &mut Context<'_>, task: &Task) {
        let Some(owners) = &mut self.owners else { return };
        let generation = owners.generation;
        for (owner, state) in owners.owners.iter_mut().enumerate() {
            let at = context.kernel.now + context.kernel.between(0, context.scenario.apply_ms);
            state.busy_until = state.busy_until.max(at);
            let done = Done::Task { owner, generation, task: task.clone() };
            let timer = Timer::Done(Box::new(process::Done::Server(done)));
            context.kernel.schedule_at(context.pid, state.busy_until, timer);
        }
    }

    fn done(&mut self, context: &mut Context<'_>, done: Done) {
        match done {
            Done::Load(load) => self.load(context, &load),
            Done::Task { owner, generation, task } => {
                let Some(mut owners) = self.owners.take() else { return };
                if owners.generation != generation {
                    self.owners = Some(owners);
                    return;
                }
                let events = self.work(context, &mut owners, owner, task);
                self.owners = Some(owners);
                for event in events {
                    self.handle(context, event);
                }
            }
            Done::Write { checkpoint, write, file } => {
                let event = match context.disk.finish(write) {
                    Ok(()) => Event::Written { checkpoint, file },
                    Err(error) => Event::WriteFailed { checkpoint, error },
                };
                self.handle(context, event);
            }
        }
    }
}

fn later(context: &mut Context<'_>, low_ms: u64, high_ms: u64, done: Done) {
    context.after(low_ms, high_ms, Timer::Done(Box::new(process::Done::Server(done))));
}
