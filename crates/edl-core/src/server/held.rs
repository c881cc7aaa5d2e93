// SPDX-License-Identifier: Apache-2.0
//! The generation that a server holds: how far its partitions are, and what is in progress.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Duration;

use super::checkpoints::Checkpoint;
use super::window::Window;
use super::{Client, Loading, Outcome, Part, Progress, Pull, Push, Refusal, Request};
use crate::id::{BatchId, CheckpointId, Generation, PartitionId};
use crate::spec::Mode;
use crate::time::Time;

/// Bounded staleness: no client is waited for longer than this.
const WINDOW_PATIENCE: Duration = Duration::from_secs(30);

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Held {
    pub(super) generation: Generation,
    pub(super) partitions: Range<u32>,
    /// Whether the master has ordered to answer workers.
    pub(super) is_served: bool,
    /// Per partition.
    progress: Vec<Progress>,
    window: Option<Window>,
    /// Pushes at the owners.
    pub(super) pushes: BTreeMap<Request, Applying>,
    pub(super) checkpoints: BTreeMap<CheckpointId, Checkpoint>,
}

/// A push, and which partitions do not have it yet.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Applying {
    batch: BatchId,
    client: Client,
    base_version: u64,
    is_missing: Vec<bool>,
    n_missing: usize,
}

/// Whether a pull can be answered.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Verdict {
    /// With the version that it no longer waits for.
    Answer {
        gave_up: Option<u64>,
    },
    Refuse(Refusal),
    WaitForPushes,
    WaitInWindow,
}

impl Applying {
    fn applied(&mut self, place: usize) {
        self.n_missing -= usize::from(std::mem::take(&mut self.is_missing[place]));
    }
}

impl Held {
    pub(super) fn new(load: &Loading, progress: Vec<Progress>) -> Self {
        let Loading { generation, partitions, mode } = load.clone();
        assert_eq!(progress.len(), partitions.len(), "every partition is loaded");
        let window = match mode {
            Mode::Bounded { versions } => Some(Window::new(u64::from(versions), WINDOW_PATIENCE)),
            Mode::Async | Mode::Sync { .. } | Mode::Steps { .. } => None,
        };
        let (pushes, checkpoints) = (BTreeMap::new(), BTreeMap::new());
        let is_served = false;
        Self { generation, partitions, is_served, progress, window, pushes, checkpoints }
    }

    pub(super) fn version(&self) -> u64 {
        self.progress.iter().map(|progress| progress.version).min().unwrap_or(0)
    }

    pub(super) fn n_rows(&self) -> u64 {
        self.progress.iter().map(|progress| progress.n_rows).sum()
    }

    /// When a client that others wait for in the window is overdue.
    pub(super) fn window_expiry(&self, now: Time) -> Option<Time> {
        self.window.as_ref().and_then(|window| window.next_expiry(now))
    }

    /// Whether `pull`, which is for this generation, can be answered. It waits until `deadline`.
    pub(super) fn verdict(&self, pull: &Pull, deadline: Time, now: Time) -> Verdict {
        if let Err(refusal) = self.expect_partitions(&pull.partitions) {
            return Verdict::Refuse(refusal);
        }
        if let Some(step) = pull.step
            && let Err(refusal) = self.expect_step(step)
        {
            return Verdict::Refuse(refusal);
        }
        let is_expired = now >= deadline;
        if let Some(round) = pull.min_round
            && let Some((partition, applied)) = self.slowest()
            && applied < round
        {
            let text = format!("{round} rounds: partition {partition} has applied {applied}");
            return if is_expired {
                Verdict::Refuse(Refusal::Waited(text))
            } else {
                Verdict::WaitForPushes
            };
        }
        let window = self.window.as_ref().filter(|_| pull.will_push);
        match window.and_then(|window| window.blocker(pull.client, self.version(), now)) {
            Some(_) if !is_expired => Verdict::WaitInWindow,
            gave_up => Verdict::Answer { gave_up },
        }
    }

    /// `pull` is answered now.
    pub(super) fn answered(&mut self, pull: &Pull, now: Time) {
        let version = self.version();
        if let Some(window) = self.window.as_mut().filter(|_| pull.will_push) {
            window.pull(pull.client, version, now);
        }
    }

