// SPDX-License-Identifier: Apache-2.0
//! The parameters of a checkpoint in temporary files, from which tensors are read in any order.
//!
//! A checkpoint is read partition by partition, so memory holds one of them at a time. The files
//! have no name, so nothing is left of them, no matter how the process ends.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fs::{self, File};
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use crate::checkpoint::{self, Checkpoint, Snapshot, read_snapshot};
use crate::export::{Error, Progress};
use crate::table::Slab;
use edl_core::model::ModelSpec;

/// Of each run of rows that are merged.
const BUFFER: usize = 1 << 15;

pub(super) struct Parts {
    /// The flat vector of all dense parameters.
    dense: File,
    pub(super) tables: Vec<Rows>,
}

/// The rows of a table: one run per partition, each in the order of its ids.
pub(super) struct Rows {
    file: File,
    dim: usize,
    /// Where each run ends, in rows.
    ends: Vec<u64>,
}

impl Parts {
    /// Reads all partitions, without optimizer state. Temporary files are made in `folder`.
    pub(super) fn read(
        checkpoint: &Checkpoint,
        folder: &Path,
        progress: &Progress<'_>,
    ) -> Result<Self, Error> {
        let model = &checkpoint.manifest.model;
        let layout = checkpoint.manifest.layout();
        let unnamed = || unnamed(folder).map_err(checkpoint::at("write to", folder));
        let table = |dim| Ok::<_, Error>(Rows { file: unnamed()?, dim, ends: Vec::new() });
        let tables = model.tables.iter().map(|spec| table(spec.dim)).collect::<Result<_, _>>()?;
        let mut parts = Self { dense: unnamed()?, tables };
        for file in &checkpoint.manifest.files {
            let snapshot = read_snapshot(&checkpoint.path, file)?;
            let segment = layout.segment(file.partition);
            if !fits(&snapshot, model, segment.len()) {
                return Err(Error::Model { path: checkpoint.path.join(&file.name) });
            }
            parts.add(&snapshot, segment.start).map_err(checkpoint::at("write to", folder))?;
            progress(file.bytes);
        }
        Ok(parts)
    }

    fn add(&mut self, snapshot: &Snapshot, start: usize) -> io::Result<()> {
        let weights = bytemuck::cast_slice(&snapshot.dense.weights);
        self.dense.write_all_at(weights, bytes(start))?;
        let mut tables = self.tables.iter_mut().zip(&snapshot.tables);
        tables.try_for_each(|(rows, slab)| rows.add(slab))
    }

    /// Copies a part of the dense parameters.
    pub(super) fn write_dense(&self, part: Range<usize>, to: &mut impl Write) -> io::Result<()> {
        let mut source = Section { file: &self.dense, place: bytes(part.start)..bytes(part.end) };
        io::copy(&mut source, to)?;
        Ok(())
    }
}

impl Rows {
    fn add(&mut self, slab: &Slab) -> io::Result<()> {
        let mut rows: Vec<(u64, &[f32])> = slab.rows().collect();
        rows.sort_unstable_by_key(|(id, _)| *id);
        let (start, size) = (self.len(), self.row_bytes());
        let mut at =
            BufWriter::with_capacity(8 * BUFFER, Place { file: &self.file, at: start * size });
        for (id, row) in &rows {
            at.write_all(&id.to_le_bytes())?;
            at.write_all(bytemuck::cast_slice(&row[..self.dim]))?;
        }
        at.flush()?;
        drop(at);
        self.ends.push(start + rows.len() as u64);
        Ok(())
    }

    /// Rows of all partitions.
    pub(super) fn len(&self) -> u64 {
        self.ends.last().copied().unwrap_or(0)
    }

    /// A row with its id.
    fn row_bytes(&self) -> u64 {
        8 + bytes(self.dim)
    }

    /// Visits the id and the row of each row, in the order of the ids, so the result does not
    /// depend on the order in which rows were created.
    pub(super) fn visit(
        &self,
        mut visit: impl FnMut(&[u8], &[u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        let size = self.row_bytes();
        let starts = std::iter::once(0).chain(self.ends.iter().copied());
        let runs = starts.zip(&self.ends).map(|(start, end)| start * size..end * size);
        let mut runs: Vec<Run<'_>> = runs.map(|place| Run::new(&self.file, place, size)).collect();
        let mut next = BinaryHeap::new();
        for (number, run) in runs.iter_mut().enumerate() {
            next.extend(run.advance()?.map(|id| Reverse((id, number))));
        }
        while let Some(Reverse((_, number))) = next.pop() {
            let run = &mut runs[number];
            let (id, row) = run.row.split_at(8);
            visit(id, row)?;
            next.extend(run.advance()?.map(|id| Reverse((id, number))));
        }
        Ok(())
    }
}

/// The rows of a partition, one after the other.
struct Run<'a> {
    rest: BufReader<Section<'a>>,
    n_left: u64,
    row: Vec<u8>,
}

impl<'a> Run<'a> {
    fn new(file: &'a File, place: Range<u64>, row_bytes: u64) -> Self {
        let n_left = (place.end - place.start) / row_bytes;
        let row = vec![0; usize::try_from(row_bytes).unwrap_or(usize::MAX)];
        Self { rest: BufReader::with_capacity(BUFFER, Section { file, place }), n_left, row }
    }

    /// Reads the next row; returns its id.
    fn advance(&mut self) -> io::Result<Option<u64>> {
        if self.n_left == 0 {
            return Ok(None);
        }
        self.n_left -= 1;
        self.rest.read_exact(&mut self.row)?;
        Ok(self.row.first_chunk().map(|id| u64::from_le_bytes(*id)))
    }
}

/// A part of a file that others read, too.
struct Section<'a> {
    file: &'a File,
    place: Range<u64>,
}

impl Read for Section<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = usize::try_from(self.place.end - self.place.start).unwrap_or(usize::MAX);
        let n_most = buffer.len().min(left);
        let n_read = self.file.read_at(&mut buffer[..n_most], self.place.start)?;
        self.place.start += n_read as u64;
        Ok(n_read)
    }
}

/// A place in a file at which to write.
struct Place<'a> {
    file: &'a File,
    at: u64,
}

impl Write for Place<'_> {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        let n_written = self.file.write_at(buffer, self.at)?;
        self.at += n_written as u64;
        Ok(n_written)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Of this many numbers.
fn bytes(n: usize) -> u64 {
    n as u64 * 4
}

fn unnamed(folder: &Path) -> io::Result<File> {
    let path = folder.join(format!(".export.{}.tmp", std::process::id()));
    let file = File::options().read(true).write(true).create(true).truncate(true).open(&path)?;
    fs::remove_file(&path)?;
    Ok(file)
}

fn fits(snapshot: &Snapshot, model: &ModelSpec, n_dense: usize) -> bool {
    let stride = |dim: usize| dim * (1 + snapshot.header.slots.len());
    let strides = snapshot.tables.iter().map(|slab| slab.stride());
    snapshot.dense.weights.len() == n_dense
        && strides.eq(model.tables.iter().map(|table| stride(table.dim)))
}
