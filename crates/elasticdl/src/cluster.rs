// SPDX-License-Identifier: Apache-2.0
//! Jobs on Kubernetes: `train --image_name=…` submits one, and every other command finds it by name.
//!
//! A command searches the cluster if `--namespace` is given, or if this machine has no job of that
//! name and there is a kubeconfig.

use std::time::{Duration, Instant};

use edl_core::spec::JobSpec;
use edl_kube::client::{Cluster, Error, Found, PodState, pod_state};
use edl_net::key::JobKey;
use edl_net::proto::JobStatus;
use tokio::runtime::Runtime;

use crate::cli::JobArg;
use crate::control::{self, Master};
use crate::exit::{not_found, refuse};
use crate::jobs::{Home, Job};

mod follow;
mod image;
pub(crate) mod list;
pub(crate) mod logs;
pub(crate) mod resume;
pub(crate) mod status;
pub(crate) mod submit;

pub(crate) use follow::watch;

/// Time for a master's pod to exit after its job has stopped.
const EXIT_TIMEOUT: Duration = Duration::from_secs(40);
const POLL: Duration = Duration::from_millis(200);

/// The job that a command is about.
pub(crate) enum Target {
    Local(Job),
    Cluster(Box<ClusterJob>),
}

/// A job on a cluster. Its client must run on the runtime that it was made on.
pub(crate) struct ClusterJob {
    pub(crate) runtime: Runtime,
    pub(crate) cluster: Cluster,
    pub(crate) found: Found,
}

/// Finds the job that the user means.
pub(crate) fn find(arg: &JobArg) -> anyhow::Result<Target> {
    let on_cluster = |namespace: &str, job: Option<&str>| {
        ClusterJob::find(namespace, job, false).map(|job| Target::Cluster(Box::new(job)))
    };
    if let Some(namespace) = &arg.namespace {
        return on_cluster(namespace, arg.job.as_deref());
    }
    let local = match Home::from_env()?.find(arg.job.as_deref()) {
        Ok(job) => return Ok(Target::Local(job)),
        Err(error) => error,
    };
    match &arg.job {
        // The user may have meant a job on either side, so both errors are reported.
        Some(name) if is_name(name) && Cluster::is_configured() => on_cluster("", Some(name))
            .map_err(|remote| not_found(format!("{local:#}; on the cluster: {remote:#}"))),
        Some(_) | None => Err(local),
    }
}

/// The job of a command that supports only this machine; `instead` is the alternative on a cluster.
pub(crate) fn find_local(arg: &JobArg, command: &str, instead: &str) -> anyhow::Result<Job> {
    if arg.namespace.is_some() {
        return Err(refuse(format!(
            "`elasticdl {command}` supports only jobs on this machine; on a cluster, {instead}"
        )));
    }
    Home::from_env()?.find(arg.job.as_deref())
}

fn is_name(text: &str) -> bool {
    !text.contains(['/', '.'])
}

impl Target {
    pub(crate) fn spec(&self) -> anyhow::Result<JobSpec> {
        match self {
            Self::Local(job) => job.spec(),
            Self::Cluster(job) => Ok(job.spec().clone()),
        }
    }

    pub(crate) fn name(&self) -> String {
        self.spec().map(|spec| spec.job_name).unwrap_or_default()
    }

    /// What commands find the job by.
    pub(crate) fn handle(&self) -> String {
        match self {
            Self::Local(job) => job.handle(),
            Self::Cluster(job) => job.handle(),
        }
    }

    pub(crate) fn block_on<T>(
        &self,
        future: impl Future<Output = anyhow::Result<T>>,
    ) -> anyhow::Result<T> {
        match self {
            Self::Local(_) => crate::runtime()?.block_on(future),
            Self::Cluster(job) => job.runtime.block_on(future),
        }
    }

    /// Sends a request to the job's master.
    pub(crate) fn request<T>(
        &self,
        request: impl AsyncFnOnce(&mut Master) -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        self.block_on(control::within(async {
            let mut master = match self {
                Self::Local(job) => Master::of(job).await?,
                Self::Cluster(job) => job.connect().await?,
            };
            request(&mut master).await
        }))
    }
}

