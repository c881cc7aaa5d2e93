// SPDX-License-Identifier: Apache-2.0
//! One owner thread: the only one that ever touches its partitions.

use std::ops::Range;
use std::sync::{Arc, Mutex, mpsc};
use std::time::Instant;

use edl_core::id::{CheckpointId, Generation};
use edl_core::layout::Layout;
use edl_core::server::{Event, Load, Part, Request};
use edl_core::servers::PartitionState;
use edl_net::data::server::{Piece, PullRequest};
use edl_net::frame::PullHead;
use edl_tensor::partition::Partition;
use edl_tensor::push::{Push, span};

use crate::store::Shared;

/// Numbers after which a piece is sent off: large enough to be worth a wake-up and a system
/// call, small enough to stay in a core's cache and to let sending begin early.
const PIECE_FLOATS: usize = 64 << 10;
/// Buffers for pieces that a connection keeps.
const MAX_SPARE: usize = 32;

/// What an owner can be asked for.
pub(crate) enum Task {
    Pull(Pull),
    Push(Request, Arc<Push>),
    /// Copies of all partitions: now, or after this many updates in place of an earlier order.
    Copy {
        checkpoint: CheckpointId,
        at: Option<u64>,
    },
    Inspect(mpsc::Sender<PartitionState>),
    Stop,
}

/// The copies that are due after a step.
struct CopyAt {
    checkpoint: CheckpointId,
    step: u64,
    /// Per partition: they come to the step one by one.
    is_copied: Vec<bool>,
}

/// A pull on its way through the owners.
#[derive(Clone)]
pub(crate) struct Pull {
    pub(crate) request: Arc<PullRequest>,
    pub(crate) out: mpsc::Sender<Piece>,
    pub(crate) spare: Arc<SpareFloats>,
}

/// Buffers for pieces, to be used again.
#[derive(Debug, Default)]
pub(crate) struct SpareFloats(Mutex<Vec<Vec<f32>>>);

impl SpareFloats {
    fn take(&self, n: usize) -> Vec<f32> {
        let spare = self.0.lock().expect("the spare buffers' lock is poisoned").pop();
        let mut floats = spare.unwrap_or_default();
        floats.resize(n, 0.0);
        floats
    }

    pub(crate) fn give(&self, floats: Vec<f32>) {
        let mut spare = self.0.lock().expect("the spare buffers' lock is poisoned");
        if spare.len() < MAX_SPARE {
            spare.push(floats);
        }
    }
}

/// Some partitions of one generation.
pub(crate) struct Owner {
    /// Ascending and side by side.
    partitions: Vec<Partition>,
    generation: Generation,
    layout: Layout,
    dims: Vec<usize>,
    /// The first partition of the whole server: requests count from there.
    first_hosted: u32,
    shared: Arc<Shared>,
    /// A checkpoint whose step has not come for all partitions.
    copy: Option<CopyAt>,
}

impl Owner {
    pub(crate) fn new(partitions: Vec<Partition>, load: &Load, shared: Arc<Shared>) -> Self {
        Self {
            partitions,
            generation: load.generation,
            layout: load.layout,
            dims: load.model.tables.iter().map(|table| table.dim).collect(),
            first_hosted: load.partitions.start,
            shared,
            copy: None,
        }
    }

    /// Works until it is stopped, or until no thread can send tasks anymore.
    pub(crate) fn run(mut self, tasks: &mpsc::Receiver<Task>) {
        for task in tasks {
            let started = Instant::now();
            let is_copy = matches!(task, Task::Copy { at: None, .. });
            match task {
                Task::Pull(pull) => self.pull(&pull),
                Task::Push(request, push) => self.push(request, push),
                Task::Copy { checkpoint, at: None } => {
                    self.partitions.iter().for_each(|p| self.shared.copy(checkpoint, p));
                }
                Task::Copy { checkpoint, at: Some(step) } => {
                    let is_copied = vec![false; self.partitions.len()];
                    self.copy = Some(CopyAt { checkpoint, step, is_copied });
                    self.copy_if_due();
                }
                Task::Inspect(out) => {
                    let states = self.partitions.iter().map(Partition::state);
                    let _ = states.into_iter().try_for_each(|state| out.send(state));
                }
                Task::Stop => return,
            }
            self.shared.spending.worked(started.elapsed(), is_copy);
        }
    }

