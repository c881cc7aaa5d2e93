// SPDX-License-Identifier: Apache-2.0
//! The flags that describe a job. Each one that is given overrides the field of the `JobSpec` that
//! has the same name.

use std::collections::BTreeMap;

use clap::Args;
use clap::builder::{BoolishValueParser, PossibleValuesParser};
use serde::Serialize;
use serde_json::{Map, Value};

mod cluster;

pub(crate) use cluster::{ClusterFlags, needs_cluster};

/// The job flags of the command line; each command takes the groups that it needs.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct JobFlags {
    #[serde(flatten)]
    pub(crate) common: CommonFlags,
    #[serde(flatten)]
    pub(crate) train: TrainFlags,
    #[serde(flatten)]
    pub(crate) predict: PredictFlags,
    #[serde(flatten)]
    pub(crate) cluster: ClusterFlags,
}

/// Flags of every kind of job.
#[derive(Args, Clone, Debug, Default, Serialize)]
#[command(rename_all = "snake_case")]
pub(crate) struct CommonFlags {
    /// Job name [default: derived from the model's name]
    #[arg(long, help_heading = "Job")]
    pub(crate) job_name: Option<String>,
    /// Random seed [default: 0]
    #[arg(long, help_heading = "Job")]
    seed: Option<u64>,
    /// Stop after this time: seconds, or a number with a unit, e.g. 10m or 2h [default: no limit]
    #[arg(long, help_heading = "Job", value_name = "TIME", value_parser = seconds)]
    max_time: Option<u64>,

    /// Built-in model, or a Python model as module.function, file or folder [default: mnist_cnn]
    #[arg(long, help_heading = "Model", value_name = "NAME")]
    pub(crate) model_def: Option<String>,
    /// Folder with Python models [default: the current folder]
    #[arg(long, help_heading = "Model", value_name = "DIR")]
    model_zoo: Option<String>,
    /// Command that runs a custom training loop; it must call elasticdl.init()
    #[arg(long, help_heading = "Python", value_name = "COMMAND")]
    job_command: Option<String>,
    /// Function of the Python module that turns records into a batch [default: feed]
    #[arg(long, help_heading = "Python", value_name = "NAME")]
    feed: Option<String>,
    /// Function that creates the optimizer [default: optimizer]
    #[arg(long, help_heading = "Python", value_name = "NAME")]
    optimizer_fn: Option<String>,
    /// Loss function [default: loss]
    #[arg(long, help_heading = "Python", value_name = "NAME")]
    loss: Option<String>,
    /// Function that returns the evaluation metrics [default: eval_metrics_fn]
    #[arg(long, help_heading = "Python", value_name = "NAME")]
    eval_metrics_fn: Option<String>,
    /// Function that returns the callbacks [default: callbacks]
    #[arg(long, help_heading = "Python", value_name = "NAME")]
    callbacks: Option<String>,
    /// Function that returns a reader for other data formats [default: custom_data_reader]
    #[arg(long, help_heading = "Python", value_name = "NAME")]
    custom_data_reader: Option<String>,
    /// Class that processes predictions [default: PredictionOutputsProcessor]
    #[arg(long, help_heading = "Python", value_name = "NAME")]
    prediction_outputs_processor: Option<String>,
    /// Model parameters, e.g. "lr=0.1;hidden=128,64"
    #[arg(long, help_heading = "Model", value_name = "K=V;…", value_parser = pairs)]
    model_params: Option<BTreeMap<String, String>>,
    /// Checkpoint to start from: a `version-N` folder, or a folder of them to use the newest
    #[arg(long, help_heading = "Model", value_name = "DIR")]
    pub(crate) checkpoint_dir_for_init: Option<String>,

