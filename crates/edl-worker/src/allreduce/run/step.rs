// SPDX-License-Identifier: Apache-2.0
//! One step with all members of a world.

use std::time::{Duration, Instant};

use edl_core::batch::BatchPlan;
use edl_core::goodput;
use edl_core::id::WorldId;
use edl_core::lanes::{Span, nodes_within, share_out};
use edl_core::model::ModelSpec;
use edl_core::optimizer::Clip;
use edl_net::proto::{self, worker_message::Kind};
use edl_tensor::clip;
use edl_tensor::model::Gradient;
use tracing::{debug, info, warn};

use super::{Run, Setup};
use crate::allreduce::inbox::{Halt, Place};
use crate::allreduce::lanes::{Lanes, Step, divisor, hash};
use crate::allreduce::replica::batch_of;
use crate::compute::{Died, loss_line};
use crate::feed::Read;

/// Steps are not reported more often than this, but for those that somebody waits for.
const REPORT_EVERY: Duration = Duration::from_millis(20);
/// Servers that are not there are tried again after this.
const SERVERS_RETRY: Duration = Duration::from_millis(50);
/// Steps whose records are read beyond the one at hand.
const READ_AHEAD: u64 = 1;

/// Said instead of a hash that is not known any more.
pub(super) const UNTOLD: u64 = 0;

/// Where the mean gradient of the last step lies.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Made {
    /// It has been overwritten.
    Nothing,
    /// Where the model made it, for there was nothing to add.
    Pieces { loss: f32 },
    /// In `Run::mean`, after all members' sums were added.
    Sums,
}

impl Made {
    fn gradient<'a>(self, lanes: &'a Lanes, mean: &'a [f32]) -> Vec<&'a [f32]> {
        match self {
            Self::Pieces { .. } => lanes.pieces(),
            Self::Sums | Self::Nothing => vec![&mean[..mean.len() - 1]],
        }
    }
}

impl Run {
    /// Takes one step with all members.
    pub(super) fn train(&mut self) -> Result<(), Died> {
        let (Some(world), Some(replica)) = (&self.world, &self.replica) else { return Ok(()) };
        let (id, step, batch) = (world.id, replica.step(), replica.next_batch());
        let (worker, incarnation) = self.setup.me;
        let place = world.place_of(worker, incarnation).expect("a member is in its world");
        let mine = world.members[place].lanes.clone();
        let is_alone = world.members.len() == 1;
        self.read_ahead(step, &mine);

        let Setup { plan, n_lanes, .. } = &self.setup;
        let n_records = n_records(plan, batch.index);
        let n_active = n_active(plan, *n_lanes, batch.index);
        let started = Instant::now();
        self.made = Made::Nothing;
        let made = match self.compute(id, n_active, &mine, is_alone) {
            Ok(made) => made,
            Err(halt) => {
                self.setup.progress.spending.waste(started.elapsed());
                return self.halted(id, step, halt);
            }
        };
        let computed = started.elapsed();
        let n_mine = mine.end.min(n_active).saturating_sub(mine.start);
        self.pace.measure(computed, n_mine);
        if let Some(pace) = self.pace.due() {
            self.report(Kind::Pace(pace));
        }
        if made == Made::Sums {
            self.setup.progress.busy("reducing");
            self.setup.progress.spending.on(goodput::Kind::Communicate);
            let (mesh, out) = (&mut self.setup.mesh, &mut self.mean);
            let reduced = mesh.all_reduce(step + 1, n_active, divisor(n_active, n_records), out);
            self.setup.progress.spending.on(goodput::Kind::Compute);
            if let Err(error) = reduced {
                self.setup.progress.spending.waste(computed);
                self.lost(id, error);
                return Ok(());
            }
        }
        self.apply(id, made);
        Ok(())
    }

