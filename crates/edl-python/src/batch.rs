// SPDX-License-Identifier: Apache-2.0
//! A batch as Python sees it: a dict of arrays, whose first axis is the record.

use edl_tensor::batch::{Batch, Column};
use numpy::{Element, PyArray1, PyArrayMethods as _};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};

/// The columns as copies, which user code may keep and change.
pub(crate) fn columns<'py>(py: Python<'py>, batch: &Batch) -> PyResult<Bound<'py, PyDict>> {
    let columns = PyDict::new(py);
    for (name, column) in &batch.columns {
        let value = match column {
            Column::F32 { shape, values } => array(py, shape, values)?,
            Column::I64 { shape, values } => array(py, shape, values)?,
            Column::U8 { shape, values } => array(py, shape, values)?,
            Column::Bytes(pieces) => {
                PyList::new(py, pieces.iter().map(|piece| PyBytes::new(py, piece)))?.into_any()
            }
        };
        columns.set_item(name, value)?;
    }
    Ok(columns)
}

/// Numbers with a shape, copied.
pub(crate) fn array<'py, T: Element + Copy>(
    py: Python<'py>,
    shape: &[usize],
    values: &[T],
) -> PyResult<Bound<'py, PyAny>> {
    Ok(PyArray1::from_slice(py, values).reshape(shape)?.into_any())
}
