// SPDX-License-Identifier: Apache-2.0
//! A master's connection to an operator: both write annotations on the job's ConfigMap, so neither
//! needs to know where the other runs.

use futures::StreamExt as _;
use futures::future::BoxFuture;
use futures::stream::BoxStream;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::{Patch, PatchParams};
use kube::runtime::{WatchStreamExt as _, watcher};
use kube::{Api, Client};
use tokio::time::timeout;

use crate::calls::{CALL_LIMIT, wait_of};
use crate::names;
use crate::note::{Grant, StatusNote};

/// The ConfigMap of one job.
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

    /// Whether an operator manages this job: its grant is there before the master starts.
    pub fn is_used<'a>(&'a self) -> BoxFuture<'a, bool> {
        Box::pin(async move {
            match timeout(CALL_LIMIT, self.api.get(&self.name)).await {
                Ok(Ok(map)) => Grant::read(&map).is_some(),
                Ok(Err(_)) | Err(_) => false,
            }
        })
    }

    /// The operator's grants: the current one, and every change.
    #[must_use]
    pub fn grants(&self) -> BoxStream<'static, Grant> {
        let mine = watcher::Config::default().fields(&format!("metadata.name={}", self.name));
        let seen = watcher(self.api.clone(), mine).default_backoff().applied_objects();
        seen.filter_map(async |seen| match seen {
            Ok(map) => Grant::read(&map),
            Err(error) => {
                tracing::warn!(%error, "cannot watch the job's ConfigMap");
                None
            }
        })
        .boxed()
    }

    /// Reports the job's progress.
    pub fn report<'a>(&'a self, status: &'a StatusNote) -> BoxFuture<'a, ()> {
        Box::pin(async move {
            let (params, patch) = (PatchParams::default(), Patch::Merge(status.patch()));
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
