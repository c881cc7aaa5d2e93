// SPDX-License-Identifier: Apache-2.0
//! What a master receives, as events, and what it sends, as messages.

use std::ops::Range;

use edl_core::applied::AppliedSet;
use edl_core::goodput::{TimeKind, TimeReport};
use edl_core::id::{
    BatchId, CheckpointId, EvalId, Generation, Incarnation, LeaseId, PartitionId, PsId, WorkerId,
    WorldId,
};
use edl_core::job::{
    CheckpointWriter, Command, Event, HeldLease, Job, LoadFrom, MemberReport, Peer, PsOrder, Work,
};
use edl_core::layout::Layout;
use edl_core::metric::{Measures, MetricKind, Sums};
use edl_core::optimizer;
use edl_core::platform::{ChaosAction, InstanceId, Role};
use edl_core::servers::{PartitionState, ServerMember};
use edl_core::world::{self, Announced};
use tonic::Status;

use super::json;
use crate::proto::{self, PsCommand, WorkerCommand, ps_command, ps_message};
use crate::proto::{worker_command, worker_message};

const UNKNOWN_KIND: &str = "unknown kind of message; run the same build everywhere";
const SECOND_HELLO: &str = "a hello must be the first message of a stream";

/// A worker's message as an event, unless it makes no sense.
pub fn worker_event(
    worker: WorkerId,
    incarnation: Incarnation,
    message: proto::WorkerMessage,
) -> Result<Event, Status> {
    use worker_message::Kind;
    let kind = message.kind.ok_or_else(|| Status::invalid_argument(UNKNOWN_KIND))?;
    let member = |report| Event::Member { worker, incarnation, report };
    Ok(match kind {
        Kind::Hello(_) => return Err(Status::invalid_argument(SECOND_HELLO)),
        Kind::Ready(ready) => Event::WorkerReady {
            worker,
            incarnation,
            model: Box::new(parse(&ready.model_spec_json, "model spec")?),
            capacity: ready.capacity,
            held: ready.held.into_iter().map(held).collect(),
            peer: ready.peer.map(|peer| Box::new(self::peer(peer))),
        },
        Kind::BatchDone(done) => Event::BatchDone {
            worker,
            batch: BatchId { epoch: done.epoch, index: done.index },
            generation: Generation(done.generation),
            loss: done.loss,
        },
        Kind::EvalDone(done) => Event::EvalDone {
            worker,
            eval: EvalId(done.eval),
            shard: done.shard,
            generation: Generation(done.generation),
            measures: Box::new(measures(done.measures)?),
        },
        Kind::PredictDone(done) => Event::PredictDone { worker, shard: done.shard },
        Kind::Failed(failed) => Event::Failed {
            worker,
            incarnation,
            lease: LeaseId(failed.lease),
            item: failed.index,
            error: failed.error,
        },
        Kind::NonFinite(proto::NonFinite { lease, index, error }) => {
            let lease = LeaseId(lease);
            Event::NonFinite { worker, incarnation, lease, item: index, error }
        }
        Kind::Leaving(_) => Event::WorkerLeaving { worker, incarnation },
        Kind::Heartbeat(heartbeat) => {
            let (phase, progress) = (heartbeat.phase(), heartbeat.progress);
            let waiting_for = heartbeat.waiting_for();
            Event::WorkerHeard { worker, incarnation, phase, waiting_for, progress }
        }
        Kind::Spending(spending) => Event::TimeReport {
            instance: worker.into(),
            incarnation,
            report: time_report(&spending)?,
        },
        Kind::CheckpointDone(done) => checkpoint_done(CheckpointWriter::Worker(worker), done),
        Kind::CheckpointFailed(failed) => checkpoint_failed(failed),
        Kind::Formed(report) => member(formed(&report)),
        Kind::Stepped(proto::Stepped { world, step, hash, loss }) => {
            member(MemberReport::Stepped { world: WorldId(world), step, hash, loss })
        }
        Kind::Pace(proto::Pace { lane_secs }) => member(MemberReport::Pace { lane_secs }),
        Kind::PeerLost(report) => member(peer_lost(report)),
        Kind::StepFailed(proto::StepFailed { world, step, error }) => {
            member(MemberReport::StepFailed { world: WorldId(world), step, error })
        }
        Kind::StepNonFinite(proto::StepNonFinite { world, step, error }) => {
            member(MemberReport::NonFinite { world: WorldId(world), step, error })
        }
        Kind::StepMismatch(proto::StepMismatch { world, error }) => {
            member(MemberReport::StepMismatch { world: WorldId(world), error })
        }
        Kind::LoadFailed(proto::LoadFailed { generation, error }) => {
            member(MemberReport::NotLoaded { generation: Generation(generation), error })
        }
    })
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

fn checkpoint_done(holder: CheckpointWriter, done: proto::CheckpointDone) -> Event {
    Event::CheckpointDone {
        holder,
        checkpoint: CheckpointId(done.checkpoint),
        generation: Generation(done.generation),
        files: done.files.into_iter().map(Into::into).collect(),
    }
}

fn checkpoint_failed(failed: proto::CheckpointFailed) -> Event {
    Event::CheckpointFailed { checkpoint: CheckpointId(failed.checkpoint), error: failed.error }
}

/// What a server's message is for its master.
#[derive(Clone, Debug, PartialEq)]
pub enum PsInput {
    Event(Event),
    /// An event, and how much the server had to do.
    Load(Event, proto::PsLoad),
    /// The answer to a request for the state of the partitions.
    Sets {
        request: u64,
        generation: u64,
        sets: Vec<PartitionState>,
    },
}

/// A server's message, unless it makes no sense.
pub fn ps_input(
    ps: PsId,
    incarnation: Incarnation,
    message: proto::PsMessage,
) -> Result<PsInput, Status> {
    use ps_message::Kind;
    let kind = message.kind.ok_or_else(|| Status::invalid_argument(UNKNOWN_KIND))?;
    let event = match kind {
        Kind::Hello(_) => return Err(Status::invalid_argument(SECOND_HELLO)),
        Kind::Sets(proto::Sets { request, generation, sets }) => {
            return Ok(PsInput::Sets { request, generation, sets: partition_states(sets)? });
        }
        Kind::Loaded(loaded) => Event::Loaded {
            ps,
            generation: Generation(loaded.generation),
            sets: partition_states(loaded.sets)?,
        },
        Kind::LoadFailed(failed) => {
            Event::LoadFailed { ps, generation: Generation(failed.generation), error: failed.error }
        }
        Kind::CheckpointStarted(started) => {
            Event::CheckpointStarted { ps, checkpoint: CheckpointId(started.checkpoint) }
        }
        Kind::CheckpointDone(done) => checkpoint_done(CheckpointWriter::Ps(ps), done),
        Kind::CheckpointFailed(failed) => checkpoint_failed(failed),
        Kind::Heartbeat(_) => Event::PsHeard { ps, incarnation },
        Kind::Spending(spending) => {
            let event = Event::TimeReport {
                instance: ps.into(),
                incarnation,
                report: time_report(&spending)?,
            };
            return Ok(match spending.load {
                Some(load) => PsInput::Load(event, load),
                None => PsInput::Event(event),
            });
        }
    };
    Ok(PsInput::Event(event))
}

fn time_report(spending: &proto::Spending) -> Result<TimeReport, Status> {
    let missing = || Status::invalid_argument("a report of spent time contains no times");
    let unknown = |last| Status::invalid_argument(format!("unknown activity {last}"));
    let last = TimeKind::try_from(spending.last).map_err(unknown)?;
    let spent = spending.spent.ok_or_else(missing)?.into();
    Ok(TimeReport { spent, last, step: spending.step })
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
    let mut before: Option<AppliedSet> = None;
    let state = |set: proto::PartitionSet| {
        let applied = AppliedSet::from_bytes(&set.applied, before.as_ref())
            .ok_or_else(|| Status::invalid_argument("cannot parse a set of applied batches"))?;
        before = Some(applied.clone());
        let partition = PartitionId(set.partition);
        Ok(PartitionState { partition, applied, updates: set.updates, n_rows: set.n_rows })
    };
    sets.into_iter().map(state).collect()
}

fn held(held: proto::HeldLease) -> HeldLease {
    HeldLease { lease: LeaseId(held.lease), epoch: held.epoch, indices: held.indices }
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
    let proto::ChaosRequest { id, how, millis, factor, .. } = request;
    let action = ChaosAction::parse(how, *millis, *factor).map_err(Status::invalid_argument)?;
    Ok(Event::Chaos { instance: InstanceId { role, id: *id }, action })
}

/// Encodes what a job's machine sends to workers and servers.
pub struct Encoder<'a> {
    pub job: &'a Job,
    /// Where predictions go.
    pub output: &'a str,
    /// The path of a checkpoint folder: of this job if the flag is set, else one that the user named.
    pub path: &'a dyn Fn(&str, bool) -> String,
}

