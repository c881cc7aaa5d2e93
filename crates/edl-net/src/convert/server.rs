// SPDX-License-Identifier: Apache-2.0
//! A parameter server's half of its control session.

use std::sync::Arc;

use edl_core::applied::AppliedSet;
use edl_core::id::{CheckpointId, Generation};
use edl_core::layout::Layout;
use edl_core::model::ModelSpec;
use edl_core::server::{Event, Inspection, Load, Order, Report};
use edl_core::servers::PartitionState;
use edl_core::spec::JobSpec;

use super::checkpoint_done;
use crate::proto::{self, PsMessage, ps_command, ps_message};

/// What a command means to a server of the job `spec`. A welcome is for the control session alone.
#[must_use]
pub fn event(command: ps_command::Kind, spec: &JobSpec) -> Option<Event> {
    use ps_command::Kind;
    Some(match command {
        Kind::Welcome(_) => return None,
        Kind::Load(order) => {
            let generation = Generation(order.generation);
            match load(order, spec) {
                Ok(load) => Event::Order(Order::Load(Box::new(load))),
                Err(error) => Event::LoadFailed { generation, error },
            }
        }
        Kind::Serve(proto::Serve { generation }) => {
            Event::Order(Order::Serve(Generation(generation)))
        }
        Kind::Checkpoint(proto::ServerCheckpoint { checkpoint, generation, folder, at }) => {
            Event::Order(Order::Checkpoint {
                checkpoint: CheckpointId(checkpoint),
                generation: Generation(generation),
                folder,
                at,
            })
        }
        Kind::Inspect(proto::Inspect { request }) => Event::Inspect(Inspection::Master(request)),
        Kind::Drain(_) => Event::Order(Order::Drain),
        Kind::Stop(proto::StopWork { reason }) => Event::Order(Order::Stop(reason)),
    })
}

fn load(order: proto::Load, spec: &JobSpec) -> Result<Load, String> {
    let model: ModelSpec = serde_json::from_str(&order.model_spec_json)
        .map_err(|error| format!("cannot parse the model's description: {error}"))?;
    let optimizer = serde_json::from_str(&order.optimizer_json)
        .map_err(|error| format!("cannot parse the optimizer's description: {error}"))?;
    let (dense_len, n_partitions) = (model.dense_len(), order.n_partitions);
    Ok(Load {
        generation: Generation(order.generation),
        partitions: order.first_partition..order.end_partition,
        layout: Layout { n_partitions, ..spec.layout(dense_len) },
        model: Arc::new(model),
        optimizer,
        seed: spec.seed,
        n_batches: order.n_batches,
        mode: spec.mode(),
        lr_staleness_modulation: spec.lr_staleness_modulation,
        from: order.from.unwrap_or_default().into(),
    })
}

/// What a server sends to its master.
#[must_use]
pub fn message(report: Report) -> PsMessage {
    use ps_message::Kind;
    let kind = match report {
        Report::Heartbeat => Kind::Heartbeat(proto::Heartbeat::default()),
        Report::Spending(report) => Kind::Spending(report.into()),
        Report::Loaded { generation, states } => {
            Kind::Loaded(proto::Loaded { generation: generation.0, sets: sets(states) })
        }
        Report::LoadFailed { generation, error } => {
            Kind::LoadFailed(proto::LoadFailed { generation: generation.0, error })
        }
        Report::CheckpointStarted { checkpoint } => {
            Kind::CheckpointStarted(proto::CheckpointStarted { checkpoint: checkpoint.0 })
        }
        Report::CheckpointDone { checkpoint, generation, files } => {
            Kind::CheckpointDone(checkpoint_done(checkpoint, generation, files))
        }
        Report::CheckpointFailed { checkpoint, error } => {
            Kind::CheckpointFailed(proto::CheckpointFailed { checkpoint: checkpoint.0, error })
        }
        Report::States { request, generation, states } => {
            Kind::Sets(proto::Sets { request, generation: generation.0, sets: sets(states) })
        }
    };
    PsMessage { kind: Some(kind) }
}

/// The first message of a stream: `identity`, and what the server holds.
#[must_use]
pub fn hello(
    identity: proto::PsHello,
    generation: Generation,
    states: Vec<PartitionState>,
) -> PsMessage {
    let hello = proto::PsHello { generation: generation.0, sets: sets(states), ..identity };
    PsMessage { kind: Some(ps_message::Kind::Hello(hello)) }
}

/// Partitions of one server have nearly the same set: each is sent as its difference from the one
/// before.
fn sets(states: Vec<PartitionState>) -> Vec<proto::PartitionSet> {
    let mut before: Option<AppliedSet> = None;
    let set = |state: PartitionState| {
        let applied = state.applied.to_bytes(before.as_ref());
        before = Some(state.applied);
        let PartitionState { partition, updates, n_rows, .. } = state;
        proto::PartitionSet { partition: partition.0, applied, updates, n_rows }
    };
    states.into_iter().map(set).collect()
}
