// SPDX-License-Identifier: Apache-2.0
//! `doctor`: whether this machine can train, and what to do where it cannot.

use std::io::Write;
use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::path::Path;

use edl_core::spec::JobSpec;
use rustix::process::{Resource, getrlimit};

use crate::exit::Exit;
use crate::jobs::{self, Home};
use crate::shipped;
use crate::submit::checks::tempdir_in;

/// A job's processes, their sockets and logs need this many at most.
const MIN_FILES: u64 = 256;
/// Checkpoints of the built-in models need far less.
const MIN_FREE: u64 = 1 << 30;

/// What one check found.
struct Finding {
    what: &'static str,
    result: Result<String, Failure>,
}

struct Failure {
    problem: String,
    mend: String,
}

fn fail<T>(problem: impl Into<String>, mend: impl Into<String>) -> Result<T, Failure> {
    Err(Failure { problem: problem.into(), mend: mend.into() })
}

/// Runs every check; fails if one does.
pub(crate) fn run(out: &mut dyn Write) -> anyhow::Result<Exit> {
    let home = Home::from_env();
    let mut findings = vec![
        Finding { what: "processor", result: processor() },
        Finding { what: "open files", result: open_files() },
        Finding { what: "loopback", result: loopback() },
        Finding { what: "models", result: models() },
        Finding { what: "shipped data", result: data() },
    ];
    match home {
        Ok(home) => {
            findings.push(Finding { what: "jobs folder", result: folder(&home.jobs_dir()) });
            findings.push(Finding { what: "free space", result: space(&home.jobs_dir()) });
            findings.push(Finding { what: "unix sockets", result: socket(&home.jobs_dir()) });
            findings.push(Finding { what: "jobs", result: left_over(&home) });
        }
        Err(error) => {
            let result = fail(error.to_string(), "export ELASTICDL_HOME=/path/to/folder");
            findings.push(Finding { what: "jobs folder", result });
        }
    }
    write(&findings, out)
}

fn write(findings: &[Finding], out: &mut dyn Write) -> anyhow::Result<Exit> {
    for Finding { what, result } in findings {
        match result {
            Ok(found) => writeln!(out, "ok    {what:<13} {found}")?,
            Err(Failure { problem, mend }) => {
                writeln!(out, "FAIL  {what:<13} {problem}")?;
                writeln!(out, "      {:<13} fix: {mend}", "")?;
            }
        }
    }
    let failed = findings.iter().filter(|finding| finding.result.is_err()).count();
    if failed == 0 {
        writeln!(out, "this machine is ready to train")?;
        return Ok(Exit::Ok);
    }
    writeln!(out, "{failed} of {} checks failed", findings.len())?;
    Ok(Exit::Failed)
}

fn processor() -> Result<String, Failure> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    Ok(format!("{cores} cores, {}", edl_zoo::instruction_set()))
}

fn open_files() -> Result<String, Failure> {
    let limit = getrlimit(Resource::Nofile).current;
    match limit {
        Some(limit) if limit < MIN_FILES => fail(
            format!("the limit of {limit} open files is too low"),
            format!("ulimit -n {MIN_FILES}"),
        ),
        Some(limit) => Ok(format!("limit {limit}")),
        None => Ok("no limit".into()),
    }
}

fn loopback() -> Result<String, Failure> {
    match TcpListener::bind("127.0.0.1:0") {
        Ok(_) => Ok("127.0.0.1 accepts connections".into()),
        Err(error) => fail(format!("cannot listen on 127.0.0.1: {error}"), "ip link set lo up"),
    }
}

fn models() -> Result<String, Failure> {
    for name in edl_zoo::names() {
        let spec = JobSpec { model_def: (*name).to_owned(), ..JobSpec::default() };
        if let Err(error) = edl_zoo::open(&spec) {
            return fail(format!("cannot open model `{name}`: {error}"), "reinstall elasticdl");
        }
    }
    Ok(edl_zoo::names().join(", "))
}

