// SPDX-License-Identifier: Apache-2.0
//! Fuzz targets: one for each parser of bytes that come from users, files, peers or registries.
//!
//! A target is a plain function of bytes. `tests/corpora.rs` runs it on the files in `corpus/NAME` and
//! on mutations of them; `fuzz/` at the root of the repository runs the same functions under libFuzzer.
//! Whatever the bytes are, a target returns soon and claims little memory. A target panics if what
//! was read cannot be written and read again.

mod cluster;
mod data;
mod images;
mod messages;
pub mod mutate;

use std::path::PathBuf;

/// A parser, and what it may cost.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Also the name of its corpus.
    pub name: &'static str,
    pub run: fn(&[u8]),
    /// How many mutations an ordinary test tries.
    pub n_mutations: u64,
    /// The most memory that any input may claim, and one byte of it in addition.
    memory: (usize, usize),
}

/// Memory that any input may claim: buffers of files, decompressors and sockets.
const ANY: usize = 2 << 20;
/// The Parquet library claims as much for a page of zstd or brotli as the page's header says, twice; a
/// page has at most 1 GiB. What it does not fill costs no memory of the machine.
const TWO_PAGES: usize = 3 << 30;
/// All nodes, jobs and pods that a scenario may have; a few bytes can ask for that many.
const SCENARIO: usize = 256 << 20;
/// A byte of text becomes a value of a map, a list and a list that has just grown.
const PER_BYTE: usize = 512;
/// What a byte of gzip can stand for, in a buffer that has just grown.
const PER_PACKED_BYTE: usize = 4 * 1100;

const fn target(name: &'static str, run: fn(&[u8])) -> Target {
    Target { name, run, n_mutations: 2000, memory: (ANY, PER_BYTE) }
}

const fn packed(name: &'static str, run: fn(&[u8])) -> Target {
    Target { memory: (ANY, PER_PACKED_BYTE), ..target(name, run) }
}

pub const TARGETS: [Target; 26] = [
    packed("recordio", data::recordio),
    target("tfrecord", data::tfrecord),
    target("example", data::example),
    Target { memory: (TWO_PAGES, PER_PACKED_BYTE), ..target("parquet", data::parquet) },
    target("csv", data::csv),
    target("jsonl", data::jsonl),
    packed("idx", data::idx),
    target("frame", edl_net::fuzz::frame),
    target("stranger", edl_net::fuzz::stranger),
    target("relay", edl_net::fuzz::relay),
    target("worker_message", messages::worker_message),
    // A set of applied batches can repeat the one before in a few bytes.
    packed("ps_message", messages::ps_message),
    target("command", messages::command),
    target("page", edl_master::fuzz::page_request),
    target("applied", messages::applied),
    target("partition", edl_tensor::fuzz::partition_file),
    target("manifest", edl_tensor::fuzz::manifest),
    target("exported", edl_tensor::fuzz::exported_model),
    target("dockerfile", images::dockerfile),
    packed("layer", images::layer),
    // It writes many files.
    Target { n_mutations: 200, ..target("archive", images::archive) },
    target("registry", images::registry),
    target("program", images::program),
    target("job", cluster::job),
    target("cluster", cluster::cluster),
    Target { memory: (SCENARIO, PER_BYTE), ..target("scenario", cluster::scenario) },
];

impl Target {
    #[must_use]
    pub fn find(name: &str) -> Option<Self> {
        TARGETS.into_iter().find(|target| target.name == name)
    }

    /// The most memory that an input of `len` bytes may claim.
    #[must_use]
    pub fn max_memory(&self, len: usize) -> usize {
        let (any, per_byte) = self.memory;
        any + len * per_byte
    }

    /// The folder of its corpus.
    #[must_use]
    pub fn corpus(&self) -> PathBuf {
        PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("corpus").join(self.name)
    }
}
