// SPDX-License-Identifier: Apache-2.0
//! The shell of a worker: its control session, and one of the two machines behind it.

mod member;
mod servers;
mod shell;

use edl_core::activity::WaitingFor;
use edl_core::exit::Exit;
use edl_core::id::{Incarnation, WorkerId};
use edl_core::platform::Ended;
use edl_core::time::Time;
use edl_core::worker::{Outbox, Report};
use edl_net::convert::worker as convert;
use edl_net::convert::worlds::ReceivedWorlds;
use edl_net::proto::{self, WorkerCommand, worker_command};
use prost::Message as _;

use self::member::Member;
use self::servers::Trainer;
use crate::client::Limit;
use crate::kernel::Action;
use crate::message::{Message, Timer};
use crate::network::Purpose;
use crate::process::{self, Clock, Context};
use crate::session::{Heard, Session};

pub(crate) struct Worker {
    control: Control,
    role: Role,
    is_built: bool,
    worlds: ReceivedWorlds,
}

/// What both machines share: who the worker is, and its way to the master.
pub(crate) struct Control {
    id: WorkerId,
    incarnation: Incarnation,
    session: Session,
    outbox: Outbox<Vec<u8>>,
    clock: Clock,
    /// User code never returns.
    is_stuck: bool,
}

enum Role {
    /// No master has described the job yet.
    Unknown,
    Trainer(Box<Trainer>),
    Member(Box<Member>),
}

/// Work that a worker's shell has finished.
#[derive(Clone, Debug)]
pub(crate) enum Done {
    Built,
    Trainer(servers::Done),
    Member(member::Done),
    Limit(Limit),
}

impl Control {
    pub(crate) fn now(&self, context: &Context<'_>) -> Time {
        self.clock.now(context.kernel)
    }

    pub(crate) fn report(&mut self, context: &mut Context<'_>, report: Report) {
        let priority = report.priority();
        self.outbox.push(priority, convert::message(report).encode_to_vec());
        self.flush(context);
    }

    fn flush(&mut self, context: &mut Context<'_>) {
        if self.session.follow.is_following() {
            while let Some(message) = self.outbox.pop() {
                self.session.transmit(context, message);
            }
        }
    }
}

impl Worker {
    pub(crate) fn start(id: u32, context: &mut Context<'_>) -> Self {
        let control = Control {
            id: WorkerId(id),
            incarnation: Incarnation(u64::from(context.pid)),
            session: Session::new(context, Purpose::Worker),
            outbox: Outbox::default(),
            clock: Clock::new(context.kernel),
            is_stuck: false,
        };
        let worlds = ReceivedWorlds::default();
        Self { control, role: Role::Unknown, is_built: false, worlds }
    }

    /// The step whose state it holds, as a member.
    pub(crate) fn step(&self) -> Option<u64> {
        match &self.role {
            Role::Member(member) => member.step(),
            Role::Unknown | Role::Trainer(_) => None,
        }
    }

    pub(crate) fn get_stuck(&mut self) {
        self.control.is_stuck = true;
    }

    pub(crate) fn act(&mut self, context: &mut Context<'_>, action: Action) {
        let now = self.control.now(context);
        let session = &mut self.control.session;
        match action {
            Action::Deliver { conn, message: Message::Control(bytes), .. }
                if session.is_stream(conn) =>
            {
                let heard = session.received(context, &bytes, now);
                self.heard(context, heard);
            }
            Action::Deliver { conn, message: Message::Close(status), .. }
                if session.is_stream(conn) =>
            {
                let heard = session.closed(context, status, now);
                self.heard(context, heard);
            }
            Action::Deliver { message: Message::Control(_) | Message::Close(_), .. } => {}
            Action::Deliver { conn, message: Message::Frame(bytes), .. } => match &mut self.role {
                Role::Trainer(trainer) => {
                    trainer.frame(&mut self.control, context, conn, &bytes);
                }
                Role::Member(member) => member.frame(&mut self.control, context, conn, &bytes),
                Role::Unknown => {}
            },
            Action::Deliver { conn, from, message: Message::Mesh(message), .. } => {
                match &mut self.role {
                    Role::Member(member) => {
                        member.hear(&mut self.control, context, (conn, from), message);
                    }
                    // A peer may link before this worker knows its job; it links again later.
                    Role::Unknown | Role::Trainer(_) => context.kernel.hang_up(conn),
                }
            }
            Action::Broken { conn } if session.is_stream(conn) => {
                let heard = session.broken(context, now);
                self.heard(context, heard);
            }
            Action::Broken { conn } => match &mut self.role {
                Role::Trainer(trainer) => trainer.broken(&mut self.control, context, conn),
                Role::Member(member) => member.broken(&mut self.control, context, conn),
                Role::Unknown => {}
            },
            Action::Timer(timer) => self.on_timer(context, timer),
        }
    }

