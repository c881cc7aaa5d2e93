// SPDX-License-Identifier: Apache-2.0
//! The objects of a job, as pure functions of its description. Nothing here speaks to a cluster.

use edl_core::platform::InstanceId;
use edl_core::spec::{Invalid, JobSpec};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;

/// What a pod needs to be told that the job's description does not say.
#[derive(Clone, Debug)]
pub struct PodExtras {
    /// The job's ConfigMap: when it is deleted, so is the pod. None only for what is printed.
    pub owner: Option<OwnerReference>,
    /// Raised after a process ran out of memory: request and limit are multiplied by it.
    pub memory_factor: f64,
    /// Further variables, such as those that `--populate_env_names` took from the master's own.
    pub env: Vec<(String, String)>,
}

impl Default for PodExtras {
    fn default() -> Self {
        Self { owner: None, memory_factor: 1.0, env: Vec::new() }
    }
}

/// The pod of one process of the job.
pub fn pod(spec: &JobSpec, instance: InstanceId, extras: &PodExtras) -> Result<Pod, Invalid> {
    let _ = (spec, instance, extras);
    Ok(Pod::default())
}
