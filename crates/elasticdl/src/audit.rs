// SPDX-License-Identifier: Apache-2.0
//! `audit`: proves from the parameter servers' own books that every record was trained exactly
//! once; after a job's end, from its last checkpoint.

use std::io::Write;

use anyhow::Context as _;
use edl_core::spec::JobType;
use edl_data::{Dataset, OpenOptions};
use edl_net::proto::{AuditReport, AuditRequest};
use edl_tensor::checkpoint;

use crate::cli::StatusArgs;
use crate::cluster::{self, Place};
use crate::control;
use crate::exit::{Exit, not_found, refuse};
use crate::jobs::Job;
use crate::say::{counted, grouped, say};

/// Runs the command; fails if a record is missing or was trained twice.
pub(crate) fn run(args: &StatusArgs, out: &mut dyn Write) -> anyhow::Result<Exit> {
    let report = match cluster::find(&args.job)? {
        Place::Here(job) => of(&job)?,
        Place::There(remote) => cluster::audit::of(&remote)?,
    };
    if args.json {
        serde_json::to_writer_pretty(&mut *out, &report)?;
        writeln!(out)?;
    } else {
        out.write_all(table(&report).as_bytes())?;
    }
    Ok(if report.clean { Exit::Ok } else { Exit::Failed })
}

/// The audit of a job: from its servers while it runs, else from its last checkpoint.
pub(crate) fn of(job: &Job) -> anyhow::Result<AuditReport> {
    if job.spec()?.job_type != JobType::Train {
        let name = job.name().unwrap_or_default();
        return Err(refuse(format!("job `{name}` does not train; only training can be audited")));
    }
    if job.is_running() {
        match crate::runtime()?.block_on(control::within(ask(job))) {
            Ok(report) => return Ok(report),
            // It may have ended just now; its last checkpoint is as good.
            Err(error) => say(format_args!("{error:#}; auditing the last checkpoint instead")),
        }
    }
    of_checkpoint(job)
}

async fn ask(job: &Job) -> anyhow::Result<AuditReport> {
    let mut master = control::connect(job).await?;
    let answer = master.audit(AuditRequest {}).await;
    Ok(answer.map_err(|status| anyhow::anyhow!("{}", status.message()))?.into_inner())
}

fn of_checkpoint(job: &Job) -> anyhow::Result<AuditReport> {
    let spec = job.spec()?;
    let dir = job.paths().checkpoints(&spec);
    let newest = checkpoint::find(&dir).context("cannot read the checkpoints")?.pop();
    let newest = newest.ok_or_else(|| {
        not_found(format!(
            "job `{}` has no checkpoint in `{}`, so there is nothing to audit; if resumed, it \
             trains from scratch",
            spec.job_name,
            dir.display()
        ))
    })?;
    let options = OpenOptions { codec: spec.codec_type, params: spec.data_reader_params.clone() };
    let data =
        Dataset::open(&spec.training_data, &options).context("cannot open the training data")?;
    if data.fingerprint() != newest.manifest.fingerprint {
        return Err(refuse(format!(
            "the data in `{}` has changed since job `{}` was trained; restore the data to audit \
             the job",
            spec.training_data, spec.job_name
        )));
    }
    let report = edl_master::audit_checkpoint(&spec, data.n_records(), &newest.path);
    report.with_context(|| format!("cannot audit `{}`", newest.path.display()))
}

/// For people.
pub(crate) fn table(report: &AuditReport) -> String {
    let mut text =
        format!("{:<8}{:>14}{:>10}{:>12}\n", "EPOCH", "RECORDS", "MISSING", "DUPLICATED");
    for epoch in &report.epochs {
        let note = if epoch.finished { "" } else { "  (in progress)" };
        text += &format!(
            "{:<8}{:>14}{:>10}{:>12}{note}\n",
            epoch.epoch,
            grouped(epoch.records),
            grouped(epoch.missing),
            grouped(epoch.duplicated)
        );
    }
    let verdict = if report.clean {
        "every record of every finished epoch was trained exactly once"
    } else {
        "some records were not trained exactly once"
    };
    let partitions = counted(report.partitions.len() as u64, "partition");
    text + &format!("{partitions} checked: {verdict}\n")
}

#[cfg(test)]
mod tests {
    use edl_net::proto::{EpochAudit, PartitionAudit};
    use expect_test::expect;

    use super::*;

    #[test]
    fn an_audit_is_a_table_with_a_verdict() {
        let epoch = |epoch, records, missing, finished| EpochAudit {
            epoch,
            records,
            missing,
            duplicated: 0,
            finished,
        };
        let report = AuditReport {
            epochs: vec![epoch(0, 10_000, 0, true), epoch(1, 640, 9_360, false)],
            clean: true,
            ..AuditReport::default()
        };
        expect![[r"
            EPOCH          RECORDS   MISSING  DUPLICATED
            0               10,000         0           0
            1                  640     9,360           0  (in progress)
            0 partitions checked: every record of every finished epoch was trained exactly once
        "]]
        .assert_eq(&table(&report));
        let partitions = vec![PartitionAudit::default()];
        let lost = AuditReport { partitions, ..AuditReport::default() };
        let verdict = "1 partition checked: some records were not trained exactly once\n";
        assert!(table(&lost).ends_with(verdict), "{}", table(&lost));
    }
}
