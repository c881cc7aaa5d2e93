// SPDX-License-Identifier: Apache-2.0
//! The site: processes, the platform and supervisor that start and stop them, and the run of a
//! job to its end.

use std::collections::BTreeMap;
use std::time::Duration;

use edl_core::exit::Exit;
use edl_core::job::{End, Event};
use edl_core::platform::{self, Ended, InstanceId, Order, Report, Role};
use edl_core::supervisor::{Next, Relaunch};
use edl_core::time::Time;

use crate::disk::Disk;
use crate::judge::Judge;
use crate::kernel::{Action, Kernel, Pid, SITE, millis};
use crate::master::Master;
use crate::message::{MasterTimer, SiteTimer, Timer};
use crate::model::Model;
use crate::process::{Context, Process};
use crate::scenario::Scenario;
use crate::server::Server;
use crate::worker::Worker;

/// How long a job may take after its last fault, in addition to what it takes without faults.
const TIME_LIMIT: Duration = Duration::from_secs(150);
/// More than any job takes.
const MAX_ACTIONS: u64 = 5_000_000;
/// Masters that may die in the middle of their effects.
const MAX_DEATHS: u32 = 15;
/// How long a process keeps running next to its replacement.
const ZOMBIE_TIME: Duration = Duration::from_secs(8);

pub struct Site {
    pub(crate) kernel: Kernel,
    pub(crate) disk: Disk,
    pub scenario: Scenario,
    pub(crate) judge: Judge,
    pub(crate) model: Model,
    pub(crate) processes: BTreeMap<Pid, Slot>,
    /// What the platform believes to run.
    pub(crate) instances: BTreeMap<InstanceId, Pid>,
    pub(crate) master: Option<Pid>,
    /// The master whose last orders are still obeyed.
    last_master: Option<Pid>,
    relaunch: Relaunch,
    reports_until: Time,
    orders_until: Time,
    next_pid: Pid,
    pub(crate) n_faults_left: u64,
    n_deaths_left: u32,
    /// All faults are over by then.
    pub(crate) calm_at: Time,
    pub(crate) ended: Option<End>,
}

pub(crate) struct Slot {
    pub(crate) process: Process,
    pub(crate) is_frozen: bool,
    deferred: Vec<Action>,
}

/// How a simulated job went.
#[derive(Debug, PartialEq)]
pub struct Outcome {
    pub trace: u64,
    pub time: Duration,
    pub n_actions: u64,
    pub counts: BTreeMap<&'static str, u64>,
}

impl Site {
    #[must_use]
    pub fn new(scenario: Scenario) -> Self {
        Self {
            kernel: Kernel::new(scenario.seed, scenario.slow_messages),
            disk: Disk::default(),
            judge: Judge::default(),
            model: Model::new(&scenario),
            processes: BTreeMap::new(),
            instances: BTreeMap::new(),
            master: None,
            last_master: None,
            relaunch: Relaunch::default(),
            reports_until: Time::ZERO,
            orders_until: Time::ZERO,
            next_pid: SITE + 1,
            n_faults_left: scenario.n_faults + scenario.n_stops,
            n_deaths_left: MAX_DEATHS,
            calm_at: Time::ZERO,
            ended: None,
            scenario,
        }
    }

    /// Keeps every line of the log, with details.
    pub fn log_all(&mut self) {
        self.kernel.log_lines = usize::MAX;
    }

    pub fn log(&self) -> impl Iterator<Item = &str> {
        self.kernel.log.iter().map(String::as_str)
    }

    /// Runs the job to its end and checks that everything was trained exactly once.
    ///
    /// # Panics
    /// If it was not, if the job does not end, or if a machine breaks its invariants.
    pub fn run(&mut self) -> Outcome {
        self.kernel.schedule(SITE, Duration::ZERO, Timer::Site(SiteTimer::StartMaster));
        let first_fault = millis(self.scenario.fault_every_ms);
        self.kernel.schedule(SITE, first_fault, Timer::Site(SiteTimer::Fault));
        let time_limit = TIME_LIMIT + 3 * self.scenario.undisturbed_time();
        let mut n_actions = 0;
        while self.ended.is_none() {
            let (pid, action) = self.kernel.next().expect("a live job always has a next action");
            n_actions += 1;
            self.dispatch(pid, action);
            assert!(n_actions < MAX_ACTIONS, "no progress: {}", self.state());
            let is_in_time = self.kernel.now < self.calm_at + time_limit;
            assert!(is_in_time, "not over after {:?}: {}", self.kernel.now, self.state());
        }
        let end = self.ended.take().expect("it ended");
        self.check_end(&end);
        let time = self.kernel.now.since(Time::ZERO);
        let (trace, counts) = (self.kernel.trace_of_all(), self.kernel.counts.clone());
        Outcome { trace, time, n_actions, counts }
    }

