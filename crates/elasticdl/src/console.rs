// SPDX-License-Identifier: Apache-2.0
//! One place that writes to standard error, for all that is not a result.

use std::fmt::Display;
use std::io::{self, Write};
use std::sync::atomic::{AtomicBool, Ordering};

use edl_core::text::plural;
use serde::Serialize;

/// Whether the user wants only results and errors (`--quiet`).
static IS_QUIET: AtomicBool = AtomicBool::new(false);

pub(crate) fn set_quiet(is_quiet: bool) {
    IS_QUIET.store(is_quiet, Ordering::Relaxed);
}

pub(crate) fn is_quiet() -> bool {
    IS_QUIET.load(Ordering::Relaxed)
}

/// Writes a line to standard error, unless the command is quiet.
pub(crate) fn eprint(line: impl Display) {
    if !is_quiet() {
        error(line);
    }
}

/// Writes a line about an error to standard error. It is not an error if that is closed.
pub(crate) fn error(line: impl Display) {
    let _closed = writeln!(io::stderr().lock(), "{line}");
}

/// Standard output, which remembers whether its reader has closed it.
pub(crate) struct Output<W> {
    to: W,
    pub(crate) is_closed: bool,
}

impl<W: Write> Output<W> {
    pub(crate) fn new(to: W) -> Self {
        Self { to, is_closed: false }
    }

    fn note<T>(&mut self, result: io::Result<T>) -> io::Result<T> {
        self.is_closed |= result.as_ref().is_err_and(is_closed);
        result
    }
}

impl<W: Write> Write for Output<W> {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        let result = self.to.write(buffer);
        self.note(result)
    }

    fn flush(&mut self) -> io::Result<()> {
        let result = self.to.flush();
        self.note(result)
    }
}

fn is_closed(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::BrokenPipe
}

/// It is not an error if the reader has left.
pub(crate) fn unless_closed(result: io::Result<()>) -> io::Result<()> {
    result.or_else(|error| if is_closed(&error) { Ok(()) } else { Err(error) })
}

/// Writes a result that the exit code repeats: a reader that has left must not change the code.
pub(crate) fn put_result(out: &mut dyn Write, text: impl Display) -> io::Result<()> {
    unless_closed(write!(out, "{text}"))
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

/// `312 bytes`, `4.2 MB`.
pub(crate) fn size(n_bytes: u64) -> String {
    const UNITS: [(u64, &str); 4] =
        [(1_000_000_000_000, "TB"), (1_000_000_000, "GB"), (1_000_000, "MB"), (1_000, "kB")];
    match UNITS.iter().find(|(unit, _)| n_bytes >= *unit) {
        #[expect(clippy::cast_precision_loss, reason = "a size for the eye")]
        Some((unit, name)) => format!("{:.1} {name}", n_bytes as f64 / *unit as f64),
        None => counted(n_bytes, "byte"),
    }
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
    fn a_closed_output_is_noted_and_no_error_for_a_result_that_the_exit_code_repeats() {
        struct Closed;
        impl Write for Closed {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                Err(io::ErrorKind::BrokenPipe.into())
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let mut out = Output::new(Closed);
        assert!(!out.is_closed);
        assert!(put_result(&mut out, "job x failed\n").is_ok() && out.is_closed);
        assert!(writeln!(out, "x").is_err());
        let full = io::Error::from(io::ErrorKind::StorageFull);
        assert!(unless_closed(Err(full)).is_err());
    }

    #[test]
    fn numbers_and_spans_read_well() {
        assert_eq!(grouped(7), "7");
        assert_eq!(grouped(1_234), "1,234");
        assert_eq!(grouped(12_345_678), "12,345,678");
        assert_eq!(counted(1, "worker"), "1 worker");
        assert_eq!(counted(1_000, "worker"), "1,000 workers");
        assert_eq!(size(312), "312 bytes");
        assert_eq!(size(4_230_000), "4.2 MB");
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
