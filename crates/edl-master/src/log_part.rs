// SPDX-License-Identifier: Apache-2.0
//! A part of a process's log, for the page: whole lines of a range of bytes. A client names a
//! process, never a file, and an answer has a limited size.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// The longest part, in bytes.
const MAX_PART: u64 = 64 << 10;

/// Which part. Without `from` and `to`, it is the end of the log.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Wanted {
    process: String,
    /// The part begins here.
    from: Option<u64>,
    /// Or it ends here.
    to: Option<u64>,
}

#[derive(Debug, PartialEq, Serialize)]
pub(crate) struct Part {
    /// All processes that have a log.
    processes: Vec<String>,
    from: u64,
    to: u64,
    text: String,
}

impl Wanted {
    /// Reads the part; a process without a log has an empty one.
    pub(crate) fn read(&self, folder: &Path) -> io::Result<Part> {
        let logs = log_files(folder);
        let empty = || Ok((0, Vec::new()));
        let (from, bytes) = logs.get(&self.process).map_or_else(empty, |path| self.lines(path))?;
        let (to, text) = (from + bytes.len() as u64, String::from_utf8_lossy(&bytes).into_owned());
        Ok(Part { processes: logs.into_keys().collect(), from, to, text })
    }

    fn lines(&self, path: &Path) -> io::Result<(u64, Vec<u8>)> {
        let mut file = File::open(path)?;
        let size = file.metadata()?.len();
        // A log that is shorter than before was emptied.
        let forward = self.from.map(|from| if from > size { 0 } else { from });
        let end = self.to.unwrap_or(size).min(size);
        let start = forward.unwrap_or_else(|| end.saturating_sub(MAX_PART));
        let length = if forward.is_some() { MAX_PART } else { end - start };
        file.seek(SeekFrom::Start(start))?;
        let mut bytes = Vec::new();
        file.take(length).read_to_end(&mut bytes)?;
        let is_cut = bytes.len() as u64 == MAX_PART;
        let newline = |byte: &u8| *byte == b'\n';
        // A part that is full may have no end of a line; then it is as it is.
        let last = bytes.iter().rposition(newline).map_or(0, |at| at + 1);
        if last > 0 || !is_cut {
            bytes.truncate(last);
        }
        let mut from = start;
        if forward.is_none() && start > 0 {
            let first = bytes.iter().position(newline).map_or(0, |at| at + 1);
            // A line that fills the part is as it is.
            let first = if first == bytes.len() { 0 } else { first };
            bytes.drain(..first);
            from += first as u64;
        }
        Ok((from, bytes))
    }
}

/// Every log of the folder, by the name of its process.
#[must_use]
pub fn log_files(folder: &Path) -> BTreeMap<String, PathBuf> {
    let paths = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let logs = paths.filter(|path| path.extension().is_some_and(|extension| extension == "log"));
    logs.filter_map(|path| Some((path.file_stem()?.to_str()?.to_owned(), path))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted(process: &str, from: Option<u64>, to: Option<u64>) -> Wanted {
        Wanted { process: process.into(), from, to }
    }

    #[test]
    fn only_whole_lines_are_read_forward_and_backward_in_limited_parts() {
        let folder = tempfile::tempdir().unwrap();
        let line = |n: usize| format!("line {n} {}\n", "x".repeat(90));
        let text: String = (0..2000).map(line).collect();
        fs::write(folder.path().join("worker-0.log"), format!("{text}half")).unwrap();
        let read = |from, to| wanted("worker-0", from, to).read(folder.path()).unwrap();

        let end = read(None, None);
        assert_eq!(end.to, text.len() as u64, "half a line waits for its end");
        assert!(end.text.starts_with("line ") && end.text.ends_with(&line(1999)), "{end:?}");
        assert!(end.text.len() as u64 <= MAX_PART && end.text.len() > 60_000);
        let earlier = read(None, Some(end.from));
        assert_eq!(earlier.to, end.from);
        let both = format!("{}{}", earlier.text, end.text);
        assert!(text.ends_with(&both));

        let (mut all, mut at) = (String::new(), 0);
        loop {
            let part = read(Some(at), None);
            if part.text.is_empty() {
                break;
            }
            assert_eq!(part.from, at);
            (all, at) = (all + &part.text, part.to);
        }
        assert_eq!(all, text);
        // The log was emptied.
        fs::write(folder.path().join("worker-0.log"), "new\n").unwrap();
        let part = read(Some(at), None);
        assert_eq!((part.from, &*part.text), (0, "new\n"));
    }

    #[test]
    fn a_line_without_an_end_is_read_in_parts_and_bytes_need_not_be_text() {
        let folder = tempfile::tempdir().unwrap();
        let long = vec![0xff; usize::try_from(MAX_PART).unwrap() + 7];
        fs::write(folder.path().join("ps-0.log"), long).unwrap();
        let part = wanted("ps-0", Some(0), None).read(folder.path()).unwrap();
        assert_eq!((part.from, part.to), (0, MAX_PART));
        let part = wanted("ps-0", None, None).read(folder.path()).unwrap();
        assert_eq!(part.to, MAX_PART + 7);
        // Backward, a line that fills the part must not be dropped: nothing before it could be read.
        let line = [vec![b'x'; usize::try_from(MAX_PART).unwrap() + 7], b"\n".to_vec()].concat();
        fs::write(folder.path().join("ps-0.log"), line).unwrap();
        let part = wanted("ps-0", None, None).read(folder.path()).unwrap();
        assert_eq!((part.from, part.to), (8, MAX_PART + 8));
    }

    #[test]
    fn no_name_leads_out_of_the_folder_or_to_another_kind_of_file() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("logs");
        fs::create_dir(&folder).unwrap();
        for (name, path) in [("secret.log", root.path()), ("job.key", &folder), ("a.log", &folder)]
        {
            fs::write(path.join(name), "secret\n").unwrap();
        }
        for name in ["../secret", "../logs/a", "job.key", "a.log", "", ".", "/etc/passwd", "b"] {
            let part = wanted(name, None, None).read(&folder).unwrap();
            assert_eq!((part.text.as_str(), part.processes), ("", vec!["a".to_owned()]), "{name}");
        }
        assert_eq!(wanted("a", None, None).read(&folder).unwrap().text, "secret\n");
        let nothing = wanted("a", None, None).read(&root.path().join("missing")).unwrap();
        assert!(nothing.processes.is_empty());
    }
}
