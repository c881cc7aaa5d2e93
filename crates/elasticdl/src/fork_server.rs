// SPDX-License-Identifier: Apache-2.0
//! Starts Python programs as forks of a process that has imported their packages already
//! (`python/elasticdl/_fork_server.py`), so that all processes of a job together import them once.
//!
//! A caller must be able to start the program without it: where it cannot be forked, it is spawned.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, IoSlice, Read as _, Seek as _, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use edl_core::platform::Ended;
use edl_core::spec::{JobSpec, Strategy};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, Shutdown,
    SocketFlags, SocketType, recv, sendmsg, shutdown, socketpair,
};
use rustix::process::{
    Pid, Signal, WaitOptions, kill_process, set_child_subreaper, waitpgid, waitpid,
};
use serde::{Deserialize, Serialize};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::oneshot::{self, error::TryRecvError};

use crate::{custom_loop, models};

const MODULE: &str = "elasticdl._fork_server";
const POLL: Duration = Duration::from_millis(5);
/// How long a server may take to fork.
const LIMIT: Duration = Duration::from_secs(60);
/// How many times as long the first imports may take, for example from a network file system.
const IMPORTS: u32 = 10;
/// Messages of the server are short.
const MAX_MESSAGE: usize = 256;
/// What a shell would not take literally. Commands with these are for a shell.
const SHELL: &str = "$`;|&<>()*?[]{}~\"\\#!\n";

/// A server, which exits when the last handle is dropped.
#[derive(Clone, Debug)]
pub(crate) struct ForkServer {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    #[cfg(test)]
    pid: u32,
    socket: OwnedFd,
    interpreter: OsString,
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    next_id: u64,
    /// When its first imports were done.
    ready_at: Option<Instant>,
    /// It has exited, or cannot fork.
    is_lost: bool,
    starting: BTreeMap<u64, Starting>,
}

/// A program that is to be forked.
#[derive(Debug)]
struct Starting {
    answer: oneshot::Sender<Started>,
    since: Instant,
    _parent: Adopting,
}

/// A Python program: its interpreter's arguments, and what is added to the environment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Program {
    interpreter: OsString,
    args: Vec<String>,
    env: BTreeMap<String, String>,
}

/// A running program, which is a child of this process. It is killed when this is dropped.
#[derive(Debug)]
pub(crate) struct Started {
    pid: Pid,
    has_ended: bool,
}

/// While this exists, this process is the parent of orphans below it. A fork is an orphan, so it
/// becomes its child.
///
/// Not always: then it would have to reap whatever the user's processes leave behind.
#[derive(Debug)]
struct Adopting;

static N_ADOPTING: Mutex<usize> = Mutex::new(0);

#[derive(Serialize)]
struct Request<'a> {
    id: u64,
    args: &'a [String],
    env: &'a BTreeMap<String, String>,
    /// False if Ctrl-C in the terminal is for this program, too.
    leads_group: bool,
}

