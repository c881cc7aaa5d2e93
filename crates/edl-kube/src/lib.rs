// SPDX-License-Identifier: Apache-2.0
//! Jobs on Kubernetes: their objects, the client that submits and finds them, and the platform of a
//! master in a pod.
//!
//! Public futures are boxed: an `async fn` is compiled in the crate that awaits it, a boxed one
//! here.

pub mod adopt;
pub mod board;
mod calls;
pub mod client;
pub mod controller;
pub mod facts;
pub mod inside;
pub mod leaving;
pub mod manifest;
pub mod names;
pub mod note;
pub mod platform;
pub mod yaml;

pub use calls::{CALL_LIMIT, Object};
pub use kube::Client;
