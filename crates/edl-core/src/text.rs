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

/// The nearest of `known` to a word that is not among them.
pub fn nearest<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    /// Below this similarity a suggestion puzzles more than it helps.
    const CLOSE: f64 = 0.75;
    known
        .into_iter()
        .map(|candidate| (strsim::jaro_winkler(word, candidate), candidate))
        .filter(|(similarity, _)| *similarity >= CLOSE)
        .max_by(|(a, _), (b, _)| a.total_cmp(b))
        .map(|(_, candidate)| candidate)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_is_singular() {
        let found = [0_u32, 1, 2].map(|n| counted(n, "worker"));
        assert_eq!(found, ["0 workers", "1 worker", "2 workers"]);
    }

    #[test]
    fn a_suggestion_is_made_only_for_a_near_word() {
        assert_eq!(nearest("mnist_cn", ["deepfm", "mnist_cnn"]), Some("mnist_cnn"));
        assert_eq!(nearest("zebra", ["deepfm", "mnist_cnn"]), None);
    }
}