/// A program that has ended.
#[derive(Debug)]
pub(crate) struct Finished {
    pub(crate) how: Ended,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

/// Runs a program to its end: forked if that is possible, spawned otherwise. None if it did not end
/// within the limit.
pub(crate) fn run(
    forks: Option<&ForkServer>,
    mut command: Command,
    input: &[u8],
    limit: Duration,
) -> io::Result<Option<Finished>> {
    let deadline = Instant::now() + limit;
    let [mut stdin, stdout, stderr] =
        [tempfile::tempfile()?, tempfile::tempfile()?, tempfile::tempfile()?];
    stdin.write_all(input)?;
    stdin.rewind()?;
    let fds = [stdin.into(), stdout.try_clone()?.into(), stderr.try_clone()?.into()];
    let how = match start(forks, &mut command, fds.each_ref(), false, deadline)? {
        Some(mut program) => before(deadline, || Ok(program.try_wait()))?,
        None => None,
    };
    let [stdout, stderr] = [text_of(stdout)?, text_of(stderr)?];
    Ok(how.map(|how| Finished { how, stdout, stderr }))
}

/// Starts a program: forked if that is possible, spawned otherwise. None if it could not be started
/// before the deadline. A spawned one is in the group of this process in any case.
pub(crate) fn start(
    forks: Option<&ForkServer>,
    command: &mut Command,
    stdio: [&OwnedFd; 3],
    leads_group: bool,
    deadline: Instant,
) -> io::Result<Option<Started>> {
    let asked = forks
        .zip(Program::of(command))
        .and_then(|(forks, program)| forks.fork(&program, stdio, leads_group));
    if let Some(mut asked) = asked {
        let answer = before(deadline, || match asked.try_recv() {
            Ok(forked) => Ok(Some(Some(forked))),
            Err(TryRecvError::Closed) => Ok(Some(None)),
            Err(TryRecvError::Empty) => Ok(None),
        })?;
        match answer {
            Some(None) => {}
            Some(forked) => return Ok(forked),
            None => return Ok(None),
        }
    }
    let [stdin, stdout, stderr] = stdio.map(OwnedFd::try_clone);
    let child = command.stdin(stdin?).stdout(stdout?).stderr(stderr?).spawn()?;
    Ok(Some(Started { pid: Pid::from_child(&child), has_ended: false }))
}

/// Looks until there is something, but not after the deadline.
pub(crate) fn before<T>(
    deadline: Instant,
    mut look: impl FnMut() -> io::Result<Option<T>>,
) -> io::Result<Option<T>> {
    loop {
        let found = look()?;
        if found.is_some() || Instant::now() >= deadline {
            return Ok(found);
        }
        std::thread::sleep(POLL);
    }
}

pub(crate) fn how_it_ended(status: ExitStatus) -> Ended {
    match (status.code(), status.signal()) {
        (Some(code), _) => Ended::Exit(code),
        (None, Some(signal)) => Ended::Signal(signal),
        (None, None) => Ended::Exit(-1),
    }
}

fn text_of(mut file: File) -> io::Result<String> {
    let mut bytes = Vec::new();
    file.rewind()?;
    file.read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// From the server; the fields tell which message it is.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Message {
    obstacle: Option<String>,
    id: u64,
    pid: i32,
}

impl Program {
    /// The program that a command starts, if it is one that Python would run by itself: `python
    /// FILE …` or `python -m MODULE …`, without a shell or further options of the interpreter.
    pub(crate) fn of(command: &Command) -> Option<Self> {
        let args: Option<Vec<String>> = command.get_args().map(text).collect();
        let (words, names) = match (command.get_program().to_str()?, args?.as_slice()) {
            ("sh", [flag, line]) if flag == "-c" => split(line.strip_prefix("exec ")?)?,
            (program, args) => ([&[program.to_owned()], args].concat(), BTreeMap::new()),
        };
        let (interpreter, args) = words.split_first()?;
        let is_python = Path::new(interpreter).file_name()?.to_str()?.starts_with("python");
        let is_plain = match args.first()?.as_str() {
            "-m" => args.len() > 1,
            first => !first.starts_with('-'),
        };
        // A variable that is removed must not be there: the server has this process's variables.
        let is_set = |name: &&OsStr| std::env::var_os(name).is_some();
        let given = command.get_envs().filter(|(name, value)| value.is_some() || is_set(name));
        let set = given.map(|(name, value)| Some((text(name)?, text(value?)?)));
        let mut env: BTreeMap<String, String> = set.collect::<Option<_>>()?;
        env.extend(names);
        (is_python && is_plain && command.get_current_dir().is_none()).then(|| Self {
            interpreter: interpreter.into(),
            args: args.to_vec(),
            env,
        })
    }

