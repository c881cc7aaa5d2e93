// SPDX-License-Identifier: Apache-2.0
//! The `elasticdl` binary.

use std::process::ExitCode;

fn main() -> ExitCode {
    ExitCode::from(elasticdl::main(std::env::args_os().collect(), elasticdl::Host::binary()))
}
