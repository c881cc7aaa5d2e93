// SPDX-License-Identifier: Apache-2.0
//! `status`: how far a job is, from its master while it runs and from its folder afterwards.

use std::io::Write;

use edl_core::spec::Strategy;
use edl_net::proto::{Instance, JobStatus};

use crate::cli::StatusArgs;
use crate::cluster::{self, Place};
use crate::control;
use crate::exit::{Exit, not_found};
use crate::goodput;
use crate::jobs::{self, Job};
use crate::say::{counted, grouped, lane_range, span};
use crate::ui::{measures, rounded};

/// Runs the command.
pub(crate) fn run(args: &StatusArgs, out: &mut dyn Write) -> anyhow::Result<Exit> {
    let status = match cluster::find(&args.job)? {
        Place::Here(job) => crate::runtime()?.block_on(of(&job))?,
        Place::There(remote) => remote.runtime.block_on(cluster::status::of(&remote)),
    };
    if args.json {
        serde_json::to_writer_pretty(&mut *out, &status)?;
        writeln!(out)?;
    } else {
        out.write_all(table(&status).as_bytes())?;
    }
    Ok(Exit::Ok)
}

/// The job's status as well as it can be known.
pub(crate) async fn of(job: &Job) -> anyhow::Result<JobStatus> {
    if job.is_running()
        && let Ok(mut status) = control::status(job).await
    {
        status.page = page(job, &status).unwrap_or_default();
        return Ok(status);
    }
    let mut status = match job.status() {
        Some(status) => status,
        None => empty(job)?,
    };
    status.state = job.state();
    if !job.is_running() {
        // Nobody is left, whatever was written last.
        for instance in &mut status.instances {
            instance.state = "gone".into();
        }
        if !jobs::is_final(&status.state) {
            let JobStatus { job, job_type, .. } = &status;
            status.reason =
                format!("processes are gone; resume with `elasticdl {job_type} --resume {job}`");
        }
    }
    Ok(status)
}

/// Where the page of a running job is; with the token, whoever opens it can change the job.
pub(crate) fn page(job: &Job, status: &JobStatus) -> Option<String> {
    if status.http_address.is_empty() {
        return None;
    }
    Some(format!("http://{}/#token={}", status.http_address, job.key().ok()?.page_token()))
}

/// A job whose master has not said a word yet.
fn empty(job: &Job) -> anyhow::Result<JobStatus> {
    let spec = job.spec()?;
    let Some(name) = job.name() else {
        return Err(not_found(format!("no job found in `{}`", job.dir().display())));
    };
    Ok(JobStatus {
        job: name,
        num_epochs: spec.num_epochs,
        eta_secs: -1.0,
        job_dir: job.dir().display().to_string(),
        workers_wanted: spec.num_workers,
        job_type: spec.job_type.name().into(),
        model_def: spec.model_def,
        ..JobStatus::default()
    })
}

fn table(status: &JobStatus) -> String {
    let mut lines = vec![
        ("job", format!("{} ({} {})", status.job, status.job_type, status.model_def)),
        ("state", with_reason(status)),
        ("records", records(status)),
    ];
    if status.job_type == "train" {
        let of = if status.num_epochs == 0 {
            String::new()
        } else {
            format!(" of {}", status.num_epochs)
        };
        let epoch = if status.num_epochs == 0 {
            status.epoch + 1
        } else {
            (status.epoch + 1).min(status.num_epochs)
        };
        lines.push((
            "epoch",
            format!("{epoch}{of}, step {}, loss {:.4}", grouped(status.step), status.loss),
        ));
    }
    if status.lanes > 0 {
        let bits = if status.same_bits {
            "bit-identical for any number of workers"
        } else {
            "not bit-identical across workers"
        };
        let tables = match status.distribution_strategy == Strategy::Hybrid.name() {
            true => ", embedding tables on servers",
            false => "",
        };
        let lanes = counted(u64::from(status.lanes), "lane");
        lines.push(("step", format!("AllReduce over {lanes}{tables}, {bits}")));
    }
    if let Some(evaluation) = status.evaluations.last() {
        let (measures, step) = (measures(evaluation), grouped(evaluation.version));
        lines.push(("metrics", format!("{measures} at step {step}")));
    }
    lines.push(("time", time(status)));
    if let Some(goodput) = &status.goodput {
        lines.extend(goodput::line(goodput).map(|line| ("goodput", line)));
    }
    for (name, value) in [
        ("page", &status.page),
        ("checkpoint", &status.last_checkpoint),
        ("output", &status.output),
        ("folder", &status.job_dir),
    ] {
        if !value.is_empty() {
            lines.push((name, value.clone()));
        }
    }
    let mut text: String =
        lines.iter().map(|(name, value)| format!("{name:<11}{value}\n")).collect();
    if !status.instances.is_empty() {
        text += "\nPROCESS     PID      STATE        RESTARTS  ADDRESS\n";
        for instance in &status.instances {
            text += &row(instance);
        }
    }
    text
}

