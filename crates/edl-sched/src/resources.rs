// SPDX-License-Identifier: Apache-2.0
//! Amounts of CPU, memory and GPUs, as vectors: nothing here is ever summed across kinds.

use std::fmt;
use std::ops::{Add, AddAssign, Mul, Sub, SubAssign};

use serde::{Deserialize, Serialize};

/// What a pod asks for, or a node has.
///
/// The order of the fields is the order in which amounts compare: GPUs first, so that a pod
/// without GPUs looks for room on nodes without GPUs before it blocks one that has them.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct Resources {
    pub gpu: u64,
    pub cpu_milli: u64,
    pub memory_mib: u64,
}

/// One kind of resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Kind {
    Gpu,
    Cpu,
    Memory,
}

impl Resources {
    pub const ZERO: Self = Self { gpu: 0, cpu_milli: 0, memory_mib: 0 };

    #[must_use]
    pub fn new(gpu: u64, cpu_milli: u64, memory_mib: u64) -> Self {
        Self { gpu, cpu_milli, memory_mib }
    }

    #[must_use]
    pub fn fits_in(self, room: Self) -> bool {
        self.gpu <= room.gpu
            && self.cpu_milli <= room.cpu_milli
            && self.memory_mib <= room.memory_mib
    }

    /// How many of these fit in `room`; `u64::MAX` of nothing.
    #[must_use]
    pub fn times_in(self, room: Self) -> u64 {
        let times = |need: u64, has: u64| has.checked_div(need).unwrap_or(u64::MAX);
        times(self.gpu, room.gpu)
            .min(times(self.cpu_milli, room.cpu_milli))
            .min(times(self.memory_mib, room.memory_mib))
    }

    #[must_use]
    pub fn saturating_sub(self, other: Self) -> Self {
        Self {
            gpu: self.gpu.saturating_sub(other.gpu),
            cpu_milli: self.cpu_milli.saturating_sub(other.cpu_milli),
            memory_mib: self.memory_mib.saturating_sub(other.memory_mib),
        }
    }

    /// The share of `total` in the kind of which these take most (the *dominant* share).
    #[must_use]
    pub fn dominant_share(self, total: Self) -> f64 {
        let share = |part: u64, whole: u64| match (part, whole) {
            (0, _) => 0.0,
            (_, 0) => f64::INFINITY,
            (part, whole) => part as f64 / whole as f64,
        };
        share(self.gpu, total.gpu)
            .max(share(self.cpu_milli, total.cpu_milli))
            .max(share(self.memory_mib, total.memory_mib))
    }

    /// So many thousandths of these, rounded down.
    #[must_use]
    pub fn permille(self, permille: u32) -> Self {
        let part = |whole: u64| whole.saturating_mul(u64::from(permille)) / 1000;
        Self {
            gpu: part(self.gpu),
            cpu_milli: part(self.cpu_milli),
            memory_mib: part(self.memory_mib),
        }
    }

    /// The first kind of which `room` has less than these; none if they fit.
    #[must_use]
    pub fn lacks(self, room: Self) -> Option<Kind> {
        if self.gpu > room.gpu {
            Some(Kind::Gpu)
        } else if self.cpu_milli > room.cpu_milli {
            Some(Kind::Cpu)
        } else if self.memory_mib > room.memory_mib {
            Some(Kind::Memory)
        } else {
            None
        }
    }
}

impl Add for Resources {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            gpu: self.gpu + other.gpu,
            cpu_milli: self.cpu_milli + other.cpu_milli,
            memory_mib: self.memory_mib + other.memory_mib,
        }
    }
}

impl AddAssign for Resources {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl Sub for Resources {
    type Output = Self;

    /// # Panics
    /// If there is less than what is taken away: books that do not balance are a fault of ours.
    fn sub(self, other: Self) -> Self {
        assert!(other.fits_in(self), "cannot take {other} from {self}");
        self.saturating_sub(other)
    }
}

impl SubAssign for Resources {
    fn sub_assign(&mut self, other: Self) {
        *self = *self - other;
    }
}

impl Mul<u64> for Resources {
    type Output = Self;

    fn mul(self, times: u64) -> Self {
        Self {
            gpu: self.gpu * times,
            cpu_milli: self.cpu_milli * times,
            memory_mib: self.memory_mib * times,
        }
    }
}

impl std::iter::Sum for Resources {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::ZERO, Add::add)
    }
}

impl fmt::Display for Resources {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { gpu, cpu_milli, memory_mib } = self;
        write!(f, "{cpu_milli}m CPU, {memory_mib} MiB, {gpu} GPU")
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Gpu => "GPU",
            Self::Cpu => "CPU",
            Self::Memory => "memory",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_fits_is_decided_by_the_scarcest_kind() {
        let pod = Resources::new(0, 5000, 8192);
        let node = Resources::new(4, 11_750, 20_000);
        assert!(pod.fits_in(node));
        assert_eq!(pod.times_in(node), 2);
        assert_eq!(Resources::ZERO.times_in(node), u64::MAX);
        assert_eq!((pod * 3).lacks(node), Some(Kind::Cpu));
        assert!((pod.dominant_share(node) - 5000.0 / 11_750.0).abs() < 1e-12);
        assert!(Resources::new(1, 0, 0).dominant_share(Resources::new(0, 1, 1)).is_infinite());
    }

    #[test]
    #[should_panic(expected = "cannot take")]
    fn more_cannot_be_taken_than_there_is() {
        let _ = Resources::new(0, 1, 0) - Resources::new(0, 2, 0);
    }
}
