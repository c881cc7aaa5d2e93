// SPDX-License-Identifier: Apache-2.0
//! Amounts of GPUs, CPU, memory and pods, as vectors: kinds are never added together.

use std::fmt;
use std::ops::{Add, AddAssign, Mul, Sub, SubAssign};

use serde::{Deserialize, Serialize};

/// What a pod requests, or a node has.
///
/// Amounts compare in the order of the fields. GPUs come first, so a pod without GPUs prefers nodes
/// without GPUs.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct Resources {
    pub gpu: u64,
    pub cpu_milli: u64,
    pub memory_mib: u64,
    /// A pod is one; a node accepts this many. Zero where pods are not limited.
    pub pods: u64,
}

/// One kind of resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum ResourceKind {
    Gpu,
    Cpu,
    Memory,
    Pods,
}

impl ResourceKind {
    pub const ALL: [Self; 4] = [Self::Gpu, Self::Cpu, Self::Memory, Self::Pods];
    /// The kinds that jobs share. Pods only limit what fits on a node.
    pub const SHARED: [Self; 3] = [Self::Gpu, Self::Cpu, Self::Memory];
}

impl Resources {
    pub const ZERO: Self = Self { gpu: 0, cpu_milli: 0, memory_mib: 0, pods: 0 };

    #[must_use]
    pub const fn new(gpu: u64, cpu_milli: u64, memory_mib: u64) -> Self {
        Self { gpu, cpu_milli, memory_mib, pods: 0 }
    }

    /// These, with a number of pods: 1 for what a pod requests, the most of a node for its capacity.
    #[must_use]
    pub fn with_pods(self, pods: u64) -> Self {
        Self { pods, ..self }
    }

    #[must_use]
    pub fn of(self, kind: ResourceKind) -> u64 {
        match kind {
            ResourceKind::Gpu => self.gpu,
            ResourceKind::Cpu => self.cpu_milli,
            ResourceKind::Memory => self.memory_mib,
            ResourceKind::Pods => self.pods,
        }
    }

    #[must_use]
    pub fn fits_in(self, capacity: Self) -> bool {
        self.lacks(capacity).is_none()
    }

    /// The first kind of which `capacity` has too little; none if these fit.
    #[must_use]
    pub fn lacks(self, capacity: Self) -> Option<ResourceKind> {
        ResourceKind::ALL.into_iter().find(|kind| self.of(*kind) > capacity.of(*kind))
    }

    /// How many of these fit in `capacity`; `u64::MAX` if these are zero.
    #[must_use]
    pub fn times_in(self, capacity: Self) -> u64 {
        let times = |kind| capacity.of(kind).checked_div(self.of(kind)).unwrap_or(u64::MAX);
        ResourceKind::ALL.map(times).into_iter().fold(u64::MAX, u64::min)
    }

    #[must_use]
    pub fn saturating_sub(self, other: Self) -> Self {
        self.zip(other, u64::saturating_sub)
    }

    /// The larger amount of each kind.
    #[must_use]
    pub fn larger(self, other: Self) -> Self {
        self.zip(other, u64::max)
    }

    /// Whether these are nothing but a number of pods.
    #[must_use]
    pub fn is_nothing(self) -> bool {
        self.with_pods(0) == Self::ZERO
    }

    /// The largest share of `total` over all shared kinds (the *dominant* share).
    #[must_use]
    pub fn dominant_share(self, total: Self) -> f64 {
        let share = |kind| match (self.of(kind), total.of(kind)) {
            (0, _) => 0.0,
            (_, 0) => f64::INFINITY,
            (part, whole) => part as f64 / whole as f64,
        };
        ResourceKind::SHARED.map(share).into_iter().fold(0.0, f64::max)
    }

    /// Thousandths of these, rounded down.
    #[must_use]
    pub fn permille(self, permille: u32) -> Self {
        self.zip(Self::ZERO, |whole, _| whole.saturating_mul(u64::from(permille)) / 1000)
    }

    fn zip(self, other: Self, combine: impl Fn(u64, u64) -> u64) -> Self {
        Self {
            gpu: combine(self.gpu, other.gpu),
            cpu_milli: combine(self.cpu_milli, other.cpu_milli),
            memory_mib: combine(self.memory_mib, other.memory_mib),
            pods: combine(self.pods, other.pods),
        }
    }
}

impl Add for Resources {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        self.zip(other, u64::saturating_add)
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
    /// If `other` does not fit: then the accounting is wrong.
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
        self.zip(Self::ZERO, |amount, _| amount.saturating_mul(times))
    }
}

impl std::iter::Sum for Resources {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::ZERO, Add::add)
    }
}

impl fmt::Display for Resources {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { gpu, cpu_milli, memory_mib, pods: _ } = self;
        write!(f, "{cpu_milli}m CPU, {memory_mib} MiB, {gpu} GPU")
    }
}

impl fmt::Display for ResourceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Gpu => "GPU",
            Self::Cpu => "CPU",
            Self::Memory => "memory",
            Self::Pods => "pods per node",
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
        assert_eq!((pod * 3).lacks(node), Some(ResourceKind::Cpu));
        assert!((pod.dominant_share(node) - 5000.0 / 11_750.0).abs() < 1e-12);
        assert!(Resources::new(1, 0, 0).dominant_share(Resources::new(0, 1, 1)).is_infinite());
    }

    #[test]
    fn a_node_holds_no_more_pods_than_it_accepts() {
        let pod = Resources::new(0, 1, 0).with_pods(1);
        let node = Resources::new(0, 96_000, 0).with_pods(110);
        assert_eq!(pod.times_in(node), 110);
        assert_eq!((pod * 111).lacks(node), Some(ResourceKind::Pods));
        assert!((pod * 110).dominant_share(node) < 0.01, "pods are no share of a cluster");
        assert!(Resources::ZERO.with_pods(1).is_nothing() && !pod.is_nothing());
    }

    #[test]
    fn amounts_beyond_all_numbers_are_the_largest_number() {
        let much = Resources::new(0, u64::MAX, 1 << 50);
        assert_eq!((much + much).cpu_milli, u64::MAX);
        assert_eq!((much * u64::from(u32::MAX)).memory_mib, u64::MAX);
    }

    #[test]
    #[should_panic(expected = "cannot take")]
    fn more_cannot_be_taken_than_there_is() {
        let _ = Resources::new(0, 1, 0) - Resources::new(0, 2, 0);
    }
}
