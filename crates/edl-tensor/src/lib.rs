// SPDX-License-Identifier: Apache-2.0
//! Tensors, the `Model` trait, optimizers, partitions, embedding tables and the checkpoint codec.
//!
//! No sockets here: bytes come from and go to the caller, or to files for checkpoints.

pub mod batch;
pub mod checkpoint;
pub mod clip;
pub mod double;
pub mod export;
pub mod first_values;
pub mod fuzz;
pub mod import;
pub mod init;
pub mod model;
pub mod optimizer;
pub mod partition;
pub mod push;
pub mod table;
pub mod unique;

#[cfg(test)]
mod tests;
