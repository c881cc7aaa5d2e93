// SPDX-License-Identifier: Apache-2.0
//! What a model is made of, as far as anybody but the model itself must know.

use serde::{Deserialize, Serialize};

use crate::metric::Metric;
use crate::optimizer::OptimizerSpec;

/// The parameters, tables, inputs and measures of a model. Workers announce it, the master keeps
/// it, parameter servers make room by it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelSpec {
    pub name: String,
    /// Dense parameters in the order of the flat parameter vector.
    pub params: Vec<ParamSpec>,
    /// Embedding tables; their rows live on the parameter servers and are made when first seen.
    pub tables: Vec<TableSpec>,
    /// The columns that a batch must have.
    pub inputs: Vec<FieldSpec>,
    /// What `evaluate` measures, the first one first in every report.
    pub metrics: Vec<Metric>,
    /// Used unless the job names another.
    pub optimizer: OptimizerSpec,
}

/// A dense parameter or a piece of non-trainable state.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ParamSpec {
    pub name: String,
    pub shape: Vec<usize>,
    pub init: Init,
    pub rule: Rule,
}

/// How a parameter server changes a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Rule {
    /// By the optimizer; `decay` says whether weight decay touches it.
    Trainable { decay: bool },
    /// The pushed value is a difference that is added: batch-norm statistics.
    MovingAverage,
}

/// An embedding table: rows of `dim` numbers by 64-bit id.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TableSpec {
    pub name: String,
    pub dim: usize,
    pub init: Init,
}

/// First values, a function of seed, name and place alone.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Init {
    Constant(f32),
    Uniform {
        low: f32,
        high: f32,
    },
    Normal {
        mean: f32,
        std: f32,
    },
    /// Normal, drawn again while further than two deviations away.
    TruncatedNormal {
        mean: f32,
        std: f32,
    },
}

/// A named, typed column of a batch; the shape is that of one record.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct FieldSpec {
    pub name: String,
    pub dtype: DType,
    pub shape: Vec<usize>,
    /// Needed to train and to evaluate, but not to predict.
    #[serde(default)]
    pub is_label: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DType {
    F32,
    I64,
    U8,
    /// Text or raw bytes of any length.
    Bytes,
}

/// Those of `fields` that a batch must have to be predicted.
#[must_use]
pub fn unlabelled(fields: &[FieldSpec]) -> Vec<FieldSpec> {
    fields.iter().filter(|field| !field.is_label).cloned().collect()
}

impl ParamSpec {
    #[must_use]
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl ModelSpec {
    /// Length of the flat vector of all dense parameters.
    #[must_use]
    pub fn dense_len(&self) -> usize {
        self.params.iter().map(ParamSpec::len).sum()
    }
}
