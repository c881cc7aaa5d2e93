// SPDX-License-Identifier: Apache-2.0
//! Entry points for fuzzers: bytes from anywhere must never panic or cost much memory.

use edl_core::applied::AppliedSet;

use crate::checkpoint::{Manifest, codec};

/// Reads bytes as a partition's file. The checksum is not checked, because no fuzzer can guess it
/// and the code after the check would never run.
pub fn partition_file(bytes: &[u8]) {
    if let Ok((snapshot, _, _)) = codec::parse(&mut &*bytes) {
        let held = snapshot.n_bytes();
        assert!(held <= bytes.len() as u64, "{held} bytes out of {}", bytes.len());
        let _ = AppliedSet::from_bytes(&snapshot.applied, None);
    }
}

/// Reads bytes as a manifest.
pub fn manifest(bytes: &[u8]) {
    let _ = Manifest::parse(bytes);
}
