// SPDX-License-Identifier: Apache-2.0
//! Rules for the source tree: allowed dependencies between crates, and the header of every file.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The crates that each crate may depend on. Processes never depend on each other; only the zoo
/// uses the engine; the core depends on no other crate.
const DEPENDENCIES: [(&str, &[&str]); 18] = [
    ("edl-commit", &[]),
    ("edl-core", &[]),
    ("edl-image", &[]),
    ("edl-page", &[]),
    ("edl-sched", &["edl-core"]),
    ("edl-kube", &["edl-core"]),
    ("edl-operator", &["edl-core", "edl-kube", "edl-page", "edl-sched"]),
    ("edl-tensor", &["edl-core"]),
    ("edl-data", &["edl-core", "edl-tensor"]),
    ("edl-net", &["edl-core", "edl-tensor"]),
    ("edl-master", &["edl-core", "edl-data", "edl-net", "edl-page", "edl-tensor"]),
    ("edl-ps", &["edl-core", "edl-net", "edl-tensor"]),
    ("edl-worker", &["edl-core", "edl-data", "edl-net", "edl-tensor"]),
    ("edl-sim", &["edl-core", "edl-net", "edl-tensor"]),
    ("edl-zoo", &["edl-core", "edl-tensor"]),
    (
        "edl-fuzz",
        &[
            "edl-core",
            "edl-data",
            "edl-image",
            "edl-kube",
            "edl-master",
            "edl-net",
            "edl-operator",
            "edl-sched",
            "edl-tensor",
        ],
    ),
    (
        "edl-python",
        &["edl-commit", "edl-core", "edl-data", "edl-tensor", "edl-worker", "elasticdl"],
    ),
    (
        "elasticdl",
        &[
            "edl-commit",
            "edl-core",
            "edl-data",
            "edl-image",
            "edl-kube",
            "edl-master",
            "edl-net",
            "edl-operator",
            "edl-ps",
            "edl-sched",
            "edl-tensor",
            "edl-worker",
            "edl-zoo",
        ],
    ),
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

#[test]
fn dependencies_point_only_downwards() {
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--format-version=1", "--no-deps", "--offline"])
        .current_dir(root())
        .output()
        .expect("cargo runs");
    let metadata: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let allowed: BTreeMap<&str, &[&str]> = DEPENDENCIES.into_iter().collect();
    for package in metadata["packages"].as_array().expect("packages") {
        let name = package["name"].as_str().expect("a name");
        let may = allowed
            .get(name)
            .unwrap_or_else(|| panic!("crate `{name}` is missing in DEPENDENCIES"));
        for dependency in package["dependencies"].as_array().expect("dependencies") {
            let other = dependency["name"].as_str().expect("a name");
            let is_test = dependency["kind"] == "dev";
            assert!(
                is_test || !allowed.contains_key(other) || may.contains(&other),
                "`{name}` must not depend on `{other}`"
            );
            let is_engine = other.starts_with("gemm");
            assert!(!is_engine || name == "edl-zoo", "`{name}` must not use the engine");
        }
    }
}

#[test]
fn every_file_has_a_licence_and_a_description() {
    let mut n_files = 0;
    visit(&root().join("crates"), &mut |path, text| {
        n_files += 1;
        let mut lines = text.lines();
        let name = path.display();
        assert!(
            lines.next().is_some_and(|line| line.contains("SPDX-License-Identifier: Apache-2.0")),
            "{name}: run tests/licence.sh --fix"
        );
        assert!(
            lines.next().is_some_and(|line| line.starts_with("//!")),
            "{name}: describe the file with `//!`"
        );
        assert!(
            path.file_name().is_some_and(|name| name != "mod.rs"),
            "{name}: use foo.rs and foo/"
        );
    });
    assert!(n_files > 50, "source files not found");
}

fn visit(folder: &Path, check: &mut impl FnMut(&Path, &str)) {
    for entry in std::fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() && path.file_name().is_some_and(|name| name != "target") {
            visit(&path, check);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            check(&path, &std::fs::read_to_string(&path).expect("text"));
        }
    }
}
