// SPDX-License-Identifier: Apache-2.0
//! The processes of a job: started, signalled and reaped.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt as _;
use std::process::Stdio;
use std::time::Duration;

use edl_core::error::is_disk_full;
use edl_core::platform::{ChaosAction, Ended, InstanceId, Process, Report, Role};
use edl_core::pod::Wait;
use edl_core::spec::{JobSpec, Strategy};
use edl_core::time::millis;
use edl_worker::priority;
use rustix::process::Signal;
use tokio::process::{Child, ChildStdin, Command};
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::link::Link;
use super::out_of_memory::Kills;
use super::slow::Slowed;
use super::tasks::Task;
use crate::custom_loop::{self, FIRST_WORKER, FirstWorker};
use crate::fork_server::{ForkServer, Program, Started, how_it_ended};
use crate::jobs::Job;
use crate::{host, models, python, signals, stacks};

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
    changes: JoinSet<Change>,
    out_of_memory: Kills,
    forks: Option<ForkServer>,
    n_forked: u64,
    /// Worker 0, until it is to be started.
    first: Option<FirstWorker>,
}

/// What happens to a child without an order.
enum Change {
    /// The process that forks has answered, or cannot fork.
    Forked {
        starting: Box<Starting>,
        forked: Option<Started>,
    },
    Ended(Reaped),
}

/// A child that is being forked.
struct Starting {
    instance: InstanceId,
    number: u64,
    command: Command,
    /// The priority of other workers, if it starts with a lower one.
    normal: Option<i32>,
}

