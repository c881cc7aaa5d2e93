// SPDX-License-Identifier: Apache-2.0
//! What a master receives, as events, and what it sends, as messages.

use std::ops::Range;
use std::time::Duration;

use edl_core::applied::AppliedSet;
use edl_core::goodput::{self, Told};
use edl_core::id::{
    BatchId, CutId, EvalId, Generation, Incarnation, LeaseId, PartitionId, PsId, RunId, WorkerId,
    WorldId,
};
use edl_core::job::{
    Command, CutFile, Event, Held, Holder, Job, LoadFrom, News, Peer, PsOrder, Work,
};
use edl_core::layout::Layout;
use edl_core::optimizer;
use edl_core::platform::{Harm, InstanceId, Role};
use edl_core::servers::{Member, PartitionState};
use edl_core::world::{self, World};
use serde::Serialize;
use tonic::Status;

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
            measures: Box::new(parse(&done.measures_json, "measures")?),
        },
        Kind::PredictDone(done) => Event::PredictDone { worker, shard: done.shard },
        Kind::Failed(failed) => Event::Failed {
            worker,
            incarnation,
            lease: LeaseId(failed.lease),
            item: failed.index,
            error: failed.error,
        },
        Kind::Leaving(_) => Event::WorkerLeaving { worker, incarnation },
        Kind::Heartbeat(heartbeat) => {
            Event::WorkerHeard { worker, incarnation, waiting_for: heartbeat.waiting_for }
        }
        Kind::Spending(spending) => {
            Event::Told { instance: worker.into(), incarnation, told: told(&spending)? }
        }
        Kind::CutDone(done) => cut_done(Holder::Worker(worker), done),
        Kind::CutFailed(failed) => cut_failed(failed),
        Kind::Formed(formed) => {
            let proto::Formed { world, step, pause_secs, state_bytes, .. } = formed;
            let world = WorldId(world);
            member(worker, incarnation, News::Formed { world, step, pause_secs, state_bytes })
        }
        Kind::Stepped(proto::Stepped { world, step, hash, loss }) => {
            let world = WorldId(world);
            member(worker, incarnation, News::Stepped { world, step, hash, loss })
        }
        Kind::Pace(proto::Pace { lane_secs }) => {
            member(worker, incarnation, News::Pace { lane_secs })
        }
        Kind::PeerLost(proto::PeerLost { world, suspect, error }) => {
            let (world, suspect) = (WorldId(world), WorkerId(suspect));
            member(worker, incarnation, News::PeerLost { world, suspect, error })
        }
        Kind::StepFailed(proto::StepFailed { world, step, error }) => {
            member(worker, incarnation, News::StepFailed { world: WorldId(world), step, error })
        }
        Kind::Torn(proto::Torn { world, error }) => {
            member(worker, incarnation, News::Torn { world: WorldId(world), error })
        }
        Kind::LoadFailed(proto::LoadFailed { generation, error }) => {
            let generation = Generation(generation);
            member(worker, incarnation, News::NotLoaded { generation, error })
        }
    })
}

fn member(worker: WorkerId, incarnation: Incarnation, news: News) -> Event {
    Event::Member { worker, incarnation, news }
}

fn peer(peer: proto::Peer) -> Peer {
    let proto::Peer { address, unix_path, probe, world, step } = peer;
    Peer { address, unix_path, probe, step: (world > 0).then_some(step) }
}

fn cut_done(holder: Holder, done: proto::CutDone) -> Event {
    Event::CutDone {
        holder,
        cut: CutId(done.cut),
        generation: Generation(done.generation),
        files: done.files.into_iter().map(cut_file).collect(),
    }
}

fn cut_failed(failed: proto::CutFailed) -> Event {
    Event::CutFailed { cut: CutId(failed.cut), error: failed.error }
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
        Kind::CutDone(done) => cut_done(Holder::Ps(ps), done),
        Kind::CutFailed(failed) => cut_failed(failed),
        Kind::Heartbeat(_) => Event::PsHeard { ps, incarnation },
        Kind::Spending(spending) => {
            let event = Event::Told { instance: ps.into(), incarnation, told: told(&spending)? };
            return Ok(match spending.load {
                Some(load) => PsInput::Load(event, load),
                None => PsInput::Event(event),
            });
        }
    };
    Ok(PsInput::Event(event))
}

fn told(spending: &proto::Spending) -> Result<Told, Status> {
    let proto::Spending { spent, last, step, .. } = spending;
    let kind = goodput::Kind::ALL.into_iter().find(|kind| kind.name() == last);
    let unknown = || Status::invalid_argument(format!("unknown activity `{last}`"));
    let missing = || Status::invalid_argument("a report of spent time contains no times");
    let (last, spent) = (kind.ok_or_else(unknown)?, spent.ok_or_else(missing)?.into());
    Ok(Told { spent, last, step: *step })
}

/// The event of a server's first message.
pub fn ps_hello(hello: proto::PsHello) -> Result<Event, Status> {
    let member = Member {
        incarnation: Incarnation(hello.incarnation),
        address: hello.address,
        unix_path: hello.unix_path,
        generation: Generation(hello.generation),
        sets: partition_states(hello.sets)?,
    };
    Ok(Event::PsConnected { ps: PsId(hello.ps), pid: hello.pid, member: Box::new(member) })
}

fn partition_states(sets: Vec<proto::PartitionSet>) -> Result<Vec<PartitionState>, Status> {
    let state = |set: proto::PartitionSet| {
        let applied = AppliedSet::from_bytes(&set.applied)
            .ok_or_else(|| Status::invalid_argument("cannot parse a set of applied batches"))?;
        let partition = PartitionId(set.partition);
        Ok(PartitionState { partition, applied, updates: set.updates, n_rows: set.n_rows })
    };
    sets.into_iter().map(state).collect()
}

