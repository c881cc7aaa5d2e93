// SPDX-License-Identifier: Apache-2.0
//! Runs the fuzzers' corpora as ordinary tests.

use std::path::Path;

use edl_net::frame::PROTOCOL;

#[test]
fn no_frame_of_the_corpus_is_believed_or_breaks_the_reader() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus/frame");
    let mut n_files = 0;
    for entry in std::fs::read_dir(&folder).unwrap() {
        let path = entry.unwrap().path();
        let bytes = std::fs::read(&path).unwrap();
        println!("{}", path.display());
        // Also every beginning of it, as a peer that dies would leave it.
        (0..=bytes.len()).for_each(|end| edl_net::fuzz::frame(&bytes[..end]));
        let is_ours = bytes.get(4..6) == Some(&PROTOCOL.to_le_bytes());
        n_files += usize::from(is_ours);
    }
    assert!(n_files >= 12, "frames of this version of the protocol are there");
}

#[test]
fn every_single_byte_change_of_the_corpus_is_survived() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus/frame");
    for entry in std::fs::read_dir(&folder).unwrap() {
        let bytes = std::fs::read(entry.unwrap().path()).unwrap();
        for place in 0..bytes.len() {
            for change in [1, 0x80, 0xff] {
                let mut bytes = bytes.clone();
                bytes[place] ^= change;
                edl_net::fuzz::frame(&bytes);
            }
        }
    }
}
