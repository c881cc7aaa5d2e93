// SPDX-License-Identifier: Apache-2.0
//! The workloads and profiles of the AdaptDL artifact: 16 nodes of 4 GPUs, jobs whose speed was
//! measured by placement and whose progress was measured by batch size.
//!
//! The data is not ours and not here: callers read the files and pass their text.

mod application;
mod table;
mod training;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use edl_core::time::Time;

pub use application::Application;
pub use training::{Batch, Tells, Training};

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
pub struct Entry {
    pub name: String,
    pub submitted: Time,
    pub application: String,
    pub n_replicas: u32,
    pub batch: u32,
}

/// How jobs choose their batch, for policies that leave them the choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BatchRule {
    /// As the trace says.
    Fixed,
    /// As Pollux does: whatever makes the most progress.
    Adaptive,
}

impl Profiles {
    /// # Errors
    /// If a file is missing or malformed.
    pub fn parse(files: &Files) -> Result<Self, Error> {
        let limits = application::LIMITS.iter();
        let applications = limits.map(|limits| {
            Ok((limits.name.to_owned(), Arc::new(Application::parse(files, limits)?)))
        });
        Ok(Self { applications: applications.collect::<Result<_, _>>()? })
    }

    /// # Errors
    /// If there is none of that name.
    pub fn get(&self, name: &str) -> Result<&Arc<Application>, Error> {
        self.applications.get(name).ok_or_else(|| Error::UnknownApplication(name.to_owned()))
    }
}

/// Reads a workload, e.g. `workloads/workload-1.csv`.
///
/// # Errors
/// If it is missing or malformed.
pub fn parse_workload(files: &Files, path: &str) -> Result<Vec<Entry>, Error> {
    let rows =
        table::rows(files, path, &["name", "time", "application", "num_replicas", "batch_size"])?;
    let entry = |row: &table::Record<'_>| {
        Ok(Entry {
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
///
/// # Errors
/// If a job's application is not known.
pub fn scenario(
    name: &str,
    entries: &[Entry],
    profiles: &Profiles,
    policy: Policy,
    rule: BatchRule,
) -> Result<Scenario, Error> {
    let jobs = entries.iter().enumerate();
    let jobs =
        jobs.map(|(id, entry)| job(id, entry, profiles.get(&entry.application)?, policy, rule));
    Ok(Scenario {
        name: name.to_owned(),
        nodes: nodes(),
        queues: Vec::new(),
        jobs: jobs.collect::<Result<_, Error>>()?,
        services: Vec::new(),
        faults: Vec::new(),
        kubernetes: Kubernetes::instant(),
        plan_every: Duration::from_secs(60),
        plans_on_events: false,
        rescale: Duration::from_secs(30),
        end: None,
        row_every: Duration::from_secs(60),
        options: Options { max_load_permille: 1000, ..Options::default() },
    })
}

#[must_use]
pub fn nodes() -> Vec<Node> {
    let node = |id| Node::new(NodeId(id), Resources::new(u64::from(GPUS_PER_NODE), 0, 0));
    (0..N_NODES).map(node).collect()
}

fn job(
    id: usize,
    entry: &Entry,
    application: &Arc<Application>,
    policy: Policy,
    rule: BatchRule,
) -> Result<JobScript, Error> {
    // One application gains nothing from workers; the artifact gives it one and one batch.
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
    let tells = if policy == Policy::Optimus {
        Tells::Truth
    } else if matches!(policy, Policy::Pollux | Policy::Goodput) {
        Tells::Estimate
    } else {
        Tells::Nothing
    };
    // Pollux tries one worker, two, four …; `goodput` starts with up to sixteen if nobody needs
    // them more, because each step costs half a minute.
    let explores = if policy == Policy::Goodput { 32 } else { 2 };
    let worker = RoleSpec { shape: Resources::new(1, 0, 0), min, max };
    let job = Job::new(
        JobId(u32::try_from(id).unwrap_or(u32::MAX)),
        entry.submitted,
        Roles { worker, ..Roles::default() },
    );
    let training = Training::new(Arc::clone(application), batch, tells, explores);
    Ok(JobScript { name: entry.name.clone(), job, work: Work::Training(Box::new(training)) })
}
