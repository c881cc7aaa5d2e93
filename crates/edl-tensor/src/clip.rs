// SPDX-License-Identifier: Apache-2.0
//! Clips a gradient to a maximum norm.

use std::ops::Range;

use edl_core::model::{ModelSpec, Rule};
use edl_core::optimizer::Clip;

use crate::model::Gradient;

/// Clips what an optimizer will use: dense gradients and rows, without the differences that go to
/// moving averages. Rows of equal ids should be summed before. What is not finite stays as it is.
///
/// # Panics
/// If the dense part is not of this model.
pub fn clip(gradient: &mut Gradient, model: &ModelSpec, clip: Clip) {
    match clip {
        Clip::GlobalNorm(limit) => {
            let had = norm(gradient, model);
            each(gradient, model, |numbers| shorten(numbers, had, limit));
        }
        Clip::Norm(limit) => each(gradient, model, |numbers| {
            let had = sum_of_squares(numbers).sqrt();
            shorten(numbers, had, limit);
        }),
        Clip::Value(limit) => {
            let limit = single(limit.abs());
            each(gradient, model, |numbers| {
                numbers.iter_mut().for_each(|number| *number = number.clamp(-limit, limit));
            });
        }
    }
}

/// The norm of all that an optimizer will use.
///
/// # Panics
/// If the dense part is not of this model.
#[must_use]
pub fn norm(gradient: &Gradient, model: &ModelSpec) -> f64 {
    let dense = trainable(model, gradient.dense.len());
    let dense: f64 = dense.map(|range| sum_of_squares(&gradient.dense[range])).sum();
    let rows: f64 = gradient.rows.iter().map(|rows| sum_of_squares(rows)).sum();
    (dense + rows).sqrt()
}

/// Scales numbers of the norm `had` to at most `limit`.
fn shorten(numbers: &mut [f32], had: f64, limit: f64) {
    if had > limit && had.is_finite() {
        let scale = single(limit / had);
        numbers.iter_mut().for_each(|number| *number *= scale);
    }
}

/// Visits each parameter's gradient and each table's.
fn each(gradient: &mut Gradient, model: &ModelSpec, mut act: impl FnMut(&mut [f32])) {
    let Gradient { dense, rows } = gradient;
    trainable(model, dense.len()).for_each(|range| act(&mut dense[range]));
    rows.iter_mut().for_each(|rows| act(rows));
}

/// Where the parameters lie that the optimizer changes.
fn trainable(model: &ModelSpec, len: usize) -> impl Iterator<Item = Range<usize>> {
    assert_eq!(len, model.dense_len(), "a gradient of another model");
    let mut end = 0;
    let params = model.params.iter().map(move |param| {
        let start = end;
        end += param.len();
        (param.rule, start..end)
    });
    params.filter_map(|(rule, range)| match rule {
        Rule::Trainable { .. } => Some(range),
        Rule::MovingAverage => None,
    })
}

#[expect(clippy::cast_possible_truncation, reason = "gradients are single precision")]
fn single(number: f64) -> f32 {
    number as f32
}

/// In double precision, and in lanes so the compiler can vectorise.
fn sum_of_squares(numbers: &[f32]) -> f64 {
    const LANES: usize = 8;
    let mut lanes = [0.0; LANES];
    let (chunks, rest) = numbers.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, number) in lanes.iter_mut().zip(chunk) {
            *lane += f64::from(*number) * f64::from(*number);
        }
    }
    let rest: f64 = rest.iter().map(|number| f64::from(*number) * f64::from(*number)).sum();
    lanes.iter().sum::<f64>() + rest
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::fixture;

    #[test]
    fn a_long_gradient_shrinks_and_moving_averages_stay() {
        let model = fixture::model(&[("w", 2), ("mean", 1), ("b", 1)], &[1]);
        let mut gradient =
            Gradient { dense: vec![2.0, 4.0, 100.0, 4.0], rows: vec![vec![6.0, 7.0, 2.0, 6.0]] };
        // 4 + 16 + 16 + 36 + 49 + 4 + 36 = 161
        assert!((norm(&gradient, &model) - 161f64.sqrt()).abs() < 1e-9);
        clip(&mut gradient, &model, Clip::GlobalNorm(161f64.sqrt() / 2.0));
        assert_eq!(gradient.dense, [1.0, 2.0, 100.0, 2.0]);
        assert_eq!(gradient.rows[0], [3.0, 3.5, 1.0, 3.0]);
    }

    #[test]
    fn each_parameter_and_each_table_may_have_its_own_limit() {
        let model = fixture::model(&[("w", 2), ("mean", 1), ("b", 1)], &[1]);
        let mut gradient =
            Gradient { dense: vec![6.0, 8.0, 100.0, 4.0], rows: vec![vec![30.0, 40.0]] };
        clip(&mut gradient, &model, Clip::Norm(5.0));
        assert_eq!(gradient.dense, [3.0, 4.0, 100.0, 4.0]);
        assert_eq!(gradient.rows[0], [3.0, 4.0]);
    }

    #[test]
    fn each_number_may_have_the_same_limit() {
        let model = fixture::model(&[("w", 2), ("mean", 1)], &[1]);
        let mut gradient = Gradient { dense: vec![-6.0, 1.0, 100.0], rows: vec![vec![-1.0, 7.0]] };
        clip(&mut gradient, &model, Clip::Value(2.0));
        assert_eq!(gradient.dense, [-2.0, 1.0, 100.0]);
        assert_eq!(gradient.rows[0], [-1.0, 2.0]);
    }

    #[test]
    fn a_short_gradient_stays_as_it_is() {
        let model = fixture::model(&[("w", 20)], &[]);
        let mut gradient = Gradient { dense: vec![0.1; 20], rows: vec![] };
        let before = gradient.clone();
        for limit in [Clip::GlobalNorm(1.0), Clip::Norm(1.0), Clip::Value(1.0)] {
            clip(&mut gradient, &model, limit);
            assert_eq!(gradient, before);
        }
    }
}
