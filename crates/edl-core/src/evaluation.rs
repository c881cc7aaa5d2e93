// SPDX-License-Identifier: Apache-2.0
//! One evaluation of the model, in shards, and the history of all of them.

use std::collections::BTreeMap;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::id::EvalId;
use crate::metric::{Measures, Metric};
use crate::pool::Pool;

/// An evaluation under way.
#[derive(Clone, Debug, PartialEq)]
pub struct Evaluation {
    pub id: EvalId,
    pub version: u64,
    pub epoch: u32,
    pub shards: Pool,
    n_records: u64,
    records_per_shard: u64,
    results: BTreeMap<u32, Measures>,
}

/// An evaluation's result.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Evaluated {
    pub version: u64,
    pub epoch: u32,
    #[serde(deserialize_with = "crate::nonfinite::map")]
    pub metrics: BTreeMap<String, f64>,
    pub is_best: bool,
}

impl Evaluation {
    #[must_use]
    pub fn new(
        id: EvalId,
        version: u64,
        epoch: u32,
        n_records: u64,
        records_per_shard: u64,
    ) -> Self {
        let n_shards = u32::try_from(n_records.div_ceil(records_per_shard)).unwrap_or(u32::MAX);
        let results = BTreeMap::new();
        Self {
            id,
            version,
            epoch,
            shards: Pool::new(n_shards),
            n_records,
            records_per_shard,
            results,
        }
    }

    #[must_use]
    pub fn records(&self, shard: u32) -> Range<u64> {
        shard_records(shard, self.n_records, self.records_per_shard)
    }

    /// Takes the measures of a shard; the first report of each counts.
    pub fn done(&mut self, shard: u32, measures: Measures) -> bool {
        let is_news = self.shards.done(shard);
        if is_news {
            self.results.insert(shard, measures);
        }
        is_news
    }

    /// The values over all shards, merged in the order of shards.
    #[must_use]
    pub fn values(&self, metrics: &[Metric]) -> BTreeMap<String, f64> {
        let mut all = Measures::new(metrics);
        self.results.values().for_each(|measures| all.merge(measures));
        all.values()
    }
}

/// The records of one of the equal shards that `n_records` are split into.
#[must_use]
pub fn shard_records(shard: u32, n_records: u64, records_per_shard: u64) -> Range<u64> {
    let start = u64::from(shard) * records_per_shard;
    start..n_records.min(start + records_per_shard)
}

/// Whether `metrics` beat everything in `history`, judged by the first of `order` that both have.
/// Only finite values are compared.
#[must_use]
pub fn is_best(order: &[Metric], metrics: &BTreeMap<String, f64>, history: &[Evaluated]) -> bool {
    let Some((metric, value)) = order.iter().find_map(|m| Some((m, *metrics.get(&m.name)?))) else {
        return false;
    };
    let earlier = history.iter().filter_map(|evaluated| evaluated.metrics.get(&metric.name));
    let beats = |other: &f64| if metric.more_is_better { value > *other } else { value < *other };
    value.is_finite() && earlier.filter(|other| other.is_finite()).all(beats)
}

/// Whether the last `patience` evaluations brought nothing better.
#[must_use]
pub fn is_stalled(patience: u32, history: &[Evaluated]) -> bool {
    let since_best = history.iter().rev().take_while(|evaluated| !evaluated.is_best).count();
    patience > 0 && since_best >= patience as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    fn evaluated(history: &mut Vec<Evaluated>, accuracy: f64) {
        let metrics = BTreeMap::from([("accuracy".to_owned(), accuracy)]);
        let is_best = is_best(&[Metric::accuracy()], &metrics, history);
        history.push(Evaluated { version: 0, epoch: 0, metrics, is_best });
    }

    #[test]
    fn training_stalls_after_patience_evaluations_without_a_better_one() {
        let mut history = Vec::new();
        for accuracy in [0.5, 0.7, 0.6, 0.7] {
            evaluated(&mut history, accuracy);
        }
        assert_eq!(
            history.iter().map(|e| e.is_best).collect::<Vec<_>>(),
            [true, true, false, false]
        );
        assert!(is_stalled(2, &history));
        assert!(!is_stalled(3, &history));
        assert!(!is_stalled(0, &history));
    }

    #[test]
    fn a_value_that_is_not_finite_is_never_the_best_and_every_finite_one_beats_it() {
        let mut history = Vec::new();
        for accuracy in [f64::NAN, f64::INFINITY, 0.5, f64::NEG_INFINITY, f64::NAN, 0.6] {
            evaluated(&mut history, accuracy);
        }
        let best: Vec<bool> = history.iter().map(|evaluated| evaluated.is_best).collect();
        assert_eq!(best, [false, false, true, false, false, true]);
        assert!(is_stalled(2, &history[..5]));
    }

    #[test]
    fn a_value_that_is_not_finite_survives_a_file() {
        let mut history = Vec::new();
        evaluated(&mut history, f64::INFINITY);
        let json = serde_json::to_string(&history).unwrap();
        let read: Vec<Evaluated> = serde_json::from_str(&json).unwrap();
        assert!(read[0].metrics["accuracy"].is_nan());
    }

    #[test]
    fn results_are_merged_in_shard_order_no_matter_which_came_first() {
        let piece = |loss| {
            let mut measures = Measures::new(&[Metric::loss()]);
            measures.add_loss(loss, 3);
            measures
        };
        let values = |order: [u32; 3]| {
            let mut evaluation = Evaluation::new(EvalId(0), 1, 0, 9, 3);
            for shard in order {
                assert!(evaluation.done(shard, piece(0.1 * f64::from(shard + 1))));
                assert!(!evaluation.done(shard, piece(9.0)));
            }
            evaluation.values(&[Metric::loss()])["loss"].to_bits()
        };
        assert_eq!(values([0, 1, 2]), values([2, 0, 1]));
    }
}
