// SPDX-License-Identifier: Apache-2.0
//! `logs`: the log lines of a job's processes, in order of time.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use edl_core::platform::InstanceId;
pub(crate) use edl_master::log_files;

use crate::cli::LogsArgs;
use crate::cluster::{self, Target};
use crate::exit::{Exit, not_found};
use crate::jobs::Job;

const POLL: Duration = Duration::from_millis(100);

/// Runs the command.
pub(crate) fn run(args: &LogsArgs, out: &mut dyn Write) -> anyhow::Result<Exit> {
    let only = chosen_process(args);
    let job = match cluster::find(&args.job)? {
        Target::Local(job) => job,
        Target::Cluster(job) => {
            return cluster::logs::run(&job, only.as_deref(), args.follow, args.tail, out);
        }
    };
    let mut reader = Reader::new(&job, only.clone());
    // Checked before reading, so the last lines are still read.
    let mut is_running = job.is_running();
    let mut lines = reader.read()?;
    if reader.files.is_empty() && !(args.follow && is_running) {
        return Err(no_logs(&job, only.as_deref()));
    }
    if let Some(tail) = args.tail {
        lines.drain(..lines.len().saturating_sub(tail));
    }
    loop {
        for line in &lines {
            writeln!(out, "{line}")?;
        }
        out.flush()?;
        if !args.follow || !is_running {
            return Ok(Exit::Ok);
        }
        std::thread::sleep(POLL);
        is_running = job.is_running();
        lines = reader.read()?;
    }
}

/// The name of the only process to show.
fn chosen_process(args: &LogsArgs) -> Option<String> {
    match (args.worker, args.ps, args.master) {
        (Some(id), _, _) => Some(format!("worker-{id}")),
        (None, Some(id), _) => Some(format!("ps-{id}")),
        (None, None, true) => Some("master".into()),
        (None, None, false) => None,
    }
}

fn no_logs(job: &Job, only: Option<&str>) -> anyhow::Error {
    let name = job.name().unwrap_or_default();
    let all: Vec<String> = log_files(&job.paths().logs()).into_keys().collect();
    match only {
        Some(process) if !all.is_empty() => not_found(format!(
            "job `{name}` has no process `{process}`; logs are available for {}",
            all.join(", ")
        )),
        Some(_) | None => not_found(format!("job `{name}` has no logs yet")),
    }
}

/// Reads logs as they grow.
struct Reader {
    dir: PathBuf,
    only: Option<String>,
    files: BTreeMap<String, Followed>,
}

#[derive(Default)]
pub(crate) struct Followed {
    offset: u64,
    /// The line that is not complete yet.
    rest: Vec<u8>,
    /// The time of the last line that had one; lines without one belong to it.
    time: String,
}

impl Reader {
    fn new(job: &Job, only: Option<String>) -> Self {
        Self { dir: job.paths().logs(), only, files: BTreeMap::new() }
    }

    /// The new lines of all logs in the order of their times.
    fn read(&mut self) -> anyhow::Result<Vec<String>> {
        let mut lines = Vec::new();
        for (name, path) in log_files(&self.dir) {
            if self.only.as_ref().is_some_and(|only| *only != name) {
                continue;
            }
            let followed = self.files.entry(name.clone()).or_default();
            let text = followed
                .read(&path)
                .with_context(|| format!("cannot read `{}`", path.display()))?;
            lines.extend(timed(&text, &mut followed.time, &name, self.only.is_some()));
        }
        Ok(by_time(lines))
    }
}

/// The lines of a process with their times, and with its name unless it is the only one shown. A
/// line without a time has that of the line before, at first `time`.
pub(crate) fn timed(
    text: &str,
    time: &mut String,
    process: &str,
    is_only: bool,
) -> Vec<(String, String)> {
    let lines = text.lines().map(|line| {
        if let Some(new) = time_of(line) {
            new.clone_into(time);
        }
        (time.clone(), labelled(process, line, is_only))
    });
    lines.collect()
}

pub(crate) fn labelled(process: &str, line: &str, is_only: bool) -> String {
    if is_only { line.to_owned() } else { format!("{process:<10} {line}") }
}

/// The lines of all processes in the order of their times; those of one process stay in order.
pub(crate) fn by_time(mut lines: Vec<(String, String)>) -> Vec<String> {
    lines.sort_by(|(a, _), (b, _)| a.cmp(b));
    lines.into_iter().map(|(_, line)| line).collect()
}

impl Followed {
    /// Begins at the end of the log.
    pub(crate) fn from_end(path: &Path) -> Self {
        let offset = std::fs::metadata(path).map_or(0, |log| log.len());
        Self { offset, ..Self::default() }
    }

    /// The complete lines that are new.
    pub(crate) fn read(&mut self, path: &Path) -> std::io::Result<String> {
        let mut file = File::open(path)?;
        if file.metadata()?.len() < self.offset {
            // The log was too large, and begins again.
            self.offset = 0;
        }
        file.seek(SeekFrom::Start(self.offset))?;
        let n_bytes = file.read_to_end(&mut self.rest)?;
        self.offset += n_bytes as u64;
        let end = self.rest.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        let whole: Vec<u8> = self.rest.drain(..end).collect();
        Ok(String::from_utf8_lossy(&whole).into_owned())
    }
}

