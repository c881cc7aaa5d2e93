// SPDX-License-Identifier: Apache-2.0
//! YAML, read and written the same way everywhere.

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use serde_saphyr::UserMessageFormatter;

/// The most values that aliases may repeat. Aliases of aliases multiply: a few hundred bytes would
/// become millions of values.
const MAX_REPEATED: usize = 1000;

/// What is wrong, and in which line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Error(String);

/// Reads one document. `yes` and `on` are text: only `true` and `false` are booleans.
pub fn read<T: DeserializeOwned>(text: &str) -> Result<T, Error> {
    serde_json::from_value(read_value(text)?).map_err(|error| {
        // One parser reports what it found and expected, the other one where.
        let place = parse::<T>(text).err().and_then(|error| error.location());
        let place = place.map(|at| format!(" at line {}, column {}", at.line(), at.column()));
        Error(format!("{}{}", plain(&error.to_string()), place.unwrap_or_default()))
    })
}

/// Parses one document of any form.
pub fn read_value(text: &str) -> Result<Value, Error> {
    parse(text).map_err(|error| Error(error.render_with_formatter(&UserMessageFormatter)))
}

fn parse<T: DeserializeOwned>(text: &str) -> Result<T, serde_saphyr::Error> {
    let options = serde_saphyr::options! {
        strict_booleans: true,
        with_snippet: false,
        alias_limits: serde_saphyr::alias_limits! { max_total_replayed_events: MAX_REPEATED },
    };
    serde_saphyr::from_str_with_options(text, options)
}

/// Writes one document. Ambiguous text is quoted; lines are never folded.
pub fn write<T: Serialize>(value: &T) -> Result<String, Error> {
    let options = serde_saphyr::ser_options! { folded_wrap_chars: usize::MAX };
    serde_saphyr::to_string_with_options(value, options).map_err(|error| Error(error.to_string()))
}

/// An error about a value's type, without names of types that only programs know.
fn plain(error: &str) -> String {
    let mismatch = ["invalid type: ", "invalid value: "].iter().find_map(|p| error.strip_prefix(p));
    let Some((found, expected)) = mismatch.and_then(|text| text.split_once(", expected ")) else {
        return error.to_owned();
    };
    let expected = match expected {
        "u8" | "u16" | "u32" | "u64" | "usize" => "an integer of at least 0",
        "i32" | "i64" => "an integer",
        "f32" | "f64" => "a number",
        "a boolean" => "true or false",
        "a string" => "text",
        "a sequence" => "a list",
        other if other.starts_with("struct ") => "a map",
        other => other,
    };
    let found = match found {
        "sequence" => "a list",
        "map" => "a map",
        "unit value" | "null" => "nothing",
        other => ["string ", "integer ", "floating point ", "boolean "]
            .iter()
            .find_map(|kind| other.strip_prefix(kind))
            .unwrap_or(other)
            .trim_matches('`'),
    };
    format!("expected {expected}, found {found}")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn leaf() -> impl Strategy<Value = Value> {
        let words = "yes|No|on|OFF|y|null|~|true|False|1e3|0x10|0o7|0b1|1_000|012|1:30|\\.inf|\
                     2001-01-01|-|---|\\?|: |# a|a: b|a #b|'|\"|<<|=|&a|\\*a|!t|%a|@a|`a|\
                     |  a|a  |a\nb|a\n|\n|\na|a\n\n|  a\nb|\ta|a\t|a\r\nb|\\{\\}|\\[\\]";
        prop_oneof![
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<u64>().prop_map(Value::from),
            any::<f64>().prop_map(Value::from),
            any::<String>().prop_map(Value::from),
            words.prop_map(Value::from),
            "[ -~\n]{0,100}".prop_map(Value::from),
            Just(Value::Null),
        ]
    }

    fn value() -> impl Strategy<Value = Value> {
        leaf().prop_recursive(4, 32, 4, |inner| {
            let name = prop_oneof![any::<String>(), "[a-z]{1,5}", "yes|null|1|1.5|true|~|-|: "];
            prop_oneof![
                proptest::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
                proptest::collection::btree_map(name, inner, 0..4)
                    .prop_map(|map| Value::Object(map.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_back(value in value()) {
            let text = write(&value).unwrap();
            let back = read_value(&text).map_err(|error| TestCaseError::fail(format!("{error}\n{text}")))?;
            prop_assert_eq!(back, value, "{}", text);
        }
    }

    #[test]
    fn text_that_looks_like_something_else_is_quoted() {
        let words = ["yes", "1e3", "0x10", "null", "2001-01-01", "1:30", "~", "010"];
        let text = write(&words).unwrap();
        for (word, line) in words.iter().zip(text.lines()) {
            assert!(["'", "\""].iter().any(|quote| line == format!("- {quote}{word}{quote}")));
        }
    }

    #[test]
    fn lines_stay_lines() {
        let long = "word ".repeat(40) + "end";
        let text = write(&json!({ "long": long, "script": "a\n  b\n" })).unwrap();
        assert_eq!(text, format!("long: {long}\nscript: |\n  a\n    b\n"));
    }

    #[test]
    fn only_true_and_false_are_booleans() {
        let value = read_value("[yes, on, n, true, False]").unwrap();
        assert_eq!(value, json!(["yes", "on", "n", true, false]));
    }

    #[test]
    fn an_error_names_the_line() {
        for (text, expected) in [
            ("a: 1\nb: [", "line"),
            ("a: 1\na: 2\n", "line 2"),
            ("a: 1\n  b: 2\n", "line 2"),
            ("a: *b\n", "line 1"),
            ("a: 1\n---\nb: 2\n", "line 3"),
        ] {
            let error = read_value(text).unwrap_err().to_string();
            assert!(error.contains(expected) && !error.contains('\n'), "{text}: {error}");
        }
    }

    #[test]
    fn a_value_of_the_wrong_kind_is_named_with_its_line() {
        type Sizes = BTreeMap<String, Vec<u32>>;
        let error = read::<Sizes>("a: [1]\nb: [2, x]\n").unwrap_err().to_string();
        let expected = "expected an integer of at least 0, found \"x\" at line 2, column 8";
        assert_eq!(error, expected);
        // A number in quotes is text.
        let error = read::<Sizes>("a: ['1']\n").unwrap_err().to_string();
        assert_eq!(error, "expected an integer of at least 0, found \"1\"");
    }

    #[test]
    fn hostile_text_is_refused_with_bounded_work() {
        let deep = "[".repeat(100_000);
        let wide: String = (1..4)
            .map(|n| format!("a{n}: &a{n} [{}]\n", vec![format!("*a{}", n - 1); 10].join(",")))
            .collect();
        for text in [deep, format!("a0: &a0 [x]\n{wide}"), "a: {\n".repeat(50_000)] {
            assert!(read_value(&text).is_err());
        }
        let few = format!("a: &a {{x: 1}}\nb: [{}]\n", vec!["*a"; 20].join(","));
        assert_eq!(read_value(&few).unwrap()["b"][19], json!({"x": 1}));
    }
}
