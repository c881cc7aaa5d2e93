// SPDX-License-Identifier: Apache-2.0
//! Finds the first cause: from how the job ended, or stands, back to what it began with.

use super::{Cause, Evidence, Exited, Facts, Found, Logged, Noted, ProcessNow};
use crate::exit::Exit;
use crate::job::{EventKind, JobState};
use crate::platform::{Ended, InstanceId, InstanceState, Role};

/// A log line may be written a moment after the event that it explains.
const SLACK_SECS: f64 = 1.0;
/// What happened longer ago has been overcome.
const RECENT_SECS: f64 = 60.0;
/// A process that dies this many times within that time does not die by accident.
const OFTEN: usize = 3;
/// Lines of evidence.
const MAX_EVIDENCE: usize = 6;

pub(super) fn first(facts: &Facts) -> Found {
    match facts.state {
        JobState::Succeeded => Found {
            cause: Cause::Succeeded,
            evidence: losses(facts).into_iter().collect(),
            ..Found::default()
        },
        JobState::Stopped => {
            Found { cause: Cause::Stopped, text: facts.reason.clone(), ..Found::default() }
        }
        JobState::Failed => failed(facts),
        JobState::Interrupted => interrupted(facts),
        JobState::Starting
        | JobState::Running
        | JobState::Evaluating
        | JobState::Recovering
        | JobState::Finishing
        | JobState::Waiting => running(facts),
    }
}

/// The job has given up.
fn failed(facts: &Facts) -> Found {
    let mut found = failed_work(facts)
        .or_else(|| crashes(facts))
        .or_else(|| first_of_last(facts, EventKind::CheckpointBad))
        .or_else(|| first_of_last(facts, EventKind::CheckpointFailed))
        .unwrap_or_else(|| {
            let process = process_in(&facts.reason);
            Found {
                cause: of_text(&facts.reason),
                process,
                text: facts.reason.clone(),
                ..Found::default()
            }
        });
    let end = facts.events.iter().rfind(|event| event.kind == EventKind::Failed);
    if found.at_secs.is_none() {
        found.at_secs = end.map(|end| end.at_secs);
    }
    found.evidence.truncate(MAX_EVIDENCE);
    found.evidence.push(evidence(
        end.map(|end| end.at_secs),
        &format!("the job failed: {}", first_line(&facts.reason)),
    ));
    found
}

/// The reason names a batch or shard: its first failure.
fn failed_work(facts: &Facts) -> Option<Found> {
    let (work, _) = facts.reason.split_once(" failed ")?;
    let of_work = |event: &&Noted| {
        event.kind == EventKind::WorkFailed && event.text.starts_with(&format!("{work} failed on "))
    };
    let failures: Vec<&Noted> = facts.events.iter().filter(of_work).collect();
    let first = failures.first()?;
    let process = process_in(first.text.strip_prefix(work)?)?;
    let (_, error) = first.text.split_once(&format!(" failed on {process}: "))?;
    let mut found = Found {
        cause: of_work_error(error),
        process: Some(process),
        at_secs: Some(first.at_secs),
        text: error.to_owned(),
        evidence: failures.iter().map(|event| noted(event)).collect(),
    };
    // A process that crashed said why in its log, if anywhere.
    if found.cause == Cause::Crash {
        explain_by_log(&mut found, facts);
    }
    Some(found)
}

/// Processes crashed too often: the first of those crashes.
fn crashes(facts: &Facts) -> Option<Found> {
    let (who, rest) = facts.reason.split_once(" crashed ")?;
    let n_crashes: usize = rest.split_once(" times").and_then(|(n, _)| n.parse().ok()).unwrap_or(1);
    let kind = if who == "workers" { EventKind::WorkerCrashed } else { EventKind::PsLost };
    let of_kind = |event: &&Noted| [kind, EventKind::NotStarted].contains(&event.kind);
    let all: Vec<&Noted> = facts.events.iter().filter(of_kind).collect();
    let last = &all[all.len().saturating_sub(n_crashes)..];
    let first = last.first()?;
    let mut found = Found {
        cause: of_text(&first.text).or(Cause::Crash),
        process: process_in(&first.text),
        at_secs: Some(first.at_secs),
        text: first.text.clone(),
        evidence: last.iter().map(|event| noted(event)).collect(),
    };
    explain_by_log(&mut found, facts);
    Some(found)
}

