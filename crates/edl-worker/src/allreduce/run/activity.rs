// SPDX-License-Identifier: Apache-2.0
//! What the machine starts, done on this thread.

use std::path::Path;
use std::time::Duration;

use edl_core::id::{Generation, LeaseId};
use edl_core::job::LoadFrom;
use edl_core::member::{Activity, Failure, Move, Outcome, Place, Step, Transferred};
use edl_core::world::World;
use edl_tensor::model::Mean;
use tracing::info;

use super::{Run, Setup};
use crate::allreduce::lanes::{Lanes, clip_mean, divisor, hash};
use crate::allreduce::replica::{Replica, STATE_PARTITION};
use crate::chain;
use crate::compute::loss_line;
use crate::evaluate::Evaluation;
use crate::feed::Decoded;

/// Numbers of the exchanges within a world.
const LEVEL: u64 = 0;
const FAREWELL: u64 = 1;
/// How often a wait for acknowledgements checks whether it is cancelled.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Reported instead of a hash that is not known anymore.
const NO_HASH: u64 = 0;

/// Where the mean gradient of the last step lies.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Made {
    /// It has been overwritten.
    Nothing,
    /// Where the model wrote it, because there was nothing to add.
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
    pub(super) fn perform(&mut self, activity: Activity) -> Result<Outcome, Failure> {
        let done = |()| Outcome::Done;
        match activity {
            Activity::Farewell { .. } => {
                self.setup.mesh.exchange(FAREWELL, &[]).map(|_| Outcome::Done)
            }
            Activity::Load { from, generation } => self.load(&from, generation),
            Activity::Enter { world, place } => self.enter(&world, place).map(done),
            Activity::Exchange { step, .. } => self.exchange(step),
            Activity::Transfer { moves, is_behind, .. } => self.transfer(&moves, is_behind),
            Activity::Connect(route) => self.setup.lanes.tables().connect(route).map(done),
            Activity::Train { step, lane } => self.train(&step, lane).map(done),
            Activity::Skip { step, lane } => self.setup.lanes.skip(&step, lane).map(done),
            Activity::Settle(_) => self.settle().map(done),
            Activity::Reduce(step) => self.reduce(&step),
            Activity::Apply(step) => self.apply(&step).map(done),
            Activity::Pass(_) => {
                self.made = Made::Nothing;
                self.replica.iter_mut().for_each(Replica::pass);
                Ok(Outcome::Done)
            }
            Activity::Hash => Ok(Outcome::Hashed(self.hash())),
            Activity::Evaluate { lease, piece, version } => {
                self.evaluate(lease, piece, version).map(done)
            }
        }
    }

    fn load(&mut self, from: &LoadFrom, generation: Generation) -> Result<Outcome, Failure> {
        let Setup { recipe, lanes, .. } = &self.setup;
        let loaded = match &from.checkpoint {
            None => recipe.first_values(lanes.memory()),
            Some(folder) => recipe.load(Path::new(folder), from.keep_applied, lanes.memory()),
        };
        let replica = loaded.map_err(|error| Failure::Failed(chain(&error)))?;
        let step = replica.step();
        self.adopt(replica)?;
        info!(%generation, step, "loaded");
        Ok(Outcome::Loaded { step })
    }

    /// Continues from these parameters, and from the training script's state that belongs to them.
    fn adopt(&mut self, mut replica: Replica) -> Result<(), Failure> {
        if self.setup.recipe.is_script() {
            let state = replica.take_state().map_err(|error| Failure::Failed(chain(&error)))?;
            self.setup.lanes.load_state(&state).map_err(Failure::Failed)?;
        }
        self.replica = Some(replica);
        Ok(())
    }

    fn enter(&mut self, world: &World, place: usize) -> Result<(), Failure> {
        self.peers = self.peers.split_off(&world.id);
        let peers = self.peers.get(&world.id).map_or(&[][..], Vec::as_slice);
        self.setup.mesh.enter(world.id, place, peers)?;
        self.place = place;
        info!(world = %world.id, transport = self.setup.mesh.transport(), "members connected");
        Ok(())
    }

    fn exchange(&mut self, step: Option<u64>) -> Result<Outcome, Failure> {
        let steps = self.setup.mesh.exchange(LEVEL, &encode_step(step))?;
        Ok(Outcome::Levels(steps.iter().map(|bytes| decode_step(bytes)).collect()))
    }

    fn transfer(&mut self, moves: &[Move], is_behind: bool) -> Result<Outcome, Failure> {
        let Setup { mesh, recipe, lanes, .. } = &mut self.setup;
        let replica = self.replica.as_ref();
        let sends_state = |one: &Move| one.from == self.place && one.item == STATE_PARTITION;
        let state = match recipe.is_script() && moves.iter().any(sends_state) {
            true => lanes.state().map_err(Failure::Failed)?,
            false => Vec::new(),
        };
        let mut arrived = Vec::new();
        arrived.resize_with(if is_behind { recipe.n_partitions() as usize } else { 0 }, || None);
        let mut encode =
            |item: u32| replica.expect("only members that have state send it").encode(item, &state);
        let mut state_bytes = 0;
        let mut accept = |item: u32, bytes: Vec<u8>| {
            state_bytes += bytes.len() as u64;
            let partition = recipe.decode(item, &bytes).map_err(|error| chain(&error))?;
            let slot = arrived.get_mut(item as usize).ok_or("received an unexpected partition")?;
            *slot = Some(partition);
            Ok(())
        };
        mesh.transfer(moves, &mut encode, &mut accept)?;
        if is_behind {
            let partitions = arrived.into_iter().flatten().collect();
            let assembled = recipe.assemble(partitions, lanes.memory());
            self.adopt(assembled.map_err(|error| Failure::Failed(chain(&error)))?)?;
        }
        let step = self.replica.as_ref().map_or(0, Replica::step);
        Ok(Outcome::Transferred(Transferred { step, state_bytes }))
    }

    /// The records that the machine knows to be there.
    fn take(&mut self, place: Place) -> Result<Decoded, Failure> {
        let records = self.records.remove(&place);
        records.ok_or_else(|| Failure::Failed(format!("the records of {place:?} are gone")))
    }

    fn train(&mut self, step: &Step, lane: u32) -> Result<(), Failure> {
        let records = self.take(Place::Lane(step.batch, lane))?;
        let Some(replica) = &self.replica else { return Err(Failure::Cancelled) };
        let Setup { mesh, lanes, clip, recipe, .. } = &mut self.setup;
        self.made = Made::Nothing;
        let is_unchanged = clip.is_none() && lanes.is_plain() && !recipe.is_script();
        if step.is_alone && step.n_active == 1 && is_unchanged {
            let loss = lanes.alone(step, replica.dense(), &records)?;
            self.made = Made::Pieces { loss };
            return Ok(());
        }
        let buffers = mesh.buffers(step.n_active, lanes.len());
        lanes.add(step, (lane, replica.dense()), &records, buffers)
    }

    fn settle(&mut self) -> Result<(), Failure> {
        while !self.setup.lanes.tables().settle(POLL_INTERVAL)? {
            if self.setup.interrupt.is_cancelled() {
                return Err(Failure::Cancelled);
            }
        }
        Ok(())
    }

    fn reduce(&mut self, step: &Step) -> Result<Outcome, Failure> {
        if let Made::Pieces { loss } = self.made {
            return Ok(Outcome::Reduced { loss });
        }
        let (mesh, out) = (&mut self.setup.mesh, &mut self.mean);
        if step.mine_active().is_empty() {
            // A member without lanes takes part, too.
            mesh.buffers(step.n_active, out.len());
        }
        let divisor = divisor(step.n_active, step.n_records);
        mesh.all_reduce(step.number + 1, step.n_active, divisor, out)?;
        self.made = Made::Sums;
        let loss = *self.mean.last().expect("the loss is at the end");
        Ok(Outcome::Reduced { loss })
    }

    /// Takes the step whose mean gradient is made.
    fn apply(&mut self, step: &Step) -> Result<(), Failure> {
        let Some(replica) = &mut self.replica else { return Ok(()) };
        let loss = match self.made {
            Made::Pieces { loss } => loss,
            Made::Sums | Made::Nothing => self.mean.last().copied().unwrap_or_default(),
        };
        if let Some(limit) = self.setup.clip {
            clip_mean(&mut self.mean, self.setup.lanes.spec(), limit);
        }
        if self.setup.recipe.is_script() {
            let gradient = &self.mean[..self.mean.len() - 1];
            self.setup.lanes.step(step, Mean { gradient, loss }, replica.dense_mut())?;
            replica.pass();
        } else {
            replica.apply(&self.made.gradient(&self.setup.lanes, &self.mean));
        }
        let (step, every) = (step.number + 1, self.setup.log_loss_steps);
        if step == 1 || (every > 0 && step.is_multiple_of(every)) {
            info!("{}", loss_line(loss, step));
        }
        Ok(())
    }

    /// The hash of the last step's mean gradient, if it is still there. If the training script took
    /// the step, also of its result, so that the master finds scripts that compute different ones.
    fn hash(&self) -> u64 {
        match self.made {
            Made::Nothing => NO_HASH,
            made @ (Made::Pieces { .. } | Made::Sums) => {
                let mut numbers = made.gradient(&self.setup.lanes, &self.mean);
                let is_script = self.setup.recipe.is_script();
                numbers.extend(self.replica.as_ref().filter(|_| is_script).map(Replica::dense));
                hash(&numbers)
            }
        }
    }

    fn evaluate(&mut self, lease: LeaseId, piece: u32, version: u64) -> Result<(), Failure> {
        let records = self.take(Place::Piece(lease, piece))?;
        let Some(replica) = &self.replica else { return Err(Failure::Cancelled) };
        let new = || Evaluation::new(&self.setup.metrics);
        let evaluation = self.shards.entry(lease).or_insert_with(new);
        self.made = Made::Nothing;
        let named = |error: String| Failure::Failed(format!("{error} ({})", records.describe()));
        let evaluated =
            self.setup.lanes.pass(&records, (version, replica.dense()), |model, inputs| {
                evaluation.add(model, inputs)
            });
        match evaluated {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(named(error.to_string())),
            Err(Failure::Failed(error)) => Err(named(error)),
            Err(
                failure @ (Failure::Cancelled
                | Failure::Lost { .. }
                | Failure::NonFinite(_)
                | Failure::Quit
                | Failure::Servers(_)
                | Failure::OtherStep(_)),
            ) => Err(failure),
        }
    }
}

/// The step of a member's state, as it sends it to the other members of a new world.
fn encode_step(step: Option<u64>) -> Vec<u8> {
    step.map_or_else(Vec::new, |step| step.to_le_bytes().to_vec())
}

fn decode_step(bytes: &[u8]) -> Option<u64> {
    bytes.try_into().ok().map(u64::from_le_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_decoded_as_it_was_encoded() {
        for step in [None, Some(0), Some(u64::MAX)] {
            assert_eq!(decode_step(&encode_step(step)), step);
        }
    }
}
