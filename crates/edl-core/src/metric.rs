// SPDX-License-Identifier: Apache-2.0
//! Measures of a model that can be taken in pieces and merged in a fixed order.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// Score buckets of the AUC: fine enough that the error stays below 1e-4 on real data.
const AUC_BUCKETS: usize = 4096;

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Metric {
    Accuracy,
    Auc,
    Precision,
    Recall,
    Mse,
    Loss,
}

/// The running sums of some metrics over the records seen so far.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Measures {
    sums: BTreeMap<Metric, Vec<f64>>,
}

impl Metric {
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Accuracy => "accuracy",
            Self::Auc => "auc",
            Self::Precision => "precision",
            Self::Recall => "recall",
            Self::Mse => "mse",
            Self::Loss => "loss",
        }
    }

    /// Whether a larger value is a better one.
    #[must_use]
    pub fn more_is_better(self) -> bool {
        !matches!(self, Self::Mse | Self::Loss)
    }

    fn n_sums(self) -> usize {
        match self {
            Self::Auc => 2 * AUC_BUCKETS,
            Self::Accuracy | Self::Precision | Self::Recall | Self::Mse | Self::Loss => 2,
        }
    }
}

impl Measures {
    #[must_use]
    pub fn new(metrics: &[Metric]) -> Self {
        Self { sums: metrics.iter().map(|m| (*m, vec![0.0; m.n_sums()])).collect() }
    }

    /// One record of a classifier: whether its best class was the right one.
    pub fn add_class(&mut self, is_right: bool) {
        self.ratio(Metric::Accuracy, f64::from(u8::from(is_right)), 1.0);
    }

    /// One record of a binary model: the predicted probability and the truth.
    pub fn add_binary(&mut self, probability: f32, is_positive: bool) {
        let says_yes = probability >= 0.5;
        self.add_class(says_yes == is_positive);
        let hit = f64::from(u8::from(says_yes && is_positive));
        if says_yes {
            self.ratio(Metric::Precision, hit, 1.0);
        }
        if is_positive {
            self.ratio(Metric::Recall, hit, 1.0);
        }
        if let Some(sums) = self.sums.get_mut(&Metric::Auc) {
            #[expect(clippy::cast_possible_truncation, reason = "clamped to the buckets")]
            #[expect(clippy::cast_sign_loss, reason = "clamped to the buckets")]
            let bucket = ((probability.clamp(0.0, 1.0) * 4096.0) as usize).min(AUC_BUCKETS - 1);
            sums[bucket + if is_positive { AUC_BUCKETS } else { 0 }] += 1.0;
        }
    }

    /// One record of a regression.
    pub fn add_value(&mut self, predicted: f32, actual: f32) {
        let error = f64::from(predicted) - f64::from(actual);
        self.ratio(Metric::Mse, error * error, 1.0);
    }

    /// The mean loss of `n_records` records.
    pub fn add_loss(&mut self, mean: f64, n_records: u32) {
        self.ratio(Metric::Loss, mean * f64::from(n_records), f64::from(n_records));
    }

    fn ratio(&mut self, metric: Metric, above: f64, below: f64) {
        if let Some(sums) = self.sums.get_mut(&metric) {
            sums[0] += above;
            sums[1] += below;
        }
    }

    /// Adds another piece. The order of merging is part of the result's last bits.
    pub fn merge(&mut self, other: &Self) {
        for (metric, theirs) in &other.sums {
            let ours = self.sums.entry(*metric).or_insert_with(|| vec![0.0; theirs.len()]);
            for (our, their) in ours.iter_mut().zip(theirs) {
                *our += their;
            }
        }
    }

    /// The values; a metric that saw nothing is left out.
    #[must_use]
    pub fn values(&self) -> BTreeMap<String, f64> {
        let value = |(metric, sums): (&Metric, &Vec<f64>)| {
            let value = if *metric == Metric::Auc { auc(sums) } else { sums[0] / sums[1] };
            value.is_finite().then(|| (metric.name().to_owned(), value))
        };
        self.sums.iter().filter_map(value).collect()
    }

    /// Whether these sums have the form of `metrics`: pieces from the wire are checked by it.
    #[must_use]
    pub fn fits(&self, metrics: &[Metric]) -> bool {
        self.sums.len() == metrics.len()
            && metrics.iter().all(|m| self.sums.get(m).is_some_and(|s| s.len() == m.n_sums()))
    }
}

/// The chance that a positive scores above a negative; ties inside a bucket count half.
fn auc(sums: &[f64]) -> f64 {
    let (negatives, positives) = sums.split_at(AUC_BUCKETS);
    let (mut below, mut pairs) = (0.0, 0.0);
    for (negative, positive) in negatives.iter().zip(positives) {
        pairs += positive * (below + negative / 2.0);
        below += negative;
    }
    pairs / (below * positives.iter().sum::<f64>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merged_pieces_measure_like_one_whole() {
        let metrics = [Metric::Accuracy, Metric::Auc, Metric::Precision, Metric::Recall];
        let records = [(0.9, true), (0.2, false), (0.6, false), (0.7, true), (0.1, true)];
        let mut whole = Measures::new(&metrics);
        let mut merged = Measures::new(&metrics);
        for (probability, is_positive) in records {
            whole.add_binary(probability, is_positive);
            let mut piece = Measures::new(&metrics);
            piece.add_binary(probability, is_positive);
            merged.merge(&piece);
        }
        assert_eq!(whole, merged);
        assert!(whole.fits(&metrics));
        let values = whole.values();
        assert!((values["accuracy"] - 0.6).abs() < 1e-12);
        assert!((values["auc"] - 4.0 / 6.0).abs() < 1e-12);
        assert!((values["precision"] - 2.0 / 3.0).abs() < 1e-12);
        assert!((values["recall"] - 2.0 / 3.0).abs() < 1e-12);
    }
}
