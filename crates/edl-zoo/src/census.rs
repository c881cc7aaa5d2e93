// SPDX-License-Identifier: Apache-2.0
//! What the models over the adult census share: features, ids, loss, metrics, output.
//!
//! Who earns more than 50,000 dollars a year, by eight categories and six numbers about a person.
//! Every feature, including bucketed numbers, is a 64-bit id, so embedding rows exist only for ids in
//! the data, and no vocabulary is needed. Numbers also enter dense layers.

use edl_core::metric::{Measures, Metric};
use edl_core::model::{DType, FieldSpec, Init, ModelSpec, ParamSpec, TableSpec};
use edl_core::rng;
use edl_tensor::batch::Batch;
use edl_tensor::model::{Error, Gradient, Inputs, Model, Outcome, Predictions};

use crate::adam::adam;
use crate::layer::linear_params;
use crate::model_params::ModelParams;
use crate::pass::{Pass, PassKind};
use crate::tape::{Pool, Var, sigmoid};
use crate::{catalog, columns};

/// Categorical features.
const CATEGORIES: [&str; 8] = [
    "workclass",
    "education",
    "marital_status",
    "occupation",
    "relationship",
    "race",
    "gender",
    "native_country",
];

/// Features that are numbers. Centres and spreads are those of the training data, rounded.
const NUMBERS: [Number; 6] = [
    Number::new("age", 38.6, 13.7, &[18.0, 25.0, 30.0, 35.0, 40.0, 45.0, 50.0, 55.0, 60.0, 65.0]),
    Number::new("fnlwgt", 189_700.0, 105_600.0, &[1e5, 1.5e5, 2e5, 2.5e5, 3e5]),
    Number::new("education_num", 10.1, 2.6, &[5.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0]),
    Number::new("capital_gain", 1_080.0, 7_450.0, &[1.0, 3_000.0, 5_000.0, 7_000.0, 15_000.0]),
    Number::new("capital_loss", 87.5, 403.0, &[1.0, 1_500.0, 1_800.0, 2_000.0]),
    Number::new("hours_per_week", 40.4, 12.4, &[20.0, 35.0, 40.0, 41.0, 45.0, 50.0, 60.0]),
];

const N_NUMBERS: usize = NUMBERS.len();
/// Ids per record: one per category and one per bucketed number, in this order.
pub(crate) const N_IDS: usize = CATEGORIES.len() + N_NUMBERS;

/// Places of features among the ids of a record.
pub(crate) const EDUCATION: usize = 1;
pub(crate) const OCCUPATION: usize = 3;
pub(crate) const NATIVE_COUNTRY: usize = 7;
pub(crate) const AGE: usize = 8;

struct Number {
    name: &'static str,
    centre: f32,
    spread: f32,
    /// Where buckets begin.
    borders: &'static [f32],
}

impl Number {
    const fn new(name: &'static str, centre: f32, spread: f32, borders: &'static [f32]) -> Self {
        Self { name, centre, spread, borders }
    }
}

/// From features to one number: the log-odds of a high income.
pub(crate) trait Network: Send {
    /// The ids of each table for records of `N_IDS` ids each.
    fn lookups(&self, ids: Vec<u64>) -> Vec<Vec<u64>>;

    /// Ids per record of each table.
    fn n_ids(&self) -> Vec<usize>;

    /// `numbers` has one row of `N_NUMBERS` per record; the answer has one number per row.
    fn forward(&self, pass: &mut Pass<'_>, numbers: Var<2>) -> Var<2>;
}

/// The layers that both models have: a deep network over the embeddings and numbers of a record.
pub(crate) struct Deep {
    /// Numbers of an embedding.
    pub(crate) dim: usize,
}

impl Deep {
    /// Its layers are the first parameters of a model, and its embeddings the first table.
    const LAYERS: [usize; 3] = [0, 2, 4];
    pub(crate) const EMBEDDING: usize = 0;

    pub(crate) fn new(params: &ModelParams<'_>) -> Result<Self, catalog::Error> {
        let needs = "an integer from 1 to 1024";
        Ok(Self { dim: params.get("dim", 8, needs, |n| (1..=1024).contains(n))? })
    }

