// SPDX-License-Identifier: Apache-2.0
//! Built-in models behind [`edl_tensor::model::Model`], and the [`tape`] that they are made of.
//!
//! A model here keeps nothing between calls but buffers. Parameters and embedding rows are read
//! where they lie, and gradients are written where the training loop wants them.
//!
//! Every pass runs on the calling thread alone: equal inputs and an equal seed give equal bits on
//! one instruction set, and a job scales by workers, one per core.

mod adam;
mod catalog;
mod census;
mod columns;
mod count;
mod deepfm;
mod layer;
mod mnist;
mod mnist_cnn;
mod mnist_mlp;
mod model_params;
mod pass;
mod probe;
pub mod tape;
mod wide_deep;

pub use catalog::{Error, looks_like_python, names, open};
pub use probe::instruction_set;

#[cfg(test)]
mod tests;
