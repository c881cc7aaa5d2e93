// SPDX-License-Identifier: Apache-2.0
//! Parquet tables, read column by column without Arrow.
//!
//! A chunk is a row group. Lists, nested or not, become flat runs of values per row.

mod pages;

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use ::parquet::basic::{ConvertedType, LogicalType};
use ::parquet::column::page::PageReader;
use ::parquet::column::reader::{ColumnReader, ColumnReaderImpl};
use ::parquet::data_type::{AsBytes as _, DataType};
use ::parquet::errors::ParquetError;
use ::parquet::file::metadata::ColumnChunkMetaData;
use ::parquet::file::reader::{FileReader as _, RowGroupReader, SerializedFileReader};
use ::parquet::schema::types::{ColumnDescriptor, SchemaDescriptor};
use edl_core::spec::Codec;

use crate::decode::Value;
use crate::error::{Error, Place, ROW_GROUP};
use crate::index::{ChunkEntry, FileIndex, changed, file_len, short_hash};
use crate::row::{Records, Row};

/// The most values of a column in a row group; writers put at most 67 million rows into one.
const MAX_VALUES: usize = 1 << 27;

/// The rows of one row group.
#[derive(Debug)]
pub(crate) struct Table {
    names: Vec<String>,
    places: HashMap<String, usize>,
    columns: Vec<TableColumn>,
    n_rows: usize,
}

#[derive(Debug)]
struct TableColumn {
    values: Values,
    /// Where each row's values start, and where the last one's end.
    starts: Vec<usize>,
    /// Rows whose list lacks some of its parts.
    holes: BTreeSet<usize>,
}

#[derive(Debug)]
enum Values {
    Ints(Vec<i64>),
    Floats(Vec<f32>),
    Doubles(Vec<f64>),
    Bytes(Vec<Vec<u8>>),
    Unreadable(String),
}

impl Table {
    pub(crate) fn get(&self, row: usize, name: &str) -> Option<Value<'_>> {
        self.columns.get(*self.places.get(name)?)?.get(row)
    }

    pub(crate) fn names(&self) -> Vec<String> {
        self.names.clone()
    }
}

impl Records for Table {
    fn n_records(&self) -> usize {
        self.n_rows
    }

    fn bytes(&self) -> usize {
        self.columns.iter().map(TableColumn::bytes).sum()
    }

    fn row(&self, row: usize, _codec: Codec) -> Result<Row<'_>, String> {
        Ok(Row::Table { table: self, row })
    }
}

impl TableColumn {
    fn get(&self, row: usize) -> Option<Value<'_>> {
        if let Values::Unreadable(why) = &self.values {
            return Some(Value::Unreadable(why.clone()));
        }
        let span = *self.starts.get(row)?..*self.starts.get(row + 1)?;
        if self.holes.contains(&row) {
            return Some(Value::Unreadable("a list with missing values".into()));
        }
        if span.is_empty() {
            return Some(Value::Missing);
        }
        match &self.values {
            Values::Ints(values) => values.get(span).map(|part| Value::Ints(Cow::Borrowed(part))),
            Values::Floats(values) => {
                values.get(span).map(|part| Value::Floats(Cow::Borrowed(part)))
            }
            Values::Doubles(values) => {
                values.get(span).map(|part| Value::Doubles(Cow::Borrowed(part)))
            }
            Values::Bytes(values) => {
                values.get(span).map(|part| Value::Blobs(part.iter().map(Vec::as_slice).collect()))
            }
            Values::Unreadable(_) => None,
        }
    }

    fn bytes(&self) -> usize {
        let values = match &self.values {
            Values::Ints(values) => values.len() * 8,
            Values::Floats(values) => values.len() * 4,
            Values::Doubles(values) => values.len() * 8,
            Values::Bytes(values) => {
                values.iter().map(|bytes| bytes.len() + size_of::<Vec<u8>>()).sum()
            }
            Values::Unreadable(_) => 0,
        };
        values + self.starts.len() * size_of::<usize>()
    }
}