    /// Data to evaluate on: a file, folder, glob or URL
    #[arg(long, help_heading = "Data", value_name = "DATA")]
    pub(crate) validation_data: Option<String>,
    /// Record encoding [default: tf_example]
    #[arg(long, help_heading = "Data", value_parser = PossibleValuesParser::new(["tf_example", "bytes"]))]
    codec_type: Option<String>,
    /// Options for the data reader, e.g. "delimiter=;"
    #[arg(long, help_heading = "Data", value_name = "K=V;…", value_parser = pairs)]
    data_reader_params: Option<BTreeMap<String, String>>,
    /// Records per batch [default: 64]
    #[arg(long, help_heading = "Data", value_name = "N")]
    pub(crate) minibatch_size: Option<u32>,
    /// Batches assigned to a worker at a time [default: 8]
    #[arg(long, help_heading = "Data", value_name = "N")]
    pub(crate) num_minibatches_per_task: Option<u32>,

    /// Number of workers [default: 2]
    #[arg(long, help_heading = "Processes", value_name = "N")]
    pub(crate) num_workers: Option<u32>,
    /// Number of parameter servers; 0 means AllReduce [default: 1]
    #[arg(long, help_heading = "Processes", value_name = "N")]
    num_ps_pods: Option<u32>,
    /// ParameterServerStrategy, AllreduceStrategy, HybridStrategy (embedding tables on parameter
    /// servers, everything else by AllReduce) or Local (one process) [default:
    /// ParameterServerStrategy]
    #[arg(long, help_heading = "Processes", value_name = "STRATEGY",
        value_parser = PossibleValuesParser::new(["ParameterServerStrategy", "AllreduceStrategy", "HybridStrategy", "Local"]),
        hide_possible_values = true)]
    distribution_strategy: Option<String>,
    /// Number of partitions of the parameters, fixed for the job's lifetime [default: 32]
    #[arg(long, help_heading = "Processes", value_name = "N")]
    partitions: Option<u32>,
    /// Port of the master; 0 picks a free port [default: 0; 50001 for `elasticdl master`]
    #[arg(long, help_heading = "Processes")]
    pub(crate) port: Option<u16>,
    /// Port of the job's web page, /metrics and /healthz; 0 picks a free port [default: 0]
    #[arg(long, help_heading = "Processes", value_name = "PORT")]
    http_port: Option<u16>,
    /// Send traces to this OpenTelemetry collector, e.g. http://host:4317
    #[arg(long, help_heading = "Processes", value_name = "URL")]
    otlp_endpoint: Option<String>,
    /// Allow fault injection from the web page and `elasticdl chaos` [default: false]
    #[arg(long, help_heading = "Processes", num_args = 0..=1, default_missing_value = "true",
        require_equals = true, value_name = "true|false")]
    allow_chaos: Option<bool>,
    /// Reassign a worker's task after this time, in seconds [default: 300]
    #[arg(long, help_heading = "Processes", value_name = "SECS")]
    task_timeout_secs: Option<u32>,
    /// Replace a process that sends no heartbeat for this time, in seconds [default: 10]
    #[arg(long, help_heading = "Processes", value_name = "SECS", value_parser = finite)]
    heartbeat_timeout_secs: Option<f64>,
    /// Crashes without progress to tolerate before the job fails; preemptions and evictions do not
    /// count [default: 3]
    #[arg(long, help_heading = "Processes", value_name = "N")]
    relaunch_on_worker_failure: Option<u32>,
    /// Failures of the same batch after which the job fails [default: 3]
    #[arg(long, help_heading = "Processes", value_name = "N")]
    max_batch_failures: Option<u32>,

    /// Folder for the trained model or the predictions [default: `output` in the job folder]
    #[arg(long, help_heading = "Results", value_name = "DIR")]
    pub(crate) output: Option<String>,
    /// Log level: DEBUG, INFO, WARNING or ERROR [default: INFO]
    #[arg(long, help_heading = "Results", value_name = "LEVEL", value_parser = level)]
    pub(crate) log_level: Option<String>,
}