    /// What Python runs, without its arguments.
    fn target(&self) -> impl Iterator<Item = OsString> {
        let n_words = if self.args[0] == "-m" { 2 } else { 1 };
        self.args.iter().take(n_words).map(OsString::from)
    }
}

fn text(word: &OsStr) -> Option<String> {
    Some(word.to_str()?.to_owned())
}

/// The words of a shell's command line without its variables at the front (`env NAME=VALUE …`),
/// if a shell would do nothing but start them.
fn split(line: &str) -> Option<(Vec<String>, BTreeMap<String, String>)> {
    if line.contains(|c| SHELL.contains(c)) {
        return None;
    }
    let mut words = shlex::split(line)?;
    let mut env = BTreeMap::new();
    if words.first().is_some_and(|word| word == "env") {
        words.remove(0);
        while let Some((name, value)) = words.first().and_then(|word| word.split_once('=')) {
            env.insert(name.to_owned(), value.to_owned());
            words.remove(0);
        }
    }
    Some((words, env))
}

impl ForkServer {
    /// Starts a server for the Python programs of a job; `command` is one of them. None if they
    /// are not Python, or cannot be forked.
    pub(crate) fn start(spec: &JobSpec, command: &Command) -> Option<Self> {
        let is_local = spec.distribution_strategy == Strategy::Local;
        let is_python = models::is_python(spec) || spec.is_custom_loop();
        if !spec.fork_workers || is_local || !is_python {
            return None;
        }
        let program = Program::of(command)?;
        let imported = if spec.is_custom_loop() {
            program.target().collect()
        } else {
            vec![OsString::from(&spec.model_def), OsString::from(&spec.model_zoo)]
        };
        // Packages may read variables when they are imported.
        Self::serve(program.interpreter, &imported, program.env, LIMIT).ok()
    }

    fn serve(
        interpreter: OsString,
        imported: &[OsString],
        environment: BTreeMap<String, String>,
        limit: Duration,
    ) -> io::Result<Self> {
        let (socket, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        let process = Command::new(&interpreter)
            .args(["-m", MODULE])
            .args(imported)
            .envs(environment)
            .envs(custom_loop::worker_variables())
            .stdin(theirs)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // Ctrl-C in the terminal is for the supervisor alone.
            .process_group(0)
            .spawn()?;
        let state = Arc::new(Mutex::new(State::default()));
        #[cfg(test)]
        let pid = process.id();
        let (read, shared) = (socket.try_clone()?, Arc::clone(&state));
        std::thread::Builder::new()
            .name("fork-server".into())
            .spawn(move || follow(process, &read, &shared, limit))?;
        Ok(Self {
            inner: Arc::new(Inner {
                #[cfg(test)]
                pid,
                socket,
                interpreter,
                state,
            }),
        })
    }

    #[cfg(test)]
    pub(crate) fn pid(&self) -> u32 {
        self.inner.pid
    }

    /// Starts a program. Returns None if the server cannot; otherwise, the program runs when the
    /// result arrives, and cannot be forked if the channel is closed without one.
    pub(crate) fn fork(
        &self,
        program: &Program,
        stdio: [&OwnedFd; 3],
        leads_group: bool,
    ) -> Option<oneshot::Receiver<Started>> {
        let Inner { socket, interpreter, state, .. } = &*self.inner;
        if program.interpreter != *interpreter {
            return None;
        }
        let (answer, started) = oneshot::channel();
        let id = {
            let mut state = lock(state);
            if state.is_lost {
                return None;
            }
            state.next_id += 1;
            let starting = Starting { answer, since: Instant::now(), _parent: Adopting::begin()? };
            let id = state.next_id;
            state.starting.insert(id, starting);
            id
        };
        let request = Request { id, args: &program.args, env: &program.env, leads_group };
        let request = serde_json::to_vec(&request).ok()?;
        if send(socket, &request, stdio).is_err() {
            lock(state).starting.remove(&id);
            return None;
        }
        Some(started)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // The thread that reads has a copy of the socket, and kills the server.
        let _already_closed = shutdown(&self.socket, Shutdown::Both);
    }
}

impl Adopting {
    fn begin() -> Option<Self> {
        let mut n = N_ADOPTING.lock().expect("nothing panics while it is held");
        if *n == 0 {
            set_child_subreaper(Some(Pid::INIT)).ok()?;
        }
        *n += 1;
        Some(Self)
    }
}

impl Drop for Adopting {
    fn drop(&mut self) {
        let mut n = N_ADOPTING.lock().expect("nothing panics while it is held");
        *n -= 1;
        if *n == 0 {
            let _cannot_fail = set_child_subreaper(None);
        }
    }
}

impl Started {
    pub(crate) fn pid(&self) -> u32 {
        self.pid.as_raw_nonzero().get().cast_unsigned()
    }

