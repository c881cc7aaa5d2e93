// SPDX-License-Identifier: Apache-2.0
//! Writes this worker's files of a checkpoint while training continues: the pause is one copy.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use edl_core::id::CutId;
use edl_core::job::CutFile;
use edl_core::member::Order;
use edl_tensor::checkpoint::{self, FileEntry, Snapshot};

use super::Event;
use super::replica::Replica;
use crate::chain;
use crate::compute;

/// The thread that writes.
pub(super) struct Writer {
    jobs: Sender<(Order, Vec<Snapshot>)>,
    /// The memory of the last copies, once they are written.
    spare: Vec<Snapshot>,
}

/// How the files of a checkpoint were written.
pub(crate) struct Written {
    pub(super) cut: CutId,
    pub(super) result: Result<Vec<CutFile>, String>,
    spare: Vec<Snapshot>,
}

impl Writer {
    pub(super) fn start(events: Sender<compute::Event>) -> std::io::Result<Self> {
        let (jobs, asked) = channel();
        let body = move || run(&asked, &events);
        thread::Builder::new().name("checkpoint".into()).spawn(body)?;
        Ok(Self { jobs, spare: Vec::new() })
    }

    /// Copies what `order` names and lets it be written; fails if there is no thread any more.
    pub(super) fn write(&mut self, order: Order, replica: &Replica) -> Result<(), String> {
        let mut snapshots = std::mem::take(&mut self.spare);
        replica.snapshot_into(order.partitions.clone(), &mut snapshots);
        let sent = self.jobs.send((order, snapshots));
        sent.map_err(|_| "the checkpoint thread has exited".into())
    }

    /// Takes the memory of the copies back.
    pub(super) fn written(&mut self, written: Written) -> (CutId, Result<Vec<CutFile>, String>) {
        self.spare = written.spare;
        (written.cut, written.result)
    }
}

fn run(asked: &Receiver<(Order, Vec<Snapshot>)>, events: &Sender<compute::Event>) {
    for (order, spare) in asked {
        let files = || write(order.folder.as_ref(), &spare).map_err(|error| chain(&error));
        let result = catch_unwind(AssertUnwindSafe(files));
        let result = result.unwrap_or_else(|_| Err("the checkpoint thread panicked".into()));
        let written = Event::Written(Written { cut: order.cut, result, spare });
        // A compute thread that is gone needs no answer.
        let _ = events.send(compute::Event::AllReduce(Box::new(written)));
    }
}

fn write(folder: &Path, snapshots: &[Snapshot]) -> Result<Vec<CutFile>, checkpoint::Error> {
    let written = snapshots.iter().map(|snapshot| checkpoint::write_file(folder, snapshot));
    written.map(|file| file.map(entry)).collect()
}

fn entry(file: FileEntry) -> CutFile {
    CutFile {
        partition: file.partition.0,
        name: file.name,
        bytes: file.bytes,
        checksum: file.checksum,
        updates: file.updates,
    }
}
