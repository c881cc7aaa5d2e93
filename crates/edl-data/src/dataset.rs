// SPDX-License-Identifier: Apache-2.0
//! A data set: the records of all its files under one numbering.

mod cache;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use edl_core::model::{DType, FieldSpec};
use edl_core::spec::Codec;
use edl_tensor::batch::Batch;
use prost::bytes::Bytes;

use crate::decode::Builder;
use crate::error::{Error, Place};
use crate::format::{Format, Params};
use crate::index::{ChunkEntry, FileIndex};
use crate::location::{Bare, DataFile, bare, resolve};
use crate::row::{Records, Row};
use crate::saved_index::{self, Stamp};
use crate::scan::{self, Progress};
use crate::{csv, jsonl, recordio, tfrecord};

use cache::Cache;

/// How a data set is read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OpenOptions {
    pub codec: Codec,
    /// `--data_reader_params`: format, delimiter, header, columns, trim, cache_mb, cache_dir.
    pub params: BTreeMap<String, String>,
}

/// An open data set. It can be read from several threads at once.
#[derive(Debug)]
pub struct Dataset {
    location: String,
    codec: Codec,
    params: Params,
    format: Format,
    files: Vec<IndexedFile>,
    /// All chunks of all files; sorted by their first record.
    chunks: Vec<ChunkPlace>,
    n_records: u64,
    /// The location, if the model reads the records itself.
    source: Option<Arc<str>>,
    fingerprint: String,
    cache: Cache<dyn Records>,
    is_index_saved: bool,
}

#[derive(Debug)]
struct IndexedFile {
    file: DataFile,
    /// From before it was indexed.
    stamp: Stamp,
    index: FileIndex,
}

#[derive(Clone, Copy, Debug)]
struct ChunkPlace {
    first: u64,
    file: usize,
    chunk: usize,
}

impl Dataset {
    /// Lists the files, finds their format and indexes their chunks.
    pub fn open(location: &str, options: &OpenOptions) -> Result<Self, Error> {
        Self::open_indexed(location, options, None, &Progress::default())
    }

    /// Like `open`, but reads the index from the folder `indexes` if `save_index` has left it there.
    /// Otherwise `progress` shows how far the new index is.
    pub fn open_indexed(
        location: &str,
        options: &OpenOptions,
        indexes: Option<&Path>,
        progress: &Progress,
    ) -> Result<Self, Error> {
        if let Some(bare) = bare(location)? {
            // The parameters belong to the custom data reader.
            let none = BTreeMap::new();
            let params = if bare.is_read_by_model { &none } else { &options.params };
            return Ok(Self::of_range(location, options.codec, Params::parse(params)?, &bare));
        }
        let params = Params::parse(&options.params)?;
        let files = resolve(location, &params)?;
        let stamps = Stamp::all(&files)?;
        let saved = indexes.and_then(|dir| saved_index::load(dir, location, &params, &stamps));
        let is_index_saved = saved.is_some();
        let (format, indices) = if let Some(saved) = saved {
            saved
        } else {
            let format = common_format(&files, &params)?.ok_or_else(|| no_records(location))?;
            (format, scan::all(format, &files, &params, progress)?)
        };
        let indexed = files.into_iter().zip(stamps).zip(indices);
        let indexed = indexed.map(|((file, stamp), index)| IndexedFile { file, stamp, index });
        let files: Vec<IndexedFile> = indexed.collect();
        let (chunks, n_records) = number_records(&files);
        if n_records == 0 {
            return Err(no_records(location));
        }
        Ok(Self {
            location: location.to_owned(),
            codec: options.codec,
            cache: Cache::new(params.cache_bytes),
            params,
            format,
            fingerprint: fingerprint(&files),
            files,
            chunks,
            n_records,
            source: None,
            is_index_saved,
        })
    }

