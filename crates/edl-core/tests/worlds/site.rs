// SPDX-License-Identifier: Apache-2.0
//! The site: processes, the platform that starts and ends them, and the run of a job.

use std::collections::BTreeMap;
use std::time::Duration;

use edl_core::id::WorldId;
use edl_core::job::End;
use edl_core::platform::{Ended, InstanceId, Order, Report, Role};
use edl_core::time::Time;

use crate::disk::Disk;
use crate::history::{History, State};
use crate::kernel::{Action, Kernel, Pid, SITE, millis};
use crate::master::Master;
use crate::message::Timer;
use crate::scenario::Scenario;
use crate::worker::Worker;

/// A job may take so long after its last bad luck, whatever happened to it.
const TIME_LIMIT: Duration = Duration::from_secs(60);
/// Masters that may die in the midst of their effects.
const MAX_DEATHS: u32 = 15;

/// Who overwrites its memory in which world, and who else is in that.
pub(crate) type Regions = BTreeMap<Pid, (WorldId, Vec<Pid>)>;

pub(crate) struct Site {
    pub(crate) kernel: Kernel,
    pub(crate) disk: Disk,
    pub(crate) scenario: Scenario,
    history: History,
    regions: Regions,
    pub(crate) processes: BTreeMap<Pid, Slot>,
    /// What the platform believes to run.
    pub(crate) instances: BTreeMap<InstanceId, Pid>,
    pub(crate) master: Option<Pid>,
    /// Whose last orders are still obeyed.
    last_master: Option<Pid>,
    reports_until: Time,
    orders_until: Time,
    next_pid: Pid,
    pub(crate) n_faults_left: u64,
    n_deaths_left: u32,
    /// Everything that goes wrong is over by then.
    pub(crate) calm_at: Time,
    ended: Option<(End, Option<State>)>,
}

pub(crate) struct Slot {
    pub(crate) process: Process,
    pub(crate) is_frozen: bool,
    deferred: Vec<Action>,
}

pub(crate) enum Process {
    Master(Box<Master>),
    Worker(Box<Worker>),
}

/// What a process can touch while it acts.
pub(crate) struct Context<'a> {
    pub(crate) pid: Pid,
    pub(crate) kernel: &'a mut Kernel,
    pub(crate) disk: &'a mut Disk,
    pub(crate) scenario: &'a Scenario,
    pub(crate) history: &'a History,
    pub(crate) regions: &'a mut Regions,
    orders_until: &'a mut Time,
    n_deaths_left: &'a mut u32,
    /// Set by a process that ends itself.
    pub(crate) exit: Option<Ended>,
}

/// How a simulated job went.
#[derive(Debug, PartialEq)]
pub(crate) struct Outcome {
    pub(crate) trace: u64,
    pub(crate) time: Duration,
    pub(crate) n_actions: u64,
    pub(crate) counts: BTreeMap<&'static str, u64>,
}

impl Context<'_> {
    pub(crate) fn after(&mut self, low_ms: u64, high_ms: u64, timer: Timer) {
        let delay = self.kernel.between(low_ms, high_ms);
        self.kernel.schedule(self.pid, delay, timer);
    }

    pub(crate) fn heartbeat_later(&mut self) {
        let every = Duration::from_secs_f64(self.scenario.spec.heartbeat_timeout_secs / 5.0);
        self.kernel.schedule(self.pid, every, Timer::Heartbeat);
    }

    /// An order on its way to the platform, after those before it.
    pub(crate) fn order(&mut self, order: Order) {
        let delay = self.kernel.between(0, 5);
        *self.orders_until = (*self.orders_until).max(self.kernel.now + delay);
        let master = self.pid;
        self.kernel.schedule_at(SITE, *self.orders_until, Timer::Obey { master, order });
    }

    pub(crate) fn may_die(&mut self) -> bool {
        let may = *self.n_deaths_left > 0;
        *self.n_deaths_left -= u32::from(may);
        may
    }
}

impl Site {
    pub(crate) fn new(scenario: Scenario) -> Self {
        Self {
            kernel: Kernel::new(scenario.seed),
            disk: Disk::default(),
            history: History::new(&scenario.spec, scenario.n_records),
            regions: Regions::new(),
            processes: BTreeMap::new(),
            instances: BTreeMap::new(),
            master: None,
            last_master: None,
            reports_until: Time::ZERO,
            orders_until: Time::ZERO,
            next_pid: SITE + 1,
            n_faults_left: scenario.n_faults,
            n_deaths_left: MAX_DEATHS,
            calm_at: Time::ZERO,
            ended: None,
            scenario,
        }
    }

    /// Runs the job to its end and proves that it was trained exactly once.
    pub(crate) fn run(&mut self) -> Outcome {
        self.kernel.schedule(SITE, millis(0), Timer::StartMaster);
        self.kernel.schedule(SITE, millis(self.scenario.fault_every_ms), Timer::Fault);
        let mut n_actions = 0;
        while self.ended.is_none() {
            let (pid, action) = self.kernel.next().expect("somebody always has something to do");
            n_actions += 1;
            self.dispatch(pid, action);
            let trained = millis(self.scenario.step_ms * 2) * 130;
            let limit = self.calm_at + TIME_LIMIT + trained;
            assert!(
                self.kernel.now < limit,
                "not over after {:?}: {}",
                self.kernel.now,
                self.state()
            );
        }
        let (end, exported) = self.ended.take().expect("it ended");
        self.check_end(&end, exported);
        let time = self.kernel.now.since(Time::ZERO);
        Outcome { trace: self.kernel.trace(), time, n_actions, counts: self.kernel.counts.clone() }
    }

