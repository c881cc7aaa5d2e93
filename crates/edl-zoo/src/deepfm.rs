// SPDX-License-Identifier: Apache-2.0
//! `deepfm`: a factorisation machine and a deep network over the same embeddings.
//!
//! Guo et al., "DeepFM: a factorization-machine based neural network for CTR prediction", 2017.

use std::collections::BTreeMap;

use edl_tensor::model::Model;

use crate::catalog::Error;
use crate::census::{Census, Deep, N_IDS, Network};
use crate::model_params::ModelParams;
use crate::pass::Pass;
use crate::tape::Var;

pub(crate) const NAME: &str = "deepfm";

/// Index of the table of single weights.
const LINEAR: usize = 1;

struct DeepFm {
    deep: Deep,
}

pub(crate) fn open(params: &BTreeMap<String, String>) -> Result<impl Model + use<>, Error> {
    let params = ModelParams::new(NAME, params, &["dim", "hidden"])?;
    let deep = Deep::new(&params)?;
    let needs = "an integer from 1 to 65536";
    let hidden = params.get("hidden", 64, needs, |n| (1..=65_536).contains(n))?;
    let (layers, tables) = (deep.params([hidden, hidden]), deep.tables("linear"));
    Ok(Census::new(NAME, layers, tables, DeepFm { deep }))
}

impl Network for DeepFm {
    fn lookups(&self, ids: Vec<u64>) -> Vec<Vec<u64>> {
        vec![ids.clone(), ids]
    }

    fn n_ids(&self) -> Vec<usize> {
        vec![N_IDS, N_IDS]
    }

    fn forward(&self, pass: &mut Pass<'_>, numbers: Var<2>) -> Var<2> {
        let [n, _] = numbers.shape();
        let first_order = pass.tape.row_sums(pass.rows(LINEAR, [n, N_IDS]));
        let embeddings = pass.rows(Deep::EMBEDDING, [n, N_IDS, self.deep.dim]);
        let second_order = pass.tape.pairs(embeddings);
        let deep = self.deep.forward(pass, numbers);
        let shallow = pass.tape.add(first_order, second_order);
        pass.tape.add(shallow, deep)
    }
}

#[cfg(test)]
mod tests {
    use edl_tensor::batch::Column;
    use edl_tensor::model::Error;

    use super::*;
    use crate::tape::{Pool, Tape};
    use crate::tests::check::{self, Case};

    fn case(n: usize) -> Case {
        Case::new(check::model(NAME, &[]), check::people(n))
    }

    #[test]
    fn gradients_are_those_of_the_loss() {
        case(9).check_gradient();
    }

    #[test]
    fn equal_inputs_and_seed_give_equal_bits() {
        case(64).check_repeat();
    }

    #[test]
    fn a_tiny_batch_is_learnt_by_heart() {
        let mut case = case(32);
        let (first, last) = case.fit(100, 0.1);
        assert!(last < 0.5 * first, "{first} to {last}");
        let (_, measures) = case.evaluate();
        assert!(measures["auc"] > 0.95 && measures["accuracy"] > 0.85, "{measures:?}");
        assert!(case.predict().iter().all(|p| (0.0..=1.0).contains(p)));
    }

    #[test]
    fn a_missing_or_mistyped_column_is_refused() {
        let mut case = case(3);
        case.batch.columns.insert("age".into(), Column::Bytes(vec![vec![]; 3]));
        assert!(matches!(case.train(0), Err(Error::Column { .. })));
        assert!(matches!(case.model.lookups(&case.batch), Err(Error::Column { .. })));
        let ages = Column::F32 { shape: vec![3], values: vec![20.0, f32::NAN, 30.0] };
        case.batch.columns.insert("age".into(), ages);
        assert!(matches!(case.train(0), Err(Error::Record { record: 1, .. })));
        case.batch.columns.remove("occupation");
        assert!(matches!(case.model.lookups(&case.batch), Err(Error::Column { .. })));
    }

    #[test]
    fn pairs_are_the_inner_products_of_all_pairs() {
        let mut pool = Pool::default();
        let mut tape = Tape::new(&mut pool);
        let embeddings = tape.constant([1, 3, 2], &[1.0, 2.0, 3.0, -1.0, 0.5, 4.0]);
        let pairs = tape.pairs(embeddings);
        // (1·3 − 2·1) + (1·0.5 + 2·4) + (3·0.5 − 1·4)
        assert_eq!(tape.value(pairs), [1.0 + 8.5 - 2.5]);
    }
}
