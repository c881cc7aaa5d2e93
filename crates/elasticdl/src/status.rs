// SPDX-License-Identifier: Apache-2.0
//! `status`: how far a job is, from its master while it runs and from its folder afterwards.

use std::collections::BTreeMap;
use std::io::Write;

use edl_core::job::JobState;
use edl_core::platform::InstanceState;
use edl_core::spec::{JobSpec, JobType, Strategy};
use edl_core::text::decimal;
use edl_master::usage::{self, Usage};
use edl_net::proto::{Instance, JobStatus};
use serde::Serialize;

use crate::cli::StatusArgs;
use crate::cluster::{self, Target};
use crate::console::{counted, grouped, lane_range, span, write_json};
use crate::control;
use crate::exit::Exit;
use crate::goodput;
use crate::jobs::Job;
use crate::ui::{epoch, metrics_text, rounded};

/// Runs the command.
pub(crate) fn run(args: &StatusArgs, out: &mut dyn Write) -> anyhow::Result<Exit> {
    let target = cluster::find(&args.job)?;
    let status = match &target {
        Target::Local(job) => crate::runtime()?.block_on(of(job))?,
        Target::Cluster(job) => job.runtime.block_on(cluster::status::of(job)),
    };
    if args.json {
        let is_local = matches!(&target, Target::Local(job) if job.is_running());
        let usage = if is_local { usage::of_job(&status) } else { BTreeMap::new() };
        write_json(&WithUsage { status: &status, usage }, out)?;
    } else {
        out.write_all(table(&status).as_bytes())?;
        let is_stuck = status.instances.iter().any(|instance| !instance.why.is_empty());
        if status.state() == JobState::Failed || is_stuck {
            writeln!(out, "\nrun `elasticdl explain {}` to find the cause", target.handle())?;
        }
    }
    Ok(Exit::Ok)
}

/// The status with what each process has used, if they run on this machine.
#[derive(Serialize)]
struct WithUsage<'a> {
    #[serde(flatten)]
    status: &'a JobStatus,
    usage: BTreeMap<String, Usage>,
}

/// The job's status, as well as it is known.
pub(crate) async fn of(job: &Job) -> anyhow::Result<JobStatus> {
    if job.is_running()
        && let Ok(mut status) = control::status(job).await
    {
        status.page = page(job, &status).unwrap_or_default();
        return Ok(status);
    }
    let mut status = match job.status() {
        Some(status) => status,
        None => described(&job.spec()?, job.dir().display().to_string(), JobStatus::default()),
    };
    status.set_state(job.state());
    if !job.is_running() {
        // The status was written while they still ran.
        for instance in &mut status.instances {
            instance.set_state(InstanceState::Gone);
        }
        if !status.state().is_final() {
            let (job, job_type) = (&status.job, status.job_type());
            status.reason =
                format!("processes are gone; resume with `elasticdl {job_type} --resume {job}`");
        }
    }
    Ok(status)
}

/// The address of a running job's page. Its token allows changing the job.
pub(crate) fn page(job: &Job, status: &JobStatus) -> Option<String> {
    if status.http_address.is_empty() {
        return None;
    }
    Some(format!("http://{}/#token={}", status.http_address, job.key().ok()?.page_token()))
}

/// A status with the fields of the job's description.
pub(crate) fn described(spec: &JobSpec, job_dir: String, status: JobStatus) -> JobStatus {
    JobStatus {
        job: spec.job_name.clone(),
        num_epochs: spec.num_epochs,
        eta_secs: -1.0,
        job_dir,
        workers_wanted: spec.num_workers,
        job_type: spec.job_type.into(),
        model_def: spec.model_def.clone(),
        ..status
    }
}

fn table(status: &JobStatus) -> String {
    let mut lines = vec![
        ("job", format!("{} ({} {})", status.job, status.job_type(), status.model_def)),
        ("state", with_reason(status)),
        ("records", records(status)),
    ];
    if status.job_type() == JobType::Train {
        let (epoch, step) = (epoch(status, " of "), grouped(status.step));
        let loss = status.known_loss().map(|loss| format!(", loss {}", decimal(loss.into())));
        lines.push(("epoch", format!("{epoch}, step {step}{}", loss.unwrap_or_default())));
    }
    if status.lanes > 0 {
        let bits = if status.same_bits {
            "bit-identical for any number of workers"
        } else {
            "not bit-identical across workers"
        };
        let tables = match status.distribution_strategy() == Strategy::Hybrid {
            true => ", embedding tables on servers",
            false => "",
        };
        let lanes = counted(u64::from(status.lanes), "lane");
        lines.push(("step", format!("AllReduce over {lanes}{tables}, {bits}")));
    }
    if let Some(evaluation) = status.evaluations.last() {
        let (metrics, step) = (metrics_text(evaluation), grouped(evaluation.version));
        lines.push(("metrics", format!("{metrics} at step {step}")));
    }
    for logged in &status.logged {
        let (value, step) = (decimal(logged.value), grouped(logged.step));
        lines.push(("logged", format!("{} {value} at step {step}", logged.name)));
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

pub(crate) fn with_reason(status: &JobStatus) -> String {
    if status.reason.is_empty() {
        status.state().to_string()
    } else {
        format!("{}: {}", status.state(), status.reason)
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
    if status.eta_secs < 0.0 || status.state().is_final() {
        return elapsed;
    }
    format!("{elapsed}, {} left", span(status.eta_secs))
}

fn row(instance: &Instance) -> String {
    let Instance { pid, address, restarts, lanes, why, .. } = instance;
    let (name, state) = (instance.name(), instance.state());
    let notes = [address.clone(), lane_range(lanes), why.clone()];
    let notes: Vec<String> = notes.into_iter().filter(|note| !note.is_empty()).collect();
    let line = format!("{name:<12}{pid:<9}{state:<13}{restarts:<10}{}", notes.join("  "));
    format!("{}\n", line.trim_end())
}

#[cfg(test)]
mod tests {
    use edl_net::proto::{Goodput, Spent};
    use expect_test::expect;

    use super::*;
    use crate::jobs::Home;
    use edl_core::platform::Role;

    #[test]
    fn a_status_is_a_neat_table() {
        let worker = Instance {
            role: Role::Worker.into(),
            id: 3,
            pid: 4242,
            state: InstanceState::Running.into(),
            restarts: 1,
            ..Instance::default()
        };
        let waiting = Instance {
            role: Role::Worker.into(),
            id: 4,
            state: InstanceState::Waiting.into(),
            why: "no node can run it: 0/3 nodes are available".into(),
            ..Instance::default()
        };
        let status = JobStatus {
            job: "x".into(),
            job_type: JobType::Train.into(),
            model_def: "mnist_cnn".into(),
            state: JobState::Running.into(),
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
    fn a_killed_job_is_interrupted_and_can_be_resumed() {
        let root = tempfile::tempdir().unwrap();
        let spec = JobSpec { job_name: "x".into(), ..Default::default() };
        let job = Home::at(root.path()).create(&spec, None).unwrap();
        let written = JobStatus {
            job: "x".into(),
            job_type: JobType::Train.into(),
            state: JobState::Running.into(),
            ..JobStatus::default()
        };
        std::fs::write(job.paths().status(), serde_json::to_vec(&written).unwrap()).unwrap();
        let status = crate::runtime().unwrap().block_on(of(&job)).unwrap();
        assert_eq!(status.state(), JobState::Interrupted);
        assert!(status.reason.contains("--resume x"), "{}", status.reason);
    }
}
