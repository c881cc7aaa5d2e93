// SPDX-License-Identifier: Apache-2.0
//! A batch of decoded records: named, typed columns.

use std::collections::BTreeMap;
use std::sync::Arc;

use edl_core::model::DType;

/// The records of one batch, decoded.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Batch {
    /// Numbers of the records in the data set, in the order of the rows.
    pub records: Vec<u64>,
    pub columns: BTreeMap<String, Column>,
    /// The data set, where the model reads the records by itself: then there are no columns.
    pub source: Option<Arc<str>>,
}

/// One column: the first dimension is the record.
#[derive(Clone, Debug, PartialEq)]
pub enum Column {
    F32 {
        shape: Vec<usize>,
        values: Vec<f32>,
    },
    I64 {
        shape: Vec<usize>,
        values: Vec<i64>,
    },
    U8 {
        shape: Vec<usize>,
        values: Vec<u8>,
    },
    /// One piece of text or bytes per record.
    Bytes(Vec<Vec<u8>>),
}

impl Batch {
    #[must_use]
    pub fn len(&self) -> usize {
        self.records.len()
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    /// The numbers of an `f32` column.
    #[must_use]
    pub fn f32(&self, name: &str) -> Option<&[f32]> {
        if let Column::F32 { values, .. } = self.columns.get(name)? { Some(values) } else { None }
    }

    /// The numbers of an `i64` column.
    #[must_use]
    pub fn i64(&self, name: &str) -> Option<&[i64]> {
        if let Column::I64 { values, .. } = self.columns.get(name)? { Some(values) } else { None }
    }

    /// The numbers of a `u8` column.
    #[must_use]
    pub fn u8(&self, name: &str) -> Option<&[u8]> {
        if let Column::U8 { values, .. } = self.columns.get(name)? { Some(values) } else { None }
    }

    /// The values of a `bytes` column.
    #[must_use]
    pub fn bytes(&self, name: &str) -> Option<&[Vec<u8>]> {
        if let Column::Bytes(values) = self.columns.get(name)? { Some(values) } else { None }
    }
}

impl Column {
    #[must_use]
    pub fn dtype(&self) -> DType {
        match self {
            Self::F32 { .. } => DType::F32,
            Self::I64 { .. } => DType::I64,
            Self::U8 { .. } => DType::U8,
            Self::Bytes(_) => DType::Bytes,
        }
    }

    /// Numbers of each dimension; text and bytes have one.
    #[must_use]
    pub fn shape(&self) -> Vec<usize> {
        match self {
            Self::F32 { shape, .. } | Self::I64 { shape, .. } | Self::U8 { shape, .. } => {
                shape.clone()
            }
            Self::Bytes(values) => vec![values.len()],
        }
    }
}
