// SPDX-License-Identifier: Apache-2.0
//! A job on Kubernetes: what its objects look like, how they are submitted and found, and how a
//! master in a pod gets its parameter servers and workers.

pub mod adopt;
pub mod client;
pub mod manifest;
pub mod names;
