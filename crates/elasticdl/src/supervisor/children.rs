// SPDX-License-Identifier: Apache-2.0
//! The processes of a job: started, signalled and reaped.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use edl_core::error::is_disk_full;
use edl_core::platform::{ChaosAction, Ended, InstanceId, Process, Role, WORKER_VARIABLES};
use edl_core::spec::{JobSpec, Strategy};
use edl_core::time::millis;
use edl_worker::priority;
use rustix::process::Signal;
use tokio::process::{Child, ChildStdin, Command};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::link::Link;
use super::out_of_memory::Kills;
use super::slow::Slowed;
use super::tasks::Task;
use crate::jobs::Job;
use crate::{custom_loop, host, models, python, signals, stacks};

/// How long a child has to log its stack before it is killed.
const STACK_GRACE: Duration = Duration::from_millis(200);

const KILLED: Ended = Ended::Signal(9);

/// The master of a job, as a child.
pub(super) const MASTER: InstanceId = InstanceId::MASTER;

/// Every child that has not been reaped.
pub(super) struct Children {
    job: Job,
    /// None if the children are tasks of this process.
    programs: Option<Programs>,
    running: BTreeMap<InstanceId, Running>,
    reapers: JoinSet<Reaped>,
    out_of_memory: Kills,
}

/// How children are started: programs with their first arguments.
pub(super) struct Programs {
    own: Vec<OsString>,
    worker: Vec<OsString>,
    worker_environment: Vec<(&'static str, String)>,
    /// The job, if its workers run a custom training loop, which takes no flags.
    custom_loop: Option<JobSpec>,
}

impl Programs {
    pub(super) fn of(spec: &JobSpec) -> Option<Self> {
        (spec.distribution_strategy != Strategy::Local).then(|| Self::of_processes(spec))
    }

    fn of_processes(spec: &JobSpec) -> Self {
        let own = host::get().command.clone();
        let custom_loop = spec.is_custom_loop().then(|| spec.clone());
        if models::is_python(spec) {
            let worker_environment = python::environment(spec);
            return Self { own, worker: python::command(), worker_environment, custom_loop };
        }
        // One thread per worker: the engine gains little by more, and workers share the cores.
        let worker_environment = vec![("RAYON_NUM_THREADS", "1".to_owned())];
        Self { worker: own.clone(), own, worker_environment, custom_loop }
    }
}

struct Running {
    pid: u32,
    started: Instant,
    /// Held open: the child exits when it is closed.
    stdin: Option<ChildStdin>,
    kill_at: Option<Instant>,
    /// It was asked to exit.
    is_asked: bool,
    /// We have killed it ourselves.
    is_killed: bool,
    has_logged_stack: bool,
    slowed: Slowed,
    task: Option<Task>,
}

impl Running {
    fn new(pid: u32, stdin: Option<ChildStdin>, task: Option<Task>) -> Self {
        Self {
            pid,
            started: Instant::now(),
            stdin,
            kill_at: None,
            is_asked: false,
            is_killed: false,
            has_logged_stack: false,
            slowed: Slowed::default(),
            task,
        }
    }

    fn signal(&mut self, signal: Signal) {
        self.is_killed |= signal == Signal::KILL;
        match &self.task {
            Some(task) => task.signal(signal),
            // It may have just ended; the reaper reports that.
            None => _ = signals::send(self.pid, signal),
        }
    }

    /// It is killed at `kill_at`, or earlier.
    fn limit(&mut self, kill_at: Instant) {
        self.kill_at = Some(self.kill_at.map_or(kill_at, |earlier| earlier.min(kill_at)));
    }

    /// Whether it has now been asked for its stack, which a process that hangs says nothing about.
    fn logs_stack(&mut self) -> bool {
        let is_first = !std::mem::replace(&mut self.has_logged_stack, true);
        is_first && self.task.is_none() && stacks::ask(self.pid)
    }

