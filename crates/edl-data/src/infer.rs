// SPDX-License-Identifier: Apache-2.0
//! Infers column types in formats without types: the type that fits all values of a column.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::decode::Value;
use crate::row::Row;

/// What a column can be stored as.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ColumnKind {
    Int64,
    Float,
    Bytes,
    Text,
}

impl ColumnKind {
    /// The kind of one value, unless it is missing.
    fn of(value: &Value<'_>) -> Option<Self> {
        match value {
            Value::Floats(_) | Value::Doubles(_) => Some(Self::Float),
            Value::Ints(_) => Some(Self::Int64),
            Value::Blobs(pieces) => {
                let text = pieces.iter().all(|piece| readable(piece).is_some());
                Some(if text { Self::Text } else { Self::Bytes })
            }
            Value::Text(text) => Some(Self::of_text(text)),
            Value::Unreadable(_) => Some(Self::Bytes),
            Value::Missing => None,
        }
    }

    fn of_text(text: &[u8]) -> Self {
        let Ok(text) = std::str::from_utf8(text) else { return Self::Bytes };
        let text = text.trim();
        if text.parse::<i64>().is_ok() {
            return Self::Int64;
        }
        // `inf` and `nan` are words before they are numbers.
        let numeric = text.starts_with(|c: char| c.is_ascii_digit() || "+-.".contains(c));
        match numeric && text.parse::<f32>().is_ok_and(f32::is_finite) {
            true => Self::Float,
            false => Self::Text,
        }
    }

    fn join(self, other: Self) -> Self {
        match (self, other) {
            (a, b) if a == b => a,
            (Self::Int64, Self::Float) | (Self::Float, Self::Int64) => Self::Float,
            (Self::Bytes, _) | (_, Self::Bytes) => Self::Bytes,
            _ => Self::Text,
        }
    }
}

/// Bytes that a human can read, as text.
pub(crate) fn readable(bytes: &[u8]) -> Option<&str> {
    let text = std::str::from_utf8(bytes).ok()?;
    (!text.chars().any(|c| c.is_control() && !c.is_whitespace())).then_some(text)
}

/// What the records seen so far hold under one name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Seen {
    /// Place of the column among the others.
    pub(crate) order: usize,
    /// `None` while every value was missing.
    pub(crate) kind: Option<ColumnKind>,
    pub(crate) min_len: usize,
    pub(crate) max_len: usize,
    pub(crate) present: u64,
    /// Whether every value was one piece of raw bytes.
    pub(crate) is_piece: bool,
}

/// What the records seen so far hold.
#[derive(Clone, Debug, Default)]
pub(crate) struct Columns(pub(crate) BTreeMap<String, Seen>);

impl Columns {
    pub(crate) fn see(&mut self, row: &Row<'_>) {
        for name in row.names() {
            let value = row.get(&name).unwrap_or(Value::Missing);
            let (kind, len) = (ColumnKind::of(&value), length(&value));
            let order = self.0.len();
            let seen = self.0.entry(name).or_insert(Seen {
                order,
                kind: None,
                min_len: usize::MAX,
                max_len: 0,
                present: 0,
                is_piece: true,
            });
            let Some(kind) = kind else { continue };
            seen.kind = Some(seen.kind.map_or(kind, |before| before.join(kind)));
            seen.min_len = seen.min_len.min(len);
            seen.max_len = seen.max_len.max(len);
            seen.present += 1;
            seen.is_piece &= matches!(&value, Value::Blobs(pieces) if pieces.len() == 1);
        }
    }
}

/// Values of a list, or bytes of a single piece.
fn length(value: &Value<'_>) -> usize {
    match value {
        Value::Floats(values) => values.len(),
        Value::Doubles(values) => values.len(),
        Value::Ints(values) => values.len(),
        Value::Blobs(pieces) => match pieces.as_slice() {
            [one] => one.len(),
            several => several.len(),
        },
        Value::Text(_) => 1,
        Value::Unreadable(_) | Value::Missing => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_column_is_the_narrowest_type_that_holds_all_its_cells() {
        let join = |cells: &[&str]| {
            cells.iter().map(|cell| ColumnKind::of_text(cell.as_bytes())).reduce(ColumnKind::join)
        };
        assert_eq!(join(&["1", " -2 ", "30"]), Some(ColumnKind::Int64));
        assert_eq!(join(&["1", "2.5", "1e3"]), Some(ColumnKind::Float));
        assert_eq!(join(&["1", "2.5", "?"]), Some(ColumnKind::Text));
        assert_eq!(join(&["inf", "nan"]), Some(ColumnKind::Text));
        assert_eq!(join(&[]), None);
    }
}
