// SPDX-License-Identifier: Apache-2.0
//! The annotations of a job's ConfigMap by which an operator and the job's master communicate.
//! Only this module writes and parses their text.

use edl_core::job::JobState;
use edl_core::spec::MAX_WORKERS;
use k8s_openapi::api::core::v1::ConfigMap;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// The operator's decision: how many workers to run.
const WORKERS: &str = "elasticdl.org/workers";
/// The operator's preference: workers to remove first, e.g. `3,7`.
const LEAVE: &str = "elasticdl.org/leave";
/// The master's report, as JSON.
const STATUS: &str = "elasticdl.org/status";

/// How many workers an operator assigns to a job.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Grant {
    pub workers: u32,
    /// Workers to remove first if there are too many, because other jobs need the capacity of
    /// their nodes. The master may choose others.
    pub leave: Vec<u32>,
}

impl Grant {
    /// The grant on a ConfigMap; none if there is none, or if it is not a number of workers that a job
    /// can have.
    #[must_use]
    pub fn read(map: &ConfigMap) -> Option<Self> {
        let workers = annotation(map, WORKERS)?.trim().parse().ok()?;
        if workers > MAX_WORKERS {
            return None;
        }
        let leave = annotation(map, LEAVE).unwrap_or_default();
        let leave = leave.split(',').filter_map(|number| number.trim().parse().ok()).collect();
        Some(Self { workers, leave })
    }

    /// The merge patch that writes the grant.
    #[must_use]
    pub fn patch(&self) -> Value {
        let leave: Vec<String> = self.leave.iter().map(ToString::to_string).collect();
        let leave = (!leave.is_empty()).then(|| leave.join(","));
        patch(json!({ WORKERS: self.workers.to_string(), LEAVE: leave }))
    }

    /// The merge patch that stops a job. It also removes the master's report, which would be out
    /// of date when the job resumes.
    #[must_use]
    pub fn stop_patch() -> Value {
        patch(json!({ WORKERS: "0", LEAVE: null, STATUS: null }))
    }
}

/// The progress of a job, as its master reports it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct StatusNote {
    pub state: JobState,
    pub records_done: u64,
    /// None: it runs until it is stopped.
    pub records_total: Option<u64>,
    pub records_per_second: Option<f64>,
    /// Running workers.
    pub workers: u32,
    pub eta_secs: Option<f64>,
    pub step: u64,
}

impl StatusNote {
    /// The note on a ConfigMap; none if there is none, or if it cannot be parsed.
    #[must_use]
    pub fn read(map: &ConfigMap) -> Option<Self> {
        serde_json::from_str(annotation(map, STATUS)?).ok()
    }

    /// The merge patch that writes the note.
    #[must_use]
    pub fn patch(&self) -> Value {
        patch(json!({ STATUS: json!(self).to_string() }))
    }

    /// `42 %`, or the number of records if there is no end.
    #[must_use]
    pub fn progress(&self) -> String {
        match self.records_total {
            Some(total) if total > 0 => {
                let done = self.records_done.min(total);
                format!("{} %", u128::from(done) * 100 / u128::from(total))
            }
            Some(_) | None => format!("{} records", self.records_done),
        }
    }

    /// `3h20m`, `12m`, `40s`; empty if unknown.
    #[must_use]
    pub fn eta(&self) -> String {
        let Some(secs) = self.eta_secs.filter(|secs| secs.is_finite() && *secs > 0.0) else {
            return String::new();
        };
        #[expect(clippy::cast_possible_truncation, reason = "a float to integer cast saturates")]
        #[expect(clippy::cast_sign_loss, reason = "checked above")]
        let secs = secs.ceil() as u64;
        match secs {
            // Rounded to tens, because a status is written whenever it changes.
            0..120 => format!("{}s", secs.div_ceil(10) * 10),
            120..7200 => format!("{}m", secs.div_ceil(60)),
            _ => format!("{}h{:02}m", secs / 3600, secs % 3600 / 60),
        }
    }
}

fn annotation<'a>(map: &'a ConfigMap, name: &str) -> Option<&'a str> {
    map.metadata.annotations.as_ref()?.get(name).map(String::as_str)
}

fn patch(annotations: Value) -> Value {
    json!({ "metadata": { "annotations": annotations } })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(annotations: Value) -> ConfigMap {
        serde_json::from_value(patch(annotations)).expect("a ConfigMap")
    }

    #[test]
    fn a_grant_is_read_as_it_was_written() {
        assert_eq!(Grant::read(&map(json!({}))), None);
        for not_a_number_of_workers in ["many", "-1", "10001", "4294967295"] {
            let grant = Grant::read(&map(json!({ WORKERS: not_a_number_of_workers })));
            assert_eq!(grant, None, "{not_a_number_of_workers}");
        }
        let four = Grant { workers: 4, leave: Vec::new() };
        assert_eq!(Grant::read(&map(json!({ WORKERS: "4" }))), Some(four));
        let two = Grant { workers: 2, leave: vec![3, 7] };
        assert_eq!(Grant::read(&map(json!({ WORKERS: "2", LEAVE: "3, 7" }))), Some(two.clone()));
        let written = two.patch();
        assert_eq!(written["metadata"]["annotations"], json!({ WORKERS: "2", LEAVE: "3,7" }));
    }

    #[test]
    fn a_status_is_read_and_shown_in_short() {
        let text = r#"{"state":"running","records_done":420,"records_total":1000,
            "records_per_second":10.5,"workers":2,"eta_secs":7322.0,"step":7,"more":1}"#;
        let note = StatusNote::read(&map(json!({ STATUS: text }))).unwrap();
        assert_eq!((note.progress().as_str(), note.eta().as_str()), ("42 %", "2h02m"));
        assert_eq!(StatusNote::read(&serde_json::from_value(note.patch()).unwrap()), Some(note));
        assert_eq!(StatusNote::read(&map(json!({ STATUS: "{" }))), None);
        assert_eq!(StatusNote::read(&map(json!({}))), None);
    }

    #[test]
    fn unknown_progress_is_not_guessed() {
        let endless = StatusNote { records_done: 7, ..StatusNote::default() };
        assert_eq!((endless.progress().as_str(), endless.eta().as_str()), ("7 records", ""));
        let eta = |secs: f64| StatusNote { eta_secs: Some(secs), ..StatusNote::default() }.eta();
        assert_eq!([3.0, 61.0, 125.0, -1.0, f64::NAN].map(eta), ["10s", "70s", "3m", "", ""]);
    }
}
