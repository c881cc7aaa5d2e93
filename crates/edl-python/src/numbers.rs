// SPDX-License-Identifier: Apache-2.0
//! Python arrays that Rust reads and writes without the interpreter.
//!
//! Python uses them within a pass of the model, and Rust between two passes, both on the one thread
//! that computes; within a pass Rust reads nothing. An array lives as long as
//! anything here refers to it, and it neither moves nor grows.

use std::sync::{Arc, Weak};

use edl_tensor::model::Memory;
use numpy::{PyArray1, PyArrayMethods as _, PyUntypedArrayMethods as _};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// The numbers of a flat array.
pub(crate) struct Numbers {
    array: Py<PyArray1<f32>>,
    start: *mut f32,
    len: usize,
}

// SAFETY: the pointer is into memory that `array` owns, which may be used by any thread; who may
// use it when is said above.
#[expect(unsafe_code, reason = "arrays have no safe form that outlives the interpreter's lock")]
unsafe impl Send for Numbers {}

impl Numbers {
    pub(crate) fn new(array: &Bound<'_, PyArray1<f32>>) -> PyResult<Self> {
        if !array.is_c_contiguous() || !array.data().is_aligned() {
            return Err(PyValueError::new_err("array must be contiguous"));
        }
        Ok(Self { start: array.data(), len: array.len(), array: array.clone().unbind() })
    }

    pub(crate) fn get(&self) -> &[f32] {
        // SAFETY: `new` has checked that `len` aligned numbers are there; `array` keeps them, and
        // it is not written between two passes.
        #[expect(unsafe_code, reason = "see the module's comment")]
        unsafe {
            std::slice::from_raw_parts(self.start, self.len)
        }
    }
}

/// An array that the owner of the parameters writes and the framework reads: the framework's side.
pub(crate) struct SharedArray {
    numbers: Numbers,
    used: Weak<()>,
}

/// The side of the owner, which writes.
pub(crate) struct SharedMemory {
    numbers: Numbers,
    _used: Arc<()>,
}

impl SharedArray {
    /// Both sides of a new array.
    pub(crate) fn new(array: &Bound<'_, PyArray1<f32>>) -> PyResult<(Self, SharedMemory)> {
        let used = Arc::new(());
        let shared = Self { numbers: Numbers::new(array)?, used: Arc::downgrade(&used) };
        Ok((shared, SharedMemory { numbers: Numbers::new(array)?, _used: used }))
    }

    /// Whether the other side still is.
    pub(crate) fn is_used(&self) -> bool {
        self.used.strong_count() > 0
    }

    pub(crate) fn addr(&self) -> usize {
        self.numbers.start.addr()
    }

    pub(crate) fn array<'py>(&self, py: Python<'py>) -> &Bound<'py, PyArray1<f32>> {
        self.numbers.array.bind(py)
    }
}

impl Memory for SharedMemory {
    fn numbers(&self) -> &[f32] {
        self.numbers.get()
    }

    fn numbers_mut(&mut self) -> &mut [f32] {
        let Numbers { start, len, .. } = self.numbers;
        // SAFETY: as in `Numbers::get`; the array was made to be written here, and the only other
        // reference to it on this side, `SharedArray`, reads none of its numbers.
        #[expect(unsafe_code, reason = "see the module's comment")]
        unsafe {
            std::slice::from_raw_parts_mut(start, len)
        }
    }
}
