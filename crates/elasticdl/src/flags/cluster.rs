// SPDX-License-Identifier: Apache-2.0
//! The flags of a job on Kubernetes, and their effect on a job that runs on this machine.

use clap::Args;
use clap::builder::PossibleValuesParser;
use serde::Serialize;
use serde_json::Value;

use crate::exit::refuse;

/// Flags that are refused without a cluster: ignoring them would change what the job does.
const MEANINGLESS_HERE: [&str; 6] =
    ["worker_image", "ps_image", "volume", "envs", "populate_env_names", "cluster_spec_json"];

#[derive(Args, Clone, Debug, Default, Serialize)]
#[command(rename_all = "snake_case")]
pub(crate) struct ClusterFlags {
    /// Container image; runs the job on the Kubernetes cluster of your kubeconfig
    #[arg(long, help_heading = "Kubernetes", value_name = "IMAGE")]
    pub(crate) image_name: Option<String>,
    /// Image of workers and parameter servers [default: image_name]
    #[arg(long, help_heading = "Kubernetes", value_name = "IMAGE")]
    worker_image: Option<String>,
    /// Image of parameter servers [default: worker_image]
    #[arg(long, help_heading = "Kubernetes", value_name = "IMAGE")]
    ps_image: Option<String>,
    /// Image pull policy: Always, IfNotPresent or Never [default: Always]
    #[arg(long, help_heading = "Kubernetes", value_name = "POLICY",
        value_parser = PossibleValuesParser::new(["Always", "IfNotPresent", "Never"]), hide_possible_values = true)]
    image_pull_policy: Option<String>,
    /// Image pull Secrets, separated by commas
    #[arg(long, help_heading = "Kubernetes", value_name = "NAMES")]
    image_pull_secrets: Option<String>,
    /// Namespace of the job [default: the kubeconfig's]
    #[arg(long, help_heading = "Kubernetes", value_name = "NAME")]
    pub(crate) namespace: Option<String>,
    /// Service account for the pods [default: default]
    #[arg(long, help_heading = "Kubernetes", value_name = "NAME")]
    service_account: Option<String>,
    /// Resource request of the master [default: cpu=0.1,memory=1024Mi]
    #[arg(long, help_heading = "Kubernetes", value_name = "K=V,…")]
    master_resource_request: Option<String>,
    /// Resource limit of the master [default: its request]
    #[arg(long, help_heading = "Kubernetes", value_name = "K=V,…")]
    master_resource_limit: Option<String>,
    /// Resource request of each parameter server: cpu, memory, disk, gpu [default:
    /// cpu=1,memory=4096Mi]
    #[arg(long, help_heading = "Kubernetes", value_name = "K=V,…")]
    ps_resource_request: Option<String>,
    /// Resource limit of each parameter server [default: its request]
    #[arg(long, help_heading = "Kubernetes", value_name = "K=V,…")]
    ps_resource_limit: Option<String>,
    /// Resource request of each worker: cpu, memory, disk, gpu [default: cpu=1,memory=4096Mi]
    #[arg(long, help_heading = "Kubernetes", value_name = "K=V,…")]
    worker_resource_request: Option<String>,
    /// Resource limit of each worker [default: its request]
    #[arg(long, help_heading = "Kubernetes", value_name = "K=V,…")]
    worker_resource_limit: Option<String>,
    /// PriorityClass of the master
    #[arg(long, help_heading = "Kubernetes", value_name = "CLASS")]
    master_pod_priority: Option<String>,
    /// PriorityClass of parameter servers [default: the master's]
    #[arg(long, help_heading = "Kubernetes", value_name = "CLASS")]
    ps_pod_priority: Option<String>,
    /// PriorityClass of workers, or the share of workers that get high_priority_class, e.g. 0.5
    #[arg(long, help_heading = "Kubernetes", value_name = "CLASS|SHARE")]
    worker_pod_priority: Option<String>,
    /// PriorityClass of the share of workers in worker_pod_priority [default: high-priority]
    #[arg(long, help_heading = "Kubernetes", value_name = "CLASS")]
    high_priority_class: Option<String>,
    /// PriorityClass of the other workers [default: low-priority]
    #[arg(long, help_heading = "Kubernetes", value_name = "CLASS")]
    low_priority_class: Option<String>,
    /// Volumes: claim_name=CLAIM,mount_path=PATH or host_path=PATH,mount_path=PATH, separated by
    /// `;`
    #[arg(long, help_heading = "Kubernetes", value_name = "VOLUMES")]
    volume: Option<String>,
    /// Restart policy of the master's container: Never, OnFailure or Always [default: Never]
    #[arg(long, help_heading = "Kubernetes", value_name = "POLICY",
        value_parser = PossibleValuesParser::new(["Always", "OnFailure", "Never"]), hide_possible_values = true)]
    restart_policy: Option<String>,
    /// Environment variables for every pod, e.g. A=1,B=2
    #[arg(long, help_heading = "Kubernetes", value_name = "K=V,…")]
    envs: Option<String>,
    /// Regular expression for the names of environment variables to copy from the master to workers
    /// and parameter servers
    #[arg(long, help_heading = "Kubernetes", value_name = "PATTERN")]
    populate_env_names: Option<String>,
    /// The contents of a --cluster_spec file, as JSON
    #[arg(long, help_heading = "Kubernetes", value_name = "JSON")]
    cluster_spec_json: Option<String>,
}

impl ClusterFlags {
    /// What these flags mean for a job on this machine: a note each, or a refusal.
    pub(crate) fn on_this_machine(&self) -> anyhow::Result<Vec<String>> {
        let value = serde_json::to_value(self).expect("flags are plain words");
        let given = value.as_object().into_iter().flatten();
        let given = given.filter(|(_, value)| !matches!(value, Value::Null));
        let mut notes = Vec::new();
        for (name, _) in given {
            if MEANINGLESS_HERE.contains(&name.as_str()) {
                return Err(needs_cluster(name));
            }
            notes.push(format!("--{name} is ignored: without --image_name the job runs locally"));
        }
        Ok(notes)
    }
}

/// The refusal of a flag that only a cluster can follow.
pub(crate) fn needs_cluster(name: &str) -> anyhow::Error {
    refuse(format!(
        "--{name} needs a Kubernetes cluster: set --image_name to run the job there, or drop \
         --{name} to train on this machine"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn on_one_machine_harmless_flags_leave_a_note_and_others_are_refused_by_name() {
        let harmless = ClusterFlags {
            namespace: Some("x".into()),
            worker_resource_request: Some("cpu=1".into()),
            ..ClusterFlags::default()
        };
        let notes = harmless.on_this_machine().unwrap();
        assert_eq!(notes.len(), 2);
        assert!(notes[0].starts_with("--namespace is ignored"), "{}", notes[0]);
        let volume = ClusterFlags { volume: Some("x".into()), ..ClusterFlags::default() };
        let error = volume.on_this_machine().unwrap_err().to_string();
        assert!(error.starts_with("--volume needs a Kubernetes cluster"), "{error}");
    }
}
