// SPDX-License-Identifier: Apache-2.0
//! The pod of one process: not root, no capabilities, a read-only root file system.

use std::collections::BTreeMap;

use edl_core::cluster::{Source, Volume, times};
use edl_core::platform::{InstanceId, Role, WORKER_VARIABLES};
use edl_core::spec::{Invalid, JobSpec};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use serde_json::{Value, json};

use super::patch::read_patches;
use crate::names;

/// The user of the processes, unless `--cluster_spec` changes it.
const USER: u32 = 1000;
/// How long a pod stays on an unreachable node. Kubernetes' default is five minutes, but the pods of
/// a job can be replaced.
const SILENT_NODE_SECS: u32 = 10;
/// Long enough to finish a step.
const GRACE_SECS: u32 = 30;

/// Properties of a pod that are not in the job's description.
#[derive(Clone, Debug)]
pub struct PodExtras {
    /// The job's ConfigMap, with which the pod is deleted; not for the master, which a Job owns.
    pub owner: Option<OwnerReference>,
    /// Multiplies the memory request and limit after a process ran out of memory.
    pub memory_factor: f64,
    /// Whether a worker gets the high priority class; if unset, its number decides.
    pub is_high: Option<bool>,
    /// More variables, such as the master's that match `--populate_env_names`.
    pub env: Vec<(String, String)>,
}

impl Default for PodExtras {
    fn default() -> Self {
        Self { owner: None, memory_factor: 1.0, is_high: None, env: Vec::new() }
    }
}

/// The pod of one process of the job.
pub fn pod(spec: &JobSpec, instance: InstanceId, extras: &PodExtras) -> Result<Pod, Invalid> {
    let mut metadata = super::metadata(names::pod(&spec.job_name, instance), spec);
    metadata.labels = Some(names::pod_labels(&spec.job_name, instance));
    metadata.owner_references = extras.owner.clone().map(|owner| vec![owner]);
    let volumes = &spec.volume.0;
    let tolerations = ["not-ready", "unreachable"].map(leaves_silent_node);
    let mut pod_spec = json!({
        // A Job replaces the master, which replaces the others.
        "restartPolicy": "Never",
        "serviceAccountName": account(spec, instance.role),
        // A worker runs the user's code, and neither it nor a server asks the API server anything.
        "automountServiceAccountToken": instance.role == Role::Master,
        "terminationGracePeriodSeconds": GRACE_SECS,
        "tolerations": tolerations,
        "securityContext": {
            "runAsNonRoot": true,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "seccompProfile": { "type": "RuntimeDefault" },
        },
        "containers": [container(spec, instance, extras)?],
        "volumes": volume_list(spec, volumes),
    });
    if let Some(class) = spec.priority_class(instance, extras.is_high) {
        pod_spec["priorityClassName"] = class.into();
    }
    let secrets: Vec<Value> =
        spec.image_pull_secrets.0.iter().map(|name| json!({ "name": name })).collect();
    if !secrets.is_empty() {
        pod_spec["imagePullSecrets"] = secrets.into();
    }
    let pod = json!({ "metadata": metadata, "spec": pod_spec });
    read_patches(&spec.cluster_spec_json)?.apply_to_pod(pod, instance.role)
}

/// The service account of a pod: the user's, for example to read data, or that of its role.
fn account(spec: &JobSpec, role: Role) -> String {
    match spec.service_account.as_str() {
        "" => names::account(role),
        given => given.to_owned(),
    }
}

fn leaves_silent_node(taint: &str) -> Value {
    json!({
        "key": format!("node.kubernetes.io/{taint}"),
        "operator": "Exists",
        "effect": "NoExecute",
        "tolerationSeconds": SILENT_NODE_SECS,
    })
}

fn container(spec: &JobSpec, instance: InstanceId, extras: &PodExtras) -> Result<Value, Invalid> {
    let (request, limit) = spec.resources(instance.role);
    let (mut request, mut limit) = (request.0.clone(), limit.0.clone());
    if extras.memory_factor > 1.0 {
        for memory in [&mut request, &mut limit].into_iter().filter_map(|it| it.get_mut("memory")) {
            *memory = times(memory, extras.memory_factor);
        }
    }
    let mut container = json!({
        "name": names::CONTAINER,
        "image": spec.image(instance.role),
        "imagePullPolicy": spec.image_pull_policy.name(),
        "command": ["elasticdl", "pod", instance.role.to_string()],
        "env": variables(spec, instance, extras)?,
        "resources": { "requests": request, "limits": limit },
        "securityContext": {
            "allowPrivilegeEscalation": false,
            "readOnlyRootFilesystem": true,
            "capabilities": { "drop": ["ALL"] },
        },
        "volumeMounts": mounts(&spec.volume.0),
    });
    if instance.role == Role::Master {
        container["ports"] = json!([
            { "name": "control", "containerPort": names::MASTER_PORT },
            { "name": "http", "containerPort": names::HTTP_PORT },
        ]);
    }
    Ok(container)
}

