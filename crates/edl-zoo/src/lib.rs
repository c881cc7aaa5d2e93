// SPDX-License-Identifier: Apache-2.0
//! Built-in models behind [`edl_tensor::model::Model`]; the only crate with the tensor engine.
//!
//! A model here holds no state between calls. Parameters and embedding rows arrive as flat
//! slices, become Burn tensors for one pass, and gradients leave as flat vectors.
//!
//! The engine is built without its `rayon` feature, so every pass runs on the calling thread
//! alone: equal inputs and an equal seed give equal bits on one instruction set, and a job
//! scales by workers, one per core.

mod adam;
mod batch_norm;
mod catalog;
mod census;
mod columns;
mod conv;
mod count;
mod deepfm;
mod dropout;
mod kernel;
mod layer;
mod max_pool;
mod mnist;
mod mnist_cnn;
mod mnist_mlp;
mod model_params;
mod pass;
mod probe;
mod wide_deep;

pub use catalog::{Error, looks_like_python, names, open};
pub use probe::instruction_set;

#[cfg(test)]
mod check;
