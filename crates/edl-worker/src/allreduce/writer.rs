// SPDX-License-Identifier: Apache-2.0
//! Writes this worker's files of a checkpoint while training continues: the pause is one copy.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use edl_core::job::CheckpointFile;
use edl_core::job::MemberCheckpoint;
use edl_core::member::Event;
use edl_tensor::checkpoint::{self, Snapshot};

use super::replica::Replica;
use super::shell::{MemberShell, Task};
use crate::chain;
use crate::driver::Driver;

/// The thread that writes.
pub(super) struct Writer {
    orders: Sender<(MemberCheckpoint, Vec<Snapshot>)>,
    /// The memory of the last copies, once they are written.
    pub(super) spare: Vec<Snapshot>,
}

impl Writer {
    pub(super) fn start(driver: Driver<MemberShell>) -> std::io::Result<Self> {
        let (orders, queue) = channel();
        let body = move || run(&queue, &driver);
        thread::Builder::new().name("checkpoint".into()).spawn(body)?;
        Ok(Self { orders, spare: Vec::new() })
    }

    /// Copies the partitions of `order`, the first with the `state` of the training script, and has
    /// them written. Fails if the thread has exited.
    pub(super) fn write(
        &mut self,
        order: MemberCheckpoint,
        replica: &Replica,
        state: &[u8],
    ) -> Result<(), String> {
        let mut snapshots = std::mem::take(&mut self.spare);
        replica.snapshot_into(order.partitions.clone(), state, &mut snapshots);
        let sent = self.orders.send((order, snapshots));
        sent.map_err(|_| "the checkpoint thread has exited".into())
    }
}

fn run(orders: &Receiver<(MemberCheckpoint, Vec<Snapshot>)>, driver: &Driver<MemberShell>) {
    for (order, snapshots) in orders {
        let write = |snapshot| checkpoint::write_file(order.folder.as_ref(), snapshot);
        let files = || snapshots.iter().map(write).map(|file| file.map(CheckpointFile::from));
        let result = catch_unwind(AssertUnwindSafe(|| files().collect::<Result<_, _>>()));
        let result = match result {
            Ok(written) => written.map_err(|error| chain(&error)),
            Err(_) => Err("the checkpoint thread panicked".into()),
        };
        let event = Event::Written { checkpoint: order.checkpoint, result };
        driver.handle_data(Task::Spare(snapshots), event);
    }
}
