// SPDX-License-Identifier: Apache-2.0
//! Metrics of a model that are computed in pieces and merged in a fixed order.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::named::named;

/// Score buckets of the AUC: fine enough that the error stays below 1e-4 on real data.
const AUC_BUCKETS: usize = 4096;

/// What is measured.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "Written")]
pub struct Metric {
    pub name: String,
    pub kind: MetricKind,
    /// Whether a larger value is a better one.
    pub more_is_better: bool,
}

named! {
    /// How a metric's value follows from its sums.
    MetricKind {
        /// The first sum divided by the second.
        #[default]
        Ratio = "ratio",
        /// The square root of that.
        RootRatio = "root_ratio",
        /// Counts of negatives per bucket of their scores, then those of positives.
        Auc = "auc",
    }
}

/// A metric as it may be written; older builds wrote only the name of a built-in one.
#[derive(Deserialize)]
#[serde(untagged)]
enum Written {
    Name(String),
    Whole { name: String, kind: MetricKind, more_is_better: bool },
}

/// The running sums of some metrics over the records seen so far.
#[derive(Clone, Debug, PartialEq)]
pub struct Measures {
    sums: BTreeMap<String, Sums>,
}

/// The running sums of one metric.
#[derive(Clone, Debug, PartialEq)]
pub struct Sums {
    pub kind: MetricKind,
    pub sums: Vec<f64>,
}

/// The metrics that [`Measures`] can take record by record.
macro_rules! built_in {
    ($($name:ident: $kind:ident, more_is_better: $more_is_better:literal;)*) => {
        impl Metric {
            $(#[must_use]
            pub fn $name() -> Self {
                let (name, kind) = (stringify!($name).to_owned(), MetricKind::$kind);
                Self { name, kind, more_is_better: $more_is_better }
            })*

            fn built_in(name: &str) -> Option<Self> {
                [$(Self::$name()),*].into_iter().find(|metric| metric.name == name)
            }
        }
    };
}

built_in! {
    accuracy: Ratio, more_is_better: true;
    auc: Auc, more_is_better: true;
    precision: Ratio, more_is_better: true;
    recall: Ratio, more_is_better: true;
    mse: Ratio, more_is_better: false;
    loss: Ratio, more_is_better: false;
}

impl TryFrom<Written> for Metric {
    type Error = String;

    fn try_from(written: Written) -> Result<Self, String> {
        match written {
            Written::Whole { name, kind, more_is_better } => {
                Ok(Self { name, kind, more_is_better })
            }
            Written::Name(name) => Self::built_in(&name)
                .ok_or_else(|| format!("unknown metric `{name}`; give name, kind and direction")),
        }
    }
}

impl MetricKind {
    /// How many sums a metric of this kind has.
    #[must_use]
    pub fn n_sums(self) -> usize {
        match self {
            Self::Ratio | Self::RootRatio => 2,
            Self::Auc => 2 * AUC_BUCKETS,
        }
    }
}

impl Sums {
    fn new(kind: MetricKind) -> Self {
        Self { kind, sums: vec![0.0; kind.n_sums()] }
    }

    fn has_form(&self, kind: MetricKind) -> bool {
        self.kind == kind && self.sums.len() == kind.n_sums()
    }

    fn add(&mut self, sums: &[f64]) {
        for (our, their) in self.sums.iter_mut().zip(sums) {
            *our += their;
        }
    }

    /// None if no record counts.
    fn value(&self) -> Option<f64> {
        match self.kind {
            MetricKind::Ratio => ratio(self.sums[0], self.sums[1]),
            MetricKind::RootRatio => ratio(self.sums[0], self.sums[1]).map(f64::sqrt),
            MetricKind::Auc => auc(&self.sums),
        }
    }
}

impl Measures {
    #[must_use]
    pub fn new(metrics: &[Metric]) -> Self {
        let sums = |metric: &Metric| (metric.name.clone(), Sums::new(metric.kind));
        Self { sums: metrics.iter().map(sums).collect() }
    }

    /// One record of a classifier: whether its best class was the right one.
    pub fn add_class(&mut self, is_right: bool) {
        self.ratio("accuracy", f64::from(u8::from(is_right)), 1.0);
    }

    /// One record of a binary model: the predicted probability and the truth.
    pub fn add_binary(&mut self, probability: f32, is_positive: bool) {
        let says_yes = probability >= 0.5;
        self.add_class(says_yes == is_positive);
        let hit = f64::from(u8::from(says_yes && is_positive));
        if says_yes {
            self.ratio("precision", hit, 1.0);
        }
        if is_positive {
            self.ratio("recall", hit, 1.0);
        }
        if let Some(Sums { kind: MetricKind::Auc, sums }) = self.sums.get_mut("auc") {
            #[expect(clippy::cast_possible_truncation, reason = "clamped to the buckets")]
            #[expect(clippy::cast_sign_loss, reason = "clamped to the buckets")]
            let bucket = ((probability.clamp(0.0, 1.0) * 4096.0) as usize).min(AUC_BUCKETS - 1);
            sums[bucket + if is_positive { AUC_BUCKETS } else { 0 }] += 1.0;
        }
    }

    /// One record of a regression.
    pub fn add_value(&mut self, predicted: f32, actual: f32) {
        let error = f64::from(predicted) - f64::from(actual);
        self.ratio("mse", error * error, 1.0);
    }

    /// The mean loss of `n_records` records.
    pub fn add_loss(&mut self, mean: f64, n_records: u32) {
        self.ratio("loss", mean * f64::from(n_records), f64::from(n_records));
    }

