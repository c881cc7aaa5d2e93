// SPDX-License-Identifier: Apache-2.0
//! The shell around [`Server`]: one lock, and the threads that do what the machine decides.
//!
//! A thread that brings an event takes the lock, and delivers the machine's answers after it has
//! released it. Connections wait for the verdict on their request. What may block goes to the
//! keeper, one effect after the other, and copies of partitions go to the writer.

mod keeper;
mod pull;
mod push;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use edl_core::goodput::Spent;
use edl_core::id::{BatchId, CheckpointId, Generation};
use edl_core::layout::Layout;
use edl_core::machine::Machine;
use edl_core::server::{
    Client, Effect, Event, Inspection, Note, Order, Refusal, Report, Request, Server,
};
use edl_core::servers::PartitionState;
use edl_core::time::Time;
use edl_tensor::partition::Partition;
use tokio::sync::{mpsc::UnboundedSender, oneshot, watch};

use self::keeper::{Copy, Guard, Keeper, KeeperTask, write_copies};
pub use self::pull::{Pieces, PullBuffers};
pub use self::push::{PushBuffers, Reply, Spare};
use crate::owner::Task;
use crate::spending::Spending;

/// A connection that waits looks up this often, to see whether its client is still there.
const POLL_INTERVAL: Duration = Duration::from_millis(250);

/// The partitions of one server, in owner threads.
pub struct Store {
    shared: Arc<Shared>,
    /// The keeper and the writer.
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// What all threads of a store share.
pub(crate) struct Shared {
    state: Mutex<State>,
    copies: mpsc::Sender<Option<Copy>>,
    start: Instant,
    pub(crate) spending: Spending,
    /// Turns true when a thread panics: its work is left undone, and the process must exit.
    is_broken: watch::Sender<bool>,
}

struct State {
    server: Server,
    hosted: Option<Arc<Hosted>>,
    callers: BTreeMap<Request, Caller>,
    hellos: BTreeMap<u64, oneshot::Sender<(Generation, Vec<PartitionState>)>>,
    /// The last number given to a request or a hello.
    last_number: u64,
    tasks: mpsc::Sender<KeeperTask>,
    reports: UnboundedSender<Report>,
}

/// The partitions of one generation and their owners.
pub(crate) struct Hosted {
    generation: Generation,
    partitions: Range<u32>,
    layout: Layout,
    dims: Vec<usize>,
    owners: Vec<mpsc::SyncSender<Task>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// Who waits for the answer to a request.
enum Caller {
    Pull(mpsc::Sender<Verdict>),
    Push {
        /// Taken when the owners get the push.
        verdict: Option<mpsc::Sender<Verdict>>,
        replies: mpsc::Sender<Reply>,
        sequence: u64,
        batch: BatchId,
        generation: Generation,
    },
}

/// What becomes of a request.
enum Verdict {
    /// The owners get it.
    Go(Arc<Hosted>),
    Refused(Refusal),
}

/// An answer on its way to the thread that waits for it.
enum Delivery {
    Verdict(mpsc::Sender<Verdict>, Verdict),
    Reply(mpsc::Sender<Reply>, Reply),
}

impl Store {
    /// A store that holds nothing yet. `threads` 0 means one owner per core.
    pub fn new(
        threads: usize,
        job_dir: PathBuf,
        reports: UnboundedSender<Report>,
    ) -> std::io::Result<Self> {
        let (tasks, task_queue) = mpsc::channel();
        let (copies, copy_queue) = mpsc::channel();
        let shared = Arc::new(Shared {
            state: Mutex::new(State {
                server: Server::new(),
                hosted: None,
                callers: BTreeMap::new(),
                hellos: BTreeMap::new(),
                last_number: 0,
                tasks,
                reports,
            }),
            copies,
            start: Instant::now(),
            spending: Spending::new(),
            is_broken: watch::Sender::new(false),
        });
        let start = |name: &str, run: Box<dyn FnOnce() + Send>| {
            let guard = Guard(shared.is_broken.clone());
            let run = move || {
                let _guard = guard;
                run();
            };
            std::thread::Builder::new().name(name.into()).spawn(run)
        };
        let keeper = Keeper { shared: Arc::clone(&shared), threads, job_dir };
        let keeper = start("keeper", Box::new(move || keeper.run(&task_queue)))?;
        let writing = Arc::clone(&shared);
        let writer = start("writer", Box::new(move || write_copies(&writing, &copy_queue)))?;
        Ok(Self { shared, threads: Mutex::new(vec![keeper, writer]) })
    }

