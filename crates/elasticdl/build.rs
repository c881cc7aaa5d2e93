// SPDX-License-Identifier: Apache-2.0
//! Records in the binary which commit it was built from, by reading `.git`; `unknown` if there is
//! none, as in a build from an archive.

use std::fs;
use std::path::{Path, PathBuf};

fn main() {
    let manifest = PathBuf::from(std::env::var("CARGO_MANIFEST_DIR").unwrap_or_default());
    let git = manifest.join("../../.git");
    let commit = commit(&git).unwrap_or_else(|| "unknown".into());
    println!("cargo::rustc-env=ELASTICDL_COMMIT={commit}");
    println!("cargo::rerun-if-changed=build.rs");
    // Only what exists: cargo rebuilds forever over a file that is missing.
    for file in ["HEAD", "logs/HEAD"] {
        if git.join(file).exists() {
            println!("cargo::rerun-if-changed={}", git.join(file).display());
        }
    }
}

/// The first twelve digits of the commit that `HEAD` names.
fn commit(git: &Path) -> Option<String> {
    let head = fs::read_to_string(git.join("HEAD")).ok()?;
    let hash = match head.trim().strip_prefix("ref: ") {
        None => head.trim().to_owned(),
        Some(name) => match fs::read_to_string(git.join(name)) {
            Ok(hash) => hash.trim().to_owned(),
            Err(_) => packed(git, name)?,
        },
    };
    let is_hash = hash.len() >= 12 && hash.chars().all(|c| c.is_ascii_hexdigit());
    is_hash.then(|| hash[..12].to_owned())
}

fn packed(git: &Path, name: &str) -> Option<String> {
    let refs = fs::read_to_string(git.join("packed-refs")).ok()?;
    let line = refs.lines().find(|line| line.split_whitespace().nth(1) == Some(name))?;
    line.split_whitespace().next().map(str::to_owned)
}
