// SPDX-License-Identifier: Apache-2.0
//! Which pods Kubernetes may evict for others: a PriorityClass, or two of them for a share of the
//! workers and the rest.

use std::str::FromStr;

/// The name of a PriorityClass; empty: none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PriorityClass(String);

/// The priority of workers.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum WorkerPriority {
    #[default]
    Unset,
    Class(String),
    /// The share of workers that get `high_priority_class`.
    Share(f64),
}

impl PriorityClass {
    #[must_use]
    pub fn name(&self) -> Option<&str> {
        Some(self.0.as_str()).filter(|name| !name.is_empty())
    }
}

impl FromStr for PriorityClass {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse::<WorkerPriority>()? {
            WorkerPriority::Unset => Ok(Self::default()),
            WorkerPriority::Class(name) => Ok(Self(name)),
            WorkerPriority::Share(_) => Err(format!(
                "`{text}` is a fraction, which only --worker_pod_priority accepts; use the name of \
                 a PriorityClass"
            )),
        }
    }
}

impl FromStr for WorkerPriority {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        if text.is_empty() {
            return Ok(Self::Unset);
        }
        match text.parse::<f64>() {
            Ok(share) if (0.0..=1.0).contains(&share) => Ok(Self::Share(share)),
            Ok(_) => Err(format!(
                "`{text}` is not a fraction of the workers; use a number from 0 to 1, or the name \
                 of a PriorityClass"
            )),
            Err(_) => {
                super::check_name("a PriorityClass", text)?;
                Ok(Self::Class(text.to_owned()))
            }
        }
    }
}

/// How many of `workers` get the high class.
#[must_use]
pub fn n_high(share: f64, workers: u32) -> u32 {
    #[expect(clippy::cast_possible_truncation, reason = "a share of a u32 fits one")]
    #[expect(clippy::cast_sign_loss, reason = "a share is not negative")]
    let high = (f64::from(workers) * share).ceil() as u32;
    high.min(workers)
}

/// Whether the worker with this number gets the high priority, where running workers are not
/// counted: high priorities go to the two ends of the numbers in turn.
#[must_use]
pub fn is_high(share: f64, worker: u32, workers: u32) -> bool {
    let workers = workers.max(1);
    let slot = worker % workers;
    let from_end = workers - 1 - slot;
    let rank = if slot <= from_end { 2 * slot } else { 2 * from_end + 1 };
    rank < n_high(share, workers)
}