    /// Passes an event to the machine.
    pub fn handle(&self, event: Event) {
        self.shared.handle(event);
    }

    /// Turns true when the store cannot be trusted anymore.
    #[must_use]
    pub fn broken(&self) -> watch::Receiver<bool> {
        self.shared.is_broken.subscribe()
    }

    /// What the store holds, for a hello; generation 0 is nothing.
    #[must_use]
    pub fn inspect(&self) -> oneshot::Receiver<(Generation, Vec<PartitionState>)> {
        let (answer, receiver) = oneshot::channel();
        let mut state = self.shared.state();
        let hello = state.number();
        state.hellos.insert(hello, answer);
        drop(state);
        self.handle(Event::Inspect(Inspection::Hello(hello)));
        receiver
    }

    #[must_use]
    pub fn is_loading(&self) -> bool {
        self.shared.state().server.is_loading()
    }

    /// Where the time went, how many pulls and pushes came, and how many rows are held.
    #[must_use]
    pub fn load_of(&self) -> (Spent, u64, u64, u64) {
        let state = self.shared.state();
        let ((pulls, pushes), rows) = (state.server.n_requests(), state.server.n_rows());
        drop(state);
        (self.shared.spending.read(), pulls, pushes, rows)
    }

    /// Stops all threads and every wait, for good.
    pub fn close(&self) {
        self.handle(Event::Order(Order::Stop("the process exits".into())));
        let threads = std::mem::take(&mut *self.threads.lock().expect("only taken here"));
        // Threads that have stopped need no message.
        let _ = self.shared.state().tasks.send(KeeperTask::End);
        let _ = self.shared.copies.send(None);
        for thread in threads {
            // A panic has been printed by its own thread.
            let _ = thread.join();
        }
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        self.close();
    }
}

impl Shared {
    pub(crate) fn handle(&self, event: Event) {
        self.state_and_deliver(|state, now| state.handle(event, now));
    }

    /// Copies `partition` for a checkpoint, if the machine still needs it.
    pub(crate) fn copy(&self, checkpoint: CheckpointId, partition: &Partition) {
        let (id, updates) = (partition.id(), partition.updates());
        let event = Event::Copied { checkpoint, partition: id, updates };
        let folder = self.state_and_deliver(|state, now| state.handle(event, now));
        if let Some(folder) = folder {
            let copy = Copy { checkpoint, folder, snapshot: partition.snapshot() };
            // The writer stops after the owners.
            let _ = self.copies.send(Some(copy));
        }
    }

    pub(crate) fn is_writing(&self, checkpoint: CheckpointId) -> bool {
        self.state().server.is_writing(checkpoint)
    }

    /// The partitions exist, and wait for the machine's verdict.
    fn install(&self, hosted: Hosted, event: Event) {
        self.state_and_deliver(|state, now| {
            state.hosted = Some(Arc::new(hosted));
            state.handle(event, now)
        });
    }

    /// Passes a request to the machine.
    fn ask(&self, caller: Caller, event: impl FnOnce(Request) -> Event) -> Request {
        let mut asked = Request(0);
        self.state_and_deliver(|state, now| {
            asked = Request(state.number());
            state.callers.insert(asked, caller);
            state.handle(event(asked), now)
        });
        asked
    }

    /// Waits for the verdict on a request of `client`.
    fn verdict(
        &self,
        verdicts: &mpsc::Receiver<Verdict>,
        client: Client,
        is_wanted: &dyn Fn() -> bool,
    ) -> Result<Arc<Hosted>, Refusal> {
        let mut wait = Duration::ZERO;
        loop {
            match verdicts.recv_timeout(wait) {
                Ok(Verdict::Go(hosted)) => return Ok(hosted),
                Ok(Verdict::Refused(refusal)) => return Err(refusal),
                Err(_) if !is_wanted() => self.handle(Event::Left(client)),
                Err(_) => {}
            }
            wait = self.tick();
        }
    }

    /// Passes the time to the machine if a wait is over. Returns how long to wait for the next one.
    fn tick(&self) -> Duration {
        let (mut next, now) = (self.state().server.next_deadline(), self.now());
        if next.is_some_and(|next| next <= now) {
            self.handle(Event::Tick);
            next = self.state().server.next_deadline();
        }
        next.map_or(POLL_INTERVAL, |next| next.since(now).min(POLL_INTERVAL))
    }

    fn state_and_deliver(
        &self,
        act: impl FnOnce(&mut State, Time) -> (Vec<Delivery>, Option<String>),
    ) -> Option<String> {
        let (deliveries, folder) = act(&mut self.state(), self.now());
        for delivery in deliveries {
            // No thread waits when the connection is gone.
            match delivery {
                Delivery::Verdict(to, verdict) => drop(to.send(verdict)),
                Delivery::Reply(to, reply) => drop(to.send(reply)),
            }
        }
        folder
    }

