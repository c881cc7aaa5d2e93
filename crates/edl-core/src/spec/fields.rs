// SPDX-License-Identifier: Apache-2.0
//! The table of all fields of a job description.
//!
//! The struct, its defaults, the flags and their help, the file that `elasticdl init` writes, the
//! schema of a TrainingJob and the list of what a resume may change are all made from it.
//! The order of the table is the order in files.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::batch;
use crate::cluster::{PriorityClass, Resources, Secrets, Variables, Volumes, WorkerPriority};
use crate::optimizer::Schedule;

use super::Stored;
use super::choices::{
    AllreduceDtype, Codec, ImagePullPolicy, JobType, LogLevel, OnNonfinite, RestartPolicy,
    SameBits, Strategy, Track,
};
use super::field::{Field, FieldType as _, Fixed, Flag, Group, Parsed, Seconds};
use super::hosts::HttpHosts;
use super::{MAX_PARTITIONS, MAX_WORKERS};

/// `name: type = default, "help text" / "comment in the file" { what else is known }`. Without a
/// default, it is the type's; without a comment, the help text is the comment.
macro_rules! job_description {
    ($(section $section:literal {
        $($name:ident: $type:ty $(= $default:expr)?, $help:literal $(/ $comment:literal)?
            { $($key:ident: $value:expr),* }
        )*
    })*) => {
        /// Everything that a user can specify about a job. `JobSpec::default()` is the job without
        /// flags.
        #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
        #[serde(try_from = "Stored")]
        pub struct JobSpec { $($(#[doc = $help] pub $name: $type,)*)* }

        impl Default for JobSpec {
            fn default() -> Self {
                Self { $($($name: default!($($default)?),)*)* }
            }
        }

        /// All fields, in the order of files.
        pub const FIELDS: &[Field] = &[$($(
            Field {
                name: stringify!($name),
                help: $help,
                section: $section,
                $(comment: Some($comment),)?
                $($key: $value,)*
                ..Field::of::<$type>()
            },
        )*)*];

        impl JobSpec {
            /// Sets a field that exists.
            pub(super) fn set(
                &mut self,
                name: &str,
                value: Value,
            ) -> Result<(), String> {
                match name {
                    $($(stringify!($name) => self.$name.update(value),)*)*
                    _ => Err("no such field".into()),
                }
            }
        }
    };
}

macro_rules! default {
    () => {
        Default::default()
    };
    ($value:expr) => {
        $value
    };
}

/// Short names of the strategies, as on the command lines of other tools.
const STRATEGIES: &[(&str, &str)] = &[
    ("ps", "ParameterServerStrategy"),
    ("allreduce", "AllreduceStrategy"),
    ("ddp", "AllreduceStrategy"),
    ("hybrid", "HybridStrategy"),
    ("local", "Local"),
];
const VALUE: Fixed = Fixed::Value;
const STRATEGY: Fixed = Fixed::Derived(|spec| json!([spec.is_allreduce(), spec.is_hybrid()]));
const LANES: Fixed = Fixed::Derived(|spec| json!(spec.step_lanes()));
const DTYPE: Fixed =
    Fixed::Derived(|spec| json!(spec.is_allreduce().then_some(spec.allreduce_dtype)));
const GRADIENTS: Fixed = Fixed::Derived(|spec| json!(spec.mode()));

const fn flag(group: Group, heading: &'static str, value: &'static str) -> Option<Flag> {
    Some(Flag { group, heading, value, position: None })
}

const fn common(heading: &'static str, value: &'static str) -> Option<Flag> {
    flag(Group::Common, heading, value)
}

const fn train(heading: &'static str, value: &'static str) -> Option<Flag> {
    flag(Group::Train, heading, value)
}

const fn cluster(value: &'static str) -> Option<Flag> {
    flag(Group::Cluster, "Kubernetes", value)
}

/// A flag that `--help` lists elsewhere than the file.
const fn at(position: usize, heading: &'static str, value: &'static str) -> Option<Flag> {
    Some(Flag { group: Group::Common, heading, value, position: Some(position) })
}

job_description! {
    section "Job" {
        job_name: String, "Job name [default: derived from the model's name]"
            / "Empty: derived from the model's name." { flag: common("Job", "") }
        job_type: JobType, "train, evaluate or predict; must match the command" { fixed: VALUE }
        seed: u64, "Random seed" { flag: common("Job", ""), fixed: VALUE }
    }

    section "Model" {
        model_def: String = "mnist_cnn".into(),
            "Built-in model, or a Python model as module.function, file or folder"
            / "mnist_cnn, mnist_mlp, deepfm, wide_deep; or a Python model as module.function, file \
             or folder."
            { flag: common("Model", "NAME"), fixed: VALUE, old_name: Some("model_file") }
        model_zoo: String, "Folder with Python models [default: the current folder]"
            / "Folder with Python models; empty: the current folder."
            { flag: common("Model", "DIR"), fixed: VALUE, is_path: true }
        job_command: String,
            "Command that runs a custom training loop; it must call elasticdl.init()"
            { flag: at(1, "Python", "COMMAND"), fixed: VALUE }
        model_params: BTreeMap<String, String>, "Model parameters, e.g. \"lr=0.1;hidden=128,64\""
            / "Model parameters, e.g. {lr: 0.1}." { flag: common("Model", "K=V;…"), fixed: VALUE }
        optimizer: Option<String>,
            "Optimizer: sgd, momentum, nesterov, adam, amsgrad, adamw, … [default: the model's]"
            / "Unset: the model's. Or sgd, momentum, nesterov, adam, amsgrad, adamw, adagrad, \
             rmsprop, ftrl, adadelta, adamax, nadam, lion."
            { flag: train("Model", "NAME"), fixed: VALUE }
        learning_rate: Option<f64>, "Learning rate [default: the model's]" / "Unset: the model's."
            { flag: train("Model", "RATE"), aliases: &["lr"] }
        learning_rate_schedule: Option<Parsed<Schedule>>,
            "Learning rate schedule: constant, steps:AT,AT:FACTOR, exponential:EVERY:FACTOR, \
             cosine:WARMUP:TOTAL or linear:WARMUP:TOTAL, e.g. steps:1000,2000:0.1 [default: the \
             model's]"
            / "constant, steps:1000,2000:0.1, exponential:1000:0.9, cosine:100:10000 or \
             linear:100:10000." { flag: train("Model", "SCHEDULE") }
        weight_decay: Option<f64>, "Optimizer weight decay [default: the model's]"
            / "Unset: the model's." { flag: train("Model", "FACTOR") }
        clip_norm: Option<f64>, "Clip the gradient of a batch to this norm [default: no clipping]"
            / "Clip the gradient of a batch to this norm; unset: no clipping."
            { flag: train("Model", "NORM"), is_for_script: true }
        optimizer_fn: String, "Function that creates the optimizer [default: optimizer]"
            / "The fields from here to prediction_outputs_processor name functions of a Python \
             module; empty: the default name." { flag: common("Python", "NAME"), is_symbol: true }
        loss: String, "Loss function [default: loss]" / ""
            { flag: common("Python", "NAME"), is_symbol: true }
        feed: String,
            "Function of the Python module that turns records into a batch [default: feed]" / ""
            { flag: at(2, "Python", "NAME"), is_symbol: true, old_name: Some("dataset_fn") }
        eval_metrics_fn: String,
            "Function that returns the evaluation metrics [default: eval_metrics_fn]" / ""
            { flag: common("Python", "NAME"), is_symbol: true }
        callbacks: String, "Function that returns the callbacks [default: callbacks]" / ""
            { flag: common("Python", "NAME"), is_symbol: true }
        custom_data_reader: String,
            "Function that returns a reader for other data formats [default: custom_data_reader]"
            / "" { flag: common("Python", "NAME"), is_symbol: true }
        prediction_outputs_processor: String,
            "Class that processes predictions [default: PredictionOutputsProcessor]" / ""
            { flag: common("Python", "NAME"), is_symbol: true }
        checkpoint_dir_for_init: String,
            "Trained model to start from: a job, its output folder, a model.safetensors, a \
             checkpoint, or a folder with several checkpoints, of which the newest is used"
            { flag: common("Model", "DIR"), fixed: VALUE, is_path: true, is_for_script: true }
    }

    section "Data: a file, folder, glob or URL" {
        training_data: String,
            "Data to train on: a file, folder, glob or URL [default: the data included with \
             elasticdl]"
            / "Empty: the data included with elasticdl."
            {
                flag: Some(Flag { group: Group::Train, heading: "Data", value: "DATA", position: Some(1) }), fixed: VALUE, is_path: true,
                old_name: Some("training_data_dir")
            }
        validation_data: String,
            "Data to evaluate on: a file, folder, glob or URL [default: the data included with \
             elasticdl, unless training_data is set]"
            / "" { flag: common("Data", "DATA"), is_path: true, old_name: Some("evaluation_data_dir") }
        prediction_data: String,
            "Data to predict on: a file, folder, glob or URL [default: the data included with \
             elasticdl]"
            / "" { flag: flag(Group::Predict, "Data", "DATA"), is_path: true }
        codec_type: Codec, "Record encoding" / "Record encoding: tf_example or bytes."
            { flag: common("Data", ""), fixed: VALUE }
        data_reader_params: BTreeMap<String, String>,
            "Options for the data reader, e.g. \"delimiter=;\""
            / "Options for the data reader, e.g. {delimiter: ';'}."
            { flag: common("Data", "K=V;…"), fixed: VALUE }
        minibatch_size: u32 = 64, "Records per batch; with AllReduce, records per lane"
            { flag: common("Data", "N"), least: 1, fixed: VALUE, aliases: &["batch_size"] }
        num_minibatches_per_task: u32 = 8, "Batches assigned to a worker at a time"
            { flag: common("Data", "N"), least: 1, fixed: VALUE }
        num_epochs: u32 = 1, "Number of epochs; 0 trains until the job is stopped"
            / "0: train until the job is stopped."
            { flag: train("Data", "N"), aliases: &["epochs"] }
        shuffle: bool = true, "Shuffle the records in every epoch"
            { flag: train("Data", "BOOL"), fixed: VALUE }
        batch_plan: u32 = batch::NEWEST,
            "Version of the rule that assigns records to batches; a job keeps the version that it \
             was started with" { least: 1, fixed: VALUE }
    }

    section "Processes" {
        distribution_strategy: Strategy,
            "Training strategy: ParameterServerStrategy (or ps), AllreduceStrategy (or allreduce, \
             ddp), HybridStrategy (or hybrid: embedding tables on parameter servers, AllReduce for \
             everything else) or Local (or local: one process)"
            / "Or AllreduceStrategy, HybridStrategy, or Local (one process)."
            {
                flag: at(3, "Processes", "STRATEGY"), fixed: STRATEGY, aliases: &["strategy"],
                value_aliases: STRATEGIES
            }
        num_workers: u32 = 2, "Number of workers" / ""
            {
                flag: at(1, "Processes", "N"), least: 1, most: Some(MAX_WORKERS),
                aliases: &["workers"]
            }
        spares: u32,
            "Spare workers that are kept ready to replace a lost worker immediately. Each of them \
             uses memory and, on Kubernetes, the resources of a worker"
            / "Spare workers that are kept ready to replace lost ones."
            { flag: train("Processes", "N"), most: Some(MAX_WORKERS) }
        num_ps_pods: u32 = 1, "Number of parameter servers; 0 uses AllReduce"
            { flag: at(2, "Processes", "N"), most: Some(MAX_PARTITIONS) }
        partitions: u32 = 32, "Number of partitions of the parameters, fixed for the job's lifetime"
            { flag: at(4, "Processes", "N"), least: 1, most: Some(MAX_PARTITIONS), fixed: VALUE }
        encrypt_data: Option<bool>,
            "Encrypt TCP connections that carry parameters and gradients [default: true between \
             hosts, false within one]"
            / "Encrypt TCP connections that carry parameters and gradients; unset: true between \
             hosts, false within one."
            { flag: at(9, "Processes", "BOOL"), is_for_script: true }
    }

    section "AllReduce" {
        min_workers: u32 = 1,
            "Minimum number of workers; AllReduce pauses training while there are fewer"
            / "Wait while there are fewer workers."
            { flag: train("AllReduce", "N"), least: 1, most: Some(MAX_WORKERS), is_for_script: true }
        max_workers: Option<u32>,
            "Maximum number of workers that `elasticdl scale` can set [default: lanes if set, \
             otherwise num_workers]"
            / "Maximum number of workers that `elasticdl scale` can set; unset: lanes."
            { flag: train("AllReduce", "N"), least: 1, most: Some(MAX_WORKERS) }
        lanes: Option<u32>,
            "Micro-batches per step, fixed for the job's lifetime [default: max_workers, or \
             num_workers]"
            / "Micro-batches per step, fixed for the job's lifetime; unset: max_workers, or \
             num_workers."
            { flag: train("AllReduce", "N"), most: Some(MAX_WORKERS), fixed: LANES }
        threads_per_worker: u32 = 1, "Compute threads per worker, fixed for the job's lifetime"
            { flag: train("AllReduce", "N"), fixed: VALUE }
        same_bits: SameBits,
            "What to do with a worker whose results differ bitwise from those of the others: \
             strict rejects it; report admits it and reports the difference"
            / "Reject a worker whose results differ bitwise; or report: admit it and report the \
             difference." { flag: train("AllReduce", ""), is_for_script: true }
        lane_balance: bool, "Assign fewer lanes to slow workers; results stay bit-identical"
            { flag: train("AllReduce", "BOOL"), is_for_script: true }
        allreduce_dtype: AllreduceDtype,
            "Data type of gradients sent between workers, fixed for the job's lifetime: f32, or \
             bf16 for half the traffic"
            / "Data type of gradients sent between workers, fixed for the job's lifetime: f32 or \
             bf16." { flag: train("AllReduce", ""), fixed: DTYPE, is_for_script: true }
    }

    section "Gradients" {
        use_async: Option<bool>,
            "Apply gradients asynchronously [default: true, unless grads_to_wait or \
             sync_version_tolerance is set]"
            / "Unset: true, unless grads_to_wait or sync_version_tolerance is set."
            { flag: train("Gradients", "BOOL"), fixed: GRADIENTS }
        grads_to_wait: Option<u32>,
            "Train synchronously, applying the gradients of N batches together"
            / "Train synchronously, applying the gradients of this many batches together."
            { flag: train("Gradients", "N"), fixed: GRADIENTS }
        sync_version_tolerance: u32,
            "Maximum staleness, in steps: faster workers wait for slower ones; 0 means no limit"
            { flag: train("Gradients", "N"), fixed: GRADIENTS }
        lr_staleness_modulation: bool,
            "Divide the learning rate of a stale gradient by its staleness"
            { flag: train("Gradients", "BOOL") }
        get_model_steps: u32 = 1,
            "With asynchronous training, pull dense parameters every N batches"
            / "With asynchronous training, pull dense parameters once in this many batches."
            { flag: train("Gradients", "N") }
    }

    section "Evaluation" {
        evaluation_steps: u32, "Evaluate every N steps; 0 disables"
            / "Steps between evaluations; 0 disables." { flag: train("Evaluation", "N") }
        evaluation_secs: u32, "Evaluate at this interval, in seconds; 0 disables"
            / "Seconds between evaluations; 0 disables." { flag: train("Evaluation", "SECS") }
        evaluation_epochs: bool = true, "Evaluate after each epoch"
            { flag: train("Evaluation", "BOOL") }
        early_stop_patience: u32, "Stop after N evaluations without improvement; 0 disables"
            / "Stop after this many evaluations without improvement; 0 disables."
            { flag: train("Evaluation", "N") }
    }

    section "Checkpoints and results" {
        checkpoint_dir: String, "Folder for checkpoints [default: `checkpoints` in the job folder]"
            / "Empty: `checkpoints` in the job folder."
            { flag: train("Checkpoints", "DIR"), fixed: VALUE, is_path: true, is_for_script: true }
        checkpoint_steps: u32, "Save a checkpoint every N steps; 0 disables"
            / "Steps between checkpoints; 0 disables."
            { flag: train("Checkpoints", "N"), is_for_script: true }
        checkpoint_secs: u32 = 30,
            "Save a checkpoint at this interval, in seconds; 0 disables"
            / "Seconds between checkpoints; 0 disables."
            { flag: train("Checkpoints", "SECS"), is_for_script: true }
        keep_checkpoint_max: u32 = 3, "Number of checkpoints to keep; 0 keeps all"
            { flag: train("Checkpoints", "N"), is_for_script: true }
        output: String,
            "Folder for the trained model or the predictions [default: `output` in the job folder]"
            / "Empty: `output` in the job folder." { flag: common("Results", "DIR"), is_path: true }
    }

    section "Limits" {
        max_step: u64, "Stop at this step; 0 means no limit"
            { flag: train("Data", "N"), is_for_script: true }
        max_time: Seconds,
            "Stop after this time, even during an evaluation: seconds, or a number with a unit, \
             e.g. 10m or 2h [default: no limit]" / "Stop after this many seconds; 0 means no limit."
            { flag: common("Job", "TIME"), is_for_script: true }
        task_timeout_secs: u32 = 300,
            "Reassign a worker's task when it makes no progress for this time, in seconds"
            / "Reassign a worker's task when it makes no progress for this time."
            { flag: common("Processes", "SECS"), is_for_script: true }
        heartbeat_timeout_secs: f64 = 10.0,
            "Replace a process that sends no heartbeat for this time, in seconds"
            / "Replace a process that sends no heartbeat for this time."
            { flag: common("Processes", "SECS"), is_for_script: true }
        relaunch_on_worker_failure: u32 = 3,
            "Number of crashes without progress that the job tolerates; preemptions and evictions \
             do not count" / "Number of crashes without progress that the job tolerates."
            { flag: common("Processes", "N") }
        fork_workers: bool = true,
            "Start Python workers on this machine as forks of one process that has already imported \
             the packages at the top of the script or model; false starts each one separately"
            / "Fork Python workers on this machine from a process that has imported their packages."
            { flag: common("Processes", "BOOL"), is_for_script: true }
        max_batch_failures: u32 = 3, "Fail the job after this many failures of the same batch"
            { flag: common("Processes", "N"), is_for_script: true }
        on_nonfinite: OnNonfinite,
            "What to do with a batch whose loss or gradient is not finite: stop fails the job, \
             skip leaves the batch out, rollback loads the last checkpoint and leaves it out"
            / "A batch whose loss or gradient is not finite: stop fails the job, skip leaves the \
             batch out, rollback loads the last checkpoint and leaves it out."
            { flag: train("Gradients", ""), is_for_script: true }
    }

    section "Monitoring" {
        log_level: LogLevel, "Log level: DEBUG, INFO, WARNING or ERROR"
            / "DEBUG, INFO, WARNING or ERROR."
            { flag: common("Results", "LEVEL"), is_for_script: true }
        log_loss_steps: u32 = 100, "Log each worker's loss every N steps"
            / "Steps between log lines with a worker's loss."
            { flag: train("Results", "N"), is_for_script: true }
        tensorboard_dir: String, "Write TensorBoard event files to this folder"
            { flag: train("Results", "DIR"), is_path: true, is_for_script: true }
        track: Option<Track>,
            "Also send the metrics that a script logs, and the job's options, to W&B (wandb) or \
             MLflow (mlflow)"
            / "Also send the metrics that a script logs to W&B (wandb) or MLflow (mlflow)."
            { flag: train("Results", ""), is_for_script: true }
        otlp_endpoint: String, "Send traces to this OpenTelemetry collector, e.g. http://host:4317"
            { flag: at(7, "Processes", "URL"), is_for_script: true }
        http_port: u16, "Port of the job's web page, /metrics and /healthz; 0 picks a free port"
            { flag: at(6, "Processes", "PORT"), is_for_script: true }
        http_hosts: Parsed<HttpHosts>,
            "Host names of the web page behind an ingress or proxy, separated by commas; * allows \
             any. IP addresses, localhost and the names of the job's Service are always allowed"
            / "Host names of the web page behind an ingress or proxy, separated by commas; * allows \
             any." { flag: common("Processes", "NAMES"), is_for_script: true }
        allow_chaos: bool, "Allow fault injection from the web page and `elasticdl chaos`"
            { flag: at(8, "Processes", "true|false"), is_for_script: true }
        port: u16,
            "Port of the master; 0 picks a free port [default: 0; 50001 for `elasticdl master`]"
            { flag: at(5, "Processes", ""), is_for_script: true }
    }

    section "Kubernetes" {
        image_name: String,
            "Container image; runs the job on the Kubernetes cluster of your kubeconfig"
            / "Image of the master; empty: the job runs on this machine." { flag: cluster("IMAGE") }
        worker_image: String, "Image of workers and parameter servers [default: image_name]"
            / "Image of workers and parameter servers; empty: image_name."
            { flag: cluster("IMAGE"), needs_cluster: true }
        ps_image: String, "Image of parameter servers [default: worker_image]"
            / "Image of parameter servers; empty: worker_image."
            { flag: cluster("IMAGE"), needs_cluster: true }
        image_pull_policy: ImagePullPolicy, "Image pull policy: Always, IfNotPresent or Never"
            / "Or IfNotPresent, or Never." { flag: cluster("POLICY") }
        image_pull_secrets: Parsed<Secrets>, "Image pull Secrets, separated by commas"
            { flag: cluster("NAMES") }
        namespace: String, "Namespace of the job [default: the kubeconfig's]"
            / "Empty: the namespace of the kubeconfig's context." { flag: cluster("NAME") }
        service_account: String,
            "Service account for the pods; only the master gets its token [default: elasticdl-ROLE]"
            / "Service account for the pods; only the master gets its token. Empty: elasticdl-ROLE."
            { flag: cluster("NAME") }
        master_resource_request: Parsed<Resources> = "cpu=0.1,memory=1024Mi".into(),
            "Resource request of the master" / "Also disk=, gpu= and VENDOR/NAME=."
            { flag: cluster("K=V,…") }
        master_resource_limit: Parsed<Resources>, "Resource limit of the master [default: its request]"
            / "Empty: same as the request." { flag: cluster("K=V,…") }
        ps_resource_request: Parsed<Resources> = "cpu=1,memory=4096Mi".into(),
            "Resource request of each parameter server: cpu, memory, disk, gpu" / ""
            { flag: cluster("K=V,…") }
        ps_resource_limit: Parsed<Resources>,
            "Resource limit of each parameter server [default: its request]" / ""
            { flag: cluster("K=V,…") }
        worker_resource_request: Parsed<Resources> = "cpu=1,memory=4096Mi".into(),
            "Resource request of each worker: cpu, memory, disk, gpu" / ""
            { flag: cluster("K=V,…") }
        worker_resource_limit: Parsed<Resources>, "Resource limit of each worker [default: its request]"
            / "" { flag: cluster("K=V,…") }
        master_pod_priority: Parsed<PriorityClass>, "PriorityClass of the master"
            / "Name of a PriorityClass." { flag: cluster("CLASS") }
        ps_pod_priority: Parsed<PriorityClass>, "PriorityClass of parameter servers [default: the master's]"
            / "Empty: the master's." { flag: cluster("CLASS") }
        worker_pod_priority: Parsed<WorkerPriority>,
            "PriorityClass of workers, or a share, e.g. 0.5: this share of workers gets \
             high_priority_class, the others low_priority_class"
            / "A PriorityClass, or the share of workers that get high_priority_class, e.g. 0.5."
            { flag: cluster("CLASS|SHARE") }
        high_priority_class: Parsed<PriorityClass> = "high-priority".into(),
            "PriorityClass of the workers in the share that worker_pod_priority sets" / ""
            { flag: cluster("CLASS") }
        low_priority_class: Parsed<PriorityClass> = "low-priority".into(),
            "PriorityClass of the other workers, if worker_pod_priority is a share" / "" { flag: cluster("CLASS") }
        volume: Parsed<Volumes>,
            "Volumes: claim_name=CLAIM,mount_path=PATH or host_path=PATH,mount_path=PATH, \
             separated by `;`"
            / "claim_name=CLAIM,mount_path=PATH or host_path=PATH,mount_path=PATH, separated by \
             `;`." { flag: cluster("VOLUMES"), needs_cluster: true }
        job_dir: String,
            "Job folder, as a path inside the pods; empty: elasticdl/NAME on the first volume" {}
        restart_policy: RestartPolicy,
            "Whether to restart a failed job: Never, OnFailure or Always"
            { flag: cluster("POLICY") }
        envs: Parsed<Variables>, "Environment variables for every pod, e.g. A=1,B=2"
            / "Environment variables for every pod: NAME=value,…"
            { flag: cluster("K=V,…"), needs_cluster: true }
        populate_env_names: String,
            "Copy the master's environment variables to workers and parameter servers if their names \
             match this regular expression" { flag: cluster("PATTERN"), needs_cluster: true }
        cluster_spec_json: String, "The contents of a --cluster_spec file, as JSON"
            / "Patches for the job's pods and Service, as JSON; see docs/kubernetes.md."
            { flag: cluster("JSON"), needs_cluster: true }
    }
}
