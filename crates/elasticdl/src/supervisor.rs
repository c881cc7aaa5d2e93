// SPDX-License-Identifier: Apache-2.0
//! Runs a job's processes on one machine, as children or as tasks of this process: starts the
//! master, does what the master orders, starts it again when it dies, and ends everything in order.
//!
//! Nothing is decided here about the job itself; the master decides who shall run.

use std::time::Duration;

use anyhow::Context as _;
use edl_core::job::OWN_LOOP_GRACE;
use edl_core::platform::{Ended, InstanceId, Order, Report, Role};
use edl_core::spec::JobSpec;
use edl_core::supervisor::{End, Next, Relaunch};
use edl_core::time::Time;
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior};

use crate::control;
use crate::exit::Exit;
use crate::jobs::{Hold, Job};
use crate::ui::Ui;
use children::{Children, MASTER, Programs, Reaped};
use link::Link;
use watch::Watch;

mod children;
mod link;
mod slow;
mod tasks;
mod watch;

/// How often the display, the graces and the master are looked at.
const TICK: Duration = Duration::from_millis(100);
/// What processes get to leave by themselves after the job's end.
const END_GRACE: Duration = Duration::from_secs(3);
/// After Ctrl-C everything is gone within two seconds: the master first, then the others.
const MASTER_GRACE: Duration = Duration::from_millis(1000);
const STOP_GRACE: Duration = Duration::from_millis(1600);

/// One job under supervision.
struct Supervisor<'a> {
    job: &'a Job,
    spec: JobSpec,
    resume: bool,
    port: u16,
    children: Children,
    link: Option<Link>,
    phase: Phase,
    started: Instant,
    relaunch: Relaunch,
    watch: Watch,
    probe: JoinSet<bool>,
    ui: &'a mut Ui,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Phase {
    /// The master runs.
    Working,
    /// The master died; the next one starts then.
    Waiting { until: Instant },
    /// Everything leaves; after `kill_at` by force.
    Ending { exit: Exit, kill_at: Instant },
}

/// All that can happen to a supervisor.
enum Event {
    Signal,
    Order(Option<Order>),
    Ended(Reaped),
    Probed(bool),
    Tick,
}

/// Runs the job to its end, and says how it ended. `hold` is the claim on the job.
pub(crate) async fn run(job: &Job, hold: Hold, resume: bool, ui: &mut Ui) -> anyhow::Result<Exit> {
    let _held_to_the_end = hold;
    job.write_supervisor()?;
    let spec = job.spec()?;
    let programs = Programs::of(&spec);
    if programs.is_none() {
        // The one worker's log contains the master's lines, too.
        let worker = InstanceId { role: Role::Worker, id: 0 };
        crate::telemetry::start_in(spec.log_level, &job.paths().log(worker))?;
    }
    let now = Instant::now();
    let mut supervisor = Supervisor {
        job,
        children: Children::new(job.clone(), programs),
        watch: Watch::new(patience(&spec), None, now),
        port: spec.port,
        spec,
        resume,
        link: None,
        phase: Phase::Waiting { until: now },
        started: now,
        relaunch: Relaunch::default(),
        probe: JoinSet::new(),
        ui,
    };
    supervisor.run().await
}

fn patience(spec: &JobSpec) -> Duration {
    Duration::from_secs_f64(spec.heartbeat_timeout_secs.clamp(3.0, 3600.0))
}

