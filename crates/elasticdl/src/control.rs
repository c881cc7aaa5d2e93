// SPDX-License-Identifier: Apache-2.0
//! Asking a job's master, from any shell of the machine.

use std::time::Duration;

use anyhow::Context as _;
use edl_net::key::JobKey;
use edl_net::proto::master_client::MasterClient;
use edl_net::proto::{JobStatus, ScaleReply, ScaleRequest, StatusRequest};
use tonic::transport::Channel;

use crate::exit::{Exit, Refusal, refuse};
use crate::jobs::Job;

/// A master on the same machine that lives answers much quicker.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
const STATUS_TIMEOUT: Duration = Duration::from_secs(3);
/// To scale, to stop and to audit, the master has to ask others.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// A connection to the master of a running job.
pub(crate) async fn connect(job: &Job) -> anyhow::Result<MasterClient<Channel>> {
    let name = job.name().unwrap_or_default();
    let master = job.master().filter(|_| job.is_running());
    let master = master.ok_or_else(|| Refusal {
        exit: Exit::NotFound,
        text: format!("job `{name}` is not running; see `elasticdl status {name}`"),
    })?;
    connect_to(&master.address, &job.key()?, &name).await
}

/// A connection to the master of job `name` at this address.
pub(crate) async fn connect_to(
    address: &str,
    key: &JobKey,
    name: &str,
) -> anyhow::Result<MasterClient<Channel>> {
    let channel = edl_net::tls::connect(address, key, CONNECT_TIMEOUT)
        .await
        .with_context(|| format!("the master of job `{name}` is not responding"))?;
    Ok(MasterClient::new(channel).max_decoding_message_size(edl_net::MAX_MESSAGE))
}

/// What the master says now about the job.
pub(crate) async fn status(job: &Job) -> anyhow::Result<JobStatus> {
    let ask = async {
        let mut master = connect(job).await?;
        Ok(master.status(StatusRequest {}).await?.into_inner())
    };
    answer(STATUS_TIMEOUT, ask).await
}

/// Asks the master for another number of workers; its reason if it will not have it.
pub(crate) async fn scale(job: &Job, workers: u32) -> anyhow::Result<ScaleReply> {
    let ask = async {
        let mut master = connect(job).await?;
        match master.scale(ScaleRequest { workers }).await {
            Ok(reply) => Ok(reply.into_inner()),
            Err(refused) => Err(refuse(refused.message())),
        }
    };
    within(ask).await
}

/// Waits for an answer, but not for ever: a master that was stopped in its tracks takes
/// connections and says nothing.
pub(crate) async fn within<T>(ask: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    answer(ANSWER_TIMEOUT, ask).await
}

async fn answer<T>(
    timeout: Duration,
    ask: impl Future<Output = anyhow::Result<T>>,
) -> anyhow::Result<T> {
    tokio::time::timeout(timeout, ask).await.context("the master is not responding")?
}
