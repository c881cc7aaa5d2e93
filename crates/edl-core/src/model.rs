// SPDX-License-Identifier: Apache-2.0
//! What a model is made of, as far as other parts must know.

use serde::{Deserialize, Serialize};

use crate::metric::Metric;
use crate::optimizer::OptimizerSpec;

/// The parameters, tables, inputs and measures of a model. Workers announce it, the master keeps
/// it, parameter servers allocate by it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelSpec {
    pub name: String,
    /// Dense parameters in the order of the flat parameter vector.
    pub params: Vec<ParamSpec>,
    /// Embedding tables; their rows are on the parameter servers and are created on first use.
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
    /// Its numbers have 64 bits, and each takes two places of the flat parameter vector. Such
    /// parameters come before all others, so that every number is at an even place.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_double: bool,
}

/// How a parameter server changes a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Rule {
    /// By the optimizer; `decay`: weight decay applies to it.
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

/// Initial values: a function of seed, name and place alone, unless the model provides them.
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
    /// The model provides them. All rows of such a table are created before the first step.
    Given,
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
    /// The whole record, undecoded; only formats whose records are pieces of bytes have it.
    Record,
}

/// Those of `fields` that a batch must have to be predicted.
#[must_use]
pub fn unlabelled(fields: &[FieldSpec]) -> Vec<FieldSpec> {
    fields.iter().filter(|field| !field.is_label).cloned().collect()
}

impl ParamSpec {
    /// A parameter of single precision.
    #[must_use]
    pub fn new(name: &str, shape: Vec<usize>, init: Init, rule: Rule) -> Self {
        Self { name: name.into(), shape, init, rule, is_double: false }
    }

    #[must_use]
    pub fn n_numbers(&self) -> usize {
        self.shape.iter().product()
    }

    /// Its places in the flat parameter vector.
    #[must_use]
    pub fn len(&self) -> usize {
        self.n_numbers() * if self.is_double { 2 } else { 1 }
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl ModelSpec {
    /// Rejects what no job could train or measure.
    pub fn check(&self) -> Result<(), String> {
        let mut names: Vec<&str> = self.metrics.iter().map(|m| m.name.as_str()).collect();
        names.sort_unstable();
        if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(format!("two metrics are named `{}`; rename one", pair[0]));
        }
        let Some(double) = self.params.iter().find(|param| param.is_double) else { return Ok(()) };
        if !self.optimizer.is_script() {
            return Err(format!(
                "parameter `{}` is float64, which only optimizer steps in Python can change \
                 (--step=python)",
                double.name
            ));
        }
        let is_in_order = self.params.is_sorted_by_key(|param| !param.is_double);
        let mut doubles = self.params.iter().filter(|param| param.is_double);
        match is_in_order && doubles.all(|param| param.init == Init::Given) {
            true => Ok(()),
            false => Err("float64 parameters must be the first ones, with given values".into()),
        }
    }

    /// Whether the model must provide the initial values of parameters or rows.
    #[must_use]
    pub fn brings_first_values(&self) -> bool {
        let mut inits = self.params.iter().map(|param| param.init);
        inits.any(|init| init == Init::Given) || self.brings_first_rows()
    }

    /// Whether the model must provide the initial rows of a table.
    #[must_use]
    pub fn brings_first_rows(&self) -> bool {
        self.tables.iter().any(|table| table.init == Init::Given)
    }

    /// Length of the flat vector of all dense parameters.
    #[must_use]
    pub fn dense_len(&self) -> usize {
        self.params.iter().map(ParamSpec::len).sum()
    }

    /// The first places of the flat vector, which hold numbers of 64 bits.
    #[must_use]
    pub fn n_double_places(&self) -> usize {
        self.params.iter().filter(|param| param.is_double).map(ParamSpec::len).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::optimizer::OptimizerKind;

    #[test]
    fn a_model_that_no_job_could_train_or_measure_is_rejected() {
        let table = |init| TableSpec { name: "users".into(), dim: 2, init };
        let mut model = ModelSpec {
            name: "m".into(),
            params: Vec::new(),
            tables: vec![table(Init::Constant(0.0))],
            inputs: Vec::new(),
            metrics: vec![Metric::loss(), Metric::mse()],
            optimizer: OptimizerSpec::sgd(0.1),
        };
        assert_eq!(model.check(), Ok(()));
        assert!(!model.brings_first_values());
        model.tables.push(table(Init::Given));
        assert!(model.brings_first_values());
        model.metrics.push(Metric::loss());
        assert!(model.check().unwrap_err().contains("two metrics are named `loss`"));
    }

    #[test]
    fn float64_parameters_come_first_and_only_a_script_changes_them() {
        let param = |name, init, is_double| ParamSpec {
            is_double,
            ..ParamSpec::new(name, vec![3], init, Rule::Trainable { decay: false })
        };
        let mut model = ModelSpec {
            name: "m".into(),
            params: vec![param("wide", Init::Given, true), param("w", Init::Given, false)],
            tables: Vec::new(),
            inputs: Vec::new(),
            metrics: Vec::new(),
            optimizer: OptimizerSpec::sgd(0.1),
        };
        assert_eq!((model.dense_len(), model.n_double_places()), (9, 6));
        assert!(model.check().unwrap_err().contains("`wide` is float64, which only optimizer st"));
        model.optimizer.kind = OptimizerKind::Script { nonfinite: false };
        assert_eq!(model.check(), Ok(()));
        model.params.reverse();
        assert!(model.check().unwrap_err().contains("must be the first ones"));
        model.params = vec![param("wide", Init::Constant(0.0), true)];
        assert!(model.check().unwrap_err().contains("with given values"));
        // Builds without such parameters read and write the same descriptions.
        let text = serde_json::to_string(&param("w", Init::Given, false)).unwrap();
        assert!(!text.contains("double"), "{text}");
        assert_eq!(serde_json::from_str::<ParamSpec>(&text).unwrap().len(), 3);
    }
}
