// SPDX-License-Identifier: Apache-2.0
//! Runs a job's processes on one machine, as children or as tasks of this process: starts the
//! master, executes its orders, restarts it when it dies, and stops everything in order.
//!
//! The master makes all decisions about the job, including which processes run.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Context as _;
use edl_core::job::{CUSTOM_LOOP_GRACE, STOP_TIMEOUT};
use edl_core::platform::{Ended, InstanceId, Order, Report, Role};
use edl_core::spec::{JobSpec, JobType};
use edl_core::supervisor::{Next, Relaunch};
use edl_core::time::Time;
use edl_core::verdict::Exited;
use edl_master::line_file::{LineFile, MAX_BYTES};
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior};

use crate::control;
use crate::custom_loop::FirstWorker;
use crate::exit::Exit;
use crate::fork_server::ForkServer;
use crate::jobs::{Hold, Job};
use crate::logs;
use crate::ui::Ui;
use children::{ChildEvent, Children, MASTER, Programs, Reaped, launch_report};
use link::Link;
use watch::Watch;

mod children;
mod link;
mod log_size;
mod out_of_memory;
mod slow;
mod tasks;
mod watch;

/// Interval between checks of the display, the grace periods and the master.
const TICK: Duration = Duration::from_millis(100);
const LOGS_EVERY: Duration = Duration::from_secs(2);
/// Time for processes to exit by themselves after the job's end.
const END_GRACE: Duration = Duration::from_secs(3);
/// After Ctrl-C, the master has this long to save a checkpoint and to stop the others.
const SAVE_GRACE: Duration = Duration::from_secs(STOP_TIMEOUT.as_secs() + 2);
/// Time for the others to exit when the master is gone.
const STOP_GRACE: Duration = Duration::from_millis(1600);

/// One job under supervision.
struct Supervisor<'a> {
    job: &'a Job,
    spec: JobSpec,
    resume: bool,
    port: u16,
    children: Children,
    link: Option<Link>,
    phase: SupervisorPhase,
    started: Instant,
    relaunch: Relaunch,
    watch: Watch,
    probe: JoinSet<Option<String>>,
    /// Whether what the master waits for was printed.
    has_reported: bool,
    /// Where the lines of the current master begin in its log.
    log_start: u64,
    /// For `elasticdl explain`.
    exits: LineFile,
    /// When the size of logs is looked at next.
    logs_due: Instant,
    ui: &'a mut Ui,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum SupervisorPhase {
    /// The master runs.
    Working,
    /// The master died; the next one starts at `until`.
    Waiting { until: Instant },
    /// All processes exit; those left at `kill_at` are killed.
    Ending { exit: Exit, kill_at: Instant },
}

/// What can happen to a supervisor.
enum Event {
    Signal,
    Order(Option<Order>),
    Child(ChildEvent),
    /// The answer of a master that writes no status: what it waits for, if anything.
    Probed(Option<String>),
    Tick,
}

/// Runs the job to its end, and returns how it ended. `forks` starts its Python processes; `first` is
/// one that runs already. The caller keeps the lock on the job until nothing else is written.
pub(crate) async fn run(
    job: &Job,
    _hold: &Hold,
    resume: bool,
    forks: Option<ForkServer>,
    first: Option<FirstWorker>,
    ui: &mut Ui,
) -> anyhow::Result<Exit> {
    let spec = job.spec()?;
    let programs = Programs::of(&spec);
    if programs.is_none() {
        // The one worker's log contains the master's lines, too.
        let worker = InstanceId { role: Role::Worker, id: 0 };
        crate::telemetry::start_in(spec.log_level, &job.paths().log(worker))?;
    }
    let children = Children::new(job.clone(), programs, forks, first);
    Supervisor::new(job, spec, children, resume, ui).run().await
}

fn silence_limit(spec: &JobSpec) -> Duration {
    Duration::from_secs_f64(spec.heartbeat_timeout_secs.clamp(3.0, 3600.0))
}

impl<'a> Supervisor<'a> {
    fn new(job: &'a Job, spec: JobSpec, children: Children, resume: bool, ui: &'a mut Ui) -> Self {
        let now = Instant::now();
        Self {
            job,
            children,
            watch: Watch::new(silence_limit(&spec), None, now),
            port: spec.port,
            spec,
            resume,
            link: None,
            phase: SupervisorPhase::Waiting { until: now },
            started: now,
            relaunch: Relaunch::default(),
            probe: JoinSet::new(),
            has_reported: false,
            log_start: 0,
            exits: LineFile::new(job.paths().exits(), MAX_BYTES),
            logs_due: now,
            ui,
        }
    }

