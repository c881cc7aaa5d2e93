// SPDX-License-Identifier: Apache-2.0
//! The commit that a program is built from, as a macro: only the crate that uses it is compiled
//! again after a commit. A build script would also affect the library and the tests of its package.

use std::fs;
use std::path::{Path, PathBuf};

use proc_macro::TokenStream;

/// The first twelve digits of the commit that is checked out, or `unknown` if there is no `.git`
/// folder, as in a build from an archive.
#[proc_macro]
pub fn commit(_: TokenStream) -> TokenStream {
    let manifest = PathBuf::from(std::env::var("CARGO_MANIFEST_DIR").unwrap_or_default());
    let git = manifest.join("../../.git");
    let commit = read(&git).unwrap_or_else(|| "unknown".into());
    // The compiler reports included files to cargo, which then knows when to compile again.
    let files = ["HEAD", "logs/HEAD"].map(|name| git.join(name));
    let included: String = files
        .iter()
        .filter(|file| file.exists())
        .map(|file| format!("const _: &[u8] = include_bytes!({:?});", file.display().to_string()))
        .collect();
    let source = format!("{{ {included} {commit:?} }}");
    source.parse().expect("it consists of string literals")
}

fn read(git: &Path) -> Option<String> {
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
