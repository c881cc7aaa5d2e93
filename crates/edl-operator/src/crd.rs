// SPDX-License-Identifier: Apache-2.0
//! `TrainingJob`: a job description as an object of the cluster, and what the operator says of it.
//!
//! `spec` is kept as the words that the user wrote. A description that cannot be understood must
//! not keep the other jobs from being read, so it is read one by one, in [`crate::words`].

use std::borrow::Cow;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::Resource;
use kube::core::NamespaceResourceScope;
use serde::{Deserialize, Serialize};
use serde_json::Value;

mod schema;

pub use schema::definition;

pub const GROUP: &str = "elasticdl.org";
pub const VERSION: &str = "v1";
pub const KIND: &str = "TrainingJob";
pub const PLURAL: &str = "trainingjobs";
pub const API_VERSION: &str = "elasticdl.org/v1";

/// A training job of the cluster.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TrainingJob {
    #[serde(default)]
    pub metadata: ObjectMeta,
    #[serde(default)]
    pub spec: Value,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<Status>,
}

/// What the operator says of a job.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Status {
    /// The condition that says most, in one word.
    pub state: String,
    /// The generation of the description that all this is about.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Workers that run.
    pub workers: u32,
    /// Workers that its master was told to have.
    pub wanted_workers: u32,
    /// The fewest workers that it may have.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_workers: Option<u32>,
    /// The most.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_workers: Option<u32>,
    /// Records trained, as its master says.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub records_done: Option<u64>,
    /// Records of all its epochs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub records_total: Option<u64>,
    /// Share of its records that is trained, e.g. `42 %`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub progress: String,
    /// Time left, e.g. `12m`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub eta: String,
    /// The label selector of its workers, for `/scale`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub selector: String,
    /// What is so and what is not, with reasons.
    pub conditions: Vec<Condition>,
}

/// One thing that is so or not, and why.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Condition {
    #[serde(rename = "type")]
    pub kind: String,
    /// `True` or `False`.
    pub status: String,
    pub reason: String,
    pub message: String,
    /// When `status` changed last, as RFC 3339.
    pub last_transition_time: String,
}

/// What can be said of a job; in the order in which a job comes by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// It waits for its minimum, or for its owner to mend it.
    Queued,
    /// Its master was told to work.
    Admitted,
    /// It has its minimum of workers.
    Running,
    /// It is on its way to another number of workers.
    Resizing,
    /// It has come to its end.
    Succeeded,
    /// It failed or was stopped, and will not go on by itself.
    Failed,
}

impl Kind {
    pub const ALL: [Self; 6] = [
        Self::Queued,
        Self::Admitted,
        Self::Running,
        Self::Resizing,
        Self::Succeeded,
        Self::Failed,
    ];

    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Queued => "Queued",
            Self::Admitted => "Admitted",
            Self::Running => "Running",
            Self::Resizing => "Resizing",
            Self::Succeeded => "Succeeded",
            Self::Failed => "Failed",
        }
    }
}

impl Status {
    #[must_use]
    pub fn condition(&self, kind: Kind) -> Option<&Condition> {
        self.conditions.iter().find(|condition| condition.kind == kind.name())
    }

    #[must_use]
    pub fn is(&self, kind: Kind) -> bool {
        self.condition(kind).is_some_and(Condition::holds)
    }
}

impl Condition {
    #[must_use]
    pub fn holds(&self) -> bool {
        self.status == "True"
    }
}

impl TrainingJob {
    #[must_use]
    pub fn name(&self) -> &str {
        self.metadata.name.as_deref().unwrap_or_default()
    }

    #[must_use]
    pub fn namespace(&self) -> &str {
        self.metadata.namespace.as_deref().unwrap_or_default()
    }

    #[must_use]
    pub fn uid(&self) -> &str {
        self.metadata.uid.as_deref().unwrap_or_default()
    }

    /// Namespace and name: two jobs of one name in two namespaces are two jobs.
    #[must_use]
    pub fn key(&self) -> (String, String) {
        (self.namespace().into(), self.name().into())
    }

    /// The job as the owner of its ConfigMap, which owns all else: the cluster clears away what a
    /// deleted job leaves behind.
    #[must_use]
    pub fn owner(&self) -> OwnerReference {
        OwnerReference {
            api_version: API_VERSION.into(),
            kind: KIND.into(),
            name: self.name().into(),
            uid: self.uid().into(),
            controller: Some(true),
            ..OwnerReference::default()
        }
    }
}

impl Resource for TrainingJob {
    type DynamicType = ();
    type Scope = NamespaceResourceScope;

    fn kind((): &()) -> Cow<'_, str> {
        KIND.into()
    }

    fn group((): &()) -> Cow<'_, str> {
        GROUP.into()
    }

    fn version((): &()) -> Cow<'_, str> {
        VERSION.into()
    }

    fn plural((): &()) -> Cow<'_, str> {
        PLURAL.into()
    }

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_job_that_says_nonsense_can_still_be_read() {
        let job = json!({"apiVersion": API_VERSION, "kind": KIND,
            "metadata": {"name": "a", "namespace": "n", "uid": "1"},
            "spec": {"min_workers": "many", "words": [1]}});
        let job: TrainingJob = serde_json::from_value(job).unwrap();
        assert_eq!((job.name(), job.namespace(), job.owner().uid.as_str()), ("a", "n", "1"));
        assert_eq!(job.spec["min_workers"], "many");
        let url = TrainingJob::url_path(&(), Some("n"));
        assert_eq!(url, "/apis/elasticdl.org/v1/namespaces/n/trainingjobs");
    }
}
