// SPDX-License-Identifier: Apache-2.0
//! Reads a batch's columns: a wrong name, type, shape or label is an error and never a panic.

use edl_core::model::{DType, FieldSpec};
use edl_tensor::batch::{Batch, Column};
use edl_tensor::model::Error;

/// The numbers of column `field`.
pub(crate) fn f32<'a>(batch: &'a Batch, field: &FieldSpec) -> Result<&'a [f32], Error> {
    match find(batch, field)? {
        Column::F32 { values, .. } => Ok(values),
        other @ (Column::I64 { .. } | Column::U8 { .. } | Column::Bytes(_)) => {
            Err(misfit(batch, field, Some(other)))
        }
    }
}

/// The bytes of column `field`.
pub(crate) fn u8<'a>(batch: &'a Batch, field: &FieldSpec) -> Result<&'a [u8], Error> {
    match find(batch, field)? {
        Column::U8 { values, .. } => Ok(values),
        other @ (Column::F32 { .. } | Column::I64 { .. } | Column::Bytes(_)) => {
            Err(misfit(batch, field, Some(other)))
        }
    }
}

/// The pieces of text of column `field`.
pub(crate) fn bytes<'a>(batch: &'a Batch, field: &FieldSpec) -> Result<&'a [Vec<u8>], Error> {
    match find(batch, field)? {
        Column::Bytes(values) => Ok(values),
        other @ (Column::F32 { .. } | Column::I64 { .. } | Column::U8 { .. }) => {
            Err(misfit(batch, field, Some(other)))
        }
    }
}

/// The class of each record, below `n_classes`.
pub(crate) fn labels(
    batch: &Batch,
    field: &FieldSpec,
    n_classes: usize,
) -> Result<Vec<usize>, Error> {
    let values = match find(batch, field)? {
        Column::I64 { values, .. } => values,
        other @ (Column::F32 { .. } | Column::U8 { .. } | Column::Bytes(_)) => {
            return Err(misfit(batch, field, Some(other)));
        }
    };
    let class = |(record, value): (&u64, &i64)| match usize::try_from(*value) {
        Ok(class) if class < n_classes => Ok(class),
        Ok(_) | Err(_) => {
            let problem = format!("`{}` is {value}, not in 0..{n_classes}", field.name);
            Err(Error::Record { record: *record, problem })
        }
    };
    batch.records.iter().zip(values).map(class).collect()
}

/// The column of that name if type and shape are as the field says.
fn find<'a>(batch: &'a Batch, field: &FieldSpec) -> Result<&'a Column, Error> {
    let column = batch.columns.get(&field.name).ok_or_else(|| misfit(batch, field, None))?;
    let needs = [&[batch.len()], field.shape.as_slice()].concat();
    let n_numbers: usize = needs.iter().product();
    let fits = match column {
        Column::F32 { shape, values } => *shape == needs && values.len() == n_numbers,
        Column::I64 { shape, values } => *shape == needs && values.len() == n_numbers,
        Column::U8 { shape, values } => *shape == needs && values.len() == n_numbers,
        Column::Bytes(values) => values.len() == batch.len(),
    };
    if fits && column.dtype() == field.dtype {
        Ok(column)
    } else {
        Err(misfit(batch, field, Some(column)))
    }
}

fn misfit(batch: &Batch, field: &FieldSpec, has: Option<&Column>) -> Error {
    let needs = [&[batch.len()], field.shape.as_slice()].concat();
    let has = match has {
        None => "none".into(),
        Some(Column::F32 { shape, .. }) => describe(DType::F32, shape),
        Some(Column::I64 { shape, .. }) => describe(DType::I64, shape),
        Some(Column::U8 { shape, .. }) => describe(DType::U8, shape),
        Some(Column::Bytes(values)) => describe(DType::Bytes, &[values.len()]),
    };
    Error::Column { column: field.name.clone(), needs: describe(field.dtype, &needs), has }
}

fn describe(dtype: DType, shape: &[usize]) -> String {
    let name = match dtype {
        DType::F32 => "f32",
        DType::I64 => "i64",
        DType::U8 => "u8",
        DType::Bytes => "bytes",
        DType::Record => "record",
    };
    format!("{name} {shape:?}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_column_that_does_not_fit_is_named_with_what_it_has() {
        let column = Column::U8 { shape: vec![2, 3], values: vec![0; 6] };
        let batch = Batch {
            records: vec![0, 1],
            columns: [("image".to_owned(), column)].into(),
            ..Batch::default()
        };
        let check = |name: &str, dtype, shape: &[usize]| {
            let field =
                FieldSpec { name: name.into(), dtype, shape: shape.to_vec(), is_label: false };
            u8(&batch, &field).map(<[u8]>::len).map_err(|e| e.to_string())
        };
        assert_eq!(check("image", DType::U8, &[3]), Ok(6));
        let text = "the model needs a column `image` of u8 [2, 28, 28], the batch has u8 [2, 3]";
        assert_eq!(check("image", DType::U8, &[28, 28]), Err(text.into()));
        let text = "the model needs a column `image` of f32 [2, 3], the batch has u8 [2, 3]";
        assert_eq!(check("image", DType::F32, &[3]), Err(text.into()));
        let text = "the model needs a column `picture` of u8 [2, 3], the batch has none";
        assert_eq!(check("picture", DType::U8, &[3]), Err(text.into()));
    }
}
