// SPDX-License-Identifier: Apache-2.0
//! `list` and `clean`: the jobs of this machine, and removing those that have ended.

use std::io::Write;

use edl_core::job::JobState;
use edl_core::spec::JobSpec;
use edl_net::proto::JobStatus;
use serde::Serialize;

use crate::cli::jobs::{CleanArgs, ListArgs};
use crate::cluster;
use crate::console::{eprint, span, write_json};
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
        let started = job.started().and_then(|started| started.elapsed().ok());
        let secs_ago = started.unwrap_or_default().as_secs_f64();
        Some(Self::new(&job.spec().ok()?, status, secs_ago, job.dir().display().to_string()))
    }
}

/// Removes jobs; those that run are left alone.
pub(crate) fn clean(args: &CleanArgs, out: &mut dyn Write) -> anyhow::Result<Exit> {
    match &args.namespace {
        Some(namespace) => cluster::list::clean(namespace, &args.jobs, args.all, out),
        None => clean_in(&Home::from_env()?, args, out),
    }
}

fn clean_in(home: &Home, args: &CleanArgs, out: &mut dyn Write) -> anyhow::Result<Exit> {
    let ended = || home.list().into_iter().filter(|job| !job.is_running());
    let jobs: Vec<Job> = if args.all {
        ended().collect()
    } else {
        let named = args.jobs.iter().map(|name| home.find(Some(name)));
        let mut jobs: Vec<Job> = named.collect::<anyhow::Result<_>>()?;
        jobs.sort_by_key(|job| job.dir().to_owned());
        jobs.dedup();
        jobs
    };
    if !args.all && jobs.is_empty() {
        let names: Vec<String> = ended().filter_map(|job| job.name()).collect();
        return Err(refuse(match names.as_slice() {
            [] => "nothing to remove: no finished jobs".into(),
            names => {
                let names = names.join(", ");
                format!("specify the jobs to remove, or remove all of them with --all: {names}")
            }
        }));
    }
    if let Some(job) = jobs.iter().find(|job| job.is_running()) {
        let name = job.name().unwrap_or_default();
        return Err(still_running(&name, &name));
    }
    for job in &jobs {
        let name = job.handle();
        home.remove(job)?;
        writeln!(out, "removed {name}")?;
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
            let result = clean_in(&home, &CleanArgs { namespace: None, jobs, all }, &mut out);
            (result.map_err(|error| error.to_string()), String::from_utf8(out).unwrap())
        };
        let (nothing_named, _) = clean(&[], false);
        let expected = "specify the jobs to remove, or remove all of them with --all: ";
        let error = nothing_named.unwrap_err();
        let named = error.strip_prefix(expected).unwrap_or_else(|| panic!("{error}"));
        assert!(named.contains("old") && !named.contains("running"), "{error}");
        let (mixed, out) = clean(&["old", "running"], false);
        assert!(mixed.unwrap_err().contains("elasticdl stop running"));
        assert_eq!(out, "", "nothing is removed by half");
        assert_eq!(clean(&["old", "old"], false).1, "removed old\n");
        assert_eq!(clean(&[], true).1, "removed other\n");
        assert_eq!(home.list(), [running]);
    }
}
