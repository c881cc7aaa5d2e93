// SPDX-License-Identifier: Apache-2.0
//! Log lines in the form that users grep for:
//! `[2026-11-15 02:46:40,750] [INFO] [evaluation.rs:214:evaluation] message`. Times are in UTC.

use std::fmt;
use std::fs::File;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::sync::Mutex;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::Context as _;
use edl_core::spec::LogLevel;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields, MakeWriter};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::registry::LookupSpan;

/// Our own crates; the others speak up from a warning on.
const CRATES: [&str; 11] = [
    "edl_core",
    "edl_data",
    "edl_kube",
    "edl_master",
    "edl_net",
    "edl_operator",
    "edl_ps",
    "edl_tensor",
    "edl_worker",
    "edl_zoo",
    "elasticdl",
];

/// Sends log lines of `level` and above to standard error, for the life of the process.
pub(crate) fn start(level: LogLevel) {
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
    let lines =
        tracing_subscriber::fmt::layer().with_writer(writer).with_ansi(false).event_format(Lines);
    let subscriber = tracing_subscriber::registry().with(lines).with(targets(level));
    // A second start, as in tests, keeps the first one.
    let _already = tracing::subscriber::set_global_default(subscriber);
}

/// Who may write a line of which level.
fn targets(level: LogLevel) -> Targets {
    let level = level_filter(level);
    let ours = CRATES.map(|name| (name, level));
    Targets::new().with_default(level.min(LevelFilter::WARN)).with_targets(ours)
}

/// Python's words for levels, as tracing has them.
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
    let since = at.duration_since(UNIX_EPOCH).unwrap_or_default();
    let seconds = since.as_secs();
    let (year, month, day) = civil(seconds / 86_400);
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    let milliseconds = since.subsec_millis();
    format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02},{milliseconds:03}")
}

/// The date of a day counted from 1 January 1970, in the Gregorian calendar. Years begin in
/// March here, so that the leap day is the last of its year.
fn civil(days: u64) -> (u64, u64, u64) {
    let days = days + 719_468; // From 1 March of year 0.
    let era = days / 146_097; // 400 years.
    let day_of_era = days % 146_097;
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    (year, month, day)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

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
