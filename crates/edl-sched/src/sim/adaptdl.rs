// SPDX-License-Identifier: Apache-2.0
//! The workloads and profiles of the AdaptDL artifact: 16 nodes of 4 GPUs, and jobs with measured
//! speed by placement and progress by batch size.
//!
//! The caller provides the text of the data files, which are not part of this crate.

mod application;
mod table;
mod training;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use edl_core::time::Time;

pub use application::Application;
pub use training::{Batch, SpeedReport, Training};

use crate::resources::Resources;
use crate::sim::kubernetes::Kubernetes;
use crate::sim::scenario::{JobScript, Scenario};
use crate::sim::work::Work;
use crate::snapshot::{Job, JobId, Node, NodeId, RoleSpec, Roles};
use crate::state::{Options, Policy};

pub const N_NODES: u32 = 16;
pub const GPUS_PER_NODE: u32 = 4;

/// The text of each file by its path inside the data folder, e.g. `traces/bert/placements.csv`.
pub type Files = BTreeMap<String, String>;

/// All applications of the artifact.
#[derive(Clone, Debug)]
pub struct Profiles {
    applications: BTreeMap<String, Arc<Application>>,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("file `{0}` not found")]
    Missing(String),
    #[error("`{file}` line {line}: unexpected value `{text}`")]
    Malformed { file: String, line: usize, text: String },
    #[error("unknown application `{0}`")]
    UnknownApplication(String),
}

/// One line of a workload.
#[derive(Clone, Debug, PartialEq)]
pub struct WorkloadJob {
    pub name: String,
    pub submitted: Time,
    pub application: String,
    pub n_replicas: u32,
    pub batch: u32,
}

/// How jobs choose their batch, if the policy allows a choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BatchRule {
    /// As in the trace.
    Fixed,
    /// The batch that makes the most progress, as in Pollux.
    Adaptive,
}

impl Profiles {
    /// Fails if a file is missing or malformed.
    pub fn parse(files: &Files) -> Result<Self, Error> {
        let limits = application::LIMITS.iter();
        let applications = limits.map(|limits| {
            Ok((limits.name.to_owned(), Arc::new(Application::parse(files, limits)?)))
        });
        Ok(Self { applications: applications.collect::<Result<_, _>>()? })
    }

    /// Fails if there is no such application.
    pub fn get(&self, name: &str) -> Result<&Arc<Application>, Error> {
        self.applications.get(name).ok_or_else(|| Error::UnknownApplication(name.to_owned()))
    }
}

/// Parses a workload, e.g. `workloads/workload-1.csv`.
/// Fails if it is missing or malformed.
pub fn parse_workload(files: &Files, path: &str) -> Result<Vec<WorkloadJob>, Error> {
    let rows =
        table::rows(files, path, &["name", "time", "application", "num_replicas", "batch_size"])?;
    let entry = |row: &table::Record<'_>| {
        Ok(WorkloadJob {
            name: row.text(0).to_owned(),
            submitted: Time::ZERO + Duration::from_secs_f64(row.number(1)?),
            application: row.text(2).to_owned(),
            n_replicas: row.integer(3)?,
            batch: row.integer(4)?,
        })
    };
    rows.iter().map(entry).collect()
}

/// A workload under the rules of the artifact's simulator: a plan every minute, half a minute
/// lost at each change.
/// Fails if a job's application is not known.
pub fn scenario(
    name: &str,
    entries: &[WorkloadJob],
    profiles: &Profiles,
    policy: Policy,
    rule: BatchRule,
) -> Result<Scenario, Error> {
    let jobs = entries.iter().enumerate();
    let jobs =
        jobs.map(|(id, entry)| job(id, entry, profiles.get(&entry.application)?, policy, rule));
    Ok(Scenario {
        jobs: jobs.collect::<Result<_, Error>>()?,
        plan_every: Duration::from_secs(60),
        plans_on_events: false,
        rescale: Duration::from_secs(30),
        row_every: Duration::from_secs(60),
        options: Options { max_load_permille: 1000, ..Options::default() },
        ..Scenario::new(name, nodes(), Kubernetes::instant())
    })
}

#[must_use]
pub fn nodes() -> Vec<Node> {
    let node = |id| Node::new(NodeId(id), Resources::new(u64::from(GPUS_PER_NODE), 0, 0));
    (0..N_NODES).map(node).collect()
}

fn job(
    id: usize,
    entry: &WorkloadJob,
    application: &Arc<Application>,
    policy: Policy,
    rule: BatchRule,
) -> Result<JobScript, Error> {
    // One application does not scale; the artifact gives it one worker and one batch size.
    let is_single = entry.application == application::SINGLE;
    let most_by_batch = (entry.batch / application.min_local).max(1);
    let is_rigid = matches!(policy, Policy::Tiresias | Policy::Fifo | Policy::Off);
    let adapts = (rule == BatchRule::Adaptive || policy == Policy::Pollux) && !is_single;
    let batch = if adapts { Batch::Adaptive } else { Batch::Fixed(entry.batch) };
    let (min, max) = if is_rigid {
        (entry.n_replicas, entry.n_replicas)
    } else if is_single {
        (1, 1)
    } else if policy == Policy::Optimus {
        (1, most_by_batch)
    } else if adapts {
        (1, (application.max_batch / application.min_local).min(64))
    } else {
        (1, most_by_batch.min(64))
    };
    let reports = if policy == Policy::Optimus {
        SpeedReport::Truth
    } else if matches!(policy, Policy::Pollux | Policy::Goodput) {
        SpeedReport::Estimate
    } else {
        SpeedReport::Nothing
    };
    // Pollux tries one worker, two, four, …; `goodput` starts with up to sixteen if they are free,
    // because each step costs half a minute.
    let explores = if policy == Policy::Goodput { 32 } else { 2 };
    let worker = RoleSpec { shape: Resources::new(1, 0, 0), min, max };
    let job = Job::new(
        JobId(u32::try_from(id).unwrap_or(u32::MAX)),
        entry.submitted,
        Roles { worker, ..Roles::default() },
    );
    let training = Training::new(Arc::clone(application), batch, reports, explores);
    Ok(JobScript { name: entry.name.clone(), job, work: Work::Training(Box::new(training)) })
}
