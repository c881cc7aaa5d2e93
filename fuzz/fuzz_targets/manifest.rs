// SPDX-License-Identifier: Apache-2.0
//! Hostile manifests of checkpoints.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    edl_tensor::fuzz::manifest(bytes);
});
