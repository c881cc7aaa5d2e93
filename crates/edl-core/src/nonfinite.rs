// SPDX-License-Identifier: Apache-2.0
//! Numbers that are not finite, in JSON files: written as `null`, because JSON has no such numbers,
//! and read as NaN. Messages between processes carry them as they are.

use serde::{Deserialize, Deserializer};

/// Reads a number.
pub fn number<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de> + From<f32>,
{
    Ok(Option::deserialize(deserializer)?.unwrap_or_else(|| f32::NAN.into()))
}

/// Reads named numbers.
pub fn map<'de, D, M>(deserializer: D) -> Result<M, D::Error>
where
    D: Deserializer<'de>,
    M: FromIterator<(String, f64)>,
{
    let read = std::collections::BTreeMap::<String, Option<f64>>::deserialize(deserializer)?;
    Ok(read.into_iter().map(|(name, value)| (name, value.unwrap_or(f64::NAN))).collect())
}
