// SPDX-License-Identifier: Apache-2.0
//! Log lines in the form that users grep for:
//! `[2026-11-15 02:46:40,750] [INFO] [evaluation.rs:214:evaluation] message`. Times are in UTC.

use std::fmt;
use std::fs::File;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::sync::Mutex;
use std::time::SystemTime;

use anyhow::Context as _;
use edl_core::spec::LogLevel;
use jiff::Timestamp;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields, MakeWriter};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::registry::LookupSpan;

use crate::console;

/// The targets of our own crates begin with one of these; other crates log only warnings.
const CRATES: [&str; 2] = ["edl_", "elasticdl"];

/// Sends log lines of `level` and above to standard error, for the life of the process; of a quiet
/// command only errors.
pub(crate) fn start(level: LogLevel) {
    let level = if console::is_quiet() { LogLevel::Error } else { level };
    start_to(level, std::io::stderr);
}

/// Sends log lines of `level` and above to the end of a file, for the life of the process.
pub(crate) fn start_in(level: LogLevel, path: &Path) -> anyhow::Result<()> {
    let file = File::options().create(true).append(true).mode(0o600).open(path);
    let file = file.with_context(|| format!("cannot write `{}`", path.display()))?;
    start_to(level, Mutex::new(file));
    Ok(())
}

fn start_to(level: LogLevel, writer: impl for<'a> MakeWriter<'a> + Send + Sync + 'static) {
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(writer)
        .with_ansi(false)
        // Errors about a line that cannot be written would go to the same full disk, and panic.
        .log_internal_errors(false)
        .event_format(Lines);
    let subscriber = tracing_subscriber::registry().with(lines).with(targets(level));
    // A second start, as in tests, keeps the first one.
    let _already = tracing::subscriber::set_global_default(subscriber);
}

/// The lines that are written.
fn targets(level: LogLevel) -> Targets {
    let level = level_filter(level);
    let ours = CRATES.map(|name| (name, level));
    Targets::new().with_default(level.min(LevelFilter::WARN)).with_targets(ours)
}

/// The level for tracing of a level with Python's names.
fn level_filter(level: LogLevel) -> LevelFilter {
    match level {
        LogLevel::Trace => LevelFilter::TRACE,
        LogLevel::Debug => LevelFilter::DEBUG,
        LogLevel::Info => LevelFilter::INFO,
        LogLevel::Warning => LevelFilter::WARN,
        LogLevel::Error | LogLevel::Critical => LevelFilter::ERROR,
    }
}

struct Lines;

impl<S, N> FormatEvent<S, N> for Lines
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let metadata = event.metadata();
        let file = metadata.file().unwrap_or("?").rsplit(['/', '\\']).next().unwrap_or("?");
        let place = metadata.target().rsplit("::").next().unwrap_or("?");
        let line = metadata.line().unwrap_or(0);
        write!(writer, "{}", prefix(*metadata.level(), file, line, place))?;
        context.field_format().format_fields(writer.by_ref(), event)?;
        writeln!(writer)
    }
}

/// Everything of a log line before its message.
pub(crate) fn prefix(level: Level, file: &str, line: u32, place: &str) -> String {
    let level = if level == Level::WARN { "WARNING".to_owned() } else { level.to_string() };
    format!("[{}] [{level}] [{file}:{line}:{place}] ", stamp(SystemTime::now()))
}

/// `2026-11-15 02:46:40,750`.
pub(crate) fn stamp(at: SystemTime) -> String {
    let at = Timestamp::try_from(at).unwrap_or_default();
    at.strftime("%Y-%m-%d %H:%M:%S,%3f").to_string()
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use edl_core::spec::FieldType as _;

    use super::*;

    #[test]
    fn our_crates_write_lines_of_the_level_and_others_warnings_at_most() {
        for (word, ours, others) in [
            ("TRACE", Level::TRACE, Level::WARN),
            ("DEBUG", Level::DEBUG, Level::WARN),
            ("info", Level::INFO, Level::WARN),
            ("WARNING", Level::WARN, Level::WARN),
            ("CRITICAL", Level::ERROR, Level::ERROR),
        ] {
            let targets = targets(LogLevel::parse(word).unwrap());
            for (target, most) in [("edl_core::job", ours), ("elasticdl", ours), ("hyper", others)]
            {
                for level in [Level::ERROR, Level::WARN, Level::INFO, Level::DEBUG, Level::TRACE] {
                    let expected = level <= most;
                    assert_eq!(targets.would_enable(target, &level), expected, "{word} {target}");
                }
            }
        }
    }

    fn check(milliseconds: u64, expected: &str) {
        assert_eq!(stamp(UNIX_EPOCH + Duration::from_millis(milliseconds)), expected);
    }

    #[test]
    fn a_moment_is_written_as_python_writes_it() {
        check(0, "1970-01-01 00:00:00,000");
        check(951_782_400_000, "2000-02-29 00:00:00,000");
        check(1_709_251_199_999, "2024-02-29 23:59:59,999");
        check(1_794_710_800_750, "2026-11-15 02:46:40,750");
        check(4_107_542_400_000, "2100-03-01 00:00:00,000");
    }

    #[test]
    fn a_line_names_level_file_line_and_place() {
        let line = prefix(Level::WARN, "evaluation.rs", 214, "evaluation");
        assert!(line.ends_with("] [WARNING] [evaluation.rs:214:evaluation] "), "{line}");
        assert_eq!(line.find("] [WARNING]"), Some(24));
    }
}
