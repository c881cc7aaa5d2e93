// SPDX-License-Identifier: Apache-2.0
//! The watches from which the operator knows the cluster.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::pin::pin;
use std::sync::Arc;

use edl_core::error::chain;
use edl_kube::names;
use futures::StreamExt as _;
use k8s_openapi::api::core::v1::{ConfigMap, Node, Pod};
use k8s_openapi::api::scheduling::v1::PriorityClass;
use kube::api::ListParams;
use kube::runtime::reflector::{self, Store};
use kube::runtime::{WatchStreamExt as _, watcher};
use kube::{Api, Client, Resource};
use serde::de::DeserializeOwned;
use tokio::sync::Notify;
use tokio::task::JoinSet;

use crate::apply::{Error, Promise, is_code, within};
use crate::crd::{PLURAL, TrainingJob};
use crate::observe::ClusterObjects;
use crate::permissions::Permissions;
use crate::queues::{self, Queues};

/// Watched objects, kept up to date.
pub struct Watches {
    nodes: Store<Node>,
    pods: Store<Pod>,
    jobs: Store<TrainingJob>,
    config_maps: Store<ConfigMap>,
    classes: Store<PriorityClass>,
    queues: Store<ConfigMap>,
    /// JobEvent whenever something has changed.
    pub changed: Arc<Notify>,
}

impl Watches {
    /// Starts the watches; `namespace` is that of the queues.
    pub fn start(client: &Client, namespace: &str, tasks: &mut JoinSet<()>) -> Self {
        let changed = Arc::new(Notify::new());
        let all = watcher::Config::default;
        let of_jobs = all().labels(names::OF_ALL_JOBS);
        let of_queues = all().fields(&format!("metadata.name={}", queues::CONFIG_MAP));
        let here = Api::namespaced(client.clone(), namespace);
        let everywhere = || client.clone();
        Self {
            nodes: keep(Api::all(everywhere()), all(), &changed, tasks),
            pods: keep(Api::all(everywhere()), all(), &changed, tasks),
            jobs: keep(Api::all(everywhere()), all(), &changed, tasks),
            config_maps: keep(Api::all(everywhere()), of_jobs, &changed, tasks),
            classes: keep(Api::all(everywhere()), all(), &changed, tasks),
            queues: keep(here, of_queues, &changed, tasks),
            changed,
        }
    }

    /// Waits until everything has been listed once.
    pub async fn ready(&self) {
        let _ended = self.nodes.wait_until_ready().await;
        let _ended = self.pods.wait_until_ready().await;
        let _ended = self.jobs.wait_until_ready().await;
        let _ended = self.config_maps.wait_until_ready().await;
        let _ended = self.classes.wait_until_ready().await;
        let _ended = self.queues.wait_until_ready().await;
    }

    #[must_use]
    pub fn objects(&self, masters_outside: bool) -> ClusterObjects {
        let settings = self.queues.state().first().cloned();
        ClusterObjects {
            nodes: self.nodes.state(),
            pods: self.pods.state(),
            jobs: self.jobs.state(),
            config_maps: self.config_maps.state(),
            classes: values(self.classes.state().iter().map(|class| &**class)),
            queues: Queues::read(settings.as_deref()),
            permissions: Permissions::read(settings.as_deref()),
            masters_outside,
        }
    }

    /// Whether the watches show a written ConfigMap.
    #[must_use]
    pub fn shows(&self, promise: &Promise) -> bool {
        let map = self.config_maps.find(|map| {
            map.metadata.name.as_ref() == Some(&promise.name)
                && map.metadata.namespace.as_ref() == Some(&promise.namespace)
        });
        let seen = map.as_ref().and_then(|map| map.metadata.resource_version.as_deref());
        seen.is_some_and(|seen| is_as_new(seen, &promise.version))
    }
}

/// Compares resource versions, which are growing numbers in practice.
fn is_as_new(seen: &str, promised: &str) -> bool {
    match (seen.parse::<u64>(), promised.parse::<u64>()) {
        (Ok(seen), Ok(promised)) => seen >= promised,
        (_, _) => seen == promised,
    }
}

fn keep<K>(
    api: Api<K>,
    config: watcher::Config,
    changed: &Arc<Notify>,
    tasks: &mut JoinSet<()>,
) -> Store<K>
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + Sync + 'static,
{
    let (store, writer) = reflector::store();
    let changed = changed.clone();
    tasks.spawn(async move {
        // Managed fields are half of an object, and unused.
        let bare = |object: &mut K| object.meta_mut().managed_fields = None;
        let events = watcher(api, config).default_backoff().modify(bare).reflect(writer);
        let mut events = pin!(events);
        let mut trouble = None;
        while let Some(event) = events.next().await {
            match event {
                Ok(_) => {
                    trouble = None;
                    changed.notify_one();
                }
                Err(error) => {
                    let text = format!("{}{}", chain(&error), hint::<K>(&error));
                    if trouble.as_ref() != Some(&text) {
                        tracing::warn!("cannot watch {}: {text}", K::plural(&()));
                        trouble = Some(text);
                    }
                }
            }
        }
    });
    store
}

/// The missing step on a cluster without the CRD.
fn hint<K: Resource<DynamicType = ()>>(error: &watcher::Error) -> &'static str {
    let is_unknown = match error {
        watcher::Error::InitialListFailed(error)
        | watcher::Error::WatchStartFailed(error)
        | watcher::Error::WatchFailed(error) => is_code(error, &[404]),
        watcher::Error::WatchError(_) | watcher::Error::NoResourceVersion => false,
    };
    match is_unknown && K::plural(&()) == PLURAL {
        true => "; install the CRD with `elasticdl operator crd | kubectl apply -f -`",
        false => "",
    }
}

/// Lists everything once, without a watch.
pub async fn list_all(client: &Client, namespace: &str) -> Result<ClusterObjects, Error> {
    let of_jobs = ListParams::default().labels(names::OF_ALL_JOBS);
    let all = ListParams::default();
    let queues: Api<ConfigMap> = Api::namespaced(client.clone(), namespace);
    let queues = within(
        "read",
        format!("configmap `{}`", queues::CONFIG_MAP),
        queues.get_opt(queues::CONFIG_MAP),
    );
    let classes = list::<PriorityClass>(client, &all).await?;
    let settings = queues.await?;
    Ok(ClusterObjects {
        nodes: list(client, &all).await?,
        pods: list(client, &all).await?,
        jobs: list(client, &all).await?,
        config_maps: list(client, &of_jobs).await?,
        classes: values(classes.iter().map(|class| &**class)),
        queues: Queues::read(settings.as_ref()),
        permissions: Permissions::read(settings.as_ref()),
        masters_outside: false,
    })
}

async fn list<K>(client: &Client, which: &ListParams) -> Result<Vec<Arc<K>>, Error>
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned,
{
    let api: Api<K> = Api::all(client.clone());
    let found = within("list", K::plural(&()).into_owned(), api.list(which)).await?;
    Ok(found.items.into_iter().map(Arc::new).collect())
}

fn values<'a>(classes: impl Iterator<Item = &'a PriorityClass>) -> BTreeMap<String, i32> {
    classes.filter_map(|class| Some((class.metadata.name.clone()?, class.value))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_later_version_shows_what_an_earlier_one_promised() {
        assert!(is_as_new("12", "9") && is_as_new("9", "9") && !is_as_new("9", "12"));
        assert!(is_as_new("x", "x") && !is_as_new("x", "y"));
    }
}
