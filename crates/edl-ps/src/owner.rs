// SPDX-License-Identifier: Apache-2.0
//! One owner thread: the only one that ever touches its partitions.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, mpsc};
use std::time::Instant;

use edl_core::id::{BatchId, PartitionId};
use edl_core::layout::Layout;
use edl_core::spec::Mode;
use edl_net::data::server::{Piece, PullRequest, Refusal};
use edl_tensor::checkpoint::Snapshot;
use edl_tensor::partition::{Partition, Pushed};
use edl_tensor::push::span;

use crate::progress::Progress;
use crate::spending::Spending;
use crate::store::PartitionState;
use crate::ticket::Ticket;

/// Numbers after which a piece is sent off: large enough to be worth a wake-up and a system
/// call, small enough to stay in a core's cache and to let sending begin early.
const PIECE_FLOATS: usize = 64 << 10;
/// Buffers for pieces that a connection keeps.
const MAX_SPARE: usize = 32;

/// What an owner can be asked for.
pub(crate) enum Task {
    Pull(Pull),
    Push(Arc<Ticket>),
    Snapshot(mpsc::Sender<Snapshot>),
    /// Copies of all partitions after this step; in place of an order of before.
    SnapshotAt(u64, mpsc::Sender<Result<Snapshot, Past>>),
    Inspect(mpsc::Sender<PartitionState>),
    Stop,
}

/// A partition that is past the step that it was to be copied at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Past {
    pub(crate) partition: PartitionId,
    pub(crate) step: u64,
}

/// The copies that are due after a step.
pub(crate) struct CutAt {
    step: u64,
    /// How many of the owner's partitions are copied: they come to the step one by one.
    is_copied: Vec<bool>,
    out: mpsc::Sender<Result<Snapshot, Past>>,
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

/// Some partitions and what waits for their rounds.
pub(crate) struct Owner {
    /// Ascending and side by side.
    pub(crate) partitions: Vec<Partition>,
    pub(crate) layout: Layout,
    pub(crate) dims: Vec<usize>,
    /// The first partition of the whole server: requests count from there.
    pub(crate) first_hosted: u32,
    pub(crate) mode: Mode,
    pub(crate) progress: Arc<Progress>,
    pub(crate) spending: Arc<Spending>,
    /// Pushes that are staged, by batch: in which partition, and whom to tell.
    pub(crate) staged: BTreeMap<BatchId, Vec<(PartitionId, Arc<Ticket>)>>,
    /// A cut whose step has not come for all partitions.
    pub(crate) cut: Option<CutAt>,
}

impl Owner {
    /// Works until told to stop or until nobody can ask any more.
    pub(crate) fn run(mut self, tasks: &mpsc::Receiver<Task>) {
        for task in tasks {
            let started = Instant::now();
            let is_cut = matches!(task, Task::Snapshot(_));
            match task {
                Task::Pull(pull) => self.pull(&pull),
                Task::Push(ticket) => self.push(ticket),
                Task::Snapshot(out) => {
                    // A failed send means that the cut was given up.
                    let is_sent = |partition: &Partition| out.send(partition.snapshot()).is_ok();
                    let _ = self.partitions.iter().all(is_sent);
                }
                Task::SnapshotAt(step, out) => {
                    let is_copied = vec![false; self.partitions.len()];
                    self.cut = Some(CutAt { step, is_copied, out });
                    self.cut_if_due();
                }
                Task::Inspect(out) => {
                    let states = self.partitions.iter().map(PartitionState::of);
                    let _ = states.into_iter().try_for_each(|state| out.send(state));
                }
                Task::Stop => return,
            }
            self.spending.worked(started.elapsed(), is_cut);
        }
    }

    /// Copies the partitions that have come to the step of a cut.
    fn cut_if_due(&mut self) {
        let Some(CutAt { step, is_copied, out }) = &mut self.cut else { return };
        for (partition, is_copied) in self.partitions.iter().zip(&mut *is_copied) {
            let at = partition.updates();
            if *is_copied || at < *step {
                continue;
            }
            *is_copied = true;
            let past = Past { partition: partition.id(), step: at };
            let copy = if at == *step { Ok(partition.snapshot()) } else { Err(past) };
            // A failed send means that the cut was given up.
            let _ = out.send(copy);
        }
        if is_copied.iter().all(|is_copied| *is_copied) {
            self.cut = None;
        }
    }

    fn push(&mut self, ticket: Arc<Ticket>) {
        let mut has_rounds = false;
        for place in 0..self.partitions.len() {
            let partition = &mut self.partitions[place];
            let pushed = partition.push(ticket.push());
            self.progress.note(partition);
            let id = partition.id();
            match pushed {
                Pushed::Already | Pushed::Applied => ticket.applied(),
                // Whoever pushed a lane goes on when it is kept: the others will follow.
                Pushed::Staged if matches!(self.mode, Mode::Steps { .. }) => ticket.applied(),
                Pushed::Staged => self.stage(&ticket, id),
                Pushed::Round(batches) => {
                    has_rounds = true;
                    self.stage(&ticket, id);
                    batches.into_iter().for_each(|batch| self.applied(batch, id));
                }
                Pushed::Refused(refusal) => ticket.refuse(Refusal::Other(refusal.to_string())),
            }
        }
        if matches!(self.mode, Mode::Steps { .. }) {
            // Copied before anybody hears that the step is over: the next one comes after that.
            self.cut_if_due();
        }
        drop(ticket);
        match self.mode {
            Mode::Async | Mode::Steps { .. } => {}
            Mode::Bounded { .. } => self.progress.announce(),
            Mode::Sync { .. } if has_rounds => self.progress.announce(),
            Mode::Sync { .. } => {}
        }
    }

    fn stage(&mut self, ticket: &Arc<Ticket>, partition: PartitionId) {
        let batch = ticket.push().batch;
        self.staged.entry(batch).or_default().push((partition, Arc::clone(ticket)));
    }

    /// `partition` has applied `batch`: everybody who pushed it is told.
    fn applied(&mut self, batch: BatchId, partition: PartitionId) {
        let Some(waiting) = self.staged.get_mut(&batch) else { return };
        waiting.extract_if(.., |(of, _)| *of == partition).for_each(|(_, ticket)| ticket.applied());
        if waiting.is_empty() {
            self.staged.remove(&batch);
        }
    }

    /// Answers a pull in pieces. A connection that is gone ends it.
    fn pull(&mut self, pull: &Pull) {
        // Between the store's look and this one a step may have come: then there is no answer,
        // and the client asks again.
        let is_past = |step: u64| self.partitions.iter().any(|p| !p.has_step(step));
        if pull.request.step.is_some_and(is_past) {
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
            let (end, n_floats) = self.piece_end(place, counts, pull.request.wants_dense);
            let n_counts = (end - place) * n_tables;
            let n_ids = counts[..n_counts].iter().map(|count| *count as usize).sum();
            let (ids_here, ids_left) = ids.split_at(n_ids);
            let (counts_here, counts_left) = counts.split_at(n_counts);
            let floats = pull.spare.take(n_floats);
            let piece = self.piece(place..end, &pull.request, counts_here, ids_here, floats);
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
        request: &PullRequest,
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
