// SPDX-License-Identifier: Apache-2.0
//! Writes `src/generated` from `proto`, without a system `protoc`.

use std::error::Error;
use std::fs;
use std::path::Path;

/// Enums of messages and the enums of edl-core that they are.
const ENUMS: [(&str, &str); 10] = [
    ("JobState", "::edl_core::job::JobState"),
    ("EventKind", "::edl_core::job::EventKind"),
    ("InstanceState", "::edl_core::platform::InstanceState"),
    ("WaitingFor", "::edl_core::activity::WaitingFor"),
    ("Role", "::edl_core::platform::Role"),
    ("ChaosKind", "::edl_core::platform::ChaosKind"),
    ("JobType", "::edl_core::spec::JobType"),
    ("Strategy", "::edl_core::spec::Strategy"),
    ("TimeKind", "::edl_core::goodput::TimeKind"),
    ("MetricKind", "::edl_core::metric::MetricKind"),
];
/// Fields that are numbers in messages and names in JSON.
const ENUM_FIELDS: [(&str, &str); 11] = [
    ("JobStatus.state", "::edl_core::job::JobState"),
    ("Event.kind", "::edl_core::job::EventKind"),
    ("Instance.state", "::edl_core::platform::InstanceState"),
    ("Heartbeat.waiting_for", "::edl_core::activity::WaitingFor"),
    ("Instance.role", "::edl_core::platform::Role"),
    ("ChaosRequest.role", "::edl_core::platform::Role"),
    ("ChaosRequest.how", "::edl_core::platform::ChaosKind"),
    ("JobStatus.job_type", "::edl_core::spec::JobType"),
    ("JobStatus.distribution_strategy", "::edl_core::spec::Strategy"),
    ("Spending.last", "::edl_core::goodput::TimeKind"),
    ("Sums.kind", "::edl_core::metric::MetricKind"),
];
/// Fields whose values need not be finite, and how they are read from JSON.
const NONFINITE_FIELDS: [(&str, &str); 3] =
    [("JobStatus.loss", "number"), ("Evaluation.metrics", "map"), ("LoggedMetric.value", "number")];
/// Fields that a status which was written before does not have.
const NEW_FIELDS: [&str; 1] = ["JobStatus.logged"];

fn main() -> Result<(), Box<dyn Error>> {
    let mut serde = tonic_prost_build::configure()
        .type_attribute(".", "#[derive(serde::Serialize, serde::Deserialize)]");
    for (name, path) in ENUMS {
        serde = serde.extern_path(format!(".elasticdl.v1.{name}"), path);
    }
    for (field, path) in ENUM_FIELDS {
        let by_name = format!("#[serde(with = \"crate::ByName::<{path}>\")]");
        serde = serde.field_attribute(field, by_name);
    }
    for (field, reader) in NONFINITE_FIELDS {
        let read = format!("#[serde(deserialize_with = \"::edl_core::nonfinite::{reader}\")]");
        serde = serde.field_attribute(field, read);
    }
    for field in NEW_FIELDS {
        serde = serde.field_attribute(field, "#[serde(default)]");
    }
    generate("elasticdl/v1/master.proto", "elasticdl.v1.rs", serde)?;
    // Collectors of spans define this protocol.
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
