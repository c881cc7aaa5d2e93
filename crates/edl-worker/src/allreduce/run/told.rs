// SPDX-License-Identifier: Apache-2.0
//! Between the session and the machine: events in, reports out.

use edl_core::job::{CutFile, News};
use edl_core::member::{Event, Place};
use edl_core::metric::Measures;
use edl_core::worker::Report;
use edl_net::convert;
use edl_net::proto::{self, worker_message::Kind};
use tracing::{debug, info, warn};

use super::{Run, Sums};
use crate::allreduce::inbox;
use crate::compute::{self, Died, Loan};
use crate::feed::Decoded;

impl Run {
    pub(super) fn hear(&mut self, event: compute::Event) {
        let event = match event {
            compute::Event::AllReduce(event) => match self.hear_member(*event) {
                Some(event) => event,
                None => return,
            },
            compute::Event::Lease(lease, Loan::Evaluate(work)) => {
                debug!(%lease, ?work, "lease received");
                let measures = Measures::new(&self.setup.metrics);
                self.shards.insert(lease, Sums { measures, n_records: 0 });
                Event::Lease { lease, task: convert::member::task(&work) }
            }
            compute::Event::Revoke(lease) => {
                debug!(%lease, "lease revoked");
                Event::Revoke(lease)
            }
            compute::Event::Rejoined => Event::Rejoined,
            compute::Event::Route(route) => Event::Route(route),
            compute::Event::Leave => Event::Leave,
            compute::Event::Stop => Event::Stop,
            compute::Event::Died(thread) => {
                self.died = Some(Died(thread));
                return;
            }
            compute::Event::Lease(_, Loan::Other) => {
                warn!("ignored a command for another strategy");
                return;
            }
        };
        self.handle(event);
    }

    fn hear_member(&mut self, event: inbox::Event) -> Option<Event> {
        Some(match event {
            inbox::Event::World(announced, peers) => {
                let (id, n_members) = (announced.world.id, announced.world.members.len());
                info!(world = %id, n_members, after = announced.world.after, "new world announced");
                self.peers.insert(id, peers);
                Event::World(announced)
            }
            inbox::Event::Go { world, until } => Event::Go { world, until },
            inbox::Event::Checkpoint(order) => Event::Checkpoint(order),
            inbox::Event::Decoded(place, records) => {
                let result = self.decoded(place, records)?;
                Event::Decoded { place, result }
            }
            inbox::Event::Written(written) => {
                let (cut, result) = self.setup.writer.written(written);
                Event::Written { cut, result }
            }
        })
    }

    /// Keeps records, unless they are not wanted any more.
    fn decoded(
        &mut self,
        place: Place,
        records: Result<Decoded, String>,
    ) -> Option<Result<(), String>> {
        let slot = self.records.get_mut(&place)?;
        match records {
            Ok(records) => {
                *slot = Some(records);
                Some(Ok(()))
            }
            Err(error) => {
                self.records.remove(&place);
                Some(Err(error))
            }
        }
    }

    pub(super) fn report(&mut self, report: Report) {
        log(&report);
        let Some(kind) = kind(report, || self.setup.mesh.transport()) else { return };
        // The session takes reports as long as it lives, connected or not.
        if self.setup.reports.blocking_send(kind).is_err() {
            self.answers.push_back(Event::Stop);
        }
    }
}

/// A report on the wire; none for what a member never reports.
fn kind(report: Report, transport: impl FnOnce() -> String) -> Option<Kind> {
    Some(match report {
        Report::Member(news) => convert::member::news(news, transport),
        Report::EvalDone { lease, eval, shard, generation, measures, n_records } => {
            Kind::EvalDone(proto::EvalDone {
                lease: lease.0,
                eval: eval.0,
                shard,
                measures_json: serde_json::to_string(&measures).expect("sums are plain numbers"),
                n_records,
                generation: generation.0,
            })
        }
        Report::Failed { lease, index, error } => {
            Kind::Failed(proto::Failed { lease: lease.0, index, error })
        }
        Report::CheckpointDone { cut, generation, files } => Kind::CutDone(proto::CutDone {
            cut: cut.0,
            generation: generation.0,
            files: files.into_iter().map(file).collect(),
        }),
        Report::CheckpointFailed { cut, generation, error } => {
            Kind::CutFailed(proto::CutFailed { cut: cut.0, generation: generation.0, error })
        }
        Report::Ready { .. }
        | Report::BatchDone { .. }
        | Report::PredictDone { .. }
        | Report::Leaving
        | Report::Heartbeat { .. }
        | Report::Spending(_) => return None,
    })
}

fn file(file: CutFile) -> proto::CheckpointFile {
    proto::CheckpointFile {
        partition: file.partition,
        name: file.name,
        bytes: file.bytes,
        checksum: file.checksum,
        updates: file.updates,
    }
}

fn log(report: &Report) {
    match report {
        Report::Member(News::Formed { world, step, pause_secs, state_bytes }) => {
            info!(%world, step, state_bytes, pause_secs, "world formed");
        }
        Report::Member(News::PeerLost { world, suspect, error }) => {
            warn!(%world, %suspect, error, "lost a member of the world");
        }
        Report::Member(News::StepFailed { world, step, error }) => {
            warn!(%world, step, error, "step failed");
        }
        Report::Member(News::Torn { world, error }) => {
            warn!(%world, error, "the parameter servers are at a different step");
        }
        Report::Member(News::NotLoaded { generation, error }) => {
            warn!(%generation, error, "cannot load");
        }
        Report::Failed { lease, index, error } => {
            warn!(%lease, index, error, "work failed; returning it to the master");
        }
        Report::CheckpointFailed { cut, error, .. } => {
            warn!(%cut, error, "cannot write a checkpoint");
        }
        Report::Member(News::Stepped { .. } | News::Pace { .. })
        | Report::Ready { .. }
        | Report::BatchDone { .. }
        | Report::EvalDone { .. }
        | Report::PredictDone { .. }
        | Report::Leaving
        | Report::Heartbeat { .. }
        | Report::Spending(_)
        | Report::CheckpointDone { .. } => {}
    }
}
