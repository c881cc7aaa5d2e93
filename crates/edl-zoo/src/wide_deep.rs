// SPDX-License-Identifier: Apache-2.0
//! `wide_deep`: a linear model over features and their crosses, combined with a deep network.
//!
//! Cheng et al., "Wide & deep learning for recommender systems", 2016, with the crosses of
//! TensorFlow's census tutorial.

use std::collections::BTreeMap;

use edl_core::rng;
use edl_tensor::model::Model;

use crate::catalog::Error;
use crate::census::{AGE, Census, Deep, EDUCATION, N_IDS, NATIVE_COUNTRY, Network, OCCUPATION};
use crate::model_params::ModelParams;
use crate::pass::Pass;
use crate::tape::Var;

pub(crate) const NAME: &str = "wide_deep";

/// Features whose combinations have separate weights.
const CROSSES: [&[usize]; 3] =
    [&[EDUCATION, OCCUPATION], &[NATIVE_COUNTRY, OCCUPATION], &[AGE, EDUCATION, OCCUPATION]];

/// Ids per record of the wide part.
const N_WIDE: usize = N_IDS + CROSSES.len();

/// Index of the table of the wide part.
const WIDE: usize = 1;

struct WideDeep {
    deep: Deep,
}

pub(crate) fn open(params: &BTreeMap<String, String>) -> Result<impl Model + use<>, Error> {
    let params = ModelParams::new(NAME, params, &["dim", "hidden"])?;
    let deep = Deep::new(&params)?;
    let needs = "an integer from 2 to 65536";
    let hidden = params.get("hidden", 64, needs, |n| (2..=65_536).contains(n))?;
    let (layers, tables) = (deep.params([hidden, hidden / 2]), deep.tables("wide"));
    Ok(Census::new(NAME, layers, tables, WideDeep { deep }))
}

impl Network for WideDeep {
    fn lookups(&self, ids: Vec<u64>) -> Vec<Vec<u64>> {
        let mut wide = Vec::with_capacity(ids.len() / N_IDS * N_WIDE);
        for record in ids.chunks_exact(N_IDS) {
            wide.extend_from_slice(record);
            wide.extend(CROSSES.map(|cross| {
                let parts: Vec<u64> = cross.iter().map(|place| record[*place]).collect();
                rng::key(&parts)
            }));
        }
        vec![ids, wide]
    }

    fn n_ids(&self) -> Vec<usize> {
        vec![N_IDS, N_WIDE]
    }

    fn forward(&self, pass: &mut Pass<'_>, numbers: Var<2>) -> Var<2> {
        let [n, _] = numbers.shape();
        let wide = pass.tape.row_sums(pass.rows(WIDE, [n, N_WIDE]));
        let deep = self.deep.forward(pass, numbers);
        pass.tape.add(wide, deep)
    }
}

#[cfg(test)]
mod tests {
    use edl_tensor::batch::Column;
    use edl_tensor::model::Error;

    use super::*;
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
    fn a_cross_has_an_id_of_its_own_per_combination() {
        let ids: Vec<u64> = (0..2 * N_IDS as u64).collect();
        let lookups = WideDeep { deep: Deep { dim: 8 } }.lookups(ids.clone());
        assert_eq!((&lookups[0], lookups[1].len()), (&ids, 2 * N_WIDE));
        let crosses = [&lookups[1][N_IDS..N_WIDE], &lookups[1][N_WIDE + N_IDS..]].concat();
        let unique: std::collections::BTreeSet<&u64> = crosses.iter().collect();
        assert_eq!(unique.len(), 2 * CROSSES.len());
    }
}