    /// What the master and its job are doing, for a job that does not end.
    #[must_use]
    pub fn state(&self) -> String {
        let slot = self.master.and_then(|pid| self.processes.get(&pid));
        match slot.map(|slot| &slot.process) {
            Some(Process::Master(master)) => master.state(),
            Some(Process::Server(_) | Process::Worker(_)) | None => "no master".into(),
        }
    }

    pub(crate) fn dispatch(&mut self, pid: Pid, action: Action) {
        match &action {
            Action::Deliver { conn, .. }
                if !self.kernel.network.arrives(*conn, self.kernel.now) =>
            {
                return;
            }
            Action::Broken { conn } => self.kernel.network.noticed(*conn),
            Action::Deliver { .. } | Action::Timer(_) => {}
        }
        if pid == SITE {
            if let Action::Timer(Timer::Site(timer)) = action {
                self.on_timer(timer);
            }
            return;
        }
        let Some(slot) = self.processes.get_mut(&pid) else {
            if let Action::Deliver { conn, .. } = action {
                self.kernel.hang_up(conn);
            }
            return;
        };
        if slot.is_frozen {
            return slot.deferred.push(action);
        }
        self.act(pid, |process, context| process.act(context, action));
    }

    /// Lets a process act, and removes it if it exits.
    pub(crate) fn act<T>(
        &mut self,
        pid: Pid,
        act: impl FnOnce(&mut Process, &mut Context<'_>) -> T,
    ) {
        let (processes, mut context) = self.split(pid);
        let Some(slot) = processes.get_mut(&pid) else { return };
        act(&mut slot.process, &mut context);
        let exit = context.exit;
        if let Some(how) = exit {
            self.exited(pid, how);
        }
    }

    /// Makes a process and lets it start.
    fn start(&mut self, make: impl FnOnce(&mut Context<'_>) -> Process) -> Pid {
        let pid = self.take_pid();
        self.start_as(pid, make);
        pid
    }

    /// Starts a server that the platform does not know.
    pub(crate) fn start_server(&mut self, id: u32) -> Pid {
        self.start(|context| Process::Server(Box::new(Server::start(id, context))))
    }

    fn start_as(&mut self, pid: Pid, make: impl FnOnce(&mut Context<'_>) -> Process) {
        let (processes, mut context) = self.split(pid);
        let process = make(&mut context);
        processes.insert(pid, Slot { process, is_frozen: false, deferred: Vec::new() });
    }

    /// The processes, and what the one with this number can touch while it acts.
    fn split(&mut self, pid: Pid) -> (&mut BTreeMap<Pid, Slot>, Context<'_>) {
        let context = Context {
            pid,
            kernel: &mut self.kernel,
            disk: &mut self.disk,
            judge: &mut self.judge,
            scenario: &self.scenario,
            model: &self.model,
            orders_until: &mut self.orders_until,
            n_deaths_left: &mut self.n_deaths_left,
            exit: None,
        };
        (&mut self.processes, context)
    }

    fn take_pid(&mut self) -> Pid {
        self.next_pid += 1;
        self.next_pid - 1
    }

    fn on_timer(&mut self, timer: SiteTimer) {
        match timer {
            SiteTimer::StartMaster => {
                if self.master.is_none() {
                    self.start_master();
                }
            }
            SiteTimer::Obey { master, order } => {
                if self.last_master == Some(master) {
                    self.obey(order);
                }
            }
            SiteTimer::Launched { instance, pid } => self.launched(instance, pid),
            SiteTimer::Kill { pid } => self.kill(pid),
            SiteTimer::Thaw { pid } => self.thaw(pid),
            SiteTimer::DiskFree => self.disk.is_full = false,
            SiteTimer::Fault => self.fault(),
            SiteTimer::Freeze => self.freeze_meanwhile(),
            SiteTimer::Resume => self.resume(),
        }
    }

    fn start_master(&mut self) {
        let pid = self.start(|context| Process::Master(Box::new(Master::start(context))));
        (self.master, self.last_master) = (Some(pid), Some(pid));
        let process = |(instance, pid): (&InstanceId, &Pid)| platform::Process {
            instance: *instance,
            pid: *pid,
            age_ms: 0,
        };
        let running = self.instances.iter().map(process).collect();
        self.event(pid, Event::Platform(Report::Running(running)));
    }

    /// Gives an event to a master.
    pub(crate) fn event(&mut self, master: Pid, event: Event) {
        let timer = Timer::Master(Box::new(MasterTimer::Event(event)));
        self.dispatch(master, Action::Timer(timer));
    }

    fn obey(&mut self, order: Order) {
        match order {
            Order::Launch { instance, .. } => {
                assert!(!self.instances.contains_key(&instance), "{instance} is started twice");
                if self.scenario.crashes > 0 && self.kernel.chance(20) {
                    let error = "no process is left".into();
                    return self.report(Report::NotStarted { instance, error });
                }
                let pid = self.take_pid();
                self.instances.insert(instance, pid);
                let delay = self.kernel.between(5, 100);
                let launched = SiteTimer::Launched { instance, pid };
                self.kernel.schedule(SITE, delay, Timer::Site(launched));
            }
            Order::Dismiss { instance, grace_ms } => {
                let Some(pid) = self.instances.get(&instance).copied() else { return };
                let kill = Timer::Site(SiteTimer::Kill { pid });
                self.kernel.schedule(SITE, millis(grace_ms), kill);
            }
            Order::Stop { instance, grace_ms } => {
                let Some(pid) = self.instances.get(&instance).copied() else { return };
                let is_frozen = self.processes.get(&pid).is_some_and(|slot| slot.is_frozen);
                let after = match grace_ms {
                    // Some platforms need time for a process that does not answer.
                    0 if is_frozen && self.kernel.chance(500) => self.kernel.between(0, 4000),
                    0 => self.kernel.between(0, 5),
                    grace_ms => {
                        self.kernel.schedule(pid, Duration::ZERO, Timer::Terminate);
                        millis(grace_ms)
                    }
                };
                self.kernel.schedule(SITE, after, Timer::Site(SiteTimer::Kill { pid }));
            }
            Order::Chaos { .. } => panic!("no chaos action was requested"),
        }
    }

    fn launched(&mut self, instance: InstanceId, pid: Pid) {
        if self.instances.get(&instance) != Some(&pid) {
            return; // It was stopped before it started.
        }
        self.start_as(pid, |context| match instance.role {
            Role::Ps => Process::Server(Box::new(Server::start(instance.id, context))),
            Role::Worker => Process::Worker(Box::new(Worker::start(instance.id, context))),
            Role::Master => panic!("a master is never ordered"),
        });
        self.report(Report::Started { instance, pid });
    }

    /// Kills a process. A frozen one may continue next to its replacement: the platform believes
    /// that it is gone, as after the loss of a node.
    pub(crate) fn kill(&mut self, pid: Pid) {
        let is_frozen = self.processes.get(&pid).is_some_and(|slot| slot.is_frozen);
        if is_frozen && self.forget(pid, Ended::NodeLost, 500) {
            self.kernel.count("zombies");
            self.kernel.schedule(SITE, ZOMBIE_TIME, Timer::Site(SiteTimer::Kill { pid }));
            return;
        }
        self.exited(pid, Ended::Signal(9));
    }

    /// The platform loses sight of a process that it knows, with a chance per thousand.
    pub(crate) fn forget(&mut self, pid: Pid, how: Ended, per_thousand: u64) -> bool {
        let known = self.instances.iter().find(|(_, running)| **running == pid);
        let Some(instance) = known.map(|(instance, _)| *instance) else { return false };
        let forgets = self.kernel.chance(per_thousand);
        if forgets {
            self.instances.remove(&instance);
            self.report(Report::Ended { instance, pid, how });
        }
        forgets
    }

    pub(crate) fn exited(&mut self, pid: Pid, how: Ended) {
        let process = self.processes.remove(&pid).map(|slot| slot.process);
        self.judge.reading.remove(&pid);
        self.kernel.hang_up_all(pid);
        self.disk.crash(pid, &mut self.kernel);
        if how == Exit::Panicked.into() {
            self.calm_at = self.calm_at.max(self.kernel.now);
        }
        if self.master != Some(pid) {
            self.forget(pid, how, 1000);
            return;
        }
        self.master = None;
        if let Some(Process::Master(master)) = process
            && let Some(end) = master.ended
        {
            return self.job_ended(end);
        }
        let now = self.kernel.now;
        let wait = match self.relaunch.master_ended(how, now) {
            Next::After(wait) => wait,
            Next::GiveUp => return self.stop_all("given up by the supervisor"),
            Next::Over(end) => panic!("a master exited as {end:?} without an end"),
        };
        // Orders that it gave are obeyed before the next master asks what runs.
        let at = self.orders_until.max(now) + wait + self.kernel.between(20, 300);
        self.kernel.schedule_at(SITE, at, Timer::Site(SiteTimer::StartMaster));
    }

    fn job_ended(&mut self, end: End) {
        match end {
            End::Succeeded | End::Failed(_) => self.ended = Some(end),
            End::Stopped(reason) => {
                self.kernel.note(SITE, "stopped by the user", &reason);
                self.stop_all("stopped");
            }
        }
    }

    /// Everything exits, the supervisor too; the user resumes the job later.
    pub(crate) fn stop_all(&mut self, why: &'static str) {
        self.kernel.note(SITE, why, "");
        (self.master, self.last_master) = (None, None);
        self.instances.clear();
        self.judge.reading.clear();
        for pid in std::mem::take(&mut self.processes).into_keys() {
            self.kernel.hang_up_all(pid);
            self.disk.crash(pid, &mut self.kernel);
        }
        let pause = self.kernel.between(10, 500);
        self.calm_at = self.calm_at.max(self.kernel.now + pause);
        self.kernel.schedule(SITE, pause, Timer::Site(SiteTimer::Resume));
    }

    fn resume(&mut self) {
        if self.master.is_none() && self.processes.is_empty() {
            self.kernel.count("resumed by the user");
            self.relaunch = Relaunch::default();
            self.resize();
            self.disk.edit(|durable| (durable.workers_wanted, durable.end) = (None, None));
            self.start_master();
        }
    }

    /// Reports reach a master in order. A dead master misses nothing: the next one asks what runs.
    fn report(&mut self, report: Report) {
        let Some(master) = self.master else { return };
        let delay = self.kernel.between(0, 40);
        self.reports_until = self.reports_until.max(self.kernel.now + delay);
        let event = MasterTimer::Event(Event::Platform(report));
        self.kernel.schedule_at(master, self.reports_until, Timer::Master(Box::new(event)));
    }

    /// Stops a process as SIGSTOP does: it keeps its memory and its connections.
    pub(crate) fn freeze(&mut self, pid: Pid, time: Duration) {
        if let Some(slot) = self.processes.get_mut(&pid).filter(|slot| !slot.is_frozen) {
            slot.is_frozen = true;
            self.kernel.schedule(SITE, time, Timer::Site(SiteTimer::Thaw { pid }));
        }
    }

    pub(crate) fn thaw(&mut self, pid: Pid) {
        let Some(slot) = self.processes.get_mut(&pid) else { return };
        slot.is_frozen = false;
        for action in std::mem::take(&mut slot.deferred) {
            // It arrived while the process was frozen, whatever became of the connection.
            self.act(pid, |process, context| process.act(context, action));
        }
    }

    /// The master is disconnected and frozen, and another one is started meanwhile.
    pub(crate) fn depose_master(&mut self, time: Duration) {
        let Some(old) = self.master.take() else { return };
        self.last_master = None;
        self.freeze(old, time);
        self.kernel.hang_up_all(old);
        let kill = Timer::Site(SiteTimer::Kill { pid: old });
        self.kernel.schedule(SITE, Duration::from_secs(20), kill);
        let delay = self.kernel.between(20, 300);
        self.kernel.schedule(SITE, delay, Timer::Site(SiteTimer::StartMaster));
    }
}
