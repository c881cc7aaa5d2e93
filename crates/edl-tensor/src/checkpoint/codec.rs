// SPDX-License-Identifier: Apache-2.0
//! The file of one partition: bytes in, bytes out.
//!
//! ```text
//! magic (8) | format u32 | header length u32 | header JSON
//! | length u64 | applied set
//! | length u64 | state of the training script (format 3 only)
//! | dense weights | each slot of them
//! | per table: ids u64 | rows (weights, then slots)
//! | BLAKE3 of all before (32)
//! ```
//! All numbers are little-endian. Lengths follow from the header. A reader allocates no more than
//! the bytes that exist, so a damaged file causes an error and does not exhaust the memory.

use std::io::{self, Read, Seek, Write};

use edl_core::id::PartitionId;
use edl_core::layout::Layout;
use edl_core::model::ModelSpec;
use serde::{Deserialize, Serialize};

use super::{FORMAT, FORMAT_SCRIPT};
use crate::optimizer::MAX_SLOTS;
use crate::partition::Dense;
use crate::table::{Slab, Table};

const _: () = assert!(cfg!(target_endian = "little"), "files hold the numbers as memory does");

const MAGIC: &[u8; 8] = b"EDLPART\n";
/// Far above what a model with thousands of tables needs.
const MAX_HEADER: usize = 16 << 20;
/// The most that is allocated before the bytes for it have been read.
const STEP: usize = 1 << 20;
/// Bounds under which no sum or product of lengths can wrap.
const MAX_DENSE: usize = 1 << 40;
const MAX_PARTITIONS: u32 = 1 << 20;
const MAX_DIM: usize = 1 << 20;

/// A BLAKE3 checksum.
pub type Checksum = [u8; 32];

/// A copy of a partition's state, to be written while the partition keeps running.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Snapshot {
    pub header: Header,
    pub dense: Dense,
    pub tables: Vec<Slab>,
    /// The applied set, as `AppliedSet::to_bytes` makes it.
    pub applied: Vec<u8>,
    /// The state of the training script; empty except in the first partition of its job.
    pub state: Vec<u8>,
}

/// What a partition's file says about itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Header {
    pub partition: PartitionId,
    pub n_partitions: u32,
    /// Said by the format's number.
    #[serde(skip)]
    pub is_apart: bool,
    /// Of the whole model.
    pub dense_len: usize,
    pub model: String,
    /// Digest of the names, shapes and types of the dense parameters.
    pub params: String,
    /// What the optimizer keeps for each weight.
    pub slots: Vec<String>,
    pub tables: Vec<TableHeader>,
    pub n_batches: u32,
    pub version: u64,
    pub age: u64,
    pub updates: u64,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TableHeader {
    pub name: String,
    pub dim: usize,
    pub n_rows: usize,
}