/// Ours take precedence over the user's.
fn variables(
    spec: &JobSpec,
    instance: InstanceId,
    extras: &PodExtras,
) -> Result<Vec<Value>, Invalid> {
    let field = |name: &str, path: &str| json!({ "name": name, "valueFrom": { "fieldRef": { "fieldPath": path } } });
    let plain = |name: &str, value: &str| json!({ "name": name, "value": value });
    let id = instance.id.to_string();
    let number = match instance.role {
        Role::Master => None,
        Role::Ps => Some(("ELASTICDL_PS_ID", id)),
        Role::Worker => Some(("ELASTICDL_WORKER_ID", id)),
    };
    let ours = [
        ("HOME", "/tmp".to_owned()),
        ("ELASTICDL_JOB_DIR", spec.cluster_job_dir()?),
        ("ELASTICDL_MASTER_ADDR", names::master_address(&spec.job_name)),
    ];
    let ours: Vec<_> = ours.into_iter().chain(number).collect();
    let usual = WORKER_VARIABLES.into_iter().filter(|_| instance.role == Role::Worker);
    let usual = usual.map(|(name, value)| (name.to_owned(), value.to_owned()));
    let mut given: BTreeMap<String, String> =
        usual.chain(extras.env.iter().cloned()).chain(spec.envs.0.clone()).collect();
    given.retain(|name, _| !ours.iter().any(|(our, _)| our == name));
    let mut env: Vec<Value> = given.iter().map(|(name, value)| plain(name, value)).collect();
    env.extend(ours.iter().map(|(name, value)| plain(name, value)));
    env.push(field("POD_NAME", "metadata.name"));
    env.push(field("POD_NAMESPACE", "metadata.namespace"));
    env.push(field("POD_UID", "metadata.uid"));
    env.push(field("POD_IP", "status.podIP"));
    if instance.role == Role::Master {
        let label = format!("metadata.labels['{}']", names::CONTROLLER_LABEL);
        env.push(field(names::CONTROLLER_VARIABLE, &label));
    }
    Ok(env)
}

/// The job's own files, temporary space, and the user's storage.
fn volume_list(spec: &JobSpec, volumes: &[Volume]) -> Vec<Value> {
    let mut list = vec![
        json!({ "name": "job", "configMap": { "name": names::config_map(&spec.job_name) } }),
        // Optional: the master of a job that was applied from a file creates its key.
        json!({ "name": "key", "secret": {
            "secretName": names::secret(&spec.job_name), "optional": true, "defaultMode": 0o440,
        } }),
        json!({ "name": "tmp", "emptyDir": {} }),
    ];
    for (at, volume) in distinct(volumes).into_iter().enumerate() {
        let name = format!("volume-{at}");
        list.push(match &volume.source {
            Source::Claim(claim) => {
                json!({ "name": name, "persistentVolumeClaim": { "claimName": claim } })
            }
            Source::HostPath { path, kind } => {
                let kind = kind.as_deref().unwrap_or_default();
                json!({ "name": name, "hostPath": { "path": path, "type": kind } })
            }
        });
    }
    list
}

fn mounts(volumes: &[Volume]) -> Vec<Value> {
    let mut mounts = vec![
        json!({ "name": "job", "mountPath": names::JOB_MOUNT, "readOnly": true }),
        json!({ "name": "key", "mountPath": names::KEY_MOUNT, "readOnly": true }),
        json!({ "name": "tmp", "mountPath": "/tmp" }),
    ];
    let distinct = distinct(volumes);
    for volume in volumes {
        let at = distinct.iter().position(|other| other.source == volume.source);
        let name = format!("volume-{}", at.unwrap_or_default());
        let mut mount = json!({ "name": name, "mountPath": volume.mount_path });
        if let Some(sub_path) = &volume.sub_path {
            mount["subPath"] = sub_path.clone().into();
        }
        mounts.push(mount);
    }
    mounts
}

/// A claim or folder that is mounted several times is one volume.
fn distinct(volumes: &[Volume]) -> Vec<&Volume> {
    let mut distinct: Vec<&Volume> = Vec::new();
    for volume in volumes {
        if !distinct.iter().any(|other| other.source == volume.source) {
            distinct.push(volume);
        }
    }
    distinct
}
