// SPDX-License-Identifier: Apache-2.0
//! The worker process: one training loop over a [`Model`], whatever engine and strategy.
//!
//! Four threads share the work. The *session* (async) talks with the master; the *compute*
//! thread owns the model and decides; the *feed* thread reads records ahead of it; the *link*
//! thread moves parameters and gradients. A worker holds nothing that a job cannot lose: it may
//! be killed at any moment, and what it was lent is lent again.
//!
//! There are two strategies. With *parameter servers* a worker is lent batches, each of which it
//! pulls parameters for and pushes a gradient of; `compute` is its loop. With *AllReduce* every
//! worker holds all parameters, and all workers of a world take each step together, each on its
//! lanes, until a step that the master has granted; `allreduce` is its loop, the mesh between
//! workers takes the place of the link, and what a worker holds is held by its peers too.

mod allreduce;
mod compute;
mod evaluate;
mod feed;
mod link;
mod predict;
mod progress;
mod servers;
mod session;
mod spending;
mod train;
mod work;

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

pub(crate) use edl_core::error::chain;
pub use session::Error;

/// What a worker must know before its master tells it the rest.
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

/// Works for the job until its master says that there is nothing left to do, or until `shutdown`:
/// then the batch at hand is finished and the rest given back.
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
