// SPDX-License-Identifier: Apache-2.0
//! The engine of a parameter server: owner threads, generations and waits, without a socket.
//!
//! At most one generation is held. Loading another one ends the threads of the one before;
//! what was on its way in them is answered with a refusal.

mod cut;
mod load;

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use edl_core::goodput::Spent;
use edl_core::id::{Generation, PartitionId};
use edl_core::layout::Layout;
use edl_core::spec::Mode;
use edl_core::time::Time;
use edl_net::data::server::{ClientId, Piece, PullRequest, PushRequest, Refusal};
use edl_tensor::checkpoint;
use edl_tensor::partition::Partition;
use edl_tensor::push::{Head, Push};
use tokio::sync::watch;

pub use load::LoadSpec;

use crate::owner::{Pull, SpareFloats, Task};
use crate::progress::{Progress, Waited};
use crate::spending::Spending;
use crate::ticket::Ticket;
pub use crate::ticket::{Reply, Returns, Spare};
use crate::window::Window;

/// Tasks that may queue at one owner before connections wait.
const OWNER_QUEUE: usize = 32;
/// A frame of a generation that is not served yet waits for it this long.
const SERVE_PATIENCE: Duration = Duration::from_secs(10);
/// The longest wait for a round that a client may ask for.
const MAX_ROUND_PATIENCE: Duration = Duration::from_secs(3600);
/// Bounded staleness: nobody is waited for longer than this.
const WINDOW_PATIENCE: Duration = Duration::from_secs(30);

/// Why the store did not do what the master asked for.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("generation {asked} is outdated: this server is at generation {ours}")]
    Older { asked: Generation, ours: Generation },
    #[error("the server does not hold generation {0}")]
    NotHeld(Generation),
    #[error("another checkpoint is still being written")]
    CutRunning,
    #[error("the server was reloaded, or got another order, during the checkpoint")]
    Overtaken,
    #[error("step {at} has passed: partition {partition} is at step {step}")]
    Past { at: u64, partition: PartitionId, step: u64 },
    #[error(transparent)]
    Checkpoint(#[from] checkpoint::Error),
    #[error("invalid layout: partitions {}..{} of {n_partitions} with {n_batches} batches per epoch", partitions.start, partitions.end)]
    Impossible { partitions: Range<u32>, n_partitions: u32, n_batches: u32 },
    #[error("{0}")]
    Model(String),
    #[error("cannot start an owner thread")]
    Thread(#[source] std::io::Error),
    #[error("an owner thread exited while creating its partitions")]
    OwnerEnded,
}

/// What is known about one partition from outside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartitionState {
    pub partition: PartitionId,
    /// `AppliedSet::to_bytes`.
    pub applied: Vec<u8>,
    pub updates: u64,
    pub n_rows: u64,
    pub version: u64,
}

impl PartitionState {
    pub(crate) fn of(partition: &Partition) -> Self {
        Self {
            partition: partition.id(),
            applied: partition.applied().to_bytes(),
            updates: partition.updates(),
            n_rows: partition.n_rows(),
            version: partition.version(),
        }
    }
}

/// The partitions of one server, in owner threads.
pub struct Store {
    threads: usize,
    phase: Mutex<Phase>,
    /// The phase changed.
    turned: Condvar,
    /// One load, one cut at a time.
    loading: Mutex<()>,
    cutting: Mutex<()>,
    window: Mutex<Option<Window>>,
    start: Instant,
    spending: Arc<Spending>,
    /// Turns true when an owner panics: its books are broken, and the process must end.
    is_broken: watch::Sender<bool>,
}

enum Phase {
    Empty,
    Loading(Generation),
    /// `is_served` turns true when the master says that workers may come.
    Held {
        hosted: Arc<Hosted>,
        is_served: bool,
    },
    /// The last load failed.
    Failed(Generation),
    Closed,
}

