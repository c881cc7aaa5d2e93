// SPDX-License-Identifier: Apache-2.0
//! The job's page: one self-contained file, live from the master or saved in the job's folder.

use std::collections::BTreeMap;
use std::sync::Arc;

use edl_core::job_dir::JobDir;
use edl_net::proto::JobStatus;
use edl_page::Page;
use serde_json::{Value, json};

use crate::curve_file::{self, Point};
use crate::history::History;
use crate::usage::Usage;

/// The page, with a place for the data of a job that has ended.
const PAGE: Page = Page {
    title: "elasticdl",
    body: include_str!("page/page.html"),
    style: include_str!("page/page.css"),
    script: concat!(
        include_str!("page/curves.js"),
        include_str!("page/logs.js"),
        include_str!("page/page.js")
    ),
};

/// Evaluations that can be distinguished on a plot; a browser slows down with many more.
const MAX_EVALUATIONS: usize = 60;

/// What is new for watchers of the page. `lives` grows whenever a process came or went, so readers
/// request the history again.
pub(crate) fn update(
    status: &JobStatus,
    history: &History,
    usage: &BTreeMap<String, Usage>,
    lives: u64,
) -> Arc<str> {
    let sample = history.samples.last();
    short(json!({ "status": drawn(status), "sample": sample, "usage": usage, "lives": lives }))
        .into()
}

/// Everything but the curves, for a new watcher.
pub(crate) fn everything(status: &JobStatus, history: &History, lives: u64) -> String {
    short(json!({ "status": drawn(status), "history": history.to_json(), "lives": lives }))
}

/// The curves in a range of time.
pub(crate) fn curves(points: &[Point]) -> String {
    short(curve_file::to_json(points))
}

/// JSON with as many digits as a plot can show: seven, or hundredths of large numbers such as times.
fn short(mut value: Value) -> String {
    round(&mut value);
    value.to_string()
}

