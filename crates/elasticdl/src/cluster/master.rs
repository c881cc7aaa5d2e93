// SPDX-License-Identifier: Apache-2.0
//! Asking the master of a job on the cluster: the same calls as on this machine, through a
//! forwarded port.

use std::io::Write;
use std::time::{Duration, Instant};

use edl_kube::client::{Cluster, Forward, Phase, phase};
use edl_net::proto::master_client::MasterClient;
use edl_net::proto::{JobStatus, ScaleRequest, StatusRequest, StopRequest};
use tonic::transport::Channel;

use super::{Remote, sentence};
use crate::control;
use crate::exit::{Exit, Refusal, refuse};
use crate::say::say;

/// The API server stands between.
const STATUS_TIMEOUT: Duration = Duration::from_secs(8);
/// A master may write a last checkpoint before it ends.
const PATIENCE: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(200);

/// A connection to a master, and the port that carries it.
pub(super) struct Master {
    client: MasterClient<Channel>,
    _forward: Forward,
}

impl Master {
    pub(super) async fn connect(cluster: &Cluster, job: &str) -> anyhow::Result<Self> {
        let key = super::key(cluster, job).await?;
        let forward = cluster.forward(job).await.map_err(sentence)?;
        let client = control::connect_to(&forward.address(), &key, job).await?;
        Ok(Self { client, _forward: forward })
    }

    pub(super) async fn status(&mut self) -> anyhow::Result<JobStatus> {
        let ask = self.client.status(StatusRequest {});
        let answer = tokio::time::timeout(STATUS_TIMEOUT, ask).await;
        let answer = answer.map_err(|_| anyhow::anyhow!("the master is not responding"))?;
        Ok(answer?.into_inner())
    }

    pub(super) fn client(&mut self) -> &mut MasterClient<Channel> {
        &mut self.client
    }
}

impl Remote {
    /// A connection to the job's master, if it runs.
    pub(super) async fn connect(&self) -> anyhow::Result<Master> {
        let name = &self.spec().job_name;
        if self.found.master().is_some_and(|pod| phase(pod) == Phase::Running) {
            return Master::connect(&self.cluster, name).await;
        }
        let handle = self.handle();
        let text = format!("job `{name}` is not running; see `elasticdl status {handle}`");
        Err(Refusal { exit: Exit::NotFound, text }.into())
    }
}

/// Changes the number of workers.
pub(crate) fn scale(remote: &Remote, workers: u32, out: &mut dyn Write) -> anyhow::Result<Exit> {
    let reply = remote.runtime.block_on(control::within(async {
        let mut master = remote.connect().await?;
        match master.client().scale(ScaleRequest { workers }).await {
            Ok(reply) => Ok(reply.into_inner()),
            Err(refused) => Err(refuse(refused.message())),
        }
    }))?;
    let name = &remote.spec().job_name;
    writeln!(out, "job {name}: workers scaled from {} to {}", reply.before, reply.after)?;
    Ok(Exit::Ok)
}

/// Asks the master to end the job, and ends its pods if it does not.
pub(crate) fn stop(remote: &Remote, out: &mut dyn Write) -> anyhow::Result<Exit> {
    remote.runtime.block_on(async {
        let asked = control::within(async {
            let mut master = remote.connect().await?;
            let reason = "stopped by `elasticdl stop`".into();
            Ok(master.client().stop(StopRequest { reason }).await?)
        })
        .await;
        if asked.is_err() || !ended_within(remote, PATIENCE).await? {
            let name = &remote.spec().job_name;
            remote.cluster.delete_pods(name).await.map_err(sentence)?;
        }
        anyhow::Ok(())
    })?;
    let status = remote.runtime.block_on(super::status::fresh(remote))?;
    let (name, handle) = (&remote.spec().job_name, remote.handle());
    writeln!(out, "job {name} {}", status.state)?;
    if status.state != "succeeded" {
        let kind = remote.spec().job_type.name();
        say(format_args!("resume it with `elasticdl {kind} --resume {handle}`"));
    }
    Ok(Exit::Ok)
}

async fn ended_within(remote: &Remote, patience: Duration) -> anyhow::Result<bool> {
    let deadline = Instant::now() + patience;
    while Instant::now() < deadline {
        let found = remote.cluster.find(&remote.spec().job_name).await.map_err(sentence)?;
        let runs = found.as_ref().and_then(|found| found.master()).map(phase);
        match runs {
            Some(Phase::Running | Phase::Waiting(_)) => tokio::time::sleep(POLL).await,
            Some(Phase::Ended { .. }) | None => return Ok(true),
        }
    }
    Ok(false)
}
