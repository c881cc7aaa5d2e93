// SPDX-License-Identifier: Apache-2.0
//! The flags of `operator`, `plan`, `explain` and `job`: TrainingJobs of a cluster.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use edl_operator::manifests::{HTTP_PORT, NAMESPACE};

pub(crate) const OPERATOR_EXAMPLES: &str = "\
Examples:
  elasticdl operator manifests | kubectl apply -f -      install it
  elasticdl operator --kubeconfig ~/.kube/config         run it here
  kubectl apply -f examples/trainingjob/job.yaml && kubectl get tj --watch";

pub(crate) const PLAN_EXAMPLES: &str = "\
Examples:
  elasticdl plan
  elasticdl plan --explain my-job                        the same as `elasticdl explain my-job`";

#[derive(Args, Debug)]
#[command(rename_all = "snake_case", args_conflicts_with_subcommands = true)]
pub(crate) struct OperatorArgs {
    #[command(subcommand)]
    pub(crate) command: Option<OperatorCommand>,
    #[command(flatten)]
    pub(crate) cluster: PlannerFlags,
    /// DEBUG, INFO, WARNING or ERROR
    #[arg(long, value_name = "LEVEL", default_value = "INFO")]
    pub(crate) log_level: String,
    /// Port of its page, /metrics and /healthz; 0 picks a free one
    #[arg(long, value_name = "PORT", default_value_t = HTTP_PORT)]
    pub(crate) http_port: u16,
    /// Masters are started by somebody else, outside the cluster
    #[arg(long, hide = true)]
    pub(crate) masters_outside: bool,
}

#[derive(Debug, Subcommand)]
#[command(rename_all = "snake_case")]
pub(crate) enum OperatorCommand {
    /// Print the definition of TrainingJob
    Crd,
    /// Print everything that installs the operator
    Manifests {
        /// Where it shall run
        #[arg(long, value_name = "NAME", default_value = NAMESPACE)]
        namespace: String,
        /// Image with elasticdl in its PATH
        #[arg(long, value_name = "IMAGE", default_value = "elasticdl:native")]
        image: String,
    },
}

/// Which cluster, and by which rules.
#[derive(Args, Clone, Debug)]
#[command(rename_all = "snake_case")]
pub(crate) struct PlannerFlags {
    /// Where the operator runs: its Lease and the queues are there
    #[arg(long, value_name = "NAME", default_value = NAMESPACE)]
    pub(crate) namespace: String,
    /// File that names the cluster [default: the cluster around this process, or kubectl's]
    #[arg(long, value_name = "FILE")]
    pub(crate) kubeconfig: Option<PathBuf>,
    /// Jobs grow until this share of the cluster is asked for
    #[arg(long, value_name = "SHARE", default_value_t = 0.97)]
    pub(crate) max_load_desired: f64,
    /// Who decides, see docs/scheduling.md
    #[arg(long, value_name = "NAME", default_value = "elastic-fair")]
    pub(crate) policy: String,
}

#[derive(Args, Debug)]
#[command(rename_all = "snake_case")]
pub(crate) struct PlanArgs {
    #[command(flatten)]
    pub(crate) cluster: PlannerFlags,
    /// Only this job, and why it is not at its maximum
    #[arg(long, value_name = "JOB")]
    pub(crate) explain: Option<String>,
}

#[derive(Args, Debug)]
#[command(rename_all = "snake_case")]
pub(crate) struct ExplainArgs {
    /// Name of a TrainingJob, or NAMESPACE/NAME
    #[arg(value_name = "JOB")]
    pub(crate) job: String,
    #[command(flatten)]
    pub(crate) cluster: PlannerFlags,
}

#[derive(Args, Debug)]
pub(crate) struct JobArgs {
    #[command(subcommand)]
    pub(crate) command: JobCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum JobCommand {
    /// Print a TrainingJob of PaddlePaddle EDL in our words
    Convert {
        /// Its manifest
        #[arg(value_name = "FILE")]
        file: PathBuf,
    },
}
