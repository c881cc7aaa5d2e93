// SPDX-License-Identifier: Apache-2.0
//! The training loop: one decision after another, each from what has been heard.
//!
//! A worker is *in* a world when it trains with its members, and *between* worlds otherwise:
//! before the first, after a peer was lost or a step failed here, or when it is left out. There
//! is one way in, [`Run::enter`], whatever the reason for the change.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use edl_core::batch::BatchPlan;
use edl_core::id::{Incarnation, LeaseId, WorkerId, WorldId};
use edl_core::lanes::{Span, nodes_within, share_out};
use edl_net::proto::{self, worker_message::Kind};
use edl_tensor::clip;
use edl_tensor::model::Gradient;
use tokio::sync::mpsc;
use tracing::{debug, info, warn};

use super::cut::{self, Writer};
use super::inbox::{Halt, Inbox, Lent, Place};
use super::lanes::{Lanes, Step, hash};
use super::mesh::{Error, Mesh};
use super::replica::{Recipe, Replica, batch_of};
use super::seat::Seat;
use super::world::{World, hear_step, level, tell_step};
use crate::chain;
use crate::compute::{Died, loss_line};
use crate::feed::Read;
use crate::progress::Progress;

/// Steps are not reported more often than this, but for those that somebody waits for.
const REPORT_EVERY: Duration = Duration::from_millis(20);
/// Steps whose records are read beyond the one at hand.
const READ_AHEAD: u64 = 1;
/// Minibatches of a shard that are read beyond the one at hand.
const PIECES_AHEAD: u32 = 2;
/// Numbers of the exchanges within a world.
const LEVEL: u64 = 0;
const FAREWELL: u64 = 1;

/// What the loop starts with.
pub(super) struct Setup {
    pub(super) me: (WorkerId, Incarnation),
    pub(super) lanes: Lanes,
    pub(super) recipe: Recipe,
    pub(super) plan: BatchPlan,
    pub(super) n_lanes: u32,
    /// 0 goes on until stopped.
    pub(super) num_epochs: u32,
    pub(super) clip_norm: Option<f64>,
    pub(super) log_loss_steps: u64,
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
    unreported: Option<proto::Stepped>,
    reported: Option<Instant>,
    /// What was said last about a world and about a step, to be said again to a master that may
    /// not have heard it.
    last_word: Option<Kind>,
    last_step: Option<proto::Stepped>,
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
        self.setup.progress.busy("writing the last cut");
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
        let is_due =
            |next: &mut World| next.after.is_none_or(|after| !is_in || step >= Some(after));
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
        self.unreported = self.unreported.take().or_else(|| self.last_step.clone());
        self.flush();
    }

    fn name_wait(&self) {
        let phase = match (&self.world, self.setup.inbox.is_leaving) {
            (Some(_), false) => "at the granted step",
            (Some(_), true) => "leaving",
            (None, _) => "between worlds",
        };
        self.setup.progress.waiting(phase, "master");
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
        let Setup { inbox, writer, recipe, .. } = &mut self.setup;
        let step = replica.step();
        let is_due =
            |cut: &mut proto::CutAt| cut.at <= step || cut.generation != replica.generation.0;
        let due: Vec<proto::CutAt> = inbox.cuts.extract_if(.., is_due).collect();
        if due.is_empty() {
            return;
        }
        let mut answers = Vec::new();
        for order in due {
            let answer = if order.generation != replica.generation.0 {
                let error = format!("the worker does not hold generation {}", order.generation);
                Some(cut::failed(&order, error))
            } else if order.at < step {
                let error = format!("step {} is over: the worker is at step {step}", order.at);
                Some(cut::failed(&order, error))
            } else {
                writer.cut(order, replica, recipe.n_partitions())
            };
            answers.extend(answer);
        }
        self.flush();
        answers.into_iter().for_each(|answer| self.report(answer));
    }
}

