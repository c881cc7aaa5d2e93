// SPDX-License-Identifier: Apache-2.0
//! The client of users: submits and finds jobs, reads their logs and connects to their masters. Every
//! error names the object.

use std::path::Path;
use std::time::Duration;

use edl_core::platform::Role;
use edl_core::pod;
use edl_core::spec::JobSpec;
use futures::future::BoxFuture;
use k8s_openapi::api::batch::v1::Job;
pub use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::core::v1::{ConfigMap, Secret};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{DeleteParams, ListParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client, Config};

use crate::{facts, manifest, names, yaml};

mod error;
mod forward;
mod logs;
mod pod_state;
mod run;
mod submit;

pub use error::Error;
pub use forward::Forward;
pub use logs::LogStream;
pub use pod_state::{PodState, Trouble, pod_state};

/// The deadline for a connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// One namespace of a cluster.
#[derive(Clone)]
pub struct Cluster {
    client: Client,
    namespace: String,
}

/// A job as the cluster knows it.
#[derive(Clone, Debug)]
pub struct Found {
    pub spec: JobSpec,
    pub config_map: ConfigMap,
    /// Runs its master.
    pub controller: Option<Job>,
    /// Its current pods.
    pub pods: Vec<Pod>,
}

/// How to reach a cluster: by the file `kubeconfig`; without it, the cluster around this process,
/// unless `force_kube_config` is set; or else the default kubeconfig.
pub fn config<'a>(
    kubeconfig: Option<&'a Path>,
    force_kube_config: bool,
) -> BoxFuture<'a, Result<Config, Box<dyn std::error::Error + Send + Sync>>> {
    Box::pin(async move {
        let options = KubeConfigOptions::default();
        let is_inside = std::env::var_os("KUBERNETES_SERVICE_HOST").is_some();
        let mut config = match kubeconfig {
            Some(path) => {
                Config::from_custom_kubeconfig(Kubeconfig::read_from(path)?, &options).await?
            }
            None if is_inside && !force_kube_config => Config::incluster()?,
            None => Config::from_kubeconfig(&options).await?,
        };
        config.connect_timeout = Some(CONNECT_TIMEOUT);
        Ok(config)
    })
}

