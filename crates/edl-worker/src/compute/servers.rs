// SPDX-License-Identifier: Apache-2.0
//! The compute thread's side of its connection to the servers: which route it follows, whether
//! it stands, and when to try again.

use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use edl_core::id::Generation;
use edl_net::data::Route;
use tracing::{debug, info, warn};

use crate::link::Ask;
use crate::servers::{Abort, Error};

const FIRST_RETRY: Duration = Duration::from_millis(50);
const LAST_RETRY: Duration = Duration::from_secs(1);

/// One connection after another, each with a number.
pub(super) struct Connection {
    link: Sender<(u64, Ask)>,
    number: u64,
    route: Option<Route>,
    state: State,
    retry: Duration,
}

enum State {
    /// No route yet.
    Idle,
    Connecting,
    Up {
        abort: Abort,
        has_worked: bool,
    },
    Down {
        retry_at: Instant,
    },
}

impl Connection {
    pub(super) fn new(link: Sender<(u64, Ask)>) -> Self {
        Self { link, number: 0, route: None, state: State::Idle, retry: FIRST_RETRY }
    }

    pub(super) fn number(&self) -> u64 {
        self.number
    }

    pub(super) fn generation(&self) -> Option<Generation> {
        self.route.as_ref().map(|route| route.generation)
    }

    pub(super) fn is_up(&self) -> bool {
        matches!(self.state, State::Up { .. })
    }

    /// Connects along `route`, unless that is the one followed already; true if so.
    pub(super) fn follow(&mut self, route: Route) -> bool {
        let is_same = self.route.as_ref() == Some(&route);
        let stands = match self.state {
            State::Up { .. } | State::Connecting => true,
            State::Idle | State::Down { .. } => false,
        };
        if is_same && stands {
            return false;
        }
        info!(generation = %route.generation, servers = route.servers.len(), "route received");
        self.abort();
        self.route = Some(route);
        self.retry = FIRST_RETRY;
        self.connect();
        true
    }

    fn connect(&mut self) {
        let Some(route) = self.route.clone() else { return };
        self.number += 1;
        self.state = State::Connecting;
        self.ask(Ask::Connect(route));
    }

    pub(super) fn ask(&self, ask: Ask) {
        // A link that is gone says so by an event.
        let _ = self.link.send((self.number, ask));
    }

    pub(super) fn connected(&mut self, abort: Abort) {
        debug!(generation = %self.generation().unwrap_or_default(), "servers connected");
        self.state = State::Up { abort, has_worked: false };
    }

    /// Parameters have come: the next failure is a new one.
    pub(super) fn works(&mut self) {
        self.retry = FIRST_RETRY;
        if let State::Up { has_worked, .. } = &mut self.state {
            *has_worked = true;
        }
    }

    /// The connection broke or never stood. The servers may only be late, so the same route is
    /// tried again until the master sends another.
    pub(super) fn broken(&mut self, error: &Error) {
        if matches!(self.state, State::Up { has_worked: true, .. }) {
            warn!(reason = %error, "servers lost");
        } else {
            debug!(reason = %error, "cannot reach the servers");
        }
        self.state = State::Down { retry_at: Instant::now() + self.retry };
        self.retry = (self.retry * 2).min(LAST_RETRY);
    }

    pub(super) fn retry_at(&self) -> Option<Instant> {
        match self.state {
            State::Down { retry_at } => Some(retry_at),
            State::Idle | State::Connecting | State::Up { .. } => None,
        }
    }

    pub(super) fn retry_if_due(&mut self) {
        if self.retry_at().is_some_and(|at| Instant::now() >= at) {
            self.connect();
        }
    }

    pub(super) fn waiting_for(&self) -> &'static str {
        if self.route.is_some() { "parameter servers" } else { "a route from the master" }
    }

    /// Makes every wait on the connection end at once.
    pub(super) fn abort(&mut self) {
        if let State::Up { abort, .. } = &self.state {
            abort();
        }
    }
}
