// SPDX-License-Identifier: Apache-2.0
//! Requests to a job's master, from any shell of the machine or through a forwarded port.

use std::time::Duration;

use anyhow::Context as _;
use edl_core::time::millis;
use edl_kube::client::Forward;
use edl_net::key::JobKey;
use edl_net::proto::master_client::MasterClient;
use edl_net::proto::{
    AuditReport, AuditRequest, ChaosRequest, JobStatus, ScaleReply, ScaleRequest, StatusRequest,
    StopRequest,
};
use tonic::Response;
use tonic::transport::Channel;

use crate::exit::{not_found, refuse};
use crate::jobs::Job;

/// A running master on the same machine answers much faster.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
const STATUS_TIMEOUT: Duration = Duration::from_secs(3);
/// Through the API server of a cluster.
const FORWARDED_STATUS_TIMEOUT: Duration = Duration::from_secs(8);
/// To scale, stop and audit, the master has to ask other processes.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// A connection to the master of a running job.
pub(crate) struct Master {
    client: MasterClient<Channel>,
    /// The port that carries the connection, if the master is on a cluster.
    forward: Option<Forward>,
}

impl Master {
    /// Connects to the master of a job on this machine.
    pub(crate) async fn of(job: &Job) -> anyhow::Result<Self> {
        let name = job.name().unwrap_or_default();
        let info = job.master().filter(|_| job.is_running());
        let info = info.ok_or_else(|| not_running(&name, &name))?;
        Self::connect(&info.address, &job.key()?, &name, None).await
    }

    /// Connects to the master of job `name` at this address.
    pub(crate) async fn connect(
        address: &str,
        key: &JobKey,
        name: &str,
        forward: Option<Forward>,
    ) -> anyhow::Result<Self> {
        let channel = edl_net::tls::connect(address, key, CONNECT_TIMEOUT)
            .await
            .with_context(|| format!("the master of job `{name}` is not responding"))?;
        let client = MasterClient::new(channel).max_decoding_message_size(edl_net::MAX_MESSAGE);
        Ok(Self { client, forward })
    }

    pub(crate) async fn status(&mut self) -> anyhow::Result<JobStatus> {
        let is_forwarded = self.forward.is_some();
        let timeout = if is_forwarded { FORWARDED_STATUS_TIMEOUT } else { STATUS_TIMEOUT };
        let request = self.client.status(StatusRequest {});
        Ok(tokio::time::timeout(timeout, request).await.context(NOT_RESPONDING)??.into_inner())
    }

    /// Requests another number of workers.
    pub(crate) async fn scale(&mut self, workers: u32) -> anyhow::Result<ScaleReply> {
        self.client.scale(ScaleRequest { workers }).await.map(Response::into_inner).map_err(refused)
    }

    pub(crate) async fn stop(&mut self, within: Duration) -> anyhow::Result<()> {
        let request = StopRequest { reason: STOPPED.into(), within_ms: Some(millis(within)) };
        self.client.stop(request).await.map(drop).map_err(refused)
    }

    pub(crate) async fn audit(&mut self) -> anyhow::Result<AuditReport> {
        self.client.audit(AuditRequest {}).await.map(Response::into_inner).map_err(refused)
    }

    pub(crate) async fn chaos(&mut self, request: ChaosRequest) -> anyhow::Result<()> {
        self.client.chaos(request).await.map(drop).map_err(refused)
    }
}

/// The reason of a job's end by request.
pub(crate) const STOPPED: &str = "stopped by `elasticdl stop`";
const NOT_RESPONDING: &str = "the master is not responding";

/// The reason that the master gives for its refusal.
fn refused(status: tonic::Status) -> anyhow::Error {
    refuse(status.message())
}

/// `handle` is what commands find the job by.
pub(crate) fn not_running(name: &str, handle: &str) -> anyhow::Error {
    not_found(format!("job `{name}` is not running; see `elasticdl status {handle}`"))
}

/// The status that the master of a job on this machine reports now.
pub(crate) async fn status(job: &Job) -> anyhow::Result<JobStatus> {
    let request = async { Master::of(job).await?.status().await };
    tokio::time::timeout(STATUS_TIMEOUT, request).await.context(NOT_RESPONDING)?
}

/// Waits for the answer to a request, but not forever: a paused master accepts connections and
/// does not answer.
pub(crate) async fn within<T>(
    request: impl Future<Output = anyhow::Result<T>>,
) -> anyhow::Result<T> {
    tokio::time::timeout(REQUEST_TIMEOUT, request).await.context(NOT_RESPONDING)?
}
