// SPDX-License-Identifier: Apache-2.0
//! Shards of the validation data, measured on the state that this worker holds.

use edl_core::goodput;
use edl_core::id::{LeaseId, WorldId};
use edl_net::proto::{self, worker_message::Kind};
use tracing::warn;

use super::{Run, Setup};
use crate::allreduce::inbox::{Halt, Lent, Place};
use crate::compute::Died;
use crate::feed::Read;

/// Minibatches of a shard that are read beyond the one at hand.
const PIECES_AHEAD: u32 = 2;

impl Run {
    /// Measures the next minibatch of a shard.
    pub(super) fn evaluate(&mut self, lease: LeaseId) -> Result<(), Died> {
        self.flush();
        let Setup { inbox, lanes, progress, .. } = &mut self.setup;
        let Some(replica) = &self.replica else { return Ok(()) };
        let Some(Lent { version, shard, n_done }) = inbox.shards.get(&lease) else { return Ok(()) };
        let (step, piece, n_pieces) = (replica.step(), *n_done, shard.n_pieces());
        if *version != step {
            let error = format!("step {version} has passed: this worker is at step {step}");
            self.fail_lease(lease, error);
            return Ok(());
        }
        if piece >= n_pieces {
            self.finish_shard(lease);
            return Ok(());
        }
        progress.busy("evaluating");
        let pieces = piece..n_pieces.min(piece + 1 + PIECES_AHEAD);
        let reads: Vec<(u32, Read)> = pieces.map(|piece| (piece, shard.read(piece))).collect();
        for (piece, read) in reads {
            inbox.ask(Place::Piece(lease, piece), || read);
        }
        progress.spending.on(goodput::Kind::DataWait);
        let read = inbox.records(Place::Piece(lease, piece));
        progress.spending.on(goodput::Kind::Compute);
        let records = match read {
            Ok(records) => records,
            Err(Halt::Interrupted) => return Ok(()),
            Err(Halt::Died(died)) => return Err(died),
            Err(Halt::Failed(error) | Halt::Servers(error) | Halt::Torn(error)) => {
                self.fail_lease(lease, error);
                return Ok(());
            }
        };
        let (generation, held) = (replica.generation, (step, replica.dense()));
        let connected = lanes.tables().connect(inbox.route.as_ref(), generation);
        // It may have been revoked while its records were read.
        let Some(lent) = inbox.shards.get_mut(&lease) else { return Ok(()) };
        let passed = connected.and_then(|()| {
            lanes.pass(&records, held, |model, inputs| lent.shard.add(model, inputs))
        });
        match passed {
            Ok(Ok(())) => lent.n_done += 1,
            Err(Halt::Interrupted) => {}
            Err(Halt::Died(died)) => return Err(died),
            // Nothing is wrong with the records: they are measured when the servers are there.
            Err(Halt::Servers(error)) => self.wait_for_servers(&error)?,
            Err(Halt::Torn(error)) => {
                self.fail_lease(lease, error.clone());
                let world = self.world.as_ref().map_or(WorldId(0), |world| world.id);
                self.torn(world, error);
            }
            Err(Halt::Failed(error)) => {
                let error = format!("{error} ({})", records.describe());
                self.fail_lease(lease, error);
            }
            Ok(Err(error)) => {
                let error = format!("{error} ({})", records.describe());
                self.fail_lease(lease, error);
            }
        }
        Ok(())
    }

    fn finish_shard(&mut self, lease: LeaseId) {
        let Some(Lent { shard, .. }) = self.forget_lease(lease) else { return };
        let Some(replica) = &self.replica else { return };
        let number = shard.number();
        match shard.done(lease, replica.generation) {
            Ok(done) => self.report(done),
            Err(error) => self.report_failure(lease, number, error.to_string()),
        }
    }

    fn fail_lease(&mut self, lease: LeaseId, error: String) {
        let Some(lent) = self.forget_lease(lease) else { return };
        self.report_failure(lease, lent.shard.number(), error);
    }

    fn forget_lease(&mut self, lease: LeaseId) -> Option<Lent> {
        let inbox = &mut self.setup.inbox;
        inbox.keep(|place| !matches!(place, Place::Piece(of, _) if of == lease));
        inbox.shards.remove(&lease)
    }

    fn report_failure(&mut self, lease: LeaseId, index: u32, error: String) {
        warn!(%lease, index, error, "work failed; returning it to the master");
        self.report(Kind::Failed(proto::Failed { lease: lease.0, index, error }));
    }
}
