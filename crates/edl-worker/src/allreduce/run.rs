// SPDX-License-Identifier: Apache-2.0
//! The training loop: one decision after another, each from what has been heard.
//!
//! A worker is *in* a world when it trains with its members, and *between* worlds otherwise:
//! before the first, after a peer was lost or a step failed here, or when it is left out. There
//! is one way in, [`Run::enter`], whatever the reason for the change.

mod evaluate;
mod form;
mod pace;
mod step;

use std::sync::Arc;
use std::time::Instant;

use edl_core::batch::BatchPlan;
use edl_core::goodput;
use edl_core::id::{Incarnation, LeaseId, WorkerId, WorldId};
use edl_core::optimizer::Clip;
use edl_net::proto::{self, worker_message::Kind};
use tokio::sync::mpsc;

use super::cut::{self, Writer};
use super::inbox::Inbox;
use super::lanes::Lanes;
use super::mesh::Mesh;
use super::replica::{Recipe, Replica};
use super::seat::Seat;
use super::world::World;
use crate::compute::Died;
use crate::progress::Progress;

/// What the loop starts with.
pub(super) struct Setup {
    pub(super) me: (WorkerId, Incarnation),
    pub(super) lanes: Lanes,
    pub(super) recipe: Recipe,
    pub(super) plan: BatchPlan,
    pub(super) n_lanes: u32,
    /// 0 goes on until stopped.
    pub(super) num_epochs: u32,
    pub(super) clip: Option<Clip>,
    pub(super) log_loss_steps: u64,
    pub(super) lane_balance: bool,
    pub(super) mesh: Box<dyn Mesh>,
    pub(super) inbox: Inbox,
    pub(super) writer: Writer,
    pub(super) reports: mpsc::Sender<Kind>,
    pub(super) seat: Arc<Seat>,
    pub(super) progress: Arc<Progress>,
}

/// The loop's state.
pub(super) struct Run {
    setup: Setup,
    replica: Option<Replica>,
    /// The world that it is in.
    world: Option<World>,
    /// The last world whose state it holds.
    held: WorldId,
    /// The world that links are being made for.
    prepared: WorldId,
    /// When it stopped training, between worlds.
    left: Option<Instant>,
    /// Memory for the mean gradient and the loss.
    mean: Vec<f32>,
    made: step::Made,
    unreported: Option<proto::Stepped>,
    reported: Option<Instant>,
    /// What was said last about a world and about a step, to be said again to a master that may
    /// not have heard it.
    last_word: Option<Kind>,
    last_step: Option<proto::Stepped>,
    pace: pace::Pace,
}

/// What to do next.
enum Action {
    Enter(World),
    Evaluate(LeaseId),
    Train,
    /// Nothing until somebody says something.
    Wait,
    End,
}

impl Run {
    pub(super) fn new(setup: Setup) -> Self {
        Self {
            mean: vec![0.0; setup.lanes.len()],
            made: step::Made::Nothing,
            pace: pace::Pace::new(setup.lane_balance),
            setup,
            replica: None,
            world: None,
            held: WorldId(0),
            prepared: WorldId(0),
            left: None,
            unreported: None,
            reported: None,
            last_word: None,
            last_step: None,
        }
    }

    /// Trains until it is told to go, or until the session is gone.
    pub(super) fn run(mut self) -> Result<(), Died> {
        loop {
            self.setup.inbox.drain()?;
            self.repeat();
            self.prepare();
            self.cut();
            match self.decide() {
                Action::Enter(world) => self.enter(world),
                Action::Evaluate(lease) => self.evaluate(lease)?,
                Action::Train => self.train()?,
                Action::Wait => {
                    self.flush();
                    self.name_wait();
                    self.setup.inbox.wait()?;
                }
                Action::End => break,
            }
        }
        self.flush();
        if let Some(replica) = &self.replica {
            self.setup.lanes.finish(replica.dense());
        }
        self.setup.progress.busy("writing the last checkpoint");
        self.setup.writer.finish();
        Ok(())
    }