    fn check_end(&mut self, end: &End, exported: Option<State>) {
        if let (Some(step), End::Failed(why)) = (self.scenario.untrainable, end) {
            let n_batches = u64::from(self.scenario.spec.plan(self.scenario.n_records).n_batches());
            let batch = format!("batch {}/{} ", step / n_batches, step % n_batches);
            assert!(why.contains(&batch) && why.contains(" times, most recently on"), "{why}");
            return self.kernel.count("named failures");
        }
        assert_eq!(*end, End::Succeeded);
        let exported = exported.expect("a job that succeeds exports its model");
        let is_early = self.scenario.spec.early_stop_patience > 0;
        if !is_early || self.scenario.untrainable.is_some_and(|step| exported.step > step) {
            assert_eq!(exported.step, self.history.n_steps());
            assert_eq!(self.scenario.untrainable, None, "nobody can train it");
        }
        let expected = self.history.state(exported.step);
        assert_eq!(exported, expected, "every lane of every step was trained once, in order");
    }

    /// What the master thinks, for a job that stands still.
    pub(crate) fn state(&self) -> String {
        let slot = self.master.and_then(|pid| self.processes.get(&pid));
        match slot.map(|slot| &slot.process) {
            Some(Process::Master(master)) => format!(
                "{}, {} steps done, {:#?}",
                master.job.state(),
                master.job.ledger().n_done(),
                master.job.worlds(),
            ),
            _ => "no master".into(),
        }
    }

    fn dispatch(&mut self, pid: Pid, action: Action) {
        if let Action::Deliver { conn, .. } = &action
            && !self.kernel.arrives(*conn)
        {
            return;
        }
        if pid == SITE {
            let Action::Timer(timer) = action else { return };
            return self.on_timer(timer);
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
        self.act(pid, |process, context| process.take(context, action));
    }

    /// Lets a process act, and ends it if it wants to.
    pub(crate) fn act(&mut self, pid: Pid, action: impl FnOnce(&mut Process, &mut Context<'_>)) {
        let Some(slot) = self.processes.get_mut(&pid) else { return };
        let mut context = Context {
            pid,
            kernel: &mut self.kernel,
            disk: &mut self.disk,
            scenario: &self.scenario,
            history: &self.history,
            regions: &mut self.regions,
            orders_until: &mut self.orders_until,
            n_deaths_left: &mut self.n_deaths_left,
            exit: None,
        };
        action(&mut slot.process, &mut context);
        if let Process::Master(master) = &slot.process
            && let Some(end) = &master.ended
        {
            master.check_best(&context);
            self.ended = Some((end.clone(), master.exported));
        }
        if let Some(how) = context.exit {
            self.die(pid, how);
        }
    }

    fn on_timer(&mut self, timer: Timer) {
        match timer {
            Timer::StartMaster => {
                if self.master.is_none() {
                    self.start_master();
                }
            }
            Timer::Obey { master, order } => {
                if self.last_master == Some(master) {
                    self.obey(order);
                }
            }
            Timer::Launched { instance, pid } => self.launched(instance, pid),
            Timer::Kill { pid } => self.kill(pid),
            Timer::Thaw { pid } => self.thaw(pid),
            Timer::Fault => self.fault(),
            Timer::DiskFree => self.disk.is_full = false,
            other => panic!("the site never set {other:?}"),
        }
    }

    fn start_master(&mut self) {
        let pid = self.take_pid();
        let mut context = Context {
            pid,
            kernel: &mut self.kernel,
            disk: &mut self.disk,
            scenario: &self.scenario,
            history: &self.history,
            regions: &mut self.regions,
            orders_until: &mut self.orders_until,
            n_deaths_left: &mut self.n_deaths_left,
            exit: None,
        };
        let master = Master::start(&mut context);
        self.insert(pid, Process::Master(Box::new(master)));
        (self.master, self.last_master) = (Some(pid), Some(pid));
        let running = self.instances.iter().map(|(instance, pid)| (*instance, *pid)).collect();
        self.act(pid, |process, context| {
            let Process::Master(master) = process else { return };
            master.running(context, Report::Running(running));
        });
    }

    fn take_pid(&mut self) -> Pid {
        self.next_pid += 1;
        self.next_pid - 1
    }

    fn insert(&mut self, pid: Pid, process: Process) {
        self.processes.insert(pid, Slot { process, is_frozen: false, deferred: Vec::new() });
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
                self.kernel.schedule(SITE, delay, Timer::Launched { instance, pid });
            }
            Order::Harm { .. } => panic!("nobody asks for harm here"),
            Order::Stop { instance, grace_ms } | Order::Dismiss { instance, grace_ms } => {
                let Some(pid) = self.instances.get(&instance).copied() else { return };
                let after = match grace_ms {
                    0 => self.kernel.between(0, 5),
                    grace_ms => {
                        self.kernel.schedule(pid, millis(0), Timer::Terminate);
                        millis(grace_ms)
                    }
                };
                self.kernel.schedule(SITE, after, Timer::Kill { pid });
            }
        }
    }

