// SPDX-License-Identifier: Apache-2.0
//! The data plane: parameters come down by pull, gradients go up by push.
//!
//! [`client::PsClient`] is the worker's half. [`server`] is what a parameter server needs to
//! accept connections and to read and write frames; what a frame does is decided there.

mod acks;
pub mod client;
pub mod server;
pub(crate) mod session;
mod split;

pub use acks::Acked;
pub use client::{AbortHandle, Limits, PsClient, Versions};
pub use edl_core::route::{Route, ServerRoute};

pub use crate::wire::Error;
