// SPDX-License-Identifier: Apache-2.0
//! What the words of jobs mean, read once and again only when they have changed: a look comes
//! every second, and words hardly ever change.

use std::collections::BTreeMap;
use std::sync::Arc;

use edl_core::spec::JobSpec;
use edl_kube::yaml;

use crate::crd::TrainingJob;
use crate::words::{self, Described, Trouble};

/// The words of jobs, by uid.
#[derive(Clone, Debug, Default)]
pub(super) struct Readings(BTreeMap<String, Reading>);

/// What one job says, and what its master was started with.
#[derive(Clone, Debug)]
pub(super) struct Reading {
    generation: Option<i64>,
    /// The description that its master has, as text.
    text: String,
    pub(super) described: Result<Arc<Described>, Trouble>,
    pub(super) started: Option<Arc<JobSpec>>,
    /// The first word that says something else now.
    pub(super) edited: Option<String>,
}

impl Readings {
    /// Reads a job; `text` is the description in its ConfigMap, empty if there is none.
    pub(super) fn read(&mut self, job: &TrainingJob, text: &str) -> Reading {
        let generation = job.metadata.generation;
        let known = self.0.get(job.uid()).filter(|known| {
            known.generation == generation && generation.is_some() && known.text == text
        });
        if let Some(known) = known {
            return known.clone();
        }
        let described = words::read(job).map(Arc::new);
        let started = if text.is_empty() { None } else { yaml::read::<JobSpec>(text).ok() };
        let edited = match (&described, &started) {
            (Ok(described), Some(started)) => words::edited(&described.spec, started),
            (_, _) => None,
        };
        let started = started.map(Arc::new);
        let reading = Reading { generation, text: text.to_owned(), described, started, edited };
        self.0.insert(job.uid().to_owned(), reading.clone());
        reading
    }

    /// Forgets all jobs but these.
    pub(super) fn keep_only(&mut self, is_there: impl Fn(&str) -> bool) {
        self.0.retain(|uid, _| is_there(uid));
    }
}
