// SPDX-License-Identifier: Apache-2.0
//! What the models over 28×28 images with ten classes share: inputs, loss, measures, output.

use burn::tensor::Tensor;
use burn::tensor::activation::{log_softmax, softmax};
use edl_core::metric::{Measures, Metric};
use edl_core::model::{DType, FieldSpec, ModelSpec, ParamSpec};
use edl_tensor::batch::Batch;
use edl_tensor::model::{Error, Gradient, Inputs, Model, Outcome, Predictions};

use crate::adam::adam;
use crate::columns;
use crate::pass::{self, Kind, Pass};

/// Height and width of an image.
pub(crate) const SIDE: usize = 28;
pub(crate) const N_CLASSES: usize = 10;

/// Index of the fields in the spec.
const IMAGE: usize = 0;
const LABEL: usize = 1;

/// From pixels to one number per class.
pub(crate) trait Network: Send {
    /// `images` has one row of pixels from 0 to 1 per record.
    fn forward(&self, pass: &Pass<'_>, images: Tensor<2>) -> Forward;
}

/// What a network says about a batch.
pub(crate) struct Forward {
    /// One row of `N_CLASSES` numbers per record.
    pub(crate) logits: Tensor<2>,
    /// Where in the flat parameter vector which moving averages change by how much.
    pub(crate) moved: Vec<(usize, Vec<f32>)>,
}

/// A network with a softmax on top.
pub(crate) struct Classifier<N> {
    spec: ModelSpec,
    network: N,
}

impl<N: Network> Classifier<N> {
    pub(crate) fn new(name: &str, params: Vec<ParamSpec>, learning_rate: f64, network: N) -> Self {
        let field = |name: &str, dtype, shape| {
            let is_label = name == "label";
            FieldSpec { name: name.into(), dtype, shape, is_label }
        };
        let spec = ModelSpec {
            name: name.into(),
            params,
            tables: vec![],
            inputs: vec![
                field("image", DType::U8, vec![SIDE, SIDE]),
                field("label", DType::I64, vec![]),
            ],
            metrics: vec![Metric::accuracy(), Metric::loss()],
            optimizer: adam(learning_rate),
        };
        Self { spec, network }
    }

    fn labels(&self, batch: &Batch) -> Result<Vec<usize>, Error> {
        columns::labels(batch, &self.spec.inputs[LABEL], N_CLASSES)
    }

    fn forward<'a>(&'a self, inputs: Inputs<'a>, kind: Kind) -> Result<(Pass<'a>, Forward), Error> {
        let pixels = columns::u8(inputs.batch, &self.spec.inputs[IMAGE])?;
        let pass = Pass::new(&self.spec, inputs, &[], kind)?;
        let pixels = pixels.iter().map(|pixel| f32::from(*pixel) / 255.0).collect();
        let images = pass.constant(pixels, [inputs.batch.len(), SIDE * SIDE]);
        let forward = self.network.forward(&pass, images);
        Ok((pass, forward))
    }
}

impl<N: Network> Model for Classifier<N> {
    fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    fn lookups(&self, _batch: &Batch) -> Result<Vec<Vec<u64>>, Error> {
        Ok(vec![])
    }

    fn train(
        &mut self,
        inputs: Inputs<'_>,
        seed: u64,
        gradient: &mut Gradient,
    ) -> Result<Outcome, Error> {
        let labels = self.labels(inputs.batch)?;
        let (pass, Forward { logits, moved }) = self.forward(inputs, Kind::Train { seed })?;
        let outcome = pass.backward(&loss(&pass, logits, &labels), gradient)?;
        for (start, values) in moved {
            gradient.dense[start..start + values.len()].copy_from_slice(&values);
        }
        Ok(outcome)
    }

    fn evaluate(&mut self, inputs: Inputs<'_>, measures: &mut Measures) -> Result<Outcome, Error> {
        let labels = self.labels(inputs.batch)?;
        let (pass, Forward { logits, .. }) = self.forward(inputs, Kind::Infer)?;
        let outcome = pass::outcome(&loss(&pass, logits.clone(), &labels));
        let n_records = u32::try_from(labels.len()).unwrap_or(u32::MAX);
        measures.add_loss(f64::from(outcome.loss), n_records);
        for (row, label) in pass::numbers(logits).chunks_exact(N_CLASSES).zip(labels) {
            measures.add_class(best(row) == label);
        }
        Ok(outcome)
    }

    /// The probability of each class.
    fn predict(&mut self, inputs: Inputs<'_>) -> Result<Predictions, Error> {
        let (_, Forward { logits, .. }) = self.forward(inputs, Kind::Infer)?;
        Ok(Predictions { width: N_CLASSES, values: pass::numbers(softmax(logits, 1)) })
    }
}

/// The mean cross entropy of the batch.
fn loss(pass: &Pass<'_>, logits: Tensor<2>, labels: &[usize]) -> Tensor<1> {
    #[expect(clippy::cast_precision_loss, reason = "batches are far smaller than 2^24")]
    let share = -1.0 / labels.len() as f32;
    let mut weights = vec![0.0; labels.len() * N_CLASSES];
    for (row, label) in weights.chunks_exact_mut(N_CLASSES).zip(labels) {
        row[*label] = share;
    }
    (log_softmax(logits, 1) * pass.constant(weights, [labels.len(), N_CLASSES])).sum()
}

/// The class with the largest number, the first one of equals.
fn best(row: &[f32]) -> usize {
    let larger = |best: usize, i: usize| if row[i] > row[best] { i } else { best };
    (1..row.len()).fold(0, larger)
}
