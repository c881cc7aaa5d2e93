// SPDX-License-Identifier: Apache-2.0
//! Makes the subset of Fashion-MNIST that the repository ships, in the order of the original.
//!
//! `cargo run -p edl-data --example ship_fashion_mnist -- DIR`, with Debian's package
//! `dataset-fashion-mnist` installed.

use std::io::Write as _;
use std::path::PathBuf;

use edl_data::generate::{GenerateOptions, fashion_mnist};
use edl_data::import::ImportOptions;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let dir: PathBuf = std::env::args_os().nth(1).ok_or("name the folder to write to")?.into();
    let part = |limit, files| ImportOptions { limit: Some(limit), files, ..Default::default() };
    let options = GenerateOptions { source: None, train: part(10_000, 4), test: part(2_000, 2) };
    for written in fashion_mnist(&dir, &options)? {
        writeln!(
            std::io::stdout(),
            "{}: {} records, {} bytes",
            written.folder,
            written.records,
            written.bytes
        )?;
    }
    Ok(())
}
