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
        match self.columns.get(name)? {
            Column::F32 { values, .. } => Some(values),
            Column::I64 { .. } | Column::U8 { .. } | Column::Bytes(_) => None,
        }
    }

    /// The numbers of an `i64` column.
    #[must_use]
    pub fn i64(&self, name: &str) -> Option<&[i64]> {
        match self.columns.get(name)? {
            Column::I64 { values, .. } => Some(values),
            Column::F32 { .. } | Column::U8 { .. } | Column::Bytes(_) => None,
        }
    }

    /// The bytes of a `u8` column.
    #[must_use]
    pub fn u8(&self, name: &str) -> Option<&[u8]> {
        match self.columns.get(name)? {
            Column::U8 { values, .. } => Some(values),
            Column::F32 { .. } | Column::I64 { .. } | Column::Bytes(_) => None,
        }
    }

    /// The pieces of a `bytes` column.
    #[must_use]
    pub fn bytes(&self, name: &str) -> Option<&[Vec<u8>]> {
        match self.columns.get(name)? {
            Column::Bytes(values) => Some(values),
            Column::F32 { .. } | Column::I64 { .. } | Column::U8 { .. } => None,
        }
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
}
