// SPDX-License-Identifier: Apache-2.0
//! IDX: the format of MNIST, an array behind a header of its type and sizes, maybe gzipped.

use std::path::Path;

use crate::error::{Error, Place};
use crate::index::{MAX_UNPACKED, read_limited};

/// An array as IDX files hold it.
#[derive(Clone, Debug, PartialEq)]
pub struct Idx {
    pub shape: Vec<usize>,
    pub values: IdxValues,
}

#[derive(Clone, Debug, PartialEq)]
pub enum IdxValues {
    U8(Vec<u8>),
    I64(Vec<i64>),
    F32(Vec<f32>),
}

/// Why some bytes are not an IDX file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IdxError {
    #[error("not an IDX file: it does not start with two zeros, a type and a rank")]
    Magic,
    #[error("unknown IDX type {0:#04x}")]
    Type(u8),
    #[error("it decompresses to more than {MAX_UNPACKED} bytes")]
    TooLarge,
    #[error("the header declares {needs} bytes of values, but the file has {has}")]
    Size { needs: u128, has: usize },
}

impl Idx {
    /// Reads a file, packed with gzip or not.
    pub fn read(path: &Path) -> Result<Self, Error> {
        let bytes = std::fs::read(path).map_err(Error::io("read", path))?;
        let bytes = if bytes.starts_with(&[0x1f, 0x8b]) {
            let decoder = flate2::read::MultiGzDecoder::new(bytes.as_slice());
            let unpacked =
                read_limited(decoder, MAX_UNPACKED).map_err(Error::io("unpack", path))?;
            unpacked.ok_or_else(|| Error::corrupt(Place::file(path), IdxError::TooLarge))?
        } else {
            bytes
        };
        Self::parse(&bytes).map_err(|error| Error::corrupt(Place::file(path), error))
    }

    pub fn parse(bytes: &[u8]) -> Result<Self, IdxError> {
        let Some(([0, 0, code, rank], rest)) = bytes.split_first_chunk() else {
            return Err(IdxError::Magic);
        };
        let (sizes, values) =
            rest.split_at_checked(usize::from(*rank) * 4).ok_or(IdxError::Magic)?;
        let sizes = sizes.as_chunks().0.iter().map(|size| u32::from_be_bytes(*size));
        let shape: Vec<usize> = sizes.map(|size| size as usize).collect();
        let width = match code {
            0x08 | 0x09 => 1,
            0x0b => 2,
            0x0c | 0x0d => 4,
            0x0e => 8,
            other => return Err(IdxError::Type(*other)),
        };
        // Sizes of hostile files overflow even 128 bits; a product that large fits nowhere.
        let needs = shape.iter().try_fold(width, |n: u128, size| n.checked_mul(*size as u128));
        let needs = needs.unwrap_or(u128::MAX);
        if needs != values.len() as u128 {
            return Err(IdxError::Size { needs, has: values.len() });
        }
        let values = match code {
            0x08 => IdxValues::U8(values.to_vec()),
            0x09 => IdxValues::I64(values.iter().map(|v| i64::from(v.cast_signed())).collect()),
            0x0b => IdxValues::I64(each(values, |v| i64::from(i16::from_be_bytes(v)))),
            0x0c => IdxValues::I64(each(values, |v| i64::from(i32::from_be_bytes(v)))),
            0x0d => IdxValues::F32(each(values, f32::from_be_bytes)),
            #[expect(clippy::cast_possible_truncation, reason = "features are single floats")]
            _ => IdxValues::F32(each(values, |v| f64::from_be_bytes(v) as f32)),
        };
        Ok(Self { shape, values })
    }
}

fn each<const N: usize, T>(bytes: &[u8], read: impl Fn([u8; N]) -> T) -> Vec<T> {
    bytes.as_chunks().0.iter().map(|value| read(*value)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrays_of_every_type_are_read() {
        let parse = |bytes: &[u8]| Idx::parse(bytes).map(|idx| (idx.shape, idx.values));
        let bytes = [0, 0, 8, 2, 0, 0, 0, 2, 0, 0, 0, 1, 7, 255];
        assert_eq!(parse(&bytes), Ok((vec![2, 1], IdxValues::U8(vec![7, 255]))));
        let bytes = [0, 0, 9, 1, 0, 0, 0, 1, 255];
        assert_eq!(parse(&bytes), Ok((vec![1], IdxValues::I64(vec![-1]))));
        let bytes = [0, 0, 0x0b, 1, 0, 0, 0, 1, 1, 0];
        assert_eq!(parse(&bytes), Ok((vec![1], IdxValues::I64(vec![256]))));
        let bytes = [0, 0, 0x0d, 1, 0, 0, 0, 1, 0x3f, 0x80, 0, 0];
        assert_eq!(parse(&bytes), Ok((vec![1], IdxValues::F32(vec![1.0]))));
    }

    #[test]
    fn a_header_that_lies_is_refused_without_a_panic() {
        assert_eq!(Idx::parse(&[]), Err(IdxError::Magic));
        assert_eq!(Idx::parse(&[0, 0, 7, 0]), Err(IdxError::Type(7)));
        let mut huge = vec![0, 0, 0x0e, 255];
        huge.extend([0xff; 4 * 255]);
        assert!(matches!(Idx::parse(&huge), Err(IdxError::Size { .. })));
        let short = Idx::parse(&[0, 0, 8, 1, 0, 0, 0, 2, 1]);
        assert_eq!(short, Err(IdxError::Size { needs: 2, has: 1 }));
    }
}
