// SPDX-License-Identifier: Apache-2.0
//! The `elasticdl` binary.

use std::process::ExitCode;

fn main() -> ExitCode {
    let host = elasticdl::Host::binary(edl_commit::commit!());
    ExitCode::from(elasticdl::main(std::env::args_os().collect(), host))
}
