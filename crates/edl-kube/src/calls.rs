// SPDX-License-Identifier: Apache-2.0
//! Calls to the API server, each with a deadline and a typed answer.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use edl_core::platform::InstanceId;
use edl_core::pod::Wait;
use edl_core::spec::JobSpec;
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::{DeleteParams, PostParams, Preconditions};
use kube::{Api, Client, Resource};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::OnceCell;
use tokio::time::timeout;

use crate::manifest::{self, PodExtras};
use crate::names;

/// The deadline of a call.
pub const CALL_LIMIT: Duration = Duration::from_secs(8);

/// An object of a namespace.
pub trait Object:
    Resource<Scope = NamespaceResourceScope, DynamicType = ()>
    + Clone
    + Debug
    + Serialize
    + DeserializeOwned
{
}

impl<K> Object for K where
    K: Resource<Scope = NamespaceResourceScope, DynamicType = ()>
        + Clone
        + Debug
        + Serialize
        + DeserializeOwned
{
}

/// The pods of one job.
#[derive(Clone)]
pub(crate) struct Pods {
    api: Api<Pod>,
    maps: Api<ConfigMap>,
    spec: JobSpec,
    /// The job's ConfigMap, with which they are deleted, once it was read. A job that was started
    /// outside of the cluster has none.
    owner: Arc<OnceCell<Option<OwnerReference>>>,
}

/// The result of a call.
pub(crate) enum Answer {
    Created(InstanceId, Box<Pod>),
    /// A pod of this name exists.
    NameTaken(InstanceId),
    Refused(InstanceId, Wait),
    Deleted,
    NotDeleted {
        instance: InstanceId,
        uid: String,
        grace: Duration,
        why: Wait,
    },
}

impl Pods {
    pub(crate) fn new(client: Client, namespace: &str, spec: JobSpec) -> Self {
        let api = Api::namespaced(client.clone(), namespace);
        let maps = Api::namespaced(client, namespace);
        Self { api, maps, spec, owner: Arc::default() }
    }

    /// The pods themselves.
    pub(crate) fn api(&self) -> &Api<Pod> {
        &self.api
    }

    pub(crate) async fn create(self, instance: InstanceId, extras: PodExtras) -> Answer {
        let owner = match self.owner.get_or_try_init(|| self.read_owner()).await {
            Ok(owner) => owner.clone(),
            Err(why) => return Answer::Refused(instance, why),
        };
        let pod = match manifest::pod(&self.spec, instance, &PodExtras { owner, ..extras }) {
            Ok(pod) => pod,
            Err(error) => return Answer::Refused(instance, Wait::Refused(error.to_string())),
        };
        match timeout(CALL_LIMIT, self.api.create(&PostParams::default(), &pod)).await {
            Ok(Ok(pod)) => Answer::Created(instance, Box::new(pod)),
            Ok(Err(kube::Error::Api(status))) if status.reason == "AlreadyExists" => {
                Answer::NameTaken(instance)
            }
            Ok(Err(error)) => Answer::Refused(instance, wait_of(&error)),
            Err(_) => Answer::Refused(instance, late()),
        }
    }

    async fn read_owner(&self) -> Result<Option<OwnerReference>, Wait> {
        let name = names::config_map(&self.spec.job_name);
        match timeout(CALL_LIMIT, self.maps.get_opt(&name)).await {
            Ok(Ok(map)) => Ok(map.as_ref().and_then(manifest::owner)),
            Ok(Err(error)) => Err(wait_of(&error)),
            Err(_) => Err(late()),
        }
    }

    /// Deletes the pod of a worker or server, and never a later one of the same name.
    pub(crate) async fn delete(self, instance: InstanceId, uid: String, grace: Duration) -> Answer {
        let name = names::pod(&self.spec.job_name, instance);
        self.delete_named(name, instance, uid, grace).await
    }

    /// The same for a pod of this name.
    pub(crate) async fn delete_named(
        self,
        name: String,
        instance: InstanceId,
        uid: String,
        grace: Duration,
    ) -> Answer {
        let secs = u32::try_from(grace.as_millis().div_ceil(1000)).unwrap_or(u32::MAX);
        let params = DeleteParams {
            grace_period_seconds: Some(secs),
            preconditions: Some(Preconditions { uid: Some(uid.clone()), resource_version: None }),
            ..DeleteParams::default()
        };
        let why = match timeout(CALL_LIMIT, self.api.delete(&name, &params)).await {
            Ok(Ok(_)) => return Answer::Deleted,
            // It is gone, or another pod has its name.
            Ok(Err(kube::Error::Api(status))) if [404, 409].contains(&status.code) => {
                return Answer::Deleted;
            }
            Ok(Err(error)) => wait_of(&error),
            Err(_) => late(),
        };
        Answer::NotDeleted { instance, uid, grace, why }
    }
}

/// The meaning of an error for the requested pod.
pub(crate) fn wait_of(error: &kube::Error) -> Wait {
    if let kube::Error::Api(status) = error {
        return Wait::of_refusal(status.code, &status.message);
    }
    Wait::Unreachable(edl_core::error::chain(error))
}

pub(crate) fn late() -> Wait {
    Wait::Unreachable(format!("no response within {} s", CALL_LIMIT.as_secs()))
}
