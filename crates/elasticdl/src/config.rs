// SPDX-License-Identifier: Apache-2.0
//! The job description from its three sources: defaults, the file of `--config`, the flags.
//! The later wins, word by word.

use std::path::Path;

use anyhow::Context as _;
use edl_core::optimizer;
use edl_core::spec::{JobSpec, JobType};
use edl_kube::yaml;
use serde_json::{Map, Value};

use crate::cli::RunFlags;
use crate::exit::refuse;
use crate::flags::JobFlags;
use crate::models;
use crate::say::nearest;

/// Words that are lists of words themselves; a flag replaces only the entries that it names.
const MAPS: [&str; 2] = ["model_params", "data_reader_params"];

/// Everything that the user said about a job, by name: the file's words under the flags'.
pub(crate) fn given(run: &RunFlags, flags: &JobFlags) -> anyhow::Result<Map<String, Value>> {
    let mut given = match &run.config {
        Some(path) => read(path)?,
        None => Map::new(),
    };
    overlay(&mut given, flags.given());
    if let Some(records) = run.records_per_task {
        let minibatch_size = match given.get("minibatch_size").and_then(Value::as_u64) {
            Some(size) => size,
            None => u64::from(JobSpec::default().minibatch_size),
        };
        let batches = u64::from(records).div_ceil(minibatch_size.max(1));
        given.insert("num_minibatches_per_task".into(), batches.into());
    }
    Ok(given)
}

/// The job that `given` describes on top of `base`.
pub(crate) fn apply(base: &JobSpec, given: Map<String, Value>) -> anyhow::Result<JobSpec> {
    let value = serde_json::to_value(base).context("cannot write the job description")?;
    let Value::Object(mut words) = value else { unreachable!("a job spec is a struct") };
    overlay(&mut words, given);
    serde_json::from_value(Value::Object(words))
        .map_err(|error| refuse(format!("invalid job description: {error}")))
}

/// The new job that `given` describes; `kind` is the command's.
pub(crate) fn job(kind: JobType, given: Map<String, Value>) -> anyhow::Result<JobSpec> {
    let mut spec = apply(&JobSpec { job_type: kind, ..JobSpec::default() }, given)?;
    spec.settle_strategy();
    settle_optimizer(&mut spec);
    if spec.job_type != kind {
        let word = kind_word(spec.job_type);
        return Err(refuse(format!("the file has job type `{word}`; use `elasticdl {word}`")));
    }
    Ok(spec)
}

/// ElasticDL's `--optimizer` named a function of the Python module, ours an optimizer.
fn settle_optimizer(spec: &mut JobSpec) {
    let is_function = |name: &String| !optimizer::NAMES.contains(&name.as_str());
    if models::is_python(spec) && spec.optimizer.as_ref().is_some_and(is_function) {
        spec.optimizer_fn = spec.optimizer.take().unwrap_or_default();
    }
}

/// The command that runs jobs of this type.
pub(crate) fn kind_word(kind: JobType) -> &'static str {
    match kind {
        JobType::Train => "train",
        JobType::Evaluate => "evaluate",
        JobType::Predict => "predict",
    }
}

/// The job as YAML, in the form that `--config` reads.
pub(crate) fn to_yaml(spec: &JobSpec) -> anyhow::Result<String> {
    yaml::write_job(spec).context("cannot write the job as YAML")
}

fn read(path: &Path) -> anyhow::Result<Map<String, Value>> {
    let shown = path.display();
    let text = std::fs::read_to_string(path).map_err(|error| {
        refuse(format!("cannot read `{shown}`: {error}; create a template with `elasticdl init`"))
    })?;
    parse(&text).map_err(|problem| refuse(format!("`{shown}`: {problem}")))
}

fn parse(text: &str) -> Result<Map<String, Value>, String> {
    let value = yaml::read_value(text).map_err(|error| error.to_string())?;
    let mut words = match value {
        Value::Object(words) => words,
        Value::Null => Map::new(),
        Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Array(_) => {
            return Err("expected lines in the form `name: value`".into());
        }
    };
    let known = serde_json::to_value(JobSpec::default()).map_err(|error| error.to_string())?;
    let known: Vec<&str> =
        known.as_object().into_iter().flatten().map(|(k, _)| k.as_str()).collect();
    for word in words.keys() {
        if !known.contains(&word.as_str()) {
            return Err(match nearest(word, known.iter().copied()) {
                Some(near) => format!("unknown field `{word}`; did you mean `{near}`?"),
                None => format!("unknown field `{word}`; `elasticdl init` lists all fields"),
            });
        }
    }
    for map in MAPS {
        if let Some(Value::Object(entries)) = words.get_mut(map) {
            for entry in entries.values_mut() {
                *entry = Value::String(plain(entry));
            }
        }
    }
    Ok(words)
}

/// `lr: 0.1` is a word for the model, like `lr: "0.1"`.
fn plain(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Array(items) => items.iter().map(plain).collect::<Vec<_>>().join(","),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::Object(_) => value.to_string(),
    }
}

fn overlay(base: &mut Map<String, Value>, over: Map<String, Value>) {
    for (name, value) in over {
        match (base.get_mut(&name), value) {
            (Some(Value::Object(entries)), Value::Object(new)) if MAPS.contains(&name.as_str()) => {
                entries.extend(new);
            }
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

    fn train(args: &[&str]) -> (RunFlags, JobFlags) {
        let argv = ["elasticdl", "train"].iter().chain(args).map(std::ffi::OsString::from);
        let argv = crate::argv::normalise(argv).unwrap();
        let Command::Train(args) = Cli::try_parse_from(argv.args).unwrap().command else {
            panic!()
        };
        args.split()
    }

    fn spec(args: &[&str]) -> anyhow::Result<JobSpec> {
        let (run, flags) = train(args);
        job(JobType::Train, given(&run, &flags)?)
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
        assert!(unknown.ends_with("unknown field `num_worker`; did you mean `num_workers`?"));
        assert!(error("- 1\n").ends_with("expected lines in the form `name: value`"));
        assert!(error("num_workers: many\n").contains("invalid job description"));
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
            model_zoo: ""
            model_def: mnist_cnn
            job_command: ""
            model_params:
              lr: "0.1"
            optimizer: null"#]]
        .assert_eq(&head.join("\n"));
    }
}