    fn now(&self) -> Time {
        Time::since_origin(self.start.elapsed())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("the machine has panicked")
    }
}

impl State {
    fn number(&mut self) -> u64 {
        self.last_number += 1;
        self.last_number
    }

    /// Returns what to deliver, and the folder for the copy of the partition that the event was
    /// about.
    fn handle(&mut self, event: Event, now: Time) -> (Vec<Delivery>, Option<String>) {
        let effects = self.server.handle(event, now);
        #[cfg(debug_assertions)]
        self.server.check_invariants();
        let (mut deliveries, mut to) = (Vec::new(), None);
        for effect in effects {
            match effect {
                Effect::Drop(generation) => self.keep(KeeperTask::Drop(generation)),
                Effect::Load(load) => self.keep(KeeperTask::Load(load)),
                Effect::Copy { checkpoint, at } => self.keep(KeeperTask::Copy { checkpoint, at }),
                Effect::Inspect(inspection, generation) => {
                    self.keep(KeeperTask::Inspect(inspection, generation));
                }
                Effect::Write { folder, .. } => to = Some(folder),
                Effect::Apply(request) | Effect::Answer(request) => {
                    deliveries.extend(self.go(request));
                }
                Effect::Acknowledge(request) => self.answer(request, Ok(()), &mut deliveries),
                Effect::Refuse(request, refusal) => {
                    self.answer(request, Err(refusal), &mut deliveries);
                }
                Effect::Hello { hello, generation, states } => {
                    // A hello that was given up needs no answer.
                    let hello = self.hellos.remove(&hello);
                    let _ = hello.map(|hello| hello.send((generation, states)));
                }
                Effect::Report(report) => {
                    log(&report);
                    // No session listens anymore when the process exits.
                    let _ = self.reports.send(report);
                }
                Effect::Note(note @ Note::Serving(_)) => tracing::info!("{note}"),
                Effect::Note(note @ (Note::CannotServe(_) | Note::GaveUpWaiting { .. })) => {
                    tracing::warn!("{note}");
                }
            }
        }
        (deliveries, to)
    }

    fn keep(&self, task: KeeperTask) {
        // The keeper stops last.
        let _ = self.tasks.send(task);
    }

    /// The owners get the request. A push stays, until it is acknowledged.
    fn go(&mut self, request: Request) -> Option<Delivery> {
        let go = Verdict::Go(Arc::clone(self.hosted.as_ref()?));
        let caller = match self.callers.get_mut(&request)? {
            Caller::Push { verdict, .. } => verdict.take()?,
            Caller::Pull(verdict) => verdict.clone(),
        };
        if let Some(Caller::Pull(_)) = self.callers.get(&request) {
            self.callers.remove(&request);
        }
        Some(Delivery::Verdict(caller, go))
    }

    fn answer(
        &mut self,
        request: Request,
        outcome: Result<(), Refusal>,
        deliveries: &mut Vec<Delivery>,
    ) {
        match (self.callers.remove(&request), outcome) {
            (Some(Caller::Push { verdict, replies, sequence, batch, generation }), outcome) => {
                let refused = outcome.clone().err().map(Verdict::Refused);
                let waits = verdict.zip(refused);
                deliveries.extend(waits.map(|(to, refused)| Delivery::Verdict(to, refused)));
                let reply = Reply { sequence, batch, generation, outcome };
                deliveries.push(Delivery::Reply(replies, reply));
            }
            (Some(Caller::Pull(verdict)), Err(refusal)) => {
                deliveries.push(Delivery::Verdict(verdict, Verdict::Refused(refusal)));
            }
            (Some(Caller::Pull(_)) | None, _) => {}
        }
    }
}

fn log(report: &Report) {
    match report {
        Report::Loaded { generation, states } => {
            tracing::info!(%generation, partitions = states.len(), "loaded");
        }
        Report::LoadFailed { generation, error } => {
            tracing::error!(%generation, error, "cannot load");
        }
        // The master warns of it, unless it has given up the checkpoint.
        Report::CheckpointFailed { checkpoint, error, .. } => {
            tracing::info!(%checkpoint, error, "checkpoint not written");
        }
        Report::Heartbeat
        | Report::Spending(_)
        | Report::CheckpointStarted { .. }
        | Report::CheckpointDone { .. }
        | Report::States { .. } => {}
    }
}