    /// Saves the index for `open_indexed`, unless it comes from there.
    pub fn save_index(&self, indexes: &Path) -> Result<(), Error> {
        if self.files.is_empty() || self.is_index_saved {
            return Ok(());
        }
        let files = self.files.iter().map(|file| (&file.stamp, &file.index));
        saved_index::save(indexes, &self.location, &self.params, self.format, files)
    }

    /// Records without files, which have only numbers.
    fn of_range(location: &str, codec: Codec, params: Params, bare: &Bare<'_>) -> Self {
        let n_records = bare.n_records;
        let mut hasher = blake3::Hasher::new();
        hasher.update(b"range").update(&n_records.to_le_bytes()).update(bare.digest.as_bytes());
        Self {
            location: location.to_owned(),
            codec,
            cache: Cache::new(params.cache_bytes),
            params,
            format: Format::Range,
            fingerprint: hasher.finalize().to_hex().to_string(),
            files: Vec::new(),
            chunks: Vec::new(),
            n_records,
            source: bare.is_read_by_model.then(|| location.into()),
            is_index_saved: false,
        }
    }

    #[must_use]
    pub fn n_records(&self) -> u64 {
        self.n_records
    }

    #[must_use]
    pub fn location(&self) -> &str {
        &self.location
    }

    #[must_use]
    pub fn format(&self) -> Format {
        self.format
    }

    /// A hash of the names, sizes, counts and chunk hashes of the files. It does not depend on where
    /// the data set is.
    #[must_use]
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    /// Tries the first record against the fields.
    pub fn check(&self, fields: &[FieldSpec]) -> Result<(), Error> {
        self.batch(&[0], fields).map(drop)
    }

    /// Decodes some records into columns, in the order given.
    pub fn batch(&self, records: &[u64], fields: &[FieldSpec]) -> Result<Batch, Error> {
        self.check_fields(fields)?;
        // A model that needs only the whole record decodes it itself.
        let is_whole = |field: &FieldSpec| field.dtype == DType::Record;
        let is_raw = !fields.is_empty() && fields.iter().all(is_whole);
        let codec = if is_raw { Codec::Bytes } else { self.codec };
        let mut builders: Vec<Builder<'_>> =
            fields.iter().map(|field| Builder::new(field, records.len())).collect();
        self.visit_as(codec, records, |at, place, row| {
            for (builder, field) in builders.iter_mut().zip(fields) {
                builder
                    .set(at, row)
                    .map_err(|problem| Error::field(place(), &field.name, problem))?;
            }
            Ok(())
        })?;
        let columns = builders.into_iter().map(Builder::finish).collect();
        Ok(Batch { records: records.to_vec(), columns, source: self.source.clone() })
    }

    /// The undecoded bytes of a record; only RecordIO, TFRecord and JSON lines have them.
    pub fn raw(&self, record: u64) -> Result<Option<Bytes>, Error> {
        if self.format == Format::Range {
            return self.number(record).map(|_| None);
        }
        let (chunk, at) = self.find(record)?;
        Ok(self.chunk(chunk)?.raw(at))
    }

    /// Names the file, the chunk and the place in the chunk of a record.
    #[must_use]
    pub fn locate(&self, record: u64) -> String {
        if self.format == Format::Range {
            return self.number(record).map_or_else(|e| e.to_string(), |place| place.to_string());
        }
        match self.find(record) {
            Ok((chunk, at)) => {
                // The chunk is read again for the line number.
                let records = self.chunk(chunk).ok();
                self.place(chunk, at, records.as_deref()).to_string()
            }
            Err(error) => error.to_string(),
        }
    }

    /// Names, sizes, chunks and records of the files.
    pub(crate) fn files(&self) -> impl Iterator<Item = (&DataFile, &FileIndex)> {
        self.files.iter().map(|indexed| (&indexed.file, &indexed.index))
    }