    fn on_timer(&mut self, context: &mut Context<'_>, timer: Timer) {
        let now = self.control.now(context);
        let control = &mut self.control;
        match timer {
            Timer::Wake => {
                if control.clock.woken(context.kernel) {
                    match &mut self.role {
                        Role::Unknown => {}
                        Role::Trainer(trainer) => trainer.tick(control, context),
                        Role::Member(member) => member.tick(control, context),
                    }
                }
            }
            Timer::Terminate => match &mut self.role {
                Role::Unknown => context.exit = Some(Ended::CLEAN),
                Role::Trainer(trainer) => trainer.leave(control, context),
                Role::Member(member) => member.leave(control, context),
            },
            Timer::Connect => {
                let hello = convert::hello(control.id, control.incarnation, context.pid);
                let hello = || hello.encode_to_vec();
                let heard = control.session.connect(context, hello, now);
                self.heard(context, heard);
            }
            Timer::Unanswered(conn) => {
                let heard = control.session.unanswered(context, conn, now);
                self.heard(context, heard);
            }
            Timer::Heartbeat(conn) => {
                if control.session.is_heartbeat_due(context, conn) {
                    self.heartbeat(context);
                }
            }
            Timer::Done(done) => {
                if let process::Done::Worker(done) = *done {
                    self.done(context, done);
                }
            }
            Timer::Master(_) | Timer::Site(_) => panic!("a worker never set {timer:?}"),
        }
    }

    fn heartbeat(&mut self, context: &mut Context<'_>) {
        let waiting_for = match &self.role {
            _ if self.control.is_stuck => WaitingFor::Nothing,
            Role::Unknown => WaitingFor::Nothing,
            Role::Trainer(trainer) => trainer.waiting_for(),
            Role::Member(member) => member.waiting_for(),
        };
        let progress = match &self.role {
            Role::Unknown => 0,
            Role::Trainer(trainer) => trainer.progress(),
            Role::Member(member) => member.progress(),
        };
        let heartbeat = convert::message(Report::Heartbeat { waiting_for, progress });
        self.control.session.transmit(context, heartbeat.encode_to_vec());
    }

    fn done(&mut self, context: &mut Context<'_>, done: Done) {
        let control = &mut self.control;
        match (done, &mut self.role) {
            (Done::Built, Role::Trainer(trainer)) => {
                self.is_built = true;
                trainer.built(control, context);
            }
            (Done::Built, Role::Member(member)) => {
                self.is_built = true;
                member.built(control, context);
            }
            (Done::Trainer(done), Role::Trainer(trainer)) => trainer.done(control, context, done),
            (Done::Member(done), Role::Member(member)) => member.done(control, context, done),
            (Done::Limit(limit), Role::Trainer(trainer)) => trainer.limit(control, context, limit),
            (Done::Limit(limit), Role::Member(member)) => member.limit(control, context, limit),
            (done, _) => panic!("{done:?} of another role"),
        }
    }

    fn heard(&mut self, context: &mut Context<'_>, heard: Heard<WorkerCommand>) {
        match heard {
            Heard::Nothing => {}
            Heard::Lost => {
                if let Role::Member(member) = &mut self.role {
                    member.master_lost(&mut self.control, context);
                }
            }
            Heard::GivenUp(why) => {
                context.kernel.note(context.pid, "worker gave up", &why);
                context.exit = Some(Exit::Failed.into());
            }
            Heard::Command(command) => {
                let kind = command.kind.expect("a command has a kind");
                if let worker_command::Kind::Welcome(welcome) = kind {
                    self.worlds.welcome();
                    return self.welcomed(context, &welcome);
                }
                if let worker_command::Kind::Ping(_) = kind {
                    return self.heartbeat(context);
                }
                let kind = if let worker_command::Kind::World(world) = kind {
                    let world = self.worlds.receive(world).expect("the world before is known");
                    worker_command::Kind::World(world)
                } else {
                    kind
                };
                match &mut self.role {
                    Role::Unknown => panic!("a command before the first welcome"),
                    Role::Trainer(trainer) => trainer.command(&mut self.control, context, kind),
                    Role::Member(member) => member.command(&mut self.control, context, kind),
                }
            }
        }
    }

    fn welcomed(&mut self, context: &mut Context<'_>, welcome: &proto::WorkerWelcome) {
        let control = &mut self.control;
        match &mut self.role {
            Role::Unknown => {
                let spec = &control.session.follow.job().expect("a master is followed").spec;
                let now = control.clock.now(context.kernel);
                self.role = match spec.step_lanes().is_some() {
                    true => {
                        let member = Member::new(spec, welcome.n_records, control, now);
                        Role::Member(Box::new(member))
                    }
                    false => Role::Trainer(Box::new(Trainer::new(spec, welcome.n_records))),
                };
                let built = process::Done::Worker(Done::Built);
                context.after(10, 100, Timer::Done(Box::new(built)));
            }
            Role::Trainer(trainer) if self.is_built => trainer.rejoined(control, context),
            Role::Member(member) if self.is_built => member.rejoined(control, context),
            // It is announced when it is built.
            Role::Trainer(_) | Role::Member(_) => {}
        }
        self.control.flush(context);
    }
}
