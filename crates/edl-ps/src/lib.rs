// SPDX-License-Identifier: Apache-2.0
//! The parameter-server process: owner threads around partitions.
//!
//! The machine [`edl_core::server::Server`] makes the decisions. [`store::Store`] is the shell
//! around it: owner threads, files and clocks, but no socket. [`serve`] puts the store on the data
//! plane, and [`run`] connects it with the master.

mod address;
mod owner;
mod serve;
mod session;
mod spending;
pub mod store;

use std::path::PathBuf;

use edl_core::id::PsId;
use edl_net::key::JobKey;
use edl_net::place::Place;

pub use serve::Front;
pub use session::run;

/// What a parameter server needs at its start; the rest comes from the master.
#[derive(Clone, Debug)]
pub struct Config {
    pub ps: PsId,
    /// `host:port`; the job folder's `master.json` is tried, too.
    pub master_addr: String,
    pub key: JobKey,
    pub job_dir: PathBuf,
    /// `host:port` to listen on; port 0 picks a free one.
    pub listen: String,
    /// Owner threads; 0 = one per core.
    pub threads: usize,
    pub place: Place,
}

/// Why a parameter server stopped without an order.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot listen on `{address}`")]
    Listen { address: String, source: std::io::Error },
    #[error("cannot generate a random number")]
    Random(#[source] edl_net::key::Error),
    #[error(transparent)]
    Control(#[from] edl_net::control::Error),
    #[error("cannot start a thread")]
    Thread(#[source] std::io::Error),
    #[error("an owner thread panicked")]
    OwnerPanicked,
}
