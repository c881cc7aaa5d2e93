// SPDX-License-Identifier: Apache-2.0
//! The worker's half of the control plane.

use edl_core::id::{EvalId, Incarnation, LeaseId, WorkerId};
use edl_core::job::{HeldLease, MemberReport, Peer};
use edl_core::metric::Sums;
use edl_core::worker::{Event, Pass, Report, Shard, Task};

use super::{checkpoint_done, json};
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
        Report::BatchDone { batch, generation, loss, .. } => Kind::BatchDone(proto::BatchDone {
            epoch: batch.epoch,
            index: batch.index,
            generation: generation.0,
            loss,
        }),
        Report::EvalDone { eval, shard, generation, measures, .. } => {
            Kind::EvalDone(proto::EvalDone {
                eval: eval.0,
                shard,
                generation: generation.0,
                measures: measures.into_iter().map(sums).collect(),
            })
        }
        Report::PredictDone { shard, .. } => Kind::PredictDone(proto::PredictDone { shard }),
        Report::Failed { lease, index, error } => {
            Kind::Failed(proto::Failed { lease: lease.0, index, error })
        }
        Report::NonFinite { lease, index, error } => {
            Kind::NonFinite(proto::NonFinite { lease: lease.0, index, error })
        }
        Report::Leaving => Kind::Leaving(proto::Leaving {}),
        Report::Heartbeat { step, phase, waiting_for, progress } => {
            Kind::Heartbeat(proto::Heartbeat {
                step,
                phase: phase.into(),
                waiting_for: waiting_for.into(),
                progress,
            })
        }
        Report::Spending(report) => Kind::Spending(report.into()),
        Report::Member(news) => member(news),
        Report::CheckpointDone { checkpoint, generation, files } => {
            Kind::CheckpointDone(checkpoint_done(checkpoint, generation, files))
        }
        Report::CheckpointFailed { checkpoint, error } => {
            Kind::CheckpointFailed(proto::CheckpointFailed { checkpoint: checkpoint.0, error })
        }
    };
    proto::WorkerMessage { kind: Some(kind) }
}

fn member(news: MemberReport) -> Kind {
    match news {
        MemberReport::Formed { world, step, pause_secs, state_bytes } => {
            Kind::Formed(proto::Formed { world: world.0, step, pause_secs, state_bytes })
        }
        MemberReport::Stepped { world, step, hash, loss } => {
            Kind::Stepped(proto::Stepped { world: world.0, step, hash, loss })
        }
        MemberReport::Pace { lane_secs } => Kind::Pace(proto::Pace { lane_secs }),
        MemberReport::PeerLost { world, suspect, error } => {
            Kind::PeerLost(proto::PeerLost { world: world.0, suspect: suspect.0, error })
        }
        MemberReport::StepFailed { world, step, error } => {
            Kind::StepFailed(proto::StepFailed { world: world.0, step, error })
        }
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
    proto::HeldLease { lease: held.lease.0, epoch: held.epoch, indices: held.indices }
}

/// A command as a worker with parameter servers takes it. None for a welcome or a ping, which its
/// session takes, for what only members of a world are sent, and for what this build does not know.
#[must_use]
pub fn event(command: worker_command::Kind) -> Option<Event> {
    use worker_command::Kind as Command;
    match command {
        Command::Route(route) => Some(Event::Route(route.into())),
        Command::Lease(proto::Lease { lease, work, .. }) => {
            Some(Event::Lease { lease: LeaseId(lease), task: task(work?) })
        }
        Command::Revoke(revoke) => Some(Event::Revoke(LeaseId(revoke.lease))),
        Command::Stop(_) => Some(Event::Stop),
        Command::Welcome(_)
        | Command::Ping(_)
        | Command::World(_)
        | Command::Go(_)
        | Command::Checkpoint(_) => None,
    }
}

/// What a lease assigns.
#[must_use]
pub fn task(work: proto::lease::Work) -> Task {
    match work {
        proto::lease::Work::Train(proto::TrainWork { epoch, first, count, skipped }) => {
            Task::Train { epoch, indices: first..first.saturating_add(count), skipped }
        }
        proto::lease::Work::Eval(work) => {
            let proto::EvalWork { eval, version, shard, first_record, end_record } = work;
            let pass = Pass::Evaluate { eval: EvalId(eval), version };
            Task::Shard(Shard { number: shard, records: first_record..end_record, pass })
        }
        proto::lease::Work::Predict(work) => {
            let proto::PredictWork { shard, first_record, end_record, folder } = work;
            let pass = Pass::Predict { folder };
            Task::Shard(Shard { number: shard, records: first_record..end_record, pass })
        }
    }
}

#[cfg(test)]
mod tests {
    use edl_core::id::{BatchId, Generation};
    use edl_core::job;
    use edl_core::metric::{Measures, Metric};
    use prost::Message;

    use super::*;
    use crate::convert::master;

    #[test]
    fn a_lease_becomes_a_task() {
        let work = proto::TrainWork { epoch: 2, first: 3, count: 4, skipped: vec![5] };
        let task = |work| event(worker_command::Kind::Lease(lease(Some(work))));
        let lease = LeaseId(9);
        let train = Task::Train { epoch: 2, indices: 3..7, skipped: vec![5] };
        let expected = Some(Event::Lease { lease, task: train });
        assert_eq!(task(proto::lease::Work::Train(work)), expected);
        let folder = "output".to_owned();
        let work = proto::PredictWork { shard: 1, first_record: 10, end_record: 30, folder };
        let pass = Pass::Predict { folder: "output".into() };
        let predict = Task::Shard(Shard { number: 1, records: 10..30, pass });
        let expected = Some(Event::Lease { lease, task: predict });
        assert_eq!(task(proto::lease::Work::Predict(work)), expected);
        assert_eq!(event(worker_command::Kind::Lease(self::lease(None))), None, "unknown work");
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
        let report = Report::EvalDone {
            lease: LeaseId(1),
            eval: EvalId(2),
            shard: 3,
            generation: Generation(4),
            measures: Box::new(measures.clone()),
            n_records: 2,
        };
        let sent = message(report).encode_to_vec();
        let received = proto::WorkerMessage::decode(&*sent).unwrap();
        let event = master::worker_event(WorkerId(5), Incarnation(6), received).unwrap();
        let job::Event::EvalDone { measures: found, shard: 3, .. } = event else {
            panic!("{event:?}")
        };
        assert_eq!(*found, measures);
        assert!(found.fits(&metrics));
    }

    #[test]
    fn a_report_keeps_all_its_fields() {
        let report = Report::BatchDone {
            lease: LeaseId(1),
            batch: BatchId { epoch: 2, index: 3 },
            generation: Generation(4),
            loss: 0.5,
        };
        let done = proto::BatchDone { epoch: 2, index: 3, generation: 4, loss: 0.5 };
        assert_eq!(message(report).kind, Some(Kind::BatchDone(done)));
    }
}
