// SPDX-License-Identifier: Apache-2.0
//! The index of a file: where its chunks are and how many records each one holds.

use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::Path;

use crate::error::{Error, Place};

/// Text formats have no chunks of their own; they are cut after so many bytes or records.
pub(crate) const CUT_BYTES: u64 = 1 << 20;
pub(crate) const CUT_RECORDS: u64 = 4096;

/// One chunk of a file: the unit that is read and decoded at once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ChunkEntry {
    pub(crate) offset: u64,
    pub(crate) len: u64,
    pub(crate) n_records: u64,
    /// Stands for the chunk's content: a file that changes under a running job is noticed.
    pub(crate) check: u64,
    /// The first line of the chunk, counted from one; zero for binary formats.
    pub(crate) line: u64,
}

/// All chunks of one file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct FileIndex {
    pub(crate) bytes: u64,
    pub(crate) chunks: Vec<ChunkEntry>,
    /// Names of the columns, where the file has some.
    pub(crate) columns: Vec<String>,
}

impl FileIndex {
    pub(crate) fn n_records(&self) -> u64 {
        self.chunks.iter().map(|chunk| chunk.n_records).sum()
    }
}

/// The first eight bytes of a hash, as a number.
pub(crate) fn short_hash(hash: &blake3::Hash) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&hash.as_bytes()[..8]);
    u64::from_le_bytes(word)
}

pub(crate) fn file_len(path: &Path) -> Result<u64, Error> {
    let metadata = std::fs::metadata(path).map_err(Error::io("read", path))?;
    Ok(metadata.len())
}

/// Reads a chunk's bytes. The file is opened each time: a data set may have more files than a
/// process may hold open, and opening is cheap beside decoding.
pub(crate) fn read_chunk(path: &Path, entry: &ChunkEntry, place: &Place) -> Result<Vec<u8>, Error> {
    let mut file = File::open(path).map_err(Error::io("open", path))?;
    file.seek(SeekFrom::Start(entry.offset)).map_err(Error::io("read", path))?;
    let len = usize::try_from(entry.len)
        .map_err(|_| Error::corrupt(place.clone(), "the chunk does not fit in memory"))?;
    let mut bytes = Vec::with_capacity(len);
    file.take(entry.len).read_to_end(&mut bytes).map_err(Error::io("read", path))?;
    if bytes.len() < len {
        return Err(changed(place));
    }
    Ok(bytes)
}

/// The file is not the one that was indexed.
pub(crate) fn changed(place: &Place) -> Error {
    Error::corrupt(place.clone(), "the file has changed since the dataset was opened")
}

/// Gathers records into chunks for formats that have none.
#[derive(Debug, Default)]
pub(crate) struct Cutter {
    chunks: Vec<ChunkEntry>,
    hasher: blake3::Hasher,
}

impl Cutter {
    /// Adds a record of `len` bytes at `offset`; `content` stands for it in the check. Bytes
    /// between records (blank lines) may be given with `is_record` false.
    pub(crate) fn add(
        &mut self,
        offset: u64,
        len: u64,
        content: &[u8],
        line: u64,
        is_record: bool,
    ) {
        let full = self
            .chunks
            .last()
            .is_none_or(|chunk| chunk.len >= CUT_BYTES || chunk.n_records >= CUT_RECORDS);
        if full {
            self.close();
            self.chunks.push(ChunkEntry { offset, len: 0, n_records: 0, check: 0, line });
        }
        self.hasher.update(content);
        if let Some(chunk) = self.chunks.last_mut() {
            chunk.len = offset + len - chunk.offset;
            chunk.n_records += u64::from(is_record);
        }
    }

    fn close(&mut self) {
        if let Some(chunk) = self.chunks.last_mut() {
            chunk.check = short_hash(&self.hasher.finalize());
        }
        self.hasher.reset();
    }

    pub(crate) fn finish(mut self) -> Vec<ChunkEntry> {
        self.close();
        self.chunks.retain(|chunk| chunk.n_records > 0);
        self.chunks
    }
}
