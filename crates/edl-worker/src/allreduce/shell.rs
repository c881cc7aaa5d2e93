// SPDX-License-Identifier: Apache-2.0
//! The machine of a worker under AllReduce or Hybrid, and the threads that perform its effects.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use edl_core::activity::Activity;
use edl_core::id::WorldId;
use edl_core::job::MemberReport;
use edl_core::member::{Config, Effect, Event, Member, Place};
use edl_core::time::Time;
use edl_core::worker::{Records, Report};
use edl_net::convert;
use edl_net::mesh::Peer;
use edl_net::proto::worker_command::Kind as Command;
use edl_tensor::checkpoint::Snapshot;
use tokio::sync::mpsc::UnboundedSender;
use tracing::{info, warn};

use super::interrupt::Interrupt;
use crate::driver::{Driver, Input, Output, Shell};
use crate::feed::Decoded;
use crate::progress::Progress;

/// What the compute thread gets: data from other threads, and effects to perform.
pub(crate) enum Task {
    Effect(Effect),
    Records(Place, Decoded),
    /// How the members of an announced world are reached.
    Peers(WorldId, Vec<Peer>),
    /// The memory of copies that are written.
    Spare(Vec<Snapshot>),
}

pub(crate) struct MemberShell {
    pub(crate) machine: Member,
    pub(crate) compute: Sender<Task>,
    pub(crate) feed: Sender<(Place, Records)>,
    pub(crate) interrupt: Arc<Interrupt>,
    pub(crate) progress: Arc<Progress>,
}

/// The ends of a member's channels for the threads that perform its effects.
pub(crate) struct Queues {
    pub(crate) tasks: Receiver<Task>,
    pub(crate) reads: Receiver<(Place, Records)>,
    pub(crate) interrupt: Arc<Interrupt>,
}

impl Driver<MemberShell> {
    pub(crate) fn of_member(
        config: Config,
        outputs: UnboundedSender<Output>,
        progress: &Arc<Progress>,
    ) -> (Self, Queues) {
        let (compute, tasks) = channel();
        let (feed, reads) = channel();
        let interrupt = Arc::new(Interrupt::default());
        let shell = MemberShell {
            machine: Member::new(config, Time::ZERO),
            compute,
            feed,
            interrupt: Arc::clone(&interrupt),
            progress: Arc::clone(progress),
        };
        (Self::new(shell, outputs, Arc::clone(progress)), Queues { tasks, reads, interrupt })
    }

    /// For an event that brings data: the data reaches the compute thread before the effects.
    pub(super) fn handle_data(&self, data: Task, event: Event) {
        self.handle_with(|shell| shell.compute(data), event);
    }

    pub(crate) fn decoded(&self, place: Place, records: Result<Decoded, String>) {
        let (data, result) = match records {
            Ok(records) => (Task::Records(place, records), Ok(())),
            Err(error) => (Task::Effect(Effect::Forget(place)), Err(error)),
        };
        self.handle_data(data, Event::Decoded { place, result });
    }
}

impl Shell for MemberShell {
    type Machine = Member;

    fn machine(&mut self) -> &mut Member {
        &mut self.machine
    }

    fn event(&mut self, input: Input) -> Option<Event> {
        match input {
            Input::Command(command) => {
                if let Command::World(world) = &*command {
                    let peers = convert::member::peers(world);
                    let (id, n_members) = (world.world, peers.len());
                    info!(world = id, n_members, after = world.after, "new world announced");
                    self.compute(Task::Peers(WorldId(world.world), peers));
                }
                convert::worker::command(*command).map(Event::Command)
            }
            Input::Rejoined => Some(Event::Rejoined),
            Input::MasterLost => Some(Event::MasterLost),
            Input::Leave => Some(Event::Leave),
            Input::Tick => Some(Event::Tick),
        }
    }

    fn perform(&mut self, effect: Effect, session: &UnboundedSender<Output>) {
        match effect {
            Effect::Report(report) => {
                log(&report);
                let _ = session.send(Output::Report(report));
            }
            Effect::Read { place, records } => {
                let _ = self.feed.send((place, records));
            }
            Effect::Waste(time) => self.progress.spending.waste(time),
            Effect::Cancel(world) => self.interrupt.cancel(world),
            Effect::ExitNow => drop(session.send(Output::End)),
            Effect::Start(_) => {
                self.interrupt.reset();
                self.compute(Task::Effect(effect));
            }
            Effect::Prepare(_)
            | Effect::Forget(_)
            | Effect::Finish(_)
            | Effect::DropShard(_)
            | Effect::Write(_)
            | Effect::DropState
            | Effect::HangUp
            | Effect::End => self.compute(Task::Effect(effect)),
        }
    }

    fn activity(&self) -> Activity {
        self.machine.activity()
    }

    fn step(&self) -> u64 {
        self.machine.step().unwrap_or(0)
    }

    fn progress(&self) -> u64 {
        self.machine.progress()
    }

    fn records(&self) -> u64 {
        self.machine.records()
    }

    fn close(&mut self) {
        self.interrupt.cancel(None);
    }
}

impl MemberShell {
    fn compute(&self, task: Task) {
        let _ = self.compute.send(task);
    }
}

fn log(report: &Report) {
    match report {
        Report::Member(MemberReport::Formed { world, step, pause_secs, state_bytes }) => {
            info!(%world, step, state_bytes, pause_secs, "world formed");
        }
        Report::Member(MemberReport::PeerLost { world, suspect, error }) => {
            warn!(%world, %suspect, error, "lost a member of the world");
        }
        Report::Member(MemberReport::NonFinite { world, step, error }) => {
            warn!(%world, step, error, "the result of a step is not finite; leaving the world");
        }
        Report::Member(MemberReport::Quit { world, step }) => {
            info!(%world, step, "the training script has left its loop");
        }
        Report::Member(MemberReport::StepFailed { world, step, error }) => {
            warn!(%world, step, error, "step failed");
        }
        Report::Member(MemberReport::StepMismatch { world, error }) => {
            warn!(%world, error, "the parameter servers are at a different step");
        }
        Report::Member(MemberReport::NotLoaded { generation, error }) => {
            warn!(%generation, error, "cannot load");
        }
        Report::Failed { lease, index, error }
        | Report::NonFinite { lease, index, error }
        | Report::DiskFull { lease, index, error } => {
            warn!(%lease, index, error, "work failed; returning it to the master");
        }
        // The master warns of it, unless it has given up the checkpoint.
        Report::CheckpointFailed { checkpoint, error } => {
            info!(%checkpoint, error, "checkpoint not written");
        }
        Report::Member(MemberReport::Paused { world, step, .. }) => info!(%world, step, "pausing"),
        Report::Member(MemberReport::Stepped { .. } | MemberReport::Pace { .. })
        | Report::Ready { .. }
        | Report::BatchPushed { .. }
        | Report::BatchDone { .. }
        | Report::EvalDone { .. }
        | Report::PredictDone { .. }
        | Report::Returned { .. }
        | Report::Leaving
        | Report::Heartbeat { .. }
        | Report::Spending(_)
        | Report::CheckpointDone { .. } => {}
    }
}
