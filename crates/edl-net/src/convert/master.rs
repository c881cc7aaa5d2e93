// SPDX-License-Identifier: Apache-2.0
//! What a master receives, as reports, and what it sends, as messages.

use edl_core::applied::AppliedSet;
use edl_core::goodput::{TimeKind, TimeReport};
use edl_core::id::{
    BatchId, CheckpointId, EvalId, Generation, Incarnation, LeaseId, PartitionId, PsId, WorkerId,
    WorldId,
};
use edl_core::job::{Command, Event, HeldLease, Job, LoadFrom, MemberReport, Peer};
use edl_core::metric::{Measures, MetricKind, Sums};
use edl_core::platform::{ChaosAction, ChaosKind, InstanceId, Role};
use edl_core::server;
use edl_core::servers::{PartitionState, ServerMember};
use edl_core::time::millis;
use edl_core::worker;
use edl_core::world::{self, Announced};
use tonic::Status;

use super::json;
use super::worlds::SentWorlds;
use crate::proto::{self, PsCommand, WorkerCommand, ps_command, ps_message};
use crate::proto::{worker_command, worker_message};

const UNKNOWN_KIND: &str = "unknown kind of message; run the same build everywhere";
/// The most runs of applied batches in one message: thousands of partitions, with thousands of workers
/// in between. A set is sent as its difference from the one before, so a few bytes can repeat all runs.
const MAX_RUNS: usize = 1 << 24;
const SECOND_HELLO: &str = "a hello must be the first message of a stream";

/// What a worker reports, or why its message is invalid.
pub fn worker_report(message: proto::WorkerMessage) -> Result<worker::Report, Status> {
    use worker::Report;
    use worker_message::Kind;
    let kind = message.kind.ok_or_else(|| Status::invalid_argument(UNKNOWN_KIND))?;
    Ok(match kind {
        Kind::Hello(_) => return Err(Status::invalid_argument(SECOND_HELLO)),
        Kind::Ready(ready) => Report::Ready {
            model: Box::new(parse(&ready.model_spec_json, "model spec")?),
            capacity: ready.capacity,
            held: ready.held.into_iter().map(held).collect(),
            peer: ready.peer.map(|peer| Box::new(self::peer(peer))),
        },
        Kind::BatchPushed(proto::BatchPushed { epoch, index }) => {
            Report::BatchPushed { batch: BatchId { epoch, index } }
        }
        Kind::BatchDone(done) => batch_done(&done),
        Kind::EvalDone(done) => Report::EvalDone {
            eval: EvalId(done.eval),
            shard: done.shard,
            measures: Box::new(measures(done.measures)?),
        },
        Kind::PredictDone(proto::PredictDone { shard }) => Report::PredictDone { shard },
        Kind::Failed(proto::Failed { lease, index, error }) => {
            Report::Failed { lease: LeaseId(lease), index, error }
        }
        Kind::DiskFull(proto::Failed { lease, index, error }) => {
            Report::DiskFull { lease: LeaseId(lease), index, error }
        }
        Kind::NonFinite(proto::NonFinite { lease, index, error }) => {
            Report::NonFinite { lease: LeaseId(lease), index, error }
        }
        Kind::Returned(proto::Returned { kept }) => {
            let batch = |proto::Batch { epoch, index }| BatchId { epoch, index };
            Report::Returned { kept: kept.into_iter().map(batch).collect() }
        }
        Kind::Leaving(_) => Report::Leaving,
        Kind::Heartbeat(heartbeat) => {
            Report::Heartbeat { waiting_for: heartbeat.waiting_for(), progress: heartbeat.progress }
        }
        Kind::Spending(spending) => Report::Spending(time_report(&spending)?),
        Kind::CheckpointDone(done) => checkpoint_done(done),
        Kind::CheckpointFailed(proto::CheckpointFailed { checkpoint, error }) => {
            Report::CheckpointFailed { checkpoint: CheckpointId(checkpoint), error }
        }
        Kind::Formed(report) => Report::Member(formed(&report)),
        Kind::Stepped(proto::Stepped { world, step, hash, loss }) => {
            Report::Member(MemberReport::Stepped { world: WorldId(world), step, hash, loss })
        }
        Kind::Paused(proto::Paused { world, step, number }) => {
            Report::Member(MemberReport::Paused { world: WorldId(world), number, step })
        }
        Kind::Pace(proto::Pace { lane_secs }) => Report::Member(MemberReport::Pace { lane_secs }),
        Kind::PeerLost(report) => Report::Member(peer_lost(report)),
        Kind::StepFailed(proto::StepFailed { world, step, error }) => {
            Report::Member(MemberReport::StepFailed { world: WorldId(world), step, error })
        }
        Kind::Quit(proto::Quit { world, step }) => {
            Report::Member(MemberReport::Quit { world: WorldId(world), step })
        }
        Kind::StepNonFinite(proto::StepNonFinite { world, step, error }) => {
            Report::Member(MemberReport::NonFinite { world: WorldId(world), step, error })
        }
        Kind::StepMismatch(proto::StepMismatch { world, error }) => {
            Report::Member(MemberReport::StepMismatch { world: WorldId(world), error })
        }
        Kind::LoadFailed(proto::LoadFailed { generation, error }) => {
            let generation = Generation(generation);
            Report::Member(MemberReport::NotLoaded { generation, error })
        }
    })
}

