// SPDX-License-Identifier: Apache-2.0
//! Bounded staleness: a client too far ahead of the slowest one waits at its pull.
//!
//! A client that has pulled to train a batch is *open* at the version it pulled, until its push
//! is applied. Another client may pull while the server's version is less than `tolerance` beyond
//! the oldest open one. No client waits for one that waits here itself (they would wait for each
//! other), nor for one that has been open for longer than `patience`. With several servers, clients
//! ask one server after the other (`PsClient::pull_in_order`), so a client that others wait for
//! either computes or waits at a later server.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use super::Client;
use crate::time::Time;

/// The open pulls of all clients of one server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Window {
    tolerance: u64,
    patience: Duration,
    /// Per client its open pulls, oldest first.
    open: BTreeMap<Client, VecDeque<OpenPull>>,
    waiting: BTreeSet<Client>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct OpenPull {
    version: u64,
    since: Time,
}

impl Window {
    pub(super) fn new(tolerance: u64, patience: Duration) -> Self {
        Self { tolerance, patience, open: BTreeMap::new(), waiting: BTreeSet::new() }
    }

    /// The version of the open pull that `client` has to wait for, if any.
    pub(super) fn blocker(&self, client: Client, version: u64, now: Time) -> Option<u64> {
        let others = self
            .open
            .iter()
            .filter(|(other, _)| **other != client && !self.waiting.contains(*other));
        let live = |pull: &&OpenPull| now.since(pull.since) < self.patience;
        let oldest = others.flat_map(|(_, pulls)| pulls.iter().filter(live));
        let oldest = oldest.map(|pull| pull.version).min()?;
        (version.saturating_sub(oldest) >= self.tolerance).then_some(oldest)
    }

    /// `client` has to wait; false if it did already.
    pub(super) fn wait(&mut self, client: Client) -> bool {
        self.waiting.insert(client)
    }

    /// `client` pulls at `version` now.
    pub(super) fn pull(&mut self, client: Client, version: u64, now: Time) {
        self.waiting.remove(&client);
        self.open.entry(client).or_default().push_back(OpenPull { version, since: now });
    }

    /// A push of what `client` pulled at `version` is applied or refused. Older pulls, if there are any,
    /// will not be followed by a push: batches are pushed in the order in which they are pulled.
    pub(super) fn pushed(&mut self, client: Client, version: u64) {
        if let Some(pulls) = self.open.get_mut(&client) {
            while pulls.front().is_some_and(|pull| pull.version < version) {
                pulls.pop_front();
            }
            // Several pulls may have the same version; one push answers one of them.
            if pulls.front().is_some_and(|pull| pull.version == version) {
                pulls.pop_front();
            }
        }
    }

    /// When the next open pull is overdue, if a client waits.
    pub(super) fn next_expiry(&self, now: Time) -> Option<Time> {
        let expiry = |pull: &OpenPull| pull.since + self.patience;
        let expiries = self.open.values().flatten().map(expiry).filter(|expiry| *expiry > now);
        if self.waiting.is_empty() { None } else { expiries.min() }
    }

    /// `client` is gone.
    pub(super) fn leave(&mut self, client: Client) {
        self.waiting.remove(&client);
        self.open.remove(&client);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ANN: Client = Client([1; 16]);
    const BOB: Client = Client([2; 16]);
    const PATIENCE: Duration = Duration::from_secs(5);

    fn window() -> Window {
        Window::new(2, PATIENCE)
    }

    #[test]
    fn the_fast_wait_for_the_slowest_open_pull_until_its_push() {
        let mut window = window();
        window.pull(ANN, 10, Time::ZERO);
        assert_eq!(window.blocker(BOB, 11, Time::ZERO), None);
        assert_eq!(window.blocker(BOB, 12, Time::ZERO), Some(10));
        assert_eq!(window.blocker(ANN, 12, Time::ZERO), None, "no client waits for itself");
        window.pushed(ANN, 10);
        assert_eq!(window.blocker(BOB, 12, Time::ZERO), None);
    }

    #[test]
    fn two_pulls_ahead_need_two_pushes() {
        let mut window = window();
        window.pull(ANN, 10, Time::ZERO);
        window.pull(ANN, 10, Time::ZERO);
        window.pull(ANN, 11, Time::ZERO);
        window.pushed(ANN, 10);
        assert_eq!(window.blocker(BOB, 12, Time::ZERO), Some(10));
        window.pushed(ANN, 11);
        assert_eq!(window.blocker(BOB, 12, Time::ZERO), None, "the second was overtaken");
    }

    #[test]
    fn a_client_that_waits_itself_or_left_or_is_overdue_blocks_no_other() {
        let mut window = window();
        window.pull(ANN, 10, Time::ZERO);
        assert!(window.wait(ANN));
        assert!(!window.wait(ANN));
        assert_eq!(window.blocker(BOB, 20, Time::ZERO), None);
        window.pull(ANN, 11, Time::ZERO);
        assert_eq!(window.blocker(BOB, 20, Time::ZERO), Some(10));
        assert_eq!(window.blocker(BOB, 20, Time::ZERO + PATIENCE), None);
        window.leave(ANN);
        assert_eq!(window.blocker(BOB, 20, Time::ZERO), None);
    }
}