/// From world to world.
impl Run {
    /// Leaves the world before and enters `next`, if this worker is in it.
    fn enter(&mut self, next: World) {
        self.flush();
        self.setup.progress.busy("forming a world");
        if let Some(before) = self.world.take() {
            self.left = Some(Instant::now());
            if next.after.is_some() && before.loses_members_in(&next) {
                // Nobody goes before the last step has reached everybody. All that could fail
                // here is what the next world finds out anyway.
                let _ = self.setup.mesh.exchange(FAREWELL, &[]);
            }
        }
        let (worker, incarnation) = self.setup.me;
        let Some(place) = next.place_of(worker, incarnation) else {
            info!(world = %next.id, "left out of the world");
            return;
        };
        if next.load.is_some() || !next.members[place].has_state {
            self.hold(None);
        }
        if let Some(load) = &next.load {
            match self.load(load, &next) {
                Ok(replica) => self.hold(Some(replica)),
                Err(error) => {
                    let error = chain(&error);
                    warn!(world = %next.id, error, "cannot load");
                    let generation = next.generation.0;
                    self.say(Kind::LoadFailed(proto::LoadFailed { generation, error }));
                    return;
                }
            }
        }
        match self.form(&next, place) {
            Ok(state_bytes) => self.formed(next, state_bytes),
            Err(error) => self.lost(next.id, error),
        }
    }

    fn load(&self, load: &proto::Load, world: &World) -> Result<Replica, super::replica::Error> {
        let recipe = &self.setup.recipe;
        if load.checkpoint.is_empty() {
            return Ok(recipe.first_values(world.generation));
        }
        recipe.load(Path::new(&load.checkpoint), load.keep_applied, world.generation)
    }

    /// Brings all members to the highest of their steps; the bytes of state received.
    fn form(&mut self, world: &World, place: usize) -> Result<u64, Error> {
        let Setup { mesh, recipe, .. } = &mut self.setup;
        mesh.enter(world.id, place, &world.members)?;
        let mine = tell_step(self.replica.as_ref().map(Replica::step));
        let told = mesh.exchange(LEVEL, &mine)?;
        let steps: Vec<Option<u64>> = told.iter().map(|bytes| hear_step(bytes)).collect();
        let n_partitions = recipe.n_partitions();
        let Some((step, moves)) = level(&steps, n_partitions) else {
            return Err(Error::Other("no member of the world holds any state".into()));
        };
        let is_behind = steps[place] != Some(step);
        let replica = self.replica.as_ref();
        let mut arrived = Vec::new();
        arrived.resize_with(if is_behind { n_partitions as usize } else { 0 }, || None);
        let mut encode =
            |item: u32| replica.expect("only those who have state are asked for it").encode(item);
        let mut n_bytes = 0;
        let mut accept = |item: u32, bytes: Vec<u8>| {
            n_bytes += bytes.len() as u64;
            let partition = recipe.decode(item, &bytes).map_err(|error| chain(&error))?;
            let slot = arrived.get_mut(item as usize).ok_or("a partition too many")?;
            *slot = Some(partition);
            Ok(())
        };
        mesh.transfer(&moves, &mut encode, &mut accept)?;
        if is_behind {
            let partitions = arrived.into_iter().flatten().collect();
            let assembled = recipe.assemble(partitions, world.generation);
            let replica = assembled.map_err(|error| Error::Other(chain(&error)))?;
            self.hold(Some(replica));
        }
        Ok(n_bytes)
    }

    fn formed(&mut self, world: World, state_bytes: u64) {
        let Some(replica) = &mut self.replica else { return };
        replica.generation = world.generation;
        let step = replica.step();
        self.held = world.id;
        self.setup.seat.holds(world.id, step);
        self.setup.progress.at_step(step);
        let pause = self.left.take().map_or(Duration::ZERO, |left| left.elapsed());
        let transport = self.setup.mesh.transport();
        let n_members = world.members.len();
        info!(world = %world.id, step, n_members, state_bytes, transport, ?pause, "world formed");
        self.say(Kind::Formed(proto::Formed {
            world: world.id.0,
            step,
            pause_secs: pause.as_secs_f64(),
            state_bytes,
            transport,
        }));
        self.world = Some(world);
    }

    /// Leaves a world whose call failed, and says why if others cannot know.
    fn lost(&mut self, world: WorldId, error: Error) {
        self.world = None;
        self.left.get_or_insert_with(Instant::now);
        self.flush();
        let (suspect, error) = match error {
            Error::Aborted => {
                debug!(%world, "left the world");
                return;
            }
            Error::Lost { peer, error } => (peer, error),
            Error::Other(error) => (self.setup.me.0, error),
        };
        warn!(%world, %suspect, error, "a member of the world is lost");
        let (world, suspect) = (world.0, suspect.0);
        self.say(Kind::PeerLost(proto::PeerLost { world, suspect, error }));
    }

