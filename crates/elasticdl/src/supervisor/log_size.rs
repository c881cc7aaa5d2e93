// SPDX-License-Identifier: Apache-2.0
//! Keeps the logs of a job small. Processes hold their logs open for appending, so a log is copied
//! and emptied in place.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

/// A larger log is moved to `NAME.log.1`, which replaces the previous one.
pub(super) const MAX_LOG: u64 = 64 << 20;

/// Moves the content of logs in `folder` that are larger than `max_bytes`. A log that cannot be moved
/// is left alone, unless the disk is full.
pub(super) fn limit(folder: &Path, max_bytes: u64) {
    let paths = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    for path in paths.filter(|path| path.extension().is_some_and(|extension| extension == "log")) {
        if fs::metadata(&path).is_ok_and(|log| log.len() > max_bytes) {
            // It is tried again at the next check; until then, a longer log is acceptable.
            let _ = shift(&path);
        }
    }
}

fn shift(path: &Path) -> io::Result<()> {
    let mut before = path.as_os_str().to_owned();
    before.push(".1");
    let before = PathBuf::from(before);
    // First the oldest lines make room.
    match fs::remove_file(&before) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        Ok(()) | Err(_) => {}
    }
    if fs::copy(path, &before).is_err() {
        // Half of it would be of no use, and the log has to get smaller.
        let _ = fs::remove_file(&before);
    }
    File::options().write(true).open(path)?.set_len(0)
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    #[test]
    fn a_large_log_is_moved_while_its_process_writes() {
        let folder = tempfile::tempdir().unwrap();
        let [small, large, other] =
            ["ps-0.log", "worker-0.log", "notes.txt"].map(|name| folder.path().join(name));
        fs::write(&small, "1234").unwrap();
        fs::write(&other, "123456789").unwrap();
        let mut log = File::options().create(true).append(true).open(&large).unwrap();
        let read = |path: &Path| fs::read_to_string(path).unwrap();
        for round in ["first", "later"] {
            log.write_all(round.as_bytes()).unwrap();
            limit(folder.path(), 4);
            assert_eq!(read(&large), "");
            assert_eq!(read(&folder.path().join("worker-0.log.1")), round);
        }
        log.write_all(b"last").unwrap();
        limit(folder.path(), 4);
        assert_eq!((read(&large), read(&small)), ("last".into(), "1234".into()));
        assert_eq!(read(&other), "123456789");
    }
}
