// SPDX-License-Identifier: Apache-2.0
//! CSV: a header that names the columns, quoted cells, and types chosen by the reader.

use std::collections::HashMap;
use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::Path;

use ::csv::{ByteRecord, Reader, ReaderBuilder, Trim};
use edl_core::spec::Codec;

use crate::error::{BLOCK, Error, Place};
use crate::format::Params;
use crate::index::{
    ChunkEntry, FileIndex, MAX_CHUNK_BYTES, MAX_CHUNK_RECORDS, changed, file_len, read_chunk,
    short_hash,
};
use crate::row::{Records, Row};
use crate::scan::FileProgress;

/// The rows of one chunk.
#[derive(Debug)]
pub(crate) struct Rows {
    columns: Vec<String>,
    places: HashMap<String, usize>,
    rows: Vec<ByteRecord>,
    /// The line on which each row begins.
    lines: Vec<u64>,
}

impl Rows {
    pub(crate) fn get(&self, row: usize, name: &str) -> Option<&[u8]> {
        self.rows.get(row)?.get(*self.places.get(name)?)
    }

    pub(crate) fn columns(&self) -> &[String] {
        &self.columns
    }
}

impl Records for Rows {
    fn n_records(&self) -> usize {
        self.rows.len()
    }

    fn bytes(&self) -> usize {
        let cells = |row: &ByteRecord| row.as_slice().len() + row.len() * size_of::<usize>();
        self.rows.iter().map(cells).sum()
    }

    fn row(&self, row: usize, _codec: Codec) -> Result<Row<'_>, String> {
        Ok(Row::Csv { rows: self, row })
    }

    fn line(&self, row: usize) -> Option<u64> {
        self.lines.get(row).copied()
    }
}

fn reader<R: std::io::Read>(input: R, path: &Path, params: &Params) -> Reader<R> {
    let tab = path.extension().is_some_and(|extension| extension == "tsv");
    ReaderBuilder::new()
        .has_headers(false)
        .delimiter(params.delimiter.unwrap_or(if tab { b'\t' } else { b',' }))
        .trim(if params.trim { Trim::All } else { Trim::None })
        .from_reader(input)
}

/// The line on which a row begins. The parser takes a row to begin right after the carriage
/// return before it; `rest` is the text from there on.
fn first_line(position: &::csv::Position, rest: &[u8]) -> u64 {
    let breaks = rest.iter().take_while(|byte| matches!(byte, b'\r' | b'\n'));
    position.line() + breaks.filter(|byte| **byte == b'\n').count() as u64
}

fn corrupt(place: Place, line: Option<u64>, error: &::csv::Error) -> Error {
    let mut problem = error.to_string();
    if let ::csv::ErrorKind::UnequalLengths { expected_len, len, .. } = error.kind() {
        problem = format!("the row has {len} cells, but the first row has {expected_len}");
    }
    Error::corrupt(Place { line, ..place }, problem)
}

/// Reads a file once, checks that every row has all cells, and splits it into chunks.
pub(crate) fn scan(
    path: &Path,
    params: &Params,
    progress: &FileProgress<'_>,
) -> Result<FileIndex, Error> {
    let bytes = file_len(path)?;
    let file = File::open(path).map_err(Error::io("open", path))?;
    let mut reader = reader(progress.watch(file), path, params);
    let mut row = ByteRecord::new();
    let mut columns = Vec::new();
    let mut chunks: Vec<ChunkEntry> = Vec::new();
    loop {
        let more = reader.read_byte_record(&mut row).map_err(|error| {
            let line = error.position().map(|at| first_line(at, &peek(path, at.byte())));
            corrupt(Place::file(path), line, &error)
        })?;
        if !more {
            break;
        }
        if columns.is_empty() {
            columns = name_columns(&row, params, path)?;
            if params.header {
                continue;
            }
        }
        let Some((offset, line)) = row.position().map(|place| (place.byte(), place.line())) else {
            continue;
        };
        let full = |chunk: &ChunkEntry| {
            offset - chunk.offset >= MAX_CHUNK_BYTES || chunk.n_records >= MAX_CHUNK_RECORDS
        };
        if chunks.last().is_none_or(full) {
            chunks.push(ChunkEntry { offset, len: 0, n_records: 0, check: 0, line });
        }
        if let Some(chunk) = chunks.last_mut() {
            chunk.n_records += 1;
        }
    }
    close(path, bytes, &mut chunks)?;
    Ok(FileIndex { bytes, chunks, columns })
}

