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

/// `7.5 s`, `12 s`.
#[must_use]
pub fn secs(time: std::time::Duration) -> String {
    let secs = time.as_secs_f64();
    if secs < 10.0 { format!("{secs:.1} s") } else { format!("{secs:.0} s") }
}

/// A loss or metric: `0.7712`, `1.0000e30`, `nan`, `inf`.
#[must_use]
pub fn decimal(value: f64) -> String {
    /// A number with more digits before the point is written with an exponent.
    const LARGE: f64 = 1e9;
    let text = if value.is_finite() && value.abs() >= LARGE {
        format!("{value:.4e}")
    } else {
        format!("{value:.4}")
    };
    text.to_lowercase()
}

/// An error of Python code without the calls that led to it; others as they are.
#[must_use]
pub fn without_traceback(error: &str) -> String {
    let Some(at) = error.rfind("Traceback (most recent call last):") else { return error.into() };
    // The lines about calls are indented.
    let lines = error[at..].lines().skip(1).skip_while(|line| line.starts_with(' '));
    lines.collect::<Vec<_>>().join("\n")
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

/// The error about a value that is not one of `known`.
pub(crate) fn unknown(text: &str, known: &[&str]) -> String {
    match (nearest(text, known.iter().copied()), known) {
        (Some(near), _) => format!("unknown value `{text}`; did you mean `{near}`?"),
        (None, [first @ .., last]) => {
            format!("unknown value `{text}`; use {} or {last}", first.join(", "))
        }
        (None, []) => format!("unknown value `{text}`"),
    }
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
    fn numbers_that_are_large_or_not_finite_are_short() {
        let found = [0.77123, -1.5, 1e30, f64::NAN, f64::NEG_INFINITY].map(decimal);
        assert_eq!(found, ["0.7712", "-1.5000", "1.0000e30", "nan", "-inf"]);
    }

    #[test]
    fn an_error_without_its_traceback_is_its_message() {
        let first =
            "Traceback (most recent call last):\n  File \"x.py\", line 1\n    {}[1]\nKeyError: 1";
        let chained = format!("{first}\n\nDuring handling, another exception occurred:\n\n{first}");
        assert_eq!(without_traceback(&format!("{chained}\nand more")), "KeyError: 1\nand more");
        assert_eq!(without_traceback("no such file"), "no such file");
    }

    #[test]
    fn a_suggestion_is_made_only_for_a_near_word() {
        assert_eq!(nearest("mnist_cn", ["deepfm", "mnist_cnn"]), Some("mnist_cnn"));
        assert_eq!(nearest("zebra", ["deepfm", "mnist_cnn"]), None);
    }
}