/// The first of the last events of a kind, if the reason is about the same.
fn first_of_last(facts: &Facts, kind: EventKind) -> Option<Found> {
    let cause = of_text(&facts.reason);
    let is_bad = kind == EventKind::CheckpointBad;
    let is_about = if is_bad {
        cause == Cause::DamagedCheckpoint
    } else {
        matches!(cause, Cause::DiskFull | Cause::NoAccess)
    };
    // A checkpoint that was written in between has ended earlier trouble.
    let written = facts.events.iter().rposition(|event| event.kind == EventKind::Checkpoint);
    let last = facts.events.iter().skip(written.map_or(0, |at| at + 1));
    let of_kind: Vec<&Noted> = last.filter(|event| event.kind == kind).collect();
    let first = of_kind.first().filter(|_| is_about)?;
    Some(Found {
        cause: if is_bad { cause } else { of_text(&first.text).or(cause) },
        process: process_in(&first.text),
        at_secs: Some(first.at_secs),
        text: first.text.clone(),
        evidence: of_kind.iter().map(|event| noted(event)).collect(),
    })
}

/// No process runs, but the job has not ended.
fn interrupted(facts: &Facts) -> Found {
    let Some(last) = facts.exits.iter().rfind(|exit| exit.ended_job) else {
        return Found { cause: Cause::Interrupted, ..Found::default() };
    };
    // A death of another kind before it was overcome.
    let is_like =
        |exit: &&Exited| (exit.instance, exit.how) == (last.instance, last.how) && !exit.was_asked;
    let deaths: Vec<&Exited> = recent(facts, last.at_secs).filter(is_like).collect();
    found_deaths(facts, &deaths).unwrap_or_default()
}

/// Deaths of one process: the first of them, with what its log says about it.
fn found_deaths(facts: &Facts, deaths: &[&Exited]) -> Option<Found> {
    let first = deaths.first()?;
    let how = first.how;
    let cause = if matches!(how, Ended::OutOfMemory | Ended::MachineOutOfMemory) {
        Cause::OutOfMemory
    } else if how.is_from_outside() {
        Cause::Killed
    } else if how.exit() == Some(Exit::Panicked) {
        Cause::Panic
    } else {
        Cause::Crash
    };
    let times = if deaths.len() == 1 { "once".into() } else { format!("{} times", deaths.len()) };
    let mut found = Found {
        cause,
        process: Some(first.instance),
        at_secs: Some(first.at_secs),
        text: format!("it {how}, {times}"),
        evidence: deaths
            .iter()
            .take(MAX_EVIDENCE)
            .map(|exit| {
                evidence(
                    Some(exit.at_secs),
                    &format!("{} (pid {}) {}", exit.instance, exit.pid, exit.how),
                )
            })
            .collect(),
    };
    if cause != Cause::Killed {
        explain_by_log(&mut found, facts);
    }
    Some(found)
}

fn recent(facts: &Facts, until: f64) -> impl Iterator<Item = &Exited> {
    facts.exits.iter().filter(move |exit| exit.at_secs > until - RECENT_SECS)
}

/// The job is not over: what keeps it from working, if anything.
fn running(facts: &Facts) -> Found {
    if !facts.reason.is_empty() {
        let cause = of_text(&facts.reason).or(Cause::NoCapacity);
        return Found { cause, text: facts.reason.clone(), ..Found::default() };
    }
    let waiting = facts.processes.iter().filter(|process| !process.why.is_empty());
    let mut stuck: Vec<Found> = waiting
        .map(|process| Found {
            cause: of_process(process),
            process: Some(process.instance),
            text: process.why.clone(),
            ..Found::default()
        })
        .collect();
    // Those that wait for others are not the cause.
    stuck.sort_by_key(|found| found.cause == Cause::Stalled);
    let all = stuck
        .iter()
        .filter_map(|found| Some(evidence(None, &format!("{}: {}", found.process?, found.text))));
    let all: Vec<Evidence> = all.take(MAX_EVIDENCE).collect();
    if let Some(first) = stuck.into_iter().next() {
        return Found { evidence: all, ..first };
    }
    let trouble =
        dying_master(facts).or_else(|| often_killed(facts)).or_else(|| often_failing(facts));
    trouble.unwrap_or_else(|| Found {
        evidence: losses(facts).into_iter().collect(),
        ..Found::default()
    })
}