/// A few bytes of a file, for messages; none if it cannot be read.
fn peek(path: &Path, offset: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    let read = File::open(path).and_then(|mut file| {
        file.seek(SeekFrom::Start(offset))?;
        file.take(64).read_to_end(&mut bytes)
    });
    match read {
        Ok(_) => bytes,
        Err(_) => Vec::new(),
    }
}

fn name_columns(row: &ByteRecord, params: &Params, path: &Path) -> Result<Vec<String>, Error> {
    let names: Vec<String> = if !params.columns.is_empty() {
        params.columns.clone()
    } else if params.header {
        row.iter().map(|cell| String::from_utf8_lossy(cell).trim().to_owned()).collect()
    } else {
        (0..row.len()).map(|number| format!("column_{number}")).collect()
    };
    if names.len() != row.len() {
        return Err(Error::corrupt(
            Place::file(path).line(1),
            format!("the row has {} cells, but {} columns are named", row.len(), names.len()),
        ));
    }
    let mut sorted = names.clone();
    sorted.sort_unstable();
    match sorted.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => {
            let text = format!("two columns are named `{}`", pair[0]);
            Err(Error::corrupt(Place::file(path).line(1), text))
        }
        None => Ok(names),
    }
}

/// Adds to each chunk where it ends and what stands for its content.
fn close(path: &Path, bytes: u64, chunks: &mut [ChunkEntry]) -> Result<(), Error> {
    let ends: Vec<u64> = chunks.iter().skip(1).map(|next| next.offset).chain([bytes]).collect();
    let mut file = File::open(path).map_err(Error::io("open", path))?;
    let mut buffer = Vec::new();
    for (chunk, end) in chunks.iter_mut().zip(ends) {
        chunk.len = end - chunk.offset;
        buffer.clear();
        file.seek(SeekFrom::Start(chunk.offset)).map_err(Error::io("read", path))?;
        (&file).take(chunk.len).read_to_end(&mut buffer).map_err(Error::io("read", path))?;
        chunk.check = short_hash(&blake3::hash(&buffer));
    }
    Ok(())
}

/// Reads one chunk.
pub(crate) fn load(
    path: &Path,
    number: usize,
    entry: &ChunkEntry,
    columns: &[String],
    params: &Params,
) -> Result<Rows, Error> {
    let place = Place::chunk(path, BLOCK, number);
    let bytes = read_chunk(path, entry, &place)?;
    if short_hash(&blake3::hash(&bytes)) != entry.check {
        return Err(changed(&place));
    }
    let before = entry.line.saturating_sub(1);
    let line_of = |at: &::csv::Position| {
        let start = usize::try_from(at.byte()).unwrap_or(usize::MAX);
        before + first_line(at, bytes.get(start..).unwrap_or_default())
    };
    let (mut rows, mut lines) = (Vec::new(), Vec::new());
    for row in reader(bytes.as_slice(), path, params).into_byte_records() {
        let row =
            row.map_err(|error| corrupt(place.clone(), error.position().map(line_of), &error))?;
        lines.push(row.position().map_or(0, line_of));
        rows.push(row);
    }
    if rows.len() as u64 != entry.n_records {
        return Err(changed(&place));
    }
    let places = columns.iter().cloned().zip(0..).collect();
    Ok(Rows { columns: columns.to_vec(), places, rows, lines })
}
