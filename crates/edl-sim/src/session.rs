// SPDX-License-Identifier: Apache-2.0
//! The control session of a worker or server over simulated streams. `Follow` decides, as it does
//! in production; this file moves bytes, as `edl_net::control::Session` does.

use std::time::Duration;

use edl_core::id::Term;
use edl_core::time::Time;
use edl_net::control::{Command, Failure, Follow};
use tonic::Status;

use crate::message::{Message, Timer};
use crate::network::{ConnId, Purpose};
use crate::process::Context;

/// From the hello to the welcome.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);
/// Longer than any outage of a simulation.
const PATIENCE: Duration = Duration::from_secs(300);

pub(crate) struct Session {
    purpose: Purpose,
    pub(crate) follow: Follow,
    stream: Option<ConnId>,
    /// The highest term of a master that was followed.
    highest: Term,
}

/// What happened on the stream.
pub(crate) enum Heard<C> {
    Nothing,
    /// A command of the master that is followed; the first one on a stream is its welcome.
    Command(C),
    /// The master that was followed is gone.
    Lost,
    /// There is no master to look for anymore.
    GivenUp(String),
}

impl Session {
    pub(crate) fn new(context: &mut Context<'_>, purpose: Purpose) -> Self {
        context.after(1, 20, Timer::Connect);
        let follow = Follow::new(Some(PATIENCE));
        Self { purpose, follow, stream: None, highest: Term(0) }
    }

    pub(crate) fn is_stream(&self, conn: ConnId) -> bool {
        self.stream == Some(conn)
    }

    /// Opens a stream with `hello`, if there is a master to be found.
    pub(crate) fn connect<C>(
        &mut self,
        context: &mut Context<'_>,
        hello: impl FnOnce() -> Vec<u8>,
        now: Time,
    ) -> Heard<C> {
        // The address of a master that was replaced is tried as well.
        let former = context.disk.former_master.filter(|_| context.kernel.chance(400));
        let Some(master) = former.or(context.disk.master) else {
            return self.failed(context, Failure::Broken("no master".into()), now);
        };
        let conn = context.connect(master, self.purpose);
        context.send(conn, Message::Control(hello()));
        context.kernel.schedule(context.pid, ANSWER_LIMIT, Timer::Unanswered(conn));
        self.stream = Some(conn);
        Heard::Nothing
    }

    pub(crate) fn received<C: Command + prost::Message + Default>(
        &mut self,
        context: &mut Context<'_>,
        bytes: &[u8],
        now: Time,
    ) -> Heard<C> {
        let command = C::decode(bytes).expect("a master encodes what can be decoded");
        if let Some(welcome) = command.welcome() {
            if let Err(failure) = self.follow.welcome(welcome).map(|_| ()) {
                return self.failed(context, failure, now);
            }
            let term = self.follow.job().map_or(Term(0), |job| job.term);
            assert!(term >= self.highest, "a master that was replaced is followed");
            self.highest = term;
            let conn = self.stream.expect("a welcome came over it");
            context.kernel.schedule(context.pid, Duration::ZERO, Timer::Heartbeat(conn));
        } else if !self.follow.is_following() {
            return Heard::Nothing;
        }
        Heard::Command(command)
    }

    /// The master closed the stream.
    pub(crate) fn closed<C>(
        &mut self,
        context: &mut Context<'_>,
        status: Status,
        now: Time,
    ) -> Heard<C> {
        self.failed(context, Failure::from(status), now)
    }

    pub(crate) fn broken<C>(&mut self, context: &mut Context<'_>, now: Time) -> Heard<C> {
        self.failed(context, Failure::Broken("the stream broke".into()), now)
    }

    /// No welcome came in time.
    pub(crate) fn unanswered<C>(
        &mut self,
        context: &mut Context<'_>,
        conn: ConnId,
        now: Time,
    ) -> Heard<C> {
        if self.stream != Some(conn) || self.follow.is_following() {
            return Heard::Nothing;
        }
        self.failed(context, Failure::Broken("no welcome in time".into()), now)
    }

    fn failed<C>(&mut self, context: &mut Context<'_>, failure: Failure, now: Time) -> Heard<C> {
        if let Some(conn) = self.stream.take() {
            context.kernel.hang_up(conn);
        }
        let was_following = self.follow.is_following();
        if matches!(failure, Failure::LowerTerm { .. }) {
            context.kernel.count("lower terms refused");
        }
        match self.follow.failed(failure, now) {
            Ok(delay) => context.kernel.schedule(context.pid, delay, Timer::Connect),
            Err(error) => return Heard::GivenUp(error.to_string()),
        }
        if was_following { Heard::Lost } else { Heard::Nothing }
    }

    /// Sends to the master that is followed.
    pub(crate) fn transmit(&self, context: &mut Context<'_>, message: Vec<u8>) {
        if let Some(conn) = self.stream.filter(|_| self.follow.is_following()) {
            context.send(conn, Message::Control(message));
        }
    }

    /// Whether a heartbeat is to be sent now; plans the next one.
    pub(crate) fn is_heartbeat_due(&self, context: &mut Context<'_>, conn: ConnId) -> bool {
        let job = self.follow.job().filter(|_| self.follow.is_following());
        let Some(job) = job.filter(|_| self.stream == Some(conn)) else { return false };
        context.kernel.schedule(context.pid, job.heartbeat, Timer::Heartbeat(conn));
        true
    }
}
