// SPDX-License-Identifier: Apache-2.0
//! Scales a gradient down to a largest norm.

use edl_core::model::{ModelSpec, Rule};

use crate::model::Gradient;

/// The norm of all that an optimizer will use: dense gradients and rows, without the differences
/// that go to moving averages. Rows of equal ids should be summed before.
///
/// # Panics
/// If the dense part is not of this model.
#[must_use]
pub fn norm(gradient: &Gradient, model: &ModelSpec) -> f64 {
    let mut squares = 0.0;
    each_trainable(model, gradient.dense.len(), |range| {
        squares += sum_of_squares(&gradient.dense[range]);
    });
    squares += gradient.rows.iter().map(|rows| sum_of_squares(rows)).sum::<f64>();
    squares.sqrt()
}

/// Scales the gradient so that its norm is at most `max_norm`; returns the norm that it had.
///
/// # Panics
/// If the dense part is not of this model.
pub fn clip(gradient: &mut Gradient, model: &ModelSpec, max_norm: f64) -> f64 {
    let had = norm(gradient, model);
    if had <= max_norm || !had.is_finite() {
        return had;
    }
    #[expect(clippy::cast_possible_truncation, reason = "gradients are single precision")]
    let scale = (max_norm / had) as f32;
    let Gradient { dense, rows } = gradient;
    each_trainable(model, dense.len(), |range| {
        dense[range].iter_mut().for_each(|number| *number *= scale);
    });
    rows.iter_mut().flatten().for_each(|number| *number *= scale);
    had
}

fn each_trainable(model: &ModelSpec, len: usize, mut act: impl FnMut(std::ops::Range<usize>)) {
    assert_eq!(len, model.dense_len(), "a gradient of another model");
    let mut start = 0;
    for param in &model.params {
        let end = start + param.len();
        match param.rule {
            Rule::Trainable { .. } => act(start..end),
            Rule::MovingAverage => {}
        }
        start = end;
    }
}

/// In double precision, and in lanes so that the compiler can vectorise.
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
    use crate::fixture;

    #[test]
    fn a_long_gradient_shrinks_and_moving_averages_stay() {
        let model = fixture::model(&[("w", 2), ("mean", 1), ("b", 1)], &[1]);
        let mut gradient =
            Gradient { dense: vec![2.0, 4.0, 100.0, 4.0], rows: vec![vec![6.0, 7.0, 2.0, 6.0]] };
        // 4 + 16 + 16 + 36 + 49 + 4 + 36 = 161
        let had = clip(&mut gradient, &model, 161f64.sqrt() / 2.0);
        assert!((had - 161f64.sqrt()).abs() < 1e-9);
        assert_eq!(gradient.dense, [1.0, 2.0, 100.0, 2.0]);
        assert_eq!(gradient.rows[0], [3.0, 3.5, 1.0, 3.0]);
    }

    #[test]
    fn a_short_gradient_stays_as_it_is() {
        let model = fixture::model(&[("w", 20)], &[]);
        let mut gradient = Gradient { dense: vec![0.1; 20], rows: vec![] };
        let before = gradient.clone();
        let had = clip(&mut gradient, &model, 1.0);
        assert!((had - 0.2f64.sqrt()).abs() < 1e-6);
        assert_eq!(gradient, before);
    }
}
