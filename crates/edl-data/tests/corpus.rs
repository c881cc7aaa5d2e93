// SPDX-License-Identifier: Apache-2.0
//! Runs the corpora of the fuzz targets, and random bytes beside them: nothing may panic.
#![expect(clippy::unwrap_used, reason = "helpers of tests may fail, too")]

use std::path::Path;

use edl_data::example::Example;
use edl_data::fuzz;
use proptest::prelude::*;

fn corpus(name: &str) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus").join(name);
    let files = std::fs::read_dir(folder).unwrap();
    let inputs: Vec<Vec<u8>> =
        files.map(|file| std::fs::read(file.unwrap().path()).unwrap()).collect();
    assert!(!inputs.is_empty(), "the corpus `{name}` is empty");
    inputs
}

/// Changes some bytes, so most checks are passed and the later ones are reached.
fn damage(mut bytes: Vec<u8>, changes: &[(usize, u8)], cut: usize) -> Vec<u8> {
    let len = bytes.len();
    for (place, byte) in changes {
        if len > 0 {
            bytes[place % len] = *byte;
        }
    }
    bytes.truncate(len.saturating_sub(cut));
    bytes
}

#[test]
fn the_recordio_corpus_runs() {
    corpus("recordio").iter().for_each(|input| fuzz::recordio(input));
}

#[test]
fn the_example_corpus_runs() {
    corpus("example").iter().for_each(|input| fuzz::example(input));
}

proptest! {
    #[test]
    fn any_bytes_can_be_read_as_anything(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        fuzz::recordio(&bytes);
        fuzz::example(&bytes);
        fuzz::tfrecord(&bytes);
        drop(edl_data::idx::Idx::parse(&bytes));
    }

    #[test]
    fn damaged_seeds_can_be_read(
        seed in any::<prop::sample::Index>(),
        changes in prop::collection::vec((any::<usize>(), any::<u8>()), 0..6),
        cut in 0..30_usize,
        fix_checksum: bool,
    ) {
        let seeds = corpus("recordio");
        let mut bytes = damage(seeds[seed.index(seeds.len())].clone(), &changes, cut);
        if fix_checksum && bytes.len() > 20 {
            // Past the checksum lies code that the checksum would hide from a fuzzer.
            let checksum = crc32(&bytes[20..]);
            bytes[4..8].copy_from_slice(&checksum.to_le_bytes());
            let len = u32::try_from(bytes.len() - 20).unwrap();
            bytes[12..16].copy_from_slice(&len.to_le_bytes());
        }
        fuzz::recordio(&bytes);
        let seeds = corpus("example");
        fuzz::example(&damage(seeds[seed.index(seeds.len())].clone(), &changes, cut));
    }

    #[test]
    fn an_example_survives_being_written(
        name in "[a-z]{0,8}",
        ints in prop::collection::vec(any::<i64>(), 0..20),
        floats in prop::collection::vec(any::<f32>(), 0..20),
        bytes in prop::collection::vec(any::<u8>(), 0..200),
    ) {
        let example = Example::new()
            .ints(&format!("{name}i"), ints)
            .floats(&format!("{name}f"), floats)
            .bytes(&format!("{name}b"), bytes);
        let again = Example::parse(example.to_bytes()).unwrap();
        prop_assert_eq!(again.to_bytes(), example.to_bytes());
    }
}

/// Written out here so the test does not share the checksum of what it tests.
fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc: u32, _| {
            if crc & 1 == 1 { (crc >> 1) ^ 0xedb8_8320 } else { crc >> 1 }
        })
    })
}
