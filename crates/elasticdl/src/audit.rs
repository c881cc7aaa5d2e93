// SPDX-License-Identifier: Apache-2.0
//! `audit`: verifies that every record was trained exactly once, from the applied sets of all
//! partitions or, after a job's end, from its last checkpoint.

use std::io::Write;

use anyhow::Context as _;
use edl_core::spec::{JobSpec, JobType};
use edl_data::{Dataset, OpenOptions, Progress};
use edl_net::proto::{AuditReport, SkippedBatch};

use crate::cli::StatusArgs;
use crate::cluster::{self, Target};
use crate::console::{counted, eprint, grouped, put_result, write_json};
use crate::custom_loop;
use crate::exit::{Exit, not_found, refuse};
use crate::jobs::Job;

/// Runs the command; fails if a record is missing or was trained twice.
pub(crate) fn run(args: &StatusArgs, out: &mut dyn Write) -> anyhow::Result<Exit> {
    let target = cluster::find(&args.job)?;
    let report = of(&target)?;
    if args.json {
        write_json(&report, out)?;
    } else {
        let is_stream = custom_loop::is_stream(&target.spec()?);
        put_result(out, table(&report, is_stream))?;
    }
    Ok(if report.clean { Exit::Ok } else { Exit::Failed })
}

/// The audit of a job: by its master while it runs, otherwise of its last checkpoint.
pub(crate) fn of(target: &Target) -> anyhow::Result<AuditReport> {
    let spec = target.spec()?;
    if spec.job_type != JobType::Train {
        let name = spec.job_name;
        return Err(refuse(format!("job `{name}` does not train; only training can be audited")));
    }
    match (target.request(async |master| master.audit().await), target) {
        (Ok(report), _) => Ok(report),
        (Err(error), Target::Local(job)) => {
            if job.is_running() {
                // It may have just ended; its last checkpoint has the same content.
                eprint(format_args!("{error:#}; auditing the last checkpoint instead"));
            }
            of_checkpoint(job, &spec)
        }
        (Err(_), Target::Cluster(job)) => {
            let dir = spec.cluster_job_dir().map_err(|invalid| refuse(invalid.0))?;
            let printed = job.run_in_pod("audit", &["elasticdl", "audit", &dir, "--json"])?;
            let start = printed.find('{').unwrap_or(0);
            serde_json::from_str(&printed[start..])
                .map_err(|_| anyhow::anyhow!("{}", printed.trim()))
        }
    }
}

fn of_checkpoint(job: &Job, spec: &JobSpec) -> anyhow::Result<AuditReport> {
    let newest = job.newest_checkpoint(spec).context("cannot read the checkpoints")?;
    let newest = newest.ok_or_else(|| {
        not_found(format!(
            "job `{}` has no checkpoint in `{}`, so there is nothing to audit; if resumed, it \
             trains from scratch",
            spec.job_name,
            job.paths().checkpoints(spec).display()
        ))
    })?;
    let options = OpenOptions { codec: spec.codec_type, params: spec.data_reader_params.clone() };
    let (indexes, progress) = (job.paths().indexes(), Progress::default());
    let data = Dataset::open_indexed(&spec.training_data, &options, Some(&indexes), &progress)
        .context("cannot open the training data")?;
    if data.fingerprint() != newest.manifest.fingerprint {
        return Err(refuse(format!(
            "the data in `{}` has changed since job `{}` was trained; restore the data to audit \
             the job",
            spec.training_data, spec.job_name
        )));
    }
    let report = edl_master::audit_checkpoint(spec, data.n_records(), &newest.path);
    report.with_context(|| format!("cannot audit `{}`", newest.path.display()))
}

/// For people. The records of a stream have no numbers, so its batches were checked.
pub(crate) fn table(report: &AuditReport, is_stream: bool) -> String {
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
    for SkippedBatch { epoch, index, records } in &report.skipped {
        let records = counted(*records, "record");
        text += &format!("batch {epoch}/{index} ({records}) was skipped: it was not finite\n");
    }
    let what = if is_stream { "batch" } else { "record" };
    let verdict = match (report.clean, report.skipped.is_empty()) {
        (true, true) => format!("every {what} of every finished epoch was trained exactly once"),
        (true, false) => {
            format!("every other {what} of every finished epoch was trained exactly once")
        }
        (false, _) => "some records were not trained exactly once".into(),
    };
    let partitions = counted(report.partitions.len() as u64, "partition");
    text += &format!("{partitions} checked: {verdict}\n");
    if is_stream && report.clean {
        text += "the data is a stream: the records in these batches were trained at least once\n";
    }
    text
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
        .assert_eq(&table(&report, false));
        let of_stream = "0 partitions checked: every batch of every finished epoch was trained \
                         exactly once\nthe data is a stream: the records in these batches were \
                         trained at least once\n";
        assert!(table(&report, true).ends_with(of_stream), "{}", table(&report, true));
        let skipped = vec![SkippedBatch { epoch: 1, index: 7, records: 64 }];
        let without = AuditReport { skipped, ..report };
        let verdict = "every other record of every finished epoch was trained exactly once\n";
        assert!(
            table(&without, false)
                .contains("batch 1/7 (64 records) was skipped: it was not finite\n")
        );
        assert!(table(&without, false).ends_with(verdict), "{}", table(&without, false));
        let partitions = vec![PartitionAudit::default()];
        let lost = AuditReport { partitions, ..AuditReport::default() };
        let verdict = "1 partition checked: some records were not trained exactly once\n";
        assert!(table(&lost, false).ends_with(verdict), "{}", table(&lost, false));
    }
}