    /// Writes to its standard input without waiting: a line this short is written completely or
    /// not at all.
    fn send(&self, action: ChaosAction) {
        let (Some(stdin), Ok(mut line)) = (&self.stdin, serde_json::to_string(&action)) else {
            return;
        };
        line.push('\n');
        let _ignored = rustix::io::write(stdin, line.as_bytes());
    }
}

/// A child that is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Reaped {
    pub(super) instance: InstanceId,
    pub(super) pid: u32,
    pub(super) how: Ended,
    /// It was asked to exit before it ended.
    pub(super) was_asked: bool,
}

impl Children {
    pub(super) fn new(job: Job, programs: Option<Programs>) -> Self {
        let (running, reapers) = (BTreeMap::new(), JoinSet::new());
        Self { job, programs, running, reapers, out_of_memory: Kills::watch() }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.running.is_empty()
    }

    pub(super) fn pid(&self, instance: InstanceId) -> Option<u32> {
        self.running.get(&instance).map(|child| child.pid)
    }

    /// Everything that runs but the master.
    pub(super) fn list(&self) -> Vec<Process> {
        let others = self.running.iter().filter(|(instance, _)| **instance != MASTER);
        let process = |(instance, child): (&InstanceId, &Running)| Process {
            instance: *instance,
            pid: child.pid,
            age_ms: millis(child.started.elapsed()),
        };
        others.map(process).collect()
    }

    /// Starts a parameter server or a worker; one that runs already is left alone. A spare starts
    /// with low priority.
    pub(super) fn launch(&mut self, instance: InstanceId, is_spare: bool) -> io::Result<u32> {
        if let Some(pid) = self.pid(instance) {
            return Ok(pid);
        }
        let Some(programs) = &self.programs else {
            let task = Task::default();
            let body = task.worker(&self.job, instance).map_err(to_io_error)?;
            return Ok(self.keep_task(instance, task, body));
        };
        let mut command = self.command(programs, instance)?;
        command.stdout(self.log(instance)?);
        match instance.role {
            Role::Master => return Err(io::Error::other("a master cannot be started by request")),
            Role::Ps => command.arg(format!("--ps_id={}", instance.id)),
            Role::Worker if programs.custom_loop.is_some() => &mut command,
            Role::Worker => command.arg(format!("--worker_id={}", instance.id)),
        };
        let normal = if is_spare { priority::normal() } else { None };
        command.envs(normal.map(|normal| (priority::NORMAL_PRIORITY, normal.to_string())));
        let mut child = command.spawn()?;
        if let (Some(pid), Some(normal)) = (child.id(), normal) {
            priority::lower(pid, normal);
        }
        let stdin = child.stdin.take();
        self.keep(instance, child, stdin)
    }

    /// Starts the master.
    pub(super) fn launch_master(&mut self, port: u16, resume: bool) -> io::Result<Link> {
        let Some(programs) = &self.programs else {
            let task = Task::default();
            let (link, body) = task.master(&self.job, port, resume).map_err(to_io_error)?;
            self.keep_task(MASTER, task, body);
            return Ok(link);
        };
        let mut command = self.command(programs, MASTER)?;
        command.stdout(Stdio::piped()).arg(format!("--port={port}"));
        if resume {
            command.arg("--resume");
        }
        let mut child = command.spawn()?;
        let pipes = child.stdin.take().zip(child.stdout.take());
        self.keep(MASTER, child, None)?;
        let (stdin, stdout) = pipes.ok_or_else(|| io::Error::other("the master has no pipes"))?;
        Ok(Link::to_child(stdin, stdout))
    }

    fn command(&self, programs: &Programs, instance: InstanceId) -> io::Result<Command> {
        let mut command = match &programs.custom_loop {
            Some(spec) if instance.role == Role::Worker => self.custom_loop(spec, instance.id)?,
            Some(_) | None => self.process(programs, instance),
        };
        if instance.role == Role::Worker {
            let is_unset = |(name, _): &(&str, &str)| std::env::var_os(name).is_none();
            command.envs(WORKER_VARIABLES.into_iter().filter(is_unset));
        }
        command
            .stdin(Stdio::piped())
            .stderr(self.log(instance)?)
            // Ctrl-C in the terminal is for the supervisor alone, which stops the rest in order.
            .process_group(0);
        Ok(command)
    }

