// SPDX-License-Identifier: Apache-2.0
//! Generated code is up to date with its protos.

use std::fs;
use std::path::Path;

use edl_core::activity::WaitingFor;
use edl_core::job::{EventKind, JobState};
use edl_core::platform::{ChaosKind, InstanceState};

#[test]
fn generated_code_matches_its_proto() {
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

#[test]
fn proto_enums_have_the_values_of_edl_core_in_the_same_order() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let proto = fs::read_to_string(root.join("proto/elasticdl/v1/master.proto")).unwrap();
    let check = |name: &str, values: Vec<String>| {
        let (_, body) = proto.split_once(&format!("\nenum {name} {{\n")).unwrap();
        let declared = body.split('}').next().unwrap().lines().map(str::trim);
        let to_upper_snake = |text: &str| {
            let mut upper = String::new();
            for c in text.chars() {
                if c.is_uppercase() && !upper.is_empty() {
                    upper.push('_');
                }
                upper.extend(c.to_uppercase());
            }
            upper
        };
        let expected = values.iter().enumerate();
        let expected = expected
            .map(|(n, value)| format!("{}_{} = {n};", to_upper_snake(name), to_upper_snake(value)));
        assert_eq!(declared.collect::<Vec<_>>(), expected.collect::<Vec<_>>());
    };
    fn names<T: std::fmt::Debug>(values: &[T]) -> Vec<String> {
        values.iter().map(|value| format!("{value:?}")).collect()
    }
    check("JobState", names(&JobState::ALL));
    check("EventKind", names(&EventKind::ALL));
    check("InstanceState", names(&InstanceState::ALL));
    check("WaitingFor", names(&WaitingFor::ALL));
    check("ChaosKind", names(&ChaosKind::ALL));
}
