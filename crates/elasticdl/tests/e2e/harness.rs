// SPDX-License-Identifier: Apache-2.0
//! Starts jobs in a separate folder, inspects and kills them, and reads their results.

use std::fs::File;
use std::io::{Read as _, Seek as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

use edl_core::spec::JobSpec;
use rustix::process::{Pid, Signal, kill_process};
use safetensors::SafeTensors;
use serde_json::Value;

use crate::oracle;

/// No test waits longer than this for anything, so a job that hangs fails its test.
pub(crate) const PATIENCE: Duration = Duration::from_secs(180);
/// Records of the shipped test data.
pub(crate) const N_RECORDS: u64 = 2000;
const POLL: Duration = Duration::from_millis(20);
/// The variable with the folder that all tests of a run share; each test has its own process.
const SHARED: &str = "ELASTICDL_TEST_SHARED";

/// A home for jobs, removed with everything in it.
pub(crate) struct Home {
    folder: tempfile::TempDir,
}

/// A job in the foreground, with its own supervisor.
pub(crate) struct Running {
    pub(crate) name: String,
    home: PathBuf,
    child: Child,
}

/// A process of a job.
#[derive(Clone, Debug)]
#[allow(dead_code, reason = "shown when a test fails")]
pub(crate) struct Instance {
    pub(crate) role: String,
    pub(crate) id: u64,
    pub(crate) pid: i32,
    pub(crate) state: String,
}

impl Home {
    pub(crate) fn new() -> Self {
        Self { folder: tempfile::tempdir().expect("a folder for the test") }
    }

    pub(crate) fn path(&self) -> &Path {
        self.folder.path()
    }

    pub(crate) fn job_dir(&self, name: &str) -> PathBuf {
        self.path().join("jobs").join(name)
    }

    /// The command with this home.
    pub(crate) fn command(&self, args: &[&str]) -> Command {
        command(self.path(), args)
    }

    /// Runs a command until it exits.
    pub(crate) fn run(&self, args: &[&str]) -> Output {
        ended(self.command(args))
    }

    /// Runs a job until it ends; it must succeed.
    pub(crate) fn train(&self, name: &str, args: &[&str]) {
        let name_flag = format!("--job_name={name}");
        self.stdout(&[&["train", &name_flag], args].concat());
    }

    /// The status of a job, from its master or from its file.
    pub(crate) fn status(&self, name: &str) -> Value {
        serde_json::from_str(&self.stdout(&["status", name, "--json"])).expect("JSON")
    }

    /// Waits until the status of a job, which this test did not start in the foreground, fulfils
    /// `condition`.
    pub(crate) fn wait_until(&self, name: &str, what: &str, condition: impl Fn(&Value) -> bool) {
        let start = Instant::now();
        let mut status = self.status(name);
        while !condition(&status) {
            assert!(start.elapsed() < PATIENCE, "timed out waiting for {what}: {status:#}");
            std::thread::sleep(POLL);
            status = self.status(name);
        }
    }

    /// The description of a job.
    pub(crate) fn spec(&self, name: &str) -> JobSpec {
        let spec = std::fs::read(self.job_dir(name).join("job.json")).expect("a job");
        serde_json::from_slice(&spec).expect("a job")
    }

    /// All entries of the jobs folder.
    pub(crate) fn jobs(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.path().join("jobs")).into_iter().flatten().flatten();
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
    }

    /// Runs a command that must succeed; its standard output.
    pub(crate) fn stdout(&self, args: &[&str]) -> String {
        let output = self.run(args);
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("text")
    }

    /// Starts a job in the foreground.
    pub(crate) fn start(&self, name: &str, args: &[&str]) -> Running {
        let log = self.path().join(format!("{name}.stderr"));
        let mut command = self.command(args);
        command.stdout(Stdio::null()).stdin(Stdio::null());
        command.stderr(File::options().create(true).append(true).open(log).expect("a log file"));
        let child = command.spawn().expect("the command starts");
        Running { name: name.into(), home: self.path().into(), child }
    }
}

impl Drop for Home {
    /// A failed test must leave no processes behind, so this kills background supervisors. It
    /// checks the environment of a process, because the PID may have been reused.
    fn drop(&mut self) {
        let ours = format!("ELASTICDL_HOME={}", self.path().display());
        for name in self.jobs() {
            let info = std::fs::read(self.job_dir(&name).join("supervisor.json"));
            let info: Value = serde_json::from_slice(&info.unwrap_or_default()).unwrap_or_default();
            let Some(pid) = info["pid"].as_i64().and_then(|pid| i32::try_from(pid).ok()) else {
                continue;
            };
            let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            let is_ours = environment.split(|byte| *byte == 0).any(|word| word == ours.as_bytes());
            if is_ours {
                try_signal(pid, Signal::KILL);
            }
        }
    }
}