    pub(crate) fn try_wait(&mut self) -> Option<Ended> {
        let how = match waitpid(Some(self.pid), WaitOptions::NOHANG) {
            Ok(None) | Err(Errno::INTR) => return None,
            Ok(Some((_, status))) => how_it_ended(ExitStatus::from_raw(status.as_raw())),
            // It is not our child, and has therefore ended itself.
            Err(_) => Ended::Signal(Signal::KILL.as_raw()),
        };
        self.has_ended = true;
        Some(how)
    }

    pub(crate) async fn wait(&mut self) -> io::Result<Ended> {
        let mut changes = signal(SignalKind::child())?;
        loop {
            if let Some(how) = self.try_wait() {
                return Ok(how);
            }
            changes.recv().await;
        }
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        if self.has_ended {
            return;
        }
        let pid = self.pid;
        let _already_ended = kill_process(pid, Signal::KILL);
        // Its end may take a moment.
        let reap = move || waitpid(Some(pid), WaitOptions::empty());
        let _left_to_the_system = std::thread::Builder::new().name("reaper".into()).spawn(reap);
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().expect("nothing panics while it is held")
}

/// Sends without waiting: a server that reads nothing counts as one that cannot fork.
fn send(socket: &OwnedFd, request: &[u8], stdio: [&OwnedFd; 3]) -> rustix::io::Result<()> {
    let fds = stdio.map(AsFd::as_fd);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    ancillary.push(SendAncillaryMessage::ScmRights(&fds));
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    sendmsg(socket, &[IoSlice::new(request)], &mut ancillary, flags).map(drop)
}

/// Passes the server's messages on until it is gone, or hangs.
fn follow(mut process: Child, socket: &OwnedFd, state: &Mutex<State>, limit: Duration) {
    while let Some(Message { obstacle, id, pid }) = receive(socket, state, limit) {
        if let Some(why) = obstacle {
            tracing::debug!(why, "workers are not forked");
            break;
        }
        let starting = {
            let mut state = lock(state);
            state.ready_at.get_or_insert_with(Instant::now);
            state.starting.remove(&id)
        };
        if let Some((starting, pid)) = starting.zip(Pid::from_raw(pid)) {
            let forked = Started { pid, has_ended: false };
            // Without a receiver, it is dropped.
            let _unwanted = starting.answer.send(forked);
        }
    }
    lock(state).is_lost = true;
    let _closed = shutdown(socket, Shutdown::Both);
    let _already_exited = process.kill();
    // Now that it cannot fork any more.
    lock(state).starting.clear();
    let group = Pid::from_child(&process);
    let _reaped = process.wait();
    // What it was forking is ours by now. It exits by itself, or has left the group of the server
    // because it runs a program.
    let deadline = Instant::now() + LIMIT;
    let _left = before(deadline, || match waitpgid(group, WaitOptions::NOHANG) {
        Ok(_) | Err(Errno::INTR) => Ok(None),
        Err(_none_left) => Ok(Some(())),
    });
}

/// The next message. None if the server is gone, or if a request has waited too long.
fn receive(socket: &OwnedFd, state: &Mutex<State>, limit: Duration) -> Option<Message> {
    // A request that comes later has a later end.
    let left = || {
        let state = lock(state);
        let since = state.starting.first_key_value().map(|(_, starting)| starting.since);
        let (since, limit) = match state.ready_at {
            Some(ready_at) => (since.map(|since| since.max(ready_at)), limit),
            None => (since, limit * IMPORTS),
        };
        limit.saturating_sub(since.map(|since| since.elapsed()).unwrap_or_default())
    };
    loop {
        let mut fds = [PollFd::new(socket, PollFlags::IN)];
        match poll(&mut fds, Some(&Timespec::try_from(left()).ok()?)) {
            Ok(0) if left().is_zero() => return None,
            Ok(0) | Err(Errno::INTR) => {}
            Ok(_) => break,
            Err(_) => return None,
        }
    }
    let mut bytes = [0; MAX_MESSAGE];
    let (_, n) = recv(socket, &mut bytes, RecvFlags::empty()).ok()?;
    serde_json::from_slice(&bytes[..n]).ok()
}

#[cfg(test)]
pub(crate) mod tests {
    use std::path::PathBuf;

    use super::*;

    const PACKAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../python");