fn batch_done(done: &proto::BatchDone) -> worker::Report {
    let proto::BatchDone { epoch, index, generation, loss } = *done;
    let (batch, generation) = (BatchId { epoch, index }, Generation(generation));
    worker::Report::BatchDone { batch, generation, loss }
}

fn checkpoint_done(done: proto::CheckpointDone) -> worker::Report {
    let proto::CheckpointDone { checkpoint, generation, files } = done;
    let (checkpoint, generation) = (CheckpointId(checkpoint), Generation(generation));
    let files = files.into_iter().map(Into::into).collect();
    worker::Report::CheckpointDone { checkpoint, generation, files }
}

fn formed(report: &proto::Formed) -> MemberReport {
    let proto::Formed { world, step, pause_secs, state_bytes } = *report;
    MemberReport::Formed { world: WorldId(world), step, pause_secs, state_bytes }
}

fn peer_lost(proto::PeerLost { world, suspect, error }: proto::PeerLost) -> MemberReport {
    MemberReport::PeerLost { world: WorldId(world), suspect: WorkerId(suspect), error }
}

/// The sums that a worker reports for a shard.
pub fn measures(sums: Vec<proto::Sums>) -> Result<Measures, Status> {
    let unknown = |kind| Status::invalid_argument(format!("unknown kind of metric {kind}"));
    let read = |proto::Sums { name, kind, sums }| {
        let kind = MetricKind::try_from(kind).map_err(unknown)?;
        Ok((name, Sums { kind, sums }))
    };
    sums.into_iter().map(read).collect()
}

fn peer(peer: proto::Peer) -> Peer {
    let proto::Peer { address, unix_path, probe, step } = peer;
    Peer { address, unix_path, probe, step }
}

/// What a server reports, and how much it had to do; or why its message is invalid.
pub fn ps_report(
    message: proto::PsMessage,
) -> Result<(server::Report, Option<proto::PsLoad>), Status> {
    use ps_message::Kind;
    use server::Report;
    let kind = message.kind.ok_or_else(|| Status::invalid_argument(UNKNOWN_KIND))?;
    let report = match kind {
        Kind::Hello(_) => return Err(Status::invalid_argument(SECOND_HELLO)),
        Kind::Heartbeat(_) => Report::Heartbeat,
        Kind::Spending(spending) => {
            return Ok((Report::Spending(time_report(&spending)?), spending.load));
        }
        Kind::Loaded(proto::Loaded { generation, sets }) => {
            Report::Loaded { generation: Generation(generation), states: partition_states(sets)? }
        }
        Kind::LoadFailed(proto::LoadFailed { generation, error }) => {
            Report::LoadFailed { generation: Generation(generation), error }
        }
        Kind::CheckpointStarted(proto::CheckpointStarted { checkpoint }) => {
            Report::CheckpointStarted { checkpoint: CheckpointId(checkpoint) }
        }
        Kind::CheckpointDone(proto::CheckpointDone { checkpoint, generation, files }) => {
            let (checkpoint, generation) = (CheckpointId(checkpoint), Generation(generation));
            let files = files.into_iter().map(Into::into).collect();
            Report::CheckpointDone { checkpoint, generation, files }
        }
        Kind::CheckpointFailed(proto::CheckpointFailed { checkpoint, error }) => {
            Report::CheckpointFailed { checkpoint: CheckpointId(checkpoint), error }
        }
        Kind::Sets(proto::Sets { request, generation, sets }) => Report::States {
            request,
            generation: Generation(generation),
            states: partition_states(sets)?,
        },
    };
    Ok((report, None))
}