impl Running {
    pub(crate) fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).expect("a process id")
    }

    /// The status, from the master or from its file.
    pub(crate) fn status(&self) -> Option<Value> {
        let output = command(&self.home, &["status", &self.name, "--json"]).output().ok()?;
        serde_json::from_slice(&output.stdout).ok()
    }

    /// Waits until the status fulfils `condition`.
    pub(crate) fn wait_until(&mut self, what: &str, condition: impl Fn(&Value) -> bool) -> Value {
        let start = Instant::now();
        loop {
            if let Some(status) = self.status()
                && condition(&status)
            {
                return status;
            }
            if let Some(ended) = self.child.try_wait().expect("a child") {
                panic!("the job ended ({ended}) before {what}:\n{}", self.log());
            }
            assert!(start.elapsed() < PATIENCE, "timed out waiting for {what}:\n{}", self.log());
            std::thread::sleep(POLL);
        }
    }

    pub(crate) fn instances(&self) -> Vec<Instance> {
        self.status().map(|status| instances(&status)).unwrap_or_default()
    }

    pub(crate) fn is_running(&mut self) -> bool {
        self.child.try_wait().expect("a child").is_none()
    }

    /// Waits until the job ends.
    pub(crate) fn wait(&mut self) -> ExitStatus {
        let start = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().expect("a child") {
                return status;
            }
            if start.elapsed() > PATIENCE {
                let status = self.status();
                self.kill_all();
                panic!("the job did not end; status {status:#?}\n{}", self.log());
            }
            std::thread::sleep(POLL);
        }
    }

    pub(crate) fn wait_for_success(&mut self) {
        let status = self.wait();
        assert!(status.success(), "{status}:\n{}", self.log());
    }

    /// All output of the job, for the message of a failed test.
    pub(crate) fn log(&self) -> String {
        let mut text = String::new();
        let mut add = |path: &Path| {
            let mut content = String::new();
            if File::open(path).and_then(|mut file| file.read_to_string(&mut content)).is_ok() {
                let skip = content.lines().count().saturating_sub(40);
                let tail: Vec<&str> = content.lines().skip(skip).collect();
                text.push_str(&format!("--- {}\n{}\n", path.display(), tail.join("\n")));
            }
        };
        add(&self.home.join(format!("{}.stderr", self.name)));
        let logs = self.home.join("jobs").join(&self.name).join("logs");
        for entry in std::fs::read_dir(logs).into_iter().flatten().flatten() {
            add(&entry.path());
        }
        text
    }

    /// Sends SIGKILL to all processes at once, to the supervisor first.
    pub(crate) fn kill_all(&mut self) {
        let all = self.instances();
        try_signal(self.pid(), Signal::KILL);
        for instance in all {
            // It may have exited with its supervisor.
            try_signal(instance.pid, Signal::KILL);
        }
        self.child.wait().expect("a child");
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // A failed test must leave no processes behind; children exit when their supervisor does.
        if self.is_running() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// Runs a command that exits by itself, with a time limit, and returns its output.
pub(crate) fn ended(mut command: Command) -> Output {
    let capture = || tempfile::tempfile().expect("a file for the output");
    let (stdout, stderr) = (capture(), capture());
    let shared = |file: &File| file.try_clone().expect("another handle");
    command.stdin(Stdio::null()).stdout(shared(&stdout)).stderr(shared(&stderr));
    let mut child = command.spawn().expect("the command starts");
    let start = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().expect("a child") {
            break status;
        }
        if start.elapsed() > PATIENCE {
            child.kill().expect("a child");
            child.wait().expect("a child");
            panic!("{command:?} did not exit:\n{}", String::from_utf8_lossy(&content(stderr)));
        }
        std::thread::sleep(POLL);
    };
    Output { status, stdout: content(stdout), stderr: content(stderr) }
}

fn content(mut file: File) -> Vec<u8> {
    let mut bytes = Vec::new();
    file.rewind().expect("a file");
    file.read_to_end(&mut bytes).expect("a file");
    bytes
}

fn command(home: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_elasticdl"));
    command.args(args).env("ELASTICDL_HOME", home).env_remove("RUST_LOG");
    command
}