/// What happened to the children of a supervisor.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ChildEvent {
    /// Whether a child was started that `launch` could not start at once.
    Launched(Report),
    Ended(Reaped),
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
    /// 0 until it is forked.
    pid: u32,
    /// Which of all children that were to be forked it is.
    number: u64,
    /// Dropped when it is not to be forked any more.
    request: Option<oneshot::Sender<()>>,
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
            number: 0,
            request: None,
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
        let ends = [Signal::TERM, Signal::KILL].contains(&signal);
        self.is_killed |= signal == Signal::KILL || (ends && self.is_starting());
        // It may have just ended; then its end is reported.
        match &self.task {
            Some(task) => task.signal(signal),
            None if self.is_starting() => _ = self.request.take_if(|_| ends),
            None => _ = signals::send(self.pid, signal),
        }
    }

    fn is_starting(&self) -> bool {
        self.pid == 0
    }

    /// It is killed at `kill_at`, or earlier.
    fn limit(&mut self, kill_at: Instant) {
        self.kill_at = Some(self.kill_at.map_or(kill_at, |earlier| earlier.min(kill_at)));
    }

    /// Whether it has now been asked for its stack, which a process that hangs says nothing about.
    fn logs_stack(&mut self) -> bool {
        let is_first = !std::mem::replace(&mut self.has_logged_stack, true);
        is_first && self.task.is_none() && !self.is_starting() && stacks::ask(self.pid)
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
    pub(super) fn new(
        job: Job,
        programs: Option<Programs>,
        forks: Option<ForkServer>,
        first: Option<FirstWorker>,
    ) -> Self {
        Self {
            job,
            programs,
            running: BTreeMap::new(),
            changes: JoinSet::new(),
            out_of_memory: Kills::watch(),
            forks,
            n_forked: 0,
            first,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.running.is_empty()
    }

    pub(super) fn pid(&self, instance: InstanceId) -> Option<u32> {
        self.running.get(&instance).filter(|child| !child.is_starting()).map(|child| child.pid)
    }

    /// Everything that runs but the master.
    pub(super) fn list(&self) -> Vec<Process> {
        let is_other = |(instance, child): &(&InstanceId, &Running)| {
            **instance != MASTER && !child.is_starting()
        };
        let others = self.running.iter().filter(is_other);
        let process = |(instance, child): (&InstanceId, &Running)| Process {
            instance: *instance,
            pid: child.pid,
            age_ms: millis(child.started.elapsed()),
        };
        others.map(process).collect()
    }

    /// Starts a parameter server or a worker; one that runs already is left alone. A spare starts
    /// with low priority. Returns None if an event will tell whether it was started.
    pub(super) fn launch(
        &mut self,
        instance: InstanceId,
        is_spare: bool,
    ) -> io::Result<Option<u32>> {
        if let Some(child) = self.running.get(&instance) {
            return Ok((!child.is_starting()).then_some(child.pid));
        }
        let Some(programs) = &self.programs else {
            let task = Task::default();
            let body = task.worker(&self.job, instance).map_err(to_io_error)?;
            return Ok(Some(self.keep_task(instance, task, body)));
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
        if let Some(first) = self.first.take_if(|_| instance == FIRST_WORKER) {
            let (process, input) = first.begin(command.as_std());
            let stdin = std::process::ChildStdin::from(OwnedFd::from(input));
            let child = Running::new(process.pid(), Some(ChildStdin::from_std(stdin)?), None);
            self.running.insert(instance, child);
            return Ok(Some(self.follow(instance, process, normal)));
        }
        if let Some((stdin, forked)) = self.fork(instance, &command)? {
            self.n_forked += 1;
            let number = self.n_forked;
            let (request, mut is_over) = oneshot::channel();
            let request = Some(request);
            let child = Running { number, request, ..Running::new(0, Some(stdin), None) };
            self.running.insert(instance, child);
            let starting = Box::new(Starting { instance, number, command, normal });
            self.changes.spawn(async move {
                let forked = tokio::select! {
                    _ = &mut is_over => None,
                    forked = forked => forked.ok(),
                };
                Change::Forked { starting, forked }
            });
            return Ok(None);
        }
        self.spawn(instance, &mut command, normal).map(Some)
    }

    /// Asks for a fork that runs this command: its standard input, and the answer.
    fn fork(
        &self,
        instance: InstanceId,
        command: &Command,
    ) -> io::Result<Option<(ChildStdin, oneshot::Receiver<Started>)>> {
        let forks = self.forks.as_ref().filter(|_| instance.role == Role::Worker);
        let Some((forks, program)) = forks.zip(Program::of(command.as_std())) else {
            return Ok(None);
        };
        let (read, write) = io::pipe()?;
        let log = self.log_file(instance)?;
        let forked = forks.fork(&program, [&read.into(), &log, &log], true);
        let stdin = std::process::ChildStdin::from(OwnedFd::from(write));
        Ok(Some(ChildStdin::from_std(stdin)?).zip(forked))
    }

    /// Starts a program; `normal` is the priority of others if its own is lower.
    fn spawn(
        &mut self,
        instance: InstanceId,
        command: &mut Command,
        normal: Option<i32>,
    ) -> io::Result<u32> {
        let mut child = command.spawn()?;
        if let (Some(pid), Some(normal)) = (child.id(), normal) {
            priority::lower(pid, normal);
        }
        let stdin = child.stdin.take();
        self.keep(instance, child, stdin)
    }

    /// Continues with a child that was to be forked.
    fn adopt(&mut self, starting: Starting, forked: Option<Started>) -> Option<ChildEvent> {
        let Starting { instance, number, mut command, normal } = starting;
        // A fork that is no longer wanted is dropped, which kills it.
        let child = self.running.get_mut(&instance).filter(|child| child.number == number)?;
        if child.is_killed {
            let reaped = Reaped { instance, pid: 0, how: KILLED, was_asked: false };
            return Some(ChildEvent::Ended(self.reaped(reaped)));
        }
        let Some(forked) = forked else {
            let kill_at = child.kill_at;
            self.running.remove(&instance);
            let launched = self.spawn(instance, &mut command, normal);
            if let Some(child) = self.running.get_mut(&instance) {
                child.kill_at = kill_at;
            }
            return Some(ChildEvent::Launched(launch_report(instance, launched.map(Some))));
        };
        (child.pid, child.started) = (forked.pid(), Instant::now());
        let pid = self.follow(instance, forked, normal);
        Some(ChildEvent::Launched(Report::Started { instance, pid }))
    }

    /// Waits for the end of a child that runs; `normal` is as for `spawn`.
    fn follow(&mut self, instance: InstanceId, mut process: Started, normal: Option<i32>) -> u32 {
        let pid = process.pid();
        self.out_of_memory.forget();
        if let Some(normal) = normal {
            priority::lower(pid, normal);
        }
        self.changes.spawn(async move {
            let how = process.wait().await.unwrap_or(Ended::Exit(-1));
            Change::Ended(Reaped { instance, pid, how, was_asked: false })
        });
        pid
    }

    /// Gives up the children that are not forked yet: the next master does not know of them.
    pub(super) fn forget_starting(&mut self) {
        self.running.retain(|_, child| !child.is_starting());
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
            command.envs(custom_loop::worker_variables());
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
        Ok(self.log_file(instance)?.into())
    }

    fn log_file(&self, instance: InstanceId) -> io::Result<OwnedFd> {
        let path = self.job.paths().log(instance);
        match File::options().create(true).append(true).mode(0o600).open(path) {
            Ok(file) => Ok(file.into()),
            Err(error) if is_disk_full(&error) => {
                Ok(File::options().write(true).open("/dev/null")?.into())
            }
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
        self.changes.spawn(async move {
            let how = child.wait().await.map_or(Ended::Exit(-1), how_it_ended);
            Change::Ended(Reaped { instance, pid, how, was_asked: false })
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
        self.changes.spawn(async move {
            Change::Ended(Reaped { instance, pid, how: how.await, was_asked: false })
        });
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

    /// What happens next; waits forever when there are no children. Nothing is lost if it is
    /// dropped while it waits.
    pub(super) async fn next(&mut self) -> ChildEvent {
        loop {
            match self.changes.join_next().await {
                Some(Ok(Change::Forked { starting, forked })) => {
                    if let Some(event) = self.adopt(*starting, forked) {
                        return event;
                    }
                }
                Some(Ok(Change::Ended(reaped))) => return ChildEvent::Ended(self.reaped(reaped)),
                Some(Err(panic)) => std::panic::resume_unwind(panic.into_panic()),
                None => std::future::pending().await,
            }
        }
    }

    fn reaped(&mut self, mut reaped: Reaped) -> Reaped {
        let child = self.running.remove(&reaped.instance);
        reaped.was_asked = child.as_ref().is_some_and(|child| child.kill_at.is_some());
        let is_ours = child.is_some_and(|child| child.is_killed);
        let has_risen = self.out_of_memory.has_risen(Instant::now());
        if reaped.how == KILLED && has_risen && !is_ours {
            reaped.how = Ended::MachineOutOfMemory;
        }
        reaped
    }
}

fn to_io_error(error: anyhow::Error) -> io::Error {
    io::Error::other(format!("{error:#}"))
}

/// What the master learns about an order to start a child.
pub(super) fn launch_report(instance: InstanceId, launched: io::Result<Option<u32>>) -> Report {
    match launched {
        Ok(Some(pid)) => Report::Started { instance, pid },
        // The time that it may take to connect begins when it runs.
        Ok(None) => Report::Waiting { instance, why: Wait::Starting },
        Err(error) => Report::NotStarted { instance, error: error.to_string() },
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use edl_core::spec::JobSpec;

    use super::*;
    use crate::fork_server;
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
        (root, Children::new(job, Some(programs), None, None))
    }

    /// A script that was just written is busy while another test starts a child.
    fn launch(children: &mut Children) -> u32 {
        loop {
            match children.launch(WORKER, false) {
                Ok(pid) => return pid.unwrap(),
                Err(error) if error.kind() == io::ErrorKind::ExecutableFileBusy => {}
                Err(error) => panic!("{error}"),
            }
        }
    }

    async fn ended(children: &mut Children) -> Reaped {
        let event = children.next().await;
        let ChildEvent::Ended(reaped) = event else { panic!("{event:?}") };
        reaped
    }

    const WORKER: InstanceId = InstanceId { role: Role::Worker, id: 3 };

    #[tokio::test]
    async fn a_child_gets_its_flags_and_its_output_goes_to_its_log() {
        let (_root, mut children) = children("echo \"$@\" $THREADS; exit 5");
        let pid = launch(&mut children);
        assert_eq!(
            children.launch(WORKER, false).unwrap(),
            Some(pid),
            "a second order starts no second one"
        );
        let listed: Vec<_> = children.list().iter().map(|p| (p.instance, p.pid)).collect();
        assert_eq!(listed, [(WORKER, pid)]);
        let ended = ended(&mut children).await;
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
        let how = ended(&mut children).await.how;
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
        assert_eq!(ended(&mut children).await.how, Ended::Exit(7));
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
        assert_eq!(ended(&mut children).await.how, Ended::Exit(1));
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
        assert_eq!(ended(&mut children).await.how, Ended::Signal(9));
        count(1);
        kill(launch(&mut children));
        assert_eq!(ended(&mut children).await.how, Ended::Signal(9), "that was before it started");
        launch(&mut children);
        count(2);
        children.kill(WORKER);
        assert_eq!(ended(&mut children).await.how, Ended::Signal(9), "we killed it ourselves");
        let pid = launch(&mut children);
        count(3);
        kill(pid);
        assert_eq!(ended(&mut children).await.how, Ended::MachineOutOfMemory);
    }

    #[tokio::test]
    async fn children_see_the_end_of_their_supervisor_on_their_input() {
        let (_root, mut children) = children("read x; exit 7");
        launch(&mut children);
        children.running.get_mut(&WORKER).unwrap().stdin = None;
        assert_eq!(ended(&mut children).await.how, Ended::Exit(7));
    }

    /// A job whose workers are Python programs with this source, which are forked.
    fn forked(source: &str) -> (tempfile::TempDir, Children, ForkServer) {
        forked_within(Duration::from_secs(60), source)
    }

    fn forked_within(limit: Duration, source: &str) -> (tempfile::TempDir, Children, ForkServer) {
        let (root, mut children) = children("");
        let (forks, file) = fork_server::tests::server_within(limit, root.path(), source);
        let worker = vec!["python3".into(), file.into_os_string()];
        children.programs.as_mut().unwrap().worker = worker;
        children.forks = Some(forks.clone());
        (root, children, forks)
    }

    async fn started(children: &mut Children) -> u32 {
        let event = children.next().await;
        let ChildEvent::Launched(Report::Started { instance: WORKER, pid }) = event else {
            panic!("{event:?}")
        };
        pid
    }

    /// The parent of a process.
    fn parent(pid: u32) -> u32 {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("PPid:")).unwrap();
        line.trim().parse().unwrap()
    }

    /// Whether a child is a fork, and not spawned.
    fn is_fork(pid: u32) -> bool {
        let words = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap();
        String::from_utf8(words).unwrap().contains("elasticdl._fork_server")
    }

    #[tokio::test]
    async fn a_forked_child_does_not_differ_from_a_spawned_one() {
        let source = "import os, sys\nprint(*sys.argv[1:], os.environ['THREADS'], flush=True)\n\
                      sys.stdin.read()\nsys.exit(5)";
        let (_root, mut children, _forks) = forked(source);
        assert_eq!(children.launch(WORKER, false).unwrap(), None);
        assert_eq!(children.launch(WORKER, false).unwrap(), None, "only one is started");
        assert_eq!((children.list(), children.is_empty()), (vec![], false));
        let pid = started(&mut children).await;
        assert_eq!(children.launch(WORKER, false).unwrap(), Some(pid));
        assert!(is_fork(pid));
        assert_eq!(parent(pid), std::process::id());
        // It exits when its standard input is closed.
        children.running.get_mut(&WORKER).unwrap().stdin = None;
        let how = Ended::Exit(5);
        let end = Reaped { instance: WORKER, pid, how, was_asked: false };
        assert_eq!(ended(&mut children).await, end);
        let log = std::fs::read_to_string(children.job.paths().log(WORKER)).unwrap();
        let dir = children.job.dir().display();
        assert_eq!(log, format!("worker --supervised --job_dir {dir} --worker_id=3 1\n"));
    }

    #[tokio::test]
    async fn the_time_to_connect_begins_when_the_child_runs() {
        let (_root, mut children, _forks) = forked("import sys; sys.stdin.read()");
        let report = launch_report(WORKER, children.launch(WORKER, false));
        assert_eq!(report, Report::Waiting { instance: WORKER, why: Wait::Starting });
        let pid = started(&mut children).await;
        let report = launch_report(WORKER, children.launch(WORKER, false));
        assert_eq!(report, Report::Started { instance: WORKER, pid });
    }

    #[tokio::test]
    async fn a_child_that_is_killed_before_it_is_forked_ends_at_once_and_does_not_live() {
        let source = "import os, sys\n\
                      print(os.getpid(), flush=True)\nsys.stdin.read()\nsys.stdin.read()";
        let (_root, mut children, forks) = forked(source);
        signals::send(forks.pid(), Signal::STOP).unwrap().unwrap();
        for _ in 0..2 {
            children.launch(WORKER, false).unwrap();
            children.terminate(WORKER, Duration::from_secs(600), Instant::now());
            let end = Reaped { instance: WORKER, pid: 0, how: KILLED, was_asked: true };
            assert_eq!(ended(&mut children).await, end);
            assert!(children.is_empty());
        }
        children.launch(WORKER, false).unwrap();
        signals::send(forks.pid(), Signal::CONT).unwrap().unwrap();
        let pid = started(&mut children).await;
        let log = children.job.paths().log(WORKER);
        let printed = || std::fs::read_to_string(&log).unwrap();
        let is_last = |line: &str| line == pid.to_string();
        while !printed().lines().any(is_last) {
            tokio::task::yield_now().await;
        }
        // The others may have printed their numbers before they were killed.
        for other in printed().lines().filter(|line| !is_last(line)) {
            while is_there(other) {
                tokio::task::yield_now().await;
            }
        }
        assert_eq!(children.pid(WORKER), Some(pid));
    }

    /// Whether this process has not ended.
    fn is_there(pid: &str) -> bool {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"));
        stat.is_ok_and(|stat| !stat.contains(") Z "))
    }

    #[tokio::test]
    async fn a_child_is_spawned_if_the_process_that_forks_hangs() {
        let limit = Duration::from_millis(100);
        let (_root, mut children, forks) = forked_within(limit, "import sys; sys.stdin.read()");
        signals::send(forks.pid(), Signal::STOP).unwrap().unwrap();
        assert_eq!(children.launch(WORKER, false).unwrap(), None);
        let pid = started(&mut children).await;
        assert!(!is_fork(pid));
        let other = InstanceId { id: 4, ..WORKER };
        assert!(children.launch(other, false).unwrap().is_some(), "it hangs, too");
        while is_there(&forks.pid().to_string()) {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn children_outlive_the_process_that_forked_them_and_others_are_spawned() {
        let source = "import sys\nprint('runs', flush=True)\nsys.stdin.read()\nsys.exit(5)";
        let (_root, mut children, forks) = forked(source);
        children.launch(WORKER, false).unwrap();
        let pid = started(&mut children).await;
        let log = children.job.paths().log(WORKER);
        while std::fs::read(&log).unwrap().is_empty() {
            tokio::task::yield_now().await;
        }
        signals::send(forks.pid(), Signal::KILL).unwrap().unwrap();
        let other = InstanceId { id: 4, ..WORKER };
        // It may be asked to fork before its end is noticed.
        if children.launch(other, false).unwrap().is_none() {
            let event = children.next().await;
            let ChildEvent::Launched(Report::Started { instance, .. }) = event else {
                panic!("{event:?}")
            };
            assert_eq!(instance, other);
        }
        assert!(!is_fork(children.pid(other).unwrap()));
        children.kill(other);
        assert_eq!(ended(&mut children).await.how, KILLED);
        children.running.get_mut(&WORKER).unwrap().stdin = None;
        let end = Reaped { instance: WORKER, pid, how: Ended::Exit(5), was_asked: false };
        assert_eq!(ended(&mut children).await, end);
    }

    #[tokio::test]
    async fn a_child_that_is_forked_for_a_dead_master_is_not_mistaken_for_the_next() {
        let (_root, mut children, _forks) = forked("import sys; sys.stdin.read()");
        children.launch(WORKER, false).unwrap();
        children.forget_starting();
        assert!(children.is_empty());
        children.launch(WORKER, false).unwrap();
        let pid = started(&mut children).await;
        assert_eq!(children.list().len(), 1);
        children.kill(WORKER);
        let end = Reaped { instance: WORKER, pid, how: KILLED, was_asked: false };
        assert_eq!(ended(&mut children).await, end);
    }
}
