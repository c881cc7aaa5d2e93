// SPDX-License-Identifier: Apache-2.0
//! `list` and `clean`: the jobs of this machine, and removing those that have ended.

use std::io::Write;
use std::path::Path;
use std::time::SystemTime;

use edl_core::job::JobState;
use edl_core::spec::JobSpec;
use edl_net::proto::JobStatus;
use serde::Serialize;

use crate::cli::jobs::{CleanArgs, EndState, ListArgs};
use crate::cluster;
use crate::console::{counted, eprint, size, span, write_json};
use crate::exit::{Exit, refuse};
use crate::jobs::{Home, Job, still_running};

/// One line of the list.
#[derive(Debug, Serialize)]
pub(crate) struct Row {
    pub(crate) job: String,
    pub(crate) state: JobState,
    pub(crate) job_type: String,
    pub(crate) model_def: String,
    pub(crate) records_done: u64,
    pub(crate) records_total: u64,
    pub(crate) started_secs_ago: f64,
    pub(crate) job_dir: String,
}

/// Shows every job, the newest first.
pub(crate) fn list(args: &ListArgs, out: &mut dyn Write) -> anyhow::Result<Exit> {
    let rows: Vec<Row> = match &args.namespace {
        Some(namespace) => cluster::list::rows(namespace)?,
        None => Home::from_env()?.list().iter().filter_map(Row::of).collect(),
    };
    if args.json {
        write_json(&rows, out)?;
        return Ok(Exit::Ok);
    }
    if rows.is_empty() {
        eprint("no jobs yet; start one with `elasticdl train`");
        return Ok(Exit::Ok);
    }
    let width = rows.iter().map(|row| row.job.len()).max().unwrap_or(0).max(4) + 2;
    writeln!(
        out,
        "{:<width$}{:<13}{:<10}{:<12}{:<8}STARTED",
        "NAME", "STATE", "TYPE", "MODEL", "DONE"
    )?;
    for row in rows {
        let Row { job, state, job_type, model_def, .. } = &row;
        let done = format!("{} %", (100 * row.records_done / row.records_total.max(1)).min(100));
        let started = span(row.started_secs_ago);
        writeln!(
            out,
            "{job:<width$}{state:<13}{job_type:<10}{model_def:<12}{done:<8}{started} ago"
        )?;
    }
    Ok(Exit::Ok)
}

impl Row {
    pub(crate) fn new(
        spec: &JobSpec,
        status: JobStatus,
        started_secs_ago: f64,
        job_dir: String,
    ) -> Self {
        Self {
            job: spec.job_name.clone(),
            state: status.state(),
            job_type: spec.job_type.name().into(),
            model_def: spec.model_def.clone(),
            records_done: status.records_done,
            records_total: status.records_total,
            started_secs_ago,
            job_dir,
        }
    }

    fn of(job: &Job) -> Option<Self> {
        let status = JobStatus { state: job.state().into(), ..job.status().unwrap_or_default() };
        let folder = job.dir().display().to_string();
        Some(Self::new(&job.spec().ok()?, status, secs_since(job.started()), folder))
    }
}

/// Removes jobs; those that run are left alone.
pub(crate) fn clean(args: &CleanArgs, out: &mut dyn Write) -> anyhow::Result<Exit> {
    match &args.namespace {
        Some(namespace) => cluster::list::clean(namespace, args, out),
        None => clean_in(&Home::from_env()?, args, out),
    }
}

