// SPDX-License-Identifier: Apache-2.0
//! Runs the target that `FUZZ_TARGET` names under libFuzzer.
#![no_main]

use std::sync::LazyLock;

use edl_fuzz::Target;

static TARGET: LazyLock<Target> = LazyLock::new(|| {
    let name = std::env::var("FUZZ_TARGET").expect("FUZZ_TARGET names a target");
    Target::find(&name).expect("a target of edl-fuzz")
});

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| (TARGET.run)(bytes));
