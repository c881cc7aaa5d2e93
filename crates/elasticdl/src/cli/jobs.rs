// SPDX-License-Identifier: Apache-2.0
//! The flags of `list` and `clean`: the jobs of a machine.

use clap::Args;

#[derive(Args, Debug)]
pub(crate) struct ListArgs {
    /// List the jobs on the cluster, in this namespace [default: this machine]
    #[arg(long, value_name = "NAME")]
    pub(crate) namespace: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args, Debug)]
pub(crate) struct CleanArgs {
    /// Delete jobs on the cluster, in this namespace [default: this machine]
    #[arg(long, value_name = "NAME")]
    pub(crate) namespace: Option<String>,
    /// Names or folders of the jobs to delete
    #[arg(value_name = "JOB")]
    pub(crate) jobs: Vec<String>,
    /// Delete every job that is not running
    #[arg(long, conflicts_with = "jobs")]
    pub(crate) all: bool,
}