/// Why bytes are not a partition that this job can use.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot read the file")]
    Read(#[source] io::Error),
    #[error("the file ends too early")]
    Truncated,
    #[error("the file has extra bytes after its end")]
    TooLong,
    #[error("the file is not a checkpoint partition")]
    Magic,
    #[error(
        "the checkpoint has format {found}, this build reads formats {FORMAT} to {FORMAT_SCRIPT}; use the build that wrote it"
    )]
    Format { found: u32 },
    #[error("the header is corrupt")]
    Header(#[source] serde_json::Error),
    #[error("the header has an invalid {what}")]
    Impossible { what: &'static str },
    #[error("the checksum does not match: the file is corrupt")]
    Checksum,
    #[error("row {id} appears twice")]
    Duplicate { id: u64 },
    #[error("row {id} belongs to another partition")]
    Misplaced { id: u64 },
    #[error("the set of applied batches is corrupt")]
    Applied,
    #[error("the checkpoint's embedding rows are laid out for a different distribution strategy")]
    Apart,
    #[error("the file contains partition {found}, not {needs}")]
    Partition { found: PartitionId, needs: PartitionId },
    #[error("the checkpoint has {found} partitions, the job has {needs}; use --partitions={found}")]
    Partitions { found: u32, needs: u32 },
    #[error("the checkpoint is for model `{found}`; its {what} differ from those of `{needs}`")]
    Model { found: String, needs: String, what: &'static str },
    #[error("the checkpoint's optimizer state is [{found}], the job's is [{needs}]")]
    Optimizer { found: String, needs: String },
    #[error("the checkpoint has {found} batches per epoch, the job has {needs}")]
    Plan { found: u32, needs: u32 },
}

impl Snapshot {
    /// Size of the numbers in it.
    #[must_use]
    pub fn n_bytes(&self) -> u64 {
        let slots: usize = self.dense.slots.iter().map(Vec::len).sum();
        let rows: usize = self.tables.iter().map(|slab| slab.len() * (slab.stride() * 4 + 8)).sum();
        ((self.dense.weights.len() + slots) * 4 + rows + self.applied.len() + self.state.len())
            as u64
    }
}

impl Header {
    /// Whether a job with the header `ours` can continue from this file; with `keep_applied`, as the
    /// same job.
    pub(crate) fn expect_fits(&self, ours: &Self, keep_applied: bool) -> Result<(), Error> {
        let other =
            |what| Err(Error::Model { found: self.model.clone(), needs: ours.model.clone(), what });
        if self.params != ours.params || self.dense_len != ours.dense_len {
            return other("parameters");
        }
        let tables = |header: &Self| -> Vec<_> {
            header.tables.iter().map(|table| (table.name.clone(), table.dim)).collect()
        };
        if tables(self) != tables(ours) {
            return other("tables");
        }
        if self.is_apart != ours.is_apart {
            return Err(Error::Apart);
        }
        if self.n_partitions != ours.n_partitions {
            let (found, needs) = (self.n_partitions, ours.n_partitions);
            return Err(Error::Partitions { found, needs });
        }
        if self.partition != ours.partition {
            return Err(Error::Partition { found: self.partition, needs: ours.partition });
        }
        if keep_applied && self.slots != ours.slots {
            let (found, needs) = (self.slots.join(", "), ours.slots.join(", "));
            return Err(Error::Optimizer { found, needs });
        }
        if keep_applied && self.n_batches != ours.n_batches {
            return Err(Error::Plan { found: self.n_batches, needs: ours.n_batches });
        }
        Ok(())
    }

    fn layout(&self) -> Layout {
        let Self { dense_len, n_partitions, is_apart, .. } = *self;
        Layout { dense_len, n_partitions, is_apart }
    }

    fn check_bounds(&self) -> Result<(), Error> {
        let is_odd = self.is_apart && !self.n_partitions.is_multiple_of(2);
        let has_partition = self.partition.0 < self.n_partitions;
        let is_long = |table: &TableHeader| u32::try_from(table.n_rows).is_err();
        let checks = [
            (
                is_odd || !has_partition || self.n_partitions > MAX_PARTITIONS,
                "number of partitions",
            ),
            (self.dense_len > MAX_DENSE, "number of parameters"),
            (self.slots.len() > MAX_SLOTS, "number of optimizer slots"),
            (self.tables.iter().any(|table| table.dim > MAX_DIM), "row length"),
            (self.tables.iter().any(is_long), "number of rows"),
        ];
        match checks.into_iter().find(|(is_invalid, _)| *is_invalid) {
            Some((_, what)) => Err(Error::Impossible { what }),
            None => Ok(()),
        }
    }
}

/// A digest of the parameters' names, shapes and types, to distinguish models.
pub(crate) fn params_digest(model: &ModelSpec) -> String {
    let mut hasher = blake3::Hasher::new();
    for param in &model.params {
        let dtype = if param.is_double { " float64" } else { "" };
        hasher.update(format!("{:?} {:?}{dtype}\n", param.name, param.shape).as_bytes());
    }
    hasher.finalize().to_hex()[..16].to_owned()
}

pub(crate) fn table_headers(model: &ModelSpec, tables: &[Table]) -> Vec<TableHeader> {
    let pairs = model.tables.iter().zip(tables);
    pairs
        .map(|(spec, table)| TableHeader {
            name: spec.name.clone(),
            dim: spec.dim,
            n_rows: table.n_rows(),
        })
        .collect()
}

/// Writes a snapshot; returns how many bytes and their checksum.
pub fn encode(snapshot: &Snapshot, writer: &mut impl Write) -> io::Result<(u64, Checksum)> {
    let mut sink = HashingWriter { writer, hasher: blake3::Hasher::new(), n_bytes: 0 };
    let header = serde_json::to_vec(&snapshot.header)?;
    let header_len = u32::try_from(header.len()).map_err(io::Error::other)?;
    sink.put(MAGIC)?;
    let has_state = !snapshot.state.is_empty();
    assert!(!(has_state && snapshot.header.is_apart), "a training script has no tables");
    let format = if has_state { FORMAT_SCRIPT } else { super::format(snapshot.header.is_apart) };
    sink.put(&format.to_le_bytes())?;
    sink.put(&header_len.to_le_bytes())?;
    sink.put(&header)?;
    sink.put(&(snapshot.applied.len() as u64).to_le_bytes())?;
    sink.put(&snapshot.applied)?;
    if has_state {
        sink.put(&(snapshot.state.len() as u64).to_le_bytes())?;
        sink.put(&snapshot.state)?;
    }
    sink.put(bytemuck::cast_slice(&snapshot.dense.weights))?;
    for slot in &snapshot.dense.slots {
        sink.put(bytemuck::cast_slice(slot))?;
    }
    for table in &snapshot.tables {
        sink.put(bytemuck::cast_slice(table.ids()))?;
        for chunk in table.chunks() {
            sink.put(bytemuck::cast_slice(chunk))?;
        }
    }
    let checksum = *sink.hasher.finalize().as_bytes();
    sink.writer.write_all(&checksum)?;
    Ok((sink.n_bytes + checksum.len() as u64, checksum))
}

/// Reads what `encode` wrote, to the end, and checks it.
pub fn decode(reader: &mut impl Read) -> Result<(Snapshot, Checksum), Error> {
    let (snapshot, computed, stored) = parse(reader)?;
    if computed != stored {
        return Err(Error::Checksum);
    }
    Ok((snapshot, computed))
}

/// The checksum of all bytes of a file of `length` bytes before the one that it carries.
pub(super) fn checksum(reader: &mut (impl Read + Seek), length: u64) -> io::Result<Checksum> {
    reader.rewind()?;
    let mut hasher = blake3::Hasher::new();
    hasher.update_reader(reader.take(length.saturating_sub(size_of::<Checksum>() as u64)))?;
    Ok(*hasher.finalize().as_bytes())
}

/// Reads a whole file; returns the checksum of what was read and the one it carries.
pub(crate) fn parse(reader: &mut impl Read) -> Result<(Snapshot, Checksum, Checksum), Error> {
    let mut source = HashingReader { reader, hasher: blake3::Hasher::new() };
    let (header, has_state) = read_header(&mut source)?;
    let applied = source.block("applied set")?;
    let state = if has_state { source.block("script state")? } else { Vec::new() };
    let n_dense = header.layout().segment(header.partition).len();
    let mut dense = Dense { weights: source.numbers(n_dense)?, ..Dense::default() };
    for slot in dense.slots.iter_mut().take(header.slots.len()) {
        *slot = source.numbers(n_dense)?;
    }
    let mut tables = Vec::new();
    for table in &header.tables {
        let ids: Vec<u64> = source.numbers(table.n_rows)?;
        let stranger = |id: &&u64| header.layout().partition_of(**id) != header.partition;
        if let Some(id) = ids.iter().find(stranger) {
            return Err(Error::Misplaced { id: *id });
        }
        let stride = table.dim * (1 + header.slots.len());
        tables.push(Slab::read(stride, ids, |chunk| source.fill(bytemuck::cast_slice_mut(chunk)))?);
    }
    let computed = *source.hasher.finalize().as_bytes();
    let stored = source.array()?;
    source.expect_end()?;
    Ok((Snapshot { header, dense, tables, applied, state }, computed, stored))
}

/// The header, and whether the file holds the state of a training script.
fn read_header<R: Read>(source: &mut HashingReader<'_, R>) -> Result<(Header, bool), Error> {
    if &source.array()? != MAGIC {
        return Err(Error::Magic);
    }
    let found = u32::from_le_bytes(source.array()?);
    let has_state = found == FORMAT_SCRIPT;
    let is_apart = match has_state {
        true => false,
        false => super::is_apart(found).ok_or(Error::Format { found })?,
    };
    let length = u32::from_le_bytes(source.array()?) as usize;
    if length > MAX_HEADER {
        return Err(Error::Impossible { what: "length" });
    }
    let bytes: Vec<u8> = source.numbers(length)?;
    let mut header: Header = serde_json::from_slice(&bytes).map_err(Error::Header)?;
    header.is_apart = is_apart;
    header.check_bounds()?;
    Ok((header, has_state))
}

/// Writes, counts and sums up.
struct HashingWriter<'a, W> {
    writer: &'a mut W,
    hasher: blake3::Hasher,
    n_bytes: u64,
}

impl<W: Write> HashingWriter<'_, W> {
    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        // In pieces, so a piece is still in the cache when it is written.
        for piece in bytes.chunks(STEP) {
            self.hasher.update(piece);
            self.writer.write_all(piece)?;
        }
        self.n_bytes += bytes.len() as u64;
        Ok(())
    }
}

