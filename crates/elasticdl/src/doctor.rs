// SPDX-License-Identifier: Apache-2.0
//! `doctor`: checks that this machine can train, and prints how to fix what is missing.

use std::io::Write;
use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::path::Path;

use edl_core::spec::JobSpec;
use rustix::process::{Resource, getrlimit};

use crate::exit::Exit;
use crate::jobs::Home;
use crate::shipped;
use crate::submit::checks::tempdir_in;

/// A job's processes, sockets and logs need at most this many.
const MIN_FILES: u64 = 256;
/// Checkpoints of the built-in models need far less.
const MIN_FREE: u64 = 1 << 30;

/// What a check found, or what failed.
type Check = Result<String, Failure>;

struct Failure {
    problem: String,
    fix: String,
}

fn fail(problem: impl Into<String>, fix: impl Into<String>) -> Check {
    Err(Failure { problem: problem.into(), fix: fix.into() })
}

/// Runs every check; fails if one does.
pub(crate) fn run(out: &mut dyn Write) -> anyhow::Result<Exit> {
    let mut checks = vec![
        ("processor", processor()),
        ("open files", open_files()),
        ("loopback", loopback()),
        ("models", models()),
        ("shipped data", data()),
    ];
    match Home::from_env() {
        Ok(home) => checks.extend([
            ("jobs folder", folder(&home.jobs_dir())),
            ("free space", space(&home.jobs_dir())),
            ("unix sockets", socket(&home.jobs_dir())),
            ("jobs", left_over(&home)),
        ]),
        Err(error) => {
            let failure = fail(error.to_string(), "export ELASTICDL_HOME=/path/to/folder");
            checks.push(("jobs folder", failure));
        }
    }
    write(&checks, out)
}

fn write(checks: &[(&str, Check)], out: &mut dyn Write) -> anyhow::Result<Exit> {
    for (what, check) in checks {
        match check {
            Ok(found) => writeln!(out, "ok    {what:<13} {found}")?,
            Err(Failure { problem, fix }) => {
                writeln!(out, "FAIL  {what:<13} {problem}")?;
                writeln!(out, "      {:<13} fix: {fix}", "")?;
            }
        }
    }
    let failed = checks.iter().filter(|(_, check)| check.is_err()).count();
    if failed == 0 {
        writeln!(out, "this machine is ready to train")?;
        return Ok(Exit::Ok);
    }
    writeln!(out, "{failed} of {} checks failed", checks.len())?;
    Ok(Exit::Failed)
}

fn processor() -> Check {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    Ok(format!("{cores} cores, {}", edl_zoo::instruction_set()))
}

fn open_files() -> Check {
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

fn loopback() -> Check {
    match TcpListener::bind("127.0.0.1:0") {
        Ok(_) => Ok("127.0.0.1 accepts connections".into()),
        Err(error) => fail(format!("cannot listen on 127.0.0.1: {error}"), "ip link set lo up"),
    }
}

fn models() -> Check {
    for name in edl_zoo::names() {
        let spec = JobSpec { model_def: (*name).to_owned(), ..JobSpec::default() };
        if let Err(error) = edl_zoo::open(&spec) {
            return fail(format!("cannot open model `{name}`: {error}"), "reinstall elasticdl");
        }
    }
    Ok(edl_zoo::names().join(", "))
}

fn data() -> Check {
    let fix = "run from the repository, or provide other data with --training_data";
    let Some(folder) = shipped::find() else {
        return fail("data/fashion_mnist not found", fix);
    };
    let train = folder.join("train");
    match edl_data::Dataset::open(&train.to_string_lossy(), &edl_data::OpenOptions::default()) {
        Ok(data) => Ok(format!("{} records in {}", data.n_records(), train.display())),
        Err(error) => fail(error.to_string(), fix),
    }
}

/// The nearest folder that exists; a missing one is made by the first job.
fn existing(path: &Path) -> &Path {
    path.ancestors().find(|ancestor| ancestor.exists()).unwrap_or(Path::new("/"))
}

fn folder(jobs: &Path) -> Check {
    match tempdir_in(existing(jobs)) {
        Ok(()) => Ok(format!("{} is writable", jobs.display())),
        Err(error) => fail(
            format!("cannot write to `{}`: {error}", jobs.display()),
            "export ELASTICDL_HOME=/path/to/writable/folder",
        ),
    }
}

fn space(jobs: &Path) -> Check {
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

fn socket(jobs: &Path) -> Check {
    let path = existing(jobs).join(format!(".elasticdl-{}.sock", std::process::id()));
    let bound = UnixListener::bind(&path);
    let _never_made = std::fs::remove_file(&path);
    match bound {
        Ok(_) => Ok("work".into()),
        Err(error) => fail(format!("{error}"), "use a shorter ELASTICDL_HOME on a local disk"),
    }
}

/// Interrupted jobs, which can be resumed or removed, are no failure.
fn left_over(home: &Home) -> Check {
    let all = home.list();
    let waiting = all.iter().filter(|job| !job.is_running() && !job.state().is_final());
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
    fn every_failed_check_prints_its_fix() {
        let checks = [
            ("processor", Ok("2 cores".into())),
            ("loopback", fail("it is down", "ip link set lo up")),
        ];
        let mut out = Vec::new();
        assert_eq!(write(&checks, &mut out).unwrap(), Exit::Failed);
        expect![[r"
            ok    processor     2 cores
            FAIL  loopback      it is down
                                fix: ip link set lo up
            1 of 2 checks failed
        "]]
        .assert_eq(&String::from_utf8(out).unwrap());
    }

    #[test]
    fn a_missing_folder_is_checked_by_its_parent() {
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
