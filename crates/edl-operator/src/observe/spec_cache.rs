// SPDX-License-Identifier: Apache-2.0
//! Parsed job descriptions, kept until the description changes: a pass runs every second, and
//! descriptions hardly ever change.

use std::collections::BTreeMap;
use std::sync::Arc;

use edl_core::spec::JobSpec;
use edl_kube::yaml;

use crate::crd::TrainingJob;
use crate::description::{self, JobDescription, Trouble};

/// Parsed descriptions by the uid of the job.
#[derive(Clone, Debug, Default)]
pub(super) struct SpecCache(BTreeMap<String, ParsedSpec>);

/// The description of a job, and the one that its master was started with.
#[derive(Clone, Debug)]
pub(super) struct ParsedSpec {
    generation: Option<i64>,
    /// The master's description, as text.
    text: String,
    pub(super) described: Result<Arc<JobDescription>, Trouble>,
    pub(super) started: Option<Arc<JobSpec>>,
    /// The first field that differs.
    pub(super) edited: Option<String>,
}

impl SpecCache {
    /// Reads a job; `text` is the description in its ConfigMap, empty if there is none.
    pub(super) fn read(&mut self, job: &TrainingJob, text: &str) -> ParsedSpec {
        let generation = job.metadata.generation;
        let known = self.0.get(job.uid()).filter(|known| {
            known.generation == generation && generation.is_some() && known.text == text
        });
        if let Some(known) = known {
            return known.clone();
        }
        let described = description::read(job).map(Arc::new);
        let started = if text.is_empty() { None } else { yaml::read::<JobSpec>(text).ok() };
        let edited = match (&described, &started) {
            (Ok(described), Some(started)) => description::edited(&described.spec, started),
            (_, _) => None,
        };
        let started = started.map(Arc::new);
        let parsed = ParsedSpec { generation, text: text.to_owned(), described, started, edited };
        self.0.insert(job.uid().to_owned(), parsed.clone());
        parsed
    }

    /// Forgets all jobs but these.
    pub(super) fn keep_only(&mut self, is_there: impl Fn(&str) -> bool) {
        self.0.retain(|uid, _| is_there(uid));
    }
}
