// SPDX-License-Identifier: Apache-2.0
//! Interleavings that random faults may miss, by name. A script brings the job to the point in
//! question and lets something fail there; each runs with several timings.

#![allow(clippy::wildcard_enum_match_arm, reason = "a test looks at a few messages of each kind")]

mod changes;
mod hybrid;
mod servers;
mod worlds;

use edl_core::id::Generation;
use edl_core::platform::{InstanceId, Order, Role};
use edl_core::spec::JobSpec;
use edl_core::world::Worlds;
use edl_net::proto::{self, ps_command, worker_command, worker_message};
use edl_sim::{Script, Sent, What};

const N_TIMINGS: u64 = 4;
const MASTER: InstanceId = InstanceId::MASTER;

const fn worker(id: u32) -> InstanceId {
    InstanceId { role: Role::Worker, id }
}

const fn server(id: u32) -> InstanceId {
    InstanceId { role: Role::Ps, id }
}

/// One job with different timings.
fn timings(
    spec: JobSpec,
    n_records: u64,
    n_validation_records: u64,
) -> impl Iterator<Item = Script> {
    let script = move |seed| Script::new(seed, spec.clone(), n_records, n_validation_records);
    (0..N_TIMINGS).map(script)
}

fn is_checkpoint_order(sent: &Sent) -> bool {
    let what = &sent.what;
    matches!(what, What::ToServer(ps_command::Kind::Checkpoint(_)))
        || matches!(what, What::ToWorker(worker_command::Kind::Checkpoint(_)))
}

fn is_launch(sent: &Sent) -> bool {
    matches!(sent.what, What::Order(Order::Launch { .. }))
}

fn is_ready(sent: &Sent) -> bool {
    matches!(sent.what, What::FromWorker(worker_message::Kind::Ready(_)))
}

/// The load that a server was ordered.
fn load_in(sent: &Sent) -> Option<&proto::Load> {
    match &sent.what {
        What::ToServer(ps_command::Kind::Load(load)) => Some(load),
        _ => None,
    }
}

/// The world that is announced to a worker.
fn world_in(sent: &Sent) -> Option<&proto::World> {
    match &sent.what {
        What::ToWorker(worker_command::Kind::World(world)) => Some(world),
        _ => None,
    }
}

/// The last world that a worker has heard of.
fn last_world(run: &Script, of: InstanceId) -> Option<&proto::World> {
    run.delivered().iter().rev().filter(|sent| sent.to == of).find_map(world_in)
}

/// The folder that the members of a world load, if they load a checkpoint.
fn loaded_folder(world: &proto::World) -> Option<&str> {
    world.load.as_ref().map(|load| load.checkpoint.as_deref().unwrap_or_default())
}

/// Whether all members of the current world are together.
fn is_settled(run: &Script) -> bool {
    run.job().and_then(|job| job.worlds()).is_some_and(Worlds::is_settled)
}

fn has_state(run: &Script, of: u32) -> bool {
    let world = run.world().expect("a world");
    world.members.iter().any(|member| member.worker.0 == of && member.has_state)
}

/// Whether the servers serve this generation.
fn serves(run: &Script, generation: Generation) -> bool {
    let servers = run.job().map(|job| job.servers());
    servers.is_some_and(|servers| servers.is_serving() && servers.generation() == generation)
}

/// Runs to the first checkpoint; returns its folder and its version.
fn first_checkpoint(run: &mut Script) -> (String, u64) {
    run.until("a checkpoint is committed", |run| !run.durable().checkpoints.is_empty());
    let checkpoint = &run.durable().checkpoints[0];
    (checkpoint.folder.clone(), checkpoint.version)
}
