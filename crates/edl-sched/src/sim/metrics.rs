// SPDX-License-Identifier: Apache-2.0
//! Numbers from a run: means, quantiles, utilization, fairness.

use std::ops::RangeInclusive;

use edl_core::time::Time;

use crate::fairness::jain;
use crate::resources::Resources;

/// The cluster at one moment, as the published logs have it.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    pub at: Time,
    /// What running pods request, including the system's and leaving pods.
    pub asked: Resources,
    /// The most that any planner could have used, with online pods where they were
    /// ([`crate::sim::bound`]), in GPUs or thousandths of a CPU; none if unknown.
    pub bound: Option<u64>,
    /// The capacity of each node without the system's and online pods, if there are services.
    pub free_by_node: Vec<Resources>,
    pub n_pending: usize,
    pub n_not_submitted: usize,
    pub n_done: usize,
    pub n_service: u32,
    pub n_ps: u32,
    /// Running workers of each job.
    pub workers: Vec<u32>,
}

impl Row {
    #[must_use]
    pub fn secs(&self) -> f64 {
        secs(self.at)
    }

    #[must_use]
    pub fn n_workers(&self) -> u32 {
        self.workers.iter().sum()
    }

    /// Jain's index of the workers of jobs that were submitted and are not done.
    #[must_use]
    pub fn jain(&self) -> f64 {
        let n = self.workers.len() - self.n_not_submitted;
        let shares: Vec<f64> = self.workers.iter().take(n).map(|n| f64::from(*n)).collect();
        jain(&shares)
    }
}

/// The mean of `value` over the rows of a time window, in seconds.
#[must_use]
pub fn mean_over(rows: &[Row], window: RangeInclusive<f64>, value: impl Fn(&Row) -> f64) -> f64 {
    let inside: Vec<f64> =
        rows.iter().filter(|row| window.contains(&row.secs())).map(value).collect();
    mean(&inside)
}

#[must_use]
pub fn mean(values: &[f64]) -> f64 {
    if values.is_empty() { 0.0 } else { values.iter().sum::<f64>() / values.len() as f64 }
}

/// The value that a share `q` of all values does not exceed (0.5 for the median).
#[must_use]
pub fn quantile(values: &[f64], q: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let Some(last) = sorted.len().checked_sub(1) else { return 0.0 };
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a share of a length is a length"
    )]
    let rank = (q.clamp(0.0, 1.0) * sorted.len() as f64).ceil() as usize;
    sorted[rank.saturating_sub(1).min(last)]
}

#[must_use]
pub fn secs(time: Time) -> f64 {
    time.since(Time::ZERO).as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_values_that_occur() {
        let values = [4.0, 1.0, 3.0, 2.0];
        assert!((quantile(&values, 0.5) - 2.0).abs() < 1e-12);
        assert!((quantile(&values, 0.99) - 4.0).abs() < 1e-12);
        assert!((quantile(&[], 0.5)).abs() < 1e-12);
    }
}
