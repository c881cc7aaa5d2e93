// SPDX-License-Identifier: Apache-2.0
//! The process that this command runs in: the binary, or a Python interpreter with the package.
//!
//! Like the environment, it belongs to the whole process; `main` sets it once.

use std::ffi::OsString;
use std::path::Path;
use std::sync::OnceLock;

use edl_core::spec::JobSpec;
use edl_tensor::model::Model;

static HOST: OnceLock<Host> = OnceLock::new();

/// Opens the model of a job. The folder can have the index of the job's data.
pub type Open = fn(&JobSpec, Option<&Path>) -> Result<Box<dyn Model>, String>;

/// What only an interpreter can do.
#[derive(Clone, Copy, Debug)]
pub struct Python {
    /// For models that are written in Python.
    pub open: Open,
    /// Finds the records of a custom data reader. The second job is as the user described it, with
    /// unchanged paths.
    pub settle: fn(&JobSpec, &JobSpec) -> Result<JobSpec, String>,
}

/// What runs this command.
#[derive(Clone, Debug)]
pub struct Host {
    /// Starts this command again: a program and its first arguments.
    pub(crate) command: Vec<OsString>,
    pub(crate) python: Option<Python>,
    /// The commit that the program was built from.
    pub(crate) commit: &'static str,
}

impl Host {
    /// The binary, which knows the built-in models alone.
    #[must_use]
    pub fn binary(commit: &'static str) -> Self {
        // Without `/proc` there is still the name it was called by.
        let program = std::env::current_exe().map_or_else(|_| "elasticdl".into(), OsString::from);
        Self { command: vec![program], python: None, commit }
    }

    /// A Python interpreter, which `command` starts again.
    #[must_use]
    pub fn python(command: Vec<OsString>, python: Python, commit: &'static str) -> Self {
        Self { command, python: Some(python), commit }
    }

    /// What a master shows of this program.
    pub(crate) fn build(&self) -> edl_master::Build {
        let instruction_set = edl_zoo::instruction_set();
        edl_master::Build { commit: self.commit, instruction_set }
    }
}

/// The words that the user has entered to start this process.
pub(crate) fn entered() -> Vec<String> {
    std::env::args_os().map(|word| word.to_string_lossy().into_owned()).collect()
}

pub(crate) fn set(host: Host) {
    // A second start, as in tests, keeps the first one.
    let _already = HOST.set(host);
}

pub(crate) fn get() -> &'static Host {
    HOST.get_or_init(|| Host::binary("unknown"))
}