fn round(value: &mut Value) {
    match value {
        Value::Number(number) if number.is_f64() => {
            let exact = number.as_f64().unwrap_or_default();
            let text = match exact.abs() >= 1e6 {
                true => format!("{exact:.2}"),
                false => format!("{exact:.6e}"),
            };
            *value = json!(text.parse::<f64>().unwrap_or(exact));
        }
        Value::Array(values) => values.iter_mut().for_each(round),
        Value::Object(values) => values.values_mut().for_each(round),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

/// The status with some of its many evaluations, the last and the best among them.
fn drawn(status: &JobStatus) -> JobStatus {
    let mut drawn = status.clone();
    let evaluations = &status.evaluations;
    let stride = evaluations.len().div_ceil(MAX_EVALUATIONS).max(1);
    let best = evaluations.iter().rposition(|evaluation| evaluation.best);
    let from_end = |index: usize| evaluations.len() - 1 - index;
    let all = evaluations.iter().enumerate();
    let kept =
        all.filter(|(index, _)| from_end(*index).is_multiple_of(stride) || Some(*index) == best);
    drawn.evaluations = kept.map(|(_, evaluation)| evaluation.clone()).collect();
    drawn
}

/// The live page.
pub(crate) fn live() -> String {
    PAGE.with("")
}

/// The page with everything in it.
pub(crate) fn frozen(job_dir: &JobDir, status: &JobStatus, history: &History) -> String {
    let points = curve_file::read(&job_dir.curves(), f64::MIN..f64::MAX);
    let mut points = points.unwrap_or_default();
    if points.is_empty() {
        // A job of an earlier build, or a disk that was full.
        points = history.samples.iter().map(Into::into).collect();
    }
    let history = history.to_json();
    let points = curve_file::to_json(&points);
    PAGE.with(&short(json!({ "status": drawn(status), "history": history, "points": points })))
}

/// The page of a job from what its master has left in the job's folder.
#[must_use]
pub fn report(job_dir: &JobDir, status: &JobStatus) -> String {
    let history = History::load(job_dir).unwrap_or_else(History::new);
    frozen(job_dir, status, &history)
}

#[cfg(test)]
mod tests {
    use edl_core::platform::{InstanceState, Role};
    use edl_net::proto::{self, Evaluation, Instance, Spent};

    use super::*;
    use crate::curve_file::CurveFile;
    use crate::history::{ProcessRecord, Sample, Span};
    use crate::logged;

    /// The history of a week with a million points, processes that changed often, and custom metrics.
    fn week(job_dir: &JobDir) -> History {
        let mut history = History::new();
        let mut points = Vec::new();
        for n in 0..1_000_000_u32 {
            let sample = Sample {
                at_secs: 1.7e9 + f64::from(n) * 0.6048,
                step: u64::from(n) * 7,
                loss: 1.0 / (1.0 + n as f32) + (n % 1009 * 7919 % 1009) as f32 / 1e4,
                learning_rate: 0.1 / (1.0 + f64::from(n)).sqrt(),
                records_per_second: 1e5 / 3.0 + f64::from(n * 31 % 977) / 7.0,
                workers: 200 - n as usize % 3,
                spent: [f64::from(n) / 7.0; 8],
            };
            points.push(Point::from(&sample));
            history.samples.push(sample);
        }
        drop(CurveFile::open(&job_dir.curves(), points.into_iter()).unwrap());
        for n in 0..300_u32 {
            let at = |part: u32| 1.7e9 + f64::from(n * 2000 + part * 7) / 3.0;
            let state = InstanceState::Working;
            let span = |part| Span { from: at(part), state, world: (3 << 40) + u64::from(part) };
            history.processes.push_back(ProcessRecord {
                name: format!("worker-{n}"),
                pid: n,
                from: at(0),
                to: (n < 100).then(|| at(60)),
                why: "worker was killed (SIGKILL); reassigning its work".into(),
                spans: (0..60).map(span).collect(),
            });
        }
        for number in 0..500 {
            let text =
                "worker-17 was killed (SIGKILL); reassigning its work to the others".repeat(2);
            let at_secs = 1.7e9 + number as f64 / 3.0;
            history.events.push_back(proto::Event { number, at_secs, text, ..Default::default() });
        }
        let folder = job_dir.logged();
        std::fs::create_dir(&folder).unwrap();
        let metrics: BTreeMap<_, _> = (0..50).map(|n| (format!("metric_{n}"), 1.0 / 3.0)).collect();
        let line = |step| format!("{}\n", json!({ "step": step, "metrics": metrics }));
        let lines: String = (0..1000).map(line).collect();
        std::fs::write(folder.join("worker-0.jsonl"), lines).unwrap();
        logged::Reader::new(folder, &history.logged).read(&mut history.logged);
        history
    }

    #[test]
    fn the_page_of_a_long_and_large_job_is_small() {
        const MAX_BYTES: usize = 1_000_000;
        let folder = tempfile::tempdir().unwrap();
        let job_dir = JobDir::new(folder.path());
        let history = week(&job_dir);
        let spent =
            Spent { compute: 1e5 / 3.0, idle: 1e4 / 7.0, redo: 1.0 / 3.0, ..Spent::default() };
        let instance = |id| Instance {
            role: Role::Worker.into(),
            id,
            pid: 1_000_000 + id,
            address: "10.20.30.40:50000".into(),
            state: InstanceState::Working.into(),
            lanes: vec![id],
            spent: Some(spent),
            ..Instance::default()
        };
        let metrics = [("loss".to_owned(), 1.0 / 3.0), ("accuracy".to_owned(), 2.0 / 3.0)];
        let evaluation =
            |version| Evaluation { version, metrics: metrics.clone().into(), ..Default::default() };
        let status = JobStatus {
            instances: (0..200).map(instance).collect(),
            evaluations: (0..5000).map(evaluation).collect(),
            events: history.events.iter().rev().take(50).cloned().collect(),
            ..JobStatus::default()
        };
        let all = everything(&status, &history, 7);
        let path = job_dir.curves();
        let points = curves(&curve_file::read(&path, f64::MIN..f64::MAX).unwrap());
        let sizes = [live().len(), all.len(), points.len()];
        assert!(sizes.iter().sum::<usize>() < MAX_BYTES, "{sizes:?}");
        assert!(points.len() > 20_000, "the curves are in it: {sizes:?}");
        assert!(frozen(&job_dir, &status, &history).len() < MAX_BYTES);
        // Zooming in: one hour of the week.
        let hour = curve_file::read(&path, 1.7001e9..1.700_103_6e9).unwrap();
        assert!(hour.len() > 300 && curves(&hour).len() < 100_000, "{}", hour.len());
        let usage = Usage { cpu_secs: 1e6 / 3.0, memory_bytes: 1 << 33 };
        let usage = status.instances.iter().map(|instance| (instance.name(), usage)).collect();
        let update = update(&status, &history, &usage, 7);
        assert!(update.len() < 120_000, "{}", update.len());
    }

    #[test]
    fn numbers_of_the_page_are_as_exact_as_a_plot_needs() {
        let value =
            json!([1.0 / 3.0, f32::MAX, 1_763_589_701.123_456_7, 17, null, -0.0, "0.333333333"]);
        let expected =
            "[0.3333333,3.4028234663852886e+38,1763589701.12,17,null,-0.0,\"0.333333333\"]";
        assert_eq!(short(value), expected);
    }

    #[test]
    fn of_many_evaluations_some_are_drawn_with_the_best_and_the_last() {
        let evaluation =
            |version| Evaluation { version, best: version == 5, ..Evaluation::default() };
        let status =
            |n| JobStatus { evaluations: (0..n).map(evaluation).collect(), ..JobStatus::default() };
        assert_eq!(drawn(&status(60)), status(60));
        let versions = drawn(&status(1000)).evaluations;
        let versions: Vec<u64> = versions.iter().map(|evaluation| evaluation.version).collect();
        assert!(versions.len() <= MAX_EVALUATIONS + 1 && versions.is_sorted(), "{versions:?}");
        assert!(versions.contains(&5) && versions.ends_with(&[999]), "{versions:?}");
    }
}
