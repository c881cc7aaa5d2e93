// SPDX-License-Identifier: Apache-2.0
//! The flags that describe a job. Each one that is given overrides one word of the `JobSpec`,
//! which has the same name.

use std::collections::BTreeMap;

use clap::Args;
use clap::builder::{BoolishValueParser, PossibleValuesParser};
use serde::Serialize;
use serde_json::{Map, Value};

mod cluster;

pub(crate) use cluster::{ClusterFlags, needs_cluster};

/// What was said on the command line about a job; each command takes the groups that it needs.
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
    /// Name of the job [default: made from the model's]
    #[arg(long, help_heading = "Job")]
    pub(crate) job_name: Option<String>,
    /// Decides everything that is random
    #[arg(long, help_heading = "Job")]
    seed: Option<u64>,
    /// Stop after this time, e.g. 90, 10m or 2h [default: never]
    #[arg(long, help_heading = "Job", value_name = "TIME", value_parser = seconds)]
    max_time: Option<u64>,

    /// Built-in model, or module.function, file or folder of a Python one [default: mnist_cnn]
    #[arg(long, help_heading = "Model", value_name = "NAME")]
    pub(crate) model_def: Option<String>,
    /// Folder of Python models [default: the current one]
    #[arg(long, help_heading = "Model", value_name = "DIR")]
    model_zoo: Option<String>,
    /// A worker of your own: a command line that calls elasticdl.init()
    #[arg(long, help_heading = "Python", value_name = "COMMAND")]
    job_command: Option<String>,
    /// Function of the Python module that makes a batch of records [default: feed]
    #[arg(long, help_heading = "Python", value_name = "NAME")]
    feed: Option<String>,
    /// What makes its optimizer [default: optimizer]
    #[arg(long, help_heading = "Python", value_name = "NAME")]
    optimizer_fn: Option<String>,
    /// Its loss [default: loss]
    #[arg(long, help_heading = "Python", value_name = "NAME")]
    loss: Option<String>,
    /// Its measures [default: eval_metrics_fn]
    #[arg(long, help_heading = "Python", value_name = "NAME")]
    eval_metrics_fn: Option<String>,
    /// Its callbacks [default: callbacks]
    #[arg(long, help_heading = "Python", value_name = "NAME")]
    callbacks: Option<String>,
    /// Its reader of data that no format fits [default: custom_data_reader]
    #[arg(long, help_heading = "Python", value_name = "NAME")]
    custom_data_reader: Option<String>,
    /// What it does with predictions [default: PredictionOutputsProcessor]
    #[arg(long, help_heading = "Python", value_name = "NAME")]
    prediction_outputs_processor: Option<String>,
    /// Numbers and words for the model, e.g. "lr=0.1;hidden=128,64"
    #[arg(long, help_heading = "Model", value_name = "K=V;…", value_parser = pairs)]
    model_params: Option<BTreeMap<String, String>>,
    /// Start from a checkpoint: a `version-N` folder, or a folder of them
    #[arg(long, help_heading = "Model", value_name = "DIR")]
    pub(crate) checkpoint_dir_for_init: Option<String>,

    /// Data to evaluate on: a file, a folder, a glob or a URL
    #[arg(long, help_heading = "Data", value_name = "DATA")]
    pub(crate) validation_data: Option<String>,
    /// What a record's bytes are [default: tf_example]
    #[arg(long, help_heading = "Data", value_parser = PossibleValuesParser::new(["tf_example", "bytes"]))]
    codec_type: Option<String>,
    /// Words for the reader, e.g. "delimiter=;"
    #[arg(long, help_heading = "Data", value_name = "K=V;…", value_parser = pairs)]
    data_reader_params: Option<BTreeMap<String, String>>,
    /// Records of one batch [default: 64]
    #[arg(long, help_heading = "Data", value_name = "N")]
    pub(crate) minibatch_size: Option<u32>,
    /// Batches that are lent to a worker at once [default: 8]
    #[arg(long, help_heading = "Data", value_name = "N")]
    pub(crate) num_minibatches_per_task: Option<u32>,

    /// Worker processes [default: 2]
    #[arg(long, help_heading = "Processes", value_name = "N")]
    pub(crate) num_workers: Option<u32>,
    /// Parameter servers [default: 1]; 0 means AllReduce
    #[arg(long, help_heading = "Processes", value_name = "N")]
    num_ps_pods: Option<u32>,
    /// ParameterServerStrategy, AllreduceStrategy, HybridStrategy (embedding tables on servers, the rest by AllReduce) or Local [default: ParameterServerStrategy]
    #[arg(long, help_heading = "Processes", value_name = "STRATEGY",
        value_parser = PossibleValuesParser::new(["ParameterServerStrategy", "AllreduceStrategy", "HybridStrategy", "Local"]),
        hide_possible_values = true)]
    distribution_strategy: Option<String>,
    /// Pieces that parameters are cut into [default: 32]
    #[arg(long, help_heading = "Processes", value_name = "N")]
    partitions: Option<u32>,
    /// Port of the master [default: a free one; 50001 for `master`]
    #[arg(long, help_heading = "Processes")]
    pub(crate) port: Option<u16>,
    /// Port of the master's page, /metrics and /healthz [default: a free one]
    #[arg(long, help_heading = "Processes", value_name = "PORT")]
    http_port: Option<u16>,
    /// Send spans of what the job does to this OpenTelemetry collector, e.g. http://host:4317
    #[arg(long, help_heading = "Processes", value_name = "URL")]
    otlp_endpoint: Option<String>,
    /// Let the page and `elasticdl chaos` harm processes of this job
    #[arg(long, help_heading = "Processes", num_args = 0..=1, default_missing_value = "true",
        require_equals = true, value_name = "true|false")]
    allow_chaos: Option<bool>,
    /// A worker that holds its work longer loses it, in seconds [default: 300]
    #[arg(long, help_heading = "Processes", value_name = "SECS")]
    task_timeout_secs: Option<u32>,
    /// A process that is silent for longer is replaced [default: 10]
    #[arg(long, help_heading = "Processes", value_name = "SECS", value_parser = finite)]
    heartbeat_timeout_secs: Option<f64>,
    /// Unexplained crashes after which a worker is given up [default: 3]
    #[arg(long, help_heading = "Processes", value_name = "N")]
    relaunch_on_worker_failure: Option<u32>,
    /// Failures of one batch after which the job fails [default: 3]
    #[arg(long, help_heading = "Processes", value_name = "N")]
    max_batch_failures: Option<u32>,

    /// Where the model or the predictions go [default: `output` in the job's folder]
    #[arg(long, help_heading = "Results", value_name = "DIR")]
    pub(crate) output: Option<String>,
    /// DEBUG, INFO, WARNING or ERROR [default: INFO]
    #[arg(long, help_heading = "Results", value_name = "LEVEL", value_parser = level)]
    pub(crate) log_level: Option<String>,
}

