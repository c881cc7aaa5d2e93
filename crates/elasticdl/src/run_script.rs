// SPDX-License-Identifier: Apache-2.0
//! `run`: runs a Python script with a custom training loop, like torchrun.

use std::io::Write;
use std::path::Path;

use edl_core::spec::{JobType, LogLevel, Strategy};
use serde_json::Value;

use crate::cli::{RunFlags, ScriptArgs};
use crate::config::JobRequest;
use crate::console::eprint;
use crate::custom_loop::STEP;
use crate::exit::{Exit, refuse};
use crate::flags::{self, Given};
use crate::jobs::Home;
use crate::submit;
use crate::{cluster, python};

/// How deep modules of a script are looked for, and among how many files of a folder.
const MAX_DEPTH: u32 = 1;
const MAX_FILES: usize = 1000;
/// The interpreter in an image, whose paths are not known here.
const PYTHON_OF_IMAGE: &str = "python3";

pub(crate) fn run(args: &ScriptArgs, out: &mut dyn Write) -> anyhow::Result<Exit> {
    crate::telemetry::start(LogLevel::Info);
    if args.rdzv_backend.is_some() || args.rdzv_endpoint.is_some() || args.rdzv_id.is_some() {
        eprint("ignoring --rdzv_…: the workers rendezvous at the job's master");
    }
    let mut run = RunFlags {
        job_dir: args.job_dir.clone(),
        detach: args.detach,
        log_to_terminal: args.log_to_terminal,
        ..RunFlags::default()
    };
    if let Some(job) = &args.resume {
        run.resume = Some(Some(job.clone()));
        let request = JobRequest::read(run, args.job.0.clone())?;
        return submit::run(JobType::Train, &request, out);
    }
    let given = given(args)?;
    if is_for_cluster(args) {
        return cluster::submit::run(JobType::Train, &run, given, out);
    }
    flags::on_this_machine(&args.job.0)?.iter().for_each(eprint);
    check_script(args)?;
    submit::start_new(&Home::from_env()?, JobType::Train, given, &run, out)
}

/// Refuses a Python script that does not use elasticdl: without `elasticdl.init()`, it would train
/// to its end as an ordinary script. Modules next to the script may call it instead.
fn check_script(args: &ScriptArgs) -> anyhow::Result<()> {
    let Some(script) = args.script.first().filter(|_| !args.module && !args.no_python) else {
        return Ok(());
    };
    let path = Path::new(script);
    if !path.is_file() {
        return Err(refuse(format!("script `{script}` not found")));
    }
    let folder = path.parent().filter(|folder| *folder != Path::new("")).unwrap_or(Path::new("."));
    if is_elastic(path) || any_python(folder, &is_elastic, MAX_DEPTH) {
        return Ok(());
    }
    Err(refuse(format!(
        "`{script}` never calls `elasticdl.init()`, which makes it a worker of a job; see \
         docs/own-loop.md"
    )))
}

fn is_elastic(path: &Path) -> bool {
    std::fs::read(path).is_ok_and(|text| String::from_utf8_lossy(&text).contains("elasticdl"))
}

/// Whether `holds` for a Python file in the folder, or up to `depth` folders below it.
fn any_python(folder: &Path, holds: &impl Fn(&Path) -> bool, depth: u32) -> bool {
    let paths = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    paths.take(MAX_FILES).any(|path| {
        let is_python = path.extension().is_some_and(|extension| extension == "py");
        is_python && holds(&path)
            || depth > 0 && path.is_dir() && any_python(&path, holds, depth - 1)
    })
}

/// The fields of the job.
fn given(args: &ScriptArgs) -> anyhow::Result<Given> {
    let (least, most) = workers(args)?;
    let lanes = args.lanes.unwrap_or(most);
    let mut given = args.job.0.clone();
    // A cluster has room for all of them, or starts them as soon as it does. A single number is
    // that of the first workers, even if --min_workers allows fewer later.
    let first = if is_for_cluster(args) { most } else { first_workers(least, most, cores()) };
    let fields: [(&str, Option<Value>); 11] = [
        ("job_command", Some(command_line(args).into())),
        ("model_def", Some(args.script.first().cloned().into())),
        ("distribution_strategy", Some(Strategy::Allreduce.name().into())),
        ("num_workers", Some(first.into())),
        ("max_workers", Some(most.into())),
        ("lanes", Some(lanes.into())),
        ("seed", Some(args.seed.into())),
        ("job_name", args.job_name.clone().map(Value::from)),
        ("relaunch_on_worker_failure", args.max_restarts.map(Value::from)),
        ("threads_per_worker", args.threads_per_worker.map(Value::from)),
        ("output", args.output.clone().map(Value::from)),
    ];
    given.extend(fields.into_iter().filter_map(|(name, value)| Some((name.to_owned(), value?))));
    given.entry("min_workers".to_owned()).or_insert(least.into());
    Ok(given)
}

/// Fewest and most workers: `2:8` or `2`, or torchrun's nodes times processes of each.
fn workers(args: &ScriptArgs) -> anyhow::Result<(u32, u32)> {
    if let Some(text) = &args.workers {
        return range(text).ok_or_else(|| wrong("--workers", text));
    }
    let (least, most) = range(&args.nnodes).ok_or_else(|| wrong("--nnodes", &args.nnodes))?;
    let each = match args.nproc_per_node.as_str() {
        "auto" | "cpu" if is_for_cluster(args) => {
            return Err(refuse(
                "--nproc_per_node=auto counts the cores of this machine; on a cluster, set the \
                 number with --workers",
            ));
        }
        "auto" | "cpu" => cores(),
        text => text.parse().map_err(|_| {
            refuse(format!("--nproc_per_node `{text}` must be a number greater than 0, or auto"))
        })?,
    };
    Ok((least.saturating_mul(each), most.saturating_mul(each)))
}

