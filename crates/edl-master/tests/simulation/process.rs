// SPDX-License-Identifier: Apache-2.0
//! A process in the simulated world: it is told what happens, and acts through its context.

use std::time::Duration;

use edl_core::platform::Ended;

use crate::counter::Counter;
use crate::disk::Disk;
use crate::kernel::{ConnId, Kernel, Pid};
use crate::master::Master;
use crate::message::{Message, Timer};
use crate::scenario::Scenario;
use crate::server::Server;
use crate::worker::Worker;

/// What a process can touch while it acts.
pub(crate) struct Context<'a> {
    pub(crate) pid: Pid,
    pub(crate) kernel: &'a mut Kernel,
    pub(crate) disk: &'a mut Disk,
    pub(crate) scenario: &'a Scenario,
    pub(crate) counter: &'a Counter,
    /// Set by a process that ends itself.
    pub(crate) exit: Option<Ended>,
}

pub(crate) enum Process {
    Master(Box<Master>),
    Server(Box<Server>),
    Worker(Box<Worker>),
}

impl Context<'_> {
    pub(crate) fn send(&mut self, conn: ConnId, message: Message) {
        self.kernel.send(conn, self.pid, message);
    }

    pub(crate) fn connect(&mut self, to: Pid, first: Message) -> ConnId {
        self.kernel.connect(self.pid, to, first)
    }

    pub(crate) fn after(&mut self, low_ms: u64, high_ms: u64, timer: Timer) {
        let delay = self.kernel.between(low_ms, high_ms);
        self.kernel.schedule(self.pid, delay, timer);
    }

    pub(crate) fn heartbeat_later(&mut self) {
        let every = Duration::from_secs_f64(self.scenario.spec.heartbeat_timeout_secs / 5.0);
        self.kernel.schedule(self.pid, every, Timer::Heartbeat);
    }
}

impl Process {
    pub(crate) fn on_message(&mut self, context: &mut Context<'_>, conn: ConnId, message: Message) {
        match self {
            Self::Master(master) => master.on_message(context, conn, message),
            Self::Server(server) => server.on_message(context, conn, message),
            Self::Worker(worker) => worker.on_message(context, conn, message),
        }
    }

    pub(crate) fn on_broken(&mut self, context: &mut Context<'_>, conn: ConnId) {
        match self {
            Self::Master(master) => master.on_broken(context, conn),
            Self::Server(server) => server.on_broken(context, conn),
            Self::Worker(worker) => worker.on_broken(context, conn),
        }
    }

    pub(crate) fn on_timer(&mut self, context: &mut Context<'_>, timer: Timer) {
        match self {
            Self::Master(master) => master.on_timer(context, timer),
            Self::Server(server) => server.on_timer(context, timer),
            Self::Worker(worker) => worker.on_timer(context, timer),
        }
    }
}
