// SPDX-License-Identifier: Apache-2.0
//! `elasticdl._elasticdl`: the command, and the bridge to models written in Python.
//!
//! The whole command runs with the interpreter released. The thread that computes attaches to it
//! for one pass of the model at a time, so heartbeats, transfers and files never wait for Python.

mod batch;
mod custom_loop;
mod model;
mod numbers;
mod schema;
mod thread_state;

use std::ffi::OsString;

use elasticdl::Host;
use pyo3::prelude::*;

/// The extension module behind the `elasticdl` package.
#[pymodule(gil_used = true)]
mod _elasticdl {
    #[pymodule_export]
    use super::custom_loop::Loop;
    #[pymodule_export]
    use super::schema::schema;
    #[pymodule_export]
    use super::{commit, main};
}

/// Runs the command `argv` to its end and returns the exit code.
///
/// `command` starts the same command in another process.
#[pyfunction]
fn main(py: Python<'_>, argv: Vec<OsString>, command: Vec<OsString>) -> u8 {
    let python = elasticdl::Python { open: model::open, settle: model::settle };
    py.detach(|| elasticdl::main(argv, Host::python(command, python, commit())))
}

/// The commit that this module was built from.
#[pyfunction]
fn commit() -> &'static str {
    edl_commit::commit!()
}
