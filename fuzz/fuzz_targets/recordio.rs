// SPDX-License-Identifier: Apache-2.0
//! Hostile RecordIO files.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    edl_data::fuzz::recordio(bytes);
});
