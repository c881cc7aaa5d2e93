// SPDX-License-Identifier: Apache-2.0
//! Which engine a job's model needs: the built-in one, or Python.

use std::path::Path;

use edl_core::model::ModelSpec;
use edl_core::spec::JobSpec;
use edl_tensor::model::Model;

use crate::exit::refuse;
use crate::{host, python};

/// Whether the job's model is the user's own, written in Python.
pub(crate) fn is_python(spec: &JobSpec) -> bool {
    if spec.is_custom_loop() {
        return false;
    }
    let is_built_in = edl_zoo::names().contains(&spec.model_def.as_str());
    let is_path = edl_zoo::looks_like_python(&spec.model_def);
    !is_built_in && (is_path || !spec.model_zoo.is_empty())
}

/// What the job's model is made of.
pub(crate) fn describe(spec: &JobSpec) -> anyhow::Result<ModelSpec> {
    if is_python(spec) {
        return Ok(python::describe(spec, spec, None)?.model);
    }
    let model = edl_zoo::open(spec).map_err(|error| refuse(error.to_string()))?;
    Ok(model.spec().clone())
}

/// The job's model, in this process. The folder `indexes` can have the index of the job's data.
pub(crate) fn open(spec: &JobSpec, indexes: Option<&Path>) -> Result<Box<dyn Model>, String> {
    if !is_python(spec) {
        return edl_zoo::open(spec).map_err(|error| error.to_string());
    }
    match host::get().python {
        Some(python) => (python.open)(spec, indexes),
        None => Err(format!(
            "model `{}` is a Python module; start this worker with `python -m elasticdl worker`",
            spec.model_def
        )),
    }
}
