// SPDX-License-Identifier: Apache-2.0
//! Entry points for fuzzers: bytes from anywhere must never panic or cost much memory.

use edl_core::applied::AppliedSet;

use crate::checkpoint::{Manifest, codec};
use crate::import;

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

/// Reads a line as the `model.json` of an exported model, and the rest as its `model.safetensors`.
pub fn exported_model(bytes: &[u8]) {
    let end = bytes.iter().position(|byte| *byte == b'\n').unwrap_or(bytes.len());
    let (card, weights) = bytes.split_at(end);
    let _ = import::parse(card, weights.get(1..).unwrap_or_default());
}
