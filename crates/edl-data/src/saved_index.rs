// SPDX-License-Identifier: Apache-2.0
//! The index of a data set in a file, so that it is built once for all processes of a job.
//!
//! A hash of the rest stands in the first line. An index of other files, or one that cannot be read,
//! counts as none: the files are indexed again.

use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::format::{Format, Params};
use crate::index::{ChunkEntry, FileIndex};
use crate::location::DataFile;

const VERSION: u32 = 1;

/// What shows that a file has not changed since it was indexed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Stamp {
    name: String,
    bytes: u64,
    modified_nanos: u64,
}

#[derive(Serialize, Deserialize)]
struct Saved {
    version: u32,
    format: Format,
    files: Vec<SavedFile>,
}

#[derive(Serialize, Deserialize)]
struct SavedFile {
    stamp: Stamp,
    columns: Vec<String>,
    /// Offset, length, records, check and line of each chunk.
    chunks: Vec<[u64; 5]>,
}

impl Stamp {
    /// The stamps of files as they are now.
    pub(crate) fn all(files: &[DataFile]) -> Result<Vec<Self>, Error> {
        let stamp = |file: &DataFile| {
            let metadata = std::fs::metadata(&file.path).map_err(Error::io("read", &file.path))?;
            let modified = metadata.modified().map_err(Error::io("read", &file.path))?;
            let since = modified.duration_since(UNIX_EPOCH).unwrap_or_default();
            let modified_nanos = u64::try_from(since.as_nanos()).unwrap_or(u64::MAX);
            Ok(Self { name: file.name.clone(), bytes: metadata.len(), modified_nanos })
        };
        files.iter().map(stamp).collect()
    }
}

/// Where the index of a data set is, in a folder for indexes.
fn path(dir: &Path, location: &str, params: &Params) -> PathBuf {
    let key = blake3::hash(format!("{location}\n{params:?}").as_bytes());
    dir.join(format!("{}.json", &key.to_hex()[..32]))
}

/// The saved index of exactly these files.
pub(crate) fn load(
    dir: &Path,
    location: &str,
    params: &Params,
    stamps: &[Stamp],
) -> Option<(Format, Vec<FileIndex>)> {
    let text = std::fs::read(path(dir, location, params)).ok()?;
    let (hash, body) = text.split_at_checked(64)?;
    if hash != blake3::hash(body).to_hex().as_bytes() {
        return None;
    }
    let Saved { version, format, files } = serde_json::from_slice(body).ok()?;
    let is_same = version == VERSION && files.iter().map(|file| &file.stamp).eq(stamps);
    is_same.then(|| (format, files.into_iter().map(SavedFile::index).collect()))
}

/// Saves an index; a reader never sees half of it.
pub(crate) fn save<'a>(
    dir: &Path,
    location: &str,
    params: &Params,
    format: Format,
    files: impl Iterator<Item = (&'a Stamp, &'a FileIndex)>,
) -> Result<(), Error> {
    let files = files.map(|(stamp, index)| SavedFile::new(stamp, index)).collect();
    let saved = Saved { version: VERSION, format, files };
    let path = path(dir, location, params);
    let body = serde_json::to_vec(&saved)
        .map_err(|error| Error::io("write", &path)(std::io::Error::other(error)))?;
    let text = [blake3::hash(&body).to_hex().as_bytes(), &body].concat();
    std::fs::create_dir_all(dir).map_err(Error::io("create", dir))?;
    let temporary = path.with_extension("tmp");
    let written = std::fs::write(&temporary, text);
    written.and_then(|()| std::fs::rename(&temporary, &path)).map_err(Error::io("write", &path))
}

impl SavedFile {
    fn new(stamp: &Stamp, index: &FileIndex) -> Self {
        let chunk = |entry: &ChunkEntry| {
            let ChunkEntry { offset, len, n_records, check, line } = *entry;
            [offset, len, n_records, check, line]
        };
        let chunks = index.chunks.iter().map(chunk).collect();
        Self { stamp: stamp.clone(), columns: index.columns.clone(), chunks }
    }

    fn index(self) -> FileIndex {
        let chunk = |[offset, len, n_records, check, line]: [u64; 5]| ChunkEntry {
            offset,
            len,
            n_records,
            check,
            line,
        };
        let chunks = self.chunks.into_iter().map(chunk).collect();
        FileIndex { bytes: self.stamp.bytes, chunks, columns: self.columns }
    }
}
