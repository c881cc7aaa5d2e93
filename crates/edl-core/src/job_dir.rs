// SPDX-License-Identifier: Apache-2.0
//! The layout of a job's folder: where every file of a job is. Only names; nothing is read or
//! written here.

use std::path::{Path, PathBuf};

use crate::platform::InstanceId;
use crate::spec::JobSpec;

/// File name of the job's key.
pub const KEY: &str = "job.key";
/// File name of the initial values that a model provides itself.
pub const FIRST_VALUES: &str = "first_values.safetensors";
/// File name of the initial state of a training script that takes its own optimizer steps.
pub const FIRST_STATE: &str = "first_state.bin";

/// The folder of one job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobDir(PathBuf);

macro_rules! entries {
    ($($(#[$doc:meta])* $method:ident: $name:expr,)*) => {
        impl JobDir {$(
            $(#[$doc])*
            #[must_use]
            pub fn $method(&self) -> PathBuf {
                self.0.join($name)
            }
        )*}
    };
}

entries! {
    /// The job's description.
    spec: "job.json",
    key: KEY,
    /// The address of the running master.
    master: "master.json",
    /// The state that survives a master.
    store: "master.redb",
    /// What the master publishes twice a second.
    status: "status.json",
    /// The Kubernetes Job that runs the master.
    controller: "controller.json",
    events: "events.jsonl",
    metrics: "metrics.jsonl",
    /// How processes ended, as the supervisor saw it.
    exits: "exits.jsonl",
    /// The points of all curves, for the page.
    curves: "curves.bin",
    /// Downsampled curves and process timeline.
    history: "history.json",
    /// The page of a job that has ended.
    report: "report.html",
    /// The process that supervises the job, or did so last.
    supervisor: "supervisor.json",
    /// Locked by the supervisor while it runs.
    supervisor_lock: "supervisor.lock",
    /// The model of a custom training loop.
    loop_model: "model.json",
    /// What a custom training loop trains on.
    loop_plan: "loop.json",
    /// What workers with a custom training loop log: one file per worker.
    logged: "logged",
    /// Parts of evaluations that workers with a custom training loop share.
    evaluations: "evaluations",
    /// Indexes of the data sets.
    indexes: "index",
    logs: "logs",
    supervisor_log: "logs/supervisor.log",
    /// Unix sockets of the processes.
    sockets: "run",
    /// Checkpoints of a job that names no other folder.
    own_checkpoints: "checkpoints",
    /// Results of a job that names no other folder.
    own_output: "output",
}

impl JobDir {
    #[must_use]
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self(path.into())
    }

    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }

    #[must_use]
    pub fn log(&self, instance: InstanceId) -> PathBuf {
        self.logs().join(format!("{instance}.log"))
    }

    #[must_use]
    pub fn checkpoints(&self, spec: &JobSpec) -> PathBuf {
        or_named(self.own_checkpoints(), &spec.checkpoint_dir)
    }

    #[must_use]
    pub fn output(&self, spec: &JobSpec) -> PathBuf {
        or_named(self.own_output(), &spec.output)
    }
}

fn or_named(own: PathBuf, named: &str) -> PathBuf {
    if named.is_empty() { own } else { named.into() }
}
