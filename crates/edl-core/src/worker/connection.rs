// SPDX-License-Identifier: Apache-2.0
//! The connection to the servers: which route it follows, whether it is up, and when to retry.

use std::time::Duration;

use super::effect::Effect;
use crate::activity::WaitingFor;
use crate::id::Generation;
use crate::route::Route;
use crate::time::Time;

const FIRST_RETRY: Duration = Duration::from_millis(50);
const LAST_RETRY: Duration = Duration::from_secs(1);

/// One connection after another, each with a number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Connection {
    number: u64,
    route: Option<Route>,
    state: State,
    retry: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// No route yet.
    Idle,
    Connecting,
    Up,
    Down {
        retry_at: Time,
    },
}

impl Connection {
    pub(super) fn new() -> Self {
        Self { number: 0, route: None, state: State::Idle, retry: FIRST_RETRY }
    }

    pub(super) fn number(&self) -> u64 {
        self.number
    }

    pub(super) fn generation(&self) -> Option<Generation> {
        self.route.as_ref().map(|route| route.generation)
    }

    pub(super) fn is_up(&self) -> bool {
        self.state == State::Up
    }

    fn is_used(&self) -> bool {
        match self.state {
            State::Up | State::Connecting => true,
            State::Idle | State::Down { .. } => false,
        }
    }

    /// Connects along `route`; false if the connection follows it already.
    pub(super) fn follow(&mut self, route: Route, effects: &mut Vec<Effect>) -> bool {
        if self.is_used() && self.route.as_ref() == Some(&route) {
            return false;
        }
        self.abort(effects);
        self.route = Some(route);
        self.retry = FIRST_RETRY;
        self.connect(effects);
        true
    }

    fn connect(&mut self, effects: &mut Vec<Effect>) {
        let Some(route) = self.route.clone() else { return };
        self.number += 1;
        self.state = State::Connecting;
        effects.push(Effect::Connect { connection: self.number, route });
    }

    pub(super) fn connected(&mut self, number: u64) {
        if number == self.number && self.state == State::Connecting {
            self.state = State::Up;
        }
    }

    /// Parameters have arrived: the next failure is a new one.
    pub(super) fn works(&mut self) {
        self.retry = FIRST_RETRY;
    }

    /// The servers may only be late, so the same route is tried again until the master sends
    /// another. False if the news is about an earlier connection.
    pub(super) fn broken(&mut self, number: u64, now: Time) -> bool {
        if number != self.number || !self.is_used() {
            return false;
        }
        self.state = State::Down { retry_at: now + self.retry };
        self.retry = (self.retry * 2).min(LAST_RETRY);
        true
    }

    pub(super) fn retry_at(&self) -> Option<Time> {
        match self.state {
            State::Down { retry_at } => Some(retry_at),
            State::Idle | State::Connecting | State::Up => None,
        }
    }

    pub(super) fn retry_if_due(&mut self, now: Time, effects: &mut Vec<Effect>) {
        if self.retry_at().is_some_and(|at| now >= at) {
            self.connect(effects);
        }
    }

    pub(super) fn waiting_for(&self) -> WaitingFor {
        if self.route.is_some() { WaitingFor::Servers } else { WaitingFor::Route }
    }

    /// Ends every wait on the connection.
    pub(super) fn abort(&self, effects: &mut Vec<Effect>) {
        if self.is_up() {
            effects.push(Effect::Abort { connection: self.number });
        }
    }
}