    fn launched(&mut self, instance: InstanceId, pid: Pid) {
        if self.instances.get(&instance) != Some(&pid) {
            return; // It was ended before it began.
        }
        assert_eq!(instance.role, Role::Worker, "nothing else is started");
        let mut context = Context {
            pid,
            kernel: &mut self.kernel,
            disk: &mut self.disk,
            scenario: &self.scenario,
            history: &self.history,
            regions: &mut self.regions,
            orders_until: &mut self.orders_until,
            n_deaths_left: &mut self.n_deaths_left,
            exit: None,
        };
        let worker = Worker::start(instance.id, &mut context);
        self.insert(pid, Process::Worker(Box::new(worker)));
        self.report(Report::Started { instance, pid });
    }

    /// Ends a process for good. A frozen worker may be a zombie instead: ended as far as anybody
    /// knows, but not gone.
    pub(crate) fn kill(&mut self, pid: Pid) {
        let is_frozen = self.processes.get(&pid).is_some_and(|slot| slot.is_frozen);
        let known = self.instances.iter().find(|(_, running)| **running == pid);
        let known = known.map(|(instance, _)| *instance);
        if let Some(instance) = known
            && is_frozen
            && self.kernel.chance(500)
        {
            self.kernel.count("zombies");
            self.instances.remove(&instance);
            self.report(Report::Ended { instance, pid, how: Ended::Signal(9) });
            self.kernel.schedule(SITE, Duration::from_secs(8), Timer::Kill { pid });
            return;
        }
        self.die(pid, Ended::Signal(9));
    }

    pub(crate) fn die(&mut self, pid: Pid, how: Ended) {
        self.processes.remove(&pid);
        self.kernel.hang_up_all(pid);
        if self.master == Some(pid) {
            self.master = None;
            let at = self.orders_until.max(self.kernel.now) + self.kernel.between(20, 300);
            self.kernel.schedule_at(SITE, at, Timer::StartMaster);
            return;
        }
        let known = self.instances.iter().find(|(_, running)| **running == pid);
        if let Some(instance) = known.map(|(instance, _)| *instance) {
            self.instances.remove(&instance);
            self.report(Report::Ended { instance, pid, how });
        }
    }

    /// Reports reach a master in order; one that is dead misses nothing, because the next one is
    /// told what runs.
    fn report(&mut self, report: Report) {
        let Some(master) = self.master else { return };
        let delay = self.kernel.between(0, 40);
        self.reports_until = self.reports_until.max(self.kernel.now + delay);
        self.kernel.schedule_at(master, self.reports_until, Timer::Report(report));
    }

    /// Stops a process as SIGSTOP does: it keeps its memory and its connections.
    pub(crate) fn freeze(&mut self, pid: Pid, time: Duration) {
        if let Some(slot) = self.processes.get_mut(&pid).filter(|slot| !slot.is_frozen) {
            slot.is_frozen = true;
            self.kernel.schedule(SITE, time, Timer::Thaw { pid });
        }
    }

    fn thaw(&mut self, pid: Pid) {
        let Some(slot) = self.processes.get_mut(&pid) else { return };
        slot.is_frozen = false;
        for action in std::mem::take(&mut slot.deferred) {
            // What waited for it arrived while it slept, whatever became of the connection.
            self.act(pid, |process, context| process.take(context, action));
        }
    }

    /// The step that the job ends with.
    pub(crate) fn last_step(&self) -> u64 {
        self.history.n_steps()
    }

    /// A network partition around the master: another one is started while it is frozen.
    pub(crate) fn depose_master(&mut self, time: Duration) {
        let Some(old) = self.master.take() else { return };
        self.last_master = None;
        self.freeze(old, time);
        self.kernel.hang_up_all(old);
        self.kernel.schedule(SITE, Duration::from_secs(20), Timer::Kill { pid: old });
        let delay = self.kernel.between(20, 300);
        self.kernel.schedule(SITE, delay, Timer::StartMaster);
    }
}

impl Process {
    fn take(&mut self, context: &mut Context<'_>, action: Action) {
        match (self, action) {
            (Self::Master(master), Action::Deliver { conn, message, .. }) => {
                master.on_message(context, conn, message);
            }
            (Self::Master(master), Action::Broken { conn }) => master.on_broken(context, conn),
            (Self::Master(master), Action::Timer(timer)) => master.on_timer(context, timer),
            (Self::Worker(worker), Action::Deliver { conn, from, message }) => {
                worker.on_message(context, conn, from, message);
            }
            (Self::Worker(worker), Action::Broken { conn }) => worker.on_broken(context, conn),
            (Self::Worker(worker), Action::Timer(timer)) => worker.on_timer(context, timer),
        }
    }
}
