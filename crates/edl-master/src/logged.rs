// SPDX-License-Identifier: Apache-2.0
//! Metrics that custom training loops log (`job.log`).
//!
//! Each worker adds lines to its own file in the job's folder: usually only the worker that leads
//! the others. If it is lost, another worker logs the same step again, so a metric counts once per
//! step, whatever file it is in.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};

use edl_core::series::Series;
use edl_net::proto::LoggedMetric;
use serde::{Deserialize, Serialize};

/// Points of a curve.
const MAX_POINTS: usize = 300;
/// Points of all curves together that the page gets.
const MAX_SHOWN: usize = 9000;
/// Metrics that are kept.
const MAX_NAMES: usize = 1000;
/// What is read of a file at a time; longer lines are not read.
const MAX_READ: u64 = 4 << 20;

/// One line of a file.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub(crate) struct Line {
    pub step: u64,
    #[serde(deserialize_with = "edl_core::nonfinite::map")]
    pub metrics: BTreeMap<String, f64>,
}

/// The value of a metric at a step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Point {
    step: u64,
    #[serde(deserialize_with = "edl_core::nonfinite::number")]
    value: f64,
}

/// What was read so far, for the next master and the page.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Curves {
    /// Bytes that were read of each file.
    read: BTreeMap<String, u64>,
    curves: BTreeMap<String, Series<Point>>,
}

impl Curves {
    /// The last value of each metric.
    pub(crate) fn last(&self) -> Vec<LoggedMetric> {
        let last = |(name, curve): (&String, &Series<Point>)| {
            let Point { step, value } = *curve.last()?;
            Some(LoggedMetric { name: name.clone(), step, value })
        };
        self.curves.iter().filter_map(last).collect()
    }

    /// All curves: the step and the value of each point. Many curves have fewer points each.
    pub(crate) fn to_json(&self) -> serde_json::Value {
        let most = (MAX_SHOWN / self.curves.len().max(1)).max(2);
        let points = |curve: &Series<Point>| -> Vec<(u64, f64)> {
            let all: Vec<_> = curve.iter().map(|point| (point.step, point.value)).collect();
            // From the end, so that the last one is shown.
            let mut kept: Vec<_> =
                all.iter().rev().step_by(all.len().div_ceil(most).max(1)).copied().collect();
            kept.reverse();
            kept
        };
        let all = self.curves.iter().map(|(name, curve)| (name.clone(), points(curve)));
        serde_json::json!(all.collect::<BTreeMap<_, _>>())
    }
}

/// Reads the files of all workers.
pub(crate) struct Reader {
    folder: PathBuf,
    /// The steps of each metric that have a value.
    known: BTreeMap<String, BTreeSet<u64>>,
    has_warned: bool,
}

impl Reader {
    /// Continues after what was read before.
    pub(crate) fn new(folder: PathBuf, before: &Curves) -> Self {
        let mut reader = Self { folder, known: BTreeMap::new(), has_warned: false };
        for (name, end) in &before.read {
            let path = reader.folder.join(name);
            let mut from = 0;
            while from < *end {
                let Ok((lines, next)) = reader.lines(&path, from, *end - from) else { break };
                if next == from {
                    break;
                }
                for line in lines {
                    reader.new_metrics(line);
                }
                from = next;
            }
        }
        reader
    }

    /// Adds what workers have logged since; returns the lines that are new.
    pub(crate) fn read(&mut self, curves: &mut Curves) -> Vec<Line> {
        let mut all = Vec::new();
        for name in self.names() {
            let path = self.folder.join(&name);
            let read = curves.read.get(&name).copied().unwrap_or(0);
            match self.lines(&path, read, MAX_READ) {
                Ok((lines, next)) => {
                    all.extend(lines);
                    if next > 0 {
                        curves.read.insert(name, next);
                    }
                }
                Err(error) => self.warn(&path, &error.to_string()),
            }
        }
        all.sort_by_key(|line| line.step);
        let mut new = Vec::new();
        for line in all {
            let line = self.new_metrics(line);
            for (name, value) in &line.metrics {
                let curve = curves.curves.entry(name.clone());
                let point = Point { step: line.step, value: *value };
                curve.or_insert_with(|| Series::new(MAX_POINTS)).push(point);
            }
            if !line.metrics.is_empty() {
                new.push(line);
            }
        }
        new
    }

    /// The names of the files, in order.
    fn names(&self) -> Vec<String> {
        // There is no folder until something is logged.
        let entries = fs::read_dir(&self.folder).into_iter().flatten().flatten();
        let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
        let mut names: Vec<String> = names.filter(|name| name.ends_with(".jsonl")).collect();
        names.sort_unstable();
        names
    }

    /// The metrics of a line that have no value for this step yet.
    fn new_metrics(&mut self, mut line: Line) -> Line {
        let step = line.step;
        let mut has_room = true;
        line.metrics.retain(|name, _| {
            if self.known.len() >= MAX_NAMES && !self.known.contains_key(name) {
                has_room = false;
                return false;
            }
            self.known.entry(name.clone()).or_default().insert(step)
        });
        if !has_room {
            let why = format!("more than {MAX_NAMES} different metrics; ignoring the others");
            self.warn(&self.folder.clone(), &why);
        }
        line
    }

