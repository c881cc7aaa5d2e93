// SPDX-License-Identifier: Apache-2.0
//! A job on Kubernetes: what its objects look like, how they are submitted and found, and how a
//! master in a pod gets its parameter servers and workers.
//!
//! Public futures are boxed: an `async fn` is compiled in the crate that awaits it, a boxed one
//! here.

pub mod adopt;
pub mod board;
mod calls;
pub mod client;
pub mod facts;
pub mod inside;
pub mod manifest;
pub mod names;
pub mod note;
pub mod platform;
pub mod rescue;
pub mod yaml;

pub use calls::CALL_LIMIT;
pub use kube::Client;
