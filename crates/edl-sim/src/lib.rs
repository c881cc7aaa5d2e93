// SPDX-License-Identifier: Apache-2.0
//! A deterministic simulation of whole jobs: the real machines of master, workers and parameter
//! servers, over a simulated network, disk and clock, with faults.
//!
//! Control messages and data frames pass through the encoders that production uses. No matter what
//! fails, a job must succeed, and its model must hold every record once per epoch; where workers
//! hold parameters, it must be bit-identical to that of a single worker without faults.

mod client;
mod disk;
mod faults;
mod frames;
mod history;
mod judge;
mod kernel;
mod master;
mod mesh;
mod message;
mod model;
mod network;
mod process;
mod scenario;
mod script;
mod server;
mod session;
mod site;
mod worker;

pub use scenario::Scenario;
pub use script::{Hold, Script, Sent, What};
pub use site::{Outcome, Site};
