// SPDX-License-Identifier: Apache-2.0
//! RecordIO: chunks of records under a checksum, byte-compatible with the original Go library.
//!
//! A chunk is a header of five little-endian words (magic, CRC-32 of the compressed body,
//! compressor, compressed size, number of records) and a body: for each record its length and
//! its bytes, the whole of it compressed.

mod chunk;
mod writer;

use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::Path;

pub use chunk::{ChunkError, Compressor, HEADER_LEN, Header, MAGIC, RawRecords, decode, encode};
pub use writer::{Writer, WriterOptions};

use crate::error::{CHUNK, Error, Place};
use crate::index::{ChunkEntry, FileIndex, changed, file_len, read_chunk};

/// Decodes a whole file that is in memory; an error names the chunk.
pub fn parse(mut bytes: &[u8]) -> Result<Vec<RawRecords>, (usize, ChunkError)> {
    let mut chunks = Vec::new();
    while !bytes.is_empty() {
        let at = |error| (chunks.len(), error);
        let (header, rest) = bytes
            .split_first_chunk()
            .ok_or(ChunkError::HeaderTruncated { has: bytes.len() })
            .map_err(at)?;
        let header = Header::parse(header).map_err(at)?;
        let truncated =
            ChunkError::BodyTruncated { needs: header.compressed_size, has: rest.len() as u64 };
        let (body, rest) =
            rest.split_at_checked(header.compressed_size as usize).ok_or(truncated).map_err(at)?;
        let records = decode(&header, body.to_vec()).map_err(at)?;
        chunks.push(records);
        bytes = rest;
    }
    Ok(chunks)
}

/// Reads the headers of a file, and only them.
pub(crate) fn scan(path: &Path) -> Result<FileIndex, Error> {
    let bytes = file_len(path)?;
    let mut file = File::open(path).map_err(Error::io("open", path))?;
    let mut chunks: Vec<ChunkEntry> = Vec::new();
    let mut offset = 0;
    while offset < bytes {
        let corrupt =
            |error: ChunkError| Error::corrupt(Place::chunk(path, CHUNK, chunks.len()), error);
        let left = bytes - offset;
        if left < HEADER_LEN as u64 {
            return Err(corrupt(ChunkError::HeaderTruncated {
                has: usize::try_from(left).unwrap_or(usize::MAX),
            }));
        }
        let mut header = [0; HEADER_LEN];
        file.seek(SeekFrom::Start(offset)).map_err(Error::io("read", path))?;
        file.read_exact(&mut header).map_err(Error::io("read", path))?;
        let header = Header::parse(&header).map_err(corrupt)?;
        let len = HEADER_LEN as u64 + u64::from(header.compressed_size);
        if len > left {
            return Err(corrupt(ChunkError::BodyTruncated {
                needs: header.compressed_size,
                has: left - HEADER_LEN as u64,
            }));
        }
        chunks.push(ChunkEntry {
            offset,
            len,
            n_records: u64::from(header.n_records),
            check: check(&header),
            line: 0,
        });
        offset += len;
    }
    Ok(FileIndex { bytes, chunks, columns: Vec::new() })
}

/// The header's checksum identifies the body, so the index does not read it.
fn check(header: &Header) -> u64 {
    u64::from(header.checksum) | u64::from(header.compressor.code()) << 32
}

/// Reads and decodes one chunk.
pub(crate) fn load(path: &Path, number: usize, entry: &ChunkEntry) -> Result<RawRecords, Error> {
    let place = Place::chunk(path, CHUNK, number);
    let mut bytes = read_chunk(path, entry, &place)?;
    let corrupt = |error: ChunkError| Error::corrupt(place.clone(), error);
    let header = bytes.first_chunk().ok_or_else(|| changed(&place))?;
    let header = Header::parse(header).map_err(corrupt)?;
    let same_len = entry.len == HEADER_LEN as u64 + u64::from(header.compressed_size);
    let same_count = entry.n_records == u64::from(header.n_records);
    if check(&header) != entry.check || !same_len || !same_count {
        return Err(changed(&place));
    }
    bytes.drain(..HEADER_LEN);
    decode(&header, bytes).map_err(corrupt)
}

/// The compressor of a file's first chunk, for reports.
pub(crate) fn compressor(path: &Path) -> Option<Compressor> {
    let mut header = [0; HEADER_LEN];
    File::open(path).ok()?.read_exact(&mut header).ok()?;
    Header::parse(&header).ok().map(|header| header.compressor)
}