/// Flags of training alone.
#[derive(Args, Clone, Debug, Default, Serialize)]
#[command(rename_all = "snake_case")]
pub(crate) struct TrainFlags {
    /// Minimum number of workers; AllReduce waits while there are fewer [default: 1]
    #[arg(long, help_heading = "AllReduce", value_name = "N")]
    min_workers: Option<u32>,
    /// Maximum number of workers that `elasticdl scale` can set [default: lanes]
    #[arg(long, help_heading = "AllReduce", value_name = "N")]
    max_workers: Option<u32>,
    /// Micro-batches per step, fixed for the job's lifetime [default: max_workers, or num_workers]
    #[arg(long, help_heading = "AllReduce", value_name = "N")]
    lanes: Option<u32>,
    /// Compute threads per worker, fixed for the job's lifetime [default: 1]
    #[arg(long, help_heading = "AllReduce", value_name = "N")]
    threads_per_worker: Option<u32>,
    /// What to do with a worker whose results differ bitwise: strict rejects it, report admits it
    /// and reports the difference [default: strict]
    #[arg(long, help_heading = "AllReduce", value_parser = PossibleValuesParser::new(["strict", "report"]), hide_possible_values = true)]
    same_bits: Option<String>,
    /// Assign fewer lanes to slow workers; results stay bit-identical [default: false]
    #[arg(long, help_heading = "AllReduce", value_name = "BOOL", num_args = 0..=1, require_equals = true,
        default_missing_value = "true", value_parser = BoolishValueParser::new())]
    lane_balance: Option<bool>,
    /// Data type of gradients sent between workers, fixed for the job's lifetime: f32, or bf16 for
    /// half the traffic [default: f32]
    #[arg(long, help_heading = "AllReduce", value_parser = PossibleValuesParser::new(["f32", "bf16"]), hide_possible_values = true)]
    allreduce_dtype: Option<String>,

    /// Override the model's optimizer: sgd, momentum, nesterov, adam, amsgrad, adamw, …
    #[arg(long, help_heading = "Model", value_name = "NAME")]
    optimizer: Option<String>,
    /// Override the model's learning rate
    #[arg(long, help_heading = "Model", value_name = "RATE", value_parser = finite)]
    learning_rate: Option<f64>,
    /// Learning rate schedule: constant, steps:1000,2000:0.1, exponential:1000:0.9,
    /// cosine:100:10000 or linear:100:10000
    #[arg(long, help_heading = "Model", value_name = "SCHEDULE")]
    learning_rate_schedule: Option<String>,
    /// Optimizer weight decay
    #[arg(long, help_heading = "Model", value_name = "FACTOR", value_parser = finite)]
    weight_decay: Option<f64>,
    /// Clip the gradient of a batch to this norm [default: no clipping]
    #[arg(long, help_heading = "Model", value_name = "NORM", value_parser = finite)]
    clip_norm: Option<f64>,

    /// Data to train on: a file, folder, glob or URL
    #[arg(long, help_heading = "Data", value_name = "DATA")]
    pub(crate) training_data: Option<String>,
    /// Number of epochs; 0 trains until the job is stopped [default: 1]
    #[arg(long, help_heading = "Data", value_name = "N")]
    num_epochs: Option<u32>,
    /// Shuffle the records in every epoch [default: true]
    #[arg(long, help_heading = "Data", value_name = "BOOL", num_args = 0..=1, require_equals = true,
        default_missing_value = "true", value_parser = BoolishValueParser::new())]
    shuffle: Option<bool>,
    /// Stop at this step; 0 means no limit [default: 0]
    #[arg(long, help_heading = "Data", value_name = "N")]
    max_step: Option<u64>,

    /// Apply gradients asynchronously [default: true, unless grads_to_wait or
    /// sync_version_tolerance is set]
    #[arg(long, help_heading = "Gradients", value_name = "BOOL", num_args = 0..=1, require_equals = true,
        default_missing_value = "true", value_parser = BoolishValueParser::new())]
    use_async: Option<bool>,
    /// Train synchronously, applying the gradients of N batches together
    #[arg(long, help_heading = "Gradients", value_name = "N")]
    grads_to_wait: Option<u32>,
    /// Maximum staleness, in steps; faster workers wait; 0 disables [default: 0]
    #[arg(long, help_heading = "Gradients", value_name = "N")]
    sync_version_tolerance: Option<u32>,
    /// Divide the learning rate of a stale gradient by its staleness [default: false]
    #[arg(long, help_heading = "Gradients", value_name = "BOOL", num_args = 0..=1, require_equals = true,
        default_missing_value = "true", value_parser = BoolishValueParser::new())]
    lr_staleness_modulation: Option<bool>,
    /// With asynchronous training, pull dense parameters every N batches [default: 1]
    #[arg(long, help_heading = "Gradients", value_name = "N")]
    get_model_steps: Option<u32>,

    /// Evaluate every N steps; 0 disables [default: 0]
    #[arg(long, help_heading = "Evaluation", value_name = "N")]
    evaluation_steps: Option<u32>,
    /// Evaluate every N seconds; 0 disables [default: 0]
    #[arg(long, help_heading = "Evaluation", value_name = "SECS")]
    evaluation_secs: Option<u32>,
    /// Evaluate after each epoch [default: true]
    #[arg(long, help_heading = "Evaluation", value_name = "BOOL", num_args = 0..=1, require_equals = true,
        default_missing_value = "true", value_parser = BoolishValueParser::new())]
    evaluation_epochs: Option<bool>,
    /// Stop after N evaluations without improvement; 0 disables [default: 0]
    #[arg(long, help_heading = "Evaluation", value_name = "N")]
    early_stop_patience: Option<u32>,

    /// Folder for checkpoints [default: `checkpoints` in the job folder]
    #[arg(long, help_heading = "Checkpoints", value_name = "DIR")]
    checkpoint_dir: Option<String>,
    /// Save a checkpoint every N steps; 0 disables [default: 0]
    #[arg(long, help_heading = "Checkpoints", value_name = "N")]
    checkpoint_steps: Option<u32>,
    /// Save a checkpoint every N seconds; 0 disables [default: 30]
    #[arg(long, help_heading = "Checkpoints", value_name = "SECS")]
    checkpoint_secs: Option<u32>,
    /// Number of checkpoints to keep; 0 keeps all [default: 3]
    #[arg(long, help_heading = "Checkpoints", value_name = "N")]
    keep_checkpoint_max: Option<u32>,

    /// Log each worker's loss every N steps [default: 100]
    #[arg(long, help_heading = "Results", value_name = "N")]
    log_loss_steps: Option<u32>,
    /// Write TensorBoard event files to this folder
    #[arg(long, help_heading = "Results", value_name = "DIR")]
    tensorboard_dir: Option<String>,
}

