// SPDX-License-Identifier: Apache-2.0
//! The parameter-server process: owner threads around partitions.
//!
//! [`store::Store`] is the engine: it knows generations, owner threads and waits, and no socket.
//! [`serve`] puts it on the data plane, [`run`] holds the session with the master and does what
//! the master says. Nothing is decided here but what the protocol fixes: other generations are
//! refused.

mod address;
mod owner;
mod progress;
mod serve;
mod session;
mod spending;
pub mod store;
mod ticket;
mod window;

use std::path::PathBuf;

use edl_core::id::PsId;
use edl_net::key::JobKey;
use edl_net::place::Place;

pub use serve::Front;
pub use session::run;

/// What a parameter server is told at its start; the rest comes from the master.
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

/// Why a parameter server ended other than by order.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot listen on `{address}`")]
    Listen { address: String, source: std::io::Error },
    #[error("cannot generate a random number")]
    Random(#[source] edl_net::key::Error),
    #[error(transparent)]
    Control(#[from] edl_net::control::Error),
    #[error("an owner thread panicked")]
    OwnerPanicked,
}
