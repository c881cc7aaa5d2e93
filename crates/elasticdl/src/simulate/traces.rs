// SPDX-License-Identifier: Apache-2.0
//! Traces as the scenarios read them: the text of every CSV file below a folder.

use std::io;
use std::path::Path;

use edl_sched::sim::adaptdl::Files;

/// All CSV files of a folder and those below it, by their path from there.
pub(super) fn read(folder: &Path) -> io::Result<Files> {
    let mut files = Files::new();
    let mut open = vec![folder.to_owned()];
    while let Some(path) = open.pop() {
        for entry in std::fs::read_dir(&path)? {
            let path = entry?.path();
            if path.is_dir() {
                open.push(path);
            } else if path.extension().is_some_and(|extension| extension == "csv") {
                let name = path.strip_prefix(folder).unwrap_or(&path).display().to_string();
                files.insert(name, std::fs::read_to_string(&path)?);
            }
        }
    }
    Ok(files)
}
