// SPDX-License-Identifier: Apache-2.0
//! Scripted runs: a test decides what fails and when, and watches the machines meanwhile. What it
//! does not decide happens by chance, as in every simulated job.

mod sent;

pub use self::sent::{Sent, What};

use std::collections::BTreeMap;
use std::time::Duration;

use edl_core::id::{Generation, Term};
use edl_core::job::{Durable, Event, Job, JobState};
use edl_core::platform::{Ended, InstanceId, Order, Role};
use edl_core::spec::JobSpec;
use edl_core::time::Time;
use edl_core::world::World;
use edl_tensor::partition::Partition;

use crate::kernel::{Action, Pid, SITE};
use crate::message::{SiteTimer, Timer};
use crate::network::ConnId;
use crate::process::Process;
use crate::scenario::Scenario;
use crate::site::Site;

/// How long a script waits for anything.
const PATIENCE: Duration = Duration::from_secs(120);

/// Long enough to let something happen between two steps.
const STEP_MS: u64 = 40;

/// Short enough that a checkpoint is complete before the next one is due.
const WRITE_MS: u64 = 60;

/// Per thousand: most messages arrive at once.
const SLOW_MESSAGES: u64 = 20;

/// A simulated job under the control of a test.
pub struct Script {
    site: Site,
    names: BTreeMap<Pid, InstanceId>,
    rules: Vec<Rule>,
    held: Vec<Held>,
    next_hold: u32,
    delivered: Vec<Sent>,
}

/// What is held back, until it is released.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hold(u32);

struct Rule {
    hold: Hold,
    is_held: Box<dyn Fn(&Sent) -> bool>,
}

struct Held {
    hold: Hold,
    to: Pid,
    action: Action,
    sent: Sent,
}

/// The master dies in the middle of the effects of an event.
pub(crate) struct MasterDeath {
    pub(crate) on: Box<dyn Fn(&Event) -> bool>,
    pub(crate) n_effects: usize,
}

impl Script {
    /// A job without any fault but those of the script. The seed decides on all timings.
    #[must_use]
    pub fn new(seed: u64, spec: JobSpec, n_records: u64, n_validation_records: u64) -> Self {
        Self::with_nonfinite(seed, spec, (n_records, n_validation_records), None)
    }

    /// The same with a batch, counted over all epochs, whose loss is never finite.
    #[must_use]
    pub fn with_nonfinite(
        seed: u64,
        spec: JobSpec,
        (n_records, n_validation_records): (u64, u64),
        nonfinite: Option<u64>,
    ) -> Self {
        let scenario = Scenario {
            spec: JobSpec { seed, ..spec },
            n_records,
            n_validation_records,
            nonfinite,
            step_ms: STEP_MS,
            reduce_ms: 0,
            eval_ms: STEP_MS,
            write_ms: WRITE_MS,
            slow_messages: SLOW_MESSAGES,
            late_orders: 0,
            is_undisturbed: false,
            ..Scenario::new(seed).undisturbed()
        };
        let mut site = Site::new(scenario);
        site.kernel.schedule(SITE, Duration::ZERO, Timer::Site(SiteTimer::StartMaster));
        Self {
            site,
            names: BTreeMap::new(),
            rules: Vec::new(),
            held: Vec::new(),
            next_hold: 0,
            delivered: Vec::new(),
        }
    }

    // === time ===

    /// Runs the job until something is the case.
    ///
    /// # Panics
    /// If that does not happen.
    pub fn until(&mut self, what: &str, is_met: impl Fn(&Self) -> bool) {
        let deadline = self.site.kernel.now + PATIENCE;
        while !is_met(self) {
            assert!(self.site.ended.is_none(), "the job ended before: {what}");
            assert!(self.site.kernel.now < deadline, "never: {what}; {}", self.site.state());
            self.step();
        }
    }

    /// Lets time pass.
    pub fn pass(&mut self, time: Duration) {
        let end = self.site.kernel.now + time;
        self.until("time passes", |run| run.site.kernel.now >= end);
    }

    /// Ends all faults and runs the job to its end, where everything must be trained exactly once.
    ///
    /// # Panics
    /// If it is not.
    pub fn finish(mut self) {
        self.rules.clear();
        while !self.held.is_empty() {
            let held = self.held.remove(0);
            self.site.dispatch(held.to, held.action);
        }
        let pids: Vec<Pid> = self.site.processes.keys().copied().collect();
        pids.into_iter().for_each(|pid| self.thaw(pid));
        let deadline = self.site.kernel.now + PATIENCE;
        while self.site.ended.is_none() {
            assert!(self.site.kernel.now < deadline, "it never ends: {}", self.site.state());
            self.step();
        }
        let end = self.site.ended.take().expect("it ended");
        self.site.check_end(&end);
    }

    fn step(&mut self) {
        let (to, action) = self.site.kernel.next().expect("a live job always has a next action");
        self.names.extend(self.site.instances.iter().map(|(instance, pid)| (*pid, *instance)));
        self.names.extend(self.site.master.map(|pid| (pid, InstanceId::MASTER)));
        if let Some(sent) = self.sent(to, &action) {
            if let Some(hold) = self.hold_of(to, &action, &sent) {
                return self.held.push(Held { hold, to, action, sent });
            }
            if to == SITE || self.runs(to) {
                self.delivered.push(sent);
            }
        }
        self.site.dispatch(to, action);
    }

