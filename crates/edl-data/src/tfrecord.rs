// SPDX-License-Identifier: Apache-2.0
//! TFRecord: each record between its length and two masked CRC-32C checksums.
//!
//! A record is: length (u64, little-endian), masked checksum of the length, the bytes, masked
//! checksum of the bytes.

use std::fs::File;
use std::io::{self, BufReader, Read, Write};
use std::path::Path;

use crate::error::{BLOCK, Error, Place};
use crate::index::{
    ChunkBuilder, ChunkEntry, FileIndex, changed, file_len, read_chunk, short_hash,
};
use crate::recordio::RawRecords;

const HEADER_LEN: usize = 12;
const FOOTER_LEN: usize = 4;

/// Why some bytes are not a record.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    #[error("the file ends inside a record: it is truncated")]
    Truncated,
    #[error("corrupt record: the checksum of its length does not match")]
    Length,
    #[error("corrupt record: the checksum of its bytes does not match")]
    Data,
}

/// The checksum as TFRecord stores it: rotated and shifted, so it also works for data that contains
/// checksums.
#[must_use]
pub fn masked_crc(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// Writes one record.
pub fn write(out: &mut impl Write, record: &[u8]) -> io::Result<()> {
    let len = (record.len() as u64).to_le_bytes();
    out.write_all(&len)?;
    out.write_all(&masked_crc(&len).to_le_bytes())?;
    out.write_all(record)?;
    out.write_all(&masked_crc(record).to_le_bytes())
}

/// The length that a record's header announces.
pub(crate) fn parse_header(header: &[u8; HEADER_LEN]) -> Result<u64, RecordError> {
    let [a, b, c, d, e, f, g, h, check @ ..] = *header;
    let len = [a, b, c, d, e, f, g, h];
    if u32::from_le_bytes(check) != masked_crc(&len) {
        return Err(RecordError::Length);
    }
    Ok(u64::from_le_bytes(len))
}

/// Splits bytes into records; an error names the record.
pub fn parse(bytes: Vec<u8>) -> Result<RawRecords, (usize, RecordError)> {
    let spans = spans(&bytes)?;
    Ok(RawRecords::new(bytes, spans))
}

/// Where the records' own bytes are.
fn spans(bytes: &[u8]) -> Result<Vec<(usize, usize)>, (usize, RecordError)> {
    let mut spans = Vec::new();
    let mut at = 0;
    while at < bytes.len() {
        let fail = |error| (spans.len(), error);
        let truncated = || fail(RecordError::Truncated);
        let header = bytes[at..].first_chunk().ok_or_else(truncated)?;
        let len = parse_header(header).map_err(fail)?;
        let start = at + header.len();
        let end = usize::try_from(len).ok().and_then(|len| start.checked_add(len));
        let end = end.filter(|end| *end <= bytes.len()).ok_or_else(truncated)?;
        let check = bytes[end..].first_chunk().ok_or_else(truncated)?;
        if u32::from_le_bytes(*check) != masked_crc(&bytes[start..end]) {
            return Err(fail(RecordError::Data));
        }
        spans.push((start, end));
        at = end + check.len();
    }
    Ok(spans)
}

/// Walks through a file from header to header.
pub(crate) fn scan(path: &Path) -> Result<FileIndex, Error> {
    let bytes = file_len(path)?;
    let file = File::open(path).map_err(Error::io("open", path))?;
    let mut reader = BufReader::with_capacity(1 << 17, file);
    let mut chunks = ChunkBuilder::default();
    let mut offset = 0;
    let mut record = 0;
    while offset < bytes {
        let corrupt = |error: RecordError| Error::corrupt(Place::file(path).record(record), error);
        let left = bytes - offset;
        if left < HEADER_LEN as u64 {
            return Err(corrupt(RecordError::Truncated));
        }
        let mut header = [0; HEADER_LEN];
        reader.read_exact(&mut header).map_err(Error::io("read", path))?;
        let len = parse_header(&header).map_err(corrupt)?;
        let whole =
            len.checked_add((HEADER_LEN + FOOTER_LEN) as u64).filter(|whole| *whole <= left);
        let whole = whole.ok_or_else(|| corrupt(RecordError::Truncated))?;
        let skip = i64::try_from(len).map_err(|_| corrupt(RecordError::Truncated))?;
        reader.seek_relative(skip).map_err(Error::io("read", path))?;
        let mut footer = [0; FOOTER_LEN];
        reader.read_exact(&mut footer).map_err(Error::io("read", path))?;
        chunks.add(offset, whole, &[&header[..], &footer].concat(), 0, true);
        offset += whole;
        record += 1;
    }
    Ok(FileIndex { bytes, chunks: chunks.finish(), columns: Vec::new() })
}

/// Reads and checks one chunk.
pub(crate) fn load(path: &Path, number: usize, entry: &ChunkEntry) -> Result<RawRecords, Error> {
    let place = Place::chunk(path, BLOCK, number);
    let bytes = read_chunk(path, entry, &place)?;
    let spans = spans(&bytes)
        .map_err(|(record, error)| Error::corrupt(place.clone().record(record), error))?;
    let mut hasher = blake3::Hasher::new();
    for (start, end) in &spans {
        hasher.update(&bytes[start - HEADER_LEN..*start]).update(&bytes[*end..end + FOOTER_LEN]);
    }
    if spans.len() as u64 != entry.n_records || short_hash(&hasher.finalize()) != entry.check {
        return Err(changed(&place));
    }
    Ok(RawRecords::new(bytes, spans))
}