    /// Copies the partitions that have come to the step of a checkpoint.
    fn copy_if_due(&mut self) {
        let Some(CopyAt { checkpoint, step, is_copied }) = &mut self.copy else { return };
        for (partition, is_copied) in self.partitions.iter().zip(&mut *is_copied) {
            if !*is_copied && partition.updates() >= *step {
                *is_copied = true;
                self.shared.copy(*checkpoint, partition);
            }
        }
        if is_copied.iter().all(|is_copied| *is_copied) {
            self.copy = None;
        }
    }

    /// Copies come before the report: after the report, the next step may come.
    fn push(&mut self, request: Request, push: Arc<Push>) {
        let take = |partition: &mut Partition| {
            let outcome = partition.push(&push);
            Part { partition: partition.id(), outcome, progress: partition.progress() }
        };
        let parts = self.partitions.iter_mut().map(take).collect();
        self.copy_if_due();
        // The connection uses its buffers again when the last owner has reported.
        drop(push);
        self.shared.handle(Event::Pushed { generation: self.generation, request, parts });
    }

    /// Answers a pull in pieces. A connection that is gone ends it.
    fn pull(&mut self, pull: &Pull) {
        // A step may have come since the machine decided: then there is no answer, and the client
        // asks again.
        let is_past = |step: u64| self.partitions.iter().any(|p| !p.has_step(step));
        if pull.request.head.step.is_some_and(is_past) {
            return;
        }
        let n_tables = self.dims.len();
        let Some(first) = self.partitions.first().map(|partition| partition.id().0) else { return };
        let counts_before = (first - self.first_hosted) as usize * n_tables;
        let (before, counts) = pull.request.counts.split_at(counts_before);
        let n_before: usize = before.iter().map(|count| *count as usize).sum();
        let mut ids = &pull.request.ids[n_before..];
        let mut counts = counts;
        let mut place = 0;
        while place < self.partitions.len() {
            let (end, n_floats) = self.piece_end(place, counts, pull.request.head.wants_dense);
            let n_counts = (end - place) * n_tables;
            let n_ids = counts[..n_counts].iter().map(|count| *count as usize).sum();
            let (ids_here, ids_left) = ids.split_at(n_ids);
            let (counts_here, counts_left) = counts.split_at(n_counts);
            let floats = pull.spare.take(n_floats);
            let piece = self.piece(place..end, &pull.request.head, counts_here, ids_here, floats);
            if pull.out.send(piece).is_err() {
                return;
            }
            (ids, counts, place) = (ids_left, counts_left, end);
        }
    }

    /// Where the piece that begins at `place` ends, and how many numbers it has.
    fn piece_end(&self, place: usize, counts: &[u32], wants_dense: bool) -> (usize, usize) {
        let n_tables = self.dims.len();
        let (mut end, mut n_floats) = (place, 0);
        while end < self.partitions.len() && (end == place || n_floats < PIECE_FLOATS) {
            let counts = &counts[(end - place) * n_tables..][..n_tables];
            let rows = counts.iter().zip(&self.dims);
            n_floats += rows.map(|(count, dim)| *count as usize * dim).sum::<usize>();
            n_floats += if wants_dense { self.partitions[end].dense().len() } else { 0 };
            end += 1;
        }
        (end, n_floats)
    }

    fn piece(
        &mut self,
        places: Range<usize>,
        request: &PullHead,
        counts: &[u32],
        mut ids: &[u64],
        mut floats: Vec<f32>,
    ) -> Piece {
        let here = &mut self.partitions[places];
        let first = here.first().map_or(0, |partition| partition.id().0);
        let end = here.last().map_or(0, |partition| partition.id().0 + 1);
        let n_dense = if request.wants_dense { span(&self.layout, &(first..end)).len() } else { 0 };
        let (mut dense, mut rows) = floats.split_at_mut(n_dense);
        let mut version = u64::MAX;
        let mut counts = counts.iter();
        for partition in here {
            version = version.min(partition.version());
            if request.wants_dense {
                let (segment, rest) = dense.split_at_mut(partition.dense().len());
                segment.copy_from_slice(partition.dense());
                dense = rest;
            }
            for ((table, dim), count) in self.dims.iter().enumerate().zip(&mut counts) {
                let (ids_here, ids_left) = ids.split_at(*count as usize);
                let (out, rest) = rows.split_at_mut(ids_here.len() * dim);
                if let Some(step) = request.step {
                    partition.peek_at(step, table, ids_here, out);
                } else if request.will_push {
                    partition.gather(table, ids_here, out);
                } else {
                    partition.peek(table, ids_here, out);
                }
                (ids, rows) = (ids_left, rest);
            }
        }
        Piece { partitions: first..end, version, floats }
    }
}