    /// Replaces the state. Nobody is told of a world before it has formed.
    fn hold(&mut self, replica: Option<Replica>) {
        self.replica = replica;
        let (world, step) = match &self.replica {
            Some(replica) if self.held != WorldId(0) => (self.held, replica.step()),
            Some(_) | None => (WorldId(0), 0),
        };
        if self.replica.is_none() {
            self.held = WorldId(0);
        }
        self.setup.seat.holds(world, step);
    }
}

/// Within a world.
impl Run {
    /// Takes one step with all members.
    fn train(&mut self) -> Result<(), Died> {
        let (Some(world), Some(replica)) = (&self.world, &self.replica) else { return Ok(()) };
        let (id, step, batch) = (world.id, replica.step(), replica.next_batch());
        let (worker, incarnation) = self.setup.me;
        let place = world.place_of(worker, incarnation).expect("a member is in its world");
        let mine = world.members[place].lanes.clone();
        self.read_ahead(step, &mine);

        self.setup.progress.busy("training");
        let Some(dense) = self.replica.as_ref().map(Replica::dense) else { return Ok(()) };
        let Setup { mesh, inbox, lanes, plan, n_lanes, .. } = &mut self.setup;
        let n_records = n_records(plan, batch.index);
        let n_active = n_active(plan, *n_lanes, batch.index);
        let mut records = |lane| inbox.records(Place::Lane(batch, lane));
        let buffers = mesh.buffers(n_active, lanes.len());
        let mut nodes = nodes_within(n_active, &mine).into_iter().zip(buffers);
        let trained = nodes.try_for_each(|(node, buffer)| {
            lanes.sum(Step { batch, dense }, &node, buffer, &mut records)
        });
        match trained {
            Ok(()) => {}
            Err(Halt::Interrupted) => return Ok(()),
            Err(Halt::Died(died)) => return Err(died),
            Err(Halt::Failed(error)) => {
                self.failed(id, step, error);
                return Ok(());
            }
        }
        self.setup.progress.busy("reducing");
        self.mean.resize(self.setup.lanes.len(), 0.0);
        let reduced =
            self.setup.mesh.all_reduce(step + 1, n_active, n_records as f32, &mut self.mean);
        match reduced {
            Ok(()) => self.apply(id, n_records),
            Err(error) => self.lost(id, error),
        }
        Ok(())
    }

    /// Takes the step whose mean gradient and loss are in `self.mean`.
    fn apply(&mut self, world: WorldId, n_records: u32) {
        let Some(replica) = &mut self.replica else { return };
        let mut mean = std::mem::take(&mut self.mean);
        let hash = hash(&mean);
        let loss = mean.pop().expect("the loss rides along");
        if !loss.is_finite() {
            let (step, batch) = (replica.step(), replica.next_batch());
            self.failed(world, step, format!("the loss is not a number (batch {batch})"));
            return;
        }
        let mut gradient = Gradient { dense: mean, rows: Vec::new() };
        if let Some(limit) = self.setup.clip_norm {
            clip::clip(&mut gradient, self.setup.lanes.spec(), limit);
        }
        self.mean = replica.apply(n_records, gradient.dense);
        let step = replica.step();
        self.setup.progress.at_step(step);
        self.setup.seat.holds(world, step);
        let every = self.setup.log_loss_steps;
        if step == 1 || (every > 0 && step.is_multiple_of(every)) {
            info!("{}", loss_line(loss, step));
        }
        self.unreported = Some(proto::Stepped { world: world.0, step, hash, loss });
        if self.reported.is_none_or(|reported| reported.elapsed() >= REPORT_EVERY) {
            self.flush();
        }
    }

    /// Leaves the world because the next step cannot be trained here.
    fn failed(&mut self, world: WorldId, step: u64, error: String) {
        warn!(%world, step, error, "the step failed here");
        self.world = None;
        self.left = Some(Instant::now());
        self.flush();
        self.say(Kind::StepFailed(proto::StepFailed { world: world.0, step, error }));
    }

