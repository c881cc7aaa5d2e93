// SPDX-License-Identifier: Apache-2.0
//! The jobs of this machine: one folder each, found by name from any shell, even after their end.

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::Context as _;
use edl_core::job::JobState;
use edl_core::job_dir::JobDir;
use edl_core::spec::JobSpec;
use edl_net::key::JobKey;
use edl_net::proto::JobStatus;
use edl_tensor::checkpoint::{self, Checkpoint};
use serde::{Deserialize, Serialize};

use crate::config;
use crate::exit::{not_found, refuse};
use edl_core::text::nearest;

mod create;

pub(crate) use create::{still_running, suffix, write_json};

/// Where jobs are kept: `$ELASTICDL_HOME/jobs`.
#[derive(Clone, Debug)]
pub(crate) struct Home {
    root: PathBuf,
}

/// The folder of one job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Job {
    paths: JobDir,
}

/// The address of a master; the master writes it.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct MasterInfo {
    pub(crate) address: String,
    /// Of the job's run; its checkpoints have the same.
    #[serde(default)]
    pub(crate) run: String,
}

/// The last supervisor of the job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SupervisorInfo {
    pub(crate) pid: u32,
    /// What the user has started it with. Earlier builds did not write it.
    #[serde(default)]
    pub(crate) command: Vec<String>,
}

/// Held by a job's supervisor while it runs, so others can see that it does.
#[derive(Debug)]
pub(crate) struct Hold {
    _lock: File,
}

impl Home {
    pub(crate) fn from_env() -> anyhow::Result<Self> {
        if let Some(root) = std::env::var_os("ELASTICDL_HOME").filter(|root| !root.is_empty()) {
            let root = std::path::absolute(root).context("cannot resolve ELASTICDL_HOME")?;
            return Ok(Self { root });
        }
        let home = std::env::var_os("HOME").filter(|home| !home.is_empty());
        let home = home.ok_or_else(|| {
            refuse(
                "neither ELASTICDL_HOME nor HOME is set; set ELASTICDL_HOME to a folder for jobs",
            )
        })?;
        Ok(Self { root: Path::new(&home).join(".elasticdl") })
    }

    #[cfg(test)]
    pub(crate) fn at(root: &Path) -> Self {
        Self { root: root.into() }
    }

    pub(crate) fn jobs_dir(&self) -> PathBuf {
        self.root.join("jobs")
    }

    /// The data of the demo.
    pub(crate) fn demo_dir(&self) -> PathBuf {
        self.root.join("demo")
    }

    /// Images that were built without another tool.
    pub(crate) fn images_dir(&self) -> PathBuf {
        self.root.join("images")
    }

    /// Every job, the newest first.
    pub(crate) fn list(&self) -> Vec<Job> {
        let entries = fs::read_dir(self.jobs_dir()).into_iter().flatten().flatten();
        let visible = entries.filter(|entry| !entry.file_name().to_string_lossy().starts_with('.'));
        let mut jobs: Vec<Job> = visible.filter_map(|entry| Job::open(&entry.path())).collect();
        jobs.sort_by_key(|job| std::cmp::Reverse(job.started()));
        jobs
    }

    /// The job with this name or folder; without one, the newest.
    pub(crate) fn find(&self, which: Option<&str>) -> anyhow::Result<Job> {
        let Some(which) = which else {
            return self.list().into_iter().next().ok_or_else(|| {
                not_found(format!(
                    "no jobs in `{}`; start one with `elasticdl train`",
                    self.jobs_dir().display()
                ))
            });
        };
        let is_name = !which.is_empty() && !which.contains('/') && !which.starts_with('.');
        let by_name = is_name.then(|| self.jobs_dir().join(config::job_name(which)));
        let found =
            by_name.and_then(|path| Job::open(&path)).or_else(|| Job::open(Path::new(which)));
        found.ok_or_else(|| self.no_such_job(which))
    }

    fn no_such_job(&self, which: &str) -> anyhow::Error {
        let names: Vec<String> = self.list().iter().filter_map(Job::name).collect();
        let hint = match nearest(which, names.iter().map(String::as_str)) {
            Some(near) => format!("did you mean `{near}`?"),
            None => "list jobs with `elasticdl list`".into(),
        };
        not_found(format!("job `{which}` not found; {hint}"))
    }

    /// The running job whose master serves on this port.
    pub(crate) fn find_by_port(&self, port: u16) -> Option<Job> {
        let serves = |job: &Job| {
            let address = job.master()?.address;
            let (_, served) = address.rsplit_once(':')?;
            Some(served.parse() == Ok(port))
        };
        self.list().into_iter().find(|job| serves(job) == Some(true) && job.is_running())
    }
}

impl Job {
    /// The job in this folder, if there is one.
    pub(crate) fn open(dir: &Path) -> Option<Self> {
        let paths = JobDir::new(fs::canonicalize(dir).ok()?);
        paths.spec().is_file().then_some(Self { paths })
    }

    pub(crate) fn dir(&self) -> &Path {
        self.paths.path()
    }

    /// Where its files are.
    pub(crate) fn paths(&self) -> &JobDir {
        &self.paths
    }

