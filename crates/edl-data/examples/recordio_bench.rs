// SPDX-License-Identifier: Apache-2.0
//! Reading records of a RecordIO file against reading the file's bytes.

#![allow(
    clippy::print_stdout,
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    reason = "a program that prints speeds"
)]

use std::collections::BTreeMap;
use std::hint::black_box;
use std::time::Instant;

use edl_core::model::{DType, FieldSpec};
use edl_data::recordio::{Compressor, Writer, WriterOptions};
use edl_data::{Codec, Dataset, OpenOptions};

const N_RECORDS: u64 = 50_000;
const RECORD_BYTES: usize = 784;
const BATCH: usize = 512;
const ROUNDS: usize = 5;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let folder = tempfile::tempdir()?;
    for compressor in [Compressor::None, Compressor::Snappy, Compressor::Gzip] {
        let path = folder.path().join(format!("{compressor:?}.recordio"));
        let options = WriterOptions { compressor, ..WriterOptions::default() };
        let mut writer = Writer::new(std::fs::File::create(&path)?, options);
        for number in 0..N_RECORDS {
            // Half noise, half runs: images are like that.
            let record: Vec<u8> = (0..RECORD_BYTES)
                .map(|place| {
                    if place % 2 == 0 { 0 } else { ((number * 31 + place as u64 * 7) % 251) as u8 }
                })
                .collect();
            writer.write(record)?;
        }
        writer.finish()?;
        let open = OpenOptions { codec: Codec::Bytes, params: BTreeMap::new() };
        let field = FieldSpec {
            name: "record".into(),
            dtype: DType::Bytes,
            shape: Vec::new(),
            is_label: false,
        };
        let fields = [field];
        let (mut reads, mut bytes) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            let start = Instant::now();
            // Reopened, so nothing from the previous round is in memory.
            let dataset = Dataset::open(&path.to_string_lossy(), &open)?;
            for first in (0..dataset.n_records()).step_by(BATCH) {
                let last = dataset.n_records().min(first + BATCH as u64);
                let records: Vec<u64> = (first..last).collect();
                black_box(dataset.batch(&records, &fields)?);
            }
            reads.push(start.elapsed().as_secs_f64());
            let start = Instant::now();
            black_box(std::fs::read(&path)?);
            bytes.push(start.elapsed().as_secs_f64());
        }
        let (read, raw) = (median(reads), median(bytes));
        println!(
            "RecordIO {compressor:?}: {:.2} M records/s of {RECORD_BYTES} bytes, {:.2} GB/s of records; \
             the file's bytes alone take {:.0} % of that time",
            N_RECORDS as f64 / read / 1e6,
            N_RECORDS as f64 * RECORD_BYTES as f64 / read / 1e9,
            100.0 * raw / read
        );
    }
    Ok(())
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
