// SPDX-License-Identifier: Apache-2.0
//! `--detach`: runs a job in a background process, which outlives this one and its terminal.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt as _;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::Context as _;

use crate::cli::SuperviseArgs;
use crate::console::{self, eprint};
use crate::exit::{Exit, not_found};
use crate::host;
use crate::jobs::Job;
use crate::submit::{self, Ready};
use crate::ui::Ui;

const POLL: Duration = Duration::from_millis(50);

/// Starts the background process and waits until the job's master runs.
pub(crate) fn run(ready: Ready, out: &mut dyn Write) -> anyhow::Result<Exit> {
    let name = start(ready)?;
    writeln!(out, "{name}")?;
    eprint(format_args!("job running in the background; watch it with `elasticdl attach {name}`"));
    Ok(Exit::Ok)
}

/// The same without a message; the job's name.
pub(crate) fn start(ready: Ready) -> anyhow::Result<String> {
    let Ready { job, hold, resume, command: entered, .. } = ready;
    let log_path = job.paths().supervisor_log();
    let log = File::options().create(true).append(true).mode(0o600).open(&log_path);
    let log = log.with_context(|| format!("cannot write `{}`", log_path.display()))?;
    let (program, first_args) = host::get().command.split_first().context("no program")?;
    let mut command = Command::new(program);
    command.args(first_args).arg("supervise").arg("--job_dir").arg(job.dir());
    if resume {
        command.arg("--resume");
    }
    command.arg("--").args(entered);
    command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
    // From here on, the background process holds the job.
    drop(hold);
    let mut child = command.spawn().context("cannot start the job in the background")?;
    let name = job.name().unwrap_or_default();
    loop {
        // Compared by process id, because two files can have the same time.
        let is_its = job.supervisor().is_some_and(|info| info.pid == child.id());
        if is_its && job.fresh_status().is_some() {
            break;
        }
        if let Some(status) = child.try_wait().context("cannot watch the job")? {
            // A short job may have succeeded before the first check.
            if status.success() {
                break;
            }
            crate::logs::last_errors(&job).iter().for_each(console::error);
            anyhow::bail!("the job did not start ({status}); see `{}`", log_path.display());
        }
        std::thread::sleep(POLL);
    }
    Ok(name)
}

/// The background process itself.
pub(crate) fn supervise(args: &SuperviseArgs, out: &mut dyn Write) -> anyhow::Result<Exit> {
    let SuperviseArgs { job_dir, resume, command } = args;
    // Detached from the terminal, or the job would end with it.
    rustix::process::setsid().context("cannot detach from the terminal")?;
    let job = Job::open(job_dir)
        .ok_or_else(|| not_found(format!("no job found in `{}`", job_dir.display())))?;
    let hold = submit::hold(&job)?;
    let ui = Ui::new(&job);
    let command = command.clone();
    submit::supervise(Ready { job, hold, resume: *resume, forks: None, command }, ui, out)
}
