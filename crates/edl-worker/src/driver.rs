// SPDX-License-Identifier: Apache-2.0
//! The worker's machine and the channels to the threads that perform its effects.
//!
//! Every thread hands its events to the machine here. Effects go into channels before the lock is
//! released, so they keep their order. Nothing is read, computed or sent under the lock.

use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use edl_core::id::BatchId;
use edl_core::time::Time;
use edl_core::worker::{Activity, Computed, Effect, Event, Item, Records, Report, Worker};
use tokio::sync::mpsc::UnboundedSender;
use tracing::{debug, warn};

use crate::compute::Task;
use crate::feed::{Read, Source};
use crate::link::Ask;
use crate::progress::Progress;
use crate::servers::{Abort, Push};

/// What the session gets from the machine. It needs no limit: see `worker::Outbox`.
pub(crate) enum Output {
    Report(Report),
    /// `next_deadline` has changed.
    Deadline,
    End,
    /// A thread that is needed has panicked.
    Died(&'static str),
}

/// The threads that perform effects.
pub(crate) struct Channels {
    pub(crate) session: UnboundedSender<Output>,
    pub(crate) compute: Sender<Task>,
    pub(crate) feed: Sender<(Item, Read)>,
    pub(crate) link: Sender<(u64, Ask)>,
}

/// A handle that every thread has.
#[derive(Clone)]
pub(crate) struct Driver(Arc<Mutex<State>>);

struct State {
    machine: Worker,
    started: Instant,
    /// None after the end, so the other threads end too.
    channels: Option<Channels>,
    progress: Arc<Progress>,
    /// Ends the waits on this connection.
    abort: Option<(u64, Abort)>,
    /// The gradient of the batch that was computed last, while its event is handled.
    gradient: Option<Push>,
    deadline: Option<Time>,
    activity: Option<Activity>,
}

impl Driver {
    pub(crate) fn new(machine: Worker, channels: Channels, progress: Arc<Progress>) -> Self {
        Self(Arc::new(Mutex::new(State {
            machine,
            started: Instant::now(),
            channels: Some(channels),
            progress,
            abort: None,
            gradient: None,
            deadline: None,
            activity: None,
        })))
    }

    /// Hands an event to the machine and its effects to other threads.
    pub(crate) fn tell(&self, event: Event) {
        self.lock().handle(event);
    }

    /// The same for an event that brings numbers: they reach the compute thread before what the
    /// machine does with them.
    pub(crate) fn tell_with(&self, numbers: Task, event: Event) {
        let mut state = self.lock();
        state.compute(numbers);
        state.handle(event);
    }

    /// The servers are connected; `abort` ends every wait on this connection.
    pub(crate) fn connected(&self, connection: u64, abort: Abort) {
        let mut state = self.lock();
        state.abort = Some((connection, abort));
        state.handle(Event::Connected { connection });
    }

    /// A batch is trained; its gradient is sent if the machine says so, and returned otherwise.
    pub(crate) fn trained(&self, batch: BatchId, computed: Computed, push: Push) -> Option<Push> {
        let mut state = self.lock();
        state.gradient = Some(push);
        state.handle(Event::Computed { item: Item::Batch(batch), result: Ok(computed) });
        state.gradient.take()
    }

    /// The servers have sent a gradient on; its buffers can be used again.
    pub(crate) fn sent(&self, push: Push) {
        self.lock().compute(Task::Sent(push));
    }

    pub(crate) fn died(&self, thread: &'static str) {
        self.lock().output(Output::Died(thread));
    }

    /// The session is gone: ends every wait and every thread.
    pub(crate) fn close(&self) {
        let mut state = self.lock();
        state.abort.take().into_iter().for_each(|(_, abort)| abort());
        state.channels = None;
    }

    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        let state = self.lock();
        let deadline = state.machine.next_deadline()?;
        Some(state.started + deadline.since(Time::ZERO))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().expect("the lock on the machine is poisoned")
    }
}

impl State {
    fn handle(&mut self, event: Event) {
        let now = Time::since_origin(self.started.elapsed());
        for effect in self.machine.handle(event, now) {
            self.perform(effect);
        }
        if cfg!(debug_assertions) {
            self.machine.check_invariants();
        }
        let activity = self.machine.activity();
        if self.activity.replace(activity) != Some(activity) {
            self.progress.at_step(self.machine.n_trained());
            self.progress.show(activity);
        }
        let deadline = self.machine.next_deadline();
        if deadline != self.deadline {
            self.deadline = deadline;
            self.output(Output::Deadline);
        }
    }

    /// Passes an effect on. A thread that is gone is known by its end, so failed sends are not.
    fn perform(&mut self, effect: Effect) {
        match effect {
            Effect::Read { item, records } => {
                let read = match records {
                    Records::Training(batch) => Read::Batch(batch),
                    Records::Validation(range) => Read::Range(Source::Validation, range),
                    Records::Prediction(range) => Read::Range(Source::Prediction, range),
                };
                let _ = self.channels.as_ref().map(|to| to.feed.send((item, read)));
            }
            Effect::Forget(item) => self.compute(Task::Forget(item)),
            Effect::Connect { connection, route } => {
                debug!(generation = %route.generation, "connecting to the servers");
                self.ask(connection, Ask::Connect(route));
            }
            Effect::Abort { connection } => {
                if let Some((_, abort)) = self.abort.take_if(|(number, _)| *number == connection) {
                    abort();
                }
            }
            Effect::Pull { connection, item, wants } => {
                self.compute(Task::Pull { connection, item, wants });
            }
            Effect::Push { connection, batch } => {
                let push = self.gradient.take().filter(|push| push.batch == batch);
                let push = push.expect("the gradient that is pushed was computed last");
                self.ask(connection, Ask::Push(push));
            }
            Effect::Compute(item) => self.compute(Task::Compute(item)),
            Effect::Begin { lease, shard } => self.compute(Task::Begin { lease, shard }),
            Effect::Finish(lease) => self.compute(Task::Finish(lease)),
            Effect::Drop(lease) => self.compute(Task::Drop(lease)),
            Effect::Report(report) => {
                if let Report::Failed { lease, index, error } = &report {
                    warn!(%lease, index, error, "work failed; returning it to the master");
                }
                self.output(Output::Report(report));
            }
            Effect::End => {
                self.compute(Task::End);
                self.output(Output::End);
                self.channels = None;
            }
        }
    }

    fn ask(&self, connection: u64, ask: Ask) {
        if let Some(to) = &self.channels {
            let _ = to.link.send((connection, ask));
        }
    }

    fn compute(&self, task: Task) {
        if let Some(to) = &self.channels {
            let _ = to.compute.send(task);
        }
    }

    fn output(&self, output: Output) {
        if let Some(to) = &self.channels {
            let _ = to.session.send(output);
        }
    }
}
