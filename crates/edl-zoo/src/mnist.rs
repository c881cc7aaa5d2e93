// SPDX-License-Identifier: Apache-2.0
//! What the models over 28×28 images with ten classes share: inputs, loss, metrics, output.

use edl_core::metric::{Measures, Metric};
use edl_core::model::{DType, FieldSpec, ModelSpec, ParamSpec};
use edl_tensor::batch::Batch;
use edl_tensor::model::{Error, Gradient, Inputs, Model, Outcome, Predictions};

use crate::adam::adam;
use crate::columns;
use crate::pass::{Pass, PassKind};
use crate::tape::{Pool, Var, softmax};

/// Height and width of an image.
pub(crate) const SIDE: usize = 28;
pub(crate) const N_CLASSES: usize = 10;

/// Index of the fields in the spec.
const IMAGE: usize = 0;
const LABEL: usize = 1;

/// From pixels to one number per class.
pub(crate) trait Network: Send {
    /// `images` has one row of pixels from 0 to 1 per record.
    /// The answer has one row of `N_CLASSES` numbers per record.
    fn forward(&self, pass: &mut Pass<'_>, images: Var<2>) -> Var<2>;
}

/// A network with a softmax on top.
pub(crate) struct Classifier<N> {
    spec: ModelSpec,
    network: N,
    pool: Pool,
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
        Self { spec, network, pool: Pool::default() }
    }

    fn labels(&self, batch: &Batch) -> Result<Vec<usize>, Error> {
        columns::labels(batch, &self.spec.inputs[LABEL], N_CLASSES)
    }

    fn forward<'a>(
        &'a mut self,
        inputs: Inputs<'a>,
        kind: PassKind<'a>,
    ) -> Result<(Pass<'a>, Var<2>), Error> {
        let pixels = columns::u8(inputs.batch, &self.spec.inputs[IMAGE])?;
        let mut pass = Pass::new(&self.spec, inputs, &[], kind, &mut self.pool)?;
        let images = pass.tape.computed([inputs.batch.len(), SIDE * SIDE], |images| {
            let scaled = pixels.iter().map(|pixel| f32::from(*pixel) / 255.0);
            images.iter_mut().zip(scaled).for_each(|(number, pixel)| *number = pixel);
        });
        let logits = self.network.forward(&mut pass, images);
        Ok((pass, logits))
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
        let (mut pass, logits) = self.forward(inputs, PassKind::Train { seed, gradient })?;
        let loss = pass.tape.softmax_cross_entropy(logits, &labels);
        pass.backward(loss)
    }

    fn evaluate(&mut self, inputs: Inputs<'_>, measures: &mut Measures) -> Result<Outcome, Error> {
        let labels = self.labels(inputs.batch)?;
        let (mut pass, logits) = self.forward(inputs, PassKind::Infer)?;
        let loss = pass.tape.softmax_cross_entropy(logits, &labels);
        let outcome = pass.outcome(loss);
        let n_records = u32::try_from(labels.len()).unwrap_or(u32::MAX);
        measures.add_loss(f64::from(outcome.loss), n_records);
        for (row, label) in pass.tape.value(logits).chunks_exact(N_CLASSES).zip(labels) {
            measures.add_class(best(row) == label);
        }
        Ok(outcome)
    }

    /// The probability of each class.
    fn predict(&mut self, inputs: Inputs<'_>) -> Result<Predictions, Error> {
        let (pass, logits) = self.forward(inputs, PassKind::Infer)?;
        let mut values = pass.tape.value(logits).to_vec();
        softmax(&mut values, N_CLASSES);
        Ok(Predictions { width: N_CLASSES, values })
    }
}

/// The class with the largest number, the first one of equals.
fn best(row: &[f32]) -> usize {
    let larger = |best: usize, i: usize| if row[i] > row[best] { i } else { best };
    (1..row.len()).fold(0, larger)
}