/// Reads and sums up.
struct HashingReader<'a, R> {
    reader: &'a mut R,
    hasher: blake3::Hasher,
}

impl<R: Read> HashingReader<'_, R> {
    fn fill(&mut self, bytes: &mut [u8]) -> Result<(), Error> {
        self.reader.read_exact(bytes).map_err(|error| {
            let is_end = error.kind() == io::ErrorKind::UnexpectedEof;
            if is_end { Error::Truncated } else { Error::Read(error) }
        })?;
        self.hasher.update(bytes);
        Ok(())
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Error> {
        let mut bytes = [0; N];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    /// Reads `n` numbers, making room only as they come.
    fn numbers<T: bytemuck::Pod>(&mut self, n: usize) -> Result<Vec<T>, Error> {
        let step = STEP / size_of::<T>();
        let mut numbers = Vec::with_capacity(n.min(step));
        while numbers.len() < n {
            let start = numbers.len();
            numbers.resize(n.min(start + step), T::zeroed());
            self.fill(bytemuck::cast_slice_mut(&mut numbers[start..]))?;
        }
        Ok(numbers)
    }

    /// Reads bytes that follow their length.
    fn block(&mut self, what: &'static str) -> Result<Vec<u8>, Error> {
        let length = usize::try_from(u64::from_le_bytes(self.array()?));
        self.numbers(length.map_err(|_| Error::Impossible { what })?)
    }

    fn expect_end(&mut self) -> Result<(), Error> {
        let error = match self.fill(&mut [0]) {
            Ok(()) => Error::TooLong,
            Err(Error::Truncated) => return Ok(()),
            Err(error) => error,
        };
        Err(error)
    }
}
