// SPDX-License-Identifier: Apache-2.0
//! One pass through a model: flat slices become tensors of the engine, gradients become slices.

use burn::tensor::{Device, Tensor, TensorData};
use edl_core::model::{ModelSpec, ParamSpec, Rule};
use edl_tensor::model::{Error, Gradient, Inputs, Outcome};

/// Whether a pass goes backward too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Parameters and rows collect gradients, random choices follow from the seed.
    Train { seed: u64 },
    /// Forward alone, nothing random.
    Infer,
}

/// The tensors of one pass.
pub(crate) struct Pass<'a> {
    spec: &'a ModelSpec,
    inputs: Inputs<'a>,
    kind: Kind,
    device: Device,
    /// One flat tensor per parameter of the spec.
    params: Vec<Tensor<1>>,
    /// One flat tensor per table of the spec.
    rows: Vec<Tensor<1>>,
}

impl<'a> Pass<'a> {
    /// Checks the inputs, of which each table has `n_ids` rows, and makes tensors of them.
    pub(crate) fn new(
        spec: &'a ModelSpec,
        inputs: Inputs<'a>,
        n_ids: &[usize],
        kind: Kind,
    ) -> Result<Self, Error> {
        check(spec, inputs, n_ids)?;
        let device = match kind {
            Kind::Train { .. } => Device::flex().autodiff(),
            Kind::Infer => Device::flex(),
        };
        let leaf = |values: &[f32], is_trainable: bool| {
            let tensor = tensor(values.to_vec(), [values.len()], &device);
            let needs_gradient = is_trainable && kind != Kind::Infer;
            if needs_gradient { tensor.require_grad() } else { tensor }
        };
        let is_trainable = |param: &ParamSpec| matches!(param.rule, Rule::Trainable { .. });
        let params = segments(spec, inputs.dense).map(|(p, v)| leaf(v, is_trainable(p))).collect();
        let rows = inputs.rows.iter().map(|rows| leaf(rows, true)).collect();
        Ok(Self { spec, inputs, kind, device, params, rows })
    }

    pub(crate) fn kind(&self) -> Kind {
        self.kind
    }

    /// Parameter number `index` of the spec, in its own shape of `D` dimensions.
    pub(crate) fn param<const D: usize>(&self, index: usize) -> Tensor<D> {
        let shape = &self.spec.params[index].shape;
        let shape = <[usize; D]>::try_from(shape.as_slice()).expect("a rank as in the spec");
        self.params[index].clone().reshape(shape)
    }

    /// The numbers of parameter `index` as they came in.
    pub(crate) fn values(&self, index: usize) -> &'a [f32] {
        segments(self.spec, self.inputs.dense).nth(index).expect("an index of the spec").1
    }

    /// The rows of a table, in the order of the lookups.
    pub(crate) fn rows<const D: usize>(&self, table: usize, shape: [usize; D]) -> Tensor<D> {
        self.rows[table].clone().reshape(shape)
    }

    /// Numbers that nothing is learnt about.
    pub(crate) fn constant<const D: usize>(
        &self,
        values: Vec<f32>,
        shape: [usize; D],
    ) -> Tensor<D> {
        tensor(values, shape, &self.device)
    }

    /// Goes back from the loss and fills `gradient`: zero where the loss does not depend on it.
    pub(crate) fn backward(
        &self,
        loss: &Tensor<1>,
        gradient: &mut Gradient,
    ) -> Result<Outcome, Error> {
        let outcome = outcome(loss);
        if !outcome.loss.is_finite() {
            return Err(Error::NotANumber);
        }
        let mut gradients = loss.backward();
        let mut take = |leaf: &Tensor<1>, out: &mut Vec<f32>| match leaf.grad_remove(&mut gradients)
        {
            Some(found) => out.extend(numbers(found)),
            None => out.resize(out.len() + leaf.dims()[0], 0.0),
        };
        gradient.dense.clear();
        self.params.iter().for_each(|leaf| take(leaf, &mut gradient.dense));
        gradient.rows.resize_with(self.rows.len(), Vec::new);
        for (leaf, rows) in self.rows.iter().zip(&mut gradient.rows) {
            rows.clear();
            take(leaf, rows);
        }
        Ok(outcome)
    }
}

/// The loss as a number.
pub(crate) fn outcome(loss: &Tensor<1>) -> Outcome {
    Outcome { loss: numbers(loss.clone())[0] }
}

/// Reads a tensor of the engine.
pub(crate) fn numbers<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().try_into_vec().expect("all tensors here hold f32")
}

fn tensor<const D: usize>(values: Vec<f32>, shape: [usize; D], device: &Device) -> Tensor<D> {
    Tensor::from_data(TensorData::new(values, shape), device)
}

/// The parameters with their pieces of the flat vector.
fn segments<'a>(
    spec: &'a ModelSpec,
    dense: &'a [f32],
) -> impl Iterator<Item = (&'a ParamSpec, &'a [f32])> {
    let mut rest = dense;
    spec.params.iter().map(move |param| {
        let (values, after) = rest.split_at(param.len());
        rest = after;
        (param, values)
    })
}

/// Refuses inputs whose lengths do not fit the spec: the engine would panic on them.
pub(crate) fn check(spec: &ModelSpec, inputs: Inputs<'_>, n_ids: &[usize]) -> Result<(), Error> {
    if inputs.batch.is_empty() {
        return Err(Error::Other("the batch holds no records".into()));
    }
    if inputs.dense.len() != spec.dense_len() {
        return Err(Error::Other(format!(
            "model `{}` has {} dense numbers, the inputs have {}",
            spec.name,
            spec.dense_len(),
            inputs.dense.len()
        )));
    }
    let needs: Vec<usize> = spec.tables.iter().zip(n_ids).map(|(t, n)| t.dim * n).collect();
    let has: Vec<usize> = inputs.rows.iter().map(Vec::len).collect();
    if needs != has {
        return Err(Error::Other(format!(
            "model `{}` needs rows of {needs:?} numbers, the inputs have {has:?}",
            spec.name
        )));
    }
    Ok(())
}
