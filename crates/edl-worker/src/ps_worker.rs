// SPDX-License-Identifier: Apache-2.0
//! The machine of a worker with parameter servers, and the threads that perform its effects.

use std::sync::mpsc::Sender;

use edl_core::activity::Activity;
use edl_core::id::BatchId;
use edl_core::worker::{Computed, Effect, Event, Records, Report, WorkItem, Worker};
use edl_net::convert;
use tokio::sync::mpsc::UnboundedSender;
use tracing::{debug, warn};

use crate::compute::Task;
use crate::driver::{Driver, Input, Output, Shell};
use crate::link::{Ask, News};
use crate::servers::{Abort, Push};

pub(crate) struct PsWorker {
    pub(crate) machine: Worker,
    pub(crate) compute: Sender<Task>,
    pub(crate) feed: Sender<(WorkItem, Records)>,
    pub(crate) link: Sender<(u64, Ask)>,
    /// Ends the waits on this connection.
    pub(crate) abort: Option<(u64, Abort)>,
    /// The gradient of the batch that was computed last, while its event is handled.
    pub(crate) gradient: Option<Push>,
    /// Records whose gradients were computed.
    pub(crate) n_records: u64,
}

impl Driver<PsWorker> {
    /// For an event that brings data: the data reaches the compute thread before the effects.
    pub(crate) fn handle_data(&self, data: Task, event: Event) {
        self.handle_with(|shell| shell.compute(data), event);
    }

    /// A batch is trained. Its gradient is sent if the machine decides so, and returned otherwise.
    pub(crate) fn trained(&self, batch: BatchId, loss: f32, push: Push) -> Option<Push> {
        let result = Ok(Computed::Batch { loss });
        let event = Event::Computed { item: WorkItem::Batch(batch), result };
        let computed = |shell: &mut PsWorker| {
            shell.n_records += u64::from(push.n_records);
            shell.gradient = Some(push);
        };
        self.handle_with(computed, event);
        self.with(|shell| shell.gradient.take()).flatten()
    }

    /// Passes news of the servers to the machine.
    pub(crate) fn news(&self, connection: u64, news: News) {
        match news {
            News::Connected(abort) => {
                let event = Event::Connected { connection };
                self.handle_with(|shell| shell.abort = Some((connection, abort)), event);
            }
            News::Pulled(item, pull, versions) => self.handle_data(
                Task::Parameters { connection, item, pull, versions },
                Event::Pulled { connection, item },
            ),
            News::Sent(push) => {
                self.with(|shell| shell.compute(Task::Sent(push)));
            }
            News::Acknowledged { batch, generation } => {
                self.handle(Event::Acknowledged { connection, batch, generation });
            }
            News::Broken => self.handle(Event::Broken { connection }),
        }
    }
}

impl Shell for PsWorker {
    type Machine = Worker;

    fn machine(&mut self) -> &mut Worker {
        &mut self.machine
    }

    fn event(&mut self, input: Input) -> Option<Event> {
        match input {
            Input::Command(command) => convert::worker::command(*command).map(Event::Command),
            Input::Rejoined => Some(Event::Rejoined),
            Input::Leave => Some(Event::Leave),
            Input::Tick => Some(Event::Tick),
            Input::MasterLost => None,
        }
    }

    fn perform(&mut self, effect: Effect, session: &UnboundedSender<Output>) {
        match effect {
            Effect::Read { item, records } => {
                let _ = self.feed.send((item, records));
            }
            Effect::Forget(item) => self.compute(Task::Forget(item)),
            Effect::Connect { connection, route } => {
                debug!(generation = %route.generation, "connecting to the servers");
                let _ = self.link.send((connection, Ask::Connect(route)));
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
                let _ = self.link.send((connection, Ask::Push(push)));
            }
            Effect::Skip { connection, batch } => {
                let _ = self.link.send((connection, Ask::Skip(batch)));
            }
            Effect::Compute(item) => self.compute(Task::Compute(item)),
            Effect::Begin { lease, shard } => self.compute(Task::Begin { lease, shard }),
            Effect::Finish(lease) => self.compute(Task::Finish(lease)),
            Effect::Drop(lease) => self.compute(Task::Drop(lease)),
            Effect::Report(report) => {
                if let Report::Failed { lease, index, error }
                | Report::NonFinite { lease, index, error }
                | Report::DiskFull { lease, index, error } = &report
                {
                    warn!(%lease, index, error, "work failed; returning it to the master");
                }
                let _ = session.send(Output::Report(report));
            }
            Effect::End => {
                self.compute(Task::End);
                let _ = session.send(Output::End);
            }
        }
    }

    fn activity(&self) -> Activity {
        self.machine.activity()
    }

    fn step(&self) -> u64 {
        0
    }

    fn progress(&self) -> u64 {
        self.machine.progress()
    }

    fn records(&self) -> u64 {
        self.n_records
    }

    fn close(&mut self) {
        self.abort.take().into_iter().for_each(|(_, abort)| abort());
    }
}

impl PsWorker {
    fn compute(&self, task: Task) {
        let _ = self.compute.send(task);
    }
}
