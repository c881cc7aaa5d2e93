// SPDX-License-Identifier: Apache-2.0
//! Time by kind, in whole nanoseconds: parts add up exactly.

use std::collections::BTreeMap;
use std::ops::AddAssign;
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::named::named;

named! {
    /// What a second was spent on, in the order of reports.
    TimeKind {
        /// Training, evaluating, applying gradients.
        Compute = "compute",
        /// Waiting for parameters, acknowledgements or other workers' gradients.
        Communicate = "communicate",
        /// Waiting for records.
        DataWait = "data_wait",
        /// Training what had been trained before.
        Redo = "redo",
        /// Getting back to work after a loss: starting, loading, forming the next world.
        Heal = "heal",
        /// Copying state for a checkpoint.
        Checkpoint = "checkpoint",
        /// Nothing to do.
        #[default]
        Idle = "idle",
        /// No process was running.
        Down = "down",
    }
}

/// Time spent, by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Spent([u64; 8]);

impl Spent {
    /// From nanoseconds in the order of [`TimeKind::ALL`].
    #[must_use]
    pub fn from_nanos(nanos: [u64; 8]) -> Self {
        Self(nanos)
    }

    #[must_use]
    pub fn get(&self, kind: TimeKind) -> Duration {
        Duration::from_nanos(self.0[kind as usize])
    }

    pub fn add(&mut self, kind: TimeKind, time: Duration) {
        let place = &mut self.0[kind as usize];
        *place = place.saturating_add(nanos(time));
    }

    #[must_use]
    pub fn total(&self) -> Duration {
        Duration::from_nanos(self.0.iter().fold(0, |sum, part| sum.saturating_add(*part)))
    }

    /// What was added since `earlier`; a part that has shrunk counts as nothing.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        Self(std::array::from_fn(|place| self.0[place].saturating_sub(earlier.0[place])))
    }

    /// The same shares of another time; none if there are no shares.
    #[must_use]
    pub fn scaled_to(&self, time: Duration) -> Option<Self> {
        let (from, to) = (u128::from(nanos(self.total())), u128::from(nanos(time)));
        if from == 0 {
            return None;
        }
        let part = |part: u64| u64::try_from(u128::from(part) * to / from).unwrap_or(u64::MAX);
        let mut scaled = Self(self.0.map(part));
        // What rounding has lost goes to the largest share.
        let largest = (0..8).max_by_key(|place| scaled.0[*place]).unwrap_or(0);
        scaled.0[largest] += nanos(time.saturating_sub(scaled.total()));
        Some(scaled)
    }

    /// Makes `n` of `of` parts of one kind another kind.
    pub fn shift(&mut self, from: TimeKind, to: TimeKind, n: u64, of: u64) {
        if of == 0 {
            return;
        }
        let all = self.0[from as usize];
        let moved = u128::from(all) * u128::from(n.min(of)) / u128::from(of);
        let moved = u64::try_from(moved).unwrap_or(all);
        self.0[from as usize] -= moved;
        self.0[to as usize] += moved;
    }

    /// Every kind with its time, in the order of reports.
    pub fn iter(&self) -> impl Iterator<Item = (TimeKind, Duration)> + '_ {
        TimeKind::ALL.into_iter().map(|kind| (kind, self.get(kind)))
    }
}

impl AddAssign for Spent {
    fn add_assign(&mut self, other: Self) {
        for (mine, theirs) in self.0.iter_mut().zip(other.0) {
            *mine = mine.saturating_add(theirs);
        }
    }
}

/// A time in whole nanoseconds, capped at the maximum.
#[must_use]
pub fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// A map as pairs: JSON keys are text.
pub(super) mod pairs {
    use super::{BTreeMap, Deserialize, Deserializer, Serialize, Serializer};

    pub(in crate::goodput) fn serialize<K: Serialize, V: Serialize, S: Serializer>(
        map: &BTreeMap<K, V>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(map)
    }

    pub(in crate::goodput) fn deserialize<'de, K, V, D>(
        deserializer: D,
    ) -> Result<BTreeMap<K, V>, D::Error>
    where
        K: Deserialize<'de> + Ord,
        V: Deserialize<'de>,
        D: Deserializer<'de>,
    {
        Ok(Vec::<(K, V)>::deserialize(deserializer)?.into_iter().collect())
    }
}
