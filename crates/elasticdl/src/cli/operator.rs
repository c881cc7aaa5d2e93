// SPDX-License-Identifier: Apache-2.0
//! The flags of `operator`, `plan`, `explain` and `job`: TrainingJobs of a cluster.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use edl_core::spec::{FieldType as _, HttpHosts, LogLevel};
use edl_operator::manifests::{HTTP_PORT, NAMESPACE};

use crate::cli::JobArg;

pub(crate) const OPERATOR_EXAMPLES: &str = "\
Examples:
  elasticdl operator manifests | kubectl apply -f -      install the operator
  elasticdl operator --kubeconfig ~/.kube/config         run it locally
  kubectl apply -f examples/trainingjob/job.yaml && kubectl get tj --watch";

pub(crate) const EXPLAIN_EXAMPLES: &str = "\
Examples:
  elasticdl explain                                      the most recent job
  elasticdl explain my-job --namespace=team              a job on a cluster
  elasticdl explain my-job --json";

pub(crate) const PLAN_EXAMPLES: &str = "\
Examples:
  elasticdl plan
  elasticdl plan --explain my-job                        only this job, with all reasons";

#[derive(Args, Debug)]
#[command(rename_all = "snake_case", args_conflicts_with_subcommands = true)]
pub(crate) struct OperatorArgs {
    #[command(subcommand)]
    pub(crate) command: Option<OperatorCommand>,
    #[command(flatten)]
    pub(crate) cluster: OperatorFlags,
    /// Log level: DEBUG, INFO, WARNING or ERROR
    #[arg(long, value_name = "LEVEL", default_value = "INFO", value_parser = LogLevel::parse)]
    pub(crate) log_level: LogLevel,
    /// Port of the web page, /metrics and /healthz; 0 picks a free port
    #[arg(long, value_name = "PORT", default_value_t = HTTP_PORT)]
    pub(crate) http_port: u16,
    /// Host names of the web page behind an ingress or proxy, separated by commas; * allows any
    #[arg(long, value_name = "NAMES", default_value = "", hide_default_value = true)]
    pub(crate) http_hosts: HttpHosts,
    /// Masters run outside the cluster and are not started by the operator
    #[arg(long, hide = true)]
    pub(crate) masters_outside: bool,
}

#[derive(Debug, Subcommand)]
#[command(rename_all = "snake_case")]
pub(crate) enum OperatorCommand {
    /// Print the TrainingJob CustomResourceDefinition
    Crd,
    /// Print all manifests that install the operator
    Manifests {
        /// Namespace to install the operator in
        #[arg(long, value_name = "NAME", default_value = NAMESPACE)]
        namespace: String,
        /// Image with elasticdl on its PATH
        #[arg(long, value_name = "IMAGE", default_value = "elasticdl:native")]
        image: String,
    },
}

/// The operator's namespace, cluster and scheduling policy.
#[derive(Args, Clone, Debug)]
#[command(rename_all = "snake_case")]
pub(crate) struct OperatorFlags {
    /// Namespace of the operator, its Lease and the queues
    #[arg(long, value_name = "NAME", default_value = NAMESPACE)]
    pub(crate) namespace: String,
    #[command(flatten)]
    pub(crate) planner: PlannerFlags,
}

/// The cluster and the scheduling policy.
#[derive(Args, Clone, Debug)]
#[command(rename_all = "snake_case")]
pub(crate) struct PlannerFlags {
    /// Kubeconfig file [default: the in-cluster configuration, or kubectl's]
    #[arg(long, value_name = "FILE")]
    pub(crate) kubeconfig: Option<PathBuf>,
    /// Load limit: jobs grow until pods request this share of the cluster's resources
    #[arg(long, value_name = "SHARE", default_value_t = 0.97)]
    pub(crate) max_load_desired: f64,
    /// Scheduling policy; see docs/scheduling.md
    #[arg(long, value_name = "NAME", default_value = "elastic-fair")]
    pub(crate) policy: String,
}

#[derive(Args, Debug)]
#[command(rename_all = "snake_case")]
pub(crate) struct PlanArgs {
    #[command(flatten)]
    pub(crate) cluster: OperatorFlags,
    /// Show only this job, and why it has fewer workers than its maximum
    #[arg(long, value_name = "JOB")]
    pub(crate) explain: Option<String>,
}

/// The heading of what `explain` needs only for a TrainingJob.
const TRAINING_JOBS: &str = "Options for TrainingJobs";

#[derive(Args, Debug)]
#[command(rename_all = "snake_case")]
pub(crate) struct ExplainArgs {
    #[command(flatten)]
    pub(crate) job: JobArg,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// Namespace of the operator
    #[arg(long, value_name = "NAME", default_value = NAMESPACE, help_heading = TRAINING_JOBS)]
    pub(crate) operator_namespace: String,
    #[command(flatten, next_help_heading = TRAINING_JOBS)]
    pub(crate) planner: PlannerFlags,
}

#[derive(Args, Debug)]
pub(crate) struct JobArgs {
    #[command(subcommand)]
    pub(crate) command: JobCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum JobCommand {
    /// Convert a PaddlePaddle EDL TrainingJob and print the result
    Convert {
        /// Manifest to convert
        #[arg(value_name = "FILE")]
        file: PathBuf,
    },
}
