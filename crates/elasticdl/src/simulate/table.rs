// SPDX-License-Identifier: Apache-2.0
//! Several runs side by side: one line for each, and the mean of what belongs together.

use std::collections::BTreeMap;
use std::io::{self, Write};

use edl_sched::sim::Report;
use edl_sched::sim::metrics::{Row as Moment, mean, mean_over, quantile, secs};
use serde::Serialize;

/// One run in numbers.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Row {
    scenario: String,
    policy: &'static str,
    seed: u64,
    jobs: usize,
    jobs_done: usize,
    wait_mean_secs: f64,
    wait_p99_secs: f64,
    /// From submission to end, of jobs that ended.
    completion_mean_secs: f64,
    completion_p50_secs: f64,
    completion_p99_secs: f64,
    makespan_secs: f64,
    utilization_percent: f64,
    /// Over the last tenth of the run.
    jain: f64,
    resizes: u32,
    stops: u32,
    /// Pod-seconds of online services without a node.
    deficit_pod_secs: f64,
}

pub(super) fn rows(reports: &[Report]) -> Vec<Row> {
    reports.iter().map(row).collect()
}

fn row(report: &Report) -> Row {
    let (waits, times) = (report.waits(), report.completion_times());
    let end = secs(report.end);
    Row {
        scenario: report.scenario.clone(),
        policy: report.policy.name(),
        seed: report.seed,
        jobs: waits.len(),
        jobs_done: times.len(),
        wait_mean_secs: mean(&waits),
        wait_p99_secs: quantile(&waits, 0.99),
        completion_mean_secs: mean(&times),
        completion_p50_secs: quantile(&times, 0.5),
        completion_p99_secs: quantile(&times, 0.99),
        makespan_secs: report.makespan(),
        utilization_percent: report.mean_utilization(0.0, end),
        jain: mean_over(&report.rows, 0.9 * end..=end, Moment::jain),
        resizes: report.n_resizes(),
        stops: report.n_stops(),
        deficit_pod_secs: report.deficit_without_node(),
    }
}

/// One line for each run, then means: over the seeds of each scenario where there are several,
/// else over the scenarios.
pub(super) fn write(reports: &[Report], out: &mut dyn Write) -> io::Result<()> {
    let rows = rows(reports);
    let width = rows.iter().map(|row| row.scenario.len()).max().unwrap_or(0).max(8) + 2;
    writeln!(
        out,
        "{:<width$}{:<15}{:>4}  {:>9}  {:>14}  {:>22}  {:>9}  {:>6}  {:>5}  {:>7}  {:>5}  {:>9}",
        "SCENARIO",
        "POLICY",
        "SEED",
        "DONE",
        "WAIT MEAN/P99",
        "COMPLETION MEAN/50/99",
        "MAKESPAN",
        "USED %",
        "JAIN",
        "RESIZES",
        "STOPS",
        "NO NODE"
    )?;
    for row in &rows {
        write_line(row, &row.seed.to_string(), width, out)?;
    }
    let has_seeds = rows.iter().any(|row| row.seed != rows[0].seed);
    let mut groups: BTreeMap<(&str, &str), Vec<&Row>> = BTreeMap::new();
    for row in &rows {
        let scenario = if has_seeds { row.scenario.as_str() } else { "all" };
        groups.entry((scenario, row.policy)).or_default().push(row);
    }
    for ((scenario, _), of) in groups.iter().filter(|(_, of)| of.len() > 1) {
        write_line(&mean_of(scenario, of), "mean", width, out)?;
    }
    writeln!(out, "times in seconds; NO NODE: pod-seconds of online services without a node")
}

fn write_line(row: &Row, seed: &str, width: usize, out: &mut dyn Write) -> io::Result<()> {
    let done = format!("{}/{}", row.jobs_done, row.jobs);
    let wait = format!("{:.1}/{:.1}", row.wait_mean_secs, row.wait_p99_secs);
    let (completion, makespan) = match row.jobs_done {
        0 => ("-".to_owned(), "-".to_owned()),
        _ => (
            format!(
                "{:.0}/{:.0}/{:.0}",
                row.completion_mean_secs, row.completion_p50_secs, row.completion_p99_secs
            ),
            format!("{:.0}", row.makespan_secs),
        ),
    };
    writeln!(
        out,
        "{:<width$}{:<15}{seed:>4}  {done:>9}  {wait:>14}  {completion:>22}  {makespan:>9}  {:>6.1}  {:>5.3}  {:>7}  {:>5}  {:>9.0}",
        row.scenario,
        row.policy,
        row.utilization_percent,
        row.jain,
        row.resizes,
        row.stops,
        row.deficit_pod_secs,
    )
}

fn mean_of(scenario: &str, rows: &[&Row]) -> Row {
    let over =
        |value: fn(&Row) -> f64| mean(&rows.iter().map(|row| value(row)).collect::<Vec<_>>());
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "the mean of such numbers is one"
    )]
    let whole = |value: fn(&Row) -> f64| over(value).round() as u32;
    Row {
        scenario: scenario.to_owned(),
        policy: rows[0].policy,
        seed: 0,
        jobs: rows.iter().map(|row| row.jobs).sum(),
        jobs_done: rows.iter().map(|row| row.jobs_done).sum(),
        wait_mean_secs: over(|row| row.wait_mean_secs),
        wait_p99_secs: over(|row| row.wait_p99_secs),
        completion_mean_secs: over(|row| row.completion_mean_secs),
        completion_p50_secs: over(|row| row.completion_p50_secs),
        completion_p99_secs: over(|row| row.completion_p99_secs),
        makespan_secs: over(|row| row.makespan_secs),
        utilization_percent: over(|row| row.utilization_percent),
        jain: over(|row| row.jain),
        resizes: whole(|row| f64::from(row.resizes)),
        stops: whole(|row| f64::from(row.stops)),
        deficit_pod_secs: over(|row| row.deficit_pod_secs),
    }
}
