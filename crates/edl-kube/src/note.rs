// SPDX-License-Identifier: Apache-2.0
//! What a master writes on its job's ConfigMap: how far it is.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::names;

/// How far a job is, in its master's words.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct StatusNote {
    /// `starting`, `running`, `evaluating`, `recovering`, `finishing`, `succeeded`, `failed`,
    /// `stopped`.
    pub state: String,
    pub records_done: u64,
    /// None: it goes on until it is stopped.
    pub records_total: Option<u64>,
    pub records_per_second: Option<f64>,
    /// Workers that work.
    pub workers: u32,
    pub eta_secs: Option<f64>,
    pub step: u64,
}

impl StatusNote {
    /// The note among the annotations of a ConfigMap; what cannot be read is none.
    #[must_use]
    pub fn read(notes: &BTreeMap<String, String>) -> Option<Self> {
        serde_json::from_str(notes.get(names::STATUS_NOTE)?).ok()
    }

    /// `42 %`; the number of records where there is no end.
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

    /// `3h20m`, `12m`, `40s`; nothing where it is not known.
    #[must_use]
    pub fn eta(&self) -> String {
        let Some(secs) = self.eta_secs.filter(|secs| secs.is_finite() && *secs > 0.0) else {
            return String::new();
        };
        #[expect(clippy::cast_possible_truncation, reason = "a float to integer cast saturates")]
        #[expect(clippy::cast_sign_loss, reason = "checked above")]
        let secs = secs.ceil() as u64;
        match secs {
            // Seconds in tens: a status that changes every second is written every second.
            0..120 => format!("{}s", secs.div_ceil(10) * 10),
            120..7200 => format!("{}m", secs.div_ceil(60)),
            _ => format!("{}h{:02}m", secs / 3600, secs % 3600 / 60),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_is_read_and_told_in_short_words() {
        let text = r#"{"state":"running","records_done":420,"records_total":1000,
            "records_per_second":10.5,"workers":2,"eta_secs":7322.0,"step":7,"more":1}"#;
        let notes = [(names::STATUS_NOTE.to_owned(), text.to_owned())].into();
        let note = StatusNote::read(&notes).unwrap();
        assert_eq!((note.progress().as_str(), note.eta().as_str()), ("42 %", "2h02m"));
        assert_eq!(StatusNote::read(&[(names::STATUS_NOTE.into(), "{".into())].into()), None);
        assert_eq!(StatusNote::read(&BTreeMap::new()), None);
    }

    #[test]
    fn what_is_not_known_is_not_guessed() {
        let endless = StatusNote { records_done: 7, ..StatusNote::default() };
        assert_eq!((endless.progress().as_str(), endless.eta().as_str()), ("7 records", ""));
        let eta = |secs: f64| StatusNote { eta_secs: Some(secs), ..StatusNote::default() }.eta();
        assert_eq!([3.0, 61.0, 125.0, -1.0, f64::NAN].map(eta), ["10s", "70s", "3m", "", ""]);
    }
}