fn time_report(spending: &proto::Spending) -> Result<TimeReport, Status> {
    let missing = || Status::invalid_argument("a report of spent time contains no times");
    let unknown = |last| Status::invalid_argument(format!("unknown activity {last}"));
    let last = TimeKind::try_from(spending.last).map_err(unknown)?;
    let spent = spending.spent.ok_or_else(missing)?.into();
    Ok(TimeReport { spent, last, step: spending.step, records: spending.records })
}

/// The event of a server's first message.
pub fn ps_hello(hello: proto::PsHello) -> Result<Event, Status> {
    let member = ServerMember {
        incarnation: Incarnation(hello.incarnation),
        address: hello.address,
        unix_path: hello.unix_path,
        generation: Generation(hello.generation),
        sets: partition_states(hello.sets)?,
    };
    Ok(Event::PsConnected { ps: PsId(hello.ps), pid: hello.pid, member: Box::new(member) })
}

fn partition_states(sets: Vec<proto::PartitionSet>) -> Result<Vec<PartitionState>, Status> {
    states_within(sets, MAX_RUNS)
}

fn states_within(
    sets: Vec<proto::PartitionSet>,
    max_runs: usize,
) -> Result<Vec<PartitionState>, Status> {
    let mut before: Option<AppliedSet> = None;
    let mut n_runs = 0;
    let state = |set: proto::PartitionSet| {
        let applied = AppliedSet::from_bytes(&set.applied, before.as_ref())
            .ok_or_else(|| Status::invalid_argument("cannot parse a set of applied batches"))?;
        n_runs += applied.n_runs();
        if n_runs > max_runs {
            let why = format!("the sets of applied batches have more than {max_runs} runs");
            return Err(Status::invalid_argument(why));
        }
        before = Some(applied.clone());
        let partition = PartitionId(set.partition);
        Ok(PartitionState { partition, applied, updates: set.updates, n_rows: set.n_rows })
    };
    sets.into_iter().map(state).collect()
}

fn held(held: proto::HeldLease) -> HeldLease {
    HeldLease {
        lease: LeaseId(held.lease),
        generation: Generation(held.generation),
        epoch: held.epoch,
        indices: held.indices,
    }
}

fn parse<T: serde::de::DeserializeOwned>(json: &str, what: &str) -> Result<T, Status> {
    serde_json::from_str(json)
        .map_err(|error| Status::invalid_argument(format!("cannot parse the {what}: {error}")))
}

/// Which process to inject a fault into, and which fault.
pub fn chaos(request: &proto::ChaosRequest) -> Result<Event, Status> {
    let role = request.role();
    if role == Role::Master {
        let why = format!("`{role}` cannot be a chaos target; name a worker or a ps");
        return Err(Status::invalid_argument(why));
    }
    let proto::ChaosRequest { id, how, millis, factor, .. } = *request;
    // Never the default: that is a kill.
    let kind = ChaosKind::try_from(how)
        .map_err(|number| Status::invalid_argument(format!("unknown chaos action {number}")))?;
    let action = ChaosAction::new(kind, millis, factor).map_err(Status::invalid_argument)?;
    Ok(Event::Chaos { instance: InstanceId { role, id }, action })
}

/// Encodes what a job's machine sends to workers and servers.
pub struct Encoder<'a> {
    pub job: &'a Job,
    /// The path of a checkpoint folder: of this job if the flag is set, else one that the user named.
    pub path: &'a dyn Fn(&str, bool) -> String,
}

