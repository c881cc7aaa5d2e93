// SPDX-License-Identifier: Apache-2.0
//! Starts Python programs as forks of a process that has imported their packages already
//! (`python/elasticdl/_fork_server.py`), so that all processes of a job together import them once.
//!
//! A caller must be able to start the program without it: where it cannot be forked, it is spawned.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut, Read as _, Seek as _, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use edl_core::platform::{Ended, WORKER_VARIABLES};
use edl_core::spec::{JobSpec, Strategy};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, Shutdown, SocketFlags, SocketType, recvmsg, sendmsg, shutdown,
    socketpair,
};
use rustix::process::{Signal, pidfd_send_signal};
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot::{self, error::TryRecvError};

use crate::{models, python};

const MODULE: &str = "elasticdl._fork_server";
const POLL: Duration = Duration::from_millis(5);
/// How often a program is looked at whose server is gone.
const ORPHAN_POLL: Duration = Duration::from_millis(50);
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
    process: Child,
    socket: OwnedFd,
    interpreter: OsString,
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    next_id: u64,
    /// It has exited, or cannot fork.
    is_lost: bool,
    starting: BTreeMap<u64, oneshot::Sender<Forked>>,
    running: BTreeMap<u32, oneshot::Sender<Ended>>,
}

/// A Python program: its interpreter's arguments, and what is added to the environment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Program {
    interpreter: OsString,
    args: Vec<String>,
    env: BTreeMap<String, String>,
}

/// A running program.
#[derive(Debug)]
pub(crate) struct Forked {
    pub(crate) pid: u32,
    /// Refers to this process, even after its number was given to another one.
    pub(crate) pidfd: OwnedFd,
    ended: oneshot::Receiver<Ended>,
}

#[derive(Serialize)]
struct Request<'a> {
    id: u64,
    args: &'a [String],
    env: &'a BTreeMap<String, String>,
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
    let fds = [stdin.try_clone()?.into(), stdout.try_clone()?.into(), stderr.try_clone()?.into()];
    let program = Program::of(&command);
    let forked =
        forks.zip(program).and_then(|(forks, program)| forks.fork(&program, fds.each_ref()));
    let how = match forked.and_then(|started| receive_before(deadline, started).ok()) {
        Some(Forked { pidfd, ended, .. }) => {
            let ended = receive_before(deadline, ended);
            if ended == Err(TryRecvError::Empty) {
                let _already_ended = pidfd_send_signal(&pidfd, Signal::KILL);
            }
            // How it ended is unknown if the server was lost.
            ended.or_else(|error| match error {
                TryRecvError::Closed => Ok(Ended::Exit(-1)),
                TryRecvError::Empty => Err(()),
            })
        }
        None => {
            let [stdout, stderr] = [stdout.try_clone()?, stderr.try_clone()?];
            let mut child = command.stdin(stdin).stdout(stdout).stderr(stderr).spawn()?;
            wait_before(deadline, &mut child)?.map(how_it_ended).ok_or(())
        }
    };
    let [stdout, stderr] = [text_of(stdout)?, text_of(stderr)?];
    Ok(how.ok().map(|how| Finished { how, stdout, stderr }))
}

fn receive_before<T>(
    deadline: Instant,
    mut channel: oneshot::Receiver<T>,
) -> Result<T, TryRecvError> {
    loop {
        match channel.try_recv() {
            Err(TryRecvError::Empty) if Instant::now() < deadline => std::thread::sleep(POLL),
            received => return received,
        }
    }
}

