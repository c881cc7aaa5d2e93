// SPDX-License-Identifier: Apache-2.0
//! Writes and reads examples of every kind. Malformed ones are in the corpora of `edl-fuzz`.

use edl_data::example::Example;
use proptest::prelude::*;

proptest! {
    #[test]
    fn an_example_round_trips(
        name in "[a-z]{0,8}",
        ints in prop::collection::vec(any::<i64>(), 0..20),
        floats in prop::collection::vec(any::<f32>(), 0..20),
        bytes in prop::collection::vec(any::<u8>(), 0..200),
    ) {
        let example = Example::new()
            .ints(&format!("{name}i"), ints)
            .floats(&format!("{name}f"), floats)
            .bytes(&format!("{name}b"), bytes);
        let again = Example::parse(example.to_bytes()).unwrap();
        prop_assert_eq!(again.to_bytes(), example.to_bytes());
    }
}
