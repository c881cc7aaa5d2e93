// SPDX-License-Identifier: Apache-2.0
//! Writes RecordIO files.

use std::io::{self, Write};

use super::chunk::{Compressor, encode};

/// How a file is split into chunks and compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WriterOptions {
    pub compressor: Compressor,
    /// A chunk is closed before its records would exceed this. A larger record gets a separate
    /// chunk.
    pub max_chunk_bytes: usize,
}

impl Default for WriterOptions {
    /// The original's compressor; its chunks of 32 MiB are too coarse for random access.
    fn default() -> Self {
        Self { compressor: Compressor::Snappy, max_chunk_bytes: 1 << 20 }
    }
}

/// Writes records; [`Writer::finish`] writes the last chunk.
#[derive(Debug)]
pub struct Writer<W: Write> {
    out: W,
    options: WriterOptions,
    records: Vec<Vec<u8>>,
    bytes: usize,
}

impl<W: Write> Writer<W> {
    pub fn new(out: W, options: WriterOptions) -> Self {
        Self { out, options, records: Vec::new(), bytes: 0 }
    }

    pub fn write(&mut self, record: impl Into<Vec<u8>>) -> io::Result<()> {
        let record = record.into();
        if self.bytes + record.len() > self.options.max_chunk_bytes {
            self.flush_chunk()?;
        }
        self.bytes += record.len();
        self.records.push(record);
        Ok(())
    }

    /// Closes the chunk under way; the next record starts a new one.
    pub fn flush_chunk(&mut self) -> io::Result<()> {
        if self.records.is_empty() {
            return Ok(());
        }
        self.out.write_all(&encode(&self.records, self.options.compressor)?)?;
        self.records.clear();
        self.bytes = 0;
        Ok(())
    }

    /// Writes the last chunk and returns the output. If this is not called, the last chunk is lost.
    pub fn finish(mut self) -> io::Result<W> {
        self.flush_chunk()?;
        self.out.flush()?;
        Ok(self.out)
    }
}
