// SPDX-License-Identifier: Apache-2.0
//! Jobs on Kubernetes, as the commands see them: `train --image_name=…` submits one, and every
//! other command finds it by name.
//!
//! A job is looked for on the cluster when `--namespace` is given, or when this machine has no
//! job of that name and there is a kubeconfig.

use edl_core::spec::JobSpec;
use edl_kube::client::{Cluster, Error, Found};
use edl_net::key::JobKey;
use tokio::runtime::Runtime;

use crate::cli::JobArg;
use crate::exit::{not_found, refuse};
use crate::jobs::{Home, Job};

pub(crate) mod audit;
mod follow;
mod image;
pub(crate) mod list;
pub(crate) mod logs;
mod master;
pub(crate) mod resume;
pub(crate) mod status;
pub(crate) mod submit;

pub(crate) use follow::attach;
pub(crate) use master::{scale, stop};

/// Where a job was found.
pub(crate) enum Place {
    Here(Job),
    There(Box<Remote>),
}

/// A job on a cluster. Its client lives on the runtime that it was made on.
pub(crate) struct Remote {
    pub(crate) runtime: Runtime,
    pub(crate) cluster: Cluster,
    pub(crate) found: Found,
}

/// The job that the user means.
pub(crate) fn find(arg: &JobArg) -> anyhow::Result<Place> {
    if let Some(namespace) = &arg.namespace {
        return Remote::find(namespace, arg.job.as_deref(), false)
            .map(|remote| Place::There(Box::new(remote)));
    }
    let here = match Home::from_env()?.find(arg.job.as_deref()) {
        Ok(job) => return Ok(Place::Here(job)),
        Err(error) => error,
    };
    match &arg.job {
        Some(name) if is_name(name) && Cluster::is_configured() => {
            match Remote::find("", Some(name), false) {
                Ok(remote) => Ok(Place::There(Box::new(remote))),
                // Whoever has no job here may have meant the cluster, or not.
                Err(there) => Err(not_found(format!("{here:#}; on the cluster: {there:#}"))),
            }
        }
        Some(_) | None => Err(here),
    }
}

/// The job of a command that sees this machine only; `instead` tells what a cluster has for it.
pub(crate) fn find_here(arg: &JobArg, command: &str, instead: &str) -> anyhow::Result<Job> {
    if arg.namespace.is_some() {
        return Err(refuse(format!(
            "`elasticdl {command}` supports only jobs on this machine; on a cluster, {instead}"
        )));
    }
    Home::from_env()?.find(arg.job.as_deref())
}

fn is_name(word: &str) -> bool {
    !word.contains(['/', '.'])
}

impl Remote {
    /// The job of this name in the namespace; without a name, the newest.
    pub(crate) fn find(
        namespace: &str,
        job: Option<&str>,
        force_kube_config: bool,
    ) -> anyhow::Result<Self> {
        let runtime = crate::runtime()?;
        let (cluster, found) = runtime.block_on(async {
            let cluster = Cluster::connect(namespace, force_kube_config).await.map_err(sentence)?;
            let found = match job {
                Some(job) => cluster.find(job).await.map_err(sentence)?,
                None => cluster.list().await.map_err(sentence)?.into_iter().next(),
            };
            anyhow::Ok((cluster, found))
        })?;
        let found = found.ok_or_else(|| {
            let namespace = cluster.namespace();
            not_found(match job {
                Some(job) => format!(
                    "job `{job}` not found in namespace `{namespace}`; list jobs with `elasticdl \
                     list --namespace={namespace}`"
                ),
                None => format!("no jobs in namespace `{namespace}`"),
            })
        })?;
        Ok(Self { runtime, cluster, found })
    }

    pub(crate) fn spec(&self) -> &JobSpec {
        &self.found.spec
    }

    /// What commands find the job by.
    pub(crate) fn handle(&self) -> String {
        handle(self.spec(), &self.cluster)
    }
}

fn handle(spec: &JobSpec, cluster: &Cluster) -> String {
    format!("{} --namespace={}", spec.job_name, cluster.namespace())
}

async fn key(cluster: &Cluster, job: &str) -> anyhow::Result<JobKey> {
    let text = cluster.key(job).await.map_err(sentence)?;
    JobKey::parse(&text).ok_or_else(|| anyhow::anyhow!("the Secret of job `{job}` contains no key"))
}

/// A cluster's refusal as the command's own, with the exit code that it deserves.
fn sentence(error: Error) -> anyhow::Error {
    if error.is_bad_input() {
        let cause = std::error::Error::source(&error);
        return refuse(match cause {
            Some(cause) => format!("{error} ({cause})"),
            None => error.to_string(),
        });
    }
    anyhow::Error::new(error)
}