/// Flags of training alone.
#[derive(Args, Clone, Debug, Default, Serialize)]
#[command(rename_all = "snake_case")]
pub(crate) struct TrainFlags {
    /// AllReduce waits while fewer workers are there [default: 1]
    #[arg(long, help_heading = "AllReduce", value_name = "N")]
    min_workers: Option<u32>,
    /// `scale` goes no higher [default: lanes]
    #[arg(long, help_heading = "AllReduce", value_name = "N")]
    max_workers: Option<u32>,
    /// Micro-batches of one step, for the job's whole life [default: max_workers, or num_workers]
    #[arg(long, help_heading = "AllReduce", value_name = "N")]
    lanes: Option<u32>,
    /// Threads of each worker's engine [default: 1]
    #[arg(long, help_heading = "AllReduce", value_name = "N")]
    threads_per_worker: Option<u32>,
    /// A worker that computes other bits is refused (strict) or reported [default: strict]
    #[arg(long, help_heading = "AllReduce", value_parser = PossibleValuesParser::new(["strict", "report"]), hide_possible_values = true)]
    same_bits: Option<String>,
    /// Let slow workers run fewer lanes; the bits stay the same [default: false]
    #[arg(long, help_heading = "AllReduce", value_name = "BOOL", num_args = 0..=1, require_equals = true,
        default_missing_value = "true", value_parser = BoolishValueParser::new())]
    lane_balance: Option<bool>,
    /// How gradients travel between workers: f32, or bf16 for half the bytes [default: f32]
    #[arg(long, help_heading = "AllReduce", value_parser = PossibleValuesParser::new(["f32", "bf16"]), hide_possible_values = true)]
    allreduce_dtype: Option<String>,

    /// Optimizer instead of the model's own: sgd, momentum, nesterov, adam, amsgrad, adamw, …
    #[arg(long, help_heading = "Model", value_name = "NAME")]
    optimizer: Option<String>,
    /// Learning rate instead of the model's own
    #[arg(long, help_heading = "Model", value_name = "RATE", value_parser = finite)]
    learning_rate: Option<f64>,
    /// constant, steps:1000,2000:0.1, exponential:1000:0.9, cosine:100:10000, linear:100:10000
    #[arg(long, help_heading = "Model", value_name = "SCHEDULE")]
    learning_rate_schedule: Option<String>,
    /// Weight decay of the optimizer
    #[arg(long, help_heading = "Model", value_name = "FACTOR", value_parser = finite)]
    weight_decay: Option<f64>,
    /// Scale a batch's gradient down to this norm
    #[arg(long, help_heading = "Model", value_name = "NORM", value_parser = finite)]
    clip_norm: Option<f64>,

    /// Data to train on: a file, a folder, a glob or a URL
    #[arg(long, help_heading = "Data", value_name = "DATA")]
    pub(crate) training_data: Option<String>,
    /// Passes over the data; 0 goes on until stopped [default: 1]
    #[arg(long, help_heading = "Data", value_name = "N")]
    num_epochs: Option<u32>,
    /// Another order of records in every epoch [default: true]
    #[arg(long, help_heading = "Data", value_name = "BOOL", num_args = 0..=1, require_equals = true,
        default_missing_value = "true", value_parser = BoolishValueParser::new())]
    shuffle: Option<bool>,
    /// Stop at this version of the model; 0 = no limit [default: 0]
    #[arg(long, help_heading = "Data", value_name = "N")]
    max_step: Option<u64>,

    /// Apply gradients as they come [default: true unless one of the next two is given]
    #[arg(long, help_heading = "Gradients", value_name = "BOOL", num_args = 0..=1, require_equals = true,
        default_missing_value = "true", value_parser = BoolishValueParser::new())]
    use_async: Option<bool>,
    /// Apply rounds of so many batches together
    #[arg(long, help_heading = "Gradients", value_name = "N")]
    grads_to_wait: Option<u32>,
    /// Let nobody run further ahead than so many versions [default: 0 = off]
    #[arg(long, help_heading = "Gradients", value_name = "N")]
    sync_version_tolerance: Option<u32>,
    /// Divide the learning rate of a late gradient by its age
    #[arg(long, help_heading = "Gradients", value_name = "BOOL", num_args = 0..=1, require_equals = true,
        default_missing_value = "true", value_parser = BoolishValueParser::new())]
    lr_staleness_modulation: Option<bool>,
    /// Pull dense parameters every so many batches [default: 1]
    #[arg(long, help_heading = "Gradients", value_name = "N")]
    get_model_steps: Option<u32>,

    /// Versions between two evaluations; 0 = off [default: 0]
    #[arg(long, help_heading = "Evaluation", value_name = "N")]
    evaluation_steps: Option<u32>,
    /// Seconds between two evaluations; 0 = off [default: 0]
    #[arg(long, help_heading = "Evaluation", value_name = "SECS")]
    evaluation_secs: Option<u32>,
    /// Evaluate after each epoch [default: true]
    #[arg(long, help_heading = "Evaluation", value_name = "BOOL", num_args = 0..=1, require_equals = true,
        default_missing_value = "true", value_parser = BoolishValueParser::new())]
    evaluation_epochs: Option<bool>,
    /// Stop after so many evaluations without a better one; 0 = never [default: 0]
    #[arg(long, help_heading = "Evaluation", value_name = "N")]
    early_stop_patience: Option<u32>,

    /// Where checkpoints go [default: `checkpoints` in the job's folder]
    #[arg(long, help_heading = "Checkpoints", value_name = "DIR")]
    checkpoint_dir: Option<String>,
    /// Versions between two checkpoints; 0 = off [default: 0]
    #[arg(long, help_heading = "Checkpoints", value_name = "N")]
    checkpoint_steps: Option<u32>,
    /// Seconds between two checkpoints; 0 = off [default: 30]
    #[arg(long, help_heading = "Checkpoints", value_name = "SECS")]
    checkpoint_secs: Option<u32>,
    /// Checkpoints to keep; 0 = all [default: 3]
    #[arg(long, help_heading = "Checkpoints", value_name = "N")]
    keep_checkpoint_max: Option<u32>,

    /// Steps between two `Loss = …` lines of a worker [default: 100]
    #[arg(long, help_heading = "Results", value_name = "N")]
    log_loss_steps: Option<u32>,
    /// Write TensorBoard event files there
    #[arg(long, help_heading = "Results", value_name = "DIR")]
    tensorboard_dir: Option<String>,
}

/// Flags of prediction alone.
#[derive(Args, Clone, Debug, Default, Serialize)]
#[command(rename_all = "snake_case")]
pub(crate) struct PredictFlags {
    /// Data to predict: a file, a folder, a glob or a URL
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

/// A description has no word for infinity, nor for what is no number.
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
        _ => return Err("expected seconds, or a number with s, m, h or d".into()),
    };
    let number: u64 = number.parse().map_err(|_| "expected a number".to_owned())?;
    number.checked_mul(factor).ok_or_else(|| "that is too long".to_owned())
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
            assert!(spec.get(name).is_some(), "--{name} is no word of the spec");
        }
    }
}
