// SPDX-License-Identifier: Apache-2.0
//! The worker's half of the control plane.

use edl_core::goodput::Told;
use edl_core::id::{EvalId, Incarnation, LeaseId, WorkerId, WorldId};
use edl_core::job::{CutFile, Held, News, Peer};
use edl_core::worker::{Event, Pass, Report, Shard, Task};

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
    proto::WorkerMessage { kind: Some(kind(report)) }
}

fn kind(report: Report) -> Kind {
    match report {
        Report::Ready { model, capacity, held, peer, world } => Kind::Ready(proto::Ready {
            model_spec_json: json(&*model),
            capacity,
            held: held.into_iter().map(self::held).collect(),
            peer: peer.map(|peer| self::peer(*peer, world)),
        }),
        Report::BatchDone { lease, batch, generation, loss, n_records } => {
            Kind::BatchDone(proto::BatchDone {
                lease: lease.0,
                epoch: batch.epoch,
                index: batch.index,
                generation: generation.0,
                loss,
                n_records,
            })
        }
        Report::EvalDone { lease, eval, shard, generation, measures, n_records } => {
            Kind::EvalDone(proto::EvalDone {
                lease: lease.0,
                eval: eval.0,
                shard,
                measures_json: json(&*measures),
                n_records,
                generation: generation.0,
            })
        }
        Report::PredictDone { lease, shard, file, n_records } => {
            Kind::PredictDone(proto::PredictDone { lease: lease.0, shard, file, n_records })
        }
        Report::Failed { lease, index, error } => {
            Kind::Failed(proto::Failed { lease: lease.0, index, error })
        }
        Report::Leaving => Kind::Leaving(proto::Leaving { reason: "asked to exit".into() }),
        Report::Heartbeat { step, phase, waiting_for } => {
            Kind::Heartbeat(proto::Heartbeat { step, phase, waiting_for })
        }
        Report::Spending(Told { spent, last, step }) => Kind::Spending(proto::Spending {
            spent: Some(spent.into()),
            last: last.name().into(),
            step,
            load: None,
        }),
        Report::Member(news) => member(news),
        Report::CheckpointDone { cut, generation, files } => Kind::CutDone(proto::CutDone {
            cut: cut.0,
            generation: generation.0,
            files: files.into_iter().map(file).collect(),
        }),
        Report::CheckpointFailed { cut, generation, error } => {
            Kind::CutFailed(proto::CutFailed { cut: cut.0, generation: generation.0, error })
        }
    }
}

fn member(news: News) -> Kind {
    match news {
        News::Formed { world, step, pause_secs, state_bytes } => Kind::Formed(proto::Formed {
            world: world.0,
            step,
            pause_secs,
            state_bytes,
            ..proto::Formed::default()
        }),
        News::Stepped { world, step, hash, loss } => {
            Kind::Stepped(proto::Stepped { world: world.0, step, hash, loss })
        }
        News::Pace { lane_secs } => Kind::Pace(proto::Pace { lane_secs }),
        News::PeerLost { world, suspect, error } => {
            Kind::PeerLost(proto::PeerLost { world: world.0, suspect: suspect.0, error })
        }
        News::StepFailed { world, step, error } => {
            Kind::StepFailed(proto::StepFailed { world: world.0, step, error })
        }
        News::Torn { world, error } => Kind::Torn(proto::Torn { world: world.0, error }),
        News::NotLoaded { generation, error } => {
            Kind::LoadFailed(proto::LoadFailed { generation: generation.0, error })
        }
    }
}

fn held(held: Held) -> proto::HeldLease {
    proto::HeldLease { lease: held.lease.0, epoch: held.epoch, indices: held.indices }
}

fn peer(peer: Peer, world: WorldId) -> proto::Peer {
    let Peer { address, unix_path, probe, step } = peer;
    proto::Peer { address, unix_path, probe, world: world.0, step: step.unwrap_or(0) }
}

fn file(file: CutFile) -> proto::CheckpointFile {
    let CutFile { partition, name, bytes, checksum, updates } = file;
    proto::CheckpointFile { partition, name, bytes, checksum, updates }
}

fn json(value: &impl serde::Serialize) -> String {
    serde_json::to_string(value).expect("names and numbers can be serialized")
}

/// A command as a worker with parameter servers takes it. None for a welcome, which its session
/// takes, for what only members of a world are sent, and for what this build does not know.
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
        Command::Welcome(_) | Command::World(_) | Command::Go(_) | Command::Cut(_) => None,
    }
}

/// What a lease assigns.
#[must_use]
pub fn task(work: proto::lease::Work) -> Task {
    match work {
        proto::lease::Work::Train(proto::TrainWork { epoch, first, count }) => {
            Task::Train { epoch, indices: first..first.saturating_add(count) }
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

    use super::*;

    #[test]
    fn a_lease_becomes_a_task() {
        let work = proto::TrainWork { epoch: 2, first: 3, count: 4 };
        let task = |work| event(worker_command::Kind::Lease(lease(Some(work))));
        let lease = LeaseId(9);
        let train = Task::Train { epoch: 2, indices: 3..7 };
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
        proto::Lease { lease: 9, deadline_secs: 1.0, work }
    }

    #[test]
    fn a_report_keeps_all_its_fields() {
        let report = Report::BatchDone {
            lease: LeaseId(1),
            batch: BatchId { epoch: 2, index: 3 },
            generation: Generation(4),
            loss: 0.5,
            n_records: 6,
        };
        let done = proto::BatchDone {
            lease: 1,
            epoch: 2,
            index: 3,
            generation: 4,
            loss: 0.5,
            n_records: 6,
        };
        assert_eq!(message(report).kind, Some(Kind::BatchDone(done)));
    }
}