fn with_reason(status: &JobStatus) -> String {
    if status.reason.is_empty() {
        status.state.clone()
    } else {
        format!("{}: {}", status.state, status.reason)
    }
}

fn records(status: &JobStatus) -> String {
    #[expect(clippy::cast_precision_loss, reason = "a share in percent")]
    let share = status.records_done as f64 * 100.0 / status.records_total.max(1) as f64;
    format!(
        "{} of {} ({share:.1} %), {} records/s",
        grouped(status.records_done),
        grouped(status.records_total),
        grouped(rounded(status.records_per_second))
    )
}

fn time(status: &JobStatus) -> String {
    let elapsed = span(status.elapsed_secs);
    if status.eta_secs < 0.0 || jobs::is_final(&status.state) {
        return elapsed;
    }
    format!("{elapsed}, {} left", span(status.eta_secs))
}

fn row(instance: &Instance) -> String {
    let Instance { pid, address, state, restarts, lanes, why, .. } = instance;
    let name = instance.name();
    let gap = if lanes.is_empty() { "" } else { "  " };
    let lanes = lane_range(lanes);
    let line = format!("{name:<12}{pid:<9}{state:<13}{restarts:<10}{address}{gap}{lanes}{why}");
    format!("{}\n", line.trim_end())
}

#[cfg(test)]
mod tests {
    use edl_net::proto::{Goodput, Spent};
    use expect_test::expect;

    use super::*;
    use crate::jobs::Home;

    #[test]
    fn a_status_is_a_neat_table() {
        let worker = Instance {
            role: "worker".into(),
            id: 3,
            pid: 4242,
            state: "running".into(),
            restarts: 1,
            ..Instance::default()
        };
        let waiting = Instance {
            role: "worker".into(),
            id: 4,
            state: "waiting".into(),
            why: "no node can run it: 0/3 nodes are available".into(),
            ..Instance::default()
        };
        let status = JobStatus {
            job: "x".into(),
            job_type: "train".into(),
            model_def: "mnist_cnn".into(),
            state: "running".into(),
            num_epochs: 2,
            records_done: 5_000,
            records_total: 20_000,
            records_per_second: 1000.0,
            eta_secs: 15.0,
            elapsed_secs: 5.0,
            loss: 0.5,
            step: 78,
            goodput: Some(Goodput {
                workers: Some(Spent { compute: 9.0, idle: 1.0, ..Spent::default() }),
                share: 0.9,
                ..Goodput::default()
            }),
            page: "http://127.0.0.1:8000/#token=x".into(),
            instances: vec![worker, waiting],
            ..JobStatus::default()
        };
        expect![[r"
            job        x (train mnist_cnn)
            state      running
            records    5,000 of 20,000 (25.0 %), 1,000 records/s
            epoch      1 of 2, step 78, loss 0.5000
            time       5.0 s, 15 s left
            goodput    90 % compute, 10 % idle
            page       http://127.0.0.1:8000/#token=x

            PROCESS     PID      STATE        RESTARTS  ADDRESS
            worker-3    4242     running      1
            worker-4    0        waiting      0         no node can run it: 0/3 nodes are available
        "]]
        .assert_eq(&table(&status));
    }

    #[test]
    fn a_job_that_was_killed_is_interrupted_and_says_how_to_go_on() {
        let root = tempfile::tempdir().unwrap();
        let spec = edl_core::spec::JobSpec { job_name: "x".into(), ..Default::default() };
        let job = Home::at(root.path()).create(&spec, None).unwrap();
        let said = JobStatus {
            job: "x".into(),
            job_type: "train".into(),
            state: "running".into(),
            ..JobStatus::default()
        };
        std::fs::write(job.paths().status(), serde_json::to_vec(&said).unwrap()).unwrap();
        let status = crate::runtime().unwrap().block_on(of(&job)).unwrap();
        assert_eq!(status.state, "interrupted");
        assert!(status.reason.contains("--resume x"), "{}", status.reason);
    }
}
