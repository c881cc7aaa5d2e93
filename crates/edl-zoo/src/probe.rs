// SPDX-License-Identifier: Apache-2.0
//! Which instruction set the engine uses on this machine.

/// The widest instruction set that the engine's kernels pick at run time, for logs. Machines with the
/// same answer compute the same results.
#[must_use]
pub fn instruction_set() -> &'static str {
    #[cfg(target_arch = "x86_64")]
    return match (is_x86_feature_detected!("avx512f"), is_x86_feature_detected!("fma")) {
        (true, _) => "avx512",
        (false, true) => "avx2",
        (false, false) => "sse2",
    };
    #[cfg(not(target_arch = "x86_64"))]
    if cfg!(target_arch = "aarch64") { "neon" } else { "scalar" }
}
