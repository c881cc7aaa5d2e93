// SPDX-License-Identifier: Apache-2.0
//! The columns of a data set, for models that use them as they are.

use std::path::PathBuf;

use edl_core::error::chain;
use edl_core::spec::JobSpec;
use edl_data::{Dataset, OpenOptions, Progress};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// The columns of the data at `location`, as JSON, read as the job (JSON) says. `indexes` is a folder
/// that can have the index of the data.
#[pyfunction]
#[pyo3(signature = (location, job, indexes=None))]
pub(crate) fn schema(
    py: Python<'_>,
    location: &str,
    job: &str,
    indexes: Option<PathBuf>,
) -> PyResult<String> {
    let found = py.detach(|| {
        let job: JobSpec = serde_json::from_str(job).map_err(|error| error.to_string())?;
        let params = job.data_reader_params.clone();
        let options = OpenOptions { codec: job.codec_type, params };
        let data =
            Dataset::open_indexed(location, &options, indexes.as_deref(), &Progress::default());
        let data = data.map_err(|error| chain(&error))?;
        let schema = edl_data::schema(&data).map_err(|error| chain(&error))?;
        let batches = job.plan(data.n_records()).n_batches();
        let schema = serde_json::json!({
            "fields": schema.fields,
            "has_raw_records": schema.has_raw_records,
            "n_steps": u64::from(batches).saturating_mul(job.num_epochs.into()),
        });
        Ok::<_, String>(schema.to_string())
    });
    found.map_err(PyValueError::new_err)
}