    /// Asks for the records of this worker's lanes in the step at hand and in those after it.
    fn read_ahead(&mut self, step: u64, mine: &Span) {
        let Setup { inbox, plan, n_lanes, num_epochs, .. } = &mut self.setup;
        let steps = step..=step + READ_AHEAD;
        let batches: Vec<_> = steps.map(|step| batch_of(step, plan.n_batches())).collect();
        inbox.keep(|place| match place {
            Place::Piece(..) => true,
            Place::Lane(batch, lane) => batches.contains(&batch) && mine.contains(&lane),
        });
        for (ahead, batch) in batches.into_iter().enumerate() {
            let is_past_end = *num_epochs > 0 && batch.epoch >= *num_epochs;
            if ahead > 0 && is_past_end {
                continue;
            }
            let end = mine.end.min(n_active(plan, *n_lanes, batch.index));
            for lane in mine.start..end {
                inbox.ask(Place::Lane(batch, lane), || Read::Lane(batch, lane));
            }
        }
    }

    /// Measures the next minibatch of a shard.
    fn evaluate(&mut self, lease: LeaseId) -> Result<(), Died> {
        self.flush();
        let Setup { inbox, lanes, progress, .. } = &mut self.setup;
        let Some(replica) = &self.replica else { return Ok(()) };
        let Some(Lent { version, shard, n_done }) = inbox.shards.get(&lease) else { return Ok(()) };
        let (step, piece, n_pieces) = (replica.step(), *n_done, shard.n_pieces());
        if *version != step {
            let error = format!("step {version} is over: the worker is at step {step}");
            self.fail_lease(lease, error);
            return Ok(());
        }
        if piece >= n_pieces {
            self.finish_shard(lease);
            return Ok(());
        }
        progress.busy("evaluating");
        let pieces = piece..n_pieces.min(piece + 1 + PIECES_AHEAD);
        let reads: Vec<(u32, Read)> = pieces.map(|piece| (piece, shard.read(piece))).collect();
        for (piece, read) in reads {
            inbox.ask(Place::Piece(lease, piece), || read);
        }
        let records = match inbox.records(Place::Piece(lease, piece)) {
            Ok(records) => records,
            Err(Halt::Interrupted) => return Ok(()),
            Err(Halt::Died(died)) => return Err(died),
            Err(Halt::Failed(error)) => {
                self.fail_lease(lease, error);
                return Ok(());
            }
        };
        // It may have been revoked while its records were read.
        let Some(lent) = inbox.shards.get_mut(&lease) else { return Ok(()) };
        let added =
            lanes.pass(&records, replica.dense(), |model, inputs| lent.shard.add(model, inputs));
        match added {
            Ok(()) => lent.n_done += 1,
            Err(error) => {
                let error = format!("{error} ({})", records.describe());
                self.fail_lease(lease, error);
            }
        }
        Ok(())
    }

    fn finish_shard(&mut self, lease: LeaseId) {
        let Some(Lent { shard, .. }) = self.forget_lease(lease) else { return };
        let Some(replica) = &self.replica else { return };
        let number = shard.number();
        match shard.done(lease, replica.generation) {
            Ok(done) => self.report(done),
            Err(error) => self.report_failure(lease, number, error.to_string()),
        }
    }

    fn fail_lease(&mut self, lease: LeaseId, error: String) {
        let Some(lent) = self.forget_lease(lease) else { return };
        self.report_failure(lease, lent.shard.number(), error);
    }

    fn forget_lease(&mut self, lease: LeaseId) -> Option<Lent> {
        let inbox = &mut self.setup.inbox;
        inbox.keep(|place| !matches!(place, Place::Piece(of, _) if of == lease));
        inbox.shards.remove(&lease)
    }

    fn report_failure(&mut self, lease: LeaseId, index: u32, error: String) {
        warn!(%lease, index, error, "work failed here and is given back");
        self.report(Kind::Failed(proto::Failed { lease: lease.0, index, error }));
    }

    /// Reports the last step, if it has not been.
    fn flush(&mut self) {
        if let Some(stepped) = self.unreported.take() {
            self.reported = Some(Instant::now());
            self.last_step = Some(stepped.clone());
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

/// Records of a step: the last one of an epoch may be short.
fn n_records(plan: &BatchPlan, index: u32) -> u32 {
    let before = u64::from(index) * u64::from(plan.minibatch_size);
    let left = plan.n_records.saturating_sub(before);
    u32::try_from(left).unwrap_or(u32::MAX).min(plan.minibatch_size)
}

/// Lanes of a step that have records.
fn n_active(plan: &BatchPlan, n_lanes: u32, index: u32) -> u32 {
    let shares = share_out(n_records(plan, index) as usize, n_lanes, plan.minibatch_size / n_lanes);
    u32::try_from(shares.len()).expect("at most n_lanes")
}
