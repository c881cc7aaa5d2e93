// SPDX-License-Identifier: Apache-2.0
//! Time by kind, in whole nanoseconds, so that parts add up exactly.

use std::collections::BTreeMap;
use std::ops::AddAssign;
use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// What a second was spent on. The order is that of reports.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// Training, evaluating, applying gradients.
    Compute,
    /// Waiting for parameters, acknowledgements or other workers' gradients.
    Communicate,
    /// Waiting for records.
    DataWait,
    /// Training what had been trained before.
    Redo,
    /// Getting back to work after a loss: starting, loading, forming the next world.
    Heal,
    /// Copying state for a checkpoint.
    Checkpoint,
    /// Nothing to do.
    #[default]
    Idle,
    /// Nobody was there.
    Down,
}

impl Kind {
    pub const ALL: [Self; 8] = [
        Self::Compute,
        Self::Communicate,
        Self::DataWait,
        Self::Redo,
        Self::Heal,
        Self::Checkpoint,
        Self::Idle,
        Self::Down,
    ];

    /// The word in status, metrics and page.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Compute => "compute",
            Self::Communicate => "communicate",
            Self::DataWait => "data_wait",
            Self::Redo => "redo",
            Self::Heal => "heal",
            Self::Checkpoint => "checkpoint",
            Self::Idle => "idle",
            Self::Down => "down",
        }
    }

    fn place(self) -> usize {
        self as usize
    }
}

/// Time spent, by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Spent([u64; 8]);

impl Spent {
    /// From nanoseconds in the order of [`Kind::ALL`].
    #[must_use]
    pub fn from_nanos(nanos: [u64; 8]) -> Self {
        Self(nanos)
    }

    #[must_use]
    pub fn get(&self, kind: Kind) -> Duration {
        Duration::from_nanos(self.0[kind.place()])
    }

    pub fn add(&mut self, kind: Kind, time: Duration) {
        let place = &mut self.0[kind.place()];
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
    pub fn shift(&mut self, from: Kind, to: Kind, n: u64, of: u64) {
        if of == 0 {
            return;
        }
        let all = self.0[from.place()];
        let moved = u128::from(all) * u128::from(n.min(of)) / u128::from(of);
        let moved = u64::try_from(moved).unwrap_or(all);
        self.0[from.place()] -= moved;
        self.0[to.place()] += moved;
    }

    /// Every kind with its time, in the order of reports.
    pub fn iter(&self) -> impl Iterator<Item = (Kind, Duration)> + '_ {
        Kind::ALL.into_iter().map(|kind| (kind, self.get(kind)))
    }
}

impl AddAssign for Spent {
    fn add_assign(&mut self, other: Self) {
        for (mine, theirs) in self.0.iter_mut().zip(other.0) {
            *mine = mine.saturating_add(theirs);
        }
    }
}

/// A time in whole nanoseconds; one too long for that is the longest there is.
#[must_use]
pub fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// A map as pairs: JSON has no keys but words.
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
