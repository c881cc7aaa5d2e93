// SPDX-License-Identifier: Apache-2.0
//! The compute thread: owns the model, the records and the parameters, and performs what the
//! worker's machine decides.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, Sender};

use edl_core::error::is_disk_full;
use edl_core::id::{BatchId, LeaseId};
use edl_core::metric::Metric;
use edl_core::worker::{Computed, Event, Fault, Finished, Pass, Shard, Wants, WorkItem};
use edl_net::data::Versions;
use edl_tensor::model::{self, Inputs, Model};
use tracing::{info, trace};

use crate::driver::Driver;
use crate::evaluate::Evaluation;
use crate::feed::Decoded;
use crate::link::Ask;
use crate::predict::{self, Prediction};
use crate::ps_worker::PsWorker;
use crate::servers::{Pull, Push};
use crate::train::{Lookups, Trainer};

/// What the compute thread gets: data from other threads, and what to do with them.
pub(crate) enum Task {
    Records(WorkItem, Decoded),
    Parameters {
        connection: u64,
        item: WorkItem,
        pull: Pull,
        versions: Versions,
    },
    /// A gradient is sent; its buffers can be used again.
    Sent(Push),
    Forget(WorkItem),
    Pull {
        connection: u64,
        item: WorkItem,
        wants: Wants,
    },
    Compute(WorkItem),
    Begin {
        lease: LeaseId,
        shard: Shard,
    },
    Finish(LeaseId),
    Drop(LeaseId),
    End,
}

/// The thread's state.
pub(crate) struct Compute {
    pub(crate) trainer: Trainer,
    pub(crate) metrics: Vec<Metric>,
    pub(crate) log_loss_steps: u64,
    /// Where a relative output folder is.
    pub(crate) job_dir: PathBuf,
    pub(crate) driver: Driver<PsWorker>,
    pub(crate) tasks: Receiver<Task>,
    pub(crate) link: Sender<(u64, Ask)>,
    pub(crate) numbers: Numbers,
}

/// What the machine's items stand for.
#[derive(Default)]
pub(crate) struct Numbers {
    records: BTreeMap<WorkItem, Decoded>,
    pulling: Option<Flight>,
    pulled: Option<(Flight, Pull, Versions)>,
    shards: BTreeMap<LeaseId, Sums>,
    n_trained: u64,
}

/// An item on its way to the servers and back.
struct Flight {
    connection: u64,
    item: WorkItem,
    lookups: Lookups,
}

/// A shard in progress.
enum Sums {
    Evaluation(Evaluation),
    Prediction(Prediction),
}

impl Compute {
    /// Works until the machine ends, or until the session is gone.
    pub(crate) fn run(mut self) {
        while let Ok(task) = self.tasks.recv() {
            match task {
                Task::Records(item, decoded) => drop(self.numbers.records.insert(item, decoded)),
                Task::Parameters { connection, item, pull, versions } => {
                    let flight = self
                        .numbers
                        .pulling
                        .take_if(|flight| (flight.connection, flight.item) == (connection, item));
                    let pulled = flight.map(|flight| (flight, pull, versions));
                    self.numbers.pulled = pulled.or(self.numbers.pulled.take());
                }
                Task::Sent(push) => self.trainer.recycle(push),
                Task::Forget(item) => self.forget(item),
                Task::Pull { connection, item, wants } => self.pull(connection, item, wants),
                Task::Compute(item) => self.compute(item),
                Task::Begin { lease, shard } => self.begin(lease, shard),
                Task::Finish(lease) => self.finish(lease),
                Task::Drop(lease) => drop(self.numbers.shards.remove(&lease)),
                Task::End => return,
            }
        }
    }

    fn forget(&mut self, item: WorkItem) {
        self.numbers.records.remove(&item);
        self.numbers.pulling.take_if(|flight| flight.item == item);
        self.numbers.pulled.take_if(|(flight, ..)| flight.item == item);
    }

    fn pull(&mut self, connection: u64, item: WorkItem, wants: Wants) {
        // Without records, the item was forgotten meanwhile and the machine waits for nothing.
        let Some(decoded) = self.numbers.records.get(&item) else { return };
        match self.trainer.prepare(&decoded.batch, wants) {
            Ok((lookups, pull)) => {
                self.numbers.pulling = Some(Flight { connection, item, lookups });
                // A link that is gone is reported by its thread.
                let _ = self.link.send((connection, Ask::Pull(item, pull)));
            }
            Err(error) => {
                let error = describe(&error, item, decoded);
                self.driver.handle(Event::NotPulled { connection, item, error });
            }
        }
    }

