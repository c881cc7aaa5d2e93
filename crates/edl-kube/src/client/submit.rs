// SPDX-License-Identifier: Apache-2.0
//! Creating a job's objects: all of them, or none.

use edl_core::cluster::Source;
use edl_core::platform::{InstanceId, Role};
use edl_core::spec::{Invalid, JobSpec};
use futures::future::BoxFuture;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{ConfigMap, PersistentVolumeClaim};
use k8s_openapi::api::scheduling::v1::PriorityClass;
use kube::api::{DeleteParams, PostParams};
use kube::{Api, ResourceExt as _};

use super::{Cluster, Error, Found};
use crate::calls::Object;
use crate::manifest::{self, JobObjects, PodExtras};
use crate::names;

impl Cluster {
    /// Creates all objects. If one is rejected, those already created are deleted.
    pub fn submit<'a>(
        &'a self,
        spec: &'a JobSpec,
        mut objects: JobObjects,
    ) -> BoxFuture<'a, Result<(), Error>> {
        Box::pin(async move {
            let job = &spec.job_name;
            let name = names::config_map(job);
            let made = match self
                .config_maps()
                .create(&PostParams::default(), &objects.config_map)
                .await
            {
                Ok(made) => made,
                Err(kube::Error::Api(status)) if status.is_already_exists() => {
                    let namespace = self.namespace.clone();
                    return Err(Error::Taken { job: job.clone(), namespace });
                }
                Err(error) => return Err(self.refused("create", "configmap", &name, error)),
            };
            if let Some(owner) = manifest::owner(&made) {
                objects.own(&owner);
            }
            match self.create_owned(spec, &objects).await {
                Ok(()) => Ok(()),
                Err(error) => {
                    // The cluster deletes what the ConfigMap owns.
                    let _first_error_counts = self.delete(job).await;
                    Err(error)
                }
            }
        })
    }

    async fn create_owned(&self, spec: &JobSpec, objects: &JobObjects) -> Result<(), Error> {
        self.check(spec).await?;
        let JobObjects { secret, service, network_policy, budgets, master, .. } = objects;
        self.create("secret", secret).await?;
        self.create("service", service).await?;
        self.create("networkpolicy", network_policy).await?;
        for budget in budgets {
            self.create("poddisruptionbudget", budget).await?;
        }
        self.start(spec, master).await
    }

    /// Creates the Job of the master. What keeps its pod from being created would not be an error of
    /// the Job, so the API server is asked for the pod first.
    async fn start(&self, spec: &JobSpec, master: &Job) -> Result<(), Error> {
        let pod = manifest::pod(spec, InstanceId::MASTER, &PodExtras::default());
        let pod = pod.map_err(|invalid| invalid_job("make", spec, invalid))?;
        let only_checked = PostParams { dry_run: true, ..PostParams::default() };
        let checked = self.pods().create(&only_checked, &pod).await;
        checked.map_err(|error| self.refused("create", "pod", &pod.name_any(), error))?;
        self.create("job", master).await
    }

    async fn create<K: Object>(&self, kind: &'static str, object: &K) -> Result<(), Error> {
        let api: Api<K> = Api::namespaced(self.client.clone(), &self.namespace);
        let created = api.create(&PostParams::default(), object).await;
        created.map(drop).map_err(|error| self.refused("create", kind, &object.name_any(), error))
    }

    /// Checks that the job's volume claims and priority classes exist. A user without permission to
    /// read them learns it later from the pods.
    async fn check(&self, spec: &JobSpec) -> Result<(), Error> {
        let claims: Api<PersistentVolumeClaim> =
            Api::namespaced(self.client.clone(), &self.namespace);
        for volume in &spec.volume.0 {
            let Source::Claim(claim) = &volume.source else { continue };
            if let Ok(None) = claims.get_opt(claim).await {
                let (claim, namespace) = (claim.clone(), self.namespace.clone());
                return Err(Error::NoClaim { claim, namespace });
            }
        }
        let classes: Api<PriorityClass> = Api::all(self.client.clone());
        let instance = |role| InstanceId { role, id: 0 };
        let asked = [
            (instance(Role::Master), None),
            (instance(Role::Ps), None),
            (instance(Role::Worker), Some(true)),
            (instance(Role::Worker), Some(false)),
        ];
        for (instance, is_high) in asked {
            let Some(class) = spec.priority_class(instance, is_high) else { continue };
            if let Ok(None) = classes.get_opt(class).await {
                return Err(Error::NoClass { class: class.to_owned() });
            }
        }
        Ok(())
    }

    /// Restarts the master of a job whose pods are gone or have ended, with `spec`.
    pub fn resume<'a>(
        &'a self,
        found: &'a Found,
        spec: &'a JobSpec,
    ) -> BoxFuture<'a, Result<(), Error>> {
        Box::pin(async move {
            self.check(spec).await?;
            let job = &spec.job_name;
            self.stop(job).await?;
            self.wait_until_gone(job).await?;
            let changed = manifest::config_map(spec)
                .map_err(|invalid| invalid_job("write", spec, invalid))?;
            let name = names::config_map(job);
            let updated = ConfigMap { data: changed.data, ..found.config_map.clone() };
            let replaced =
                self.config_maps().replace(&name, &PostParams::default(), &updated).await;
            replaced.map_err(|error| self.refused("change", "configmap", &name, error))?;
            let made = manifest::master(spec);
            let mut master = made.map_err(|invalid| invalid_job("make", spec, invalid))?;
            master.metadata.owner_references =
                manifest::owner(&found.config_map).map(|owner| vec![owner]);
            self.start(spec, &master).await
        })
    }

    /// Waits until no pod of the job is left, nor the Job of its master, and finally deletes the rest
    /// by force.
    async fn wait_until_gone(&self, job: &str) -> Result<(), Error> {
        /// Half a minute of grace, and some time for the kubelet.
        const TRIES: u32 = 450;
        for _ in 0..TRIES {
            match self.find(job).await? {
                Some(found) if !found.pods.is_empty() || found.controller.is_some() => {}
                Some(_) | None => return Ok(()),
            }
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        }
        let now = DeleteParams::default().grace_period(0);
        let of_job = kube::api::ListParams::default().labels(&names::selector(job));
        let ended = self.pods().delete_collection(&now, &of_job).await;
        ended.map(drop).map_err(|error| self.refused("delete", "pods", "", error))
    }
}

fn invalid_job(verb: &'static str, spec: &JobSpec, Invalid(message): Invalid) -> Error {
    Error::Refused { verb, object: format!("job `{}`", spec.job_name), message }
}
