// SPDX-License-Identifier: Apache-2.0
//! Indexes the files of a data set in parallel. Other threads can watch the progress.

use std::io::{self, Read};
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::thread;

use crate::error::Error;
use crate::format::{Format, Params};
use crate::index::{FileIndex, file_len};
use crate::location::DataFile;
use crate::{csv, jsonl, recordio, tfrecord};

/// How far the index of a data set is.
#[derive(Debug, Default)]
pub struct Progress {
    done: AtomicU64,
    total: AtomicU64,
}

impl Progress {
    /// Bytes that are indexed, and bytes of all files; both are zero before the files are known.
    #[must_use]
    pub fn bytes(&self) -> (u64, u64) {
        let total = self.total.load(Relaxed);
        (self.done.load(Relaxed).min(total), total)
    }

    fn begin(&self, total: u64) {
        self.done.store(0, Relaxed);
        self.total.store(total, Relaxed);
    }

    fn add(&self, n_bytes: u64) {
        self.done.fetch_add(n_bytes, Relaxed);
    }
}

/// The part of one file in the progress.
pub(crate) struct FileProgress<'a> {
    all: &'a Progress,
    added: AtomicU64,
}

impl FileProgress<'_> {
    /// Counts what is read from `inner`.
    pub(crate) fn watch<R: Read>(&self, inner: R) -> impl Read {
        Watched { inner, progress: self }
    }

    /// Whatever was not counted: headers alone may say enough about a file.
    fn finish(&self, n_bytes: u64) {
        self.all.add(n_bytes.saturating_sub(self.added.load(Relaxed)));
    }
}

struct Watched<'a, R> {
    inner: R,
    progress: &'a FileProgress<'a>,
}

impl<R: Read> Read for Watched<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n_read = self.inner.read(buffer)?;
        self.progress.added.fetch_add(n_read as u64, Relaxed);
        self.progress.all.add(n_read as u64);
        Ok(n_read)
    }
}

/// Indexes all files, in their order. If several cannot be indexed, the first one is named.
pub(crate) fn all(
    format: Format,
    files: &[DataFile],
    params: &Params,
    progress: &Progress,
) -> Result<Vec<FileIndex>, Error> {
    let sizes = files.iter().map(|file| file_len(&file.path));
    progress.begin(sizes.sum::<Result<u64, Error>>()?);
    let (next, has_failed) = (AtomicUsize::new(0), AtomicBool::new(false));
    let indexed = Mutex::new(Vec::with_capacity(files.len()));
    let index_some = || {
        while !has_failed.load(Relaxed) {
            // Files are taken in order, so all before one that fails are finished, too.
            let number = next.fetch_add(1, Relaxed);
            let Some(file) = files.get(number) else { return };
            let part = FileProgress { all: progress, added: AtomicU64::new(0) };
            let index = one(format, &file.path, params, &part);
            match &index {
                Ok(index) => part.finish(index.bytes),
                Err(_) => has_failed.store(true, Relaxed),
            }
            indexed.lock().unwrap_or_else(PoisonError::into_inner).push((number, index));
        }
    };
    let n_threads = thread::available_parallelism().map_or(1, NonZeroUsize::get);
    thread::scope(|scope| {
        for _ in 1..n_threads.min(files.len()) {
            scope.spawn(index_some);
        }
        index_some();
    });
    let mut indexed = indexed.into_inner().unwrap_or_else(PoisonError::into_inner);
    indexed.sort_unstable_by_key(|(number, _)| *number);
    indexed.into_iter().map(|(_, index)| index).collect()
}

fn one(
    format: Format,
    path: &Path,
    params: &Params,
    progress: &FileProgress<'_>,
) -> Result<FileIndex, Error> {
    match format {
        Format::RecordIo => recordio::scan(path),
        Format::TfRecord => tfrecord::scan(path),
        Format::Csv => csv::scan(path, params, progress),
        Format::Jsonl => jsonl::scan(path, progress),
        #[cfg(feature = "parquet")]
        Format::Parquet => crate::parquet::scan(path),
        #[cfg(not(feature = "parquet"))]
        Format::Parquet => Err(crate::dataset::no_parquet(path)),
        Format::Range => Err(crate::dataset::no_range(path)),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::process::Command;
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    #[test]
    fn files_are_indexed_at_the_same_time() {
        if thread::available_parallelism().map_or(1, NonZeroUsize::get) == 1 {
            println!("skipped: this machine has one processor");
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        // A pipe can be opened for writing when its reader opens it: here, the second one first.
        let paths = ["first.jsonl", "second.jsonl"].map(|name| folder.path().join(name));
        assert!(Command::new("mkfifo").args(&paths).status().unwrap().success());
        let files = paths.clone().map(|path| DataFile { path, name: String::new() });
        thread::spawn(move || {
            paths.iter().rev().for_each(|path| std::fs::write(path, "{}\n").unwrap());
        });
        let (done, indexed) = mpsc::channel();
        thread::spawn(move || {
            let params = Params::parse(&BTreeMap::new()).unwrap();
            let all = all(Format::Jsonl, &files, &params, &Progress::default()).unwrap();
            done.send(all.iter().map(FileIndex::n_records).collect::<Vec<_>>())
        });
        assert_eq!(indexed.recv_timeout(Duration::from_secs(60)), Ok(vec![1, 1]));
    }
}