/// What keeps a process from working.
fn of_process(process: &ProcessNow) -> Cause {
    if matches!(process.state, InstanceState::Waiting | InstanceState::Pending) {
        Cause::NoCapacity
    } else if process.why.contains("without progress") {
        Cause::Hang
    } else if process.why.starts_with("silent") {
        Cause::Frozen
    } else {
        Cause::Stalled
    }
}

fn dying_master(facts: &Facts) -> Option<Found> {
    let is_master = |exit: &&Exited| exit.instance.role == Role::Master && !exit.was_asked;
    let deaths: Vec<&Exited> = recent(facts, facts.now_secs).filter(is_master).collect();
    if deaths.len() < OFTEN { None } else { found_deaths(facts, &deaths) }
}

/// Processes are killed from outside again and again.
fn often_killed(facts: &Facts) -> Option<Found> {
    let is_killed = |event: &&Noted| {
        let is_outside = || [Cause::Killed, Cause::OutOfMemory].contains(&of_text(&event.text));
        event.kind == EventKind::WorkerKilled || event.kind == EventKind::PsLost && is_outside()
    };
    repeated(facts, is_killed, Cause::Killed)
}

/// Work or processes fail again and again, and the job retries.
fn often_failing(facts: &Facts) -> Option<Found> {
    let fails = |event: &&Noted| {
        matches!(event.kind, EventKind::WorkFailed | EventKind::WorkerCrashed | EventKind::PsLost)
    };
    let mut found = repeated(facts, fails, Cause::Crash)?;
    if found.cause == Cause::Crash {
        explain_by_log(&mut found, facts);
    }
    Some(found)
}

fn repeated(facts: &Facts, is_it: impl Fn(&&Noted) -> bool, or: Cause) -> Option<Found> {
    let is_recent = |event: &&Noted| event.at_secs > facts.now_secs - RECENT_SECS;
    let all: Vec<&Noted> = facts.events.iter().filter(is_recent).filter(is_it).collect();
    let first = all.first().filter(|_| all.len() >= OFTEN)?;
    let is_work = first.kind == EventKind::WorkFailed;
    let cause = if is_work { of_work_error(&first.text) } else { of_text(&first.text).or(or) };
    let at_secs = Some(first.at_secs);
    let evidence = all.iter().take(MAX_EVIDENCE).map(|event| noted(event)).collect();
    let process = process_in(&first.text);
    Some(Found { cause, process, at_secs, text: first.text.clone(), evidence })
}

/// A job that is well may have lost processes on the way.
fn losses(facts: &Facts) -> Option<Evidence> {
    let is_loss = |event: &&Noted| {
        matches!(
            event.kind,
            EventKind::WorkerKilled
                | EventKind::WorkerCrashed
                | EventKind::WorkerSilent
                | EventKind::PsLost
        )
    };
    let text = match facts.events.iter().filter(is_loss).count() {
        0 => return None,
        1 => "1 process was lost and replaced".to_owned(),
        n => format!("{n} processes were lost and replaced"),
    };
    Some(evidence(None, &text))
}

/// The log of the process says more than its exit code. A worker's number is used once, so its log
/// is that of one process; others are known by the time.
fn explain_by_log(found: &mut Found, facts: &Facts) {
    let Some(process) = found.process else { return };
    let until = found.at_secs.unwrap_or(f64::MAX) + SLACK_SECS;
    let in_time = |entry: &&Logged| {
        entry.instance == process
            && entry.at_secs <= until
            && of_text(&entry.text) != Cause::Unknown
    };
    let mut entries = facts.logged.iter().filter(in_time);
    let entry = match process.role {
        Role::Worker => entries.next(),
        Role::Ps | Role::Master => entries.next_back(),
    };
    // What has only a text is still worth reading.
    let any = || facts.logged.iter().rfind(|e| e.instance == process && e.at_secs <= until);
    if let Some(entry) = entry.or_else(any) {
        found.cause = of_text(&entry.text).or(found.cause);
        found.text.clone_from(&entry.text);
        found.evidence.insert(
            0,
            evidence(Some(entry.at_secs), &format!("{process}: {}", first_line(&entry.text))),
        );
    }
}

impl Cause {
    /// This one, if it is known.
    fn or(self, other: Self) -> Self {
        if self == Self::Unknown { other } else { self }
    }
}

/// Why work failed, without the place in the data that a worker adds at the end.
fn of_work_error(error: &str) -> Cause {
    let error = error.rsplit_once(" (batch ").map_or(error, |(error, _)| error);
    of_text(error).or(Cause::CodeError)
}