impl ClusterJob {
    /// The job of this name in the namespace; without a name, the newest.
    pub(crate) fn find(
        namespace: &str,
        job: Option<&str>,
        force_kube_config: bool,
    ) -> anyhow::Result<Self> {
        let runtime = crate::runtime()?;
        let (cluster, found) = runtime.block_on(async {
            let cluster =
                Cluster::connect(namespace, force_kube_config).await.map_err(explained)?;
            let found = match job {
                Some(job) => cluster.find(job).await.map_err(explained)?,
                None => cluster.list().await.map_err(explained)?.into_iter().next(),
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

    pub(crate) fn handle(&self) -> String {
        handle(self.spec(), &self.cluster)
    }

    /// A connection to the job's master, if it runs.
    async fn connect(&self) -> anyhow::Result<Master> {
        let name = &self.spec().job_name;
        if self.found.master().is_some_and(|pod| pod_state(pod) == PodState::Running) {
            return connect(&self.cluster, name).await;
        }
        Err(control::not_running(name, &self.handle()))
    }

    /// Waits until the master has stopped the job, if it was asked to do so within this time. Deletes
    /// the pods if it does not stop.
    pub(crate) async fn end(&self, within: Option<Duration>) -> anyhow::Result<JobStatus> {
        let name = &self.spec().job_name;
        let has_ended = match within {
            Some(within) => self.ended_within(within + EXIT_TIMEOUT).await?,
            None => false,
        };
        if !has_ended {
            self.cluster.stop(name).await.map_err(explained)?;
        }
        let found = self.cluster.find(name).await.map_err(explained)?;
        Ok(status::of_pods(found.as_ref().unwrap_or(&self.found), &self.handle()))
    }

    async fn ended_within(&self, timeout: Duration) -> anyhow::Result<bool> {
        let deadline = Instant::now() + timeout;
        while Instant::now() < deadline {
            let found = self.cluster.find(&self.spec().job_name).await.map_err(explained)?;
            if !found.as_ref().is_some_and(is_active) {
                return Ok(true);
            }
            tokio::time::sleep(POLL).await;
        }
        Ok(false)
    }

    /// Runs a command in a pod with the job's storage, and returns what it prints.
    pub(crate) fn run_in_pod(&self, purpose: &str, command: &[&str]) -> anyhow::Result<String> {
        let printed = self.cluster.run(&self.found, purpose, command);
        self.runtime.block_on(printed).map_err(explained)
    }
}

/// Whether the job's master runs, waits to run, or will be started again.
fn is_active(found: &Found) -> bool {
    has_master(found) || found.is_restarting()
}

/// Whether the job's master runs or waits to run.
fn has_master(found: &Found) -> bool {
    let master = found.master().map(pod_state);
    matches!(master, Some(PodState::Running | PodState::Waiting(_)))
}

fn handle(spec: &JobSpec, cluster: &Cluster) -> String {
    format!("{} --namespace={}", spec.job_name, cluster.namespace())
}

/// Connects to the master of job `name` through a forwarded port.
async fn connect(cluster: &Cluster, name: &str) -> anyhow::Result<Master> {
    let key = JobKey::parse(&cluster.key(name).await.map_err(explained)?);
    let key = key.ok_or_else(|| anyhow::anyhow!("the Secret of job `{name}` contains no key"))?;
    let forward = cluster.forward(name).await.map_err(explained)?;
    Master::connect(&forward.address(), &key, name, Some(forward)).await
}

/// A cluster's error as the command's own, with its exit code.
fn explained(error: Error) -> anyhow::Error {
    if error.is_bad_input() {
        let cause = std::error::Error::source(&error);
        return refuse(match cause {
            Some(cause) => format!("{error} ({cause})"),
            None => error.to_string(),
        });
    }
    anyhow::Error::new(error)
}