    fn decide(&mut self) -> Action {
        if self.setup.inbox.is_over {
            return Action::End;
        }
        let step = self.replica.as_ref().map(Replica::step);
        let is_in = self.world.is_some();
        // Whoever is between worlds has nothing to finish before the next one.
        let (worker, incarnation) = self.setup.me;
        let is_due = |next: &mut World| {
            !is_in || step >= next.after || next.is_due_at_once(worker, incarnation)
        };
        if let Some(next) = self.setup.inbox.next.take_if(is_due) {
            return Action::Enter(next);
        }
        if self.setup.inbox.is_leaving && !is_in {
            return Action::End;
        }
        let Some(step) = step else { return Action::Wait };
        let mut shards = self.setup.inbox.shards.iter();
        if let Some((lease, _)) = shards.find(|(_, lent)| lent.version <= step) {
            return Action::Evaluate(*lease);
        }
        match &self.world {
            Some(world) if step < self.setup.inbox.until(world) => Action::Train,
            Some(_) | None => Action::Wait,
        }
    }

    /// Says again what may have been lost with a stream.
    fn repeat(&mut self) {
        if !std::mem::take(&mut self.setup.inbox.is_rejoined) {
            return;
        }
        if let Some(word) = self.last_word.clone() {
            self.report(word);
        }
        self.unreported = self.unreported.take().or(self.last_step);
        self.flush();
    }

    fn name_wait(&self) {
        let (phase, kind) = match (&self.world, self.setup.inbox.is_leaving) {
            (Some(_), false) => ("waiting for the next step", goodput::Kind::Idle),
            (Some(_), true) => ("leaving", goodput::Kind::Idle),
            (None, _) => ("between worlds", self.healing()),
        };
        self.setup.progress.spending.on(kind);
        self.setup.progress.waiting(phase, "master");
    }

    /// Between worlds one heals, unless one has never been in any.
    fn healing(&self) -> goodput::Kind {
        let has_worked = self.held != WorldId(0);
        if has_worked { goodput::Kind::Heal } else { goodput::Kind::Idle }
    }

    /// Makes links for a world that is named but not due.
    fn prepare(&mut self) {
        let Setup { inbox, mesh, me, .. } = &mut self.setup;
        if let Some(next) = &inbox.next
            && next.id > self.prepared
            && next.place_of(me.0, me.1).is_some()
        {
            mesh.prepare(&next.members);
            self.prepared = next.id;
        }
    }

    /// Begins the cuts of the step that it holds; gives up those that can never be.
    fn cut(&mut self) {
        let Some(replica) = &self.replica else { return };
        let Setup { inbox, writer, recipe, progress, .. } = &mut self.setup;
        let step = replica.step();
        let is_due =
            |cut: &mut proto::CutAt| cut.at <= step || cut.generation != replica.generation.0;
        let due: Vec<proto::CutAt> = inbox.cuts.extract_if(.., is_due).collect();
        if due.is_empty() {
            return;
        }
        progress.spending.on(goodput::Kind::Checkpoint);
        let mut answers = Vec::new();
        for order in due {
            let answer = if order.generation != replica.generation.0 {
                let error = format!("this worker does not hold generation {}", order.generation);
                Some(cut::failed(&order, error))
            } else if order.at < step {
                let error = format!("step {} has passed: this worker is at step {step}", order.at);
                Some(cut::failed(&order, error))
            } else {
                writer.cut(order, replica, recipe.n_partitions())
            };
            answers.extend(answer);
        }
        self.flush();
        answers.into_iter().for_each(|answer| self.report(answer));
    }

    /// Reports the last step, if it has not been.
    fn flush(&mut self) {
        if let Some(mut stepped) = self.unreported.take() {
            if stepped.hash == step::UNTOLD {
                stepped.hash = self.hash();
            }
            self.reported = Some(Instant::now());
            self.last_step = Some(stepped);
            self.report(Kind::Stepped(stepped));
        }
    }

    /// Says how this worker stands to its world.
    fn say(&mut self, word: Kind) {
        self.last_word = Some(word.clone());
        self.report(word);
    }

    fn report(&mut self, report: Kind) {
        // The session takes reports as long as it lives, connected or not.
        self.setup.inbox.is_over |= self.setup.reports.blocking_send(report).is_err();
    }
}