/// Texts by which causes are known, the surest first.
const PHRASES: &[(Cause, &[&str])] = &[
    (Cause::OutOfMemory, &["MemoryError", "ran out of memory", "out of memory"]),
    (Cause::CodeError, &["Traceback (most recent call last)", "Fatal Python error"]),
    (Cause::Panic, &["panicked at"]),
    (Cause::Hang, &["no progress for"]),
    (Cause::NonFinite, &["not finite"]),
    (Cause::DiskFull, &["No space left", "free some disk space", "quota exceeded"]),
    (Cause::DataChanged, &["data has changed"]),
    (Cause::DamagedCheckpoint, &["cannot load any checkpoint", "cannot load checkpoint"]),
    (Cause::PortInUse, &["ddress already in use", "ddress in use", "cannot listen on"]),
    (
        Cause::BadData,
        &[
            "corrupt chunk",
            "corrupt record",
            "truncated",
            ": field `",
            "column `",
            "out of range; number of records",
        ],
    ),
    (
        Cause::NoAccess,
        &[
            "ermission denied",
            "ead-only file system",
            "ot a directory",
            "s a directory",
            "cannot write",
            "cannot create",
        ],
    ),
    (
        Cause::BadData,
        &["No such file", "cannot open the", "contains no data files", "contain no records"],
    ),
    (
        Cause::Killed,
        &[
            "was killed (SIGKILL)",
            "was terminated (SIGTERM)",
            "was preempted",
            "was evicted",
            "was deleted",
            "was lost with its node",
        ],
    ),
    (Cause::Frozen, &["sent no heartbeat", "never connected", "was not ready after"]),
    (Cause::Crash, &["killed by signal", "exited with code", "thread panicked"]),
    (Cause::BitsDiffer, &["differ bitwise"]),
    (
        Cause::BadSettings,
        &["invalid optimizer", "; this job trains `", "cannot load the initial values"],
    ),
    (Cause::Disconnected, &["could not reach the master"]),
];

/// The cause that a text shows.
fn of_text(text: &str) -> Cause {
    if text.starts_with("record ") {
        return Cause::BadData;
    }
    let known =
        PHRASES.iter().find(|(_, phrases)| phrases.iter().any(|phrase| text.contains(phrase)));
    known.map_or(Cause::Unknown, |(cause, _)| *cause)
}

/// The process that a text names first.
fn process_in(text: &str) -> Option<InstanceId> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '-');
    let mut named = words.filter_map(|word| word.parse().ok());
    named.find(|process| *process != InstanceId::MASTER)
}

/// The records that the cause is about: `batch 0/7 (records 1, 5)`.
pub(super) fn records(found: &Found, reason: &str) -> Option<String> {
    let in_text = |text: &str| {
        let start = ["batch ", "evaluation of records ", "prediction of records "]
            .iter()
            .filter_map(|word| text.find(word))
            .min()?;
        let rest = &text[start..];
        match rest.find("(records ").and_then(|at| Some(at + rest[at..].find(')')?)) {
            Some(end) => Some(rest[..=end].to_owned()),
            None => rest.split([':', ';']).next().map(|part| part.replace(" failed", "")),
        }
    };
    let is_about_work = matches!(
        found.cause,
        Cause::CodeError
            | Cause::Panic
            | Cause::Crash
            | Cause::Hang
            | Cause::NonFinite
            | Cause::BadData
            | Cause::DataChanged
    );
    is_about_work.then(|| in_text(reason).or_else(|| in_text(&found.text))).flatten()
}

fn noted(event: &Noted) -> Evidence {
    evidence(Some(event.at_secs), &first_line(&event.text))
}

fn evidence(at_secs: Option<f64>, text: &str) -> Evidence {
    Evidence { at_secs, text: text.to_owned() }
}

/// One line of bounded length; of a Python error the last line, which says what it is.
pub(super) fn first_line(text: &str) -> String {
    const MOST: usize = 300;
    let mut lines = text.lines().filter(|line| !line.trim().is_empty());
    let first = lines.next().unwrap_or_default().trim();
    let line = match first.split_once("Traceback (most recent call last):") {
        Some((before, _)) => format!("{before}{}", lines.next_back().unwrap_or(first).trim()),
        None => first.to_owned(),
    };
    match line.char_indices().nth(MOST) {
        Some((end, _)) => format!("{}…", &line[..end]),
        None => line,
    }
}