    /// A process of ours.
    fn process(&self, programs: &Programs, instance: InstanceId) -> Command {
        let Programs { own, worker, worker_environment, .. } = programs;
        let program = if instance.role == Role::Worker { worker } else { own };
        let (program, first_args) = program.split_first().expect("a program has a name");
        let mut command = Command::new(program);
        if instance.role == Role::Worker {
            command.envs(worker_environment.iter().map(|(name, value)| (name, value)));
            command.env(custom_loop::WORKER_ID, instance.id.to_string());
        }
        command.args(first_args).arg(instance.role.to_string()).arg("--supervised");
        command.arg("--job_dir").arg(self.job.dir());
        command
    }

    /// A worker that runs a custom training loop.
    fn custom_loop(&self, spec: &JobSpec, worker: u32) -> io::Result<Command> {
        let master = self.job.master();
        let master = master.ok_or_else(|| io::Error::other("the master's address is unknown"))?;
        let (key_file, job_dir) = (self.job.paths().key(), self.job.dir());
        let command = custom_loop::worker(spec, worker, &master.address, &key_file, job_dir);
        let mut command = Command::from(command);
        command.env(custom_loop::SUPERVISED, "1");
        Ok(command)
    }

    /// Where a child's output goes. On a full disk a child runs without a log rather than not at all.
    fn log(&self, instance: InstanceId) -> io::Result<Stdio> {
        let path = self.job.paths().log(instance);
        match File::options().create(true).append(true).mode(0o600).open(path) {
            Ok(file) => Ok(file.into()),
            Err(error) if is_disk_full(&error) => Ok(Stdio::null()),
            Err(error) => Err(error),
        }
    }

    fn keep(
        &mut self,
        instance: InstanceId,
        mut child: Child,
        stdin: Option<ChildStdin>,
    ) -> io::Result<u32> {
        let pid = child.id().ok_or_else(|| io::Error::other("it exited immediately"))?;
        self.out_of_memory.forget();
        self.running.insert(instance, Running::new(pid, stdin, None));
        self.reapers.spawn(async move {
            let how = child.wait().await.map_or(Ended::Exit(-1), how_it_ended);
            Reaped { instance, pid, how, was_asked: false }
        });
        Ok(pid)
    }

    fn keep_task(
        &mut self,
        instance: InstanceId,
        task: Task,
        body: impl Future<Output = Ended> + Send + 'static,
    ) -> u32 {
        let pid = std::process::id();
        self.running.insert(instance, Running::new(pid, None, Some(task.clone())));
        let how = task.run(body);
        self.reapers
            .spawn(async move { Reaped { instance, pid, how: how.await, was_asked: false } });
        pid
    }

    /// Asks a child to exit, once, and kills it after `grace`.
    pub(super) fn terminate(&mut self, instance: InstanceId, grace: Duration, now: Instant) {
        if let Some(child) = self.running.get_mut(&instance) {
            if !std::mem::replace(&mut child.is_asked, true) {
                child.signal(Signal::TERM);
            }
            child.limit(now + grace);
        }
    }

    /// Kills a child that is still there after `grace`. It exits by itself before, without a signal.
    pub(super) fn dismiss(&mut self, instance: InstanceId, grace: Duration, now: Instant) {
        if let Some(child) = self.running.get_mut(&instance) {
            child.limit(now + grace);
        }
    }

    /// Asks every child to exit that was not dismissed.
    pub(super) fn terminate_rest(&mut self, grace: Duration, now: Instant) {
        let rest = self.running.iter().filter(|(_, child)| child.kill_at.is_none());
        for instance in rest.map(|(instance, _)| *instance).collect::<Vec<_>>() {
            self.terminate(instance, grace, now);
        }
    }

    pub(super) fn terminate_all(&mut self, grace: Duration, now: Instant) {
        let all: Vec<InstanceId> = self.running.keys().copied().collect();
        for instance in all {
            self.terminate(instance, grace, now);
        }
    }