/// The partitions of one generation and their owners.
pub(crate) struct Hosted {
    generation: Generation,
    partitions: Range<u32>,
    layout: Layout,
    dims: Vec<usize>,
    mode: Mode,
    progress: Arc<Progress>,
    owners: Vec<mpsc::SyncSender<Task>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// The answer to a pull, piece by piece; ends early if the generation ends.
pub struct Pieces {
    pub generation: Generation,
    n_left: usize,
    pieces: mpsc::Receiver<Piece>,
    spare: Arc<SpareFloats>,
}

/// What a connection keeps from pull to pull.
#[derive(Debug, Default)]
pub struct PullBuffers {
    request: PullRequest,
    /// The last request, while owners may still look at it.
    last: Option<Arc<PullRequest>>,
    spare: Arc<SpareFloats>,
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
    /// A store that holds nothing yet. `threads` 0 means one owner per core.
    #[must_use]
    pub fn new(threads: usize) -> Self {
        Self {
            threads,
            phase: Mutex::new(Phase::Empty),
            turned: Condvar::new(),
            loading: Mutex::new(()),
            cutting: Mutex::new(()),
            window: Mutex::new(None),
            start: Instant::now(),
            spending: Arc::new(Spending::new()),
            is_broken: watch::Sender::new(false),
        }
    }

    /// Turns true when the store cannot be trusted any more.
    #[must_use]
    pub fn broken(&self) -> watch::Receiver<bool> {
        self.is_broken.subscribe()
    }

    /// What is held, served or not; generation 0 is nothing.
    #[must_use]
    pub fn generation(&self) -> Generation {
        self.hosted().map_or(Generation(0), |hosted| hosted.generation)
    }

    /// Optimizer steps of the partition that has taken the fewest.
    #[must_use]
    pub fn version(&self) -> u64 {
        self.hosted().map_or(0, |hosted| hosted.progress.version())
    }

    /// Where the time went, how many pulls and pushes came, and how many rows are held.
    #[must_use]
    pub fn load_of(&self) -> (Spent, u64, u64, u64) {
        let rows = self.hosted().map_or(0, |hosted| hosted.progress.n_rows());
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let Spending { pulls, pushes, .. } = &*self.spending;
        (self.spending.read(), count(pulls), count(pushes), rows)
    }

    /// What the store is doing, and what it waits for.
    #[must_use]
    pub fn activity(&self) -> (&'static str, &'static str) {
        match &*self.phase() {
            Phase::Empty => ("empty", "a load"),
            Phase::Loading(_) => ("loading", ""),
            Phase::Held { is_served: false, .. } => ("loaded", "the order to serve"),
            Phase::Held { is_served: true, .. } => ("serving", ""),
            Phase::Failed(_) => ("empty", "a successful load"),
            Phase::Closed => ("closed", ""),
        }
    }

    /// From now on workers are answered.
    pub fn serve(&self, generation: Generation) -> Result<(), Error> {
        let mut phase = self.phase();
        match &mut *phase {
            Phase::Held { hosted, is_served } if hosted.generation == generation => {
                *is_served = true;
            }
            Phase::Held { .. }
            | Phase::Empty
            | Phase::Loading(_)
            | Phase::Failed(_)
            | Phase::Closed => return Err(Error::NotHeld(generation)),
        }
        drop(phase);
        self.turned.notify_all();
        Ok(())
    }

    /// Begins to answer the request in `buffers`. `is_wanted` is asked while it waits whether
    /// the client is still there.
    pub fn pull(
        &self,
        client: ClientId,
        buffers: &mut PullBuffers,
        is_wanted: &dyn Fn() -> bool,
    ) -> Result<Pieces, Refusal> {
        let request = &buffers.request;
        let patience = request.patience.min(MAX_ROUND_PATIENCE);
        let deadline = Instant::now() + patience;
        let hosted = self.served(request.generation, patience)?;
        hosted.check(request)?;
        if let Some(step) = request.step {
            hosted.expect_step(step)?;
        }
        if let Some(round) = request.min_round {
            hosted.wait_for_round(round, deadline, is_wanted)?;
        }
        if request.will_push && matches!(hosted.mode, Mode::Bounded { .. }) {
            self.wait_in_window(client, &hosted, deadline, is_wanted)?;
        }
        self.spending.pulls.fetch_add(1, Ordering::Relaxed);
        let generation = hosted.generation;
        let n_left = request.partitions.len();
        let (out, pieces) = mpsc::channel();
        let request = Arc::new(std::mem::take(&mut buffers.request));
        buffers.last = Some(Arc::clone(&request));
        let spare = Arc::clone(&buffers.spare);
        let pull = Pull { request, out, spare: Arc::clone(&spare) };
        for owner in &hosted.owners {
            // An owner that ended drops its end of the channel, which `Pieces` notices.
            let _ = owner.send(Task::Pull(pull.clone()));
        }
        Ok(Pieces { generation, n_left, pieces, spare })
    }

