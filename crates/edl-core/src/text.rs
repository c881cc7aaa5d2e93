// SPDX-License-Identifier: Apache-2.0
//! Numbers and nouns in sentences for people.

/// `worker` for one, `workers` for any other number.
#[must_use]
pub fn plural(n: u64, noun: &str) -> String {
    format!("{noun}{}", if n == 1 { "" } else { "s" })
}

/// `1 worker`, `2 workers`.
#[must_use]
pub fn counted(n: impl Into<u64>, noun: &str) -> String {
    let n = n.into();
    format!("{n} {}", plural(n, noun))
}

#[test]
fn one_is_singular() {
    let found = [0_u32, 1, 2].map(|n| counted(n, "worker"));
    assert_eq!(found, ["0 workers", "1 worker", "2 workers"]);
}
