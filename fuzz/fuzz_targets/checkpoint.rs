// SPDX-License-Identifier: Apache-2.0
//! Hostile files of a checkpoint.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    edl_tensor::fuzz::partition_file(bytes);
});
