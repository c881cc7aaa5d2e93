// SPDX-License-Identifier: Apache-2.0
//! The data of the demo: made-up people, with the columns that `deepfm` reads.

use std::fmt::Write as _;

use edl_core::rng::Rng;

const COLUMNS: &str = "age,fnlwgt,education_num,capital_gain,capital_loss,hours_per_week,workclass,\
    education,marital_status,occupation,relationship,race,gender,native_country,label\n";
/// The categories, each with the number of its values.
const CATEGORIES: [(char, u64); 8] =
    [('w', 8), ('e', 16), ('m', 7), ('o', 14), ('r', 6), ('c', 5), ('g', 2), ('n', 41)];

/// A CSV file with `n` records; always the same ones.
pub(super) fn csv(n: usize) -> String {
    let mut rng = Rng::new(7);
    let mut text = String::from(COLUMNS);
    for _ in 0..n {
        let [age, weight, years] = [17 + rng.below(60), 20_000 + rng.below(300_000), rng.below(16)];
        let [gain, loss, hours] = [rng.below(2) * 4_000, rng.below(3) * 900, 10 + rng.below(60)];
        let words = CATEGORIES.map(|(kind, n)| format!("{kind}{}", rng.below(n))).join(",");
        let label = u64::from(age + hours + years > 85);
        let _infallible =
            writeln!(text, "{age},{weight},{years},{gain},{loss},{hours},{words},{label}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_records_are_always_the_same_and_have_all_columns() {
        let text = csv(50);
        assert_eq!(text, csv(50));
        let n_columns = COLUMNS.split(',').count();
        assert_eq!(text.lines().count(), 51);
        assert!(text.lines().all(|line| line.split(',').count() == n_columns), "{text}");
        let labels: Vec<&str> =
            text.lines().skip(1).filter_map(|line| line.rsplit(',').next()).collect();
        assert!(labels.contains(&"0") && labels.contains(&"1"), "{labels:?}");
    }
}