    async fn run(&mut self) -> anyhow::Result<Exit> {
        let kinds = [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()];
        let [mut interrupt, mut terminate, mut hangup] = kinds.map(signal);
        let context = "cannot listen for signals";
        let interrupt = interrupt.as_mut().map_err(|e| anyhow::anyhow!("{context}: {e}"))?;
        let terminate = terminate.as_mut().map_err(|e| anyhow::anyhow!("{context}: {e}"))?;
        let hangup = hangup.as_mut().map_err(|e| anyhow::anyhow!("{context}: {e}"))?;
        let mut tick = tokio::time::interval(TICK);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let event = tokio::select! {
                _ = interrupt.recv() => Event::Signal,
                _ = terminate.recv() => Event::Signal,
                _ = hangup.recv() => Event::Signal,
                event = self.children.next() => Event::Child(event),
                order = next_order(&mut self.link) => Event::Order(order),
                Some(answered) = self.probe.join_next() => Event::Probed(answered.ok().flatten()),
                _ = tick.tick() => Event::Tick,
            };
            self.handle(event, Instant::now())?;
            if let SupervisorPhase::Ending { exit, .. } = self.phase
                && self.children.is_empty()
            {
                if self.spec.is_custom_loop() {
                    let folder = &self.spec.tensorboard_dir;
                    edl_master::take_rest_of_logged(self.job.paths(), folder);
                }
                self.ui.tick();
                self.job.remove_sockets();
                return Ok(exit);
            }
        }
    }

    fn handle(&mut self, event: Event, now: Instant) -> anyhow::Result<()> {
        match event {
            Event::Signal => self.interrupted(now),
            Event::Order(Some(order)) => self.execute(order, now),
            // The master's end itself comes by its reaper.
            Event::Order(None) => self.link = None,
            Event::Child(event) => self.follow(event, now),
            Event::Probed(Some(reason)) => {
                self.watch.answered(now);
                if !reason.is_empty() && !self.has_reported {
                    self.ui.print(&reason);
                }
                self.has_reported = !reason.is_empty();
            }
            Event::Probed(None) => {
                self.ui.print("master not responding; killing it");
                self.children.kill(MASTER);
            }
            Event::Tick => self.tick(now)?,
        }
        Ok(())
    }

    fn follow(&mut self, event: ChildEvent, now: Instant) {
        match event {
            ChildEvent::Launched(report) => self.report(report),
            ChildEvent::Ended(reaped) if reaped.instance == MASTER => {
                self.master_ended(reaped.how, now);
                let has_ended = matches!(self.phase, SupervisorPhase::Ending { .. });
                self.record(reaped, has_ended && !reaped.was_asked);
            }
            ChildEvent::Ended(reaped) => {
                let Reaped { instance, pid, how, .. } = reaped;
                self.report(Report::Ended { instance, pid, how });
                self.record(reaped, false);
            }
        }
    }

    fn tick(&mut self, now: Instant) -> anyhow::Result<()> {
        self.ui.tick();
        self.children.kill_overdue(now);
        if self.logs_due <= now {
            self.logs_due = now + LOGS_EVERY;
            log_size::limit(&self.job.paths().logs(), log_size::MAX_LOG);
        }
        match self.phase {
            SupervisorPhase::Working => self.check_master(now),
            SupervisorPhase::Waiting { until } if until <= now => self.start_master(now)?,
            SupervisorPhase::Waiting { .. } => {}
            SupervisorPhase::Ending { kill_at, .. } if kill_at <= now => self.children.kill_all(),
            SupervisorPhase::Ending { .. } => {}
        }
        Ok(())
    }

    fn start_master(&mut self, now: Instant) -> anyhow::Result<()> {
        let log = std::fs::metadata(self.job.paths().log(MASTER));
        self.log_start = log.map_or(0, |log| log.len());
        let launched = self.children.launch_master(self.port, self.resume);
        let link = launched.context("cannot start the master")?;
        link.report(Report::Running(self.children.list()));
        self.link = Some(link);
        self.watch = Watch::new(silence_limit(&self.spec), self.last_write(), now);
        self.phase = SupervisorPhase::Working;
        // Only the first master of a resumed job discards how the job ended before.
        self.resume = false;
        Ok(())
    }

    fn execute(&mut self, order: Order, now: Instant) {
        match order {
            Order::Launch { .. } if matches!(self.phase, SupervisorPhase::Ending { .. }) => {}
            Order::Launch { instance, is_spare, .. } => {
                let launched = self.children.launch(instance, is_spare);
                self.report(launch_report(instance, launched));
            }
            Order::Stop { instance, grace_ms } => {
                self.children.terminate(instance, Duration::from_millis(grace_ms), now);
            }
            Order::Dismiss { instance, grace_ms } => {
                self.children.dismiss(instance, Duration::from_millis(grace_ms), now);
            }
            Order::Chaos { instance, action } => self.children.chaos(instance, action),
        }
    }

    fn report(&mut self, report: Report) {
        if self.link.as_ref().is_some_and(|link| !link.report(report)) {
            self.ui.print("master unresponsive; killing it");
            self.children.kill(MASTER);
        }
    }

    fn master_ended(&mut self, how: Ended, now: Instant) {
        self.link = None;
        self.children.forget_starting();
        // The next master listens where this one did.
        self.port = self.job.fresh_master_port().unwrap_or(self.port);
        // A probe of a dead master is meaningless for the next one.
        self.probe = JoinSet::new();
        if let SupervisorPhase::Ending { kill_at, .. } = &mut self.phase {
            *kill_at = now + STOP_GRACE.min(kill_at.saturating_duration_since(now));
            self.children.terminate_all(STOP_GRACE, now);
            return;
        }
        match self.relaunch.master_ended(how, Time::since_origin(now - self.started)) {
            Next::Over(exit) => self.end(exit, now),
            Next::After(wait) => {
                let why = self.last_error(how);
                self.ui.print(&format!("the master died ({why}); restarting it"));
                self.phase = SupervisorPhase::Waiting { until: now + wait };
            }
            Next::GiveUp => {
                let log = self.job.paths().log(MASTER);
                let log = log.display();
                let why = self.last_error(how);
                self.ui.print(&format!("the master died too often ({why}); see the log: {log}"));
                self.end(Exit::Failed, now);
            }
        }
    }

    /// Records how a process ended. On a full disk, this is skipped.
    fn record(&mut self, reaped: Reaped, ended_job: bool) {
        let Reaped { instance, pid, how, was_asked } = reaped;
        let at_secs = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let at_secs = at_secs.as_secs_f64();
        let exited = Exited { at_secs, instance, pid, how, was_asked, ended_job };
        if let Ok(line) = serde_json::to_string(&exited) {
            let _left_out = self.exits.add(&line);
        }
    }

    /// How the master ended, and the last error in its log.
    fn last_error(&self, how: Ended) -> String {
        let error = logs::last_error_after(&self.job.paths().log(MASTER), self.log_start);
        error.map_or_else(|| describe(how), |error| format!("{}: {error}", describe(how)))
    }

    fn end(&mut self, exit: Exit, now: Instant) {
        let has_more = self.spec.is_custom_loop() && exit == Exit::Ok;
        let grace = if has_more { CUSTOM_LOOP_GRACE } else { END_GRACE };
        self.phase = SupervisorPhase::Ending { exit, kill_at: now + grace };
        self.children.terminate_rest(END_GRACE, now);
    }

    fn interrupted(&mut self, now: Instant) {
        if let SupervisorPhase::Ending { exit: Exit::Interrupted, .. } = self.phase {
            self.children.kill_all();
            return;
        }
        let exit = Exit::Interrupted;
        if self.children.pid(MASTER).is_some() {
            let secs = SAVE_GRACE.as_secs();
            self.ui.print(&match self.spec.job_type {
                JobType::Train => format!(
                    "saving a checkpoint and stopping, which takes up to {secs} s; press Ctrl-C \
                     again to stop at once"
                ),
                JobType::Evaluate | JobType::Predict => "stopping".into(),
            });
            // It stops the others in order; the rest is stopped when it is gone.
            self.phase = SupervisorPhase::Ending { exit, kill_at: now + SAVE_GRACE };
            self.children.terminate(MASTER, SAVE_GRACE, now);
        } else {
            self.phase = SupervisorPhase::Ending { exit, kill_at: now + STOP_GRACE };
            self.children.terminate_all(STOP_GRACE, now);
        }
    }

    fn check_master(&mut self, now: Instant) {
        let written = self.last_write();
        if self.watch.is_silent(written, now) && self.probe.is_empty() {
            let job = self.job.clone();
            let ask = async move { Some(control::status(&job).await.ok()?.reason) };
            self.probe.spawn(ask);
        }
    }

    fn last_write(&self) -> Option<SystemTime> {
        std::fs::metadata(self.job.paths().status()).ok()?.modified().ok()
    }
}

async fn next_order(link: &mut Option<Link>) -> Option<Order> {
    match link {
        Some(link) => link.order().await,
        None => std::future::pending().await,
    }
}

fn describe(how: Ended) -> String {
    match how {
        Ended::Exit(code) => format!("exit code {code}"),
        Ended::Signal(signal) => format!("signal {signal}"),
        Ended::MachineOutOfMemory
        // Pods end in these ways; a supervisor has none.
        | Ended::Preempted
        | Ended::Evicted
        | Ended::OutOfMemory
        | Ended::Deleted
        | Ended::NodeLost => how.to_string(),
    }
}

#[cfg(test)]
mod tests;
