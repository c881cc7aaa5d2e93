// SPDX-License-Identifier: Apache-2.0
//! Shows a data set to people: a summary, and its first records.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::Value as Json;

use crate::dataset::{Dataset, OpenOptions};
use crate::decode::Value;
use crate::error::Error;
use crate::format::Format;
use crate::infer::{Columns, Seen, readable};
use crate::recordio;
use crate::row::Row;

pub use crate::infer::ColumnKind;

/// How many records are looked at to find out the fields.
pub(crate) const SAMPLE: u64 = 1000;

/// What a data set is.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    pub location: String,
    pub format: Format,
    /// RecordIO only: how the first chunk is packed.
    pub compressor: Option<&'static str>,
    pub records: u64,
    pub bytes: u64,
    pub fingerprint: String,
    pub files: Vec<FileSummary>,
    /// The fields of the first thousand records.
    pub fields: Vec<FieldSummary>,
}

#[derive(Clone, Debug, Serialize)]
pub struct FileSummary {
    pub name: String,
    pub bytes: u64,
    pub chunks: usize,
    pub records: u64,
}

#[derive(Clone, Debug, Serialize)]
pub struct FieldSummary {
    pub name: String,
    /// Absent where every value is missing.
    #[serde(rename = "type")]
    pub kind: Option<ColumnKind>,
    /// Numbers of a list, or bytes of a piece.
    pub min_len: usize,
    pub max_len: usize,
    /// In how many of the records looked at it has a value.
    pub present: u64,
}

/// Says what a data set is.
pub fn inspect(location: &str, options: &OpenOptions) -> Result<Summary, Error> {
    let dataset = Dataset::open(location, options)?;
    let sample: Vec<u64> = (0..dataset.n_records().min(SAMPLE)).collect();
    let fields = columns(&dataset, &sample)?.into_iter().map(|(name, seen)| FieldSummary {
        name,
        kind: seen.kind,
        min_len: seen.min_len.min(seen.max_len),
        max_len: seen.max_len,
        present: seen.present,
    });
    let files: Vec<FileSummary> = dataset
        .files()
        .map(|(file, index)| FileSummary {
            name: file.name.clone(),
            bytes: index.bytes,
            chunks: index.chunks.len(),
            records: index.n_records(),
        })
        .collect();
    let compressor = match dataset.format() {
        Format::RecordIo => {
            let mut paths = dataset.files().map(|(file, _)| &file.path);
            paths.find_map(|path| recordio::compressor(path)).map(recordio::Compressor::name)
        }
        Format::TfRecord | Format::Csv | Format::Jsonl | Format::Parquet | Format::Range => None,
    };
    Ok(Summary {
        location: location.to_owned(),
        format: dataset.format(),
        compressor,
        records: dataset.n_records(),
        bytes: files.iter().map(|file| file.bytes).sum(),
        fingerprint: dataset.fingerprint().to_owned(),
        files,
        fields: fields.collect(),
    })
}

/// What some records hold, in the order of the format.
pub(crate) fn columns(dataset: &Dataset, sample: &[u64]) -> Result<Vec<(String, Seen)>, Error> {
    let mut columns = Columns::default();
    dataset.visit(sample, |_, _, row| {
        columns.see(row);
        Ok(())
    })?;
    let mut columns: Vec<_> = columns.0.into_iter().collect();
    columns.sort_by_key(|(_, seen)| seen.order);
    Ok(columns)
}

/// The first `n` records as JSON objects.
pub fn head(location: &str, n: u64, options: &OpenOptions) -> Result<Vec<Json>, Error> {
    let dataset = Dataset::open(location, options)?;
    let records: Vec<u64> = (0..dataset.n_records().min(n)).collect();
    let sample: Vec<u64> = (0..dataset.n_records().min(SAMPLE.max(n))).collect();
    let kinds = columns(&dataset, &sample)?.into_iter().map(|(name, seen)| (name, seen.kind));
    let kinds: BTreeMap<String, Option<ColumnKind>> = kinds.collect();
    let mut shown = vec![Json::Null; records.len()];
    dataset.visit(&records, |at, _, row| {
        if let Some(place) = shown.get_mut(at) {
            *place = row_json(row, &kinds);
        }
        Ok(())
    })?;
    Ok(shown)
}

fn row_json(row: &Row<'_>, kinds: &BTreeMap<String, Option<ColumnKind>>) -> Json {
    let fields = row.names().into_iter().map(|name| {
        let kind = kinds.get(&name).copied().flatten();
        let value = row.get(&name).map_or(Json::Null, |value| value_json(&value, kind));
        (name, value)
    });
    Json::Object(fields.collect())
}

fn value_json(value: &Value<'_>, kind: Option<ColumnKind>) -> Json {
    match value {
        Value::Floats(values) => list(values.iter().map(|value| Json::from(*value))),
        Value::Doubles(values) => list(values.iter().map(|value| Json::from(*value))),
        Value::Ints(values) => list(values.iter().map(|value| Json::from(*value))),
        Value::Blobs(pieces) => list(pieces.iter().map(|piece| Json::from(bytes_text(piece)))),
        Value::Text(text) => number(text, kind).unwrap_or_else(|| Json::from(bytes_text(text))),
        Value::Unreadable(why) => Json::from(format!("<{why}>")),
        Value::Missing => Json::Null,
    }
}

/// A cell of a column of numbers, as that number.
fn number(text: &[u8], kind: Option<ColumnKind>) -> Option<Json> {
    let text = std::str::from_utf8(text).ok()?.trim();
    match kind? {
        ColumnKind::Int64 => Some(Json::from(text.parse::<i64>().ok()?)),
        ColumnKind::Float => Some(Json::from(text.parse::<f64>().ok()?)),
        ColumnKind::Bytes | ColumnKind::Text => None,
    }
}

/// A list of one is shown as its value.
fn list(values: impl Iterator<Item = Json>) -> Json {
    let mut values: Vec<Json> = values.collect();
    if values.len() == 1 {
        return values.swap_remove(0);
    }
    Json::Array(values)
}

/// Bytes as text where they are text, else their number and the first of them.
fn bytes_text(bytes: &[u8]) -> String {
    if let Some(text) = readable(bytes) {
        return text.to_owned();
    }
    let start: Vec<String> = bytes.iter().take(16).map(|byte| format!("{byte:02x}")).collect();
    let more = if bytes.len() > 16 { " …" } else { "" };
    format!("<{} bytes: {}{more}>", bytes.len(), start.join(" "))
}
