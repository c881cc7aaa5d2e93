// SPDX-License-Identifier: Apache-2.0
//! Between the wire's messages and the machine's words.

use std::time::Duration;

use edl_core::applied::AppliedSet;
use edl_core::goodput::{self, Told};
use edl_core::id::{
    BatchId, CutId, EvalId, Generation, Incarnation, LeaseId, PartitionId, PsId, WorkerId, WorldId,
};
use edl_core::job::{CutFile, Event, Held, Holder, News, Peer, Work};
use edl_core::layout::Layout;
use edl_core::platform::{Harm, InstanceId, Role};
use edl_core::servers::{Member, PartitionState, Servers};
use edl_net::proto;
use proto::{ps_message, worker_command, worker_message};
use tonic::Status;

use crate::service::Input;

const UNKNOWN_KIND: &str = "unknown kind of message; run the same build everywhere";
const SECOND_HELLO: &str = "a hello must be the first message of a stream";

/// A worker's message as an event, unless it makes no sense.
pub(crate) fn worker_event(
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

/// A server's message as input for the engine, unless it makes no sense.
pub(crate) fn ps_input(
    number: u64,
    ps: PsId,
    incarnation: Incarnation,
    message: proto::PsMessage,
) -> Result<Input, Status> {
    use ps_message::Kind;
    let kind = message.kind.ok_or_else(|| Status::invalid_argument(UNKNOWN_KIND))?;
    let mut load = None;
    let event = match kind {
        Kind::Hello(_) => return Err(Status::invalid_argument(SECOND_HELLO)),
        Kind::Sets(proto::Sets { request, generation, sets }) => {
            return Ok(Input::PsSets { ps, request, generation, sets: partition_states(sets)? });
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
            load = spending.load;
            Event::Told { instance: ps.into(), incarnation, told: told(&spending)? }
        }
    };
    Ok(Input::PsSaid { number, ps, event, load })
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
pub(crate) fn ps_hello(hello: proto::PsHello) -> Result<Event, Status> {
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
pub(crate) fn harm(request: &proto::HarmRequest) -> Result<Event, Status> {
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

/// A lease as a worker gets it.
pub(crate) fn lease(
    lease: LeaseId,
    timeout: Duration,
    work: Work,
    output: &str,
) -> worker_command::Kind {
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
            folder: output.to_owned(),
        }),
    };
    let deadline_secs = timeout.as_secs_f64();
    worker_command::Kind::Lease(proto::Lease { lease: lease.0, deadline_secs, work: Some(work) })
}

/// Where the partitions are now.
pub(crate) fn route(servers: &Servers, layout: Layout) -> proto::Route {
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
