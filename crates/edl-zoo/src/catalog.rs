// SPDX-License-Identifier: Apache-2.0
//! The list of built-in models, and how a job's `--model_def` finds its entry.

use edl_core::spec::JobSpec;
use edl_core::text::nearest;
use edl_tensor::model::Model;

use crate::{count, deepfm, mnist_cnn, mnist_mlp, wide_deep};

const NAMES: [&str; 5] =
    [count::NAME, deepfm::NAME, mnist_cnn::NAME, mnist_mlp::NAME, wide_deep::NAME];

/// Why a job gets no model.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error(
        "model `{name}` is a Python module, which needs the elasticdl Python package; without it \
         choose --model_def from {}", NAMES.join(", ")
    )]
    Python { name: String },
    #[error("unknown model `{name}`; {suggestion}choose --model_def from {}", NAMES.join(", "))]
    UnknownModel { name: String, suggestion: String },
    #[error("model `{model}` has no parameter `{name}`; --model_params accepts {known}")]
    UnknownParam { model: &'static str, name: String, known: String },
    #[error("--model_params `{name}={value}` is invalid for model `{model}`: it must be {needs}")]
    BadParam { model: &'static str, name: &'static str, value: String, needs: &'static str },
}

/// The names that `--model_def` may take.
#[must_use]
pub fn names() -> &'static [&'static str] {
    &NAMES
}

/// Makes the model that a job names.
pub fn open(spec: &JobSpec) -> Result<Box<dyn Model>, Error> {
    let params = &spec.model_params;
    match spec.model_def.as_str() {
        count::NAME => Ok(Box::new(count::open(params)?)),
        deepfm::NAME => Ok(Box::new(deepfm::open(params)?)),
        mnist_cnn::NAME => Ok(Box::new(mnist_cnn::open(params)?)),
        mnist_mlp::NAME => Ok(Box::new(mnist_mlp::open(params)?)),
        wide_deep::NAME => Ok(Box::new(wide_deep::open(params)?)),
        name if looks_like_python(name) => Err(Error::Python { name: name.into() }),
        name => Err(Error::UnknownModel { name: name.into(), suggestion: suggestion(name) }),
    }
}

/// A file path or a dotted path: how ElasticDL's users name their own modules.
#[must_use]
pub fn looks_like_python(name: &str) -> bool {
    name.contains(['/', '\\', '.'])
}

fn suggestion(name: &str) -> String {
    let known = nearest(&name.to_ascii_lowercase(), NAMES);
    known.map_or(String::new(), |known| format!("did you mean `{known}`? Otherwise "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(model_def: &str, params: &[(&str, &str)]) -> String {
        let params = params.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect();
        let spec =
            JobSpec { model_def: model_def.into(), model_params: params, ..JobSpec::default() };
        open(&spec).err().unwrap().to_string()
    }

    #[test]
    fn every_name_opens_a_model_of_that_name() {
        for name in names() {
            let spec = JobSpec { model_def: (*name).into(), ..JobSpec::default() };
            assert_eq!(open(&spec).unwrap().spec().name, *name);
        }
    }

    #[test]
    fn a_python_path_is_distinguished_from_a_misspelt_name() {
        for path in ["models/mnist.py", "mnist.py", "mnist.mnist_functional_api.custom_model"] {
            assert!(refusal(path, &[]).contains("needs the elasticdl Python package"), "{path}");
        }
        let expected = "unknown model `mnist_cn`; did you mean `mnist_cnn`? Otherwise choose \
                        --model_def from count, deepfm, mnist_cnn, mnist_mlp, wide_deep";
        assert_eq!(refusal("mnist_cn", &[]), expected);
        assert!(!refusal("resnet50", &[]).contains("did you mean"));
    }

    #[test]
    fn an_unknown_parameter_is_refused_with_the_known_ones() {
        let expected =
            "model `mnist_mlp` has no parameter `hiden`; --model_params accepts hidden, lr";
        assert_eq!(refusal("mnist_mlp", &[("hiden", "3")]), expected);
        let expected = "--model_params `hidden=0` is invalid for model `mnist_mlp`: it must be an \
                        integer from 1 to 65536";
        assert_eq!(refusal("mnist_mlp", &[("hidden", "0")]), expected);
    }
}