    /// Hands a push to the owners; the answer goes to `returns` when it is applied.
    pub fn push(&self, client: ClientId, request: PushRequest, returns: &Returns) {
        let PushRequest { generation, sequence, batch, .. } = request;
        if let Err(refusal) = self.try_push(client, request, returns) {
            let outcome = Err(refusal);
            // Nobody listens when the connection is gone.
            let _ = returns.replies.send(Reply { sequence, batch, generation, outcome });
        }
    }

    fn try_push(
        &self,
        client: ClientId,
        request: PushRequest,
        returns: &Returns,
    ) -> Result<(), Refusal> {
        let hosted = self.served(request.generation, SERVE_PATIENCE)?;
        let PushRequest { generation, sequence, batch, n_records, base_version, .. } = request;
        let PushRequest { partitions, lane, body, .. } = request;
        if partitions != hosted.partitions {
            return Err(hosted.elsewhere(&partitions));
        }
        self.spending.pushes.fetch_add(1, Ordering::Relaxed);
        let layout = hosted.layout;
        let head = Head { batch, n_records, base_version, partitions, layout, lane };
        let push = Push::new(head, &hosted.dims, body)
            .map_err(|error| Refusal::Other(error.to_string()))?;
        let ticket = Arc::new(Ticket::new(push, sequence, generation, returns.clone()));
        for owner in &hosted.owners {
            // A ticket that no owner takes is dropped, and answered by that.
            let _ = owner.send(Task::Push(Arc::clone(&ticket)));
        }
        if let Some(window) = self.window().as_mut() {
            window.push(client, base_version);
        }
        if matches!(hosted.mode, Mode::Bounded { .. }) {
            hosted.progress.announce();
        }
        Ok(())
    }

    /// Forgets a client that has closed its connection.
    pub fn leave(&self, client: ClientId) {
        if let Some(window) = self.window().as_mut() {
            window.leave(client);
        }
        if let Some(hosted) = self.hosted() {
            hosted.progress.announce();
        }
    }

    /// The generation held and the state of its partitions, in order.
    #[must_use]
    pub fn inspect(&self) -> (Generation, Vec<PartitionState>) {
        let Some(hosted) = self.hosted() else { return (Generation(0), Vec::new()) };
        let (out, states) = mpsc::channel();
        for owner in &hosted.owners {
            let _ = owner.send(Task::Inspect(out.clone()));
        }
        drop(out);
        let mut states: Vec<PartitionState> = states.iter().collect();
        if states.len() != hosted.partitions.len() {
            return (Generation(0), Vec::new());
        }
        states.sort_by_key(|state| state.partition);
        (hosted.generation, states)
    }

    /// Ends all owners and every wait, for good.
    pub fn close(&self) {
        let before = std::mem::replace(&mut *self.phase(), Phase::Closed);
        self.turned.notify_all();
        if let Phase::Held { hosted, .. } = before {
            hosted.end();
        }
    }

    /// Waits until the store serves `generation`.
    fn served(&self, generation: Generation, patience: Duration) -> Result<Arc<Hosted>, Refusal> {
        let deadline = Instant::now() + patience.min(SERVE_PATIENCE);
        let mut phase = self.phase();
        loop {
            let current = match &*phase {
                Phase::Held { hosted, is_served: true } if hosted.generation == generation => {
                    return Ok(Arc::clone(hosted));
                }
                Phase::Held { hosted, .. } => hosted.generation,
                Phase::Loading(generation) | Phase::Failed(generation) => *generation,
                Phase::Empty => Generation(0),
                Phase::Closed => return Err(Refusal::NotServing),
            };
            if generation < current {
                return Err(Refusal::Generation { current });
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Refusal::NotServing);
            }
            let woken = self.turned.wait_timeout(phase, left);
            (phase, _) = woken.expect("the lock on the phase is poisoned");
        }
    }