    /// Sums that a model took itself, of the metric `name`; whether there is such a
    /// metric and they have the form of its kind.
    #[must_use]
    pub fn add_sums(&mut self, name: &str, sums: &[f64]) -> bool {
        let ours = self.sums.get_mut(name).filter(|ours| ours.sums.len() == sums.len());
        let is_known = ours.is_some();
        ours.into_iter().for_each(|ours| ours.add(sums));
        is_known
    }

    fn ratio(&mut self, name: &str, above: f64, below: f64) {
        if let Some(ours) = self.sums.get_mut(name).filter(|ours| ours.kind == MetricKind::Ratio) {
            ours.add(&[above, below]);
        }
    }

    /// Adds another piece. The order of merging is part of the result's last bits.
    pub fn merge(&mut self, other: &Self) {
        for (name, theirs) in &other.sums {
            let ours = self.sums.entry(name.clone()).or_insert_with(|| Sums::new(theirs.kind));
            ours.add(&theirs.sums);
        }
    }

    /// The values, finite or not; a metric that saw nothing is left out.
    #[must_use]
    pub fn values(&self) -> BTreeMap<String, f64> {
        let value = |(name, sums): (&String, &Sums)| Some((name.clone(), sums.value()?));
        self.sums.iter().filter_map(value).collect()
    }

    /// Whether these sums have the form of `metrics`: pieces from the wire are checked by it.
    #[must_use]
    pub fn fits(&self, metrics: &[Metric]) -> bool {
        let has = |m: &Metric| self.sums.get(&m.name).is_some_and(|sums| sums.has_form(m.kind));
        self.sums.len() == metrics.len() && metrics.iter().all(has)
    }
}

impl FromIterator<(String, Sums)> for Measures {
    fn from_iter<T: IntoIterator<Item = (String, Sums)>>(sums: T) -> Self {
        Self { sums: sums.into_iter().collect() }
    }
}

impl IntoIterator for Measures {
    type Item = (String, Sums);
    type IntoIter = std::collections::btree_map::IntoIter<String, Sums>;

    fn into_iter(self) -> Self::IntoIter {
        self.sums.into_iter()
    }
}

fn ratio(above: f64, below: f64) -> Option<f64> {
    (below != 0.0).then(|| above / below)
}

/// The chance that a positive scores above a negative; ties inside a bucket count half.
fn auc(sums: &[f64]) -> Option<f64> {
    let (negatives, positives) = sums.split_at(AUC_BUCKETS);
    let (mut below, mut pairs) = (0.0, 0.0);
    for (negative, positive) in negatives.iter().zip(positives) {
        pairs += positive * (below + negative / 2.0);
        below += negative;
    }
    ratio(pairs, below * positives.iter().sum::<f64>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merged_pieces_measure_like_one_whole() {
        let metrics = [Metric::accuracy(), Metric::auc(), Metric::precision(), Metric::recall()];
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

    #[test]
    fn a_model_that_measures_itself_names_its_metrics() {
        let rmse =
            Metric { name: "rmse".into(), kind: MetricKind::RootRatio, more_is_better: false };
        let mut own_auc = Metric::auc();
        own_auc.name = "clicked_auc".into();
        let metrics = [rmse, own_auc, Metric::loss()];
        let mut measures = Measures::new(&metrics);
        assert!(measures.add_sums("rmse", &[8.0, 2.0]));
        assert!(measures.add_sums("rmse", &[10.0, 0.0]));
        let mut counts = vec![0.0; 2 * AUC_BUCKETS];
        (counts[0], counts[AUC_BUCKETS + 1]) = (2.0, 3.0);
        assert!(measures.add_sums("clicked_auc", &counts));
        assert!(!measures.add_sums("clicked_auc", &[1.0, 2.0]));
        assert!(!measures.add_sums("accuracy", &[1.0, 2.0]));
        measures.add_binary(0.5, true);
        assert!(measures.fits(&metrics) && !measures.fits(&metrics[..2]));
        let expected = [("clicked_auc".to_owned(), 1.0), ("rmse".to_owned(), 3.0)];
        assert_eq!(measures.values(), BTreeMap::from(expected));
    }

    #[test]
    fn a_value_that_is_not_finite_is_kept_and_one_without_records_is_left_out() {
        let mut measures = Measures::new(&[Metric::loss(), Metric::auc(), Metric::precision()]);
        assert_eq!(measures.values(), BTreeMap::new());
        measures.add_loss(f64::NAN, 2);
        assert!(measures.values()["loss"].is_nan());
        assert_eq!(measures.values().len(), 1);
    }

    #[test]
    fn sums_of_another_form_do_not_fit() {
        let short = Sums { kind: MetricKind::Ratio, sums: vec![1.0] };
        assert!(!Measures::from_iter([("loss".to_owned(), short)]).fits(&[Metric::loss()]));
        let root = Metric { kind: MetricKind::RootRatio, ..Metric::loss() };
        assert!(!Measures::new(&[root]).fits(&[Metric::loss()]));
    }

    #[test]
    fn a_metric_is_read_as_it_is_and_as_it_was_written() {
        let json = r#"{"name":"accuracy","kind":"ratio","more_is_better":true}"#;
        assert_eq!(serde_json::to_string(&Metric::accuracy()).unwrap(), json);
        let read = |json: &str| serde_json::from_str::<Metric>(json);
        assert_eq!(read(json).unwrap(), Metric::accuracy());
        let words = [
            Metric::accuracy(),
            Metric::auc(),
            Metric::precision(),
            Metric::recall(),
            Metric::mse(),
            Metric::loss(),
        ];
        for metric in words {
            assert_eq!(read(&format!("\"{}\"", metric.name)).unwrap(), metric);
        }
        assert!(read("\"speed\"").is_err());
    }
}