    /// Trains this worker's lanes of a step; rows of tables are at the servers when it returns.
    fn compute(
        &mut self,
        world: WorldId,
        n_active: u32,
        mine: &Span,
        is_alone: bool,
    ) -> Result<Made, Halt> {
        let Some(replica) = &self.replica else { return Err(Halt::Interrupted) };
        let Setup { mesh, inbox, lanes, clip, n_lanes, progress, .. } = &mut self.setup;
        lanes.tables().connect(inbox.route.as_ref(), replica.generation)?;
        progress.busy("training");
        let (batch, number, dense) = (replica.next_batch(), replica.step(), replica.dense());
        let step = Step { batch, n_active, dense, number, world, n_lanes: *n_lanes };
        let spending = &progress.spending;
        let mut records = |lane| {
            spending.on(goodput::Kind::DataWait);
            let records = inbox.records(Place::Lane(batch, lane));
            spending.on(goodput::Kind::Compute);
            records
        };
        if is_alone && n_active == 1 && clip.is_none() && lanes.is_plain() {
            let loss = lanes.alone(step, &records(0)?)?;
            return Ok(Made::Pieces { loss });
        }
        let buffers = mesh.buffers(n_active, lanes.len());
        let mut nodes = nodes_within(n_active, mine).into_iter().zip(buffers);
        nodes.try_for_each(|(node, buffer)| lanes.sum(step, &node, buffer, &mut records))?;
        // Lanes without records are named to the servers, too: so every member has a word in
        // every step, and none of them can be left two steps behind.
        let mut idle = mine.start.max(n_active)..mine.end;
        idle.try_for_each(|lane| lanes.tables().push_nothing(batch, step.lane(lane)))?;
        lanes.tables().settle(&mut || inbox.look_up())?;
        Ok(Made::Sums)
    }

    /// Takes the step whose mean gradient is made.
    fn apply(&mut self, world: WorldId, made: Made) {
        let Some(replica) = &mut self.replica else { return };
        let loss = match made {
            Made::Pieces { loss } => loss,
            Made::Sums | Made::Nothing => *self.mean.last().expect("the loss rides along"),
        };
        if !loss.is_finite() {
            let (step, batch) = (replica.step(), replica.next_batch());
            self.failed(world, step, format!("the loss is not a number (batch {batch})"));
            return;
        }
        if let Some(limit) = self.setup.clip {
            shorten(&mut self.mean, self.setup.lanes.spec(), limit);
        }
        replica.apply(&made.gradient(&self.setup.lanes, &self.mean));
        self.made = made;
        let step = replica.step();
        self.setup.progress.at_step(step);
        self.setup.seat.holds(world, step);
        let every = self.setup.log_loss_steps;
        if step == 1 || (every > 0 && step.is_multiple_of(every)) {
            info!("{}", loss_line(loss, step));
        }
        self.unreported = Some(proto::Stepped { world: world.0, step, hash: UNTOLD, loss });
        if self.reported.is_none_or(|reported| reported.elapsed() >= REPORT_EVERY) {
            self.flush();
        }
    }

    /// The step at hand could not be trained; nobody else knows of it yet.
    fn halted(&mut self, world: WorldId, step: u64, halt: Halt) -> Result<(), Died> {
        match halt {
            Halt::Interrupted => Ok(()),
            Halt::Died(died) => Err(died),
            Halt::Failed(error) => {
                self.failed(world, step, error);
                Ok(())
            }
            Halt::Servers(error) => self.wait_for_servers(&error),
            Halt::Torn(error) => {
                self.torn(world, error);
                Ok(())
            }
        }
    }

    /// The hash of the last step's mean gradient, if it is still there. Only steps that are
    /// reported need one, so it is made when they are.
    pub(super) fn hash(&self) -> u64 {
        match self.made {
            Made::Nothing => UNTOLD,
            made @ (Made::Pieces { .. } | Made::Sums) => {
                hash(&made.gradient(&self.setup.lanes, &self.mean))
            }
        }
    }

    /// Waits a moment, or for news: the step is tried again along the route that is known then.
    pub(super) fn wait_for_servers(&mut self, error: &str) -> Result<(), Died> {
        debug!(error, "parameter servers not available");
        self.flush();
        let Setup { lanes, inbox, progress, .. } = &mut self.setup;
        lanes.tables().hang_up();
        progress.waiting("waiting for servers", "parameter servers");
        inbox.wait_for(SERVERS_RETRY)
    }

    /// Leaves the world because the servers have no rows for the state that it holds.
    pub(super) fn torn(&mut self, world: WorldId, error: String) {
        warn!(%world, error, "the parameter servers are at a different step");
        self.setup.lanes.tables().hang_up();
        self.world = None;
        self.left = Some(Instant::now());
        self.flush();
        self.say(Kind::Torn(proto::Torn { world: world.0, error }));
    }

    /// Leaves the world because the next step cannot be trained here.
    fn failed(&mut self, world: WorldId, step: u64, error: String) {
        warn!(%world, step, error, "step failed");
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
}

/// Clips a mean gradient, behind which the loss rides along.
fn shorten(mean: &mut Vec<f32>, model: &ModelSpec, limit: Clip) {
    let mut gradient = Gradient { dense: std::mem::take(mean), rows: Vec::new() };
    let loss = gradient.dense.pop();
    clip::clip(&mut gradient, model, limit);
    *mean = gradient.dense;
    mean.extend(loss);
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