/// Waits for a child, and kills it at the deadline.
fn wait_before(deadline: Instant, child: &mut Child) -> io::Result<Option<ExitStatus>> {
    while Instant::now() < deadline {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        std::thread::sleep(POLL);
    }
    child.kill().and_then(|()| child.wait()).map(|_| None)
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
    threads: Option<u32>,
    id: Option<u64>,
    pid: u32,
    exit: Option<i32>,
    signal: Option<i32>,
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
        let set = command.get_envs().map(|(name, value)| Some((text(name)?, text(value?)?)));
        let mut env: BTreeMap<String, String> = set.collect::<Option<_>>()?;
        env.extend(names);
        (is_python && is_plain && command.get_current_dir().is_none()).then(|| Self {
            interpreter: interpreter.into(),
            args: args.to_vec(),
            env,
        })
    }

    /// The file whose imports come first in this program.
    fn file(&self) -> Option<PathBuf> {
        match self.args.as_slice() {
            [flag, module, ..] if flag == "-m" => {
                let path: PathBuf = module.split('.').collect();
                let files = [path.with_extension("py"), path.join("__main__.py")];
                files.into_iter().find(|file| file.is_file())
            }
            [file, ..] => Some(file.into()),
            [] => None,
        }
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
            vec![program.file()?.into()]
        } else {
            vec![OsString::from(&spec.model_def), OsString::from(&spec.model_zoo)]
        };
        Self::serve(program.interpreter, &imported, python::environment(spec)).ok()
    }

    fn serve(
        interpreter: OsString,
        imported: &[OsString],
        environment: Vec<(&'static str, String)>,
    ) -> io::Result<Self> {
        let (socket, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        let is_unset = |(name, _): &(&str, &str)| std::env::var_os(name).is_none();
        let process = Command::new(&interpreter)
            .args(["-m", MODULE])
            .args(imported)
            .envs(environment)
            .envs(WORKER_VARIABLES.into_iter().filter(is_unset))
            .stdin(theirs)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // Ctrl-C in the terminal is for the supervisor alone.
            .process_group(0)
            .spawn()?;
        let state = Arc::new(Mutex::new(State::default()));
        let (read, shared) = (socket.try_clone()?, Arc::clone(&state));
        std::thread::Builder::new()
            .name("fork-server".into())
            .spawn(move || follow(&read, &shared))?;
        Ok(Self { inner: Arc::new(Inner { process, socket, interpreter, state }) })
    }

    #[cfg(test)]
    pub(crate) fn pid(&self) -> u32 {
        self.inner.process.id()
    }

    /// Starts a program. Returns None if the server cannot; otherwise, the program runs when the
    /// result arrives, and cannot be forked if the channel is closed without one.
    pub(crate) fn fork(
        &self,
        program: &Program,
        stdio: [&OwnedFd; 3],
    ) -> Option<oneshot::Receiver<Forked>> {
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
            let id = state.next_id;
            state.starting.insert(id, answer);
            id
        };
        let request = Request { id, args: &program.args, env: &program.env };
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
        // The thread that reads has a copy of the socket.
        let _already_closed = shutdown(&self.socket, Shutdown::Both);
        // It would exit by itself, but only after its imports.
        let _already_exited = self.process.kill();
        let _reaped = self.process.wait();
    }
}

impl Forked {
    /// Waits for its end. How it ended is unknown if the server is gone.
    pub(crate) async fn ended(pidfd: OwnedFd, ended: oneshot::Receiver<Ended>) -> Ended {
        if let Ok(how) = ended.await {
            return how;
        }
        // It becomes readable when the process has ended.
        let is_running = || {
            let mut fds = [PollFd::new(&pidfd, PollFlags::IN)];
            poll(&mut fds, Some(&Timespec::default())) == Ok(0)
        };
        while is_running() {
            tokio::time::sleep(ORPHAN_POLL).await;
        }
        Ended::Exit(-1)
    }

    pub(crate) fn into_parts(self) -> (u32, OwnedFd, oneshot::Receiver<Ended>) {
        (self.pid, self.pidfd, self.ended)
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

/// Passes the server's messages on until it is gone.
fn follow(socket: &OwnedFd, state: &Mutex<State>) {
    while let Some((message, pidfd)) = receive(socket) {
        let mut state = lock(state);
        match message {
            Message { threads: Some(1), .. } => {}
            Message { threads: Some(n), .. } => {
                tracing::debug!(threads = n, "workers are not forked: an import starts threads");
                break;
            }
            Message { id: Some(id), pid, .. } => {
                let (ends, ended) = oneshot::channel();
                state.running.insert(pid, ends);
                if let (Some(started), Some(pidfd)) = (state.starting.remove(&id), pidfd) {
                    // Without a receiver, its standard input is closed, and it exits.
                    let _unwanted = started.send(Forked { pid, pidfd, ended });
                }
            }
            Message { id: None, pid, exit, signal, .. } => {
                let how = signal.map_or(Ended::Exit(exit.unwrap_or(-1)), Ended::Signal);
                if let Some(ends) = state.running.remove(&pid) {
                    let _unwanted = ends.send(how);
                }
            }
        }
    }
    *lock(state) = State { is_lost: true, ..State::default() };
    let _closed = shutdown(socket, Shutdown::Both);
}

/// The next message, with a file descriptor if it has one. None if the server is gone.
fn receive(socket: &OwnedFd) -> Option<(Message, Option<OwnedFd>)> {
    let mut bytes = [0; MAX_MESSAGE];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let read = loop {
        let slices = &mut [IoSliceMut::new(&mut bytes)];
        match recvmsg(socket, slices, &mut ancillary, RecvFlags::CMSG_CLOEXEC) {
            Err(rustix::io::Errno::INTR) => {}
            received => break received.ok()?.bytes,
        }
    };
    let fds = ancillary.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(fds) => Some(fds),
        RecvAncillaryMessage::ScmCredentials(_) | _ => None,
    });
    let fd = fds.flatten().next();
    Some((serde_json::from_slice(&bytes[..read]).ok()?, fd))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A server of the package in this repository, for a file with this content.
    pub(crate) fn server(folder: &Path, source: &str) -> (ForkServer, PathBuf) {
        let file = folder.join("program.py");
        std::fs::write(&file, source).unwrap();
        let package = concat!(env!("CARGO_MANIFEST_DIR"), "/../../python");
        let environment = vec![("PYTHONPATH", package.to_owned())];
        let imported = [file.clone().into_os_string()];
        (ForkServer::serve("python3".into(), &imported, environment).unwrap(), file)
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