    /// The whole lines among the next bytes of a file, and the position after them.
    fn lines(&mut self, path: &Path, from: u64, limit: u64) -> io::Result<(Vec<Line>, u64)> {
        let mut file = File::open(path)?;
        let n_bytes = file.metadata()?.len();
        // A file that is shorter than before is another one.
        let from = if n_bytes < from { 0 } else { from };
        if n_bytes == from {
            return Ok((Vec::new(), from));
        }
        file.seek(SeekFrom::Start(from))?;
        let mut bytes = Vec::new();
        file.take(limit.min(MAX_READ)).read_to_end(&mut bytes)?;
        let Some(end) = bytes.iter().rposition(|byte| *byte == b'\n') else {
            let is_too_long = bytes.len() as u64 == MAX_READ;
            if is_too_long {
                self.warn(path, "a line is too long; ignoring it");
            }
            return Ok((Vec::new(), if is_too_long { from + MAX_READ } else { from }));
        };
        let mut lines = Vec::new();
        let whole = bytes.get(..end).unwrap_or_default().split(|byte| *byte == b'\n');
        for text in whole.filter(|text| !text.trim_ascii().is_empty()) {
            match serde_json::from_slice(text) {
                Ok(line) => lines.push(line),
                Err(error) => self.warn(path, &format!("ignoring an invalid line: {error}")),
            }
        }
        Ok((lines, from + end as u64 + 1))
    }

    fn warn(&mut self, path: &Path, why: &str) {
        if !std::mem::replace(&mut self.has_warned, true) {
            tracing::warn!(path = %path.display(), "cannot read logged metrics: {why}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn add(folder: &Path, name: &str, text: &str) {
        use std::io::Write as _;
        let file = File::options().create(true).append(true).open(folder.join(name));
        file.unwrap().write_all(text.as_bytes()).unwrap();
    }

    fn steps(lines: &[Line]) -> Vec<(u64, Vec<&str>)> {
        let names = |line: &Line| line.metrics.len();
        assert!(lines.iter().all(|line| names(line) > 0));
        let of = |line: &'_ Line| line.step;
        lines
            .iter()
            .map(|line| (of(line), line.metrics.keys().map(|n| n.as_str()).collect()))
            .collect()
    }

    #[test]
    fn a_metric_counts_once_per_step_in_any_file_and_for_any_master() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        let mut curves = Curves::default();
        let mut reader = Reader::new(path.join("missing"), &curves);
        assert!(reader.read(&mut curves).is_empty());

        let mut reader = Reader::new(path.into(), &curves);
        add(
            path,
            "worker-0.jsonl",
            "\n{\"step\": 1, \"metrics\": {\"a\": 0.5, \"b\": null}}\n{\"st",
        );
        assert_eq!(steps(&reader.read(&mut curves)), [(1, vec!["a", "b"])]);
        assert!(reader.read(&mut curves).is_empty(), "half a line is not read");
        add(path, "worker-0.jsonl", "ep\": 2, \"metrics\": {\"a\": 0.25}}\nnonsense\n");
        add(path, "worker-7.jsonl", "{\"step\":1,\"metrics\":{\"a\":9,\"c\":1}}\n");
        assert_eq!(steps(&reader.read(&mut curves)), [(1, vec!["c"]), (2, vec!["a"])]);

        // The next master.
        let saved = serde_json::to_vec(&curves).unwrap();
        let mut curves: Curves = serde_json::from_slice(&saved).unwrap();
        add(
            path,
            "worker-7.jsonl",
            "{\"step\":2,\"metrics\":{\"a\":9}}\n{\"step\":3,\"metrics\":{\"a\":1}}\n",
        );
        let mut reader = Reader::new(path.into(), &curves);
        assert_eq!(steps(&reader.read(&mut curves)), [(3, vec!["a"])]);
        let last: Vec<_> = curves.last().into_iter().map(|l| (l.name, l.step, l.value)).collect();
        assert_eq!(last.first(), Some(&("a".to_owned(), 3, 1.0)));
        assert!(last.get(1).is_some_and(|(name, _, value)| name == "b" && value.is_nan()));
        assert_eq!(curves.to_json()["a"], serde_json::json!([[1, 0.5], [2, 0.25], [3, 1.0]]));
    }

    #[test]
    fn a_line_without_an_end_does_not_hold_up_the_rest() {
        let folder = tempfile::tempdir().unwrap();
        let mut curves = Curves::default();
        let mut reader = Reader::new(folder.path().into(), &curves);
        add(folder.path(), "worker-0.jsonl", &"x".repeat(5 << 20));
        add(folder.path(), "worker-0.jsonl", "\n{\"step\":4,\"metrics\":{\"a\":1}}\n");
        assert!(reader.read(&mut curves).is_empty());
        assert_eq!(steps(&reader.read(&mut curves)), [(4, vec!["a"])]);
    }
}