    fn wait_in_window(
        &self,
        client: ClientId,
        hosted: &Hosted,
        deadline: Instant,
        is_wanted: &dyn Fn() -> bool,
    ) -> Result<(), Refusal> {
        let mut blocker = None;
        let waited = hosted.progress.wait(deadline, is_wanted, || {
            let mut window = self.window();
            let Some(window) = window.as_mut() else { return true };
            let (version, now) = (hosted.progress.version(), self.now());
            blocker = window.blocker(client, version, now);
            match blocker {
                // Nobody waits for who waits: others may go on by that.
                Some(_) if window.wait(client) => hosted.progress.wake(),
                Some(_) => {}
                None => window.pull(client, version, now),
            }
            blocker.is_none()
        });
        let mut window = self.window();
        match waited {
            Waited::Met => Ok(()),
            Waited::Expired => {
                tracing::warn!(?blocker, "a pull stopped waiting for the slowest worker");
                if let Some(window) = window.as_mut() {
                    window.pull(client, hosted.progress.version(), self.now());
                }
                Ok(())
            }
            Waited::Over => {
                if let Some(window) = window.as_mut() {
                    window.leave(client);
                }
                Err(Refusal::NotServing)
            }
        }
    }

    fn now(&self) -> Time {
        Time::since_origin(self.start.elapsed())
    }

    fn hosted(&self) -> Option<Arc<Hosted>> {
        match &*self.phase() {
            Phase::Held { hosted, .. } => Some(Arc::clone(hosted)),
            Phase::Empty | Phase::Loading(_) | Phase::Failed(_) | Phase::Closed => None,
        }
    }

    fn phase(&self) -> MutexGuard<'_, Phase> {
        self.phase.lock().expect("the lock on the phase is poisoned")
    }

    fn window(&self) -> MutexGuard<'_, Option<Window>> {
        self.window.lock().expect("the window's calls do not panic")
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        self.close();
    }
}

impl Hosted {
    fn check(&self, request: &PullRequest) -> Result<(), Refusal> {
        if request.partitions != self.partitions {
            return Err(self.elsewhere(&request.partitions));
        }
        let n_ids: u64 = request.counts.iter().map(|count| u64::from(*count)).sum();
        let n_counts = self.partitions.len() * self.dims.len();
        if request.counts.len() != n_counts || request.ids.len() as u64 != n_ids {
            return Err(Refusal::Other("the pull is for another model".into()));
        }
        Ok(())
    }

    fn elsewhere(&self, asked: &Range<u32>) -> Refusal {
        Refusal::Other(format!(
            "requested partitions {}..{}; this server holds {}..{}",
            asked.start, asked.end, self.partitions.start, self.partitions.end
        ))
    }

    /// Whether every partition has the rows of `step`: it is there, or one step past it.
    fn expect_step(&self, step: u64) -> Result<(), Refusal> {
        let (least, most) = self.progress.versions();
        if step <= least && most <= step + 1 {
            return Ok(());
        }
        let at = if step > least { least } else { most };
        Err(Refusal::Torn(format!("requested step {step}; this server is at step {at}")))
    }

    fn wait_for_round(
        &self,
        round: u64,
        deadline: Instant,
        is_wanted: &dyn Fn() -> bool,
    ) -> Result<(), Refusal> {
        let is_met = || self.progress.slowest().is_none_or(|(_, applied)| applied >= round);
        match self.progress.wait(deadline, is_wanted, is_met) {
            Waited::Met => Ok(()),
            Waited::Over => Err(Refusal::NotServing),
            Waited::Expired => {
                let (partition, applied) = self.progress.slowest().unwrap_or_default();
                Err(Refusal::Waited(format!(
                    "{round} rounds: partition {partition} has applied {applied}"
                )))
            }
        }
    }

    /// Ends the owners. What is still in their queues is dropped, and answered by that.
    fn end(&self) {
        self.progress.end();
        for owner in &self.owners {
            // An owner that is gone needs no telling.
            let _ = owner.send(Task::Stop);
        }
        let threads = std::mem::take(&mut *self.threads.lock().expect("only ends are kept here"));
        for thread in threads {
            // A panic has been reported by the thread's own guard.
            let _ = thread.join();
        }
    }
}