    /// A server of the package in this repository, for a file with this content.
    pub(crate) fn server(folder: &Path, source: &str) -> (ForkServer, PathBuf) {
        server_within(LIMIT, folder, source)
    }

    pub(crate) fn server_within(
        limit: Duration,
        folder: &Path,
        source: &str,
    ) -> (ForkServer, PathBuf) {
        let file = folder.join("program.py");
        std::fs::write(&file, source).unwrap();
        let environment = BTreeMap::from([("PYTHONPATH".to_owned(), PACKAGE.to_owned())]);
        let imported = [file.clone().into_os_string()];
        let forks = ForkServer::serve("python3".into(), &imported, environment, limit);
        (forks.unwrap(), file)
    }

    fn shell(line: &str) -> Command {
        let mut command = Command::new("sh");
        command.arg("-c").arg(line).env("A", "b");
        command
    }

    #[test]
    fn a_program_is_what_python_would_run() {
        let of = |command: &Command| {
            let Program { interpreter, args, env } = Program::of(command)?;
            Some((interpreter.into_string().unwrap(), args.join("|"), env.len()))
        };
        let found = |interpreter: &str, args: &str, n_variables| {
            Some((interpreter.to_owned(), args.to_owned(), n_variables))
        };
        let mut own = Command::new("/x/bin/python3.11");
        own.args(["-m", "elasticdl", "worker"]);
        assert_eq!(of(&own), found("/x/bin/python3.11", "-m|elasticdl|worker", 0));
        // A variable that is not there need not be removed; one that is would be in the fork.
        own.env_remove("NO_SUCH_VARIABLE");
        assert_eq!(of(&own), found("/x/bin/python3.11", "-m|elasticdl|worker", 0));
        own.env_remove("PATH");
        assert_eq!(of(&own), None);
        let script = shell("exec python train.py '--name=a b' -x");
        assert_eq!(of(&script), found("python", "train.py|--name=a b|-x", 1));
        let script = shell("exec env ELASTICDL_STEP=python C=d python3 train.py");
        assert_eq!(of(&script), found("python3", "train.py", 3));
        for line in [
            "exec python train.py $HOME",
            "exec python train.py; true",
            "exec python train.py > log",
            "exec python -O train.py",
            "exec python",
            "exec python -m",
            "exec ./train.py",
            "exec torchrun train.py",
            "python train.py",
        ] {
            assert_eq!(of(&shell(line)), None, "{line}");
        }
    }

    #[test]
    fn a_program_runs_to_its_end_forked_or_spawned() {
        let folder = tempfile::tempdir().unwrap();
        let source = "import sys\nprint(sys.stdin.read())\nsys.exit('why')";
        let (forks, file) = server(folder.path(), source);
        for forks in [Some(&forks), None] {
            let mut command = Command::new("python3");
            command.arg(&file);
            let ran = run(forks, command, b"text", Duration::from_secs(60)).unwrap().unwrap();
            let Finished { how, stdout, stderr } = ran;
            assert_eq!((how, &*stdout, &*stderr), (Ended::Exit(1), "text\n", "why\n"));
        }
        assert_eq!(lock(&forks.inner.state).next_id, 1, "it was not forked");
    }

    #[test]
    fn packages_are_imported_with_the_variables_of_the_program() {
        let folder = tempfile::tempdir().unwrap();
        let packages = folder.path().join("site-packages");
        std::fs::create_dir(&packages).unwrap();
        let package = "import os\nWHEN = os.environ.get('ELASTICDL_WORLD_SIZE', 'too early')\n\
                       GIVEN = os.environ.get('GIVEN', 'too early')\nPID = os.getpid()";
        std::fs::write(packages.join("reads_variables.py"), package).unwrap();
        let file = folder.path().join("program.py");
        let source =
            "import reads_variables as r, os\nprint(r.WHEN, r.GIVEN, r.PID == os.getpid())";
        std::fs::write(&file, source).unwrap();
        let (packages, file) = (packages.display(), file.display());
        let spec = JobSpec {
            job_command: format!("env GIVEN=before PYTHONPATH={PACKAGE}:{packages} python3 {file}"),
            num_workers: 3,
            ..JobSpec::default()
        };
        let forks = ForkServer::start(&spec, &custom_loop::command(&spec)).unwrap();
        let limit = Duration::from_secs(60);
        let ran = run(Some(&forks), custom_loop::command(&spec), b"", limit).unwrap().unwrap();
        assert_eq!((&*ran.stdout, &*ran.stderr), ("3 before False\n", ""));
    }

