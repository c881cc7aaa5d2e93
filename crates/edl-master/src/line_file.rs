// SPDX-License-Identifier: Apache-2.0
//! A file of lines that others read: only whole lines, and of bounded size.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::path::PathBuf;

/// A file that would grow beyond this is moved to `NAME.1`, which replaces the previous one.
pub const MAX_BYTES: u64 = 64 << 20;

/// A file that lines are added to.
pub struct LineFile {
    path: PathBuf,
    max_bytes: u64,
    open: Option<(File, u64)>,
}

impl LineFile {
    #[must_use]
    pub fn new(path: PathBuf, max_bytes: u64) -> Self {
        Self { path, max_bytes, open: None }
    }

    /// Adds a line. A line that does not fit on the disk is left out completely.
    pub fn add(&mut self, line: &str) -> io::Result<()> {
        let line = format!("{line}\n");
        let n_new = line.len() as u64;
        if self.open.as_ref().is_some_and(|(_, n_bytes)| n_bytes + n_new > self.max_bytes) {
            let mut before = self.path.clone().into_os_string();
            before.push(".1");
            fs::rename(&self.path, before)?;
            self.open = None;
        }
        let (file, n_bytes) = match &mut self.open {
            Some(open) => open,
            closed @ None => {
                let file = OpenOptions::new().create(true).append(true).open(&self.path)?;
                let n_bytes = file.metadata()?.len();
                closed.insert((file, n_bytes))
            }
        };
        if let Err(error) = file.write_all(line.as_bytes()) {
            file.set_len(*n_bytes)?;
            return Err(error);
        }
        *n_bytes += n_new;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_keeps_its_last_lines_and_those_before_and_no_more() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("events.jsonl");
        fs::write(&path, "old\n").unwrap();
        let mut file = LineFile::new(path, 8);
        let read = |name: &str| fs::read_to_string(folder.path().join(name)).unwrap_or_default();
        file.add("aaa").unwrap();
        assert_eq!(
            (read("events.jsonl"), read("events.jsonl.1")),
            ("old\naaa\n".into(), "".into())
        );
        for line in ["bbb", "ccc", "ddd"] {
            file.add(line).unwrap();
        }
        assert_eq!(read("events.jsonl"), "ddd\n");
        assert_eq!(read("events.jsonl.1"), "bbb\nccc\n");
        file.add("longer than all").unwrap();
        assert_eq!(read("events.jsonl"), "longer than all\n");
    }

    #[test]
    fn a_file_that_cannot_be_opened_is_tried_again() {
        let folder = tempfile::tempdir().unwrap();
        let mut file = LineFile::new(folder.path().join("below/events.jsonl"), 100);
        assert!(file.add("lost").is_err());
        fs::create_dir(folder.path().join("below")).unwrap();
        file.add("kept").unwrap();
        let text = fs::read_to_string(folder.path().join("below/events.jsonl")).unwrap();
        assert_eq!(text, "kept\n");
    }
}
