// SPDX-License-Identifier: Apache-2.0
//! From world to world.

use std::path::Path;
use std::time::{Duration, Instant};

use edl_core::id::WorldId;
use edl_net::proto::{self, worker_message::Kind};
use tracing::{debug, info, warn};

use super::{Run, Setup};
use crate::allreduce::mesh::Error;
use crate::allreduce::replica::{self, Replica};
use crate::allreduce::world::{World, hear_step, level, tell_step};
use crate::chain;

/// Numbers of the exchanges within a world.
const LEVEL: u64 = 0;
const FAREWELL: u64 = 1;

impl Run {
    /// Leaves the world before and enters `next`, if this worker is in it.
    pub(super) fn enter(&mut self, next: World) {
        self.flush();
        self.setup.progress.busy("forming a world");
        self.setup.progress.spending.on(self.healing());
        // What ended the waits of the world before has closed these, too.
        self.setup.lanes.tables().hang_up();
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
            info!(world = %next.id, "not part of the new world");
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

    fn load(&self, load: &proto::Load, world: &World) -> Result<Replica, replica::Error> {
        let Setup { recipe, lanes, .. } = &self.setup;
        if load.checkpoint.is_empty() {
            return recipe.first_values(world.generation, lanes.memory());
        }
        let folder = Path::new(&load.checkpoint);
        recipe.load(folder, load.keep_applied, world.generation, lanes.memory())
    }

    /// Brings all members to the highest of their steps; the bytes of state received.
    fn form(&mut self, world: &World, place: usize) -> Result<u64, Error> {
        let Setup { mesh, recipe, lanes, .. } = &mut self.setup;
        mesh.enter(world.id, place, &world.members)?;
        let mine = tell_step(self.replica.as_ref().map(Replica::step));
        let told = mesh.exchange(LEVEL, &mine)?;
        let steps: Vec<Option<u64>> = told.iter().map(|bytes| hear_step(bytes)).collect();
        let n_partitions = recipe.n_partitions();
        let Some((step, moves)) = level(&steps, n_partitions) else {
            return Err(Error::Other("no member of the world holds the model's state".into()));
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
            let slot = arrived.get_mut(item as usize).ok_or("received an unexpected partition")?;
            *slot = Some(partition);
            Ok(())
        };
        mesh.transfer(&moves, &mut encode, &mut accept)?;
        if is_behind {
            let partitions = arrived.into_iter().flatten().collect();
            let assembled = recipe.assemble(partitions, world.generation, lanes.memory());
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
    pub(super) fn lost(&mut self, world: WorldId, error: Error) {
        self.world = None;
        self.left.get_or_insert_with(Instant::now);
        self.flush();
        let (suspect, error) = match error {
            Error::Aborted => {
                debug!(%world, "left the world");
                return;
            }
            Error::Lost { peer, error } => {
                warn!(%world, %peer, error, "lost a member of the world");
                (peer, error)
            }
            Error::Other(error) => {
                warn!(%world, error, "left the world");
                (self.setup.me.0, error)
            }
        };
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