/// Runs the Parquet library. It is careful with what it reads but does not promise never to
/// panic on a broken file, and a broken file must not end a worker.
fn guarded<T>(place: &Place, work: impl FnOnce() -> Result<T, ParquetError>) -> Result<T, Error> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(done) => done.map_err(|error| {
            let text = error.to_string();
            let text = text.trim_start_matches("Parquet error: ").trim_start_matches("EOF: ");
            Error::corrupt(place.clone(), format!("invalid Parquet file: {text}"))
        }),
        Err(_) => Err(Error::corrupt(place.clone(), "the Parquet reader crashed on this file")),
    }
}

/// A number that stands for the footer, and with it for where everything is.
fn footer_check(path: &Path) -> Result<u64, Error> {
    let len = file_len(path)?;
    let mut file = File::open(path).map_err(Error::io("open", path))?;
    let mut tail = |back: u64| {
        let mut bytes = Vec::new();
        file.seek(SeekFrom::Start(len.saturating_sub(back)))?;
        file.read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    let end = tail(8).map_err(Error::io("read", path))?;
    let footer = end.first_chunk().map_or(0, |bytes| u64::from(u32::from_le_bytes(*bytes)));
    let bytes = tail(footer + 8).map_err(Error::io("read", path))?;
    Ok(short_hash(&blake3::hash(&bytes)))
}

pub(crate) fn scan(path: &Path) -> Result<FileIndex, Error> {
    let bytes = file_len(path)?;
    let check = footer_check(path)?;
    let file = File::open(path).map_err(Error::io("open", path))?;
    let place = Place::file(path);
    let reader = guarded(&place, || SerializedFileReader::new(file))?;
    let metadata = reader.metadata();
    let number = |count: i64| u64::try_from(count).unwrap_or(0);
    let groups = metadata.row_groups();
    if groups.iter().any(|group| number(group.num_rows()) > MAX_VALUES as u64) {
        return Err(Error::corrupt(place, too_large("a row group", MAX_VALUES)));
    }
    let chunks = groups.iter().filter(|group| group.num_rows() > 0).map(|group| ChunkEntry {
        offset: number(group.file_offset().unwrap_or(0)),
        len: number(group.compressed_size()),
        n_records: number(group.num_rows()),
        check,
        line: 0,
    });
    let columns = column_names(metadata.file_metadata().schema_descr());
    Ok(FileIndex { bytes, chunks: chunks.collect(), columns })
}

pub(crate) fn load(path: &Path, number: usize, entry: &ChunkEntry) -> Result<Table, Error> {
    let place = Place::chunk(path, ROW_GROUP, number);
    if footer_check(path)? != entry.check {
        return Err(changed(&place));
    }
    let file = File::open(path).map_err(Error::io("open", path))?;
    // Not a clone: it would share its position with the reader's.
    let raw = File::open(path).map_err(Error::io("open", path))?;
    let table = guarded(&place, || {
        let reader = SerializedFileReader::new(file)?;
        let groups = reader.metadata().row_groups().iter().enumerate();
        let group = groups.filter(|(_, group)| group.num_rows() > 0).nth(number);
        let (group, _) = group.ok_or(ParquetError::General("the row group is missing".into()))?;
        read_table(&*reader.get_row_group(group)?, &raw)
    })?;
    if table.n_rows as u64 != entry.n_records {
        return Err(changed(&place));
    }
    Ok(table)
}

/// A column is named by its root, unless several columns grow from the same root.
fn column_names(schema: &SchemaDescriptor) -> Vec<String> {
    let root =
        |column: &ColumnDescriptor| column.path().parts().first().cloned().unwrap_or_default();
    let mut leaves: BTreeMap<String, usize> = BTreeMap::new();
    for column in schema.columns() {
        *leaves.entry(root(column)).or_default() += 1;
    }
    let name = |column: &ColumnDescriptor| match leaves.get(&root(column)) {
        Some(1) => root(column),
        _ => column.path().string(),
    };
    schema.columns().iter().map(|column| name(column)).collect()
}

/// Where the pages of a column are in the file, and their length; the library would panic if a number
/// is negative.
fn place(column: &ColumnChunkMetaData) -> Result<(u64, u64), ParquetError> {
    let start = column.dictionary_page_offset().unwrap_or_else(|| column.data_page_offset());
    let place = u64::try_from(start).ok().zip(u64::try_from(column.compressed_size()).ok());
    place.ok_or_else(|| {
        let name = column.column_path();
        ParquetError::General(format!("column {name} has a negative place or length in the file"))
    })
}

fn read_table(group: &dyn RowGroupReader, file: &File) -> Result<Table, ParquetError> {
    let metadata = group.metadata();
    let n_rows = usize::try_from(metadata.num_rows()).ok().filter(|n| *n <= MAX_VALUES);
    let n_rows = n_rows.ok_or_else(|| too_large("a row group", MAX_VALUES))?;
    let schema = metadata.schema_descr();
    let mut columns = Vec::new();
    for number in 0..metadata.num_columns() {
        let column = metadata.column(number);
        let (start, len) = place(column)?;
        let ratio = pages::max_ratio(column.compression());
        if !pages::are_plausible(file, start, start.saturating_add(len), ratio)? {
            let name = column.column_path();
            let why = format!("a page of column {name} claims more bytes than it can have");
            return Err(ParquetError::General(why));
        }
        check_pages(&mut *group.get_column_page_reader(number)?, MAX_VALUES)?;
        let reader = group.get_column_reader(number)?;
        columns.push(read_column(reader, &schema.column(number), n_rows)?);
    }
    let names = column_names(schema);
    let places = names.iter().cloned().zip(0..).collect();
    Ok(Table { names, places, columns, n_rows })
}

/// Refuses a column whose pages hold more than `most` values, before they are decoded: a page of a few
/// bytes can stand for two billion.
fn check_pages(pages: &mut dyn PageReader, most: usize) -> Result<(), ParquetError> {
    let mut n_values = 0_usize;
    while let Some(page) = pages.peek_next_page()? {
        if page.is_dict {
            let Some(dictionary) = pages.get_next_page()? else { break };
            let bits = dictionary.buffer().len().saturating_mul(8);
            if dictionary.num_values() as usize > bits {
                return Err(too_large("a dictionary", bits));
            }
            continue;
        }
        n_values = n_values.saturating_add(page.num_levels.unwrap_or(usize::MAX));
        if n_values > most {
            return Err(too_large("a column of a row group", most));
        }
        pages.skip_next_page()?;
    }
    Ok(())
}

fn too_large(what: &str, most: usize) -> ParquetError {
    ParquetError::General(format!("{what} has more than {most} values"))
}

fn read_column(
    reader: ColumnReader,
    column: &ColumnDescriptor,
    n_rows: usize,
) -> Result<TableColumn, ParquetError> {
    let decimal = column.converted_type() == ConvertedType::DECIMAL
        || matches!(column.logical_type_ref(), Some(LogicalType::Decimal(_)));
    let unsigned = is_unsigned(column);
    let scale = 10f64.powi(-column.type_scale());
    let ints = |values: Vec<i64>| {
        if decimal {
            #[expect(clippy::cast_precision_loss, reason = "decimals are read as floats")]
            let scaled = values.into_iter().map(|value| value as f64 * scale).collect();
            return Values::Doubles(scaled);
        }
        if unsigned && values.iter().any(|value| *value < 0) {
            return Values::Unreadable("a column of unsigned integers of 2^63 or more".into());
        }
        Values::Ints(values)
    };
    let odd_bytes = decimal || matches!(column.logical_type_ref(), Some(LogicalType::Float16));
    let bytes = |values: Vec<Vec<u8>>| match odd_bytes {
        true => Values::Unreadable(
            "a column of decimals or half floats, which are not supported".into(),
        ),
        false => Values::Bytes(values),
    };
    match reader {
        ColumnReader::BoolColumnReader(reader) => {
            drain(reader, column, n_rows, |values: Vec<bool>| {
                Values::Ints(values.into_iter().map(i64::from).collect())
            })
        }
        ColumnReader::Int32ColumnReader(reader) => {
            drain(reader, column, n_rows, |values: Vec<i32>| {
                let widen = |value: i32| match unsigned {
                    true => i64::from(value.cast_unsigned()),
                    false => i64::from(value),
                };
                ints(values.into_iter().map(widen).collect())
            })
        }
        ColumnReader::Int64ColumnReader(reader) => drain(reader, column, n_rows, ints),
        ColumnReader::Int96ColumnReader(_) => Ok(TableColumn {
            values: Values::Unreadable("a column of INT96, which is not supported".into()),
            starts: Vec::new(),
            holes: BTreeSet::new(),
        }),
        ColumnReader::FloatColumnReader(reader) => drain(reader, column, n_rows, Values::Floats),
        ColumnReader::DoubleColumnReader(reader) => drain(reader, column, n_rows, Values::Doubles),
        ColumnReader::ByteArrayColumnReader(reader) => drain(reader, column, n_rows, |values| {
            bytes(values.iter().map(|value| value.as_bytes().to_vec()).collect())
        }),
        ColumnReader::FixedLenByteArrayColumnReader(reader) => {
            drain(reader, column, n_rows, |values| {
                bytes(values.iter().map(|value| value.as_bytes().to_vec()).collect())
            })
        }
    }
}

fn is_unsigned(column: &ColumnDescriptor) -> bool {
    let converted = [
        ConvertedType::UINT_8,
        ConvertedType::UINT_16,
        ConvertedType::UINT_32,
        ConvertedType::UINT_64,
    ];
    converted.contains(&column.converted_type())
        || matches!(column.logical_type_ref(), Some(LogicalType::Integer(int)) if !int.is_signed)
}

/// Reads a column to its end and finds where its rows begin.
fn drain<T: DataType>(
    mut reader: ColumnReaderImpl<T>,
    column: &ColumnDescriptor,
    n_rows: usize,
    make: impl FnOnce(Vec<T::T>) -> Values,
) -> Result<TableColumn, ParquetError> {
    let (max_def, max_rep) = (column.max_def_level(), column.max_rep_level());
    let (mut defs, mut reps, mut values) = (Vec::new(), Vec::new(), Vec::new());
    let (mut rows, mut n_levels) = (0, 0);
    while rows < n_rows {
        let (more, _, levels) = reader.read_records(
            n_rows - rows,
            (max_def > 0).then_some(&mut defs),
            (max_rep > 0).then_some(&mut reps),
            &mut values,
        )?;
        if more == 0 {
            return Err(ParquetError::EOF(format!("column {} ends early", column.path())));
        }
        rows += more;
        n_levels += levels;
    }
    let mut starts = Vec::with_capacity(n_rows + 1);
    let mut holes = BTreeSet::new();
    let mut n_values = 0;
    for level in 0..n_levels {
        let first = max_rep == 0 || reps.get(level) == Some(&0);
        if first {
            starts.push(n_values);
        }
        if max_def == 0 || defs.get(level) == Some(&max_def) {
            n_values += 1;
        }
        // A lone absent value is an absent list; among others it is a hole in one.
        let absent = max_def > 0 && defs.get(level) != Some(&max_def);
        let before_absent =
            !first && level > 0 && max_def > 0 && defs.get(level - 1) != Some(&max_def);
        if !first && (absent || before_absent) {
            holes.insert(starts.len().saturating_sub(1));
        }
    }
    starts.push(n_values);
    if starts.len() != n_rows + 1 || n_values != values.len() {
        return Err(ParquetError::General(format!("column {} is inconsistent", column.path())));
    }
    Ok(TableColumn { values: make(values), starts, holes })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use ::parquet::data_type::Int64Type;
    use ::parquet::file::writer::SerializedFileWriter;
    use ::parquet::schema::parser::parse_message_type;

    use super::*;

    #[test]
    fn a_column_of_too_many_values_is_refused_before_it_is_decoded() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.parquet");
        let schema = Arc::new(parse_message_type("message m { required int64 x; }").unwrap());
        let file = File::create(&path).unwrap();
        let mut writer = SerializedFileWriter::new(file, schema, Arc::default()).unwrap();
        let mut group = writer.next_row_group().unwrap();
        let mut column = group.next_column().unwrap().unwrap();
        // A dictionary of one value and a run of its number: a few bytes.
        column.typed::<Int64Type>().write_batch(&[7; 5000], None, None).unwrap();
        column.close().unwrap();
        group.close().unwrap();
        writer.close().unwrap();
        let reader = SerializedFileReader::new(File::open(&path).unwrap()).unwrap();
        let group = reader.get_row_group(0).unwrap();
        let check = |most| check_pages(&mut *group.get_column_page_reader(0).unwrap(), most);
        check(5000).unwrap();
        let error = check(4999).unwrap_err().to_string();
        assert!(error.contains("a column of a row group has more than 4999 values"), "{error}");
    }
}
