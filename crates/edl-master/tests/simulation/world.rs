// SPDX-License-Identifier: Apache-2.0
//! The simulated world: processes, the platform that starts and ends them, and the run of a job.

use std::collections::BTreeMap;
use std::time::Duration;

use edl_core::job::End;
use edl_core::platform::{Ended, InstanceId, Order, Report, Role};
use edl_core::time::Time;

use crate::counter::{Counter, Parts};
use crate::disk::Disk;
use crate::kernel::{Action, Kernel, Pid, WORLD, millis};
use crate::master::Master;
use crate::message::Timer;
use crate::process::{Context, Process};
use crate::scenario::Scenario;
use crate::server::Server;
use crate::worker::Worker;

/// No job of a scenario may take longer, whatever happens to it.
const TIME_LIMIT: Duration = Duration::from_secs(300);

pub(crate) struct World {
    pub(crate) kernel: Kernel,
    pub(crate) disk: Disk,
    pub(crate) scenario: Scenario,
    counter: Counter,
    pub(crate) processes: BTreeMap<Pid, Slot>,
    /// What the platform believes to run.
    pub(crate) instances: BTreeMap<InstanceId, Pid>,
    pub(crate) master: Option<Pid>,
    /// Whose last orders are still obeyed.
    last_master: Option<Pid>,
    reports_until: Time,
    next_pid: Pid,
    pub(crate) n_faults_left: u64,
    pub(crate) spoiled: Vec<String>,
    ended: Option<(End, Option<Parts>)>,
}

pub(crate) struct Slot {
    process: Process,
    pub(crate) is_frozen: bool,
    deferred: Vec<Action>,
}

/// How a simulated job went.
#[derive(Debug, PartialEq)]
pub(crate) struct Outcome {
    pub(crate) trace: u64,
    pub(crate) time: Duration,
    pub(crate) n_actions: u64,
    pub(crate) counts: BTreeMap<&'static str, u64>,
}

impl World {
    pub(crate) fn new(scenario: Scenario) -> Self {
        Self {
            kernel: Kernel::new(scenario.seed),
            disk: Disk::default(),
            counter: Counter::new(scenario.spec.clone(), scenario.n_records),
            processes: BTreeMap::new(),
            instances: BTreeMap::new(),
            master: None,
            last_master: None,
            reports_until: Time::ZERO,
            next_pid: WORLD + 1,
            n_faults_left: scenario.n_faults,
            spoiled: Vec::new(),
            ended: None,
            scenario,
        }
    }

    /// Runs the job to its end and proves that it was trained exactly once.
    pub(crate) fn run(&mut self) -> Outcome {
        self.kernel.schedule(WORLD, Duration::ZERO, Timer::StartMaster);
        self.kernel.schedule(WORLD, millis(self.scenario.fault_every_ms), Timer::Fault);
        let mut n_actions = 0;
        while self.ended.is_none() {
            let (pid, action) = self.kernel.next().expect("somebody always has something to do");
            n_actions += 1;
            self.dispatch(pid, action);
            let time = self.kernel.now.since(Time::ZERO);
            assert!(time < TIME_LIMIT, "the job is not over after {time:?}: {}", self.state());
        }
        let (end, exported) = self.ended.take().expect("it ended");
        assert_eq!(end, End::Succeeded);
        let exported = exported.expect("a job that succeeds exports its model");
        self.counter.expect_trained(&exported, self.scenario.spec.num_epochs);
        let time = self.kernel.now.since(Time::ZERO);
        Outcome { trace: self.kernel.trace(), time, n_actions, counts: self.kernel.counts.clone() }
    }

