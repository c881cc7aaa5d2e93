// SPDX-License-Identifier: Apache-2.0
//! `mnist_mlp`: one hidden layer, for jobs that must be quick.

use std::collections::BTreeMap;

use edl_tensor::model::Model;

use crate::catalog::Error;
use crate::layer::linear_params;
use crate::mnist::{Classifier, N_CLASSES, Network, SIDE};
use crate::model_params::ModelParams;
use crate::pass::Pass;
use crate::tape::Var;

pub(crate) const NAME: &str = "mnist_mlp";

/// Index of each layer's weight in the spec.
const HIDDEN: usize = 0;
const OUTPUT: usize = 2;

struct Mlp;

pub(crate) fn open(params: &BTreeMap<String, String>) -> Result<impl Model + use<>, Error> {
    let params = ModelParams::new(NAME, params, &["hidden"])?;
    let needs = "an integer from 1 to 65536";
    let hidden = params.get("hidden", 128, needs, |n| (1..=65_536).contains(n))?;
    let layers =
        [linear_params("hidden", SIDE * SIDE, hidden), linear_params("output", hidden, N_CLASSES)];
    Ok(Classifier::new(NAME, layers.concat(), 1e-3, Mlp))
}

impl Network for Mlp {
    fn forward(&self, pass: &mut Pass<'_>, images: Var<2>) -> Var<2> {
        let hidden = pass.linear_relu(HIDDEN, images);
        pass.linear(OUTPUT, hidden)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::check::{self, Case};

    fn case(n: usize) -> Case {
        Case::new(check::model(NAME, &[("hidden", "32")]), check::images(n))
    }

    #[test]
    fn the_hidden_layer_is_as_wide_as_asked() {
        assert_eq!(check::model(NAME, &[]).spec().dense_len(), 784 * 128 + 128 + 128 * 10 + 10);
        assert_eq!(case(1).dense.len(), 784 * 32 + 32 + 32 * 10 + 10);
    }

    #[test]
    fn gradients_are_those_of_the_loss() {
        case(6).check_gradient();
    }

    #[test]
    fn equal_inputs_and_seed_give_equal_bits() {
        case(64).check_repeat();
    }

    #[test]
    fn a_tiny_batch_is_learnt_by_heart() {
        let mut case = case(20);
        let (first, last) = case.fit(80, 0.1);
        assert!(last < 0.3 * first, "{first} to {last}");
        assert!(case.evaluate().1["accuracy"] > 0.9);
    }
}
