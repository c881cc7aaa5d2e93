// SPDX-License-Identifier: Apache-2.0
//! Initial values: a pure function of seed, name and position.
//!
//! An unused row needs no memory and no checkpoint, and a restored server creates the same rows
//! again. Normal values come from the inverse of the distribution, so one random word makes one
//! value, no matter where a range starts.

use edl_core::model::Init;
use edl_core::rng;

/// The initial values of one dense parameter or of one row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct InitialValues {
    init: Init,
    key: u64,
}

/// Where random values of a named thing come from.
#[must_use]
pub fn name_key(seed: u64, name: &str) -> u64 {
    rng::key(&[seed, rng::name_key(name)])
}

impl InitialValues {
    /// A dense parameter, by its name.
    #[must_use]
    pub fn param(init: Init, seed: u64, name: &str) -> Self {
        Self { init, key: name_key(seed, name) }
    }

    /// A row of a table; `table` is the `name_key` of the table.
    #[must_use]
    pub fn row(init: Init, table: u64, id: u64) -> Self {
        Self { init, key: rng::key(&[table, id]) }
    }

    /// Writes the values of the elements from number `first` on.
    pub fn fill(&self, first: usize, out: &mut [f32]) {
        match self.init {
            Init::Constant(value) => out.fill(value),
            // The values of the job's file overwrite these.
            Init::Given => out.fill(0.0),
            Init::Uniform { low, high } => self.each(first, out, |word| {
                let (low, high) = (f64::from(low), f64::from(high));
                low + (high - low) * rng::unit(word)
            }),
            Init::Normal { mean, std } => self.each(first, out, |word| {
                f64::from(mean) + f64::from(std) * quantile(open_unit(word))
            }),
            Init::TruncatedNormal { mean, std } => self.each(first, out, |word| {
                let place = BELOW_TWO + (1.0 - 2.0 * BELOW_TWO) * open_unit(word);
                f64::from(mean) + f64::from(std) * quantile(place)
            }),
        }
    }

    fn each(&self, first: usize, out: &mut [f32], value: impl Fn(u64) -> f64) {
        for (place, number) in (first as u64..).zip(out) {
            #[expect(clippy::cast_possible_truncation, reason = "parameters are single precision")]
            let single = value(rng::mix(self.key.wrapping_add(place))) as f32;
            *number = single;
        }
    }
}

/// How much of the normal distribution lies more than two deviations below the mean.
const BELOW_TWO: f64 = 0.022_750_131_948_179_2;

/// Maps a word to (0, 1), both ends left out.
fn open_unit(word: u64) -> f64 {
    const HALF_STEP: f64 = 0.5 / 9_007_199_254_740_992.0;
    rng::unit(word) + HALF_STEP
}

