// SPDX-License-Identifier: Apache-2.0
//! The worker's half of the control plane.

use std::sync::Arc;
use std::time::Duration;

use edl_core::id::{BatchId, CheckpointId, Generation, Incarnation, LeaseId, WorkerId, WorldId};
use edl_core::job::{Command, HeldLease, MemberCheckpoint, MemberReport, Peer};
use edl_core::metric::Sums;
use edl_core::worker::Report;

use super::{checkpoint_done, json, member};
use crate::proto::{self, worker_command, worker_message::Kind};

/// The first message of a stream.
#[must_use]
pub fn hello(worker: WorkerId, incarnation: Incarnation, pid: u32) -> proto::WorkerMessage {
    let protocol = crate::CONTROL_PROTOCOL;
    let hello = proto::WorkerHello { protocol, worker: worker.0, incarnation: incarnation.0, pid };
    proto::WorkerMessage { kind: Some(Kind::Hello(hello)) }
}

/// A report as the master gets it.
#[must_use]
pub fn message(report: Report) -> proto::WorkerMessage {
    let kind = match report {
        Report::Ready { model, capacity, held, peer } => Kind::Ready(proto::Ready {
            model_spec_json: json(&*model),
            capacity,
            held: held.into_iter().map(self::held).collect(),
            peer: peer.map(|peer| {
                let Peer { address, unix_path, probe, step } = *peer;
                proto::Peer { address, unix_path, probe, step }
            }),
        }),
        Report::BatchPushed { batch } => {
            Kind::BatchPushed(proto::BatchPushed { epoch: batch.epoch, index: batch.index })
        }
        Report::BatchDone { batch, generation, loss } => Kind::BatchDone(proto::BatchDone {
            epoch: batch.epoch,
            index: batch.index,
            generation: generation.0,
            loss,
        }),
        Report::EvalDone { eval, shard, measures } => Kind::EvalDone(proto::EvalDone {
            eval: eval.0,
            shard,
            measures: measures.into_iter().map(sums).collect(),
        }),
        Report::PredictDone { shard } => Kind::PredictDone(proto::PredictDone { shard }),
        Report::Failed { lease, index, error } => {
            Kind::Failed(proto::Failed { lease: lease.0, index, error })
        }
        Report::DiskFull { lease, index, error } => {
            Kind::DiskFull(proto::Failed { lease: lease.0, index, error })
        }
        Report::NonFinite { lease, index, error } => {
            Kind::NonFinite(proto::NonFinite { lease: lease.0, index, error })
        }
        Report::Returned { kept } => {
            let batch = |BatchId { epoch, index }| proto::Batch { epoch, index };
            Kind::Returned(proto::Returned { kept: kept.into_iter().map(batch).collect() })
        }
        Report::Leaving => Kind::Leaving(proto::Leaving {}),
        Report::Heartbeat { waiting_for, progress } => {
            Kind::Heartbeat(proto::Heartbeat { waiting_for: waiting_for.into(), progress })
        }
        Report::Spending(report) => Kind::Spending(report.into()),
        Report::Member(news) => self::news(news),
        Report::CheckpointDone { checkpoint, generation, files } => {
            Kind::CheckpointDone(checkpoint_done(checkpoint, generation, files))
        }
        Report::CheckpointFailed { checkpoint, error } => {
            Kind::CheckpointFailed(proto::CheckpointFailed { checkpoint: checkpoint.0, error })
        }
    };
    proto::WorkerMessage { kind: Some(kind) }
}

fn news(news: MemberReport) -> Kind {
    match news {
        MemberReport::Formed { world, step, pause_secs, state_bytes } => {
            Kind::Formed(proto::Formed { world: world.0, step, pause_secs, state_bytes })
        }
        MemberReport::Stepped { world, step, hash, loss } => {
            Kind::Stepped(proto::Stepped { world: world.0, step, hash, loss })
        }
        MemberReport::Paused { world, number, step } => {
            Kind::Paused(proto::Paused { world: world.0, step, number })
        }
        MemberReport::Pace { lane_secs } => Kind::Pace(proto::Pace { lane_secs }),
        MemberReport::PeerLost { world, suspect, error } => {
            Kind::PeerLost(proto::PeerLost { world: world.0, suspect: suspect.0, error })
        }
        MemberReport::StepFailed { world, step, error } => {
            Kind::StepFailed(proto::StepFailed { world: world.0, step, error })
        }
        MemberReport::Quit { world, step } => Kind::Quit(proto::Quit { world: world.0, step }),
        MemberReport::NonFinite { world, step, error } => {
            Kind::StepNonFinite(proto::StepNonFinite { world: world.0, step, error })
        }
        MemberReport::StepMismatch { world, error } => {
            Kind::StepMismatch(proto::StepMismatch { world: world.0, error })
        }
        MemberReport::NotLoaded { generation, error } => {
            Kind::LoadFailed(proto::LoadFailed { generation: generation.0, error })
        }
    }
}