pub(crate) fn instances(status: &Value) -> Vec<Instance> {
    let instance = |value: &Value| {
        Some(Instance {
            role: value["role"].as_str()?.into(),
            id: value["id"].as_u64()?,
            pid: i32::try_from(value["pid"].as_i64()?).ok()?,
            state: value["state"].as_str()?.into(),
        })
    };
    status["instances"].as_array().into_iter().flatten().filter_map(instance).collect()
}

/// Sends a signal to a process that must be there to get it: otherwise, a test would pass without its
/// fault.
pub(crate) fn signal(pid: i32, signal: Signal) {
    assert!(try_signal(pid, signal), "process {pid} had already exited");
}

/// Sends a signal; returns whether the process was still there to get it.
pub(crate) fn try_signal(pid: i32, signal: Signal) -> bool {
    is_alive(pid) && Pid::from_raw(pid).is_some_and(|pid| kill_process(pid, signal).is_ok())
}

pub(crate) fn is_alive(pid: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // A zombie has exited, but its parent has not waited for it yet.
    stat.rsplit(')').next().is_some_and(|rest| !rest.is_empty() && !rest.trim().starts_with('Z'))
}

/// A result that several tests compare with. The first one that needs it computes it, if the run
/// has a folder to share it in.
pub(crate) fn shared(name: &str, compute: impl FnOnce() -> String) -> String {
    let Some(folder) = std::env::var_os(SHARED) else { return compute() };
    let path = Path::new(&folder).join(name);
    let file = File::options().create(true).read(true).append(true).open(path);
    let mut file = file.expect("a file in the shared folder");
    file.lock().expect("the only test that computes it");
    let mut result = String::new();
    file.read_to_string(&mut result).expect("a shared result");
    if result.is_empty() {
        result = compute();
        file.write_all(result.as_bytes()).expect("a file in the shared folder");
    }
    result
}

/// The data shipped with the repository.
pub(crate) fn shipped(part: &str) -> String {
    format!("{}/../../data/fashion_mnist/{part}", env!("CARGO_MANIFEST_DIR"))
}

/// The data shipped with the repository, as a flag.
pub(crate) fn shipped_as(flag: &str, part: &str) -> String {
    format!("--{flag}={}", shipped(part))
}

/// A port that is currently free.
pub(crate) fn free_port() -> u16 {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    listener.local_addr().expect("an address").port()
}

/// Prints a note to the output of the test.
#[expect(clippy::print_stdout, reason = "the harness shows it with `--show-output`")]
pub(crate) fn print_note(note: &str) {
    println!("{note}");
}

pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// The number of running processes with this role.
pub(crate) fn n_running(status: &Value, role: &str) -> usize {
    let is_there = |instance: &&Instance| instance.role == role && instance.state != "gone";
    instances(status).iter().filter(is_there).count()
}

/// Whether the job has written a checkpoint.
pub(crate) fn has_checkpoint(status: &Value) -> bool {
    status["last_checkpoint"].as_str().is_some_and(|checkpoint| !checkpoint.is_empty())
}

/// The result of the `count` model: how often each record was applied, and each dense total.
pub(crate) fn counts(output: &Path) -> (Vec<(i64, f32)>, Vec<f32>) {
    let bytes = std::fs::read(output.join("model.safetensors")).expect("an exported model");
    let tensors = SafeTensors::deserialize(&bytes).expect("a safetensors file");
    let floats = |name: &str| -> Vec<f32> {
        let data = tensors.tensor(name).expect(name).data().to_vec();
        data.chunks_exact(4).map(|c| f32::from_le_bytes([c[0], c[1], c[2], c[3]])).collect()
    };
    let ids = tensors.tensor("count.ids").expect("ids").data().to_vec();
    let ids = ids.chunks_exact(8).map(|c| i64::from_le_bytes(c.try_into().expect("eight bytes")));
    (ids.zip(floats("count.rows")).collect(), floats("total"))
}

/// Asserts that every record was trained once per epoch, with the oracle and with the audit.
pub(crate) fn assert_exactly_once(home: &Home, name: &str, epochs: u32, round: usize) {
    oracle::assert_counted(home, name, epochs, oracle::Step::Round(round));
    let audit: Value =
        serde_json::from_str(&home.stdout(&["audit", name, "--json"])).expect("JSON");
    let audited = audit["epochs"].as_array().expect("epochs");
    assert_eq!(audited.len(), epochs as usize, "{audit:#}");
    for epoch in audited {
        assert_eq!((&epoch["missing"], &epoch["duplicated"]), (&0.into(), &0.into()), "{audit:#}");
        assert_eq!(epoch["records"], N_RECORDS, "{audit:#}");
    }
}