/// How many workers a job starts with on this machine: as many as it has cores, within the range.
fn first_workers(least: u32, most: u32, cores: u32) -> u32 {
    cores.max(least).min(most)
}

fn cores() -> u32 {
    std::thread::available_parallelism().map_or(1, |cores| saturate(cores.get() as u64))
}

fn saturate(number: u64) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

fn wrong(flag: &str, text: &str) -> anyhow::Error {
    refuse(format!("{flag} `{text}` must be a number greater than 0, or a range such as 2:8"))
}

fn range(text: &str) -> Option<(u32, u32)> {
    let (least, most) = text.split_once(':').unwrap_or((text, text));
    let (least, most) = (least.parse().ok()?, most.parse().ok()?);
    (0 < least && least <= most).then_some((least, most))
}

fn is_for_cluster(args: &ScriptArgs) -> bool {
    flags::text(&args.job.0, "image_name").is_some_and(|image| !image.is_empty())
}

/// The worker's command line, quoted for a shell.
fn command_line(args: &ScriptArgs) -> String {
    let interpreter = if is_for_cluster(args) {
        PYTHON_OF_IMAGE.into()
    } else {
        python::interpreter().to_string_lossy().into_owned()
    };
    // Part of the command, because it also decides how the script is described on a cluster.
    let mut parts = match args.step.as_str() {
        "auto" => Vec::new(),
        step => vec!["env".into(), format!("{STEP}={step}")],
    };
    if !args.no_python {
        parts.push(interpreter);
    }
    if args.module {
        parts.push("-m".into());
    }
    parts.extend(args.script.iter().cloned());
    parts.iter().map(|part| quoted(part)).collect::<Vec<_>>().join(" ")
}

fn quoted(text: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "_-./:=,+@%".contains(c);
    if !text.is_empty() && text.chars().all(is_plain) {
        return text.to_owned();
    }
    format!("'{}'", text.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::cli::{Cli, Command};

    #[test]
    fn a_range_is_one_number_or_two() {
        assert_eq!(range("3"), Some((3, 3)));
        assert_eq!(range("2:8"), Some((2, 8)));
        for text in ["0", "8:2", "", "2:", "x", "0:4"] {
            assert_eq!(range(text), None, "{text}");
        }
    }

    #[test]
    fn a_job_starts_with_as_many_workers_as_there_are_cores() {
        for (least, most, cores, first) in [(2, 8, 4, 4), (2, 8, 1, 2), (2, 8, 64, 8), (3, 3, 1, 3)]
        {
            assert_eq!(first_workers(least, most, cores), first, "{least}:{most} on {cores}");
        }
    }

    #[test]
    fn a_single_number_of_workers_is_started_whatever_the_minimum() {
        let line = ["elasticdl", "run", "--workers=400", "--min_workers=2", "x.py"];
        let Command::Run(args) = Cli::try_parse_from(line).unwrap().command else { panic!() };
        let given = given(&args).unwrap();
        assert_eq!((&given["min_workers"], &given["num_workers"]), (&2.into(), &400.into()));
    }

    #[test]
    fn on_a_cluster_the_python_of_the_image_runs_the_script() {
        let script = |flags: &[&str]| {
            let line = ["elasticdl", "run", "--image_name=i", "--envs=A=b"];
            let cli = Cli::try_parse_from(line.iter().chain(flags)).unwrap();
            let Command::Run(args) = cli.command else { panic!() };
            *args
        };
        let args = script(&["--workers=2:4", "/workspace/train.py", "--volume", "x"]);
        let given = given(&args).unwrap();
        assert_eq!(given["job_command"], "python3 /workspace/train.py --volume x");
        assert_eq!((&given["image_name"], &given["envs"]), (&"i".into(), &"A=b".into()));
        assert_eq!((&given["min_workers"], &given["num_workers"]), (&2.into(), &4.into()));
        let own = command_line(&script(&["--step=python", "x.py"]));
        assert_eq!(own, "env ELASTICDL_STEP=python python3 x.py");
        let refused = workers(&script(&["--nproc_per_node=auto", "x.py"])).unwrap_err();
        assert!(refused.to_string().contains("--workers"), "{refused}");
        let refused = workers(&script(&["--nproc_per_node=2:8", "x.py"])).unwrap_err().to_string();
        assert_eq!(refused, "--nproc_per_node `2:8` must be a number greater than 0, or auto");
    }

    #[test]
    fn a_script_without_elasticdl_is_refused_before_it_runs() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let path = folder.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(&path, text).unwrap();
            path.to_str().unwrap().to_owned()
        };
        let script = write("train.py", "import torch, trainer");
        let check = |flags: &[&str]| {
            let line = ["elasticdl", "run"].into_iter().chain(flags.iter().copied());
            let cli = Cli::try_parse_from(line.chain([script.as_str()])).unwrap();
            let Command::Run(args) = cli.command else { panic!() };
            check_script(&args).map_err(|error| error.to_string())
        };
        assert!(check(&[]).unwrap_err().contains("never calls `elasticdl.init()`"));
        assert_eq!(check(&["--no_python"]), Ok(()));
        write("trainer/loop.py", "import elasticdl");
        assert_eq!(check(&[]), Ok(()));
    }

    #[test]
    fn arguments_are_quoted_for_a_shell() {
        assert_eq!(quoted("--lr=0.1"), "--lr=0.1");
        assert_eq!(quoted("it's $HOME"), r"'it'\''s $HOME'");
        assert_eq!(quoted(""), "''");
    }
}