fn held(held: proto::HeldLease) -> Held {
    Held { lease: LeaseId(held.lease), epoch: held.epoch, indices: held.indices }
}

fn cut_file(file: proto::CheckpointFile) -> CutFile {
    CutFile {
        partition: file.partition,
        name: file.name,
        bytes: file.bytes,
        checksum: file.checksum,
        updates: file.updates,
    }
}

fn parse<T: serde::de::DeserializeOwned>(json: &str, what: &str) -> Result<T, Status> {
    serde_json::from_str(json)
        .map_err(|error| Status::invalid_argument(format!("cannot parse the {what}: {error}")))
}

/// Whom somebody wants to harm, and how.
pub fn harm(request: &proto::HarmRequest) -> Result<Event, Status> {
    let proto::HarmRequest { role, id, how, millis, factor } = request;
    let role = match role.as_str() {
        "worker" => Role::Worker,
        "ps" => Role::Ps,
        other => {
            let why = format!("`{other}` cannot be a chaos target; name a worker or a ps");
            return Err(Status::invalid_argument(why));
        }
    };
    let harm = Harm::parse(how, *millis, *factor).map_err(Status::invalid_argument)?;
    Ok(Event::Harm { instance: InstanceId { role, id: *id }, harm })
}

/// Encodes what a job's machine sends to workers and servers.
pub struct Encoder<'a> {
    pub job: &'a Job,
    pub run: RunId,
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
                run: self.run.to_string(),
                spec_json: json(&config.spec),
                n_records: config.n_records,
                n_validation_records: config.n_validation_records,
                n_prediction_records: config.n_prediction_records,
                heartbeat_secs: self.heartbeat_secs(),
            }),
            Command::Route => Kind::Route(self.route()),
            Command::Lease { lease, timeout, work } => {
                Kind::Lease(self.lease(lease, timeout, work))
            }
            Command::Revoke(lease) => Kind::Revoke(proto::Revoke { lease: lease.0 }),
            Command::World { world, until, generation, load } => {
                Kind::World(self.world(world, until, generation, load))
            }
            Command::Go { world, until } => Kind::Go(proto::Go { world: world.0, until }),
            Command::Cut { cut, generation, folder, at, partitions } => Kind::Cut(proto::CutAt {
                cut: cut.0,
                generation: generation.0,
                folder: (self.path)(&folder, true),
                at,
                first_partition: partitions.start,
                end_partition: partitions.end,
            }),
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
                run: self.run.to_string(),
                spec_json: json(&config.spec),
                heartbeat_secs: self.heartbeat_secs(),
            }),
            PsOrder::Load { generation, from } => {
                let hosted = self.layout().hosted(ps, config.spec.num_ps_pods);
                Kind::Load(self.load(hosted, generation, from)?)
            }
            PsOrder::Serve { generation } => Kind::Serve(proto::Serve { generation: generation.0 }),
            PsOrder::Cut { cut, generation, folder, at } => Kind::Cut(proto::Cut {
                cut: cut.0,
                generation: generation.0,
                folder: (self.path)(&folder, true),
                at,
            }),
            PsOrder::Stop(reason) => Kind::Stop(proto::StopWork { reason }),
        };
        Some(PsCommand { kind: Some(kind) })
    }

    fn lease(&self, lease: LeaseId, timeout: Duration, work: Work) -> proto::Lease {
        use proto::lease::Work as Wire;
        let work = match work {
            Work::Train { epoch, range } => Wire::Train(proto::TrainWork {
                epoch,
                first: range.start,
                count: range.end - range.start,
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
        let deadline_secs = timeout.as_secs_f64();
        proto::Lease { lease: lease.0, deadline_secs, work: Some(work) }
    }

    /// Where the partitions are now.
    fn route(&self) -> proto::Route {
        let (servers, layout) = (self.job.servers(), self.layout());
        let server = |(ps, member): (&PsId, &Member)| {
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

    fn world(
        &self,
        world: World,
        until: u64,
        generation: Generation,
        load: Option<LoadFrom>,
    ) -> proto::World {
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
        let all = self.layout().with_segments();
        proto::World {
            world: world.id.0,
            members: world.members.into_iter().map(member).collect(),
            after: world.after,
            until,
            generation: generation.0,
            load: load.and_then(|from| self.load(all, generation, from)),
        }
    }

    fn load(
        &self,
        hosted: Range<u32>,
        generation: Generation,
        LoadFrom { checkpoint, keep_applied }: LoadFrom,
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
        let folder = checkpoint.map(|folder| (self.path)(&folder, keep_applied));
        Some(proto::Load {
            generation: generation.0,
            first_partition: hosted.start,
            end_partition: hosted.end,
            n_partitions: self.layout().n_partitions,
            model_spec_json: json(model),
            optimizer_json: json(&optimizer),
            n_batches: self.job.config().n_batches(),
            checkpoint: folder.unwrap_or_default(),
            keep_applied,
        })
    }

    fn layout(&self) -> Layout {
        let dense_len = self.job.durable().model.as_ref().map_or(0, |model| model.dense_len());
        self.job.config().spec.layout(dense_len)
    }

    fn heartbeat_secs(&self) -> f64 {
        (self.job.config().spec.heartbeat_timeout_secs / 5.0).min(1.0)
    }
}

fn json(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("our own types have a JSON form")
}
