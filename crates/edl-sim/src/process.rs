// SPDX-License-Identifier: Apache-2.0
//! A process on the simulated site: a shell around a real machine.

use edl_core::exit::Exit;
use edl_core::platform::Ended;
use edl_core::time::Time;

use crate::disk::Disk;
use crate::judge::Judge;
use crate::kernel::{Action, Kernel, Pid};
use crate::master::Master;
use crate::message::{Message, Timer};
use crate::model::Model;
use crate::network::{ConnId, NewConnection, Purpose};
use crate::scenario::Scenario;
use crate::server::{self, Server};
use crate::worker::{self, Worker};

/// The maximum number of workers that crash.
const MAX_CRASHES: u64 = 8;

pub(crate) enum Process {
    Master(Box<Master>),
    Server(Box<Server>),
    Worker(Box<Worker>),
}

/// Something that takes time and that a shell does next to its machine.
#[derive(Clone, Debug)]
pub(crate) enum Done {
    Server(server::Done),
    Worker(worker::Done),
}

/// What a process can touch while it acts.
pub(crate) struct Context<'a> {
    pub(crate) pid: Pid,
    pub(crate) kernel: &'a mut Kernel,
    pub(crate) disk: &'a mut Disk,
    pub(crate) judge: &'a mut Judge,
    pub(crate) scenario: &'a Scenario,
    pub(crate) model: &'a Model,
    pub(crate) orders_until: &'a mut Time,
    pub(crate) n_deaths_left: &'a mut u32,
    /// Set by a process that exits.
    pub(crate) exit: Option<Ended>,
}

impl Context<'_> {
    pub(crate) fn send(&mut self, conn: ConnId, message: Message) {
        self.kernel.send(conn, self.pid, message);
    }

    pub(crate) fn connect(&mut self, to: Pid, purpose: Purpose) -> ConnId {
        self.kernel.connect(NewConnection { from: self.pid, to, purpose })
    }

    /// Whether a worker crashes now. After some crashes it never does: else a job that saves no
    /// checkpoints might never end.
    pub(crate) fn crashes(&mut self) -> bool {
        let n_before = self.kernel.counts.get("crashes").copied().unwrap_or(0);
        let crashes = n_before < MAX_CRASHES && self.kernel.chance(self.scenario.crashes);
        if crashes {
            self.kernel.count("crashes");
            self.exit = Some(Exit::Panicked.into());
        }
        crashes
    }

    pub(crate) fn after(&mut self, low_ms: u64, high_ms: u64, timer: Timer) {
        let delay = self.kernel.between(low_ms, high_ms);
        self.kernel.schedule(self.pid, delay, timer);
    }
}

impl Process {
    pub(crate) fn act(&mut self, context: &mut Context<'_>, action: Action) {
        match self {
            Self::Master(master) => master.act(context, action),
            Self::Server(server) => server.act(context, action),
            Self::Worker(worker) => worker.act(context, action),
        }
    }
}

/// The clock and the alarm of one process.
pub(crate) struct Clock {
    started: Time,
    /// When the process is woken next.
    alarm: Option<Time>,
}

impl Clock {
    pub(crate) fn new(kernel: &Kernel) -> Self {
        Self { started: kernel.now, alarm: None }
    }

    pub(crate) fn now(&self, kernel: &Kernel) -> Time {
        Time::since_origin(kernel.now.since(self.started))
    }

    /// Wakes the process at `deadline` of its own time, unless it is woken earlier anyway.
    pub(crate) fn wake_at(&mut self, context: &mut Context<'_>, deadline: Option<Time>) {
        let Some(deadline) = deadline else { return };
        let at = (self.started + deadline.since(Time::ZERO)).max(context.kernel.now);
        if self.alarm.is_none_or(|alarm| at < alarm) {
            self.alarm = Some(at);
            context.kernel.schedule_at(context.pid, at, Timer::Wake);
        }
    }

    /// An alarm went off: whether it is the one that was set last.
    pub(crate) fn woken(&mut self, kernel: &Kernel) -> bool {
        let is_due = self.alarm.is_some_and(|alarm| alarm <= kernel.now);
        if is_due {
            self.alarm = None;
        }
        is_due
    }
}