impl Cluster {
    /// The cluster of the kubeconfig, or the one that this process runs in. Inside a cluster its
    /// own comes first unless `force_kube_config` is set, as with ElasticDL.
    pub fn connect<'a>(
        namespace: &'a str,
        force_kube_config: bool,
    ) -> BoxFuture<'a, Result<Self, Error>> {
        Box::pin(async move {
            let read = config(None, force_kube_config).await;
            let mut config = read.map_err(|source| Error::NoCluster { source })?;
            if !namespace.is_empty() {
                namespace.clone_into(&mut config.default_namespace);
            }
            let namespace = config.default_namespace.clone();
            let client = Client::try_from(config)
                .map_err(|source| Error::NoCluster { source: source.into() })?;
            Ok(Self { client, namespace })
        })
    }

    /// Whether there is a cluster: a kubeconfig, or one around this process.
    #[must_use]
    pub fn is_configured() -> bool {
        let has = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        let home = std::env::var_os("HOME").map(std::path::PathBuf::from);
        has("KUBECONFIG")
            || has("KUBERNETES_SERVICE_HOST")
            || home.is_some_and(|home| home.join(".kube/config").is_file())
    }

    /// The namespace of the jobs.
    #[must_use]
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// The job of this name.
    pub fn find<'a>(&'a self, job: &'a str) -> BoxFuture<'a, Result<Option<Found>, Error>> {
        Box::pin(async move {
            let name = names::config_map(job);
            let found = self.config_maps().get_opt(&name).await;
            let found = found.map_err(|error| self.refused("read", "configmap", &name, error))?;
            match found.filter(|map| map.metadata.deletion_timestamp.is_none()) {
                Some(config_map) => self.with_pods(config_map).await.map(Some),
                None => Ok(None),
            }
        })
    }

    /// Every job of the namespace, the newest first.
    pub fn list<'a>(&'a self) -> BoxFuture<'a, Result<Vec<Found>, Error>> {
        Box::pin(async move {
            let all = ListParams::default().labels(names::OF_ALL_JOBS);
            let maps = self.config_maps().list(&all).await;
            let maps = maps.map_err(|error| self.refused("list", "configmaps", "", error))?.items;
            let pods = self.pods().list(&all).await;
            let pods = pods.map_err(|error| self.refused("list", "pods", "", error))?.items;
            let controllers = self.controllers().list(&all).await;
            let controllers =
                controllers.map_err(|error| self.refused("list", "jobs", "", error))?.items;
            let mut found: Vec<Found> = Vec::new();
            for config_map in maps {
                let Ok(spec) = spec_of(&config_map) else { continue };
                let of_job =
                    |metadata: &ObjectMeta| names::job_of(metadata) == Some(&spec.job_name);
                let pods = pods.iter().filter(|pod| of_job(&pod.metadata)).cloned().collect();
                let controller = controllers.iter().find(|job| of_job(&job.metadata)).cloned();
                found.push(Found { spec, config_map, controller, pods });
            }
            found.sort_by_key(|job| std::cmp::Reverse(created(&job.config_map)));
            Ok(found)
        })
    }

    async fn with_pods(&self, config_map: ConfigMap) -> Result<Found, Error> {
        let spec = spec_of(&config_map)?;
        let of_job = ListParams::default().labels(&names::selector(&spec.job_name));
        let pods = self.pods().list(&of_job).await;
        let pods = pods.map_err(|error| self.refused("list", "pods", "", error))?.items;
        let name = names::master(&spec.job_name);
        let controller = self.controllers().get_opt(&name).await;
        let controller = controller.map_err(|error| self.refused("read", "job", &name, error))?;
        Ok(Found { spec, config_map, controller, pods })
    }

    /// The job's key, if the user may read Secrets.
    pub fn key<'a>(&'a self, job: &'a str) -> BoxFuture<'a, Result<String, Error>> {
        Box::pin(async move {
            let name = names::secret(job);
            let secret = self.secrets().get(&name).await;
            let secret = secret.map_err(|error| self.refused("read", "secret", &name, error))?;
            manifest::key(&secret).ok_or(Error::NoKey { secret: name })
        })
    }

    /// Deletes the job and everything it owns.
    pub fn delete<'a>(&'a self, job: &'a str) -> BoxFuture<'a, Result<(), Error>> {
        Box::pin(async move {
            let name = names::config_map(job);
            match self.config_maps().delete(&name, &DeleteParams::background()).await {
                Ok(_) => self.stop(job).await,
                Err(error) => Err(self.refused("delete", "configmap", &name, error)),
            }
        })
    }

    /// Deletes all pods of the job, which can be resumed; first the Job that would start its master
    /// again.
    pub fn stop<'a>(&'a self, job: &'a str) -> BoxFuture<'a, Result<(), Error>> {
        Box::pin(async move {
            let name = names::master(job);
            match self.controllers().delete(&name, &DeleteParams::background()).await {
                Ok(_) => {}
                Err(kube::Error::Api(status)) if status.is_not_found() => {}
                Err(error) => return Err(self.refused("delete", "job", &name, error)),
            }
            let of_job = ListParams::default().labels(&names::selector(job));
            let deleted = self.pods().delete_collection(&DeleteParams::default(), &of_job).await;
            deleted.map(drop).map_err(|error| self.refused("delete", "pods", "", error))
        })
    }

    fn config_maps(&self) -> Api<ConfigMap> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    fn controllers(&self) -> Api<Job> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    fn secrets(&self) -> Api<Secret> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    fn refused(&self, verb: &'static str, kind: &str, name: &str, source: kube::Error) -> Error {
        error::refused(&self.namespace, verb, kind, name, source)
    }
}

impl Found {
    /// The master's pod, if there is one; not one that is being deleted, unless it is the only one.
    #[must_use]
    pub fn master(&self) -> Option<&Pod> {
        newest_master(&self.pods)
    }

    /// Whether another master is being deleted, for which the new one waits.
    #[must_use]
    pub fn is_master_leaving(&self) -> bool {
        let is_leaving = |pod: &Pod| matches!(facts::of(pod).state(), pod::PodState::Leaving(_));
        let master = self.master().and_then(|pod| pod.metadata.name.as_ref());
        let mut others = self.pods.iter().filter(|pod| is_master(pod));
        others.any(|pod| pod.metadata.name.as_ref() != master && is_leaving(pod))
    }

    /// Whether Kubernetes will start a master if none runs: the job is not over and was not
    /// stopped.
    #[must_use]
    pub fn is_restarting(&self) -> bool {
        let has_ended = self.master().map(|pod| facts::of(pod).state());
        let is_over =
            matches!(has_ended, Some(pod::PodState::Ended(how)) if how.job_end().is_some());
        let waits = |job: &Job| {
            let conditions = job.status.as_ref().and_then(|status| status.conditions.as_deref());
            let is_finished = |kind: &str| {
                let mut conditions = conditions.unwrap_or_default().iter();
                conditions.any(|condition| condition.type_ == kind && condition.status == "True")
            };
            let is_leaving = job.metadata.deletion_timestamp.is_some();
            !is_leaving && !["Complete", "Failed"].into_iter().any(is_finished)
        };
        !is_over && self.controller.as_ref().is_some_and(waits)
    }