/// The inverse of the normal distribution: Wichura's algorithm AS 241, the variant with seven
/// digits, which is all that single precision holds.
fn quantile(p: f64) -> f64 {
    let q = p - 0.5;
    if q.abs() <= 0.425 {
        let r = 0.180_625 - q * q;
        let above =
            ((59.109_374_720 * r + 159.291_132_02) * r + 50.434_271_938) * r + 3.387_132_717_9;
        let below = ((67.187_563_600 * r + 78.757_757_664) * r + 17.895_169_469) * r + 1.0;
        return q * above / below;
    }
    let r = (-p.min(1.0 - p).ln()).sqrt();
    let size = if r <= 5.0 {
        let r = r - 1.6;
        let above =
            ((0.170_238_211_03 * r + 1.306_728_481_6) * r + 2.756_815_390_0) * r + 1.423_437_277_7;
        above / ((0.120_211_329_75 * r + 0.737_001_642_50) * r + 1.0)
    } else {
        let r = r - 5.0;
        let above = ((0.017_337_203_997 * r + 0.428_682_943_37) * r + 3.081_226_386_0) * r
            + 6.657_905_115_0;
        above / ((0.012_258_202_635 * r + 0.241_978_942_25) * r + 1.0)
    };
    size.copysign(q)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(init: Init, n: usize) -> Vec<f32> {
        let mut out = vec![0.0; n];
        InitialValues::param(init, 7, "dense/kernel").fill(0, &mut out);
        out
    }

    fn mean_and_std(values: &[f32]) -> (f64, f64) {
        let n = values.len() as f64;
        let mean = values.iter().map(|v| f64::from(*v)).sum::<f64>() / n;
        let variance = values.iter().map(|v| (f64::from(*v) - mean).powi(2)).sum::<f64>() / n;
        (mean, variance.sqrt())
    }

    #[test]
    fn a_range_has_the_same_values_wherever_it_starts() {
        for init in [
            Init::Constant(0.5),
            Init::Uniform { low: -1.0, high: 1.0 },
            Init::Normal { mean: 0.0, std: 1.0 },
            Init::TruncatedNormal { mean: 0.0, std: 1.0 },
        ] {
            let source = InitialValues::param(init, 7, "dense/kernel");
            let mut piece = [0.0; 10];
            source.fill(33, &mut piece);
            assert_eq!(piece.as_slice(), &values(init, 100)[33..43]);
        }
    }

    #[test]
    fn quantiles_are_those_of_the_tables() {
        for (p, z) in [
            (0.5, 0.0),
            (0.841_344_746, 1.0),
            (0.975, 1.959_963_985),
            (0.999_5, 3.290_526_731),
            (1e-9, -5.997_807_015),
            (1e-15, -7.941_345_326),
        ] {
            assert!((quantile(p) - z).abs() < 1e-6, "{p}: {} is not {z}", quantile(p));
        }
    }

    #[test]
    fn values_follow_their_distribution() {
        let n = 100_000;
        let uniform = values(Init::Uniform { low: -0.5, high: 1.5 }, n);
        assert!(uniform.iter().all(|v| (-0.5..=1.5).contains(v)));
        let (mean, std) = mean_and_std(&uniform);
        assert!((mean - 0.5).abs() < 0.01 && (std - 2.0 / 12f64.sqrt()).abs() < 0.01);

        let (mean, std) = mean_and_std(&values(Init::Normal { mean: 3.0, std: 2.0 }, n));
        assert!((mean - 3.0).abs() < 0.03 && (std - 2.0).abs() < 0.02);

        let truncated = values(Init::TruncatedNormal { mean: 3.0, std: 2.0 }, n);
        assert!(truncated.iter().all(|v| (-1.0..=7.0).contains(v)));
        let (mean, std) = mean_and_std(&truncated);
        // The deviation of a normal distribution that is truncated at two deviations.
        assert!((mean - 3.0).abs() < 0.03 && (std - 2.0 * 0.879_626).abs() < 0.02);
    }

    #[test]
    fn names_seeds_and_rows_differ() {
        let init = Init::Uniform { low: 0.0, high: 1.0 };
        let first = |source: InitialValues| {
            let mut out = [0.0];
            source.fill(0, &mut out);
            out[0].to_bits()
        };
        let table = name_key(1, "users");
        let all = [
            first(InitialValues::param(init, 1, "a")),
            first(InitialValues::param(init, 1, "b")),
            first(InitialValues::param(init, 2, "a")),
            first(InitialValues::row(init, table, 0)),
            first(InitialValues::row(init, table, 1)),
        ];
        let distinct: std::collections::BTreeSet<_> = all.iter().collect();
        assert_eq!(distinct.len(), all.len());
    }

    #[test]
    fn values_are_pinned_forever() {
        let pinned = values(Init::Uniform { low: 0.0, high: 1.0 }, 3);
        expect_test::expect![[r#"
            [
                0.11828904,
                0.5904998,
                0.4913572,
            ]
        "#]]
        .assert_debug_eq(&pinned);
    }
}