    /// The parameters of the layers, of which two are hidden.
    pub(crate) fn params(&self, hidden: [usize; 2]) -> Vec<ParamSpec> {
        let [first, second] = hidden;
        let layers = [
            linear_params("deep_1", N_IDS * self.dim + N_NUMBERS, first),
            linear_params("deep_2", first, second),
            linear_params("deep_3", second, 1),
        ];
        layers.concat()
    }

    /// The table of embeddings, and one of a single weight per id.
    pub(crate) fn tables(&self, linear: &str) -> Vec<TableSpec> {
        let init = Init::Uniform { low: -0.05, high: 0.05 };
        vec![
            TableSpec { name: "embedding".into(), dim: self.dim, init },
            TableSpec { name: linear.into(), dim: 1, init: Init::Constant(0.0) },
        ]
    }

    pub(crate) fn forward(&self, pass: &mut Pass<'_>, numbers: Var<2>) -> Var<2> {
        let [n, _] = numbers.shape();
        let embeddings = pass.rows(Self::EMBEDDING, [n, N_IDS * self.dim]);
        let [first, second, third] = Self::LAYERS;
        let x = pass.tape.concat(embeddings, numbers);
        let x = pass.linear_relu(first, x);
        let x = pass.linear_relu(second, x);
        pass.linear(third, x)
    }
}

/// A network with a sigmoid on top.
pub(crate) struct Census<N> {
    spec: ModelSpec,
    numbers: Vec<FieldSpec>,
    categories: Vec<FieldSpec>,
    label: FieldSpec,
    network: N,
    pool: Pool,
}

impl<N: Network> Census<N> {
    pub(crate) fn new(
        name: &str,
        params: Vec<ParamSpec>,
        tables: Vec<TableSpec>,
        network: N,
    ) -> Self {
        let field = |name: &str, dtype| {
            let is_label = name == "label";
            FieldSpec { name: name.into(), dtype, shape: vec![], is_label }
        };
        let numbers: Vec<FieldSpec> =
            NUMBERS.iter().map(|number| field(number.name, DType::F32)).collect();
        let categories: Vec<FieldSpec> =
            CATEGORIES.iter().map(|name| field(name, DType::Bytes)).collect();
        let label = field("label", DType::I64);
        let spec = ModelSpec {
            name: name.into(),
            params,
            tables,
            inputs: [&numbers, &categories, std::slice::from_ref(&label)].concat(),
            metrics: vec![Metric::auc(), Metric::accuracy(), Metric::loss()],
            optimizer: adam(1e-3),
        };
        Self { spec, numbers, categories, label, network, pool: Pool::default() }
    }

    fn forward<'a>(
        &'a mut self,
        inputs: Inputs<'a>,
        kind: PassKind<'a>,
    ) -> Result<(Pass<'a>, Var<2>), Error> {
        let n = inputs.batch.len();
        let columns = self.number_columns(inputs.batch)?;
        let n_ids: Vec<usize> = self.network.n_ids().iter().map(|ids| ids * n).collect();
        let mut pass = Pass::new(&self.spec, inputs, &n_ids, kind, &mut self.pool)?;
        let numbers = pass.tape.computed([n, N_NUMBERS], |numbers| {
            for (i, row) in numbers.chunks_exact_mut(N_NUMBERS).enumerate() {
                for (scaled, (number, column)) in row.iter_mut().zip(NUMBERS.iter().zip(&columns)) {
                    *scaled = (column[i] - number.centre) / number.spread;
                }
            }
        });
        let logits = self.network.forward(&mut pass, numbers);
        Ok((pass, logits))
    }

    fn number_columns<'a>(&self, batch: &'a Batch) -> Result<Vec<&'a [f32]>, Error> {
        let column = |field| {
            let values = columns::f32(batch, field)?;
            match values.iter().position(|value| !value.is_finite()) {
                None => Ok(values),
                Some(row) => {
                    let problem = format!("`{}` is {}", field.name, values[row]);
                    Err(Error::Record { record: batch.records[row], problem })
                }
            }
        };
        self.numbers.iter().map(column).collect()
    }

    fn labels(&self, batch: &Batch) -> Result<Vec<bool>, Error> {
        Ok(columns::labels(batch, &self.label, 2)?.iter().map(|label| *label == 1).collect())
    }
}

