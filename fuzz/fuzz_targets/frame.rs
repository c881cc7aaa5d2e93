// SPDX-License-Identifier: Apache-2.0
//! Hostile frames of the data plane.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    edl_net::fuzz::frame(bytes);
});