    /// Kills every child whose grace period is over. It gets a moment to log its stack first.
    pub(super) fn kill_overdue(&mut self, now: Instant) {
        let is_overdue = |child: &Running| child.kill_at.is_some_and(|kill_at| kill_at <= now);
        for child in self.running.values_mut().filter(|child| is_overdue(child)) {
            if child.logs_stack() {
                child.kill_at = Some(now + STACK_GRACE);
            } else {
                child.signal(Signal::KILL);
            }
        }
    }

    pub(super) fn kill(&mut self, instance: InstanceId) {
        if let Some(child) = self.running.get_mut(&instance) {
            child.signal(Signal::KILL);
        }
    }

    /// Performs a chaos action.
    pub(super) fn chaos(&mut self, instance: InstanceId, action: ChaosAction) {
        // Tasks run in the supervisor's own process.
        let child = self.running.get_mut(&instance).filter(|child| child.task.is_none());
        let Some(child) = child else { return };
        match action {
            ChaosAction::Kill => child.signal(Signal::KILL),
            ChaosAction::Pause => {
                child.slowed.end();
                child.signal(Signal::STOP);
            }
            ChaosAction::Resume => {
                child.slowed.end();
                child.signal(Signal::CONT);
            }
            ChaosAction::Slow { factor, millis } => {
                child.slowed.begin(child.pid, factor, Duration::from_millis(millis));
            }
            // A process holds its own traffic.
            ChaosAction::Partition { .. } => child.send(action),
        }
    }

    pub(super) fn kill_all(&mut self) {
        for child in self.running.values_mut() {
            child.signal(Signal::KILL);
        }
    }

    /// The next child that ends; waits forever when there is none.
    pub(super) async fn ended(&mut self) -> Reaped {
        match self.reapers.join_next().await {
            Some(Ok(mut reaped)) => {
                let child = self.running.remove(&reaped.instance);
                reaped.was_asked = child.as_ref().is_some_and(|child| child.kill_at.is_some());
                let is_ours = child.is_some_and(|child| child.is_killed);
                let has_risen = self.out_of_memory.has_risen(Instant::now());
                if reaped.how == KILLED && has_risen && !is_ours {
                    reaped.how = Ended::MachineOutOfMemory;
                }
                reaped
            }
            Some(Err(panic)) => std::panic::resume_unwind(panic.into_panic()),
            None => std::future::pending().await,
        }
    }
}

fn how_it_ended(status: ExitStatus) -> Ended {
    match (status.code(), status.signal()) {
        (Some(code), _) => Ended::Exit(code),
        (None, Some(signal)) => Ended::Signal(signal),
        (None, None) => Ended::Exit(-1),
    }
}