impl<N: Network> Model for Census<N> {
    fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    fn lookups(&self, batch: &Batch) -> Result<Vec<Vec<u64>>, Error> {
        let categories: Vec<&[Vec<u8>]> = self
            .categories
            .iter()
            .map(|field| columns::bytes(batch, field))
            .collect::<Result<_, _>>()?;
        let numbers = self.number_columns(batch)?;
        let mut ids = Vec::with_capacity(batch.len() * N_IDS);
        for row in 0..batch.len() {
            ids.extend(
                CATEGORIES
                    .iter()
                    .zip(&categories)
                    .map(|(name, column)| category_id(name, &column[row])),
            );
            ids.extend(NUMBERS.iter().zip(&numbers).map(|(n, column)| bucket_id(n, column[row])));
        }
        Ok(self.network.lookups(ids))
    }

    fn train(
        &mut self,
        inputs: Inputs<'_>,
        seed: u64,
        gradient: &mut Gradient,
    ) -> Result<Outcome, Error> {
        let labels = self.labels(inputs.batch)?;
        let (mut pass, logits) = self.forward(inputs, PassKind::Train { seed, gradient })?;
        let loss = pass.tape.sigmoid_cross_entropy(logits, &labels);
        pass.backward(loss)
    }

    fn evaluate(&mut self, inputs: Inputs<'_>, measures: &mut Measures) -> Result<Outcome, Error> {
        let labels = self.labels(inputs.batch)?;
        let (mut pass, logits) = self.forward(inputs, PassKind::Infer)?;
        let loss = pass.tape.sigmoid_cross_entropy(logits, &labels);
        let outcome = pass.outcome(loss);
        let n_records = u32::try_from(labels.len()).unwrap_or(u32::MAX);
        measures.add_loss(f64::from(outcome.loss), n_records);
        for (log_odds, label) in pass.tape.value(logits).iter().zip(labels) {
            measures.add_binary(sigmoid(*log_odds), label);
        }
        Ok(outcome)
    }

    /// The probability of a high income.
    fn predict(&mut self, inputs: Inputs<'_>) -> Result<Predictions, Error> {
        let (pass, logits) = self.forward(inputs, PassKind::Infer)?;
        let values = pass.tape.value(logits).iter().map(|log_odds| sigmoid(*log_odds)).collect();
        Ok(Predictions { width: 1, values })
    }
}

/// The id of a category, ignoring blanks around it, which some releases of the data have.
fn category_id(name: &str, text: &[u8]) -> u64 {
    let bytes = text.trim_ascii().iter();
    let hash = bytes.fold(0xcbf2_9ce4_8422_2325, |state: u64, byte| {
        (state ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    rng::key(&[rng::name_key(name), hash])
}

/// The id of the bucket that a number falls into.
fn bucket_id(number: &Number, value: f32) -> u64 {
    let bucket = number.borders.partition_point(|border| *border <= value);
    rng::key(&[rng::name_key(number.name), bucket as u64])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_texts_in_different_columns_have_different_ids() {
        assert_eq!(category_id("race", b" White"), category_id("race", b"White"));
        assert_ne!(category_id("race", b"?"), category_id("workclass", b"?"));
        // Trained tables are read by later releases, so ids are fixed forever.
        assert_eq!(category_id("race", b"White"), 6_802_171_508_119_406_599);
    }

    #[test]
    fn numbers_share_an_id_within_a_bucket() {
        let age = &NUMBERS[0];
        assert_eq!(bucket_id(age, 25.0), bucket_id(age, 29.9));
        assert_ne!(bucket_id(age, 25.0), bucket_id(age, 24.9));
        assert_ne!(bucket_id(age, 25.0), bucket_id(age, 30.0));
    }
}