impl Supervisor<'_> {
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
                reaped = self.children.ended() => Event::Ended(reaped),
                order = next_order(&mut self.link) => Event::Order(order),
                Some(answered) = self.probe.join_next() => Event::Probed(answered.unwrap_or(false)),
                _ = tick.tick() => Event::Tick,
            };
            self.handle(event, Instant::now())?;
            if let Phase::Ending { exit, .. } = self.phase
                && self.children.is_empty()
            {
                self.ui.tick();
                return Ok(exit);
            }
        }
    }

    fn handle(&mut self, event: Event, now: Instant) -> anyhow::Result<()> {
        match event {
            Event::Signal => self.interrupted(now),
            Event::Order(Some(order)) => self.obey(order, now),
            // The master's end itself comes by its reaper.
            Event::Order(None) => self.link = None,
            Event::Ended(reaped) if reaped.instance == MASTER => self.master_ended(reaped.how, now),
            Event::Ended(Reaped { instance, pid, how }) => {
                self.report(Report::Ended { instance, pid, how });
            }
            Event::Probed(true) => self.watch.answered(now),
            Event::Probed(false) => {
                self.ui.say("master not responding; killing it");
                self.children.kill(MASTER);
            }
            Event::Tick => self.tick(now)?,
        }
        Ok(())
    }

    fn tick(&mut self, now: Instant) -> anyhow::Result<()> {
        self.ui.tick();
        self.children.kill_overdue(now);
        match self.phase {
            Phase::Working => self.look_after_master(now),
            Phase::Waiting { until } if until <= now => self.start_master(now)?,
            Phase::Waiting { .. } => {}
            Phase::Ending { kill_at, .. } if kill_at <= now => self.children.kill_all(),
            Phase::Ending { .. } => {}
        }
        Ok(())
    }

    fn start_master(&mut self, now: Instant) -> anyhow::Result<()> {
        let launched = self.children.launch_master(self.port, self.resume);
        let link = launched.context("cannot start the master")?;
        link.report(Report::Running(self.children.list()));
        self.link = Some(link);
        self.watch = Watch::new(patience(&self.spec), self.last_write(), now);
        self.phase = Phase::Working;
        // Only the first start of a resumed job forgets what ended it before.
        self.resume = false;
        Ok(())
    }

    fn obey(&mut self, order: Order, now: Instant) {
        match order {
            Order::Launch { .. } if matches!(self.phase, Phase::Ending { .. }) => {}
            Order::Launch { instance, .. } => {
                let report = match self.children.launch(instance) {
                    Ok(pid) => Report::Started { instance, pid },
                    Err(error) => Report::NotStarted { instance, error: error.to_string() },
                };
                self.report(report);
            }
            Order::Stop { instance, grace_ms } | Order::Dismiss { instance, grace_ms } => {
                self.children.terminate(instance, Duration::from_millis(grace_ms), now);
            }
            Order::Harm { instance, harm } => self.children.harm(instance, harm),
        }
    }

    fn report(&mut self, report: Report) {
        if self.link.as_ref().is_some_and(|link| !link.report(report)) {
            self.ui.say("master unresponsive; killing it");
            self.children.kill(MASTER);
        }
    }

    fn master_ended(&mut self, how: Ended, now: Instant) {
        self.link = None;
        // The next one is to be found where this one was.
        self.port = self.job.fresh_master_port().unwrap_or(self.port);
        // An answer about a master that is gone says nothing about the next.
        self.probe = JoinSet::new();
        if let Phase::Ending { kill_at, .. } = self.phase {
            self.children.terminate_all(kill_at.saturating_duration_since(now), now);
            return;
        }
        match self.relaunch.master_ended(how, Time::since_origin(now - self.started)) {
            Next::Over(End::Succeeded) => self.end(Exit::Ok, now),
            Next::Over(End::Failed) => self.end(Exit::Failed, now),
            Next::Over(End::Stopped) => self.end(Exit::Stopped, now),
            Next::After(wait) => {
                self.ui.say(&format!("the master died ({}); restarting it", words(how)));
                self.phase = Phase::Waiting { until: now + wait };
            }
            Next::GiveUp => {
                let log = self.job.paths().log(MASTER);
                let log = log.display();
                self.ui.say(&format!("the master died too often; see the log: {log}"));
                self.end(Exit::Failed, now);
            }
        }
    }

    fn end(&mut self, exit: Exit, now: Instant) {
        let has_more = self.spec.is_own_loop() && exit == Exit::Ok;
        let grace = if has_more { OWN_LOOP_GRACE } else { END_GRACE };
        self.phase = Phase::Ending { exit, kill_at: now + grace };
        self.children.terminate_all(grace, now);
    }

    fn interrupted(&mut self, now: Instant) {
        if let Phase::Ending { exit: Exit::Interrupted, .. } = self.phase {
            self.children.kill_all();
            return;
        }
        self.ui.say("stopping… press Ctrl-C again to force quit");
        self.phase = Phase::Ending { exit: Exit::Interrupted, kill_at: now + STOP_GRACE };
        if self.children.pid(MASTER).is_some() {
            // It stops the others in order; what is left follows when it is gone.
            self.children.terminate(MASTER, MASTER_GRACE, now);
        } else {
            self.children.terminate_all(STOP_GRACE, now);
        }
    }

    fn look_after_master(&mut self, now: Instant) {
        let written = self.last_write();
        if self.watch.is_silent(written, now) && self.probe.is_empty() {
            let job = self.job.clone();
            self.probe.spawn(async move { control::status(&job).await.is_ok() });
        }
    }

    fn last_write(&self) -> Option<std::time::SystemTime> {
        std::fs::metadata(self.job.paths().status()).ok()?.modified().ok()
    }
}

async fn next_order(link: &mut Option<Link>) -> Option<Order> {
    match link {
        Some(link) => link.order().await,
        None => std::future::pending().await,
    }
}

fn words(how: Ended) -> String {
    match how {
        Ended::Exit(code) => format!("exit code {code}"),
        Ended::Signal(signal) => format!("signal {signal}"),
        // Of pods, which nobody here supervises.
        Ended::Preempted
        | Ended::Evicted
        | Ended::OutOfMemory
        | Ended::Deleted
        | Ended::NodeLost => how.to_string(),
    }
}
