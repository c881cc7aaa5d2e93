// SPDX-License-Identifier: Apache-2.0
//! Collects the acknowledgements of all servers into one per batch.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use edl_core::id::{BatchId, Generation, PsId};

use crate::data::Error;
use crate::frame::{Kind, decode_refusal};
use crate::wire::Receiver;

/// Every partition of every server has applied the batch in this generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Acked {
    pub batch: BatchId,
    pub generation: Generation,
}

/// The pushes that some server has not acknowledged yet, by their number.
#[derive(Debug, Default)]
pub(super) struct Open(Mutex<BTreeMap<u64, OpenPush>>);

#[derive(Debug)]
struct OpenPush {
    batch: BatchId,
    /// Servers that have not acknowledged it.
    waiting: Vec<PsId>,
    since: Instant,
}

impl Open {
    pub(super) fn insert(&self, sequence: u64, batch: BatchId, servers: Vec<PsId>) {
        let open = OpenPush { batch, waiting: servers, since: Instant::now() };
        self.lock().insert(sequence, open);
    }

    /// Notes one server's acknowledgement; the batch if it was the last.
    fn acknowledge(&self, sequence: u64, ps: PsId) -> Option<BatchId> {
        let mut pushes = self.lock();
        let open = pushes.get_mut(&sequence)?;
        open.waiting.retain(|waiting| *waiting != ps);
        if !open.waiting.is_empty() {
            return None;
        }
        pushes.remove(&sequence).map(|open| open.batch)
    }

    /// The oldest push that waits for `ps`, and since when.
    fn oldest(&self, ps: PsId) -> Option<(BatchId, Instant)> {
        let pushes = self.lock();
        let open = pushes.values().find(|open| open.waiting.contains(&ps))?;
        Some((open.batch, open.since))
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, OpenPush>> {
        self.0.lock().expect("the lock on the open pushes is poisoned")
    }
}

/// Reads the acknowledgements of one server.
pub(super) struct Reader {
    pub(super) ps: PsId,
    pub(super) generation: Generation,
    pub(super) receiver: Receiver,
    pub(super) open: Arc<Open>,
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
        let (open, ps, patience) = (&self.open, self.ps, self.patience);
        let header = self.receiver.header(&mut || match open.oldest(ps) {
            Some((batch, since)) if since.elapsed() >= patience => {
                let waiting_for = format!("server {ps} to acknowledge batch {batch}");
                Err(Error::Deadline { waiting_for })
            }
            Some(_) | None => Ok(()),
        })?;
        let forged = Error::Forged { sequence: header.sequence };
        let payload = self.receiver.small()?;
        if header.kind == Kind::Ack {
            let sequence = payload.try_into().map(u64::from_le_bytes).map_err(|_| forged)?;
            let acked = |batch| Ok(Acked { batch, generation: header.generation });
            Ok(self.open.acknowledge(sequence, ps).map(acked))
        } else if header.kind == Kind::Refused {
            let (refusal, _) = decode_refusal(&payload)?;
            Ok(Some(Err(Error::from_refusal(refusal, self.generation))))
        } else {
            Err(forged)
        }
    }
}