impl Encoder<'_> {
    /// A command as `worker` gets it, after what it was sent before.
    #[must_use]
    pub fn worker(
        &self,
        worker: WorkerId,
        command: Command,
        sent: &mut SentWorlds,
    ) -> WorkerCommand {
        use worker_command::Kind;
        let config = self.job.config();
        let kind = match command {
            Command::Welcome => {
                sent.welcome(worker);
                Kind::Welcome(proto::WorkerWelcome {
                    term: config.term.0,
                    run: config.run.to_string(),
                    spec_json: json(&config.spec),
                    n_records: config.n_records,
                    n_validation_records: config.n_validation_records,
                    n_prediction_records: config.n_prediction_records,
                    heartbeat_secs: self.heartbeat_secs(),
                })
            }
            Command::Route(route) => Kind::Route(route.into()),
            Command::Lease { lease, task } => {
                Kind::Lease(proto::Lease { lease: lease.0, work: Some(task.into()) })
            }
            Command::Revoke(lease) => Kind::Revoke(proto::Revoke { lease: lease.0 }),
            Command::World(announced) => {
                let id = announced.world.id;
                Kind::World(sent.send(worker, id, || self.world(&announced)))
            }
            Command::Go { world, until } => Kind::Go(proto::Go { world: world.0, until }),
            Command::Pause { world, number } => {
                Kind::Pause(proto::Pause { world: world.0, number })
            }
            Command::Checkpoint(order) => Kind::Checkpoint(proto::WorkerCheckpoint {
                checkpoint: order.checkpoint.0,
                generation: order.generation.0,
                folder: (self.path)(&order.folder, true),
                at: order.at,
                first_partition: order.partitions.start,
                end_partition: order.partitions.end,
            }),
            Command::Ping => Kind::Ping(proto::Ping {}),
            Command::Drain { within } => Kind::Drain(proto::Drain { within_ms: millis(within) }),
            Command::Stop(reason) => Kind::Stop(proto::StopWork { reason }),
        };
        WorkerCommand { kind: Some(kind) }
    }

    /// An order as a server gets it.
    #[must_use]
    pub fn ps(&self, order: server::Order) -> PsCommand {
        use ps_command::Kind;
        use server::Order;
        let config = self.job.config();
        let kind = match order {
            Order::Welcome => Kind::Welcome(proto::PsWelcome {
                term: config.term.0,
                run: config.run.to_string(),
                spec_json: json(&config.spec),
                heartbeat_secs: self.heartbeat_secs(),
            }),
            Order::Load(load) => Kind::Load(proto::Load {
                generation: load.generation.0,
                first_partition: load.partitions.start,
                end_partition: load.partitions.end,
                n_partitions: load.layout.n_partitions,
                model_spec_json: json(&*load.model),
                optimizer_json: json(&load.optimizer),
                n_batches: load.n_batches,
                from: Some(self.load_from(load.from)),
            }),
            Order::Serve(generation) => Kind::Serve(proto::Serve { generation: generation.0 }),
            Order::Checkpoint { checkpoint, generation, folder, at } => {
                Kind::Checkpoint(proto::ServerCheckpoint {
                    checkpoint: checkpoint.0,
                    generation: generation.0,
                    folder: (self.path)(&folder, true),
                    at,
                })
            }
            Order::Drain => Kind::Drain(proto::Drain { within_ms: 0 }),
            Order::Stop(reason) => Kind::Stop(proto::StopWork { reason }),
        };
        PsCommand { kind: Some(kind) }
    }

    fn world(&self, announced: &Announced) -> proto::World {
        let Announced { world, until, generation, load, skipped } = announced;
        let member = |member: &world::Member| {
            let peer = self.job.peer(member.worker);
            proto::Member {
                worker: member.worker.0,
                incarnation: member.incarnation.0,
                address: peer.map(|peer| peer.address.clone()).unwrap_or_default(),
                unix_path: peer.map(|peer| peer.unix_path.clone()).unwrap_or_default(),
                first_lane: member.lanes.start,
                end_lane: member.lanes.end,
                has_state: member.has_state,
            }
        };
        proto::World {
            world: world.id.0,
            members: world.members.iter().map(member).collect(),
            after: world.after,
            until: *until,
            generation: generation.0,
            load: load.clone().map(|from| self.load_from(from)),
            skipped: skipped.iter().copied().collect(),
            changes: None,
        }
    }

    fn load_from(&self, LoadFrom { checkpoint, keep_applied }: LoadFrom) -> proto::LoadFrom {
        let checkpoint = checkpoint.map(|folder| (self.path)(&folder, keep_applied));
        proto::LoadFrom { checkpoint, keep_applied }
    }

    /// Heartbeats show progress, so several must come before a task is overdue.
    fn heartbeat_secs(&self) -> f64 {
        let spec = &self.job.config().spec;
        let within_task = f64::from(spec.task_timeout_secs.max(1)) / 4.0;
        (spec.heartbeat_timeout_secs / 5.0).min(within_task).min(1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_that_repeat_too_many_runs_are_refused() {
        let mut set = AppliedSet::new(10);
        for index in [1, 3, 5] {
            set.insert(BatchId { epoch: 0, index });
        }
        let sets = [set.to_bytes(None), set.to_bytes(Some(&set)), set.to_bytes(Some(&set))];
        let sets = sets.map(|applied| proto::PartitionSet { applied, ..Default::default() });
        let states = states_within(sets.to_vec(), 9).unwrap();
        assert!(states.iter().all(|state| state.applied == set));
        let error = states_within(sets.to_vec(), 8).unwrap_err();
        assert!(error.message().contains("more than 8 runs"), "{error}");
    }
}