/// `2026-11-15 02:46:40,750` of a line that begins with it in brackets.
pub(crate) fn time_of(line: &str) -> Option<&str> {
    let (time, _) = line.strip_prefix('[')?.split_once(']')?;
    let is_time = time.len() == 23 && time.starts_with(|c: char| c.is_ascii_digit());
    is_time.then_some(time)
}

/// The last errors that the job's master and supervisor logged.
pub(crate) fn last_errors(job: &Job) -> Vec<String> {
    const MOST: usize = 3;
    let mut errors = Vec::new();
    for path in [job.paths().log(InstanceId::MASTER), job.paths().supervisor_log()] {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        let is_error = |line: &&str| line.contains("[ERROR]") || line.starts_with("error: ");
        let found: Vec<&str> = text.lines().filter(is_error).collect();
        errors.extend(found.iter().skip(found.len().saturating_sub(MOST)).map(ToString::to_string));
    }
    errors
}

/// The last error in a log after its first `offset` bytes, without time and place.
pub(crate) fn last_error_after(path: &Path, offset: u64) -> Option<String> {
    let mut file = File::open(path).ok()?;
    file.seek(SeekFrom::Start(offset)).ok()?;
    let mut text = Vec::new();
    file.read_to_end(&mut text).ok()?;
    let text = String::from_utf8_lossy(&text);
    let line = text.lines().rfind(|line| line.contains("[ERROR]"))?;
    Some(line.splitn(4, "] ").last()?.to_owned())
}

#[cfg(test)]
mod tests {
    use edl_core::spec::JobSpec;

    use super::*;
    use crate::jobs::Home;

    fn job() -> (tempfile::TempDir, Job) {
        let root = tempfile::tempdir().unwrap();
        let spec = JobSpec { job_name: "x".into(), ..JobSpec::default() };
        let job = Home::at(root.path()).create(&spec, None).unwrap();
        (root, job)
    }

    #[test]
    fn logs_of_all_processes_are_merged_by_time() {
        let (_root, job) = job();
        let log =
            |name: &str, text: &str| std::fs::write(job.paths().logs().join(name), text).unwrap();
        log("master.log", "[2026-11-15 02:46:40,001] a\n[2026-11-15 02:46:40,003] c\n");
        log(
            "worker-0.log",
            "[2026-11-15 02:46:40,002] b\n  more of b\n[2026-11-15 02:46:40,004] d\nhal",
        );
        let mut reader = Reader::new(&job, None);
        let lines = reader.read().unwrap();
        let messages: Vec<_> = lines.iter().map(|line| line.rsplit(' ').next().unwrap()).collect();
        assert_eq!(messages, ["a", "b", "b", "c", "d"]);
        assert!(lines[1].starts_with("worker-0   ["), "{}", lines[1]);
        let mut file =
            File::options().append(true).open(job.paths().logs().join("worker-0.log")).unwrap();
        file.write_all(b"f\n").unwrap();
        assert_eq!(reader.read().unwrap(), ["worker-0   half"]);
        assert!(reader.read().unwrap().is_empty());
    }

    #[test]
    fn one_process_is_shown_without_its_name_and_a_missing_one_is_not_found() {
        let (_root, job) = job();
        std::fs::write(job.paths().logs().join("ps-0.log"), "hello\n").unwrap();
        let mut reader = Reader::new(&job, Some("ps-0".into()));
        assert_eq!(reader.read().unwrap(), ["hello"]);
        let error = no_logs(&job, Some("ps-1"));
        assert_eq!(crate::exit::of_error(&error), Exit::NotFound);
        assert!(error.to_string().contains("logs are available for ps-0"), "{error}");
    }

    #[test]
    fn the_last_error_is_read_as_a_sentence() {
        let (root, _job) = job();
        let path = root.path().join("a.log");
        let [old, new] = ["cannot [listen] on `x`", "cannot open `y`"].map(|text| {
            let prefix = crate::telemetry::prefix(tracing::Level::ERROR, "a.rs", 7, "a");
            format!("{prefix}{text}\n[2026-11-15 02:46:40,001] [INFO] [a.rs:1:a] done\n")
        });
        std::fs::write(&path, format!("{old}{new}")).unwrap();
        assert_eq!(last_error_after(&path, 0).unwrap(), "cannot open `y`");
        std::fs::write(&path, &old).unwrap();
        assert_eq!(last_error_after(&path, 0).unwrap(), "cannot [listen] on `x`");
        assert_eq!(last_error_after(&path, old.len() as u64), None);
    }

    #[test]
    fn the_last_errors_of_a_master_are_found() {
        let (_root, job) = job();
        let line = "[2026-11-15 02:46:40,001] [ERROR] [lib.rs:1:x] the data has changed";
        std::fs::write(job.paths().logs().join("master.log"), format!("[INFO] fine\n{line}\n"))
            .unwrap();
        assert_eq!(last_errors(&job), [line]);
    }
}
