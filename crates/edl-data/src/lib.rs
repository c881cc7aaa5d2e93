// SPDX-License-Identifier: Apache-2.0
//! Data sets: record formats, readers and writers.
//!
//! A [`Dataset`] numbers the records of all its files from zero and decodes any of them into
//! named, typed columns. Files are split into chunks, those of the format if it has any. Opening a
//! data set builds an index of its chunks. A few decoded chunks stay in memory, so shuffled records
//! do not need a chunk each.

mod dataset;
mod decode;
mod error;
mod format;
mod index;
mod infer;
mod location;
#[cfg(feature = "object_store")]
mod remote;
mod row;
mod saved_index;
mod scan;
mod schema;

pub mod csv;
pub mod example;
pub mod generate;
pub mod idx;
pub mod import;
pub mod inspect;
pub mod jsonl;
#[cfg(feature = "parquet")]
pub mod parquet;
pub mod recordio;
pub mod tfrecord;

pub use dataset::{Dataset, OpenOptions};
pub use edl_core::spec::Codec;
pub use error::{Error, Place};
pub use format::Format;
pub use inspect::{Summary, head, inspect};
pub use scan::Progress;
pub use schema::{Schema, schema};