fn clean_in(home: &Home, args: &CleanArgs, out: &mut dyn Write) -> anyhow::Result<Exit> {
    let ended = || home.list().into_iter().filter(|job| !job.is_running());
    let jobs: Vec<Job> = if args.selects() {
        ended().filter(|job| args.matches(job.state(), secs_since(job.ended()))).collect()
    } else {
        let named = args.jobs.iter().map(|name| home.find(Some(name)));
        let mut jobs: Vec<Job> = named.collect::<anyhow::Result<_>>()?;
        jobs.sort_by_key(|job| job.dir().to_owned());
        jobs.dedup();
        jobs
    };
    if !args.selects() && jobs.is_empty() {
        let names: Vec<String> = ended().filter_map(|job| job.name()).collect();
        return Err(refuse(match names.as_slice() {
            [] => "nothing to remove: no finished jobs".into(),
            names => {
                let names = names.join(", ");
                format!(
                    "specify the jobs to remove, select some with --state or --older_than, or \
                     remove all of them with --all: {names}"
                )
            }
        }));
    }
    if let Some(job) = jobs.iter().find(|job| job.is_running()) {
        let name = job.name().unwrap_or_default();
        return Err(still_running(&name, &name));
    }
    if args.dry_run {
        list_sizes(&jobs, out)?;
        return Ok(Exit::Ok);
    }
    let mut n_bytes = 0;
    for job in &jobs {
        let name = job.handle();
        n_bytes += size_of(job.dir());
        home.remove(job)?;
        writeln!(out, "removed {name}")?;
    }
    match jobs.len() {
        0 => eprint("nothing to remove: no job matches"),
        _ => eprint(format_args!("freed {}", size(n_bytes))),
    }
    Ok(Exit::Ok)
}

impl CleanArgs {
    /// Whether the jobs are selected by how they have ended instead of by name.
    pub(crate) fn selects(&self) -> bool {
        self.all || self.older_than.is_some() || !self.state.is_empty()
    }

    /// Whether a job is selected that has ended in this state.
    pub(crate) fn matches(&self, state: JobState, ended_secs_ago: f64) -> bool {
        let end = if state == JobState::Succeeded {
            EndState::Succeeded
        } else if state == JobState::Failed {
            EndState::Failed
        } else {
            EndState::Stopped
        };
        let is_old = self
            .older_than
            .is_none_or(|secs| ended_secs_ago > std::time::Duration::from_secs(secs).as_secs_f64());
        is_old && (self.state.is_empty() || self.state.contains(&end))
    }
}

/// What `clean` would remove.
fn list_sizes(jobs: &[Job], out: &mut dyn Write) -> anyhow::Result<()> {
    let names: Vec<String> = jobs.iter().map(Job::handle).collect();
    let width = names.iter().map(String::len).max().unwrap_or(0).max(4) + 2;
    writeln!(out, "{:<width$}{:<13}{:<20}SIZE", "NAME", "STATE", "ENDED")?;
    let mut total = 0;
    for (job, name) in jobs.iter().zip(&names) {
        let (state, n_bytes) = (job.state(), size_of(job.dir()));
        let ended = format!("{} ago", span(secs_since(job.ended())));
        writeln!(out, "{name:<width$}{state:<13}{ended:<20}{}", size(n_bytes))?;
        total += n_bytes;
    }
    let jobs = counted(jobs.len() as u64, "job");
    eprint(format_args!("{jobs}, {}; nothing was removed, because of --dry_run", size(total)));
    Ok(())
}

/// The bytes of all files in a folder; links are not followed.
fn size_of(folder: &Path) -> u64 {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let sizes = entries.filter_map(|entry| {
        let file = entry.metadata().ok()?;
        Some(if file.is_dir() { size_of(&entry.path()) } else { file.len() })
    });
    sizes.sum()
}

fn secs_since(time: Option<SystemTime>) -> f64 {
    time.and_then(|time| time.elapsed().ok()).unwrap_or_default().as_secs_f64()
}