    pub(crate) fn spec(&self) -> anyhow::Result<JobSpec> {
        let path = self.paths.spec();
        let text = fs::read(&path).with_context(|| format!("cannot read `{}`", path.display()))?;
        serde_json::from_slice(&text).map_err(|error| {
            refuse(format!(
                "`{}` is not a job that this version of elasticdl can read: {error}",
                path.display()
            ))
        })
    }

    /// The job's name; a folder that cannot be read has none.
    pub(crate) fn name(&self) -> Option<String> {
        self.spec().ok().map(|spec| spec.job_name)
    }

    /// What commands find the job by.
    pub(crate) fn handle(&self) -> String {
        self.name().unwrap_or_else(|| self.dir().display().to_string())
    }

    pub(crate) fn key(&self) -> anyhow::Result<JobKey> {
        Ok(JobKey::load(&self.paths.key())?)
    }

    pub(crate) fn master(&self) -> Option<MasterInfo> {
        read_json(&self.paths.master())
    }

    /// The port that the master of the present run serves on.
    pub(crate) fn fresh_master_port(&self) -> Option<u16> {
        let is_fresh = self.is_fresh(&self.paths.master());
        let address = self.master().filter(|_| is_fresh)?.address;
        address.rsplit_once(':')?.1.parse().ok()
    }

    /// The newest complete checkpoint of the job. Other jobs may write to the same folder.
    pub(crate) fn newest_checkpoint(
        &self,
        spec: &JobSpec,
    ) -> Result<Option<Checkpoint>, checkpoint::Error> {
        let found = checkpoint::find(&self.paths.checkpoints(spec))?;
        // Earlier builds did not write the run.
        let run = self.master().map(|master| master.run).filter(|run| !run.is_empty());
        let is_own = |it: &Checkpoint| run.as_ref().is_none_or(|run| *run == it.manifest.run);
        Ok(found.into_iter().rfind(is_own))
    }

    pub(crate) fn supervisor(&self) -> Option<SupervisorInfo> {
        read_json(&self.paths.supervisor())
    }

    /// What the master wrote last about the job.
    pub(crate) fn status(&self) -> Option<JobStatus> {
        read_json(&self.paths.status())
    }

    /// The last status of the current run; the status of an earlier run is ignored.
    pub(crate) fn fresh_status(&self) -> Option<JobStatus> {
        self.is_fresh(&self.paths.status()).then(|| self.status())?
    }

    /// Whether a file was written after the job was started last.
    fn is_fresh(&self, path: &Path) -> bool {
        modified(path) >= modified(&self.paths.supervisor())
    }

    /// Locks the job for this process; `None` while another one supervises it.
    pub(crate) fn hold(&self) -> io::Result<Option<Hold>> {
        let mut options = File::options();
        let options = options.create(true).truncate(false).write(true);
        let lock = options.open(self.paths.supervisor_lock())?;
        match lock.try_lock() {
            Ok(()) => Ok(Some(Hold { _lock: lock })),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(error)) => Err(error),
        }
    }

    /// Whether a supervisor runs.
    pub(crate) fn is_running(&self) -> bool {
        let Ok(lock) = File::open(self.paths.supervisor_lock()) else { return false };
        // A shared lock: readers do not exclude each other.
        matches!(lock.try_lock_shared(), Err(TryLockError::WouldBlock))
    }

    /// The state to show: the last one of the master, unless the job no longer runs.
    pub(crate) fn state(&self) -> JobState {
        let last = self.fresh_status().map_or(JobState::Starting, |status| status.state());
        if last.is_final() || self.is_running() { last } else { JobState::Interrupted }
    }

    /// When the job was started last.
    pub(crate) fn started(&self) -> Option<SystemTime> {
        modified(&self.paths.supervisor()).or_else(|| modified(&self.paths.spec()))
    }

    /// When a job that no longer runs has ended: its master wrote its status last.
    pub(crate) fn ended(&self) -> Option<SystemTime> {
        modified(&self.paths.status()).max(self.started())
    }

    /// Replaces the description, completely or not at all.
    pub(crate) fn rewrite_spec(&self, spec: &JobSpec) -> anyhow::Result<()> {
        write_json(&self.paths.spec(), spec)
    }

    /// Removes the sockets of processes that were killed; for a job without processes.
    pub(crate) fn remove_sockets(&self) {
        // Those that stay are replaced when the job is resumed.
        let _ = fs::remove_dir_all(self.paths.sockets());
    }

    pub(crate) fn write_supervisor(&self, command: &[String]) -> anyhow::Result<()> {
        let info = SupervisorInfo { pid: std::process::id(), command: command.to_vec() };
        write_json(&self.paths.supervisor(), &info)
    }
}

fn modified(path: &Path) -> Option<SystemTime> {
    fs::metadata(path).ok()?.modified().ok()
}

/// A file that is missing, incomplete or of another version is ignored.
pub(crate) fn read_json<T: for<'a> Deserialize<'a>>(path: &Path) -> Option<T> {
    serde_json::from_slice(&fs::read(path).ok()?).ok()
}

#[cfg(test)]
mod tests;
