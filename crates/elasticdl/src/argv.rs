// SPDX-License-Identifier: Apache-2.0
//! The command line before clap: one spelling of every flag, old names, and flags of the original
//! ElasticDL that have no effect.

use std::ffi::OsString;

use edl_core::spec::{FIELDS, Field, field};

use crate::exit::refuse;
use crate::flags::is_for_cluster;

/// The command line to parse, and notes for the user.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Argv {
    pub(crate) args: Vec<OsString>,
    pub(crate) notes: Vec<String>,
}

const RECORDS_PER_TASK: &str = "records_per_task";
const FORCE_KUBE_CONFIG: &str = "force_use_kube_config_file";

/// Commands that describe or join a job and accept the flags of the original ElasticDL.
const JOB_COMMANDS: [&str; 6] = ["train", "evaluate", "predict", "master", "ps", "worker"];

/// Flags that are refused, and why.
const REFUSED: [(&str, &str); 1] = [(
    "need_tf_config",
    "configures TensorFlow's own distribution, which elasticdl replaces; remove the flag",
)];

/// Flags that change nothing, and why; `true` takes a value.
const IGNORED: [(&str, &str, bool); 8] = [
    ("extra_pypi_index", "no packages are installed", true),
    ("aux_params", "its settings are now separate flags", true),
    ("log_file_path", "logs are in the job's folder; see `elasticdl logs`", true),
    ("need_elasticdl_job_service", "always enabled", false),
    ("need_task_manager", "always enabled", false),
    ("need_pod_manager", "always enabled", false),
    ("task_fault_tolerance", "always enabled", false),
    ("relaunch_timeout_worker", "always enabled; see --task_timeout_secs", false),
];

/// Rewrites the command line into the form that the parser expects.
pub(crate) fn normalise(args: impl IntoIterator<Item = OsString>) -> anyhow::Result<Argv> {
    let mut argv = Argv::default();
    let mut args = args.into_iter().peekable();
    argv.args.extend(args.next());
    let mut command = None;
    while let Some(arg) = args.next() {
        let Some((name, value)) = arg.to_str().and_then(split_flag) else {
            if arg == "--" {
                argv.args.push(arg);
                break;
            }
            if command.as_ref().is_some_and(|command| command == "run") {
                // The script; the rest are its arguments.
                argv.args.push(arg);
                break;
            }
            command.get_or_insert_with(|| arg.clone());
            argv.args.push(arg);
            continue;
        };
        let is_job = command.as_ref().is_some_and(|c| JOB_COMMANDS.iter().any(|job| c == job));
        let is_part = command.as_ref().is_some_and(|c| c == "ps" || c == "worker");
        if is_job && let Some((why, takes_value)) = ignored(&name, is_part)? {
            argv.notes.push(format!("--{name} is ignored: {why}"));
            let next_is_value = |next: &OsString| !next.to_string_lossy().starts_with('-');
            if takes_value && value.is_none() {
                args.next_if(next_is_value);
            }
            continue;
        }
        let name = if is_job { current_name(name, &mut argv.notes) } else { name };
        argv.args.push(value.map_or(format!("--{name}"), |v| format!("--{name}={v}")).into());
    }
    argv.args.extend(args);
    Ok(argv)
}

/// `--num-workers=2` becomes `num_workers` and `2`.
fn split_flag(arg: &str) -> Option<(String, Option<String>)> {
    let flag = arg.strip_prefix("--").filter(|flag| !flag.is_empty())?;
    let (name, value) = match flag.split_once('=') {
        Some((name, value)) => (name, Some(value.to_owned())),
        None => (flag, None),
    };
    Some((name.replace('-', "_"), value))
}

fn ignored(name: &str, is_part: bool) -> anyhow::Result<Option<(&'static str, bool)>> {
    if let Some((_, why)) = REFUSED.iter().find(|(refused, _)| *refused == name) {
        return Err(refuse(format!("--{name} {why}")));
    }
    let is_of_pods = |field: &&Field| is_for_cluster(field) && !field.needs_cluster;
    if is_part && (name == FORCE_KUBE_CONFIG || field(name).ok().filter(is_of_pods).is_some()) {
        return Ok(Some(("manually started processes have no pod", name != FORCE_KUBE_CONFIG)));
    }
    if is_part && name == RECORDS_PER_TASK {
        return Ok(Some(("the job decides", true)));
    }
    let found = IGNORED.iter().find(|(ignored, ..)| *ignored == name);
    Ok(found.map(|(_, why, takes_value)| (*why, *takes_value)))
}

fn current_name(name: String, notes: &mut Vec<String>) -> String {
    let mut deprecated = |new: &str| notes.push(format!("--{name} is deprecated; use --{new}"));
    // It counts records instead of batches, so it stays a separate flag.
    if name == RECORDS_PER_TASK {
        deprecated("num_minibatches_per_task");
        return name;
    }
    match FIELDS.iter().find(|field| field.old_name == Some(name.as_str())) {
        Some(field) => {
            deprecated(field.name);
            field.name.into()
        }
        None => name,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(line: &str) -> (String, Vec<String>) {
        let argv = normalise(line.split(' ').map(OsString::from)).unwrap();
        let args: Vec<_> = argv.args.iter().map(|arg| arg.to_str().unwrap()).collect();
        (args.join(" "), argv.notes)
    }

    #[test]
    fn kebab_case_becomes_snake_case_in_names_but_not_in_values() {
        let (args, notes) = check("elasticdl train --num-workers=2 --job-name=my-job -f a-b");
        assert_eq!(args, "elasticdl train --num_workers=2 --job_name=my-job -f a-b");
        assert_eq!(notes, [""; 0]);
        assert_eq!(check("elasticdl x -- --a-b").0, "elasticdl x -- --a-b");
    }

    #[test]
    fn old_names_work_and_are_called_deprecated() {
        let line = "elasticdl master --training_data_dir=a --model-file b --records_per_task=100";
        let (args, notes) = check(line);
        assert_eq!(args, "elasticdl master --training_data=a --model_def b --records_per_task=100");
        assert_eq!(
            notes,
            [
                "--training_data_dir is deprecated; use --training_data",
                "--model_file is deprecated; use --model_def",
                "--records_per_task is deprecated; use --num_minibatches_per_task"
            ]
        );
    }

    #[test]
    fn an_ignored_flag_is_removed_with_its_value_and_leaves_a_note() {
        let (args, notes) =
            check("elasticdl train --aux_params a=b --task_fault_tolerance --seed=1");
        assert_eq!(args, "elasticdl train --seed=1");
        assert_eq!(notes.len(), 2);
        let (args, notes) = check("elasticdl worker --restart_policy Never --worker_id=1");
        assert_eq!((args.as_str(), notes.len()), ("elasticdl worker --worker_id=1", 1));
        assert_eq!(check("elasticdl list --namespace=x").0, "elasticdl list --namespace=x");
    }

    #[test]
    fn a_flag_that_has_no_counterpart_here_is_refused_by_name() {
        let args = ["elasticdl", "train", "--need-tf-config=x"].map(OsString::from);
        let error = normalise(args).unwrap_err().to_string();
        assert!(error.starts_with("--need_tf_config configures TensorFlow's"), "{error}");
    }
}