/// Flags of prediction alone.
#[derive(Args, Clone, Debug, Default, Serialize)]
#[command(rename_all = "snake_case")]
pub(crate) struct PredictFlags {
    /// Data to predict on: a file, folder, glob or URL
    #[arg(long, help_heading = "Data", value_name = "DATA")]
    pub(crate) prediction_data: Option<String>,
}

impl JobFlags {
    /// The flags that were given, by name.
    pub(crate) fn given(&self) -> Map<String, Value> {
        let value = serde_json::to_value(self).expect("flags are plain numbers and words");
        let Value::Object(mut given) = value else { unreachable!("flags are a struct") };
        given.retain(|_, value| !value.is_null());
        given
    }
}

/// How often something happens: a number from 0 up.
pub(crate) fn rate(text: &str) -> Result<f64, String> {
    let rate = text.parse().ok().filter(|rate: &f64| (0.0..=1e6).contains(rate));
    rate.ok_or_else(|| "expected a number from 0 to 1000000".into())
}

/// `lr=0.1;hidden=128,64` or `lr=0.1,batch_norm=true`: a piece without `=` belongs to the value
/// before it.
pub(crate) fn pairs(text: &str) -> Result<BTreeMap<String, String>, String> {
    let mut pairs = BTreeMap::new();
    for part in text.split(';').filter(|part| !part.trim().is_empty()) {
        let mut last: Option<String> = None;
        for piece in part.split(',') {
            match (piece.split_once('='), &last) {
                (Some((name, value)), _) if !name.trim().is_empty() => {
                    pairs.insert(name.trim().to_owned(), value.trim().to_owned());
                    last = Some(name.trim().to_owned());
                }
                (None, Some(name)) => {
                    let value = pairs.entry(name.clone()).or_default();
                    value.push(',');
                    value.push_str(piece);
                }
                (Some(_) | None, _) => return Err(format!("expected name=value, got `{piece}`")),
            }
        }
    }
    Ok(pairs)
}

