// SPDX-License-Identifier: Apache-2.0
//! Runs the target that `FUZZ_TARGET` names under libFuzzer.
#![no_main]

use std::panic::{set_hook, take_hook};
use std::sync::LazyLock;

use edl_fuzz::Target;

static TARGET: LazyLock<Target> = LazyLock::new(|| {
    let name = std::env::var("FUZZ_TARGET").expect("FUZZ_TARGET names a target");
    Target::find(&name).expect("a target of edl-fuzz")
});

/// The Parquet library panics on some broken files; `edl-data` catches that and refuses the file. A
/// panic that nothing catches still ends the process.
const CAUGHT: &str = "/parquet-";

fn prepare() {
    // As in every Rust program: a write to a closed socket is an error, and does not end the process.
    // SAFETY: no handler runs, and no other thread has started.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
    let end_process = take_hook();
    set_hook(Box::new(move |panic| {
        if panic.location().is_none_or(|place| !place.file().contains(CAUGHT)) {
            end_process(panic);
        }
    }));
}

libfuzzer_sys::fuzz_target!(init: prepare(), |bytes: &[u8]| (TARGET.run)(bytes));
