// SPDX-License-Identifier: Apache-2.0
//! `tf.train.Example`: named lists of bytes, floats or integers, as a protobuf message.
//!
//! The messages are written out here, so neither TensorFlow nor a proto compiler is needed.

use std::collections::BTreeMap;

use prost::Message;
use prost::bytes::Bytes;

/// A record: features by name.
#[derive(Clone, PartialEq, Message)]
pub struct Example {
    #[prost(message, optional, tag = "1")]
    pub features: Option<Features>,
}

#[derive(Clone, PartialEq, Message)]
pub struct Features {
    /// Ordered, so equal examples have equal bytes.
    #[prost(btree_map = "string, message", tag = "1")]
    pub feature: BTreeMap<String, Feature>,
}

#[derive(Clone, PartialEq, Message)]
pub struct Feature {
    #[prost(oneof = "FeatureKind", tags = "1, 2, 3")]
    pub kind: Option<FeatureKind>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
pub enum FeatureKind {
    #[prost(message, tag = "1")]
    Bytes(BytesList),
    #[prost(message, tag = "2")]
    Float(FloatList),
    #[prost(message, tag = "3")]
    Int64(Int64List),
}

#[derive(Clone, PartialEq, Message)]
pub struct BytesList {
    #[prost(bytes = "bytes", repeated, tag = "1")]
    pub value: Vec<Bytes>,
}

#[derive(Clone, PartialEq, Message)]
pub struct FloatList {
    #[prost(float, repeated, tag = "1")]
    pub value: Vec<f32>,
}

#[derive(Clone, PartialEq, Message)]
pub struct Int64List {
    #[prost(int64, repeated, tag = "1")]
    pub value: Vec<i64>,
}

impl Example {
    /// An example without features; add some with [`Example::bytes`], [`Example::floats`] and
    /// [`Example::ints`].
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    #[must_use]
    pub fn bytes(self, name: &str, value: impl Into<Bytes>) -> Self {
        self.with(name, FeatureKind::Bytes(BytesList { value: vec![value.into()] }))
    }

    #[must_use]
    pub fn floats(self, name: &str, value: impl Into<Vec<f32>>) -> Self {
        self.with(name, FeatureKind::Float(FloatList { value: value.into() }))
    }

    #[must_use]
    pub fn ints(self, name: &str, value: impl Into<Vec<i64>>) -> Self {
        self.with(name, FeatureKind::Int64(Int64List { value: value.into() }))
    }

    #[must_use]
    pub fn with(mut self, name: &str, kind: FeatureKind) -> Self {
        let features = self.features.get_or_insert_default();
        features.feature.insert(name.to_owned(), Feature { kind: Some(kind) });
        self
    }

    #[must_use]
    pub fn get(&self, name: &str) -> Option<&FeatureKind> {
        self.features.as_ref()?.feature.get(name)?.kind.as_ref()
    }

    /// The features, ordered by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Feature)> {
        let features = self.features.iter().flat_map(|features| &features.feature);
        features.map(|(name, feature)| (name.as_str(), feature))
    }

    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        self.encode_to_vec()
    }

    /// Decodes a record; byte features share its memory.
    pub fn parse(record: impl Into<Bytes>) -> Result<Self, prost::DecodeError> {
        Self::decode(record.into())
    }
}