    fn compute(&mut self, item: WorkItem) {
        let decoded = self.numbers.records.remove(&item).expect("records are kept until computed");
        let pulled = self.numbers.pulled.take().filter(|(flight, ..)| flight.item == item);
        let (flight, pull, versions) = pulled.expect("the item that is computed was pulled last");
        let ids = self.trainer.accept(&flight.lookups, pull, versions);
        match item {
            WorkItem::Batch(batch) => self.train(batch, &decoded, &flight.lookups, ids),
            WorkItem::Piece { lease, .. } => self.add_piece(lease, item, &decoded),
        }
        self.trainer.recycle_lookups(flight.lookups);
    }

    fn train(&mut self, batch: BatchId, decoded: &Decoded, lookups: &Lookups, ids: Vec<Vec<u64>>) {
        let item = WorkItem::Batch(batch);
        let (loss, push) = match self.trainer.train(batch, &decoded.batch, lookups, ids) {
            Ok(trained) => trained,
            Err(error) => {
                let text = describe(&error, item, decoded);
                let result = Err(match error {
                    model::Error::NonFinite(_) => Fault::NonFinite(text),
                    model::Error::Column { .. }
                    | model::Error::Record { .. }
                    | model::Error::Quit
                    | model::Error::Other(_) => Fault::Failed(text),
                });
                return self.driver.handle(Event::Computed { item, result });
            }
        };
        self.numbers.n_trained += 1;
        let step = self.numbers.n_trained;
        let is_due = self.log_loss_steps > 0 && step.is_multiple_of(self.log_loss_steps);
        if step == 1 || is_due {
            info!("{}", loss_line(loss, step));
        }
        trace!(%batch, loss, "batch trained");
        let unused = self.driver.trained(batch, loss, push);
        unused.into_iter().for_each(|push| self.trainer.recycle(push));
    }

    fn add_piece(&mut self, lease: LeaseId, item: WorkItem, decoded: &Decoded) {
        let added = match self.numbers.shards.get_mut(&lease) {
            Some(sums) => {
                self.trainer.pass(&decoded.batch, |model, inputs| sums.add(model, inputs))
            }
            // Dropped meanwhile; the machine ignores the result.
            None => Ok(()),
        };
        let result = added
            .map(|()| Computed::Piece)
            .map_err(|error| fault(&error, describe(&error, item, decoded)));
        self.driver.handle(Event::Computed { item, result });
    }

    fn begin(&mut self, lease: LeaseId, shard: Shard) {
        let sums = match shard.pass {
            Pass::Evaluate { .. } => Sums::Evaluation(Evaluation::new(&self.metrics)),
            Pass::Predict { folder } => {
                match Prediction::new(shard.number, &self.job_dir.join(folder), lease) {
                    Ok(prediction) => Sums::Prediction(prediction),
                    Err(error) => {
                        let fault = fault(&error, error.to_string());
                        return self.driver.handle(Event::NotBegun { lease, fault });
                    }
                }
            }
        };
        self.numbers.shards.insert(lease, sums);
    }

    fn finish(&mut self, lease: LeaseId) {
        let Some(sums) = self.numbers.shards.remove(&lease) else { return };
        let result = sums.finish().map_err(|error| fault(&error, error.to_string()));
        self.driver.handle(Event::Finished { lease, result });
    }
}

impl Sums {
    /// Adds the next minibatch.
    fn add(&mut self, model: &mut dyn Model, inputs: Inputs<'_>) -> Result<(), predict::Error> {
        match self {
            Self::Evaluation(evaluation) => Ok(evaluation.add(model, inputs)?),
            Self::Prediction(prediction) => prediction.add(model, inputs),
        }
    }

    fn finish(self) -> Result<Finished, predict::Error> {
        match self {
            Self::Evaluation(evaluation) => Ok(evaluation.finish()),
            Self::Prediction(prediction) => prediction.publish().map(|()| Finished::Prediction),
        }
    }
}

fn fault(error: &predict::Error, text: String) -> Fault {
    if is_disk_full(error) { Fault::DiskFull(text) } else { Fault::Failed(text) }
}

/// An error of the model with the place of the records in the data.
fn describe(error: &dyn std::error::Error, item: WorkItem, decoded: &Decoded) -> String {
    let records = decoded.describe();
    match item {
        WorkItem::Batch(batch) => format!("{error} (batch {batch}: {records})"),
        WorkItem::Piece { .. } => format!("{error} ({records})"),
    }
}

/// The line that users look for in a worker's log.
pub(crate) fn loss_line(loss: f32, step: u64) -> String {
    format!("Loss = {loss:.3}, steps = {step}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loss_is_logged_in_the_form_that_users_grep_for() {
        assert_eq!(loss_line(0.0834, 100), "Loss = 0.083, steps = 100");
    }
}
