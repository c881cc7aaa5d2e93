// SPDX-License-Identifier: Apache-2.0
//! The `elasticdl` command as a binary of its own.

use std::process::ExitCode;

fn main() -> ExitCode {
    ExitCode::from(elasticdl::main(std::env::args_os().collect(), elasticdl::Host::binary()))
}
