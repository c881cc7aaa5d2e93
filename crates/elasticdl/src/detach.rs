// SPDX-License-Identifier: Apache-2.0
//! `--detach`: runs a job in a background process, which outlives this one and its terminal.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{BufRead as _, BufReader, Write};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::Context as _;
use edl_core::spec::JobType;
use rustix::process::{Signal, set_parent_process_death_signal, setsid};
use rustix::stdio::{dup2_stderr, dup2_stdout};
use serde::{Deserialize, Serialize};

use crate::cli::{RunFlags, SuperviseArgs};
use crate::console::{self, eprint};
use crate::exit::{Exit, not_found};
use crate::flags::Given;
use crate::host;
use crate::jobs::{Home, Job};
use crate::submit::{self, Ready};
use crate::top;
use crate::ui::Ui;

const POLL: Duration = Duration::from_millis(50);

/// How a job in the background is shown.
pub(crate) enum Shown {
    ByName,
    FullScreen,
}

/// A job that has no folder yet.
#[derive(Serialize, Deserialize)]
struct New {
    kind: JobType,
    given: Given,
    job_dir: Option<PathBuf>,
}

/// Whether these flags ask for a job in the background.
pub(crate) fn wanted(run: &RunFlags) -> Option<Shown> {
    let is_full_screen = run.tui && top::can_show();
    run.detach.then_some(Shown::ByName).or(is_full_screen.then_some(Shown::FullScreen))
}

impl Shown {
    pub(crate) fn show(self, job: Job, out: &mut dyn Write) -> anyhow::Result<Exit> {
        if matches!(self, Self::FullScreen) {
            return top::watched(&job);
        }
        let name = job.name().unwrap_or_default();
        writeln!(out, "{name}")?;
        eprint(format_args!(
            "job running in the background; watch it with `elasticdl attach {name}`"
        ));
        Ok(Exit::Ok)
    }
}

/// Starts a new job. The background process describes it, too, because the process that describes it
/// can become its first worker. If it is refused, the background process has said why.
pub(crate) fn start_new(
    kind: JobType,
    given: Given,
    dir: Option<&Path>,
) -> anyhow::Result<Result<Job, Exit>> {
    let new = New { kind, given, job_dir: dir.map(Path::to_owned) };
    let mut command = supervise_command()?;
    command.args(console::is_quiet().then_some("--quiet"));
    command.arg("--").args(host::entered());
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().context("cannot start the job in the background")?;
    let pipes = child.stdin.take().zip(child.stdout.take());
    let (mut stdin, stdout) = pipes.context("the background process has no pipes")?;
    // It may have ended already; then its exit code says so.
    let _ended = serde_json::to_writer(&mut stdin, &new);
    drop(stdin);
    let mut place = Vec::new();
    BufReader::new(stdout).read_until(b'\n', &mut place)?;
    let place = place.strip_suffix(b"\n").map(|place| Path::new(OsStr::from_bytes(place)));
    match place.and_then(Job::open) {
        Some(job) => wait(child, &job).map(|()| Ok(job)),
        None => {
            let status = child.wait().context("cannot watch the job")?;
            anyhow::ensure!(status.code().is_some(), "the job did not start ({status})");
            Ok(Err(status.code().and_then(Exit::from_code).unwrap_or(Exit::Failed)))
        }
    }
}

/// Starts a job that has a folder, and waits until its master runs.
pub(crate) fn start(ready: Ready) -> anyhow::Result<Job> {
    let Ready { job, hold, resume, command: entered, .. } = ready;
    let mut command = supervise_command()?;
    command.arg("--job_dir").arg(job.dir());
    command.args(resume.then_some("--resume"));
    command.arg("--").args(entered);
    let log = log(&job)?;
    command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
    // From here on, the background process holds the job.
    drop(hold);
    let child = command.spawn().context("cannot start the job in the background")?;
    wait(child, &job)?;
    Ok(job)
}

fn supervise_command() -> anyhow::Result<Command> {
    let (program, first_args) = host::get().command.split_first().context("no program")?;
    let mut command = Command::new(program);
    command.args(first_args).arg("supervise");
    Ok(command)
}

fn log(job: &Job) -> anyhow::Result<File> {
    let path = job.paths().supervisor_log();
    let log = File::options().create(true).append(true).mode(0o600).open(&path);
    log.with_context(|| format!("cannot write `{}`", path.display()))
}

/// Waits until the job's master runs.
fn wait(mut child: Child, job: &Job) -> anyhow::Result<()> {
    loop {
        // Compared by process id, because two files can have the same time.
        let is_its = job.supervisor().is_some_and(|info| info.pid == child.id());
        if is_its && job.fresh_status().is_some() {
            return Ok(());
        }
        if let Some(status) = child.try_wait().context("cannot watch the job")? {
            // A short job may have succeeded before the first check.
            if status.success() {
                return Ok(());
            }
            crate::logs::last_errors(job).iter().for_each(console::error);
            let log = job.paths().supervisor_log();
            anyhow::bail!("the job did not start ({status}); see `{}`", log.display());
        }
        std::thread::sleep(POLL);
    }
}

/// The background process itself.
pub(crate) fn supervise(args: &SuperviseArgs, out: &mut dyn Write) -> anyhow::Result<Exit> {
    let ready = match &args.job_dir {
        Some(job_dir) => {
            detach_from_terminal()?;
            let job = Job::open(job_dir)
                .ok_or_else(|| not_found(format!("no job found in `{}`", job_dir.display())))?;
            let hold = submit::hold(&job)?;
            let command = args.command.clone();
            Ready { job, hold, resume: args.resume, forks: None, first: None, command }
        }
        None => Ready { command: args.command.clone(), ..new()? },
    };
    let ui = Ui::new(&ready.job);
    submit::supervise(ready, ui, out)
}

/// Describes and prepares the job on standard input. Until it is ready, this process ends with the
/// command that has started it.
fn new() -> anyhow::Result<Ready> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    let New { kind, given, job_dir } = serde_json::from_reader(std::io::stdin().lock())
        .context("expected a job in JSON on standard input")?;
    crate::telemetry::start(crate::log_level(&given));
    let ready = submit::new(&Home::from_env()?, kind, given, job_dir.as_deref())?;
    let log = log(&ready.job)?;
    set_parent_process_death_signal(None)?;
    detach_from_terminal()?;
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(&[ready.job.dir().as_os_str().as_bytes(), b"\n"].concat())?;
    stdout.flush()?;
    dup2_stdout(&log)?;
    dup2_stderr(&log)?;
    console::set_quiet(false);
    Ok(ready)
}

/// Otherwise, the job would end with the terminal.
fn detach_from_terminal() -> anyhow::Result<()> {
    setsid().map(drop).context("cannot detach from the terminal")
}
