// SPDX-License-Identifier: Apache-2.0
//! One place that writes to standard error, for all that is not a result.

use std::fmt::Display;
use std::io::{self, Write};

use edl_core::text::plural;
use serde::Serialize;

/// Writes a line to standard error. It is not an error if that is closed.
pub(crate) fn eprint(line: impl Display) {
    let _closed = writeln!(io::stderr().lock(), "{line}");
}

/// Writes a result as JSON.
pub(crate) fn write_json(value: &impl Serialize, out: &mut dyn Write) -> anyhow::Result<()> {
    serde_json::to_writer_pretty(&mut *out, value)?;
    writeln!(out)?;
    Ok(())
}

/// A number with a comma between thousands.
pub(crate) fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() * 4 / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// `1 worker`, `2 workers`.
pub(crate) fn counted(number: u64, noun: &str) -> String {
    format!("{} {}", grouped(number), plural(number, noun))
}

/// A span of time in its two largest units that are not zero.
pub(crate) fn span(seconds: f64) -> String {
    if !seconds.is_finite() || seconds < 0.0 {
        return "?".into();
    }
    if seconds < 10.0 {
        return format!("{seconds:.1} s");
    }
    #[expect(clippy::cast_possible_truncation, reason = "a float to integer cast saturates")]
    #[expect(clippy::cast_sign_loss, reason = "checked above")]
    let whole = seconds.round() as u64;
    match whole {
        0..60 => format!("{whole} s"),
        60..3600 => format!("{} min {} s", whole / 60, whole % 60),
        3600..86_400 => format!("{} h {} min", whole / 3600, whole % 3600 / 60),
        _ => format!("{} d {} h", whole / 86_400, whole % 86_400 / 3600),
    }
}

/// `lane 3` or `lanes 0-1`; nothing for none.
pub(crate) fn lane_range(lanes: &[u32]) -> String {
    match lanes {
        [] => String::new(),
        [lane] => format!("lane {lane}"),
        [first, .., last] => format!("lanes {first}-{last}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_spans_read_well() {
        assert_eq!(grouped(7), "7");
        assert_eq!(grouped(1_234), "1,234");
        assert_eq!(grouped(12_345_678), "12,345,678");
        assert_eq!(counted(1, "worker"), "1 worker");
        assert_eq!(counted(1_000, "worker"), "1,000 workers");
        assert_eq!(span(0.25), "0.2 s");
        assert_eq!(span(59.4), "59 s");
        assert_eq!(span(61.0), "1 min 1 s");
        assert_eq!(span(7322.0), "2 h 2 min");
        assert_eq!(span(-1.0), "?");
        assert_eq!(lane_range(&[]), "");
        assert_eq!(lane_range(&[3]), "lane 3");
        assert_eq!(lane_range(&[0, 1, 2]), "lanes 0-2");
    }
}