    /// `pull` waits in the window; false if its client did already.
    pub(super) fn waits_in_window(&mut self, pull: &Pull) -> bool {
        self.window.as_mut().is_some_and(|window| window.wait(pull.client))
    }

    pub(super) fn left(&mut self, client: Client) {
        if let Some(window) = &mut self.window {
            window.leave(client);
        }
    }

    /// Takes a push for the owners.
    pub(super) fn push(&mut self, push: &Push) -> Result<(), Refusal> {
        self.expect_partitions(&push.partitions)?;
        let n_missing = self.partitions.len();
        let is_missing = vec![true; n_missing];
        let Push { request, batch, client, base_version, .. } = *push;
        self.pushes
            .insert(request, Applying { batch, client, base_version, is_missing, n_missing });
        Ok(())
    }

    /// The owners no longer work on a push. True if they did.
    pub(super) fn end_push(&mut self, request: Request) -> bool {
        let Some(push) = self.pushes.remove(&request) else { return false };
        if let Some(window) = &mut self.window {
            window.pushed(push.client, push.base_version);
        }
        true
    }

    /// What an owner did with a push. Returns the pushes that every partition has now, or why
    /// this one is refused.
    pub(super) fn pushed(
        &mut self,
        request: Request,
        parts: Vec<Part>,
    ) -> (Vec<Request>, Option<String>) {
        let mut refused = None;
        for Part { partition, outcome, progress } in parts {
            let place = (partition.0 - self.partitions.start) as usize;
            self.progress[place] = progress;
            match outcome {
                Outcome::Already | Outcome::Applied | Outcome::Kept => {
                    self.applied(request, place);
                }
                Outcome::Staged => {}
                Outcome::Round(batches) => {
                    let in_round = self.pushes.values_mut();
                    let in_round = in_round.filter(|push| batches.contains(&push.batch));
                    in_round.for_each(|push| push.applied(place));
                }
                Outcome::Refused(error) => refused = Some(error),
            }
        }
        if refused.is_some() {
            self.end_push(request);
        }
        let is_done = |(_, push): &(&Request, &Applying)| push.n_missing == 0;
        let done: Vec<Request> = self.pushes.iter().filter(is_done).map(|(it, _)| *it).collect();
        for request in &done {
            self.end_push(*request);
        }
        (done, refused)
    }

    fn applied(&mut self, request: Request, place: usize) {
        if let Some(push) = self.pushes.get_mut(&request) {
            push.applied(place);
        }
    }

    pub(super) fn hosts(&self, partition: PartitionId) -> bool {
        self.partitions.contains(&partition.0)
    }

    fn expect_partitions(&self, asked: &Range<u32>) -> Result<(), Refusal> {
        if *asked == self.partitions {
            return Ok(());
        }
        Err(Refusal::Other(format!(
            "requested partitions {}..{}; this server holds {}..{}",
            asked.start, asked.end, self.partitions.start, self.partitions.end
        )))
    }

    /// Every partition has the rows of `step` if it is at that step, or one step past it.
    fn expect_step(&self, step: u64) -> Result<(), Refusal> {
        let versions = || self.progress.iter().map(|progress| progress.version);
        let (least, most) = (versions().min().unwrap_or(0), versions().max().unwrap_or(0));
        if step <= least && most <= step + 1 {
            return Ok(());
        }
        let at = if step > least { least } else { most };
        Err(Refusal::StepMismatch(format!("requested step {step}; this server is at step {at}")))
    }

    /// The partition that has applied the fewest rounds, and how many.
    fn slowest(&self) -> Option<(u32, u64)> {
        let rounds = self.progress.iter().map(|progress| progress.round);
        self.partitions.clone().zip(rounds).min_by_key(|(_, round)| *round)
    }

    pub(super) fn check_invariants(&self) {
        assert_eq!(self.progress.len(), self.partitions.len(), "every partition has its progress");
        assert!(self.is_served || self.pushes.is_empty(), "pushes come after the order to serve");
        for (request, push) in &self.pushes {
            let n_missing = push.is_missing.iter().filter(|is_missing| **is_missing).count();
            assert_eq!(push.n_missing, n_missing, "the count of {request:?} is right");
            let is_open = n_missing > 0 || self.partitions.is_empty();
            assert!(is_open, "{request:?} is applied and not acknowledged");
        }
        for checkpoint in self.checkpoints.values() {
            checkpoint.check_invariants(&self.partitions);
        }
    }
}
