// SPDX-License-Identifier: Apache-2.0
//! `TrainingJob`: a job description as a Kubernetes object, and its status.
//!
//! `spec` is kept as the user wrote it, and parsed in [`crate::description`], so an invalid job does
//! not affect the others.

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

/// The status that the operator reports.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Status {
    /// The most significant condition, e.g. `Running`.
    pub state: String,
    /// The `metadata.generation` that this status describes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Running workers.
    pub workers: u32,
    /// Target number of workers, as sent to the master.
    pub wanted_workers: u32,
    /// Minimum number of workers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_workers: Option<u32>,
    /// Maximum number of workers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_workers: Option<u32>,
    /// Records trained, as reported by the master.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub records_done: Option<u64>,
    /// Records to train in all epochs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub records_total: Option<u64>,
    /// Share of the records that are trained, e.g. `42 %`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub progress: String,
    /// Estimated time left, e.g. `12m`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub eta: String,
    /// Label selector of the workers, for the scale subresource.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub selector: String,
    /// Conditions of the job, with reasons.
    pub conditions: Vec<Condition>,
}

/// A condition of a job.
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

/// The types of conditions, in the order in which a job reaches them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ConditionKind {
    /// Waiting for its minimum number of workers, or for its owner to fix an error.
    Queued,
    /// The operator has assigned workers to the job.
    Admitted,
    /// The minimum number of workers is running.
    Running,
    /// The number of workers is changing.
    Resizing,
    /// Completed.
    Succeeded,
    /// Failed or stopped; it does not restart by itself.
    Failed,
}

impl ConditionKind {
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
    pub fn condition(&self, kind: ConditionKind) -> Option<&Condition> {
        self.conditions.iter().find(|condition| condition.kind == kind.name())
    }

    #[must_use]
    pub fn is(&self, kind: ConditionKind) -> bool {
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

    /// Namespace and name.
    #[must_use]
    pub fn key(&self) -> (String, String) {
        (self.namespace().into(), self.name().into())
    }

    /// The job as the owner of its ConfigMap, which owns everything else and is deleted with it.
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
    fn an_invalid_spec_can_still_be_deserialized() {
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
