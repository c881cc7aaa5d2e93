// SPDX-License-Identifier: Apache-2.0
//! Which instruction set the engine uses on this machine.

/// The widest instruction set that the engine's kernels pick at run time, for logs. Two machines
/// that answer alike compute alike.
#[must_use]
pub fn instruction_set() -> &'static str {
    detect()
}

#[cfg(target_arch = "x86_64")]
fn detect() -> &'static str {
    if is_x86_feature_detected!("avx512f") {
        "avx512"
    } else if is_x86_feature_detected!("fma") {
        "avx2"
    } else {
        "sse2"
    }
}

#[cfg(target_arch = "aarch64")]
fn detect() -> &'static str {
    "neon"
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn detect() -> &'static str {
    "scalar"
}
