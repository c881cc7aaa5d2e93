// SPDX-License-Identifier: Apache-2.0
//! The worker process: one training loop over a [`Model`], for any engine and strategy.
//!
//! Four threads share the work. The *session* (async) talks to the master; the *compute* thread
//! owns the model; the *feed* thread reads records; the *link* thread exchanges parameters and
//! gradients with the servers. A worker holds nothing that a job cannot lose: it can be killed at
//! any time, and its work is assigned again.
//!
//! There are two strategies. With *parameter servers*, a worker is assigned batches; for each of
//! them, it pulls parameters and pushes a gradient. With *AllReduce*, every worker holds all
//! parameters, and all workers of a world take each step together, each on its lanes; the mesh
//! between workers takes the place of the link.
//!
//! A machine of `edl_core` makes the decisions: `worker` or `member`. The `driver` passes it the
//! events of all threads. Its effects go to the threads through a shell: `ps_worker` or
//! `allreduce::shell`.

mod allreduce;
mod compute;
mod driver;
mod evaluate;
mod feed;
mod link;
mod notice;
mod predict;
pub mod priority;
mod progress;
mod ps_worker;
mod servers;
mod session;
mod spending;
mod train;
mod trial;

#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::pin::Pin;

use edl_core::id::WorkerId;
use edl_core::spec::JobSpec;
use edl_net::key::JobKey;
use edl_net::place::Place;
use edl_tensor::model::Model;
use tokio_util::sync::CancellationToken;

pub use allreduce::train_alone;
pub(crate) use edl_core::error::chain;
pub use notice::time_left;
pub use session::Error;
pub use trial::{Misfit, try_first_batches};

/// What a worker needs at its start; the rest comes from the master.
#[derive(Clone, Debug)]
pub struct Config {
    pub worker: WorkerId,
    /// `host:port`. A master that was restarted elsewhere is found by the job's folder.
    pub master_addr: String,
    pub key: JobKey,
    pub job_dir: PathBuf,
    pub place: Place,
}

/// Builds the model that a job names. It runs on the thread that will use the model.
pub type OpenModel = Box<dyn FnOnce(&JobSpec) -> Result<Box<dyn Model>, String> + Send>;

/// Works for the job until the master has no more work, or until `shutdown`: then the batch in
/// progress is finished and the rest returned.
///
/// The future is boxed so that it is compiled in this crate, once, and not in every crate that
/// awaits it.
pub fn run(
    config: Config,
    open_model: OpenModel,
    shutdown: CancellationToken,
) -> Pin<Box<dyn Future<Output = Result<(), Error>> + Send>> {
    let edges = session::Edges::real(&config, open_model);
    Box::pin(session::Session::new(config, edges, shutdown).run())
}