    // === faults ===

    /// Holds back what is sent from now on, or is already on its way, if it `is_held`; and what
    /// follows it on the same connection.
    pub fn hold(&mut self, is_held: impl Fn(&Sent) -> bool + 'static) -> Hold {
        let hold = Hold(self.next_hold);
        self.next_hold += 1;
        self.rules.push(Rule { hold, is_held: Box::new(is_held) });
        hold
    }

    /// Disconnects two processes from each other.
    pub fn disconnect(&mut self, a: InstanceId, b: InstanceId) -> Hold {
        let is_between = move |sent: &Sent| [[a, b], [b, a]].contains(&[sent.from, sent.to]);
        self.hold(move |sent| is_between(sent) && !matches!(sent.what, What::Order(_)))
    }

    /// Delivers what was held back. What was on a connection that broke meanwhile is lost.
    pub fn release(&mut self, hold: Hold) {
        self.rules.retain(|rule| rule.hold != hold);
        for held in self.held.extract_if(.., |held| held.hold == hold).collect::<Vec<_>>() {
            self.delivered.push(held.sent);
            self.site.dispatch(held.to, held.action);
        }
    }

    /// Loses what was held back for good.
    pub fn lose(&mut self, hold: Hold) {
        self.rules.retain(|rule| rule.hold != hold);
        self.held.retain(|held| held.hold != hold);
    }

    pub fn kill(&mut self, instance: InstanceId) {
        let pid = self.pid(instance);
        self.end(pid);
    }

    /// Ends a process, even one that its platform has forgotten.
    pub fn end(&mut self, pid: u32) {
        self.site.exited(pid, Ended::Signal(9));
    }

    /// Stops a process as SIGSTOP does.
    pub fn freeze(&mut self, instance: InstanceId) -> u32 {
        let pid = self.pid(instance);
        self.site.processes.get_mut(&pid).expect("a process that runs").is_frozen = true;
        pid
    }

    pub fn thaw(&mut self, pid: u32) {
        self.site.thaw(pid);
    }

    /// The platform believes that a process is gone, but it keeps running.
    pub fn lose_node(&mut self, instance: InstanceId) -> u32 {
        let pid = self.pid(instance);
        assert!(self.site.forget(pid, Ended::NodeLost, 1000), "{instance} was known");
        pid
    }

    /// Starts another process for the slot of a server.
    pub fn start_twice(&mut self, server: InstanceId) -> u32 {
        assert_eq!(server.role, Role::Ps, "{server} is not a server");
        self.site.start_server(server.id)
    }

    /// Another master is started next to this one, which the others can no longer reach.
    pub fn depose_master(&mut self) -> u32 {
        let pid = self.freeze(InstanceId::MASTER);
        self.site.depose_master(PATIENCE);
        pid
    }

    /// The master dies at the next such event, after this many of its effects.
    pub fn kill_master_at(&mut self, n_effects: usize, on: impl Fn(&Event) -> bool + 'static) {
        self.site.kernel.master_death = Some(MasterDeath { on: Box::new(on), n_effects });
    }

    /// User code of a worker never returns, while its heartbeats continue.
    pub fn get_stuck(&mut self, instance: InstanceId) {
        let pid = self.pid(instance);
        let slot = self.site.processes.get_mut(&pid);
        let Some(Process::Worker(worker)) = slot.map(|slot| &mut slot.process) else {
            panic!("{instance} is not a worker");
        };
        worker.get_stuck();
    }

    /// The cluster asks a worker to exit.
    pub fn dismiss(&mut self, instance: InstanceId) {
        let pid = self.pid(instance);
        self.site.kernel.schedule(pid, Duration::ZERO, Timer::Terminate);
    }

    /// A request of the user.
    pub fn request(&mut self, event: Event) {
        let master = self.pid(InstanceId::MASTER);
        self.site.event(master, event);
    }

    /// Everything is killed, and the user resumes the job.
    pub fn restart(&mut self, change: impl FnOnce(&mut JobSpec)) {
        self.site.stop_all("everything killed");
        change(&mut self.site.scenario.spec);
    }

    // === observations ===

    #[must_use]
    pub fn now(&self) -> Time {
        self.site.kernel.now
    }

    /// The process of an instance that runs.
    ///
    /// # Panics
    /// If it does not run.
    #[must_use]
    pub fn pid(&self, instance: InstanceId) -> u32 {
        self.find(instance).unwrap_or_else(|| panic!("{instance} does not run"))
    }

    fn find(&self, instance: InstanceId) -> Option<Pid> {
        let pid = match instance.role {
            Role::Master => self.site.master,
            Role::Ps | Role::Worker => self.site.instances.get(&instance).copied(),
        };
        pid.filter(|pid| self.site.processes.contains_key(pid))
    }

    #[must_use]
    pub fn runs(&self, pid: u32) -> bool {
        self.site.processes.contains_key(&pid)
    }

