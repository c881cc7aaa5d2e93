// SPDX-License-Identifier: Apache-2.0
//! The records of one chunk in any format, and the values of a record by name.

use std::borrow::Cow;
use std::fmt;

use edl_core::spec::Codec;
use prost::bytes::Bytes;
use serde_json::Value as Json;

use crate::csv::Rows;
use crate::decode::Value;
use crate::example::{Example, FeatureKind};
#[cfg(feature = "parquet")]
use crate::parquet::Table;

/// The name under which raw records are shown.
pub(crate) const RAW: &str = "record";

/// The records of one chunk, unpacked and ready to be decoded.
pub(crate) trait Records: fmt::Debug + Send + Sync {
    fn n_records(&self) -> usize;

    /// What they take in memory.
    fn bytes(&self) -> usize;

    /// Decodes a record, which must exist.
    fn row(&self, record: usize, codec: Codec) -> Result<Row<'_>, String>;

    /// The line on which a record begins, in text formats.
    fn line(&self, _record: usize) -> Option<u64> {
        None
    }

    /// The undecoded record, in formats that have one.
    fn raw(&self, _record: usize) -> Option<Bytes> {
        None
    }
}

/// A record that can be asked for its values.
#[derive(Debug)]
pub(crate) enum Row<'a> {
    Example {
        example: Example,
        /// What it was decoded from.
        record: Bytes,
    },
    /// The record is one piece of bytes, whatever name it is asked by.
    Raw(Bytes),
    Csv {
        rows: &'a Rows,
        row: usize,
    },
    Json(serde_json::Map<String, Json>),
    /// A record of which only the number is known.
    Bare,
    #[cfg(feature = "parquet")]
    Table {
        table: &'a Table,
        row: usize,
    },
}

impl Row<'_> {
    pub(crate) fn get(&self, name: &str) -> Option<Value<'_>> {
        match self {
            Self::Example { example, .. } => example.get(name).map(example_value),
            Self::Raw(bytes) => Some(Value::Blobs(vec![bytes])),
            Self::Csv { rows, row } => rows.get(*row, name).map(|cell| match cell {
                b"" => Value::Missing,
                cell => Value::Text(Cow::Borrowed(cell)),
            }),
            Self::Json(map) => map.get(name).map(json_value),
            Self::Bare => None,
            #[cfg(feature = "parquet")]
            Self::Table { table, row } => table.get(*row, name),
        }
    }

    /// The undecoded record, where the format has such.
    pub(crate) fn record(&self) -> Option<&Bytes> {
        match self {
            Self::Example { record, .. } | Self::Raw(record) => Some(record),
            Self::Csv { .. } | Self::Json(_) | Self::Bare => None,
            #[cfg(feature = "parquet")]
            Self::Table { .. } => None,
        }
    }

    /// The names of the record's values, in the order of the format.
    pub(crate) fn names(&self) -> Vec<String> {
        match self {
            Self::Example { example, .. } => {
                example.iter().map(|(name, _)| name.to_owned()).collect()
            }
            Self::Raw(_) => vec![RAW.to_owned()],
            Self::Csv { rows, .. } => rows.columns().to_vec(),
            Self::Json(map) => map.keys().cloned().collect(),
            Self::Bare => Vec::new(),
            #[cfg(feature = "parquet")]
            Self::Table { table, .. } => table.names(),
        }
    }
}

fn example_value(kind: &FeatureKind) -> Value<'_> {
    match kind {
        FeatureKind::Bytes(list) => Value::Blobs(list.value.iter().map(AsRef::as_ref).collect()),
        FeatureKind::Float(list) => Value::Floats(Cow::Borrowed(&list.value)),
        FeatureKind::Int64(list) => Value::Ints(Cow::Borrowed(&list.value)),
    }
}

fn json_value(json: &Json) -> Value<'_> {
    match json {
        Json::Null => Value::Missing,
        Json::Bool(truth) => Value::Ints(Cow::Owned(vec![i64::from(*truth)])),
        Json::String(text) => Value::Text(Cow::Borrowed(text.as_bytes())),
        Json::Number(_) | Json::Array(_) => json_numbers(json),
        Json::Object(_) => Value::Unreadable("a nested object".into()),
    }
}

/// A number or a list of them, nested as deep as it may be.
fn json_numbers(json: &Json) -> Value<'_> {
    let mut numbers = Vec::new();
    if let Err(why) = flatten(json, &mut numbers) {
        return Value::Unreadable(why);
    }
    let ints: Option<Vec<i64>> = numbers.iter().map(|number| number.as_i64()).collect();
    if let Some(ints) = ints {
        return Value::Ints(Cow::Owned(ints));
    }
    let floats: Option<Vec<f64>> = numbers.iter().map(|number| number.as_f64()).collect();
    floats.map_or_else(
        || Value::Unreadable("a number out of range".into()),
        |floats| Value::Doubles(Cow::Owned(floats)),
    )
}

fn flatten<'a>(json: &'a Json, numbers: &mut Vec<&'a serde_json::Number>) -> Result<(), String> {
    match json {
        Json::Number(number) => numbers.push(number),
        Json::Array(parts) => {
            for part in parts {
                flatten(part, numbers)?;
            }
        }
        Json::Null | Json::Bool(_) | Json::String(_) | Json::Object(_) => {
            return Err("a list that contains values other than numbers".into());
        }
    }
    Ok(())
}
