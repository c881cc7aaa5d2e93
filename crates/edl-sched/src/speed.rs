// SPDX-License-Identifier: Apache-2.0
//! How fast a job trains by its number of workers. Values are computed when they are needed, so a
//! job that may have very many workers costs a plan nothing.

use std::collections::BTreeMap;

/// Beyond the measured sizes, each worker is assumed to add this share of an average worker.
const BEYOND: f64 = 0.8;

/// The measured or predicted speed of a job, in units of work per second.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Speed {
    /// With workers that share one node.
    pub together: Curve,
    /// With workers on more than one node.
    pub apart: Curve,
    /// Remaining units of work.
    pub remaining: f64,
    /// The largest measured number of workers; beyond it, the curve is an estimate.
    pub measured_to: u32,
}

/// Units of work per second by number of workers.
#[derive(Clone, Debug, PartialEq)]
pub enum Curve {
    /// With 1, 2, … workers; more are as fast as the last.
    Table(Vec<f64>),
    /// `n` workers are `n` to this power times as fast as one, which does 1 per second.
    Power(f64),
    /// Measured at some sizes: interpolated between them, and extrapolated beyond them.
    Measured(BTreeMap<u32, f64>),
}

impl Default for Curve {
    fn default() -> Self {
        Self::Table(Vec::new())
    }
}

impl FromIterator<f64> for Curve {
    fn from_iter<I: IntoIterator<Item = f64>>(values: I) -> Self {
        Self::Table(values.into_iter().collect())
    }
}

impl Speed {
    /// Units of work per second with `n` workers on one node, or on several.
    #[must_use]
    pub fn at(&self, n: u32, is_together: bool) -> f64 {
        if is_together { self.together.at(n) } else { self.apart.at(n) }
    }

    /// The speed when `n` workers are packed on nodes that hold `per_node` of them.
    #[must_use]
    pub fn packed(&self, n: u32, per_node: u32) -> f64 {
        self.at(n, n <= per_node)
    }
}

impl Curve {
    #[must_use]
    pub fn at(&self, n: u32) -> f64 {
        match self {
            _ if n == 0 => 0.0,
            Self::Table(values) => {
                let last = values.last().copied().unwrap_or(0.0);
                values.get(n as usize - 1).copied().unwrap_or(last)
            }
            Self::Power(power) => f64::from(n).powf(*power),
            Self::Measured(speeds) => interpolated(speeds, n),
        }
    }
}

fn interpolated(speeds: &BTreeMap<u32, f64>, n: u32) -> f64 {
    let below = speeds.range(..=n).next_back();
    let above = speeds.range(n..).next();
    match (below, above) {
        (Some((less, slow)), Some((more, fast))) if less < more => {
            let share = f64::from(n - less) / f64::from(more - less);
            slow + (fast - slow) * share
        }
        (Some((_, exact)), Some(_)) => *exact,
        (None, Some((more, fast))) => fast * f64::from(n) / f64::from(*more),
        (Some((less, slow)), None) => {
            slow * (1.0 + BEYOND * f64::from(n - less) / f64::from((*less).max(1)))
        }
        (None, None) => 0.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(curve: &Curve, speeds: &[(u32, f64)]) {
        for (n, expected) in speeds {
            let found = curve.at(*n);
            assert!((found - expected).abs() < 1e-9, "{curve:?} at {n}: {found}");
        }
    }

    #[test]
    fn a_curve_goes_through_what_was_measured() {
        let curve = Curve::Measured([(2, 10.0), (4, 16.0)].into());
        check(&curve, &[(0, 0.0), (1, 5.0), (2, 10.0), (3, 13.0), (4, 16.0), (5, 19.2)]);
        assert!(curve.at(u32::MAX) > 1e9, "any size has a speed");
    }

    #[test]
    fn a_table_ends_with_its_last_value_and_a_power_never() {
        check(&Curve::Table(vec![3.0, 5.0]), &[(0, 0.0), (1, 3.0), (2, 5.0), (9, 5.0)]);
        check(&Curve::Power(0.5), &[(0, 0.0), (1, 1.0), (1 << 20, 1024.0)]);
        check(&Curve::default(), &[(7, 0.0)]);
    }
}
