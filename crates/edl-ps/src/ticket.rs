// SPDX-License-Identifier: Apache-2.0
//! One push on its way through the owner threads. Whoever drops it last gives the answer.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, mpsc};

use edl_core::id::{BatchId, Generation};
use edl_net::data::server::Refusal;
use edl_tensor::push::{Body, Push};

/// Bodies kept for later pushes, per connection.
const MAX_SPARE: usize = 4;

/// The answer to a push.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    pub sequence: u64,
    pub batch: BatchId,
    pub generation: Generation,
    /// `Ok` when every hosted partition has applied the batch.
    pub outcome: Result<(), Refusal>,
}

/// Where answers and used buffers of one connection go.
#[derive(Clone, Debug)]
pub struct Returns {
    pub replies: mpsc::Sender<Reply>,
    pub spare: Arc<Spare>,
}

/// Buffers that have been used and can be used again.
#[derive(Debug, Default)]
pub struct Spare(Mutex<Vec<Body>>);

impl Spare {
    pub fn take(&self) -> Body {
        self.0.lock().expect("the spare buffers' lock is poisoned").pop().unwrap_or_default()
    }

    pub fn give(&self, body: Body) {
        let mut spare = self.0.lock().expect("the spare buffers' lock is poisoned");
        if spare.len() < MAX_SPARE {
            spare.push(body);
        }
    }
}

/// A push, and how many partitions have not applied it yet.
///
/// Each owner holds the ticket until its partitions are through with it. If the owners end
/// before (another generation is loaded), the ticket is dropped with something left, and the
/// client is told that it was not done.
#[derive(Debug)]
pub(crate) struct Ticket {
    /// `None` only inside `drop`.
    push: Option<Arc<Push>>,
    sequence: u64,
    batch: BatchId,
    generation: Generation,
    n_left: AtomicU32,
    refusal: OnceLock<Refusal>,
    returns: Returns,
}

impl Ticket {
    pub(crate) fn new(push: Push, sequence: u64, generation: Generation, returns: Returns) -> Self {
        Self {
            sequence,
            batch: push.batch,
            generation,
            n_left: AtomicU32::new(push.partitions.end - push.partitions.start),
            refusal: OnceLock::new(),
            push: Some(Arc::new(push)),
            returns,
        }
    }

    pub(crate) fn push(&self) -> &Arc<Push> {
        self.push.as_ref().expect("only drop takes it")
    }

    /// One partition has applied the batch.
    pub(crate) fn applied(&self) {
        self.n_left.fetch_sub(1, Ordering::AcqRel);
    }

    /// One partition cannot take it.
    pub(crate) fn refuse(&self, refusal: Refusal) {
        // The first reason is as good as any other.
        let _ = self.refusal.set(refusal);
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if let Some(push) = self.push.take().and_then(Arc::into_inner) {
            self.returns.spare.give(push.into_body());
        }
        let outcome = match (self.refusal.take(), *self.n_left.get_mut()) {
            (Some(refusal), _) => Err(refusal),
            (None, 0) => Ok(()),
            (None, _) => Err(Refusal::NotServing),
        };
        let Self { sequence, batch, generation, .. } = *self;
        // Nobody listens when the connection is gone.
        let _ = self.returns.replies.send(Reply { sequence, batch, generation, outcome });
    }
}
