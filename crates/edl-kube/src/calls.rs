// SPDX-License-Identifier: Apache-2.0
//! Calls to the API server, each with a deadline and a typed answer.

use std::fmt::Debug;
use std::time::Duration;

use edl_core::platform::InstanceId;
use edl_core::pod::Wait;
use edl_core::spec::JobSpec;
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{DeleteParams, PostParams, Preconditions};
use kube::{Api, Resource};
use serde::Serialize;
use serde::de::DeserializeOwned;
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
    spec: JobSpec,
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
    pub(crate) fn new(api: Api<Pod>, spec: JobSpec) -> Self {
        Self { api, spec }
    }

    pub(crate) async fn create(self, instance: InstanceId, extras: PodExtras) -> Answer {
        let pod = match manifest::pod(&self.spec, instance, &extras) {
            Ok(pod) => pod,
            Err(error) => return Answer::Refused(instance, Wait::Refused(error.to_string())),
        };
        match self.post(&pod).await {
            Ok(pod) => Answer::Created(instance, Box::new(pod)),
            Err(None) => Answer::NameTaken(instance),
            Err(Some(why)) => Answer::Refused(instance, why),
        }
    }

    /// Creates a pod. An error without a reason means that its name is taken.
    pub(crate) async fn post(&self, pod: &Pod) -> Result<Pod, Option<Wait>> {
        let params = PostParams::default();
        match timeout(CALL_LIMIT, self.api.create(&params, pod)).await {
            Ok(Ok(pod)) => Ok(pod),
            Ok(Err(kube::Error::Api(status))) if status.reason == "AlreadyExists" => Err(None),
            Ok(Err(error)) => Err(Some(wait_of(&error))),
            Err(_) => Err(Some(late())),
        }
    }

    /// Deletes this pod, and never a later one of the same name.
    pub(crate) async fn delete(self, instance: InstanceId, uid: String, grace: Duration) -> Answer {
        let secs = u32::try_from(grace.as_millis().div_ceil(1000)).unwrap_or(u32::MAX);
        let params = DeleteParams {
            grace_period_seconds: Some(secs),
            preconditions: Some(Preconditions { uid: Some(uid.clone()), resource_version: None }),
            ..DeleteParams::default()
        };
        let name = names::pod(&self.spec.job_name, instance);
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

    pub(crate) async fn get(&self, instance: InstanceId) -> Result<Option<Pod>, Wait> {
        let name = names::pod(&self.spec.job_name, instance);
        match timeout(CALL_LIMIT, self.api.get_opt(&name)).await {
            Ok(Ok(found)) => Ok(found),
            Ok(Err(error)) => Err(wait_of(&error)),
            Err(_) => Err(late()),
        }
    }
}

/// The meaning of an error for the requested pod.
pub(crate) fn wait_of(error: &kube::Error) -> Wait {
    if let kube::Error::Api(status) = error {
        return Wait::of_refusal(status.code, &status.message);
    }
    Wait::Unreachable(edl_core::error::chain(error))
}

fn late() -> Wait {
    Wait::Unreachable(format!("no response within {} s", CALL_LIMIT.as_secs()))
}
