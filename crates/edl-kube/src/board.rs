// SPDX-License-Identifier: Apache-2.0
//! The job's ConfigMap as a board: an operator notes there how many workers a job may have, and
//! the job's master how far it is. Neither needs to know where the other runs.

use futures::StreamExt as _;
use futures::future::BoxFuture;
use futures::stream::BoxStream;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::{Patch, PatchParams};
use kube::runtime::{WatchStreamExt as _, watcher};
use kube::{Api, Client};
use serde_json::json;
use tokio::time::timeout;

use crate::calls::{CALL_LIMIT, wait_of};
use crate::names;

/// What an operator lets a job have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant {
    pub workers: u32,
    /// Workers that go first if they are too many.
    pub leave: Vec<u32>,
}

/// The board of one job.
#[derive(Clone)]
pub struct Board {
    api: Api<ConfigMap>,
    name: String,
}

impl std::fmt::Debug for Board {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Board({})", self.name)
    }
}

impl Board {
    #[must_use]
    pub fn new(client: Client, namespace: &str, job: &str) -> Self {
        Self { api: Api::namespaced(client, namespace), name: names::config_map(job) }
    }

    /// Whether an operator cares for this job. It has left its note before the master began.
    pub fn is_used<'a>(&'a self) -> BoxFuture<'a, bool> {
        Box::pin(async move {
            match timeout(CALL_LIMIT, self.api.get(&self.name)).await {
                Ok(Ok(map)) => grant(&map).is_some(),
                Ok(Err(_)) | Err(_) => false,
            }
        })
    }

    /// How many workers the job may have, now and whenever that is noted anew.
    #[must_use]
    pub fn grants(&self) -> BoxStream<'static, Grant> {
        let mine = watcher::Config::default().fields(&format!("metadata.name={}", self.name));
        let seen = watcher(self.api.clone(), mine).default_backoff().applied_objects();
        seen.filter_map(async |seen| match seen {
            Ok(map) => grant(&map),
            Err(error) => {
                tracing::warn!(%error, "cannot watch the job's ConfigMap");
                None
            }
        })
        .boxed()
    }

    /// Notes how far the job is.
    pub fn tell<'a>(&'a self, status: &'a str) -> BoxFuture<'a, ()> {
        Box::pin(async move {
            let note = json!({ "metadata": { "annotations": { names::STATUS_NOTE: status } } });
            let (params, patch) = (PatchParams::default(), Patch::Merge(note));
            let call = self.api.patch(&self.name, &params, &patch);
            match timeout(CALL_LIMIT, call).await {
                Ok(Ok(_)) => {}
                Ok(Err(error)) => {
                    tracing::warn!(why = %wait_of(&error), "cannot update the job's status")
                }
                Err(_) => tracing::warn!("cannot update the job's status: no response"),
            }
        })
    }
}

fn grant(map: &ConfigMap) -> Option<Grant> {
    let notes = map.metadata.annotations.as_ref()?;
    let workers = notes.get(names::WORKERS_NOTE)?.trim().parse().ok()?;
    let leave = notes.get(names::LEAVE_NOTE).map_or("", String::as_str);
    let leave = leave.split(',').filter_map(|number| number.trim().parse().ok()).collect();
    Some(Grant { workers, leave })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_grant_is_read_from_the_notes_of_the_job() {
        let of = |notes: serde_json::Value| {
            let map = json!({ "metadata": { "name": "a", "annotations": notes } });
            grant(&serde_json::from_value(map).expect("a ConfigMap"))
        };
        assert_eq!(of(json!({})), None);
        assert_eq!(of(json!({ names::WORKERS_NOTE: "many" })), None);
        let four = Grant { workers: 4, leave: Vec::new() };
        assert_eq!(of(json!({ names::WORKERS_NOTE: "4" })), Some(four));
        let two = Grant { workers: 2, leave: vec![3, 7] };
        assert_eq!(of(json!({ names::WORKERS_NOTE: "2", names::LEAVE_NOTE: "3, 7" })), Some(two));
    }
}
