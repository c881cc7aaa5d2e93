// SPDX-License-Identifier: Apache-2.0
//! Reads the acknowledgements of all servers.

use std::sync::{Arc, Mutex, MutexGuard, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use edl_core::acks::Acks;
use edl_core::id::{BatchId, Generation, PsId};
use edl_core::time::Time;

use crate::data::Error;
use crate::frame::{FrameKind, decode_refusal};
use crate::wire::Receiver;

/// Every partition of every server has applied the batch in this generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Acked {
    pub batch: BatchId,
    pub generation: Generation,
}

/// The pushes of one client that some server has not acknowledged yet.
#[derive(Debug)]
pub(super) struct PendingAcks {
    acks: Mutex<Acks>,
    started: Instant,
}

impl PendingAcks {
    pub(super) fn new() -> Self {
        Self { acks: Mutex::default(), started: Instant::now() }
    }

    pub(super) fn sent(&self, sequence: u64, batch: BatchId, servers: Vec<PsId>) {
        self.lock().sent(sequence, batch, servers, self.now());
    }

    fn now(&self) -> Time {
        Time::since_origin(self.started.elapsed())
    }

    fn lock(&self) -> MutexGuard<'_, Acks> {
        self.acks.lock().expect("the lock on the pending acknowledgements is poisoned")
    }
}

/// Reads the acknowledgements of one server.
pub(super) struct Reader {
    pub(super) ps: PsId,
    pub(super) generation: Generation,
    pub(super) receiver: Receiver,
    pub(super) pending: Arc<PendingAcks>,
    pub(super) out: mpsc::SyncSender<Result<Acked, Error>>,
    /// How long one acknowledgement may take.
    pub(super) patience: Duration,
}

impl Reader {
    pub(super) fn start(mut self) -> Result<JoinHandle<()>, Error> {
        let name = format!("acks-{}", self.ps);
        let run = move || {
            // The stream ends by an error, and the worker drops the channel when it is done.
            loop {
                match self.next() {
                    Ok(None) => {}
                    Ok(Some(result)) => {
                        if self.out.send(result).is_err() {
                            return;
                        }
                    }
                    Err(error) => {
                        let _ = self.out.send(Err(error));
                        return;
                    }
                }
            }
        };
        std::thread::Builder::new()
            .name(name)
            .spawn(run)
            .map_err(|source| Error::Io { action: "start a thread".into(), source })
    }

    fn next(&mut self) -> Result<Option<Result<Acked, Error>>, Error> {
        let (pending, ps, patience) = (&self.pending, self.ps, self.patience);
        let header = self.receiver.header(&mut || {
            let overdue = pending.lock().overdue(ps, patience, pending.now());
            let Some(batch) = overdue else { return Ok(()) };
            let waiting_for = format!("server {ps} to acknowledge batch {batch}");
            Err(Error::Deadline { waiting_for })
        })?;
        let forged = Error::Forged { sequence: header.sequence };
        let payload = self.receiver.small()?;
        if header.kind == FrameKind::Ack {
            let sequence = payload.try_into().map(u64::from_le_bytes).map_err(|_| forged)?;
            let acked = |batch| Ok(Acked { batch, generation: header.generation });
            Ok(self.pending.lock().acknowledge(sequence, ps).map(acked))
        } else if header.kind == FrameKind::Refused {
            let (refusal, _) = decode_refusal(&payload)?;
            Ok(Some(Err(Error::from_refusal(refusal, self.generation))))
        } else {
            Err(forged)
        }
    }
}
