// SPDX-License-Identifier: Apache-2.0
//! A pull, from the request to the last piece of its answer.

use std::sync::{Arc, mpsc};

use edl_core::id::Generation;
use edl_core::server::{Client, Event, Pull, Refusal};
use edl_net::data::server::{ClientId, Piece, PullRequest};

use crate::owner::{self, SpareFloats, Task};
use crate::store::{Caller, Hosted, Store, Verdict};

/// What a connection keeps from pull to pull.
#[derive(Debug)]
pub struct PullBuffers {
    request: PullRequest,
    /// The last request, while owners may still look at it.
    last: Option<Arc<PullRequest>>,
    spare: Arc<SpareFloats>,
    verdict: mpsc::Sender<Verdict>,
    verdicts: mpsc::Receiver<Verdict>,
}

impl Default for PullBuffers {
    fn default() -> Self {
        let (verdict, verdicts) = mpsc::channel();
        let (request, spare) = (PullRequest::default(), Arc::default());
        Self { request, last: None, spare, verdict, verdicts }
    }
}

impl PullBuffers {
    /// The request to be read next.
    pub fn request(&mut self) -> &mut PullRequest {
        if let Some(last) = self.last.take().and_then(Arc::into_inner) {
            self.request = last;
        }
        &mut self.request
    }
}

/// The answer to a pull, piece by piece; stops early if the generation ends.
pub struct Pieces {
    pub generation: Generation,
    n_left: usize,
    pieces: mpsc::Receiver<Piece>,
    spare: Arc<SpareFloats>,
}

impl Pieces {
    /// Gives a piece back whose numbers have been sent.
    pub fn recycle(&self, piece: Piece) {
        self.spare.give(piece.floats);
    }
}

impl Iterator for Pieces {
    type Item = Result<Piece, Refusal>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.n_left == 0 {
            return None;
        }
        match self.pieces.recv() {
            Ok(piece) => {
                self.n_left -= piece.partitions.len();
                Some(Ok(piece))
            }
            Err(mpsc::RecvError) => {
                self.n_left = 0;
                Some(Err(Refusal::NotServing))
            }
        }
    }
}

impl Store {
    /// Begins to answer the request in `buffers`. `is_wanted` is asked while it waits whether
    /// the client is still there.
    pub fn pull(
        &self,
        client: ClientId,
        buffers: &mut PullBuffers,
        is_wanted: &dyn Fn() -> bool,
    ) -> Result<Pieces, Refusal> {
        let asked = &buffers.request;
        let client = Client(client.0);
        self.shared.ask(Caller::Pull(buffers.verdict.clone()), |request| {
            Event::Pull(Pull {
                request,
                client,
                generation: asked.generation,
                partitions: asked.head.partitions.clone(),
                min_round: asked.head.min_round,
                step: asked.head.step,
                will_push: asked.head.will_push,
                patience: asked.head.patience,
            })
        });
        let hosted = self.shared.verdict(&buffers.verdicts, client, is_wanted)?;
        hosted.expect_shape(asked)?;
        let n_left = asked.head.partitions.len();
        let (out, pieces) = mpsc::channel();
        let request = Arc::new(std::mem::take(&mut buffers.request));
        buffers.last = Some(Arc::clone(&request));
        let spare = Arc::clone(&buffers.spare);
        let pull = owner::Pull { request, out, spare: Arc::clone(&spare) };
        for owner in &hosted.owners {
            // An owner that has stopped drops its end of the channel, which `Pieces` notices.
            let _ = owner.send(Task::Pull(pull.clone()));
        }
        Ok(Pieces { generation: hosted.generation, n_left, pieces, spare })
    }
}

impl Hosted {
    /// Whether the ids of a pull fit the model.
    fn expect_shape(&self, request: &PullRequest) -> Result<(), Refusal> {
        let n_ids: u64 = request.counts.iter().map(|count| u64::from(*count)).sum();
        let n_counts = self.partitions.len() * self.dims.len();
        if request.counts.len() != n_counts || request.ids.len() as u64 != n_ids {
            return Err(Refusal::Other("the pull is for another model".into()));
        }
        Ok(())
    }
}
