// SPDX-License-Identifier: Apache-2.0
//! A push, from the request to the owners and back.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, mpsc};

use edl_core::id::{BatchId, Generation};
use edl_core::server::{self, Client, Event, Refusal};
use edl_net::data::server::{ClientId, PushRequest};
use edl_net::frame::PushHead;
use edl_tensor::push::{Body, Head, Push};

use crate::owner::Task;
use crate::store::{Caller, Store, Verdict};

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

/// What a connection keeps from push to push.
#[derive(Debug)]
pub struct PushBuffers {
    replies: mpsc::Sender<Reply>,
    spare: Arc<Spare>,
    verdict: mpsc::Sender<Verdict>,
    verdicts: mpsc::Receiver<Verdict>,
}

impl PushBuffers {
    /// `replies` gets the answers, in any order; the receiver returns their buffers to `spare`.
    #[must_use]
    pub fn new(replies: mpsc::Sender<Reply>, spare: Arc<Spare>) -> Self {
        let (verdict, verdicts) = mpsc::channel();
        Self { replies, spare, verdict, verdicts }
    }
}

/// Buffers of pushes that have been answered, to be used again.
#[derive(Debug, Default)]
pub struct Spare(Mutex<Bodies>);

#[derive(Debug, Default)]
struct Bodies {
    free: Vec<Body>,
    in_use: BTreeMap<u64, Arc<Push>>,
}

impl Spare {
    pub fn take(&self) -> Body {
        self.bodies().free.pop().unwrap_or_default()
    }

    /// The push with this sequence number has been answered.
    pub fn recycle(&self, sequence: u64) {
        let mut bodies = self.bodies();
        let push = bodies.in_use.remove(&sequence);
        // A partition may keep the push for a later round.
        let body = push.and_then(Arc::into_inner).map(|push| push.body);
        if bodies.free.len() < MAX_SPARE {
            bodies.free.extend(body);
        }
    }

    fn bodies(&self) -> MutexGuard<'_, Bodies> {
        self.0.lock().expect("the spare buffers' lock is poisoned")
    }
}

impl Store {
    /// Passes a push to the owners, as soon as its generation is served. The reply comes when it is
    /// applied.
    pub fn push(&self, client: ClientId, request: PushRequest, buffers: &PushBuffers) {
        let PushRequest { generation, sequence, batch, head, body } = request;
        let PushHead { n_records, base_version, partitions, lane, .. } = head;
        let client = Client(client.0);
        let (verdict, replies) = (Some(buffers.verdict.clone()), buffers.replies.clone());
        let caller = Caller::Push { verdict, replies, sequence, batch, generation };
        let request = self.shared.ask(caller, |request| {
            let partitions = partitions.clone();
            Event::Push(server::Push {
                request,
                client,
                generation,
                batch,
                partitions,
                base_version,
            })
        });
        // A refusal has been replied already.
        let Ok(hosted) = self.shared.verdict(&buffers.verdicts, client, &|| true) else { return };
        let layout = hosted.layout;
        let head = Head { batch, n_records, base_version, partitions, layout, lane };
        let push = match Push::new(head, &hosted.dims, body) {
            Ok(push) => Arc::new(push),
            Err(error) => return self.handle(Event::Unfit { request, error: error.to_string() }),
        };
        buffers.spare.bodies().in_use.insert(sequence, Arc::clone(&push));
        for owner in &hosted.owners {
            // If the owners have stopped, the machine has refused the push.
            let _ = owner.send(Task::Push(request, Arc::clone(&push)));
        }
    }
}
