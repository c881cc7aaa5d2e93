// SPDX-License-Identifier: Apache-2.0
//! The fields of a data set, for models that use whatever fields it has.

use edl_core::model::{DType, FieldSpec};

use crate::dataset::Dataset;
use crate::decode::Builder;
use crate::error::Error;
use crate::infer::{ColumnKind, Seen};
use crate::inspect::{SAMPLE, columns};

/// Records that are decoded at once to try fields on them.
const STRIDE: usize = 64;

/// The fields that every one of the first thousand records has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schema {
    /// In the order of the format.
    pub fields: Vec<FieldSpec>,
    /// Whether a field of `DType::Record` can be asked for.
    pub has_raw_records: bool,
    /// Columns that no field can hold, each with the reason.
    pub skipped: Vec<(String, String)>,
}

/// Finds out the fields of a data set. Each is tried on the records that it was found in.
pub fn schema(dataset: &Dataset) -> Result<Schema, Error> {
    let sample: Vec<u64> = (0..dataset.n_records().min(SAMPLE)).collect();
    let n_records = sample.len() as u64;
    let mut fields = Vec::new();
    let mut skipped = Vec::new();
    for (name, seen) in columns(dataset, &sample)? {
        match field(&name, &seen, n_records) {
            Ok(field) => fields.push((field, seen)),
            Err(reason) => skipped.push((name, reason)),
        }
    }
    let problems = problems(dataset, &sample, &fields)?;
    let mut sound = Vec::new();
    for ((field, seen), problem) in fields.into_iter().zip(problems) {
        match problem {
            None => sound.push(field),
            Some(problem) => {
                skipped.push((field.name, missing(&seen, n_records).unwrap_or(problem)));
            }
        }
    }
    Ok(Schema { fields: sound, has_raw_records: dataset.format().has_raw_records(), skipped })
}

/// The field that holds a column, or why there is none.
fn field(name: &str, seen: &Seen, n_records: u64) -> Result<FieldSpec, String> {
    let Seen { kind, min_len, max_len, is_piece, .. } = *seen;
    let is_fixed = min_len == max_len;
    let number = |dtype| match (missing(seen, n_records), max_len) {
        (Some(reason), _) => Err(reason),
        (None, 1) if is_fixed => Ok((dtype, Vec::new())),
        (None, 1..) if is_fixed => Ok((dtype, vec![max_len])),
        (None, _) => Err(format!("it is a list of {min_len} to {max_len} numbers")),
    };
    let (dtype, shape) = match kind {
        None => return Err(format!("it has no value in the first {n_records} records")),
        Some(ColumnKind::Int64) => number(DType::I64)?,
        Some(ColumnKind::Float) => number(DType::F32)?,
        Some(ColumnKind::Bytes) if is_piece && is_fixed && seen.present == n_records => {
            (DType::U8, vec![max_len])
        }
        // An empty cell is an empty piece: it is a category, too.
        Some(ColumnKind::Bytes | ColumnKind::Text) => (DType::Bytes, Vec::new()),
    };
    Ok(FieldSpec { name: name.to_owned(), dtype, shape, is_label: false })
}

fn missing(seen: &Seen, n_records: u64) -> Option<String> {
    let n_missing = n_records - seen.present;
    (n_missing > 0)
        .then(|| format!("it is missing in {n_missing} of the first {n_records} records"))
}

/// For each field the first problem that a record has with it.
fn problems(
    dataset: &Dataset,
    sample: &[u64],
    fields: &[(FieldSpec, Seen)],
) -> Result<Vec<Option<String>>, Error> {
    let mut problems = vec![None; fields.len()];
    for records in sample.chunks(STRIDE) {
        let mut builders: Vec<Builder<'_>> =
            fields.iter().map(|(field, _)| Builder::new(field, records.len())).collect();
        dataset.visit(records, |at, _, row| {
            for (builder, problem) in builders.iter_mut().zip(&mut problems) {
                if problem.is_none() {
                    *problem = builder.set(at, row).err();
                }
            }
            Ok(())
        })?;
    }
    Ok(problems)
}
