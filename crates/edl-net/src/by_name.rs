// SPDX-License-Identifier: Apache-2.0
//! Enums of messages in JSON: by name, because people read it.

use std::marker::PhantomData;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Serde of a field that holds the number of a `T`.
pub(crate) struct ByName<T>(PhantomData<T>);

impl<T: TryFrom<i32> + Default + Serialize> ByName<T> {
    pub(crate) fn serialize<S: Serializer>(number: &i32, serializer: S) -> Result<S::Ok, S::Error> {
        T::try_from(*number).unwrap_or_default().serialize(serializer)
    }
}

impl<'de, T: Into<i32> + Deserialize<'de>> ByName<T> {
    pub(crate) fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<i32, D::Error> {
        T::deserialize(deserializer).map(Into::into)
    }
}
