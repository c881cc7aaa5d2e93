// SPDX-License-Identifier: Apache-2.0
//! The job description from its three sources: defaults, the file of `--config`, the flags.
//! Later sources override earlier ones, field by field.

use std::io::Read as _;
use std::path::Path;

use anyhow::Context as _;
use edl_core::optimizer;
use edl_core::spec::{self, JobSpec, JobType};
use edl_kube::yaml;
use serde_json::Value;

use crate::cli::RunFlags;
use crate::exit::refuse;
use crate::flags::Given;
use crate::models;

/// The path that stands for standard input.
const STDIN: &str = "-";

/// The job that the user asks for. The file of `--config` is read once, so it can be a pipe.
pub(crate) struct JobRequest {
    pub(crate) run: RunFlags,
    /// The fields that flags set.
    pub(crate) flags: Given,
    /// The fields that the file or the flags set; flags override the file.
    pub(crate) given: Given,
    /// The text of the file.
    pub(crate) file: Option<String>,
}

impl JobRequest {
    pub(crate) fn read(run: RunFlags, flags: Given) -> anyhow::Result<Self> {
        let file = run.config.as_deref().map(text).transpose()?;
        let mut given = match (&run.config, &file) {
            (Some(path), Some(text)) => {
                parse(text).map_err(|problem| refuse(format!("{}: {problem}", shown(path))))?
            }
            (None, _) | (_, None) => Given::new(),
        };
        overlay(&mut given, flags.clone());
        if let Some(records) = run.records_per_task {
            let minibatch_size = match given.get("minibatch_size").and_then(Value::as_u64) {
                Some(size) => size,
                None => u64::from(JobSpec::default().minibatch_size),
            };
            let batches = u64::from(records).div_ceil(minibatch_size.max(1));
            given.insert("num_minibatches_per_task".into(), batches.into());
        }
        Ok(Self { run, flags, given, file })
    }
}

/// The job that `given` describes on top of `base`.
pub(crate) fn apply(base: &JobSpec, given: Given) -> anyhow::Result<JobSpec> {
    base.clone().with(given).map_err(|invalid| refuse(invalid.0))
}

/// The new job that `given` describes; `kind` is the command's.
pub(crate) fn job(kind: JobType, given: Given) -> anyhow::Result<JobSpec> {
    let mut spec = apply(&JobSpec { job_type: kind, ..JobSpec::default() }, given)?;
    spec.job_name = job_name(&spec.job_name);
    spec.settle_strategy();
    settle_optimizer(&mut spec);
    if spec.job_type != kind {
        let name = spec.job_type.name();
        return Err(refuse(format!("the file has job type `{name}`; use `elasticdl {name}`")));
    }
    Ok(spec)
}

/// The name of a job, which is also the name of its pods: they cannot have `_`.
pub(crate) fn job_name(text: &str) -> String {
    text.replace('_', "-")
}

/// ElasticDL's `--optimizer` named a function of the Python module, ours an optimizer.
fn settle_optimizer(spec: &mut JobSpec) {
    let is_function = |name: &String| !optimizer::NAMES.contains(&name.as_str());
    if models::is_python(spec) && spec.optimizer.as_ref().is_some_and(is_function) {
        spec.optimizer_fn = spec.optimizer.take().unwrap_or_default();
    }
}

/// The job as YAML, in the form that `--config` reads.
pub(crate) fn to_yaml(spec: &JobSpec) -> anyhow::Result<String> {
    yaml::write(spec).context("cannot write the job as YAML")
}

fn shown(path: &Path) -> String {
    if path == Path::new(STDIN) { "standard input".into() } else { format!("`{}`", path.display()) }
}

fn text(path: &Path) -> anyhow::Result<String> {
    let mut text = String::new();
    let read = if path == Path::new(STDIN) {
        std::io::stdin().read_to_string(&mut text).map(|_| text)
    } else {
        std::fs::read_to_string(path)
    };
    read.map_err(|error| {
        let shown = shown(path);
        refuse(format!("cannot read {shown}: {error}; create a template with `elasticdl init`"))
    })
}

fn parse(text: &str) -> Result<Given, String> {
    match yaml::read_value(text).map_err(|error| error.to_string())? {
        Value::Object(entries) => {
            let mut given = Given::new();
            for (name, value) in entries {
                let place =
                    line_of(text, &name).map_or_else(String::new, |n| format!("line {n}: "));
                let entry = Given::from_iter([(name, value)]);
                given.extend(spec::read(entry).map_err(|invalid| {
                    // A key of the file is no flag.
                    format!("{place}{}", invalid.0.trim_start_matches("--"))
                })?);
            }
            Ok(given)
        }
        Value::Null => Ok(Given::new()),
        Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Array(_) => {
            Err("expected lines in the form `name: value`".into())
        }
    }
}