impl Encoder<'_> {
    /// A command as a worker gets it.
    #[must_use]
    pub fn worker(&self, command: Command) -> WorkerCommand {
        use worker_command::Kind;
        let config = self.job.config();
        let kind = match command {
            Command::Welcome => Kind::Welcome(proto::WorkerWelcome {
                term: config.term.0,
                run: self.job.config().run.to_string(),
                spec_json: json(&config.spec),
                n_records: config.n_records,
                n_validation_records: config.n_validation_records,
                n_prediction_records: config.n_prediction_records,
                heartbeat_secs: self.heartbeat_secs(),
            }),
            Command::Route => Kind::Route(self.route()),
            Command::Lease { lease, work, .. } => Kind::Lease(self.lease(lease, work)),
            Command::Revoke(lease) => Kind::Revoke(proto::Revoke { lease: lease.0 }),
            Command::World(announced) => Kind::World(self.world(announced)),
            Command::Go { world, until } => Kind::Go(proto::Go { world: world.0, until }),
            Command::Checkpoint { checkpoint, generation, folder, at, partitions } => {
                Kind::Checkpoint(proto::WorkerCheckpoint {
                    checkpoint: checkpoint.0,
                    generation: generation.0,
                    folder: (self.path)(&folder, true),
                    at,
                    first_partition: partitions.start,
                    end_partition: partitions.end,
                })
            }
            Command::Ping => Kind::Ping(proto::Ping {}),
            Command::Stop(reason) => Kind::Stop(proto::StopWork { reason }),
        };
        WorkerCommand { kind: Some(kind) }
    }

    /// An order as the server `ps` gets it; `None` if the model's optimizer is invalid.
    #[must_use]
    pub fn ps(&self, ps: PsId, order: PsOrder) -> Option<PsCommand> {
        use ps_command::Kind;
        let config = self.job.config();
        let kind = match order {
            PsOrder::Welcome => Kind::Welcome(proto::PsWelcome {
                term: config.term.0,
                run: self.job.config().run.to_string(),
                spec_json: json(&config.spec),
                heartbeat_secs: self.heartbeat_secs(),
            }),
            PsOrder::Load { generation, from } => {
                let hosted = self.layout().hosted(ps, config.spec.num_ps_pods);
                Kind::Load(self.load(hosted, generation, from)?)
            }
            PsOrder::Serve { generation } => Kind::Serve(proto::Serve { generation: generation.0 }),
            PsOrder::Checkpoint { checkpoint, generation, folder, at } => {
                Kind::Checkpoint(proto::ServerCheckpoint {
                    checkpoint: checkpoint.0,
                    generation: generation.0,
                    folder: (self.path)(&folder, true),
                    at,
                })
            }
            PsOrder::Stop(reason) => Kind::Stop(proto::StopWork { reason }),
        };
        Some(PsCommand { kind: Some(kind) })
    }

    fn lease(&self, lease: LeaseId, work: Work) -> proto::Lease {
        use proto::lease::Work as Wire;
        let work = match work {
            Work::Train { epoch, range, skipped } => Wire::Train(proto::TrainWork {
                epoch,
                first: range.start,
                count: range.end - range.start,
                skipped,
            }),
            Work::Eval { eval, version, shard, records } => Wire::Eval(proto::EvalWork {
                eval: eval.0,
                version,
                shard,
                first_record: records.start,
                end_record: records.end,
            }),
            Work::Predict { shard, records } => Wire::Predict(proto::PredictWork {
                shard,
                first_record: records.start,
                end_record: records.end,
                folder: self.output.to_owned(),
            }),
        };
        proto::Lease { lease: lease.0, work: Some(work) }
    }

    /// Where the partitions are now.
    fn route(&self) -> proto::Route {
        let (servers, layout) = (self.job.servers(), self.layout());
        let server = |(ps, member): (&PsId, &ServerMember)| {
            let hosted = layout.hosted(*ps, servers.n_ps());
            proto::Server {
                ps: ps.0,
                address: member.address.clone(),
                unix_path: member.unix_path.clone(),
                first_partition: hosted.start,
                end_partition: hosted.end,
            }
        };
        let servers_now = servers.members().iter().map(server).collect();
        proto::Route { generation: servers.generation().0, servers: servers_now }
    }

    fn world(&self, announced: Announced) -> proto::World {
        let Announced { world, until, generation, load, skipped } = announced;
        let member = |member: world::Member| {
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
            members: world.members.into_iter().map(member).collect(),
            after: world.after,
            until,
            generation: generation.0,
            load: load.map(|from| self.load_from(from)),
            skipped: skipped.into_iter().collect(),
        }
    }

    fn load(
        &self,
        hosted: Range<u32>,
        generation: Generation,
        from: LoadFrom,
    ) -> Option<proto::Load> {
        let model = self.job.durable().model.as_ref()?;
        let optimizer = match optimizer::resolve(&self.job.config().spec, model) {
            Ok(optimizer) => optimizer,
            Err(error) => {
                // Refused at submit; here it can only come from a master that was started manually.
                tracing::error!(%error, "invalid optimizer");
                return None;
            }
        };
        Some(proto::Load {
            generation: generation.0,
            first_partition: hosted.start,
            end_partition: hosted.end,
            n_partitions: self.layout().n_partitions,
            model_spec_json: json(model),
            optimizer_json: json(&optimizer),
            n_batches: self.job.config().n_batches(),
            from: Some(self.load_from(from)),
        })
    }

    fn load_from(&self, LoadFrom { checkpoint, keep_applied }: LoadFrom) -> proto::LoadFrom {
        let checkpoint = checkpoint.map(|folder| (self.path)(&folder, keep_applied));
        proto::LoadFrom { checkpoint, keep_applied }
    }

    fn layout(&self) -> Layout {
        let dense_len = self.job.durable().model.as_ref().map_or(0, |model| model.dense_len());
        self.job.config().spec.layout(dense_len)
    }

    /// Heartbeats show progress, so several must come before a task is overdue.
    fn heartbeat_secs(&self) -> f64 {
        let spec = &self.job.config().spec;
        let within_task = f64::from(spec.task_timeout_secs.max(1)) / 4.0;
        (spec.heartbeat_timeout_secs / 5.0).min(within_task).min(1.0)
    }
}