fn data() -> Result<String, Failure> {
    let mend = "run from the repository, or provide other data with --training_data";
    let Some(folder) = shipped::find() else {
        return fail("data/fashion_mnist not found", mend);
    };
    let train = folder.join("train");
    match edl_data::Dataset::open(&train.to_string_lossy(), &edl_data::OpenOptions::default()) {
        Ok(data) => Ok(format!("{} records in {}", data.n_records(), train.display())),
        Err(error) => fail(error.to_string(), mend),
    }
}

/// The nearest folder that exists; a missing one is made by the first job.
fn existing(path: &Path) -> &Path {
    path.ancestors().find(|ancestor| ancestor.exists()).unwrap_or(Path::new("/"))
}

fn folder(jobs: &Path) -> Result<String, Failure> {
    match tempdir_in(existing(jobs)) {
        Ok(()) => Ok(format!("{} is writable", jobs.display())),
        Err(error) => fail(
            format!("cannot write to `{}`: {error}", jobs.display()),
            "export ELASTICDL_HOME=/path/to/writable/folder",
        ),
    }
}

fn space(jobs: &Path) -> Result<String, Failure> {
    match rustix::fs::statvfs(existing(jobs)) {
        Ok(stat) => {
            let free = stat.f_bavail.saturating_mul(stat.f_frsize);
            let shown = format!("{} MiB", free >> 20);
            if free < MIN_FREE {
                return fail(
                    format!("only {shown} free"),
                    "run `elasticdl clean --all`, or move ELASTICDL_HOME",
                );
            }
            Ok(shown)
        }
        Err(error) => {
            fail(format!("cannot read free disk space: {error}"), "choose another ELASTICDL_HOME")
        }
    }
}

fn socket(jobs: &Path) -> Result<String, Failure> {
    let path = existing(jobs).join(format!(".elasticdl-{}.sock", std::process::id()));
    let bound = UnixListener::bind(&path);
    let _never_made = std::fs::remove_file(&path);
    match bound {
        Ok(_) => Ok("work".into()),
        Err(error) => fail(format!("{error}"), "use a shorter ELASTICDL_HOME on a local disk"),
    }
}

/// Jobs that were killed and wait to be resumed or removed are no fault, but worth a word.
fn left_over(home: &Home) -> Result<String, Failure> {
    let all = home.list();
    let waiting = all.iter().filter(|job| !job.is_running() && !jobs::is_final(&job.state()));
    let names: Vec<String> = waiting.filter_map(|job| job.name()).collect();
    match names.as_slice() {
        [] => Ok(format!("{} found", all.len())),
        names => Ok(format!("interrupted (resume or clean them): {}", names.join(", "))),
    }
}

#[cfg(test)]
mod tests {
    use expect_test::expect;

    use super::*;

    #[test]
    fn every_failed_check_says_how_to_mend_it() {
        let findings = [
            Finding { what: "processor", result: Ok("2 cores".into()) },
            Finding { what: "loopback", result: fail("it is down", "ip link set lo up") },
        ];
        let mut out = Vec::new();
        assert_eq!(write(&findings, &mut out).unwrap(), Exit::Failed);
        expect![[r"
            ok    processor     2 cores
            FAIL  loopback      it is down
                                fix: ip link set lo up
            1 of 2 checks failed
        "]]
        .assert_eq(&String::from_utf8(out).unwrap());
    }

    #[test]
    fn a_folder_that_is_not_there_yet_is_judged_by_the_one_above() {
        let root = tempfile::tempdir().unwrap();
        assert!(folder(&root.path().join("not/yet")).is_ok());
        let file = root.path().join("file");
        std::fs::write(&file, "").unwrap();
        assert!(folder(&file.join("below")).is_err());
        assert!(space(root.path()).is_ok());
        assert!(socket(root.path()).is_ok());
        assert_eq!(std::fs::read_dir(root.path()).unwrap().count(), 1, "nothing is left behind");
    }
}
