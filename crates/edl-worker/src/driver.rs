// SPDX-License-Identifier: Apache-2.0
//! A worker's machine, shared by all threads of the worker.
//!
//! Every thread passes its events to the machine here. Effects go into channels before the lock is
//! released, so they keep their order. Nothing is read, computed or sent under the lock.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use edl_core::activity::Activity;
use edl_core::machine::Machine;
use edl_core::time::Time;
use edl_core::worker::Report;
use edl_net::proto::worker_command::Kind as Command;
use tokio::sync::mpsc::UnboundedSender;

use crate::progress::Progress;

/// What the session gets from the machine. It needs no limit: see `worker::Outbox`.
pub(crate) enum Output {
    Report(Report),
    /// `next_deadline` has changed.
    Deadline,
    End,
    /// A thread that is needed has panicked.
    Died(&'static str),
}

/// What the session passes to the machine.
pub(crate) enum Input {
    Command(Box<Command>),
    Rejoined,
    MasterLost,
    Leave,
    Tick,
}

type Event<S> = <<S as Shell>::Machine as Machine>::Event;
type Effect<S> = <<S as Shell>::Machine as Machine>::Effect;

/// A machine, and the channels to the threads that perform its effects.
pub(crate) trait Shell: Send + 'static {
    type Machine: Machine;

    fn machine(&mut self) -> &mut Self::Machine;

    /// None for what does not concern this machine.
    fn event(&mut self, input: Input) -> Option<Event<Self>>;

    /// Passes an effect to another thread. A thread that is gone is known by its end, so failed
    /// sends are ignored.
    fn perform(&mut self, effect: Effect<Self>, session: &UnboundedSender<Output>);

    fn activity(&self) -> Activity;

    /// The job's step, where all workers take it together; otherwise zero.
    fn step(&self) -> u64;

    /// Batches, lanes and minibatches that were computed.
    fn progress(&self) -> u64;

    /// Records whose gradients were computed.
    fn records(&self) -> u64;

    /// Ends every wait of other threads.
    fn close(&mut self);
}

/// What a session knows of its worker.
pub(crate) trait Worker: Send {
    fn input(&self, input: Input);
    fn next_deadline(&self) -> Option<Instant>;
    /// The session is gone: ends every wait and every thread.
    fn close(&self);
}

/// A handle that every thread has.
pub(crate) struct Driver<S>(Arc<Mutex<State<S>>>);

struct State<S> {
    /// None after the end, so the other threads end too.
    running: Option<(S, UnboundedSender<Output>)>,
    started: Instant,
    progress: Arc<Progress>,
    deadline: Option<Time>,
    activity: Option<Activity>,
}

impl<S> Clone for Driver<S> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<S: Shell> Driver<S> {
    pub(crate) fn new(shell: S, session: UnboundedSender<Output>, progress: Arc<Progress>) -> Self {
        Self(Arc::new(Mutex::new(State {
            running: Some((shell, session)),
            started: Instant::now(),
            progress,
            deadline: None,
            activity: None,
        })))
    }

    /// Passes an event to the machine.
    pub(crate) fn handle(&self, event: Event<S>) {
        self.lock().handle(event);
    }

    /// The same after `change`, with no other event in between.
    pub(crate) fn handle_with(&self, change: impl FnOnce(&mut S), event: Event<S>) {
        let mut state = self.lock();
        if let Some((shell, _)) = &mut state.running {
            change(shell);
        }
        state.handle(event);
    }

    /// What `look` finds; none after the end.
    pub(crate) fn with<R>(&self, look: impl FnOnce(&mut S) -> R) -> Option<R> {
        self.lock().running.as_mut().map(|(shell, _)| look(shell))
    }

    pub(crate) fn output(&self, output: Output) {
        if let Some((_, session)) = &self.lock().running {
            let _ = session.send(output);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State<S>> {
        self.0.lock().expect("the lock on the machine is poisoned")
    }
}

impl<S: Shell> Worker for Driver<S> {
    fn input(&self, input: Input) {
        let mut state = self.lock();
        if let Some(event) = state.running.as_mut().and_then(|(shell, _)| shell.event(input)) {
            state.handle(event);
        }
    }

    fn next_deadline(&self) -> Option<Instant> {
        let mut state = self.lock();
        let deadline = state.running.as_mut()?.0.machine().next_deadline()?;
        Some(state.started + deadline.since(Time::ZERO))
    }

    fn close(&self) {
        if let Some((mut shell, _)) = self.lock().running.take() {
            shell.close();
        }
    }
}

impl<S: Shell> State<S> {
    fn handle(&mut self, event: Event<S>) {
        let Some((shell, session)) = &mut self.running else { return };
        let now = Time::since_origin(self.started.elapsed());
        for effect in shell.machine().handle(event, now) {
            shell.perform(effect, session);
        }
        if cfg!(debug_assertions) {
            shell.machine().check_invariants();
        }
        self.progress.advance(shell.progress(), shell.step(), shell.records());
        let activity = shell.activity();
        if self.activity.replace(activity) != Some(activity) {
            self.progress.show(activity);
        }
        let deadline = shell.machine().next_deadline();
        if deadline != self.deadline {
            self.deadline = deadline;
            let _ = session.send(Output::Deadline);
        }
    }
}