fn sums((name, Sums { kind, sums }): (String, Sums)) -> proto::Sums {
    proto::Sums { name, kind: kind.into(), sums }
}

fn held(held: HeldLease) -> proto::HeldLease {
    proto::HeldLease {
        lease: held.lease.0,
        generation: held.generation.0,
        epoch: held.epoch,
        indices: held.indices,
    }
}

/// A command as a worker takes it; none for a welcome, which its session takes, and for work that
/// this build does not know.
#[must_use]
pub fn command(kind: worker_command::Kind) -> Option<Command> {
    use worker_command::Kind;
    Some(match kind {
        Kind::Welcome(_) => return None,
        Kind::Route(route) => Command::Route(route.into()),
        Kind::Lease(proto::Lease { lease, work }) => {
            Command::Lease { lease: LeaseId(lease), task: work?.into() }
        }
        Kind::Revoke(proto::Revoke { lease }) => Command::Revoke(LeaseId(lease)),
        Kind::World(world) => Command::World(Arc::new(member::announced(&world))),
        Kind::Go(proto::Go { world, until }) => Command::Go { world: WorldId(world), until },
        Kind::Pause(proto::Pause { world, number }) => {
            Command::Pause { world: WorldId(world), number }
        }
        Kind::Checkpoint(order) => Command::Checkpoint(MemberCheckpoint {
            checkpoint: CheckpointId(order.checkpoint),
            generation: Generation(order.generation),
            folder: order.folder,
            at: order.at,
            partitions: order.first_partition..order.end_partition,
        }),
        Kind::Ping(_) => Command::Ping,
        Kind::Drain(proto::Drain { within_ms }) => {
            Command::Drain { within: Duration::from_millis(within_ms) }
        }
        Kind::Stop(proto::StopWork { reason }) => Command::Stop(reason),
    })
}

#[cfg(test)]
mod tests {
    use edl_core::id::EvalId;
    use edl_core::metric::{Measures, Metric};
    use edl_core::worker::{Pass, Shard, Task};
    use prost::Message;

    use super::*;
    use crate::convert::master;

    #[test]
    fn a_lease_becomes_a_task() {
        let work = proto::TrainWork { epoch: 2, first: 3, count: 4, skipped: vec![5] };
        let task = |work| command(worker_command::Kind::Lease(lease(Some(work))));
        let lease = LeaseId(9);
        let train = Task::Train { epoch: 2, indices: 3..7, skipped: vec![5] };
        let expected = Some(Command::Lease { lease, task: train });
        assert_eq!(task(proto::lease::Work::Train(work)), expected);
        let folder = "output".to_owned();
        let work = proto::PredictWork { shard: 1, first_record: 10, end_record: 30, folder };
        let pass = Pass::Predict { folder: "output".into() };
        let predict = Task::Shard(Shard { number: 1, records: 10..30, pass });
        let expected = Some(Command::Lease { lease, task: predict });
        assert_eq!(task(proto::lease::Work::Predict(work)), expected);
        assert_eq!(command(worker_command::Kind::Lease(self::lease(None))), None, "unknown work");
    }

    fn lease(work: Option<proto::lease::Work>) -> proto::Lease {
        proto::Lease { lease: 9, work }
    }

    #[test]
    fn measures_that_are_not_finite_reach_the_master() {
        let metrics = [Metric::loss(), Metric::accuracy()];
        let mut measures = Measures::new(&metrics);
        measures.add_loss(f64::INFINITY, 2);
        measures.add_class(true);
        let report =
            Report::EvalDone { eval: EvalId(2), shard: 3, measures: Box::new(measures.clone()) };
        let sent = message(report).encode_to_vec();
        let received = proto::WorkerMessage::decode(&*sent).unwrap();
        let report = master::worker_report(received).unwrap();
        let Report::EvalDone { measures: found, shard: 3, .. } = report else {
            panic!("{report:?}")
        };
        assert_eq!(*found, measures);
        assert!(found.fits(&metrics));
    }

    #[test]
    fn a_report_keeps_all_its_fields() {
        let report = Report::BatchDone {
            batch: BatchId { epoch: 2, index: 3 },
            generation: Generation(4),
            loss: 0.5,
        };
        let done = proto::BatchDone { epoch: 2, index: 3, generation: 4, loss: 0.5 };
        assert_eq!(message(report).kind, Some(Kind::BatchDone(done)));
    }
}
