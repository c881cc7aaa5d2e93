// SPDX-License-Identifier: Apache-2.0
//! `mnist_cnn`: the convolutional network of Keras' and ElasticDL's MNIST examples.

use std::collections::BTreeMap;

use edl_core::model::{Init, ParamSpec, Rule};
use edl_tensor::model::Model;

use crate::catalog::Error;
use crate::layer::{constant, glorot, linear_params, weight};
use crate::mnist::{Classifier, N_CLASSES, Network, SIDE};
use crate::model_params::ModelParams;
use crate::pass::Pass;
use crate::tape::{Statistics, Var};

pub(crate) const NAME: &str = "mnist_cnn";

const FILTERS_1: usize = 32;
const FILTERS_2: usize = 64;
/// Numbers per record after the pooling.
const FLAT: usize = FILTERS_2 * (SIDE / 2 - 2) * (SIDE / 2 - 2);

/// How far one batch moves the statistics for inference.
const MOMENTUM: f32 = 0.1;

/// Below Keras' default: behind the normalised, wide last layer larger steps make the accuracy
/// swing by several points from batch to batch, and more when gradients come late.
const LEARNING_RATE: f64 = 3e-4;

/// Index of each parameter in the spec.
const CONV_1: usize = 0;
const CONV_2: usize = 2;
const GAMMA: usize = 4;
const BETA: usize = 5;
const MEAN: usize = 6;
const VARIANCE: usize = 7;
const OUTPUT: usize = 8;

struct Cnn {
    dropout: f64,
}

pub(crate) fn open(params: &BTreeMap<String, String>) -> Result<impl Model + use<>, Error> {
    let params = ModelParams::new(NAME, params, &["dropout"])?;
    let needs = "a fraction from 0 to 0.9";
    let dropout = params.get("dropout", 0.25, needs, |share| (0.0..=0.9).contains(share))?;
    let params: Vec<ParamSpec> = [
        conv_params("conv_1", 1, FILTERS_1).as_slice(),
        &conv_params("conv_2", FILTERS_1, FILTERS_2),
        &[
            constant("batch_norm/gamma", FILTERS_2, 1.0),
            constant("batch_norm/beta", FILTERS_2, 0.0),
            moving("batch_norm/mean", 0.0),
            moving("batch_norm/variance", 1.0),
        ],
        &linear_params("output", FLAT, N_CLASSES),
    ]
    .concat();
    Ok(Classifier::new(NAME, params, LEARNING_RATE, Cnn { dropout }))
}

fn conv_params(name: &str, channels: usize, filters: usize) -> [ParamSpec; 2] {
    let init = glorot(9 * channels, 9 * filters);
    [
        weight(&format!("{name}/weight"), vec![filters, channels, 3, 3], init),
        constant(&format!("{name}/bias"), filters, 0.0),
    ]
}

fn moving(name: &str, first: f32) -> ParamSpec {
    ParamSpec::new(name, vec![FILTERS_2], Init::Constant(first), Rule::MovingAverage)
}

impl Network for Cnn {
    fn forward(&self, pass: &mut Pass<'_>, images: Var<2>) -> Var<2> {
        let [n, _] = images.shape();
        let x = images.reshape([n, SIDE, SIDE, 1]);
        let x = pass.tape.conv3x3_relu(x, pass.param(CONV_1), pass.param(CONV_1 + 1));
        let x = pass.tape.conv3x3_relu(x, pass.param(CONV_2), pass.param(CONV_2 + 1));
        let x = normalise(pass, x);
        let x = pass.tape.max_pool2(x);
        let x = pass.tape.flatten_channels_first(x);
        let x = match pass.seed() {
            Some(seed) => pass.tape.dropout(x, self.dropout, seed),
            None => x,
        };
        pass.linear(OUTPUT, x)
    }
}

/// Normalises by the batch's statistics while training, which move those for inference.
fn normalise(pass: &mut Pass<'_>, x: Var<4>) -> Var<4> {
    let (gamma, beta) = (pass.param(GAMMA), pass.param(BETA));
    if pass.seed().is_some() {
        let (x, found) = pass.tape.batch_norm(x, gamma, beta);
        pass.move_average(MEAN, &found.mean, MOMENTUM);
        pass.move_average(VARIANCE, &found.variance, MOMENTUM);
        x
    } else {
        let [mean, variance] =
            [MEAN, VARIANCE].map(|index| pass.tape.value(pass.param::<1>(index)).to_vec());
        pass.tape.batch_norm_by(x, gamma, beta, &Statistics { mean, variance })
    }
}

