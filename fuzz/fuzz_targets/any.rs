// SPDX-License-Identifier: Apache-2.0
//! Runs the target that `FUZZ_TARGET` names under libFuzzer.
#![no_main]

use std::sync::LazyLock;

use edl_fuzz::Target;

static TARGET: LazyLock<Target> = LazyLock::new(|| {
    let name = std::env::var("FUZZ_TARGET").expect("FUZZ_TARGET names a target");
    Target::find(&name).expect("a target of edl-fuzz")
});

/// As in every Rust program: a write to a closed socket is an error, and does not end the process.
fn ignore_broken_pipes() {
    // SAFETY: no handler runs, and no other thread has started.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
}

libfuzzer_sys::fuzz_target!(init: ignore_broken_pipes(), |bytes: &[u8]| (TARGET.run)(bytes));
