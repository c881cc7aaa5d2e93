// SPDX-License-Identifier: Apache-2.0
//! From a record's values to the columns of a batch, by the types that the schema asks for.
//!
//! A value is converted where nothing is lost that the asked type can hold: whole floats become
//! integers, raw bytes become numbers from 0 to 255, text becomes what it spells. All else is an
//! error that names what was needed and what was found.

use std::borrow::Cow;

use edl_core::model::{DType, FieldSpec};
use edl_core::text::counted;
use edl_tensor::batch::Column;

use crate::row::Row;

/// What a record holds under one name.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Value<'a> {
    Floats(Cow<'a, [f32]>),
    Doubles(Cow<'a, [f64]>),
    Ints(Cow<'a, [i64]>),
    /// Raw bytes, e.g. the pixels of an image.
    Blobs(Vec<&'a [u8]>),
    /// A cell or string, whose type is what the schema asks for.
    Text(Cow<'a, [u8]>),
    /// A value that this crate cannot read, and why.
    Unreadable(String),
    Missing,
}

impl Value<'_> {
    /// A short description for messages.
    pub(crate) fn describe(&self) -> String {
        let many = |n: usize, one: &str| counted(n as u64, one);
        match self {
            Self::Floats(values) => many(values.len(), "float"),
            Self::Doubles(values) => many(values.len(), "float"),
            Self::Ints(values) => many(values.len(), "integer"),
            Self::Blobs(values) => match values.as_slice() {
                [one] => many(one.len(), "raw byte"),
                several => many(several.len(), "piece") + " of raw bytes",
            },
            Self::Text(text) => {
                let start: String = String::from_utf8_lossy(text).chars().take(40).collect();
                format!("the text `{start}`")
            }
            Self::Unreadable(why) => why.clone(),
            Self::Missing => "no value".into(),
        }
    }
}

/// A number type of columns.
pub(crate) trait Number: Copy + Default {
    const BYTES: usize;
    fn from_f64(value: f64) -> Option<Self>;
    fn from_i64(value: i64) -> Option<Self>;
    fn from_u8(value: u8) -> Self;
    fn from_le_bytes(bytes: &[u8]) -> Self;
    fn from_text(text: &str) -> Option<Self>;
}

impl Number for f32 {
    const BYTES: usize = 4;

    fn from_f64(value: f64) -> Option<Self> {
        #[expect(clippy::cast_possible_truncation, reason = "rounding is what f32 columns are for")]
        let rounded = value as f32;
        (rounded.is_finite() || !value.is_finite()).then_some(rounded)
    }

    fn from_i64(value: i64) -> Option<Self> {
        #[expect(clippy::cast_precision_loss, reason = "rounding is what f32 columns are for")]
        Some(value as f32)
    }

    fn from_u8(value: u8) -> Self {
        Self::from(value)
    }

    fn from_le_bytes(bytes: &[u8]) -> Self {
        bytes.first_chunk().map_or(0.0, |bytes| Self::from_le_bytes(*bytes))
    }

    fn from_text(text: &str) -> Option<Self> {
        text.parse().ok().or_else(|| truth(text).map(Self::from_u8))
    }
}

impl Number for i64 {
    const BYTES: usize = 8;

    fn from_f64(value: f64) -> Option<Self> {
        // Beyond 2^53 a float no longer says which integer is meant.
        let exact = value.abs() <= 9_007_199_254_740_992.0 && value.fract() == 0.0;
        #[expect(clippy::cast_possible_truncation, reason = "checked just above")]
        exact.then_some(value as Self)
    }

    fn from_i64(value: i64) -> Option<Self> {
        Some(value)
    }

    fn from_u8(value: u8) -> Self {
        Self::from(value)
    }

    fn from_le_bytes(bytes: &[u8]) -> Self {
        bytes.first_chunk().map_or(0, |bytes| Self::from_le_bytes(*bytes))
    }

    fn from_text(text: &str) -> Option<Self> {
        let whole = || text.parse().ok().and_then(Self::from_f64);
        text.parse().ok().or_else(whole).or_else(|| truth(text).map(Self::from_u8))
    }
}

impl Number for u8 {
    const BYTES: usize = 1;

    fn from_f64(value: f64) -> Option<Self> {
        i64::from_f64(value).and_then(Self::from_i64)
    }

    fn from_i64(value: i64) -> Option<Self> {
        Self::try_from(value).ok()
    }

    fn from_u8(value: u8) -> Self {
        value
    }

    fn from_le_bytes(bytes: &[u8]) -> Self {
        bytes.first().copied().unwrap_or_default()
    }

    fn from_text(text: &str) -> Option<Self> {
        i64::from_text(text).and_then(Self::from_i64)
    }
}

fn truth(text: &str) -> Option<u8> {
    match text {
        "true" | "True" | "TRUE" => Some(1),
        "false" | "False" | "FALSE" => Some(0),
        _ => None,
    }
}

/// What a cell spells.
pub(crate) fn number<T: Number>(text: &[u8]) -> Option<T> {
    T::from_text(std::str::from_utf8(text).ok()?.trim())
}

/// One column under construction: a place for every record of the batch.
#[derive(Debug)]
pub(crate) struct Builder<'a> {
    field: &'a FieldSpec,
    /// Numbers per record.
    width: usize,
    column: Column,
}

impl<'a> Builder<'a> {
    pub(crate) fn new(field: &'a FieldSpec, n_records: usize) -> Self {
        let width = field.shape.iter().product();
        let mut shape = vec![n_records];
        shape.extend(&field.shape);
        let n = n_records * width;
        let column = match field.dtype {
            DType::F32 => Column::F32 { shape, values: vec![0.0; n] },
            DType::I64 => Column::I64 { shape, values: vec![0; n] },
            DType::U8 => Column::U8 { shape, values: vec![0; n] },
            DType::Bytes | DType::Record => Column::Bytes(vec![Vec::new(); n_records]),
        };
        Self { field, width, column }
    }

    pub(crate) fn finish(self) -> (String, Column) {
        (self.field.name.clone(), self.column)
    }

    /// Takes the field out of a record and puts it into place `at`.
    pub(crate) fn set(&mut self, at: usize, row: &Row<'_>) -> Result<(), String> {
        let name = &self.field.name;
        if self.field.dtype == DType::Record {
            let record = row.record().ok_or("this format has no raw records")?;
            return self.put(at, 0..self.width, &Value::Blobs(vec![record]));
        }
        if let Some(value) = row.get(name) {
            return self.put(at, 0..self.width, &value);
        }
        let spread = self.width > 1 && row.get(&format!("{name}_0")).is_some();
        if !spread || self.field.dtype == DType::Bytes {
            let names = row.names();
            return Err(format!("the record has no such field; it has {}", quoted(&names)));
        }
        for number in 0..self.width {
            let part = format!("{name}_{number}");
            let value =
                row.get(&part).ok_or_else(|| format!("the record has no field `{part}`"))?;
            self.put(at, number..number + 1, &value)?;
        }
        Ok(())
    }

    /// Writes a value into some of the numbers of a record.
    fn put(
        &mut self,
        at: usize,
        part: std::ops::Range<usize>,
        value: &Value<'_>,
    ) -> Result<(), String> {
        let place = at * self.width + part.start..at * self.width + part.end;
        let done = match &mut self.column {
            Column::F32 { values, .. } => fill(&mut values[place], value),
            Column::I64 { values, .. } => fill(&mut values[place], value),
            Column::U8 { values, .. } => fill(&mut values[place], value),
            Column::Bytes(values) => piece(value).map(|piece| values[at] = piece),
        };
        done.ok_or_else(|| {
            format!("the model needs {}, the record has {}", needs(self.field), value.describe())
        })
    }
}

fn needs(field: &FieldSpec) -> String {
    let word = match field.dtype {
        DType::F32 => "f32",
        DType::I64 => "i64",
        DType::U8 => "u8",
        DType::Bytes => return "one text or bytes value".into(),
        DType::Record => return "the raw bytes of the record".into(),
    };
    let sizes: Vec<String> = field.shape.iter().map(ToString::to_string).collect();
    match sizes.as_slice() {
        [] => format!("one {word} value"),
        sizes => format!("{} {word} values", sizes.join("×")),
    }
}

pub(crate) fn quoted(names: &[String]) -> String {
    match names {
        [] => "none".into(),
        names => {
            let shown: Vec<String> =
                names.iter().take(30).map(|name| format!("`{name}`")).collect();
            let more = if names.len() > 30 { ", …" } else { "" };
            shown.join(", ") + more
        }
    }
}

/// Fills `out` exactly, or says nothing and fails.
fn fill<T: Number>(out: &mut [T], value: &Value<'_>) -> Option<()> {
    match value {
        Value::Floats(values) => copy(out, values, |value| T::from_f64(f64::from(value))),
        Value::Doubles(values) => copy(out, values, T::from_f64),
        Value::Ints(values) => copy(out, values, T::from_i64),
        Value::Blobs(pieces) => match pieces.as_slice() {
            [raw] if raw.len() == out.len() => copy(out, raw, |byte| Some(T::from_u8(byte))),
            [raw] if raw.len() == out.len() * T::BYTES => {
                for (place, bytes) in out.iter_mut().zip(raw.chunks_exact(T::BYTES)) {
                    *place = T::from_le_bytes(bytes);
                }
                Some(())
            }
            _ => None,
        },
        Value::Text(text) => {
            let text = std::str::from_utf8(text).ok()?.trim();
            if let [one] = out {
                *one = T::from_text(text)?;
                return Some(());
            }
            let inner = text.strip_prefix('[').and_then(|text| text.strip_suffix(']'));
            let between = |c: char| c.is_whitespace() || matches!(c, ',' | ';' | '|');
            let mut parts = inner.unwrap_or(text).split(between).filter(|part| !part.is_empty());
            for place in out {
                *place = T::from_text(parts.next()?)?;
            }
            parts.next().is_none().then_some(())
        }
        Value::Unreadable(_) | Value::Missing => None,
    }
}

fn copy<S: Copy, T>(out: &mut [T], values: &[S], convert: impl Fn(S) -> Option<T>) -> Option<()> {
    if out.len() != values.len() {
        return None;
    }
    for (place, value) in out.iter_mut().zip(values) {
        *place = convert(*value)?;
    }
    Some(())
}

/// A value as one piece of text or bytes. A missing cell is an empty piece: it is a category too.
fn piece(value: &Value<'_>) -> Option<Vec<u8>> {
    match value {
        Value::Blobs(pieces) => match pieces.as_slice() {
            [one] => Some(one.to_vec()),
            _ => None,
        },
        Value::Text(text) => Some(text.to_vec()),
        Value::Ints(values) => match values.as_ref() {
            [one] => Some(one.to_string().into_bytes()),
            _ => None,
        },
        Value::Missing => Some(Vec::new()),
        Value::Floats(_) | Value::Doubles(_) | Value::Unreadable(_) => None,
    }
}