    /// Decodes records chunk by chunk, so each chunk is unpacked once in any order of the records.
    /// `see` gets the position in `records`, the place for errors and the record.
    pub(crate) fn visit(
        &self,
        records: &[u64],
        see: impl FnMut(usize, &dyn Fn() -> Place, &Row<'_>) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.visit_as(self.codec, records, see)
    }

    fn visit_as(
        &self,
        codec: Codec,
        records: &[u64],
        mut see: impl FnMut(usize, &dyn Fn() -> Place, &Row<'_>) -> Result<(), Error>,
    ) -> Result<(), Error> {
        if self.format == Format::Range {
            for (position, record) in records.iter().enumerate() {
                let place = self.number(*record)?;
                see(position, &|| place.clone(), &Row::Bare)?;
            }
            return Ok(());
        }
        let mut order = Vec::with_capacity(records.len());
        for (position, record) in records.iter().enumerate() {
            let (chunk, at) = self.find(*record)?;
            order.push((chunk, at, position));
        }
        order.sort_unstable();
        for group in order.chunk_by(|a, b| a.0 == b.0) {
            let Some((chunk, _, _)) = group.first() else { continue };
            let unpacked = self.chunk(*chunk)?;
            for (_, at, position) in group {
                let place = || self.place(*chunk, *at, Some(&*unpacked));
                let row = unpacked.row(*at, codec);
                let row = row.map_err(|problem| Error::corrupt(place(), problem))?;
                see(*position, &place, &row)?;
            }
        }
        Ok(())
    }

    /// Refuses fields that no record of this format has.
    fn check_fields(&self, fields: &[FieldSpec]) -> Result<(), Error> {
        let (whole, decoded): (Vec<&FieldSpec>, Vec<&FieldSpec>) =
            fields.iter().partition(|field| field.dtype == DType::Record);
        if let (Format::Range, Some(field)) = (self.format, fields.first()) {
            return Err(Error::Refused(format!(
                "cannot read field `{}`: `{}` contains only record numbers; use files that have \
                 the field, or use a model that provides its own data",
                field.name, self.location
            )));
        }
        if !self.format.has_raw_records() {
            return match whole.first() {
                Some(field) => Err(Error::Refused(format!(
                    "field `{}` is the undecoded record, which only recordio and tfrecord files \
                     have, but `{}` is {}; convert it with `elasticdl data import`",
                    field.name, self.location, self.format
                ))),
                None => Ok(()),
            };
        }
        if self.codec != Codec::Bytes {
            return Ok(());
        }
        match decoded.as_slice() {
            [] if !whole.is_empty() => Ok(()),
            [field] if matches!(field.dtype, DType::Bytes | DType::U8) => Ok(()),
            _ => Err(Error::refused(
                "--codec_type=bytes provides a single column of bytes, but this model needs other \
                 columns; use --codec_type=tf_example",
            )),
        }
    }

    /// The place of a record without files.
    fn number(&self, record: u64) -> Result<Place, Error> {
        let at = usize::try_from(record).ok().filter(|_| record < self.n_records);
        let at = at.ok_or(Error::OutOfRange { record, n_records: self.n_records })?;
        Ok(Place::file(self.location.as_ref()).record(at))
    }

    /// The chunk that holds a record, and the record's number in it.
    fn find(&self, record: u64) -> Result<(usize, usize), Error> {
        let beyond = || Error::OutOfRange { record, n_records: self.n_records };
        if record >= self.n_records {
            return Err(beyond());
        }
        let after = self.chunks.partition_point(|chunk| chunk.first <= record);
        let number = after.checked_sub(1).ok_or_else(beyond)?;
        let at = usize::try_from(record - self.chunks[number].first).map_err(|_| beyond())?;
        Ok((number, at))
    }

    fn chunk(&self, number: usize) -> Result<Arc<dyn Records>, Error> {
        if let Some(records) = self.cache.get(number) {
            return Ok(records);
        }
        let place = self.chunks[number];
        let IndexedFile { file, index, .. } = &self.files[place.file];
        let entry = &index.chunks[place.chunk];
        let records = load(self.format, file, place.chunk, entry, index, &self.params)?;
        if records.n_records() as u64 != entry.n_records {
            let place = self.place(number, 0, None);
            return Err(Error::corrupt(place, "the chunk does not match the index"));
        }
        self.cache.put(number, Arc::clone(&records), records.bytes());
        Ok(records)
    }

    fn place(&self, chunk: usize, at: usize, records: Option<&dyn Records>) -> Place {
        let ChunkPlace { file, chunk, .. } = self.chunks[chunk];
        let place = Place::chunk(&self.files[file].file.path, self.format.chunk_name(), chunk);
        let line = records.and_then(|records| records.line(at));
        Place { line, ..place.record(at) }
    }
}

/// The first record of each chunk that has some, and the number of all records.
fn number_records(files: &[IndexedFile]) -> (Vec<ChunkPlace>, u64) {
    let (mut chunks, mut n_records) = (Vec::new(), 0);
    for (file, IndexedFile { index, .. }) in files.iter().enumerate() {
        for (chunk, entry) in index.chunks.iter().enumerate() {
            if entry.n_records > 0 {
                chunks.push(ChunkPlace { first: n_records, file, chunk });
                n_records += entry.n_records;
            }
        }
    }
    (chunks, n_records)
}

fn no_records(location: &str) -> Error {
    Error::NoRecords { location: location.to_owned() }
}

/// The common format of all files; empty files match any format.
fn common_format(files: &[DataFile], params: &Params) -> Result<Option<Format>, Error> {
    if params.format.is_some() {
        return Ok(params.format);
    }
    let mut common: Option<(Format, &DataFile)> = None;
    for file in files {
        let Some(format) = Format::of_file(&file.path)? else { continue };
        match common {
            None => common = Some((format, file)),
            Some((other, first)) if other != format => {
                return Err(Error::Refused(format!(
                    "all files of a dataset must have the same format, but `{}` is {other} and \
                     `{}` is {format}; select files with a pattern, e.g. `*.{other}`",
                    first.path.display(),
                    file.path.display(),
                )));
            }
            Some(_) => {}
        }
    }
    Ok(common.map(|(format, _)| format))
}

fn load(
    format: Format,
    file: &DataFile,
    number: usize,
    entry: &ChunkEntry,
    index: &FileIndex,
    params: &Params,
) -> Result<Arc<dyn Records>, Error> {
    let path = &file.path;
    Ok(match format {
        Format::RecordIo => Arc::new(recordio::load(path, number, entry)?),
        Format::TfRecord => Arc::new(tfrecord::load(path, number, entry)?),
        Format::Csv => Arc::new(csv::load(path, number, entry, &index.columns, params)?),
        Format::Jsonl => Arc::new(jsonl::load(path, number, entry)?),
        #[cfg(feature = "parquet")]
        Format::Parquet => Arc::new(crate::parquet::load(path, number, entry)?),
        #[cfg(not(feature = "parquet"))]
        Format::Parquet => return Err(no_parquet(path)),
        Format::Range => return Err(no_range(path)),
    })
}

pub(crate) fn no_range(path: &Path) -> Error {
    Error::Refused(format!("`{}` is a file, but a range has no files", path.display()))
}

#[cfg(not(feature = "parquet"))]
pub(crate) fn no_parquet(path: &Path) -> Error {
    Error::Refused(format!(
        "`{}` is a Parquet file, but this binary was built without Parquet; rebuild it \
         with `cargo build --release --features parquet`",
        path.display()
    ))
}

fn fingerprint(files: &[IndexedFile]) -> String {
    let mut hasher = blake3::Hasher::new();
    let add = |hasher: &mut blake3::Hasher, number: u64| {
        hasher.update(&number.to_le_bytes());
    };
    for IndexedFile { file, index, .. } in files {
        add(&mut hasher, file.name.len() as u64);
        hasher.update(file.name.as_bytes());
        add(&mut hasher, index.bytes);
        add(&mut hasher, index.chunks.len() as u64);
        for chunk in &index.chunks {
            for part in [chunk.offset, chunk.len, chunk.n_records, chunk.check] {
                add(&mut hasher, part);
            }
        }
    }
    hasher.finalize().to_hex().to_string()
}