/// The names of the jobs of this machine, one per line. Completion must never fail.
pub(crate) fn names(out: &mut dyn Write) -> anyhow::Result<Exit> {
    let jobs = Home::from_env().map(|home| home.list()).unwrap_or_default();
    for name in jobs.iter().filter_map(Job::name) {
        writeln!(out, "{name}")?;
    }
    Ok(Exit::Ok)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clean_removes_what_is_named_and_never_what_runs() {
        let root = tempfile::tempdir().unwrap();
        let home = Home::at(root.path());
        let create = |name: &str| {
            let spec = JobSpec { job_name: name.into(), ..JobSpec::default() };
            home.create(&spec, None).unwrap()
        };
        let (_old, running, _other) = (create("old"), create("running"), create("other"));
        let _hold = running.hold().unwrap().unwrap();
        let clean = |jobs: &[&str], all| {
            let jobs = jobs.iter().map(ToString::to_string).collect();
            let mut out = Vec::new();
            let args = CleanArgs { jobs, all, ..CleanArgs::default() };
            let result = clean_in(&home, &args, &mut out);
            (result.map_err(|error| error.to_string()), String::from_utf8(out).unwrap())
        };
        let (nothing_named, _) = clean(&[], false);
        let error = nothing_named.unwrap_err();
        let (advice, named) =
            error.split_once(" with --all: ").unwrap_or_else(|| panic!("{error}"));
        assert!(advice.starts_with("specify the jobs to remove"), "{error}");
        assert!(named.contains("old") && !named.contains("running"), "{error}");
        let (mixed, out) = clean(&["old", "running"], false);
        assert!(mixed.unwrap_err().contains("elasticdl stop running"));
        assert_eq!(out, "", "nothing is removed by half");
        assert_eq!(clean(&["old", "old"], false).1, "removed old\n");
        assert_eq!(clean(&[], true).1, "removed other\n");
        assert_eq!(home.list(), [running]);
    }

    #[test]
    fn ended_jobs_are_selected_by_state_and_age() {
        let select = |older_than: Option<u64>, state: &[EndState]| CleanArgs {
            older_than,
            state: state.to_vec(),
            ..CleanArgs::default()
        };
        let hour = 3600.0;
        assert!(!CleanArgs::default().selects());
        let failed = select(None, &[EndState::Failed]);
        assert!(failed.selects() && failed.matches(JobState::Failed, 0.0));
        assert!(!failed.matches(JobState::Succeeded, hour));
        let old = select(Some(3600), &[EndState::Failed, EndState::Stopped]);
        assert!(old.matches(JobState::Interrupted, hour + 1.0), "a killed job can be resumed");
        assert!(old.matches(JobState::Stopped, hour + 1.0));
        assert!(!old.matches(JobState::Stopped, hour - 1.0));
        assert!(!old.matches(JobState::Succeeded, hour + 1.0));
    }

    #[test]
    fn a_job_that_trained_for_weeks_and_has_just_ended_is_not_old() {
        let root = tempfile::tempdir().unwrap();
        let home = Home::at(root.path());
        let spec = JobSpec { job_name: "long".into(), ..JobSpec::default() };
        let job = home.create(&spec, None).unwrap();
        job.write_supervisor(&[]).unwrap();
        let days = |days: u64| SystemTime::now() - std::time::Duration::from_secs(days * 86_400);
        let set = |path: &Path, time| {
            let file = std::fs::File::options().write(true).create(true).truncate(false).open(path);
            file.unwrap().set_modified(time).unwrap();
        };
        set(&job.paths().supervisor(), days(20));
        set(&job.paths().status(), days(1));
        let clean = |secs: u64| {
            let args = CleanArgs { older_than: Some(secs), ..CleanArgs::default() };
            clean_in(&home, &args, &mut Vec::new()).unwrap();
            home.list().len()
        };
        assert_eq!(clean(7 * 86_400), 1, "it ended a day ago");
        assert_eq!(clean(86_400 / 2), 0);
    }

    #[test]
    fn a_dry_run_lists_sizes_and_removes_nothing() {
        let root = tempfile::tempdir().unwrap();
        let home = Home::at(root.path());
        let spec = JobSpec { job_name: "old".into(), ..JobSpec::default() };
        let job = home.create(&spec, None).unwrap();
        let folder = job.dir().join("checkpoints");
        std::fs::create_dir(&folder).unwrap();
        std::fs::write(folder.join("big"), vec![0; 3_000_000]).unwrap();
        std::os::unix::fs::symlink(&folder, job.dir().join("link")).unwrap();
        let mut out = Vec::new();
        let args = CleanArgs { all: true, dry_run: true, ..CleanArgs::default() };
        clean_in(&home, &args, &mut out).unwrap();
        let text = String::from_utf8(out).unwrap();
        assert!(text.contains("old ") && text.contains(" 3.0 MB"), "{text}");
        assert_eq!(home.list(), [job]);
    }
}