    #[test]
    fn a_program_is_spawned_if_the_server_hangs() {
        let folder = tempfile::tempdir().unwrap();
        let (forks, file) = server_within(Duration::from_millis(100), folder.path(), "print(1)");
        let stopped = Pid::from_raw(forks.pid().cast_signed()).unwrap();
        kill_process(stopped, Signal::STOP).unwrap();
        let mut command = Command::new("python3");
        command.arg(&file);
        let ran = run(Some(&forks), command, b"", Duration::from_secs(60)).unwrap().unwrap();
        assert_eq!((ran.how, &*ran.stdout), (Ended::Exit(0), "1\n"));
    }

    /// The processes of a group, also those that have ended and are not reaped.
    fn n_in_group(group: u32) -> usize {
        let is_one = |stat: &str| {
            let fields = stat.rsplit_once(") ").map(|(_, fields)| fields.split(' '));
            fields.and_then(|mut fields| fields.nth(2)) == Some(&*group.to_string())
        };
        let all = std::fs::read_dir("/proc").unwrap().flatten();
        let stats = all.filter_map(|it| std::fs::read_to_string(it.path().join("stat")).ok());
        stats.filter(|stat| is_one(stat)).count()
    }

    #[test]
    fn what_a_server_forks_when_it_is_killed_is_reaped() {
        let folder = tempfile::tempdir().unwrap();
        let packages = folder.path().join("site-packages");
        std::fs::create_dir(&packages).unwrap();
        // Each process that is forked kills the server.
        let package = "import os, signal\nSERVER = os.getpid()\n\
                       os.register_at_fork(after_in_child=lambda: os.getppid() == SERVER and \
                       os.kill(SERVER, signal.SIGKILL))";
        std::fs::write(packages.join("kills_servers.py"), package).unwrap();
        let file = folder.path().join("program.py");
        std::fs::write(&file, "import kills_servers\nprint(1)").unwrap();
        let path = format!("{PACKAGE}:{}", packages.display());
        let environment = BTreeMap::from([("PYTHONPATH".to_owned(), path)]);
        let imported = [file.clone().into_os_string()];
        let forks = ForkServer::serve("python3".into(), &imported, environment.clone(), LIMIT);
        let forks = forks.unwrap();
        let mut command = Command::new("python3");
        command.arg(&file).envs(environment);
        let ran = run(Some(&forks), command, b"", Duration::from_secs(60)).unwrap().unwrap();
        assert_eq!((ran.how, &*ran.stdout), (Ended::Exit(0), "1\n"), "it was spawned");
        assert!(lock(&forks.inner.state).is_lost, "the server was killed");
        let deadline = Instant::now() + Duration::from_secs(60);
        while n_in_group(forks.pid()) > 0 {
            assert!(Instant::now() < deadline, "a process was not reaped");
        }
    }

    #[test]
    fn a_program_that_takes_too_long_is_killed() {
        let folder = tempfile::tempdir().unwrap();
        let pid = folder.path().join("pid");
        let source = format!(
            "import os, time\nopen('{}', 'w').write(str(os.getpid()))\ntime.sleep(600)",
            pid.display()
        );
        let (forks, file) = server(folder.path(), &source);
        for forks in [Some(&forks), None] {
            let mut command = Command::new("python3");
            command.arg(&file);
            // Until it runs, it has no number.
            let limit = Duration::from_secs(1);
            while run(forks, Command::new("true"), b"", limit).unwrap().is_none() {}
            assert!(run(forks, command, b"", limit).unwrap().is_none());
            let Ok(number) = std::fs::read_to_string(&pid) else { continue };
            let deadline = Instant::now() + Duration::from_secs(60);
            let is_there = || {
                let stat = std::fs::read_to_string(format!("/proc/{number}/stat"));
                stat.is_ok_and(|stat| !stat.contains(") Z "))
            };
            while is_there() {
                assert!(Instant::now() < deadline, "it was not killed");
            }
        }
    }
}
