// SPDX-License-Identifier: Apache-2.0
//! The index of a file: where its chunks are and how many records each one holds.

use std::fs::File;
use std::io::{self, Read, Seek as _, SeekFrom};
use std::path::Path;

use crate::error::{Error, Place};

/// Text formats have no chunks; they are split after this many bytes or records.
pub(crate) const MAX_CHUNK_BYTES: u64 = 1 << 20;
pub(crate) const MAX_CHUNK_RECORDS: u64 = 4096;

/// The most that is read or decompressed at once: a few bytes must not allocate all memory.
pub(crate) const MAX_UNPACKED: u64 = 1 << 31;

/// One chunk of a file: the unit that is read and decoded at once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ChunkEntry {
    pub(crate) offset: u64,
    pub(crate) len: u64,
    pub(crate) n_records: u64,
    /// A hash of the chunk's content, to detect a file that changes during a job.
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
/// process may hold open, and opening is cheap compared with decoding.
pub(crate) fn read_chunk(path: &Path, entry: &ChunkEntry, place: &Place) -> Result<Vec<u8>, Error> {
    let mut file = File::open(path).map_err(Error::io("open", path))?;
    file.seek(SeekFrom::Start(entry.offset)).map_err(Error::io("read", path))?;
    let len = usize::try_from(entry.len).ok().filter(|_| entry.len <= MAX_UNPACKED);
    let len = len.ok_or_else(|| {
        Error::corrupt(place.clone(), format!("a record or chunk exceeds {MAX_UNPACKED} bytes"))
    })?;
    let mut bytes = Vec::with_capacity(len);
    file.take(entry.len).read_to_end(&mut bytes).map_err(Error::io("read", path))?;
    if bytes.len() < len {
        return Err(changed(place));
    }
    Ok(bytes)
}

/// Reads to the end; none if there is more than `limit`.
pub(crate) fn read_limited(reader: impl Read, limit: u64) -> io::Result<Option<Vec<u8>>> {
    let mut bytes = Vec::new();
    reader.take(limit + 1).read_to_end(&mut bytes)?;
    Ok((bytes.len() as u64 <= limit).then_some(bytes))
}

/// The file is not the one that was indexed.
pub(crate) fn changed(place: &Place) -> Error {
    Error::corrupt(place.clone(), "the file has changed since the dataset was opened")
}

/// Collects records into chunks for formats that have none.
#[derive(Debug, Default)]
pub(crate) struct ChunkBuilder {
    chunks: Vec<ChunkEntry>,
    hasher: blake3::Hasher,
}

impl ChunkBuilder {
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
        let full = self.chunks.last().is_none_or(|chunk| {
            chunk.len >= MAX_CHUNK_BYTES || chunk.n_records >= MAX_CHUNK_RECORDS
        });
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_without_an_end_is_read_up_to_its_limit() {
        assert_eq!(read_limited(io::repeat(7), 1000).unwrap(), None);
        assert_eq!(read_limited(io::repeat(7).take(3), 3).unwrap(), Some(vec![7; 3]));
        let zeros = vec![0; 1 << 20];
        let packed = flate2::read::GzEncoder::new(zeros.as_slice(), flate2::Compression::best());
        let unpacked = flate2::read::MultiGzDecoder::new(io::BufReader::new(packed));
        assert_eq!(read_limited(unpacked, 1 << 16).unwrap(), None);
    }

    #[test]
    fn a_chunk_beyond_the_limit_is_refused_before_memory_is_claimed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.tfrecord");
        // Sparse: large without using the disk.
        File::create(&path).unwrap().set_len(1 << 40).unwrap();
        let entry = ChunkEntry { offset: 0, len: 1 << 40, n_records: 1, check: 0, line: 0 };
        let error = read_chunk(&path, &entry, &Place::file(&path)).unwrap_err().to_string();
        assert!(error.contains("exceeds 2147483648 bytes"), "{error}");
    }
}