/// A number that a job description can hold: neither infinite nor NaN.
pub(crate) fn finite(text: &str) -> Result<f64, String> {
    let number: f64 = text.parse().map_err(|_| "expected a number".to_owned())?;
    if number.is_finite() { Ok(number) } else { Err("expected a finite number".into()) }
}

/// Seconds, or a number with s, m, h or d.
pub(crate) fn seconds(text: &str) -> Result<u64, String> {
    let (number, unit) = match text.char_indices().find(|(_, c)| !c.is_ascii_digit()) {
        Some((at, _)) => text.split_at(at),
        None => (text, "s"),
    };
    let factor = match unit {
        "s" => 1,
        "m" | "min" => 60,
        "h" => 3600,
        "d" => 86_400,
        _ => return Err("expected seconds, or a number with unit s, m, h or d, e.g. 10m".into()),
    };
    let number: u64 = number.parse().map_err(|_| "expected a number".to_owned())?;
    number.checked_mul(factor).ok_or_else(|| "the time is too long".to_owned())
}

pub(crate) fn level(text: &str) -> Result<String, String> {
    let level = text.to_ascii_uppercase();
    match level.as_str() {
        "TRACE" | "DEBUG" | "INFO" | "WARNING" | "ERROR" | "CRITICAL" => Ok(level),
        "WARN" => Ok("WARNING".into()),
        _ => Err("expected DEBUG, INFO, WARNING or ERROR".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_keep_commas_inside_a_value() {
        let parsed = pairs("hidden=128,64,lr=0.1; name = x=y ;").unwrap();
        let expected = [("hidden", "128,64"), ("lr", "0.1"), ("name", "x=y")];
        assert_eq!(parsed, expected.map(|(k, v)| (k.to_owned(), v.to_owned())).into());
        assert_eq!(pairs("").unwrap(), BTreeMap::new());
        assert_eq!(pairs("lr").unwrap_err(), "expected name=value, got `lr`");
    }

    #[test]
    fn times_take_a_unit() {
        assert_eq!(seconds("90"), Ok(90));
        assert_eq!(seconds("2h"), Ok(7200));
        assert!(seconds("2 weeks").is_err());
        assert!(seconds("99999999999999999d").is_err());
    }

    #[test]
    fn only_what_is_given_is_named() {
        let mut flags = JobFlags::default();
        assert!(flags.given().is_empty());
        flags.train.use_async = Some(false);
        flags.common.seed = Some(u64::MAX);
        let given = flags.given();
        assert_eq!(given["use_async"], Value::Bool(false));
        assert_eq!(given["seed"], Value::from(u64::MAX));
        assert_eq!(given.len(), 2);
    }

    #[test]
    fn every_flag_is_a_word_of_the_job_spec() {
        use clap::Args as _;
        let command = CommonFlags::augment_args(clap::Command::new("x"));
        let command = PredictFlags::augment_args(TrainFlags::augment_args(command));
        let spec = serde_json::to_value(edl_core::spec::JobSpec::default()).unwrap();
        for arg in command.get_arguments() {
            let name = arg.get_long().unwrap();
            assert!(spec.get(name).is_some(), "--{name} is not a field of the spec");
        }
    }
}
