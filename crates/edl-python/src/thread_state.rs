// SPDX-License-Identifier: Apache-2.0
//! One Python thread state for the whole life of a thread that computes.
//!
//! Attaching makes a thread state and detaching ends it, unless the thread has one already.
//! TensorFlow and others hang what they know of a thread on it, and crash when it is gone.

use pyo3::ffi;

/// Gives this thread a thread state that stays; the interpreter is not held afterwards.
#[expect(unsafe_code, reason = "PyO3 has no safe name for a thread state that outlives a call")]
pub(crate) fn keep() {
    // SAFETY: the interpreter runs: it has loaded this module, and its process ends without
    // finalising it. `Ensure` attaches this thread, `SaveThread` detaches it again as its pair
    // `RestoreThread` would expect; never releasing what was ensured keeps the thread state.
    unsafe {
        ffi::PyGILState_Ensure();
        ffi::PyEval_SaveThread();
    }
}