#[cfg(test)]
mod tests {
    use edl_tensor::batch::Column;
    use edl_tensor::model::Error;

    use super::*;
    use crate::tests::check::{self, Case, bits};

    fn case(n: usize) -> Case {
        Case::new(check::model(NAME, &[]), check::images(n))
    }

    #[test]
    fn gradients_are_those_of_the_loss() {
        case(6).check_gradient();
    }

    #[test]
    fn equal_inputs_and_seed_give_equal_bits() {
        case(7).check_repeat();
    }

    #[test]
    fn dropout_follows_the_seed_and_is_off_in_evaluation() {
        let mut case = case(5);
        let [first, second] = [1, 2].map(|seed| case.train(seed).unwrap().0.loss);
        assert_ne!(first.to_bits(), second.to_bits());
        let evaluated = case.evaluate().0.loss.to_bits();
        assert_eq!(evaluated, case.evaluate().0.loss.to_bits());
        let mut without = Case::new(check::model(NAME, &[("dropout", "0")]), check::images(5));
        assert_eq!(evaluated, without.evaluate().0.loss.to_bits());
    }

    #[test]
    fn the_statistics_for_inference_move_towards_the_batch() {
        let mut case = case(4);
        let spec = case.model.spec().clone();
        let start: usize = spec.params[..MEAN].iter().map(ParamSpec::len).sum();
        let statistics = start..start + 2 * FILTERS_2;
        case.dense[statistics.clone()].iter_mut().enumerate().for_each(|(i, v)| *v = i as f32);
        let before = case.dense[statistics.clone()].to_vec();
        let found = case.train(1).unwrap().1.dense[statistics.clone()].to_vec();
        // The difference shrinks by one tenth each time, so ten of it lead to the batch's own.
        let batch: Vec<f32> = before.iter().zip(&found).map(|(v, d)| v + d / MOMENTUM).collect();
        case.dense[statistics.clone()].copy_from_slice(&batch);
        let left = case.train(1).unwrap().1.dense[statistics].to_vec();
        assert!(left.iter().all(|difference| difference.abs() < 1e-5), "{left:?}");
        assert!(batch[FILTERS_2..].iter().all(|variance| *variance > -1e-5));
    }

    #[test]
    fn a_tiny_batch_is_learnt_by_heart() {
        let mut case = case(10);
        let (first, last) = case.fit(40, 0.02);
        assert!(last < 0.3 * first, "{first} to {last}");
        let (_, measures) = case.evaluate();
        assert!(measures["accuracy"] > 0.85, "{measures:?}");
        for row in case.predict().chunks_exact(N_CLASSES) {
            assert!((row.iter().sum::<f32>() - 1.0).abs() < 1e-5);
        }
    }

    #[test]
    fn one_record_is_batch_enough() {
        let mut case = case(1);
        let (outcome, gradient) = case.train(3).unwrap();
        assert!(outcome.loss.is_finite());
        assert!(gradient.dense.iter().all(|g| g.is_finite()));
    }

    #[test]
    fn records_are_judged_alone_in_evaluation() {
        let mut all = case(6);
        let mut three = case(3);
        assert_eq!(bits(&all.predict()[..3 * N_CLASSES]), bits(&three.predict()));
    }

    #[test]
    fn a_batch_of_another_shape_is_refused() {
        let mut case = case(2);
        let narrow = Column::U8 { shape: vec![2, 28, 27], values: vec![0; 2 * 28 * 27] };
        case.batch.columns.insert("image".into(), narrow);
        assert!(matches!(case.train(0), Err(Error::Column { .. })));
        case.batch = check::images(2);
        case.batch.columns.remove("label");
        assert!(matches!(case.train(0), Err(Error::Column { .. })));
        assert_eq!(case.predict().len(), 2 * N_CLASSES, "prediction needs no label");
        let label = Column::I64 { shape: vec![2], values: vec![3, 10] };
        case.batch.columns.insert("label".into(), label);
        assert!(matches!(case.train(0), Err(Error::Record { record: 1, .. })));
        case.dense.pop();
        assert!(case.train(0).is_err());
    }
}
