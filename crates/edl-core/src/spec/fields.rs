// SPDX-License-Identifier: Apache-2.0
//! The table of all fields of a job description.
//!
//! The struct, its defaults, the flags and their help, the file that `elasticdl init` writes, the
//! schema of a TrainingJob and the list of what a resume may change are all made from it.
//! The order of the table is the order in files.

use std::collections::BTreeMap;

use serde_json::json;

use super::choices::{
    AllreduceDtype, Codec, ImagePullPolicy, JobType, LogLevel, RestartPolicy, SameBits, Strategy,
};
use super::field::{Field, Fixed, Flag, Group, Seconds, job_description};

const VALUE: Fixed = Fixed::Value;
const STRATEGY: Fixed = Fixed::Derived(|spec| json!([spec.is_allreduce(), spec.is_hybrid()]));
const LANES: Fixed = Fixed::Derived(|spec| json!(spec.is_allreduce().then(|| spec.n_lanes())));
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
            { flag: common("Job", ""), comment: Some("Empty: derived from the model's name.") }
        job_type: JobType, "train, evaluate or predict; must match the command" { fixed: VALUE }
        seed: u64, "Random seed" { flag: common("Job", ""), fixed: VALUE }
    }

    section "Model" {
        model_def: String = "mnist_cnn".into(),
            "Built-in model, or a Python model as module.function, file or folder" {
                flag: common("Model", "NAME"), fixed: VALUE,
                comment: Some("mnist_cnn, mnist_mlp, deepfm, wide_deep; or a Python model as \
                    module.function, file or folder.")
            }
        model_zoo: String, "Folder with Python models [default: the current folder]" {
                flag: common("Model", "DIR"), fixed: VALUE,
                comment: Some("Folder with Python models; empty: the current folder.")
            }
        job_command: String,
            "Command that runs a custom training loop; it must call elasticdl.init()"
            { flag: at(1, "Python", "COMMAND"), fixed: VALUE }
        model_params: BTreeMap<String, String>, "Model parameters, e.g. \"lr=0.1;hidden=128,64\"" {
                flag: common("Model", "K=V;…"), fixed: VALUE,
                comment: Some("Model parameters, e.g. {lr: 0.1}.")
            }
        optimizer: Option<String>,
            "Override the model's optimizer: sgd, momentum, nesterov, adam, amsgrad, adamw, …" {
                flag: train("Model", "NAME"), fixed: VALUE,
                comment: Some("Unset: the model's. Or sgd, momentum, nesterov, adam, amsgrad, \
                    adamw, adagrad, rmsprop, ftrl, adadelta, adamax, nadam, lion.")
            }
        learning_rate: Option<f64>, "Override the model's learning rate"
            { flag: train("Model", "RATE"), comment: Some("Unset: the model's.") }
        learning_rate_schedule: Option<String>,
            "Learning rate schedule: constant, steps:1000,2000:0.1, exponential:1000:0.9, \
             cosine:100:10000 or linear:100:10000" {
                flag: train("Model", "SCHEDULE"),
                comment: Some("constant, steps:1000,2000:0.1, exponential:1000:0.9, \
                    cosine:100:10000 or linear:100:10000.")
            }
        weight_decay: Option<f64>, "Optimizer weight decay" { flag: train("Model", "FACTOR") }
        clip_norm: Option<f64>, "Clip the gradient of a batch to this norm [default: no clipping]" {
                flag: train("Model", "NORM"),
                comment: Some("Clip the gradient of a batch to this norm; unset: no clipping.")
            }
        optimizer_fn: String, "Function that creates the optimizer [default: optimizer]" {
                flag: common("Python", "NAME"),
                comment: Some("The fields from here to prediction_outputs_processor name \
                    functions of a Python module; empty: the default name.")
            }
        loss: String, "Loss function [default: loss]"
            { flag: common("Python", "NAME"), comment: Some("") }
        feed: String,
            "Function of the Python module that turns records into a batch [default: feed]"
            { flag: at(2, "Python", "NAME"), comment: Some("") }
        eval_metrics_fn: String,
            "Function that returns the evaluation metrics [default: eval_metrics_fn]"
            { flag: common("Python", "NAME"), comment: Some("") }
        callbacks: String, "Function that returns the callbacks [default: callbacks]"
            { flag: common("Python", "NAME"), comment: Some("") }
        custom_data_reader: String,
            "Function that returns a reader for other data formats [default: custom_data_reader]"
            { flag: common("Python", "NAME"), comment: Some("") }
        prediction_outputs_processor: String,
            "Class that processes predictions [default: PredictionOutputsProcessor]"
            { flag: common("Python", "NAME"), comment: Some("") }
        checkpoint_dir_for_init: String,
            "Checkpoint to start from: a `version-N` folder, or a folder of them to use the \
             newest"
            { flag: common("Model", "DIR"), fixed: VALUE }
    }

    section "Data: a file, folder, glob or URL" {
        training_data: String, "Data to train on: a file, folder, glob or URL" {
                flag: train("Data", "DATA"), fixed: VALUE,
                comment: Some("Empty: the data included with elasticdl.")
            }
        validation_data: String, "Data to evaluate on: a file, folder, glob or URL"
            { flag: common("Data", "DATA"), comment: Some("") }
        prediction_data: String, "Data to predict on: a file, folder, glob or URL"
            { flag: flag(Group::Predict, "Data", "DATA"), comment: Some("") }
        codec_type: Codec, "Record encoding" {
                flag: common("Data", ""), fixed: VALUE,
                comment: Some("Record encoding: tf_example or bytes.")
            }
        data_reader_params: BTreeMap<String, String>,
            "Options for the data reader, e.g. \"delimiter=;\"" {
                flag: common("Data", "K=V;…"), fixed: VALUE,
                comment: Some("Options for the data reader, e.g. {delimiter: ';'}.")
            }
        minibatch_size: u32 = 64, "Records per batch"
            { flag: common("Data", "N"), least: 1, fixed: VALUE }
        num_minibatches_per_task: u32 = 8, "Batches assigned to a worker at a time"
            { flag: common("Data", "N"), least: 1, fixed: VALUE }
        num_epochs: u32 = 1, "Number of epochs; 0 trains until the job is stopped"
            { flag: train("Data", "N"), comment: Some("0: train until the job is stopped.") }
        shuffle: bool = true, "Shuffle the records in every epoch"
            { flag: train("Data", "BOOL"), fixed: VALUE }
    }

    section "Processes" {
        distribution_strategy: Strategy,
            "ParameterServerStrategy, AllreduceStrategy, HybridStrategy (embedding tables on \
             parameter servers, everything else by AllReduce) or Local (one process)" {
                flag: at(3, "Processes", "STRATEGY"), fixed: STRATEGY,
                comment: Some("Or AllreduceStrategy, HybridStrategy, or Local (one process).")
            }
        num_workers: u32 = 2, "Number of workers"
            { flag: at(1, "Processes", "N"), least: 1, comment: Some("") }
        num_ps_pods: u32 = 1, "Number of parameter servers; 0 means AllReduce"
            { flag: at(2, "Processes", "N") }
        partitions: u32 = 32,
            "Number of partitions of the parameters, fixed for the job's lifetime"
            { flag: at(4, "Processes", "N"), least: 1, fixed: VALUE }
    }

    section "AllReduce" {
        min_workers: u32 = 1, "Minimum number of workers; AllReduce waits while there are fewer" {
                flag: train("AllReduce", "N"), least: 1,
                comment: Some("Wait while there are fewer workers.")
            }
        max_workers: Option<u32>,
            "Maximum number of workers that `elasticdl scale` can set [default: lanes]" {
                flag: train("AllReduce", "N"), least: 1,
                comment: Some("Maximum number of workers that `elasticdl scale` can set; unset: \
                    lanes.")
            }
        lanes: Option<u32>,
            "Micro-batches per step, fixed for the job's lifetime [default: max_workers, or \
             num_workers]" {
                flag: train("AllReduce", "N"), fixed: LANES,
                comment: Some("Micro-batches per step, fixed for the job's lifetime; unset: \
                    max_workers, or num_workers.")
            }
        threads_per_worker: u32 = 1, "Compute threads per worker, fixed for the job's lifetime"
            { flag: train("AllReduce", "N"), fixed: VALUE }
        same_bits: SameBits,
            "What to do with a worker whose results differ bitwise: strict rejects it, report \
             admits it and reports the difference" {
                flag: train("AllReduce", ""),
                comment: Some("Reject a worker whose results differ bitwise; or report: admit it \
                    and report the difference.")
            }
        lane_balance: bool, "Assign fewer lanes to slow workers; results stay bit-identical"
            { flag: train("AllReduce", "BOOL") }
        allreduce_dtype: AllreduceDtype,
            "Data type of gradients sent between workers, fixed for the job's lifetime: f32, or \
             bf16 for half the traffic" {
                flag: train("AllReduce", ""), fixed: DTYPE,
                comment: Some("Data type of gradients sent between workers, fixed for the job's \
                    lifetime: f32 or bf16.")
            }
    }

    section "Gradients" {
        use_async: Option<bool>,
            "Apply gradients asynchronously [default: true, unless grads_to_wait or \
             sync_version_tolerance is set]" {
                flag: train("Gradients", "BOOL"), fixed: GRADIENTS,
                comment: Some("Unset: true, unless grads_to_wait or sync_version_tolerance is \
                    set.")
            }
        grads_to_wait: Option<u32>,
            "Train synchronously, applying the gradients of N batches together" {
                flag: train("Gradients", "N"), fixed: GRADIENTS,
                comment: Some("Train synchronously, applying the gradients of this many batches \
                    together.")
            }
        sync_version_tolerance: u32,
            "Maximum staleness, in steps; faster workers wait; 0 disables"
            { flag: train("Gradients", "N"), fixed: GRADIENTS }
        lr_staleness_modulation: bool,
            "Divide the learning rate of a stale gradient by its staleness"
            { flag: train("Gradients", "BOOL") }
        get_model_steps: u32 = 1,
            "With asynchronous training, pull dense parameters every N batches" {
                flag: train("Gradients", "N"),
                comment: Some("With asynchronous training, pull dense parameters every this many \
                    batches.")
            }
    }

    section "Evaluation" {
        evaluation_steps: u32, "Evaluate every N steps; 0 disables" {
                flag: train("Evaluation", "N"),
                comment: Some("Steps between evaluations; 0 disables.")
            }
        evaluation_secs: u32, "Evaluate every N seconds; 0 disables" {
                flag: train("Evaluation", "SECS"),
                comment: Some("Seconds between evaluations; 0 disables.")
            }
        evaluation_epochs: bool = true, "Evaluate after each epoch"
            { flag: train("Evaluation", "BOOL") }
        early_stop_patience: u32, "Stop after N evaluations without improvement; 0 disables" {
                flag: train("Evaluation", "N"),
                comment: Some("Stop after this many evaluations without improvement; 0 disables.")
            }
    }

    section "Checkpoints and results" {
        checkpoint_dir: String,
            "Folder for checkpoints [default: `checkpoints` in the job folder]" {
                flag: train("Checkpoints", "DIR"), fixed: VALUE,
                comment: Some("Empty: `checkpoints` in the job folder.")
            }
        checkpoint_steps: u32, "Save a checkpoint every N steps; 0 disables" {
                flag: train("Checkpoints", "N"),
                comment: Some("Steps between checkpoints; 0 disables.")
            }
        checkpoint_secs: u32 = 30, "Save a checkpoint every N seconds; 0 disables" {
                flag: train("Checkpoints", "SECS"),
                comment: Some("Seconds between checkpoints; 0 disables.")
            }
        keep_checkpoint_max: u32 = 3, "Number of checkpoints to keep; 0 keeps all"
            { flag: train("Checkpoints", "N") }
        output: String,
            "Folder for the trained model or the predictions [default: `output` in the job \
             folder]"
            { flag: common("Results", "DIR"), comment: Some("Empty: `output` in the job folder.") }
    }

    section "Limits" {
        max_step: u64, "Stop at this step; 0 means no limit" { flag: train("Data", "N") }
        max_time: Seconds,
            "Stop after this time: seconds, or a number with a unit, e.g. 10m or 2h [default: no \
             limit]" {
                flag: common("Job", "TIME"),
                comment: Some("Stop after this many seconds; 0 means no limit.")
            }
        task_timeout_secs: u32 = 300, "Reassign a worker's task after this time, in seconds" {
                flag: common("Processes", "SECS"),
                comment: Some("Reassign a worker's task after this time.")
            }
        heartbeat_timeout_secs: f64 = 10.0,
            "Replace a process that sends no heartbeat for this time, in seconds" {
                flag: common("Processes", "SECS"),
                comment: Some("Replace a process that sends no heartbeat for this time.")
            }
        relaunch_on_worker_failure: u32 = 3,
            "Crashes without progress to tolerate before the job fails; preemptions and \
             evictions do not count" {
                flag: common("Processes", "N"),
                comment: Some("Crashes without progress to tolerate before the job fails.")
            }
        max_batch_failures: u32 = 3, "Failures of the same batch after which the job fails"
            { flag: common("Processes", "N") }
    }

    section "Monitoring" {
        log_level: LogLevel, "Log level: DEBUG, INFO, WARNING or ERROR"
            { flag: common("Results", "LEVEL"), comment: Some("DEBUG, INFO, WARNING or ERROR.") }
        log_loss_steps: u32 = 100, "Log each worker's loss every N steps" {
                flag: train("Results", "N"),
                comment: Some("Log each worker's loss every this many steps.")
            }
        tensorboard_dir: String, "Write TensorBoard event files to this folder"
            { flag: train("Results", "DIR") }
        otlp_endpoint: String,
            "Send traces to this OpenTelemetry collector, e.g. http://host:4317"
            { flag: at(7, "Processes", "URL") }
        http_port: u16, "Port of the job's web page, /metrics and /healthz; 0 picks a free port"
            { flag: at(6, "Processes", "PORT") }
        allow_chaos: bool, "Allow fault injection from the web page and `elasticdl chaos`"
            { flag: at(8, "Processes", "true|false") }
        port: u16,
            "Port of the master; 0 picks a free port [default: 0; 50001 for `elasticdl master`]"
            { flag: at(5, "Processes", "") }
    }

    section "Kubernetes" {
        image_name: String,
            "Container image; runs the job on the Kubernetes cluster of your kubeconfig" {
                flag: cluster("IMAGE"),
                comment: Some("Image of the master; empty: the job runs on this machine.")
            }
        worker_image: String, "Image of workers and parameter servers [default: image_name]" {
                flag: cluster("IMAGE"), needs_cluster: true,
                comment: Some("Image of workers and parameter servers; empty: image_name.")
            }
        ps_image: String, "Image of parameter servers [default: worker_image]" {
                flag: cluster("IMAGE"), needs_cluster: true,
                comment: Some("Image of parameter servers; empty: worker_image.")
            }
        image_pull_policy: ImagePullPolicy, "Image pull policy: Always, IfNotPresent or Never"
            { flag: cluster("POLICY"), comment: Some("Or IfNotPresent, or Never.") }
        image_pull_secrets: String, "Image pull Secrets, separated by commas"
            { flag: cluster("NAMES") }
        namespace: String, "Namespace of the job [default: the kubeconfig's]" {
                flag: cluster("NAME"),
                comment: Some("Empty: the namespace of the kubeconfig's context.")
            }
        service_account: String, "Service account for the pods [default: default]" {
                flag: cluster("NAME"),
                comment: Some("Service account for the pods; empty: default.")
            }
        master_resource_request: String = "cpu=0.1,memory=1024Mi".into(),
            "Resource request of the master"
            { flag: cluster("K=V,…"), comment: Some("Also disk=, gpu= and VENDOR/NAME=.") }
        master_resource_limit: String, "Resource limit of the master [default: its request]"
            { flag: cluster("K=V,…"), comment: Some("Empty: same as the request.") }
        ps_resource_request: String = "cpu=1,memory=4096Mi".into(),
            "Resource request of each parameter server: cpu, memory, disk, gpu"
            { flag: cluster("K=V,…"), comment: Some("") }
        ps_resource_limit: String,
            "Resource limit of each parameter server [default: its request]"
            { flag: cluster("K=V,…"), comment: Some("") }
        worker_resource_request: String = "cpu=1,memory=4096Mi".into(),
            "Resource request of each worker: cpu, memory, disk, gpu"
            { flag: cluster("K=V,…"), comment: Some("") }
        worker_resource_limit: String, "Resource limit of each worker [default: its request]"
            { flag: cluster("K=V,…"), comment: Some("") }
        master_pod_priority: String, "PriorityClass of the master"
            { flag: cluster("CLASS"), comment: Some("Name of a PriorityClass.") }
        ps_pod_priority: String, "PriorityClass of parameter servers [default: the master's]"
            { flag: cluster("CLASS"), comment: Some("Empty: the master's.") }
        worker_pod_priority: String,
            "PriorityClass of workers, or the share of workers that get high_priority_class, \
             e.g. 0.5" {
                flag: cluster("CLASS|SHARE"),
                comment: Some("A PriorityClass, or the share of workers that get \
                    high_priority_class, e.g. 0.5.")
            }
        high_priority_class: String = "high-priority".into(),
            "PriorityClass of the share of workers in worker_pod_priority"
            { flag: cluster("CLASS"), comment: Some("") }
        low_priority_class: String = "low-priority".into(), "PriorityClass of the other workers"
            { flag: cluster("CLASS"), comment: Some("") }
        volume: String,
            "Volumes: claim_name=CLAIM,mount_path=PATH or host_path=PATH,mount_path=PATH, \
             separated by `;`" {
                flag: cluster("VOLUMES"), needs_cluster: true,
                comment: Some("claim_name=CLAIM,mount_path=PATH or \
                    host_path=PATH,mount_path=PATH, separated by `;`.")
            }
        job_dir: String,
            "Job folder, as a path inside the pods; empty: elasticdl/NAME on the first volume"
            {}
        restart_policy: RestartPolicy,
            "Restart policy of the master's container: Never, OnFailure or Always"
            { flag: cluster("POLICY") }
        envs: String, "Environment variables for every pod, e.g. A=1,B=2" {
                flag: cluster("K=V,…"), needs_cluster: true,
                comment: Some("Environment variables for every pod: NAME=value,…")
            }
        populate_env_names: String,
            "Regular expression for the names of environment variables to copy from the master \
             to workers and parameter servers"
            { flag: cluster("PATTERN"), needs_cluster: true }
        cluster_spec_json: String, "The contents of a --cluster_spec file, as JSON" {
                flag: cluster("JSON"), needs_cluster: true,
                comment: Some("Patches for the job's pods and Service, as JSON; see \
                    docs/kubernetes.md.")
            }
    }
}