    /// When the job was submitted, in seconds since 1970.
    #[must_use]
    pub fn created(&self) -> Option<i64> {
        created(&self.config_map)
    }

    /// When the job ended, in seconds since 1970, if the cluster says so.
    #[must_use]
    pub fn ended(&self) -> Option<i64> {
        let conditions = self.controller.as_ref()?.status.as_ref()?.conditions.iter().flatten();
        let times = conditions.filter_map(|condition| condition.last_transition_time.as_ref());
        times.map(|time| time.0.as_second()).max()
    }
}

/// The pod of the master that counts: the last one that was not deleted.
fn newest_master(pods: &[Pod]) -> Option<&Pod> {
    pods.iter().filter(|pod| is_master(pod)).max_by_key(|pod| {
        let is_leaving = pod.metadata.deletion_timestamp.is_some();
        (!is_leaving, pod.metadata.creation_timestamp.as_ref().map(|time| time.0))
    })
}

fn is_master(pod: &Pod) -> bool {
    names::instance_of(&pod.metadata).is_some_and(|instance| instance.role == Role::Master)
}

fn created(config_map: &ConfigMap) -> Option<i64> {
    Some(config_map.metadata.creation_timestamp.as_ref()?.0.as_second())
}

/// The description in a job's ConfigMap.
fn spec_of(config_map: &ConfigMap) -> Result<JobSpec, Error> {
    let name = config_map.metadata.name.clone().unwrap_or_default();
    let text = manifest::description(config_map);
    yaml::read::<JobSpec>(text).map_err(|source| Error::NoJob { name, source: source.into() })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn master(name: &str, created: u32, deleted: bool, status: Value) -> Pod {
        let mut pod: Pod = serde_json::from_value(json!({ "status": status })).unwrap();
        pod.metadata = ObjectMeta {
            name: Some(name.into()),
            labels: Some(names::pod_labels("x", edl_core::platform::InstanceId::MASTER)),
            ..serde_json::from_value(json!({
                "creationTimestamp": format!("2026-01-01T00:00:{created:02}Z"),
                "deletionTimestamp": deleted.then_some("2026-01-01T00:01:00Z"),
            }))
            .unwrap()
        };
        pod
    }

    fn ended(code: i32) -> Value {
        json!({ "phase": if code == 0 { "Succeeded" } else { "Failed" }, "containerStatuses": [{
            "name": "elasticdl", "image": "", "imageID": "", "ready": false, "restartCount": 0,
            "state": { "terminated": { "exitCode": code } } }] })
    }

    fn found(pods: Vec<Pod>, controller: Option<Value>) -> Found {
        let controller = controller.map(|status| {
            serde_json::from_value(json!({ "metadata": {}, "status": status })).unwrap()
        });
        Found { spec: JobSpec::default(), config_map: ConfigMap::default(), controller, pods }
    }

    #[test]
    fn of_several_masters_the_last_one_counts_that_was_not_deleted() {
        let pods = [
            master("crashed", 1, false, ended(137)),
            master("runs", 2, false, json!({ "phase": "Running" })),
            master("lost", 3, true, json!({ "phase": "Running" })),
        ];
        let name = |pods: &[Pod]| newest_master(pods).and_then(|pod| pod.metadata.name.clone());
        assert_eq!(name(&pods).as_deref(), Some("runs"));
        assert_eq!(name(&pods[2..]).as_deref(), Some("lost"), "there is no other");
        assert_eq!(name(&[]), None);
        let is_master_leaving = |pods: &[Pod]| found(pods.to_vec(), None).is_master_leaving();
        assert!(is_master_leaving(&pods));
        assert!(!is_master_leaving(&pods[..2]) && !is_master_leaving(&pods[2..]));
    }

    #[test]
    fn a_master_is_restarted_until_its_job_is_over_or_stopped() {
        let over = json!({ "conditions": [{ "type": "Failed", "status": "True" }] });
        let crashed = || vec![master("m", 1, false, ended(137))];
        for (pods, controller, expected) in [
            (Vec::new(), Some(json!({})), true),
            (crashed(), Some(json!({})), true),
            (vec![master("m", 1, false, ended(3))], Some(json!({})), false),
            (vec![master("m", 1, false, ended(0))], Some(json!({})), false),
            (crashed(), Some(over), false),
            (crashed(), None, false),
        ] {
            let found = found(pods, controller);
            assert_eq!(found.is_restarting(), expected, "{found:?}");
        }
    }
}