    /// What is held back.
    pub fn held(&self, hold: Hold) -> impl Iterator<Item = &Sent> {
        self.held.iter().filter(move |held| held.hold == hold).map(|held| &held.sent)
    }

    /// What has arrived, in order.
    #[must_use]
    pub fn delivered(&self) -> &[Sent] {
        &self.delivered
    }

    /// The job of the current master.
    #[must_use]
    pub fn job(&self) -> Option<&Job> {
        match self.process(self.site.master?)? {
            Process::Master(master) => Some(&master.job),
            Process::Server(_) | Process::Worker(_) => None,
        }
    }

    fn process(&self, pid: Pid) -> Option<&Process> {
        self.site.processes.get(&pid).map(|slot| &slot.process)
    }

    #[must_use]
    pub fn n_done(&self) -> u64 {
        self.job().map_or(0, |job| job.ledger().n_done())
    }

    #[must_use]
    pub fn state(&self) -> Option<JobState> {
        self.job().map(Job::state)
    }

    /// The term of the last master.
    #[must_use]
    pub fn term(&self) -> Term {
        self.site.disk.term
    }

    /// What survives every master.
    #[must_use]
    pub fn durable(&self) -> &Durable {
        &self.site.disk.durable
    }

    /// The current world, if its members train or are about to.
    #[must_use]
    pub fn world(&self) -> Option<&World> {
        self.job()?.worlds()?.current()
    }

    /// Workers of the current world.
    #[must_use]
    pub fn members(&self) -> Vec<u32> {
        let members = self.world().map_or(&[][..], |world| &world.members);
        members.iter().map(|member| member.worker.0).collect()
    }

    /// The step whose state a worker holds.
    #[must_use]
    pub fn step_of(&self, pid: u32) -> Option<u64> {
        match self.process(pid)? {
            Process::Worker(worker) => worker.step(),
            Process::Master(_) | Process::Server(_) => None,
        }
    }

    /// What a server holds.
    #[must_use]
    pub fn generation_of(&self, pid: u32) -> Option<Generation> {
        match self.process(pid)? {
            Process::Server(server) => Some(server.generation()),
            Process::Master(_) | Process::Worker(_) => None,
        }
    }

    /// A partition on the server that the platform knows.
    #[must_use]
    pub fn partition(&self, id: u32) -> Option<&Partition> {
        let servers = self.site.instances.values().filter_map(|pid| match self.process(*pid)? {
            Process::Server(server) => Some(server.partitions()),
            Process::Master(_) | Process::Worker(_) => None,
        });
        servers.flatten().find(|part| part.id().0 == id)
    }

    /// Whether a checkpoint's folder has a manifest.
    #[must_use]
    pub fn is_committed(&self, folder: &str) -> bool {
        self.site.disk.manifest(folder).is_ok()
    }

    /// How often something of a kind was noted.
    #[must_use]
    pub fn count(&self, kind: &str) -> u64 {
        self.site.kernel.counts.get(kind).copied().unwrap_or(0)
    }

    // === what is on its way ===

    fn sent(&self, to: Pid, action: &Action) -> Option<Sent> {
        let name = |pid: &Pid| self.names.get(pid).copied();
        match action {
            Action::Deliver { purpose, from, message, .. } => {
                let (from, to) = (name(from)?, name(&to)?);
                Some(Sent { from, to, what: What::of(*purpose, to, message) })
            }
            Action::Broken { conn } => {
                let ends = self.site.kernel.network.ends(*conn)?;
                let other = ends.iter().find(|end| **end != to)?;
                Some(Sent { from: name(other)?, to: name(&to)?, what: What::Broken })
            }
            Action::Timer(Timer::Site(SiteTimer::Obey { order, .. })) => {
                let (Order::Launch { instance, .. }
                | Order::Stop { instance, .. }
                | Order::Dismiss { instance, .. }
                | Order::Chaos { instance, .. }) = order;
                let what = What::Order(order.clone());
                Some(Sent { from: InstanceId::MASTER, to: *instance, what })
            }
            Action::Timer(_) => None,
        }
    }

    /// What holds it back: a rule, or something before it on the same connection.
    fn hold_of(&self, to: Pid, action: &Action, sent: &Sent) -> Option<Hold> {
        let rule = self.rules.iter().find(|rule| (rule.is_held)(sent));
        let conn = conn_of(action);
        let is_before =
            |held: &&Held| conn.is_some() && (conn_of(&held.action), held.to) == (conn, to);
        let before = self.held.iter().find(is_before);
        rule.map(|rule| rule.hold).or_else(|| before.map(|held| held.hold))
    }
}

/// A failed script shows what happened last.
impl Drop for Script {
    #[expect(clippy::print_stderr, reason = "a failure prints what led to it")]
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.site.log().for_each(|line| eprintln!("{line}"));
            eprintln!("seed {}", self.site.scenario.seed);
        }
    }
}

fn conn_of(action: &Action) -> Option<ConnId> {
    match action {
        Action::Deliver { conn, .. } | Action::Broken { conn } => Some(*conn),
        Action::Timer(_) => None,
    }
}
