// SPDX-License-Identifier: Apache-2.0
//! RecordIO: files of other implementations, round trips, and damaged files.
#![expect(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::path::{Path, PathBuf};

use edl_core::model::{DType, FieldSpec};
use edl_data::recordio::{Compressor, Writer, WriterOptions, encode, parse};
use edl_data::{Codec, Dataset, OpenOptions};
use proptest::prelude::*;
use sha2::{Digest as _, Sha256};

const COMPRESSORS: [Compressor; 3] = [Compressor::None, Compressor::Snappy, Compressor::Gzip];

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// The records of `fixtures/make.py`.
fn fixture_records() -> Vec<Vec<Vec<u8>>> {
    vec![
        vec![vec![], b"hello".to_vec(), (0..=255).collect()],
        vec![b"world".repeat(40)],
        vec![vec![], vec![]],
    ]
}

fn records(bytes: &[u8]) -> Vec<Vec<u8>> {
    let chunks = parse(bytes).unwrap();
    chunks.iter().flat_map(|chunk| chunk.iter().map(<[u8]>::to_vec).collect::<Vec<_>>()).collect()
}

fn bytes_codec() -> OpenOptions {
    OpenOptions { codec: Codec::Bytes, ..OpenOptions::default() }
}

fn open_bytes(path: &Path) -> Result<Dataset, edl_data::Error> {
    Dataset::open(path.to_str().unwrap(), &bytes_codec())
}

fn whole_record() -> [FieldSpec; 1] {
    [FieldSpec { name: "record".into(), dtype: DType::Bytes, shape: vec![], is_label: false }]
}

/// All records through the index.
fn read_all(dataset: &Dataset) -> Result<Vec<Vec<u8>>, edl_data::Error> {
    let numbers: Vec<u64> = (0..dataset.n_records()).collect();
    let batch = dataset.batch(&numbers, &whole_record())?;
    Ok(batch.bytes("record").unwrap().to_vec())
}

fn write(records: &[Vec<u8>], options: WriterOptions) -> Vec<u8> {
    let mut writer = Writer::new(Vec::new(), options);
    for record in records {
        writer.write(record.clone()).unwrap();
    }
    writer.finish().unwrap()
}

/// Writes a new file: overwriting in place would wait for the disk on some file systems.
fn replace(path: &Path, bytes: &[u8]) {
    drop(std::fs::remove_file(path));
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn files_of_another_implementation_are_read() {
    let expected: Vec<Vec<u8>> = fixture_records().concat();
    for name in ["none.rio", "snappy.rio", "gzip.rio"] {
        let bytes = std::fs::read(fixture(name)).unwrap();
        assert_eq!(records(&bytes), expected, "{name}");
        let dataset = open_bytes(&fixture(name)).unwrap();
        assert_eq!(dataset.n_records(), 6);
        assert_eq!(read_all(&dataset).unwrap(), expected, "{name}");
    }
}

#[test]
fn the_writer_writes_the_same_bytes_as_another_implementation() {
    let expected = std::fs::read(fixture("none.rio")).unwrap();
    let chunks = fixture_records();
    let encoded = chunks.iter().flat_map(|chunk| encode(chunk, Compressor::None).unwrap());
    assert_eq!(encoded.collect::<Vec<u8>>(), expected);
}

#[test]
fn files_of_the_original_library_are_read_and_rewritten_byte_by_byte() {
    let original = fixture("original");
    let expected = std::fs::read(original.join("expected.json")).unwrap();
    let expected: serde_json::Value = serde_json::from_slice(&expected).unwrap();
    for (name, expected) in expected.as_object().unwrap() {
        let path = original.join(name);
        let dataset = open_bytes(&path).unwrap();
        let found = read_all(&dataset).unwrap();
        let found: Vec<(u64, String)> = found
            .iter()
            .map(|record| {
                let hash = Sha256::digest(record);
                let hex: String = hash.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
                (record.len() as u64, hex)
            })
            .collect();
        let expected: Vec<(u64, String)> = expected
            .as_array()
            .unwrap()
            .iter()
            .map(|one| (one["len"].as_u64().unwrap(), one["sha256_16"].as_str().unwrap().into()))
            .collect();
        assert_eq!(found, expected, "{name}");

        let bytes = std::fs::read(&path).unwrap();
        let chunks = parse(&bytes).unwrap();
        if name == "none.rio" {
            assert!(chunks.len() > 1, "the file has several chunks");
            let again = chunks.iter().flat_map(|chunk| {
                encode(&chunk.iter().collect::<Vec<_>>(), Compressor::None).unwrap()
            });
            assert_eq!(again.collect::<Vec<u8>>(), bytes);
        }
    }
}

#[test]
fn a_chunk_of_empty_records_is_not_refused_as_a_bomb() {
    for compressor in COMPRESSORS {
        let empty = vec![Vec::new(); 300_000];
        let bytes = write(&empty, WriterOptions { compressor, max_chunk_bytes: 1 });
        assert_eq!(parse(&bytes).unwrap()[0].len(), 300_000, "{compressor:?}");
    }
}

#[test]
fn any_flipped_bit_is_an_error_and_never_gives_wrong_data() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("damaged.recordio");
    for compressor in COMPRESSORS {
        let intact: Vec<Vec<u8>> = (0..9_u8).map(|i| vec![i; usize::from(i) * 3]).collect();
        let bytes = write(&intact, WriterOptions { compressor, max_chunk_bytes: 40 });
        assert!(parse(&bytes).unwrap().len() > 2);
        for place in 0..bytes.len() {
            for bit in [1, 0x80] {
                let mut damaged = bytes.clone();
                damaged[place] ^= bit;
                assert!(parse(&damaged).is_err(), "{compressor:?}: byte {place}, bit {bit:#x}");
            }
            let mut damaged = bytes.clone();
            damaged[place] = !damaged[place];
            replace(&path, &damaged);
            let read = open_bytes(&path).and_then(|dataset| read_all(&dataset));
            let error = read.expect_err("damage must be detected").to_string();
            assert!(error.contains("damaged.recordio`"), "{error}");
        }
    }
}

