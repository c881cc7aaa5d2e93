// SPDX-License-Identifier: Apache-2.0
//! Files of records, as `--training_data` and `elasticdl data import` read them.

use std::io::Write as _;

use edl_data::example::Example;
use edl_data::idx::Idx;
use edl_data::{Codec, OpenOptions, head, inspect, recordio, tfrecord};
use tempfile::NamedTempFile;

/// Enough to visit every record of a small file.
const MAX_RECORDS: u64 = 1000;

/// Also with the checksums that the bytes need, because a mutation never hits a checksum.
pub(crate) fn recordio(bytes: &[u8]) {
    for bytes in [bytes.to_vec(), with_recordio_checksums(bytes)] {
        dataset("recordio", &bytes);
        let Ok(chunks) = recordio::parse(&bytes) else { continue };
        for chunk in chunks {
            let records: Vec<&[u8]> = chunk.iter().collect();
            let written = recordio::encode(&records, recordio::Compressor::None);
            let again = recordio::parse(&written.expect("it was small enough to read"));
            let again = again.expect("what was written can be read");
            assert!(again.first() == Some(&chunk) || chunk.is_empty(), "a chunk has changed");
        }
    }
}

pub(crate) fn tfrecord(bytes: &[u8]) {
    for bytes in [bytes.to_vec(), with_tfrecord_checksums(bytes)] {
        dataset("tfrecord", &bytes);
        let Ok(records) = tfrecord::parse(bytes) else { continue };
        let mut written = Vec::new();
        for record in records.iter() {
            tfrecord::write(&mut written, record).expect("memory can be written");
        }
        let again = tfrecord::parse(written).expect("what was written can be read");
        assert!(again.iter().eq(records.iter()), "a record has changed");
    }
}

pub(crate) fn example(bytes: &[u8]) {
    let Ok(example) = Example::parse(bytes.to_vec()) else { return };
    let again = Example::parse(example.to_bytes()).expect("what was written can be read");
    // Bytes are compared, not values: a NaN is not equal to itself.
    assert_eq!(again.to_bytes(), example.to_bytes(), "an example has changed");
}

pub(crate) fn parquet(bytes: &[u8]) {
    dataset("parquet", bytes);
}

pub(crate) fn csv(bytes: &[u8]) {
    dataset("csv", bytes);
}

pub(crate) fn jsonl(bytes: &[u8]) {
    dataset("jsonl", bytes);
}

pub(crate) fn idx(bytes: &[u8]) {
    drop(Idx::read(file(bytes).path()));
}

/// Indexes a file and reads its records.
fn dataset(format: &str, bytes: &[u8]) {
    let file = file(bytes);
    let path = file.path().to_string_lossy();
    for codec in [Codec::TfExample, Codec::Bytes] {
        let params = [("format".to_owned(), format.to_owned())].into();
        let options = OpenOptions { codec, params };
        if inspect(&path, &options).is_ok() {
            drop(head(&path, MAX_RECORDS, &options));
        }
    }
}

fn file(bytes: &[u8]) -> NamedTempFile {
    let mut file = NamedTempFile::new().expect("the folder for temporary files is writable");
    file.write_all(bytes).expect("there is room for a small file");
    file
}

fn with_recordio_checksums(bytes: &[u8]) -> Vec<u8> {
    let mut fixed = bytes.to_vec();
    let mut rest = fixed.as_mut_slice();
    while let Some((header, after)) = rest.split_first_chunk_mut::<{ recordio::HEADER_LEN }>() {
        let size = u32::from_le_bytes([header[12], header[13], header[14], header[15]]) as usize;
        let Some((body, next)) = after.split_at_mut_checked(size) else { break };
        header[4..8].copy_from_slice(&crc32fast::hash(body).to_le_bytes());
        rest = next;
    }
    fixed
}

fn with_tfrecord_checksums(bytes: &[u8]) -> Vec<u8> {
    let mut fixed = bytes.to_vec();
    let mut rest = fixed.as_mut_slice();
    while let Some((header, after)) = rest.split_first_chunk_mut::<12>() {
        let (len, check) = header.split_at_mut(8);
        check.copy_from_slice(&tfrecord::masked_crc(len).to_le_bytes());
        let Some(len) = len.first_chunk().map(|len| u64::from_le_bytes(*len)) else { break };
        let len = usize::try_from(len).unwrap_or(usize::MAX);
        let Some((record, after)) = after.split_at_mut_checked(len) else { break };
        let Some((check, next)) = after.split_first_chunk_mut::<4>() else { break };
        *check = tfrecord::masked_crc(record).to_le_bytes();
        rest = next;
    }
    fixed
}
