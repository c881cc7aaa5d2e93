// SPDX-License-Identifier: Apache-2.0
//! The code of the protos is that of the protos as they are.

use std::fs;
use std::path::Path;

#[test]
fn the_code_of_a_proto_is_written_again_when_the_proto_changes() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for (proto, code) in [
        ("elasticdl/v1/master.proto", "elasticdl.v1.rs"),
        ("opentelemetry/trace.proto", "opentelemetry.proto.collector.trace.v1.rs"),
    ] {
        let hash = blake3::hash(&fs::read(root.join("proto").join(proto)).unwrap());
        let code = fs::read_to_string(root.join("src/generated").join(code)).unwrap();
        let expected = format!("//! Written by `make proto` from {proto}, BLAKE3 {hash}");
        assert_eq!(code.lines().nth(1), Some(expected.as_str()), "run `make proto`");
    }
}