#[test]
fn a_file_truncated_inside_a_chunk_is_refused_by_chunk() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("short.recordio");
    let intact: Vec<Vec<u8>> = (0..9_u8).map(|i| vec![i; 20]).collect();
    let bytes = write(&intact, WriterOptions { compressor: Compressor::Gzip, max_chunk_bytes: 60 });
    let chunk = bytes.len() / 3;
    for len in 1..bytes.len() {
        replace(&path, &bytes[..len]);
        match open_bytes(&path) {
            Ok(dataset) => {
                let n = usize::try_from(dataset.n_records()).unwrap();
                assert_eq!(read_all(&dataset).unwrap(), intact[..n]);
                assert!(n == 3 || n == 6, "{len} bytes do not end between chunks");
            }
            Err(error) => {
                let error = error.to_string();
                assert!(error.contains("truncated"), "{error}");
                // The chunks have similar lengths; near a boundary, either number is correct.
                let number = len / chunk;
                let named = |n: usize| error.contains(&format!("chunk {n}"));
                assert!(named(number) || named(number.saturating_sub(1)) || named(number + 1));
            }
        }
    }
}

#[test]
fn an_error_names_file_and_chunk() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("bad.recordio");
    let intact: Vec<Vec<u8>> = (0..4_u8).map(|i| vec![i; 20]).collect();
    let mut bytes =
        write(&intact, WriterOptions { compressor: Compressor::None, max_chunk_bytes: 40 });
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let dataset = open_bytes(&path).unwrap();
    assert!(dataset.batch(&[0, 1], &whole_record()).is_ok(), "the first chunk is intact");
    let error = dataset.batch(&[3], &whole_record()).unwrap_err().to_string();
    assert!(error.contains("bad.recordio`, chunk 1: corrupt chunk: its checksum is"), "{error}");
    assert!(dataset.locate(3).ends_with("bad.recordio`, chunk 1, record 1"));
}

#[test]
fn a_file_that_changes_under_an_open_data_set_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("moving.recordio");
    let options = WriterOptions { compressor: Compressor::None, max_chunk_bytes: 40 };
    std::fs::write(&path, write(&[vec![1; 20], vec![2; 20]], options)).unwrap();
    let dataset = open_bytes(&path).unwrap();
    std::fs::write(&path, write(&[vec![1; 20], vec![3; 20]], options)).unwrap();
    let error = dataset.batch(&[1], &whole_record()).unwrap_err().to_string();
    assert!(error.contains("has changed since"), "{error}");
}

proptest! {
    #[test]
    fn written_records_are_read_back(
        records in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..200), 0..40),
        max_chunk_bytes in 0..1000_usize,
        compressor in prop::sample::select(&COMPRESSORS[..]),
    ) {
        let bytes = write(&records, WriterOptions { compressor, max_chunk_bytes });
        prop_assert_eq!(self::records(&bytes), records);
        // The same rule as the original: a chunk is closed before it would grow too large.
        for chunk in parse(&bytes).unwrap() {
            let size: usize = chunk.iter().map(<[u8]>::len).sum();
            prop_assert!(size <= max_chunk_bytes || chunk.iter().filter(|r| !r.is_empty()).count() == 1);
        }
    }

    #[test]
    fn records_are_returned_in_the_requested_order(
        order in prop::collection::vec(0..60_u64, 0..80),
        max_chunk_bytes in 1..100_usize,
        cache_mb in 0..2_u32,
    ) {
        let dir = tempfile::tempdir().unwrap();
        for (name, start) in [("a.recordio", 0..25_u8), ("b.recordio", 25..26), ("c.recordio", 26..60)] {
            let records: Vec<Vec<u8>> = start.map(|i| vec![i; 7]).collect();
            let options = WriterOptions { compressor: Compressor::Snappy, max_chunk_bytes };
            std::fs::write(dir.path().join(name), write(&records, options)).unwrap();
        }
        let mut options = bytes_codec();
        options.params.insert("cache_mb".into(), cache_mb.to_string());
        let dataset = Dataset::open(dir.path().to_str().unwrap(), &options).unwrap();
        prop_assert_eq!(dataset.n_records(), 60);
        let batch = dataset.batch(&order, &whole_record()).unwrap();
        let expected: Vec<Vec<u8>> =
            order.iter().map(|i| vec![u8::try_from(*i).unwrap(); 7]).collect();
        prop_assert_eq!(batch.bytes("record").unwrap(), &expected);
        prop_assert_eq!(batch.records, order);
    }
}