fn to_io_error(error: anyhow::Error) -> io::Error {
    io::Error::other(format!("{error:#}"))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use edl_core::spec::JobSpec;

    use super::*;
    use crate::jobs::Home;

    /// A job whose processes are a shell script.
    fn children(script: &str) -> (tempfile::TempDir, Children) {
        let root = tempfile::tempdir().unwrap();
        let spec = JobSpec { job_name: "x".into(), ..JobSpec::default() };
        let job = Home::at(&root.path().join("home")).create(&spec, None).unwrap();
        let program = root.path().join("program");
        std::fs::write(&program, format!("#!/bin/sh\n{script}\n")).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o700)).unwrap();
        let programs = Programs {
            own: vec![program.clone().into()],
            worker: vec![program.into()],
            worker_environment: vec![("THREADS", "1".into())],
            custom_loop: None,
        };
        (root, Children::new(job, Some(programs)))
    }

    /// A script that was just written is busy while another test starts a child.
    fn launch(children: &mut Children) -> u32 {
        loop {
            match children.launch(WORKER, false) {
                Ok(pid) => return pid,
                Err(error) if error.kind() == io::ErrorKind::ExecutableFileBusy => {}
                Err(error) => panic!("{error}"),
            }
        }
    }

    const WORKER: InstanceId = InstanceId { role: Role::Worker, id: 3 };

    #[tokio::test]
    async fn a_child_gets_its_flags_and_its_output_goes_to_its_log() {
        let (_root, mut children) = children("echo \"$@\" $THREADS; exit 5");
        let pid = launch(&mut children);
        assert_eq!(
            children.launch(WORKER, false).unwrap(),
            pid,
            "a second order starts no second one"
        );
        let listed: Vec<_> = children.list().iter().map(|p| (p.instance, p.pid)).collect();
        assert_eq!(listed, [(WORKER, pid)]);
        let ended = children.ended().await;
        assert_eq!(ended, Reaped { instance: WORKER, pid, how: Ended::Exit(5), was_asked: false });
        assert!(children.is_empty());
        let log = std::fs::read_to_string(children.job.paths().log(WORKER)).unwrap();
        let expected = format!(
            "worker --supervised --job_dir {} --worker_id=3 1\n",
            children.job.dir().display()
        );
        assert_eq!(log, expected);
    }

    #[tokio::test]
    async fn a_child_that_does_not_exit_is_killed_after_its_grace_period() {
        let (_root, mut children) = children("trap '' TERM; echo ready; while :; do read x; done");
        let pid = launch(&mut children);
        let now = Instant::now();
        children.terminate(WORKER, Duration::from_secs(1), now);
        children.kill_overdue(now);
        assert_eq!(children.pid(WORKER), Some(pid));
        children.kill_overdue(now + Duration::from_secs(1));
        let how = children.ended().await.how;
        // The signal may have come before the trap was set.
        assert!([Ended::Signal(9), Ended::Signal(15)].contains(&how), "{how:?}");
    }

    #[tokio::test]
    async fn a_dismissed_child_gets_no_signal_before_its_grace_is_over() {
        let (_root, mut children) = children("trap 'exit 9' TERM; read x; exit 7");
        launch(&mut children);
        let now = Instant::now();
        children.dismiss(WORKER, Duration::from_secs(600), now);
        children.terminate_rest(Duration::ZERO, now);
        children.kill_overdue(now + Duration::from_secs(599));
        children.running.get_mut(&WORKER).unwrap().stdin = None;
        assert_eq!(children.ended().await.how, Ended::Exit(7));
    }

    #[tokio::test]
    async fn a_child_is_asked_to_exit_only_once() {
        let script = "trap 'n=x$n' TERM; echo ready; while :; do read x || exit ${#n}; done";
        let (_root, mut children) = children(script);
        launch(&mut children);
        let log = children.job.paths().log(WORKER);
        while std::fs::read(&log).unwrap().is_empty() {
            tokio::task::yield_now().await;
        }
        let (now, grace) = (Instant::now(), Duration::from_secs(60));
        children.terminate(WORKER, grace, now);
        children.terminate_all(grace, now);
        children.running.get_mut(&WORKER).unwrap().stdin = None;
        assert_eq!(children.ended().await.how, Ended::Exit(1));
    }

    #[tokio::test]
    async fn a_child_killed_by_the_kernel_for_its_memory_differs_from_one_killed_by_a_user() {
        let (root, mut children) = children("read x");
        let counter = root.path().join("counter");
        let count = |n: u32| std::fs::write(&counter, format!("oom_kill {n}\n")).unwrap();
        count(0);
        children.out_of_memory = Kills::counted_in(counter.clone());
        let kill = |pid: u32| signals::send(pid, Signal::KILL).unwrap().unwrap();
        kill(launch(&mut children));
        assert_eq!(children.ended().await.how, Ended::Signal(9));
        count(1);
        kill(launch(&mut children));
        assert_eq!(children.ended().await.how, Ended::Signal(9), "that was before it started");
        launch(&mut children);
        count(2);
        children.kill(WORKER);
        assert_eq!(children.ended().await.how, Ended::Signal(9), "we killed it ourselves");
        let pid = launch(&mut children);
        count(3);
        kill(pid);
        assert_eq!(children.ended().await.how, Ended::MachineOutOfMemory);
    }

    #[tokio::test]
    async fn children_see_the_end_of_their_supervisor_on_their_input() {
        let (_root, mut children) = children("read x; exit 7");
        launch(&mut children);
        children.running.get_mut(&WORKER).unwrap().stdin = None;
        assert_eq!(children.ended().await.how, Ended::Exit(7));
    }
}
