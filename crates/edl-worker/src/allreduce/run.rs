// SPDX-License-Identifier: Apache-2.0
//! The compute thread: performs what the machine decides, on the numbers that it is about.
//!
//! Nothing about the protocol is decided here. Activities block this thread.

mod activity;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::Receiver;

use edl_core::goodput;
use edl_core::id::{LeaseId, WorldId};
use edl_core::job::MemberCheckpoint;
use edl_core::member::{Effect, Event, Place};
use edl_core::metric::Metric;
use edl_core::optimizer::Clip;
use edl_net::mesh::Peer;

use super::interrupt::Interrupt;
use super::lanes::Lanes;
use super::mesh::Mesh;
use super::replica::{Recipe, Replica, STATE_PARTITION};
use super::shell::{MemberShell, Task};
use super::writer::Writer;
use crate::driver::{Driver, Shell};
use crate::evaluate::Evaluation;
use crate::feed::Decoded;
use crate::progress::Progress;

/// What the loop starts with.
pub(super) struct Setup {
    pub(super) driver: Driver<MemberShell>,
    pub(super) lanes: Lanes,
    pub(super) recipe: Recipe,
    pub(super) clip: Option<Clip>,
    pub(super) log_loss_steps: u64,
    pub(super) metrics: Vec<Metric>,
    pub(super) mesh: Box<dyn Mesh>,
    pub(super) writer: Writer,
    pub(super) interrupt: Arc<Interrupt>,
    pub(super) progress: Arc<Progress>,
}

/// The numbers that the machine's effects are about.
pub(super) struct Run {
    setup: Setup,
    replica: Option<Replica>,
    /// In the world that was entered last.
    place: usize,
    /// How the members of announced worlds are reached.
    peers: BTreeMap<WorldId, Vec<Peer>>,
    records: BTreeMap<Place, Decoded>,
    /// Of the shards in progress.
    shards: BTreeMap<LeaseId, Evaluation>,
    /// Memory for the mean gradient and the loss.
    mean: Vec<f32>,
    made: activity::Made,
}

impl Run {
    pub(super) fn new(setup: Setup) -> Self {
        Self {
            mean: vec![0.0; setup.lanes.len()],
            setup,
            replica: None,
            place: 0,
            peers: BTreeMap::new(),
            records: BTreeMap::new(),
            shards: BTreeMap::new(),
            made: activity::Made::Nothing,
        }
    }

    /// Works until the machine ends, or until the session is gone.
    pub(super) fn run(mut self, tasks: &Receiver<Task>) {
        for task in tasks {
            match task {
                Task::Effect(Effect::End) => break,
                Task::Effect(effect) => self.effect(effect),
                Task::Records(place, records) => drop(self.records.insert(place, records)),
                Task::Peers(world, peers) => drop(self.peers.insert(world, peers)),
                Task::Spare(spare) => self.setup.writer.spare = spare,
            }
        }
        let is_leader = self.setup.driver.with(|shell| shell.machine.leads_at_end()).flatten();
        if let (Some(replica), Some(is_leader)) = (&self.replica, is_leader) {
            self.setup.lanes.finish(replica.step(), is_leader, replica.dense());
        }
    }

    fn effect(&mut self, effect: Effect) {
        match effect {
            Effect::Start(activity) => {
                let result = self.perform(activity);
                self.setup.driver.handle(Event::Ended(result));
            }
            Effect::Prepare(world) => {
                let peers = self.peers.get(&world.id);
                self.setup.mesh.prepare(peers.map_or(&[][..], Vec::as_slice));
            }
            Effect::Forget(place) => drop(self.records.remove(&place)),
            Effect::Finish(lease) => {
                let evaluation = self.shards.remove(&lease);
                let evaluation = evaluation.unwrap_or_else(|| Evaluation::new(&self.setup.metrics));
                let result = Ok(evaluation.finish());
                self.setup.driver.handle(Event::Finished { lease, result });
            }
            Effect::DropShard(lease) => drop(self.shards.remove(&lease)),
            Effect::Write(order) => self.write(order),
            Effect::DropState => self.replica = None,
            Effect::HangUp => self.setup.lanes.tables().hang_up(),
            Effect::Report(_)
            | Effect::Read { .. }
            | Effect::Waste(_)
            | Effect::Cancel(_)
            | Effect::End
            | Effect::ExitNow => unreachable!("performed by the shell"),
        }
    }

    fn write(&mut self, order: MemberCheckpoint) {
        let Some(replica) = &self.replica else { return };
        let Setup { driver, progress, writer, lanes, recipe, .. } = &mut self.setup;
        let (spending, checkpoint) = (&progress.spending, order.checkpoint);
        driver.with(|_| spending.on(goodput::TimeKind::Checkpoint));
        let has_state = recipe.is_script() && order.partitions.contains(&STATE_PARTITION);
        let state = if has_state { lanes.state() } else { Ok(Vec::new()) };
        let written = state.and_then(|state| writer.write(order, replica, &state));
        driver.with(|shell| spending.on(shell.activity().spends));
        if let Err(error) = written {
            driver.handle(Event::Written { checkpoint, result: Err(error) });
        }
    }
}
