// SPDX-License-Identifier: Apache-2.0
//! Writes this worker's share of a checkpoint while training goes on: the pause is one copy.
//!
//! One cut is written at a time; one that comes too early is refused, never queued.

use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::{self, JoinHandle};

use edl_core::id::CutId;
use edl_net::proto::worker_message::Kind;
use edl_net::proto::{CheckpointFile, CutAt, CutDone, CutFailed};
use edl_tensor::checkpoint::{self, FileEntry, Snapshot};
use tokio::sync::mpsc;
use tracing::warn;

use super::replica::Replica;
use crate::chain;

/// The thread that writes.
pub(super) struct Writer {
    jobs: Sender<(CutAt, Vec<Snapshot>)>,
    spare: Arc<Spare>,
    thread: JoinHandle<()>,
}

/// The memory of the last copies; taken while they are being written.
struct Spare(Mutex<Option<Vec<Snapshot>>>);

impl Spare {
    fn lock(&self) -> MutexGuard<'_, Option<Vec<Snapshot>>> {
        self.0.lock().expect("the lock on the copies is poisoned")
    }
}

impl Writer {
    pub(super) fn start(reports: mpsc::Sender<Kind>) -> std::io::Result<Self> {
        let (jobs, asked) = channel();
        let spare = Arc::new(Spare(Mutex::new(Some(Vec::new()))));
        let given_back = Arc::clone(&spare);
        let body = move || run(&asked, &given_back, &reports);
        let thread = thread::Builder::new().name("cut".into()).spawn(body)?;
        Ok(Self { jobs, spare, thread })
    }

    /// Copies what `order` names and lets it be written; or says why not.
    pub(super) fn cut(&self, order: CutAt, replica: &Replica, n_partitions: u32) -> Option<Kind> {
        let partitions = order.first_partition..order.end_partition;
        if partitions.start > partitions.end || partitions.end > n_partitions {
            let error = format!("invalid partitions {partitions:?}");
            return Some(failed(&order, error));
        }
        let Some(mut snapshots) = self.spare.lock().take() else {
            return Some(failed(&order, "another checkpoint is still being written".into()));
        };
        replica.snapshot_into(partitions, &mut snapshots);
        match self.jobs.send((order, snapshots)) {
            Ok(()) => None,
            Err(unsent) => Some(failed(&unsent.0.0, "the checkpoint thread has exited".into())),
        }
    }

    /// Waits until everything is written.
    pub(super) fn finish(self) {
        drop(self.jobs);
        if self.thread.join().is_err() {
            warn!("the checkpoint thread panicked");
        }
    }
}

fn run(asked: &Receiver<(CutAt, Vec<Snapshot>)>, spare: &Spare, reports: &mpsc::Sender<Kind>) {
    for (order, snapshots) in asked {
        let report = match write(order.folder.as_ref(), &snapshots) {
            Ok(files) => Kind::CutDone(CutDone {
                cut: order.cut,
                generation: order.generation,
                files: files.into_iter().map(file).collect(),
            }),
            Err(error) => failed(&order, chain(&error)),
        };
        *spare.lock() = Some(snapshots);
        // A session that is gone needs no report.
        let _ = reports.blocking_send(report);
    }
}

fn write(folder: &Path, snapshots: &[Snapshot]) -> Result<Vec<FileEntry>, checkpoint::Error> {
    snapshots.iter().map(|snapshot| checkpoint::write_file(folder, snapshot)).collect()
}

fn file(file: FileEntry) -> CheckpointFile {
    CheckpointFile {
        partition: file.partition.0,
        name: file.name,
        bytes: file.bytes,
        checksum: file.checksum,
        updates: file.updates,
    }
}

pub(super) fn failed(order: &CutAt, error: String) -> Kind {
    warn!(cut = %CutId(order.cut), error, "cannot write a checkpoint");
    Kind::CutFailed(CutFailed { cut: order.cut, generation: order.generation, error })
}
