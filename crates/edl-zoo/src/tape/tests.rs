// SPDX-License-Identifier: Apache-2.0
//! Every operation against the same function written out in double precision: values number by
//! number, gradients by central differences.

use edl_core::rng::Rng;

use super::kernel::narrow;
use super::*;

mod reference;

/// Numbers from -1 to 1.
fn draw(len: usize, seed: u64) -> Vec<f32> {
    let mut rng = Rng::new(seed);
    (0..len).map(|_| narrow(rng.unit()) * 2.0 - 1.0).collect()
}

/// The sum of a value's numbers, each times a weight: what gradients are taken of.
fn weighted_sum<const D: usize>(tape: &mut Tape<'_>, x: Var<D>, weights: Vec<f32>) -> Var<0> {
    let sum = tape.value(x).iter().zip(&weights).map(|(value, weight)| value * weight).sum();
    tape.record([], vec![sum], &[x.id()], move |back, gradient| {
        back.write(x, |target| {
            target.iter_mut().zip(&weights).for_each(|(target, w)| *target = w * gradient[0]);
        });
    })
}

/// What a loss is by values in double precision.
type Reference<'r> = &'r dyn Fn(&[Vec<f64>]) -> Vec<f64>;

/// Runs an operation on parameters of the given sizes, and compares it with its reference.
fn check<const D: usize>(
    sizes: &[usize],
    operation: impl Fn(&mut Tape<'_>, &[Var<1>]) -> Var<D>,
    reference: Reference<'_>,
) {
    let params: Vec<Vec<f32>> = (0_u64..).zip(sizes).map(|(i, size)| draw(*size, i + 1)).collect();
    let mut gradients: Vec<Vec<f32>> = sizes.iter().map(|size| vec![f32::NAN; *size]).collect();
    let mut pool = Pool::default();
    let mut tape = Tape::new(&mut pool);
    let leaves = params.iter().zip(&mut gradients);
    let leaves: Vec<Var<1>> =
        leaves.map(|(values, gradient)| tape.param([values.len()], values, gradient)).collect();
    let output = operation(&mut tape, &leaves);
    let found = tape.value(output).to_vec();
    let weights = draw(found.len(), 99);
    let loss = weighted_sum(&mut tape, output, weights.clone());
    tape.backward(loss);

    let params: Vec<Vec<f64>> =
        params.iter().map(|values| values.iter().map(|v| f64::from(*v)).collect()).collect();
    close("value", &found, &reference(&params));
    for (i, gradient) in gradients.iter().enumerate() {
        let slope = |place: usize| {
            let loss = |step: f64| {
                let mut moved = params.clone();
                moved[i][place] += step;
                let terms = reference(&moved).into_iter().zip(&weights);
                terms.map(|(value, weight)| value * f64::from(*weight)).sum::<f64>()
            };
            (loss(1e-6) - loss(-1e-6)) / 2e-6
        };
        let expected: Vec<f64> = (0..gradient.len()).map(slope).collect();
        close(&format!("gradient of input {i}"), gradient, &expected);
    }
}

fn close(what: &str, ours: &[f32], expected: &[f64]) {
    assert_eq!(ours.len(), expected.len(), "{what}");
    for (place, (our, expected)) in ours.iter().zip(expected).enumerate() {
        let error = (f64::from(*our) - expected).abs();
        assert!(error <= 1e-4 * expected.abs().max(1.0), "{what}, {place}: {our}, not {expected}");
    }
}

#[test]
fn linear_layers() {
    for [n, n_in, n_out] in [[4, 3, 5], [1, 7, 1], [9, 1, 2]] {
        let sizes = [n * n_in, n_in * n_out, n_out];
        let shaped = |p: &[Var<1>]| (p[0].reshape([n, n_in]), p[1].reshape([n_in, n_out]), p[2]);
        check(
            &sizes,
            |tape, p| {
                let (x, weight, bias) = shaped(p);
                tape.linear(x, weight, bias)
            },
            &|p| reference::linear(p, n_in),
        );
        check(
            &sizes,
            |tape, p| {
                let (x, weight, bias) = shaped(p);
                tape.linear_relu(x, weight, bias)
            },
            &|p| reference::linear(p, n_in).into_iter().map(|value| value.max(0.0)).collect(),
        );
    }
}

#[test]
fn convolutions() {
    for [n, channels, filters, height, width] in
        [[3, 2, 5, 7, 9], [1, 1, 4, 3, 3], [2, 4, 1, 5, 4], [2, 1, 17, 4, 6]]
    {
        let sizes = [n * height * width * channels, filters * channels * 9, filters];
        check(
            &sizes,
            |tape, p| {
                let x = p[0].reshape([n, height, width, channels]);
                tape.conv3x3_relu(x, p[1].reshape([filters, channels, 3, 3]), p[2])
            },
            &|p| reference::conv(p, [height, width, channels]),
        );
    }
}

#[test]
fn a_convolution_of_constants_has_gradients_by_its_weights_alone() {
    let x = draw(2 * 5 * 5 * 3, 1);
    check(
        &[4 * 3 * 9, 4],
        |tape, p| {
            let x = tape.computed([2, 5, 5, 3], |values| values.copy_from_slice(&x));
            tape.conv3x3_relu(x, p[0].reshape([4, 3, 3, 3]), p[1])
        },
        &|p| {
            let x = x.iter().map(|value| f64::from(*value)).collect();
            reference::conv(&[x, p[0].clone(), p[1].clone()], [5, 5, 3])
        },
    );
}

#[test]
fn max_pooling() {
    for [n, height, width, channels] in [[2, 6, 8, 3], [1, 2, 2, 20], [3, 4, 2, 1]] {
        check(
            &[n * height * width * channels],
            |tape, p| tape.max_pool2(p[0].reshape([n, height, width, channels])),
            &|p| reference::max_pool(&p[0], [height, width, channels]),
        );
    }
}

#[test]
fn equal_numbers_share_one_gradient_in_max_pooling() {
    let (ones, mut gradient) = ([1.0; 4], vec![f32::NAN; 4]);
    let mut pool = Pool::default();
    let mut tape = Tape::new(&mut pool);
    let x = tape.param([1, 2, 2, 1], &ones, &mut gradient);
    let output = tape.max_pool2(x);
    let loss = weighted_sum(&mut tape, output, vec![1.0]);
    tape.backward(loss);
    assert_eq!(gradient, [1.0, 0.0, 0.0, 0.0]);
}

#[test]
fn batch_norms() {
    for [n, height, width, channels] in [[4, 5, 4, 3], [1, 6, 4, 3], [3, 16, 4, 18]] {
        check(
            &[n * height * width * channels, channels, channels],
            |tape, p| tape.batch_norm(p[0].reshape([n, height, width, channels]), p[1], p[2]).0,
            &|p| reference::batch_norm(p),
        );
    }
}

#[test]
fn inference_with_a_batchs_own_statistics_equals_training_on_it() {
    let (x, gamma, beta) = (draw(4 * 6 * 6 * 3, 1), draw(3, 2), draw(3, 3));
    let mut pool = Pool::default();
    let mut tape = Tape::new(&mut pool);
    let (x, gamma) = (tape.constant([4, 6, 6, 3], &x), tape.constant([3], &gamma));
    let beta = tape.constant([3], &beta);
    let (trained, found) = tape.batch_norm(x, gamma, beta);
    let inferred = tape.batch_norm_by(x, gamma, beta, &found);
    assert_eq!(tape.value(trained), tape.value(inferred));
}

#[test]
fn a_variance_below_zero_counts_as_zero() {
    let mut pool = Pool::default();
    let mut tape = Tape::new(&mut pool);
    let (x, gamma) = (tape.constant([1, 2, 2, 1], &[1.0; 4]), tape.constant([1], &[1.0]));
    let beta = tape.constant([1], &[0.0]);
    let known = Statistics { mean: vec![0.0], variance: vec![-0.5] };
    let output = tape.batch_norm_by(x, gamma, beta, &known);
    let output = tape.value(output);
    assert!(output.iter().all(|value| (value - 31.622_776).abs() < 1e-3), "{output:?}");
}

#[test]
fn sums_and_joins() {
    check(&[6, 6], |tape, p| tape.add(p[0], p[1]), &|p| {
        p[0].iter().zip(&p[1]).map(|(a, b)| a + b).collect()
    });
    check(&[6], |tape, p| tape.add(p[0], p[0]), &|p| p[0].iter().map(|a| a + a).collect());
    check(&[12], |tape, p| tape.row_sums(p[0].reshape([3, 4])), &|p| {
        p[0].chunks(4).map(|row| row.iter().sum()).collect()
    });
    let concat =
        |tape: &mut Tape<'_>, p: &[Var<1>]| tape.concat(p[0].reshape([3, 2]), p[1].reshape([3, 4]));
    check(&[6, 12], concat, &|p| {
        let rows = p[0].chunks(2).zip(p[1].chunks(4));
        rows.flat_map(|(a, b)| [a, b].concat()).collect()
    });
    let flatten =
        |tape: &mut Tape<'_>, p: &[Var<1>]| tape.flatten_channels_first(p[0].reshape([2, 3, 2, 4]));
    check(&[48], flatten, &|p| {
        let images = p[0].chunks(24);
        images.flat_map(|i| (0..24).map(|place| i[place % 6 * 4 + place / 6])).collect()
    });
}

#[test]
fn dropout_is_a_product_with_its_mask() {
    let mut pool = Pool::default();
    let mut tape = Tape::new(&mut pool);
    let ones = tape.constant([3, 7], &[1.0; 21]);
    let mask = tape.dropout(ones, 0.4, 8);
    let mask = tape.value(mask).to_vec();
    assert!(mask.contains(&0.0) && mask.iter().any(|factor| *factor > 1.5), "{mask:?}");
    check(&[21], |tape, p| tape.dropout(p[0].reshape([3, 7]), 0.4, 8), &|p| {
        p[0].iter().zip(&mask).map(|(value, factor)| value * f64::from(*factor)).collect()
    });
}

#[test]
fn pairs_of_vectors() {
    check(&[2 * 4 * 3], |tape, p| tape.pairs(p[0].reshape([2, 4, 3])), &|p| {
        p[0].chunks(12).map(|record| reference::pairs(record, 3)).collect()
    });
}

#[test]
fn losses() {
    let labels = [2, 0, 4, 4];
    check(&[20], |tape, p| tape.softmax_cross_entropy(p[0].reshape([4, 5]), &labels), &|p| {
        vec![reference::softmax_cross_entropy(&p[0], &labels)]
    });
    let answers = [true, false, false, true, true];
    check(&[5], |tape, p| tape.sigmoid_cross_entropy(p[0], &answers), &|p| {
        vec![reference::sigmoid_cross_entropy(&p[0], &answers)]
    });
}

#[test]
fn losses_of_huge_numbers_stay_finite() {
    let (logits, mut gradient) = ([1e4, -1e4, 0.0, 1e30], [f32::NAN; 4]);
    let mut pool = Pool::default();
    let mut tape = Tape::new(&mut pool);
    let x = tape.param([2, 2], &logits, &mut gradient);
    let softmax = tape.softmax_cross_entropy(x, &[1, 1]);
    let sigmoid = tape.sigmoid_cross_entropy(x, &[false, true, true, true]);
    let loss = tape.add(softmax, sigmoid);
    assert!(tape.value(loss)[0].is_finite());
    tape.backward(loss);
    assert!(gradient.iter().all(|g| g.is_finite()), "{gradient:?}");
}

#[test]
fn shares_of_several_operations_are_added() {
    check(
        &[12],
        |tape, p| {
            let rows = p[0].reshape([2, 6]);
            let (pairs, sums) = (tape.pairs(p[0].reshape([2, 2, 3])), tape.row_sums(rows));
            let both = tape.add(pairs, sums);
            tape.concat(both, rows)
        },
        &|p| {
            let records = p[0].chunks(6);
            let row = |r: &[f64]| {
                let first = reference::pairs(r, 3) + r.iter().sum::<f64>();
                [vec![first], r.to_vec()].concat()
            };
            records.flat_map(row).collect()
        },
    );
}

#[test]
fn what_the_loss_does_not_depend_on_has_a_gradient_of_zeros() {
    let (values, mut used, mut unused) = ([1.0, 2.0], [f32::NAN; 2], [f32::NAN; 2]);
    let mut pool = Pool::default();
    let mut tape = Tape::new(&mut pool);
    let a = tape.param([2], &values, &mut used);
    let b = tape.param([2], &values, &mut unused);
    let _sum = tape.add(a, b);
    let loss = weighted_sum(&mut tape, a, vec![3.0, 4.0]);
    tape.backward(loss);
    assert_eq!((used, unused), ([3.0, 4.0], [0.0, 0.0]));
}

#[test]
#[should_panic(expected = "the inner sizes of a product")]
fn shapes_that_do_not_fit_are_refused() {
    let mut pool = Pool::default();
    let mut tape = Tape::new(&mut pool);
    let x = tape.constant([1, 3], &[0.0; 3]);
    let (weight, bias) = (tape.constant([2, 2], &[0.0; 4]), tape.constant([2], &[0.0; 2]));
    tape.linear(x, weight, bias);
}
