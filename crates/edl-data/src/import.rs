// SPDX-License-Identifier: Apache-2.0
//! Turns other data into RecordIO of `tf.train.Example`.

mod shards;

use std::path::Path;

use serde::Serialize;

use crate::dataset::{Dataset, OpenOptions};
use crate::decode::{Value, number};
use crate::error::{Error, Place};
use crate::example::{BytesList, Example, FeatureKind as Feature};
use crate::format::Format;
use crate::idx::{Idx, IdxValues};
use crate::infer::{ColumnKind, Columns};
use crate::recordio::{Compressor, WriterOptions};
use crate::row::Row;

pub(crate) use shards::Shards;

/// How data are written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImportOptions {
    pub writer: WriterOptions,
    /// Into how many files the records are spread.
    pub files: u64,
    /// Take only the first records; `None` takes all.
    pub limit: Option<u64>,
}

impl Default for ImportOptions {
    fn default() -> Self {
        let writer = WriterOptions { compressor: Compressor::Gzip, ..WriterOptions::default() };
        Self { writer, files: 4, limit: None }
    }
}

/// What was written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Written {
    pub folder: String,
    pub files: u64,
    pub records: u64,
    pub bytes: u64,
}

impl ImportOptions {
    fn limited(&self, n_records: u64) -> u64 {
        self.limit.map_or(n_records, |limit| limit.min(n_records))
    }
}

/// Converts a pair of IDX files into records with the features `image` and `label`.
pub fn idx(
    images: &Path,
    labels: &Path,
    out_dir: &Path,
    options: &ImportOptions,
) -> Result<Written, Error> {
    let (pictures, classes) = (Idx::read(images)?, Idx::read(labels)?);
    let n_images = pictures.shape.first().copied().unwrap_or(0);
    let [n_labels] = *classes.shape.as_slice() else {
        return Err(Error::corrupt(Place::file(labels), "labels must be a one-dimensional array"));
    };
    if n_images != n_labels || n_images == 0 {
        let text = format!("there are {n_images} images, but {n_labels} labels");
        return Err(Error::corrupt(Place::file(labels), text));
    }
    let classes: Vec<i64> = match classes.values {
        IdxValues::U8(values) => values.into_iter().map(i64::from).collect(),
        IdxValues::I64(values) => values,
        IdxValues::F32(_) => {
            return Err(Error::corrupt(Place::file(labels), "labels must be integers"));
        }
    };
    let width: usize = pictures.shape.iter().skip(1).product();
    let n = options.limited(n_images as u64);
    let mut shards = Shards::create(out_dir, n, options)?;
    for (picture, label) in (0..usize::try_from(n).unwrap_or(n_images)).zip(classes) {
        let pixels = picture * width..(picture + 1) * width;
        let example = match &pictures.values {
            IdxValues::U8(values) => Example::new().bytes("image", values[pixels].to_vec()),
            IdxValues::I64(values) => Example::new().ints("image", &values[pixels]),
            IdxValues::F32(values) => Example::new().floats("image", &values[pixels]),
        };
        shards.write(example.ints("label", [label]).to_bytes())?;
    }
    shards.finish()
}

/// Converts any readable data set. Columns become features of the narrowest type that holds all
/// their values; missing text becomes empty text, missing numbers become absent features. RecordIO
/// and TFRecord are copied as they are.
pub fn table(
    location: &str,
    open: &OpenOptions,
    out_dir: &Path,
    options: &ImportOptions,
) -> Result<Written, Error> {
    let dataset = Dataset::open(location, open)?;
    if dataset.format() == Format::Range {
        return Err(Error::Refused(format!(
            "`{location}` contains only record numbers; specify a file or folder to import"
        )));
    }
    let n = options.limited(dataset.n_records());
    if dataset.format().has_raw_records() {
        let mut shards = Shards::create(out_dir, n, options)?;
        for record in 0..n {
            shards.write(dataset.raw(record)?.unwrap_or_default())?;
        }
        return shards.finish();
    }
    let mut columns = Columns::default();
    in_order(&dataset, n, |_, row| {
        columns.see(row);
        Ok(())
    })?;
    let mut shards = Shards::create(out_dir, n, options)?;
    in_order(&dataset, n, |place, row| {
        let example = example_of(row, &columns, place)?;
        shards.write(example.to_bytes())
    })?;
    shards.finish()
}

/// Visits the first records one after the other.
pub(crate) fn in_order(
    dataset: &Dataset,
    n: u64,
    mut see: impl FnMut(&dyn Fn() -> Place, &Row<'_>) -> Result<(), Error>,
) -> Result<(), Error> {
    const STRIDE: u64 = 1024;
    for start in (0..n).step_by(1024) {
        let records: Vec<u64> = (start..n.min(start + STRIDE)).collect();
        dataset.visit(&records, |_, place, row| see(place, row))?;
    }
    Ok(())
}

fn example_of(
    row: &Row<'_>,
    columns: &Columns,
    place: &dyn Fn() -> Place,
) -> Result<Example, Error> {
    let mut example = Example::new();
    for (name, seen) in &columns.0 {
        let (Some(value), Some(kind)) = (row.get(name), seen.kind) else { continue };
        if value == Value::Missing && kind != ColumnKind::Text {
            continue;
        }
        let feature = feature_of(&value, kind).ok_or_else(|| {
            let problem = format!("cannot be stored: it is {}", value.describe());
            Error::field(place(), name, problem)
        })?;
        example = example.with(name, feature);
    }
    Ok(example)
}

/// A value as a feature of its column's kind.
pub(crate) fn feature_of(value: &Value<'_>, kind: ColumnKind) -> Option<Feature> {
    let floats = |value| Some(Feature::Float(crate::example::FloatList { value }));
    let ints = |value| Some(Feature::Int64(crate::example::Int64List { value }));
    let bytes = |value: Vec<u8>| Some(Feature::Bytes(BytesList { value: vec![value.into()] }));
    match (kind, value) {
        (ColumnKind::Int64, Value::Ints(values)) => ints(values.to_vec()),
        (ColumnKind::Int64, Value::Text(text)) => ints(vec![number(text)?]),
        (ColumnKind::Float, Value::Floats(values)) => floats(values.to_vec()),
        #[expect(clippy::cast_possible_truncation, reason = "features are single floats")]
        (ColumnKind::Float, Value::Doubles(values)) => {
            floats(values.iter().map(|value| *value as f32).collect())
        }
        #[expect(clippy::cast_precision_loss, reason = "features are single floats")]
        (ColumnKind::Float, Value::Ints(values)) => {
            floats(values.iter().map(|value| *value as f32).collect())
        }
        (ColumnKind::Float, Value::Text(text)) => floats(vec![number(text)?]),
        (ColumnKind::Text, Value::Missing) => bytes(Vec::new()),
        (ColumnKind::Text | ColumnKind::Bytes, Value::Text(text)) => bytes(text.to_vec()),
        (ColumnKind::Text | ColumnKind::Bytes, Value::Blobs(pieces)) => {
            let value = pieces.iter().map(|piece| piece.to_vec().into()).collect();
            Some(Feature::Bytes(BytesList { value }))
        }
        (ColumnKind::Text, Value::Ints(values)) => match values.as_ref() {
            [one] => bytes(one.to_string().into_bytes()),
            _ => None,
        },
        (ColumnKind::Text, Value::Doubles(values)) => match values.as_ref() {
            [one] => bytes(one.to_string().into_bytes()),
            _ => None,
        },
        _ => None,
    }
}