/// The line that a key of the file is on, from 1.
fn line_of(text: &str, name: &str) -> Option<usize> {
    let is_it = |line: &str| {
        let key = line.trim_start().trim_start_matches(['"', '\'', '{']);
        let rest = key.trim_start().strip_prefix(name);
        rest.is_some_and(|rest| rest.trim_start_matches(['"', '\'']).trim_start().starts_with(':'))
    };
    text.lines().position(is_it).map(|at| at + 1)
}

/// Sets the fields of `over`; in a map, only the entries that it names.
fn overlay(base: &mut Given, over: Given) {
    for (name, value) in over {
        match (base.get_mut(&name), value) {
            (Some(Value::Object(entries)), Value::Object(new)) => entries.extend(new),
            (_, value) => {
                base.insert(name, value);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;
    use expect_test::expect;

    use super::*;
    use crate::cli::{Cli, Command};

    fn spec(args: &[&str]) -> anyhow::Result<JobSpec> {
        let argv = ["elasticdl", "train"].iter().chain(args).map(std::ffi::OsString::from);
        let argv = crate::argv::normalise(argv).unwrap();
        let Command::Train(args) = Cli::try_parse_from(argv.args).unwrap().command else {
            panic!()
        };
        job(JobType::Train, JobRequest::read(args.run, args.job.0)?.given)
    }

    fn with_file(text: &str, args: &[&str]) -> anyhow::Result<JobSpec> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("job.yaml");
        std::fs::write(&path, text).unwrap();
        let config = format!("--config={}", path.display());
        spec(&[&[config.as_str()], args].concat())
    }

    #[test]
    fn no_flags_are_the_default_job() {
        assert_eq!(spec(&[]).unwrap(), JobSpec::default());
    }

    #[test]
    fn a_job_name_has_dashes_for_underscores() {
        assert_eq!(spec(&["--job_name=test_mnist"]).unwrap().job_name, "test-mnist");
    }

    #[test]
    fn a_printed_job_read_back_is_the_same_job() {
        let given = spec(&[
            "--num-workers=4",
            "--model_params=lr=0.1;hidden=128,64",
            "--seed=18446744073709551615",
            "--shuffle=false",
            "--use_async",
            "--clip_norm=0.1",
            "--heartbeat_timeout_secs=2.5",
        ]);
        let given = given.unwrap();
        let yaml = to_yaml(&given).unwrap();
        assert_eq!(with_file(&yaml, &[]).unwrap(), given);
    }

    #[test]
    fn flags_win_over_the_file_and_replace_only_the_params_they_name() {
        let file = "num_workers: 4\nnum_epochs: 3\nmodel_params: {lr: 0.1, dropout: 0.5}\n";
        let spec = with_file(file, &["--num_workers=1", "--model_params=lr=0.2"]).unwrap();
        assert_eq!((spec.num_workers, spec.num_epochs), (1, 3));
        assert_eq!(spec.model_params["lr"], "0.2");
        assert_eq!(spec.model_params["dropout"], "0.5");
    }

    #[test]
    fn a_bad_file_is_refused_with_a_sentence() {
        let error = |text| with_file(text, &[]).unwrap_err().to_string();
        let unknown = error("num_worker: 4\n");
        assert!(
            unknown.ends_with("line 1: unknown field `num_worker`; did you mean `num_workers`?")
        );
        assert!(error("- 1\n").ends_with("expected lines in the form `name: value`"));
        let many = error("# Two of them\njob_name: x\n\"num_workers\": many\n");
        assert!(many.contains("job.yaml`: line 3: num_workers: expected an integer"), "{many}");
        let time = "max_time: 10m\n";
        assert_eq!(
            with_file(time, &[]).unwrap().max_time,
            spec(&["--max_time=10m"]).unwrap().max_time
        );
        assert!(error("job_type: predict\n").contains("use `elasticdl predict`"));
        let missing = spec(&["--config=no/such/file"]).unwrap_err().to_string();
        assert!(missing.contains("`no/such/file`") && missing.contains("elasticdl init"));
    }

    #[test]
    fn records_per_task_become_whole_batches() {
        let spec = spec(&["--records_per_task=100", "--minibatch_size=30"]).unwrap();
        assert_eq!(spec.num_minibatches_per_task, 4);
    }

    #[test]
    fn the_default_job_prints_as_this_yaml() {
        let yaml = to_yaml(&spec(&["--job_name=x", "--model_params=lr=0.1"]).unwrap()).unwrap();
        let head: Vec<_> = yaml.lines().take(8).collect();
        expect![[r#"
            job_name: x
            job_type: train
            seed: 0
            model_def: mnist_cnn
            model_zoo: ""
            job_command: ""
            model_params:
              lr: "0.1""#]]
        .assert_eq(&head.join("\n"));
    }
}
