// SPDX-License-Identifier: Apache-2.0
//! JSON lines: one object per line; blank lines are skipped.

use std::fs::File;
use std::io::{BufRead as _, BufReader};
use std::path::Path;

use edl_core::spec::Codec;
use prost::bytes::Bytes;

use crate::error::{BLOCK, Error, Place};
use crate::index::{
    ChunkBuilder, ChunkEntry, FileIndex, changed, file_len, read_chunk, short_hash,
};
use crate::recordio::RawRecords;
use crate::row::{Records, Row};
use crate::scan::FileProgress;

/// The lines of one chunk.
#[derive(Debug)]
pub(crate) struct Lines {
    records: RawRecords,
    /// The number of each record's line.
    lines: Vec<u64>,
}

impl Records for Lines {
    fn n_records(&self) -> usize {
        self.lines.len()
    }

    fn bytes(&self) -> usize {
        self.records.bytes()
    }

    fn row(&self, record: usize, _codec: Codec) -> Result<Row<'_>, String> {
        let text = self.records.get(record).unwrap_or_default();
        let object = serde_json::from_slice(&text).map(Row::Json);
        object.map_err(|error| match error.is_eof() {
            true => "not a JSON object: the line ends too early".to_owned(),
            false => format!("not a JSON object: error at column {}", error.column()),
        })
    }

    fn line(&self, record: usize) -> Option<u64> {
        self.lines.get(record).copied()
    }

    fn raw(&self, record: usize) -> Option<Bytes> {
        self.records.get(record)
    }
}

/// Walks through a file from line to line.
pub(crate) fn scan(path: &Path, progress: &FileProgress<'_>) -> Result<FileIndex, Error> {
    let bytes = file_len(path)?;
    let file = File::open(path).map_err(Error::io("open", path))?;
    let mut reader = BufReader::with_capacity(1 << 17, progress.watch(file));
    let mut chunks = ChunkBuilder::default();
    let mut text = Vec::new();
    let mut offset = 0;
    for line in 1.. {
        text.clear();
        let len = reader.read_until(b'\n', &mut text).map_err(Error::io("read", path))? as u64;
        if len == 0 {
            break;
        }
        chunks.add(offset, len, &text, line, !text.trim_ascii().is_empty());
        offset += len;
    }
    Ok(FileIndex { bytes, chunks: chunks.finish(), columns: Vec::new() })
}

/// Reads one chunk; the lines are parsed when they are needed.
pub(crate) fn load(path: &Path, number: usize, entry: &ChunkEntry) -> Result<Lines, Error> {
    let place = Place::chunk(path, BLOCK, number);
    let bytes = read_chunk(path, entry, &place)?;
    let mut spans = Vec::new();
    let mut lines = Vec::new();
    let mut start = 0;
    for (line, text) in (entry.line..).zip(bytes.split_inclusive(|byte| *byte == b'\n')) {
        let end = start + text.len();
        if !text.trim_ascii().is_empty() {
            spans.push((start, end));
            lines.push(line);
        }
        start = end;
    }
    if spans.len() as u64 != entry.n_records || short_hash(&blake3::hash(&bytes)) != entry.check {
        return Err(changed(&place));
    }
    Ok(Lines { records: RawRecords::new(bytes, spans), lines })
}
