// SPDX-License-Identifier: Apache-2.0
//! The flags of `list`, `clean` and `wait`: the jobs of a machine.

use clap::{Args, ValueEnum};

use super::JobArg;

pub(crate) const WAIT_EXAMPLES: &str = "\
Examples:
  elasticdl wait my-job && elasticdl audit my-job
  elasticdl wait my-job --timeout=10m";

pub(crate) const CLEAN_EXAMPLES: &str = "\
Examples:
  elasticdl clean my-job
  elasticdl clean --older_than=7d --state=failed,stopped --dry_run
  elasticdl clean --all";

#[derive(Args, Debug)]
pub(crate) struct ListArgs {
    /// List the jobs in this namespace of the cluster [default: on this machine]
    #[arg(long, value_name = "NAME")]
    pub(crate) namespace: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

/// How a job that `clean` removes has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum EndState {
    Succeeded,
    Failed,
    Stopped,
}

#[derive(Args, Debug, Default)]
#[command(rename_all = "snake_case")]
pub(crate) struct CleanArgs {
    /// Delete jobs in this namespace of the cluster [default: on this machine]
    #[arg(long, value_name = "NAME")]
    pub(crate) namespace: Option<String>,
    /// Names or folders of the jobs to delete
    #[arg(value_name = "JOB")]
    pub(crate) jobs: Vec<String>,
    /// Delete every job that is not running
    #[arg(long, conflicts_with = "jobs")]
    pub(crate) all: bool,
    /// Delete jobs that ended longer ago than this, e.g. 12h or 7d [default: any time ago]
    #[arg(long, value_name = "TIME", conflicts_with = "jobs", value_parser = crate::flags::seconds)]
    pub(crate) older_than: Option<u64>,
    /// Delete jobs in these states, separated by commas; `stopped` includes jobs that were killed
    /// [default: any state]
    #[arg(long, value_name = "STATE,…", conflicts_with = "jobs", value_delimiter = ',')]
    pub(crate) state: Vec<EndState>,
    /// List the jobs with their sizes, and delete nothing
    #[arg(long)]
    pub(crate) dry_run: bool,
}

#[derive(Args, Debug)]
pub(crate) struct WaitArgs {
    #[command(flatten)]
    pub(crate) job: JobArg,
    /// Stop waiting after this time and exit with code 124, e.g. 30s or 10m [default: no limit]
    #[arg(long, value_name = "TIME", value_parser = crate::flags::seconds)]
    pub(crate) timeout: Option<u64>,
}
