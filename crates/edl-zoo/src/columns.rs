// SPDX-License-Identifier: Apache-2.0
//! Reads a batch's columns: a wrong name, type, shape or label is an error and never a panic.

use edl_core::model::{DType, FieldSpec};
use edl_tensor::batch::{Batch, Column};
use edl_tensor::model::Error;

/// The numbers of column `field`.
pub(crate) fn f32<'a>(batch: &'a Batch, field: &FieldSpec) -> Result<&'a [f32], Error> {
    checked(batch, field, batch.f32(&field.name))
}

/// The bytes of column `field`.
pub(crate) fn u8<'a>(batch: &'a Batch, field: &FieldSpec) -> Result<&'a [u8], Error> {
    checked(batch, field, batch.u8(&field.name))
}

/// The pieces of text of column `field`.
pub(crate) fn bytes<'a>(batch: &'a Batch, field: &FieldSpec) -> Result<&'a [Vec<u8>], Error> {
    checked(batch, field, batch.bytes(&field.name))
}

/// The class of each record, below `n_classes`.
pub(crate) fn labels(
    batch: &Batch,
    field: &FieldSpec,
    n_classes: usize,
) -> Result<Vec<usize>, Error> {
    let values = checked(batch, field, batch.i64(&field.name))?;
    let class = |(record, value): (&u64, &i64)| match usize::try_from(*value) {
        Ok(class) if class < n_classes => Ok(class),
        Ok(_) | Err(_) => {
            let problem = format!("`{}` is {value}, not in 0..{n_classes}", field.name);
            Err(Error::Record { record: *record, problem })
        }
    };
    batch.records.iter().zip(values).map(class).collect()
}

/// The values of a column, if its type and shape are those of the field.
fn checked<'a, T>(
    batch: &'a Batch,
    field: &FieldSpec,
    values: Option<&'a [T]>,
) -> Result<&'a [T], Error> {
    let column = batch.columns.get(&field.name);
    let needs = [&[batch.len()], field.shape.as_slice()].concat();
    let fits = |column: &Column| column.dtype() == field.dtype && column.shape() == needs;
    let n_values: usize = needs.iter().product();
    match values {
        Some(values) if column.is_some_and(fits) && values.len() == n_values => Ok(values),
        Some(_) | None => Err(Error::Column {
            column: field.name.clone(),
            needs: describe(field.dtype, &needs),
            has: column.map_or("none".into(), |column| describe(column.dtype(), &column.shape())),
        }),
    }
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

    #[test]
    fn a_label_that_is_no_class_is_refused_with_its_record() {
        for (label, expected) in [(2, None), (3, Some("is 3")), (-1, Some("is -1"))] {
            let column = Column::I64 { shape: vec![2], values: vec![0, label] };
            let batch = Batch {
                records: vec![7, 8],
                columns: [("label".to_owned(), column)].into(),
                ..Batch::default()
            };
            let (name, shape) = ("label".to_owned(), Vec::new());
            let field = FieldSpec { name, dtype: DType::I64, shape, is_label: true };
            let problem = match labels(&batch, &field, 3) {
                Err(Error::Record { record: 8, problem }) => Some(problem),
                Ok(_) => None,
                Err(error) => panic!("{error}"),
            };
            let text = expected.map(|is| format!("`label` {is}, not in 0..3"));
            assert_eq!(problem, text);
        }
    }
}
