// SPDX-License-Identifier: Apache-2.0
//! Writes `src/generated` from `proto`, without a system `protoc`.

use std::error::Error;
use std::fs;
use std::path::Path;

fn main() -> Result<(), Box<dyn Error>> {
    let serde = tonic_prost_build::configure()
        .type_attribute(".", "#[derive(serde::Serialize, serde::Deserialize)]");
    generate("elasticdl/v1/master.proto", "elasticdl.v1.rs", serde)?;
    // Spans go to collectors of others, which have words of their own.
    let plain = tonic_prost_build::configure();
    generate("opentelemetry/trace.proto", "opentelemetry.proto.collector.trace.v1.rs", plain)
}

/// Writes the code of one proto. Its first lines name the proto and its hash, by which a test of
/// edl-net sees that a proto has changed since.
fn generate(
    proto: &str,
    output: &str,
    builder: tonic_prost_build::Builder,
) -> Result<(), Box<dyn Error>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().ok_or("there is a folder above")?;
    let folder = root.join("src/generated");
    let files = protox::compile([proto], [root.join("proto")])?;
    builder.out_dir(&folder).compile_fds(files)?;
    let hash = blake3::hash(&fs::read(root.join("proto").join(proto))?);
    let code = fs::read_to_string(folder.join(output))?;
    let head = "// SPDX-License-Identifier: Apache-2.0\n//! Written by `make proto`";
    fs::write(folder.join(output), format!("{head} from {proto}, BLAKE3 {hash}\n{code}"))?;
    Ok(())
}