    /// What the master thinks, for a job that stands still.
    pub(crate) fn state(&self) -> String {
        let slot = self.master.and_then(|pid| self.processes.get(&pid));
        match slot.map(|slot| &slot.process) {
            Some(Process::Master(master)) => format!(
                "{}, {} batches done, servers {:?}",
                master.job.state(),
                master.job.ledger().n_done(),
                master.job.servers().phase()
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
        if pid == WORLD {
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
            slot.deferred.push(action);
            return;
        }
        self.act(pid, |process, context| match action {
            Action::Deliver { conn, message } => process.on_message(context, conn, message),
            Action::Broken { conn } => process.on_broken(context, conn),
            Action::Timer(timer) => process.on_timer(context, timer),
        });
    }

    /// Lets a process act, and follows what it did to itself.
    pub(crate) fn act(&mut self, pid: Pid, act: impl FnOnce(&mut Process, &mut Context<'_>)) {
        let Some(mut slot) = self.processes.remove(&pid) else { return };
        let mut context = Context {
            pid,
            kernel: &mut self.kernel,
            disk: &mut self.disk,
            scenario: &self.scenario,
            counter: &self.counter,
            exit: None,
        };
        act(&mut slot.process, &mut context);
        let exit = context.exit;
        if let Process::Master(master) = &mut slot.process
            && let Some(end) = master.ended.take()
        {
            self.ended = Some((end, master.exported.take()));
        }
        self.processes.insert(pid, slot);
        if let Some(how) = exit {
            self.die(pid, how);
        }
    }

    fn on_timer(&mut self, timer: Timer) {
        match timer {
            Timer::StartMaster => self.start_master(),
            Timer::Obey { master, order } => {
                let is_heard = self.master.or(self.last_master) == Some(master);
                if is_heard {
                    self.obey(order);
                }
            }
            Timer::Launched { instance, pid } => self.launched(instance, pid),
            Timer::Kill { pid } => self.kill(pid),
            Timer::Thaw { pid } => self.thaw(pid),
            Timer::Fault => self.fault(),
            Timer::DiskFree => self.disk.is_full = false,
            other => panic!("the world never set {other:?}"),
        }
    }

    fn start_master(&mut self) {
        let pid = self.take_pid();
        let master = Master::start(&mut Context {
            pid,
            kernel: &mut self.kernel,
            disk: &mut self.disk,
            scenario: &self.scenario,
            counter: &self.counter,
            exit: None,
        });
        self.insert(pid, Process::Master(Box::new(master)));
        (self.master, self.last_master) = (Some(pid), Some(pid));
        let running = self.instances.iter().map(|(instance, pid)| (*instance, *pid)).collect();
        self.act(pid, |process, context| {
            let Process::Master(master) = process else { return };
            master.running(context, Report::Running(running));
        });
    }

    fn take_pid(&mut self) -> Pid {
        let pid = self.next_pid;
        self.next_pid += 1;
        pid
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
                self.kernel.schedule(WORLD, delay, Timer::Launched { instance, pid });
            }
            Order::Harm { .. } => panic!("nobody asks for harm here"),
            Order::Stop { instance, grace_ms } | Order::Dismiss { instance, grace_ms } => {
                let Some(pid) = self.instances.get(&instance).copied() else { return };
                let is_frozen = self.processes.get(&pid).is_some_and(|slot| slot.is_frozen);
                let after = match grace_ms {
                    // Some platforms take their time with a process that does not answer.
                    0 if is_frozen && self.kernel.chance(500) => self.kernel.between(0, 4000),
                    0 => self.kernel.between(0, 5),
                    grace_ms => {
                        self.kernel.schedule(pid, Duration::ZERO, Timer::Terminate);
                        millis(grace_ms)
                    }
                };
                self.kernel.schedule(WORLD, after, Timer::Kill { pid });
            }
        }
    }

    fn launched(&mut self, instance: InstanceId, pid: Pid) {
        if self.instances.get(&instance) != Some(&pid) {
            return; // It was ended before it began.
        }
        let mut context = Context {
            pid,
            kernel: &mut self.kernel,
            disk: &mut self.disk,
            scenario: &self.scenario,
            counter: &self.counter,
            exit: None,
        };
        let process = match instance.role {
            Role::Ps => Process::Server(Box::new(Server::start(instance.id, &mut context))),
            Role::Worker => Process::Worker(Box::new(Worker::start(instance.id, &mut context))),
            Role::Master => panic!("masters start by themselves"),
        };
        self.insert(pid, process);
        self.report(Report::Started { instance, pid });
    }

    /// Ends a process for good. A frozen worker may be a zombie instead: ended as far as anybody
    /// knows, but not gone.
    pub(crate) fn kill(&mut self, pid: Pid) {
        let is_frozen = self.processes.get(&pid).is_some_and(|slot| slot.is_frozen);
        let known = self.instances.iter().find(|(_, running)| **running == pid);
        let known = known.map(|(instance, _)| *instance);
        if let Some(instance) = known
            && instance.role == Role::Worker
            && is_frozen
            && self.kernel.chance(500)
        {
            self.instances.remove(&instance);
            self.report(Report::Ended { instance, pid, how: Ended::Signal(9) });
            self.kernel.schedule(WORLD, Duration::from_secs(8), Timer::Kill { pid });
            return;
        }
        self.die(pid, Ended::Signal(9));
    }

    pub(crate) fn die(&mut self, pid: Pid, how: Ended) {
        let existed = self.processes.remove(&pid).is_some();
        self.kernel.hang_up_all(pid);
        if self.master == Some(pid) {
            self.master = None;
            let at = self.kernel.orders_until() + self.kernel.between(20, 300);
            self.kernel.schedule_at(WORLD, at, Timer::StartMaster);
            return;
        }
        let known = self.instances.iter().find(|(_, running)| **running == pid);
        if let Some(instance) = known.map(|(instance, _)| *instance) {
            self.instances.remove(&instance);
            self.report(Report::Ended { instance, pid, how });
        } else if existed {
            self.kernel.note(u64::from(pid));
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
            self.kernel.schedule(WORLD, time, Timer::Thaw { pid });
        }
    }

    fn thaw(&mut self, pid: Pid) {
        let Some(slot) = self.processes.get_mut(&pid) else { return };
        slot.is_frozen = false;
        for action in std::mem::take(&mut slot.deferred) {
            // What waited for it arrived while it slept, whatever became of the connection.
            if self.processes.contains_key(&pid) {
                self.act(pid, |process, context| match action {
                    Action::Deliver { conn, message } => process.on_message(context, conn, message),
                    Action::Broken { conn } => process.on_broken(context, conn),
                    Action::Timer(timer) => process.on_timer(context, timer),
                });
            }
        }
    }

    /// A network partition around the master: another one is started while it is frozen.
    pub(crate) fn depose_master(&mut self, time: Duration) {
        let Some(old) = self.master.take() else { return };
        self.last_master = None;
        self.freeze(old, time);
        self.kernel.hang_up_all(old);
        self.kernel.schedule(WORLD, Duration::from_secs(20), Timer::Kill { pid: old });
        let delay = self.kernel.between(20, 300);
        self.kernel.schedule(WORLD, delay, Timer::StartMaster);
    }
}
