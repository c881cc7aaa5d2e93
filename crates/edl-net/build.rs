// SPDX-License-Identifier: Apache-2.0
//! Compiles the protos without a system `protoc`.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let files = protox::compile(["elasticdl/v1/master.proto"], ["proto"])?;
    tonic_prost_build::configure()
        .type_attribute(".", "#[derive(serde::Serialize, serde::Deserialize)]")
        .compile_fds(files)?;
    // Spans go to collectors of others, which have words of their own.
    let files = protox::compile(["opentelemetry/trace.proto"], ["proto"])?;
    tonic_prost_build::configure().compile_fds(files)?;
    println!("cargo::rerun-if-changed=proto");
    Ok(())
}
