// SPDX-License-Identifier: Apache-2.0
//! The job description: the same fields for flags, YAML files and TrainingJobs.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::batch::BatchPlan;
use crate::layout::Layout;

/// Every checkpoint has one file per partition.
const MAX_PARTITIONS: u32 = 4096;

/// Everything that a user can specify about a job. `JobSpec::default()` is the job without flags.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct JobSpec {
    pub job_name: String,
    pub job_type: JobType,

    // The model.
    /// Folder with Python models; empty: the current folder.
    pub model_zoo: String,
    /// Name of a built-in model, or a Python model: its dotted path in `model_zoo`, its file or its
    /// folder.
    pub model_def: String,
    /// Command that runs a custom training loop; it must call `elasticdl.init()`.
    pub job_command: String,
    /// Model parameters, e.g. `lr=0.1`.
    pub model_params: BTreeMap<String, String>,
    /// Overrides the model's optimizer, e.g. `adam`.
    pub optimizer: Option<String>,
    // Names of functions in a Python module; empty: the name of the field.
    pub optimizer_fn: String,
    pub loss: String,
    pub feed: String,
    pub eval_metrics_fn: String,
    pub callbacks: String,
    pub custom_data_reader: String,
    pub prediction_outputs_processor: String,
    pub learning_rate: Option<f64>,
    /// `constant`, `steps:1000,2000:0.1`, `exponential:1000:0.9`, `cosine:100:10000`, `linear:100:10000`.
    pub learning_rate_schedule: Option<String>,
    pub weight_decay: Option<f64>,
    /// Clips the gradient of a batch to this global norm.
    pub clip_norm: Option<f64>,

    // Data: a file, folder, glob or URL.
    pub training_data: String,
    pub validation_data: String,
    pub prediction_data: String,
    /// Record encoding: `tf_example` or `bytes`.
    pub codec_type: String,
    pub data_reader_params: BTreeMap<String, String>,
    pub minibatch_size: u32,
    pub num_minibatches_per_task: u32,
    /// 0: until the job is stopped.
    pub num_epochs: u32,
    pub shuffle: bool,
    pub seed: u64,

    // Processes.
    pub distribution_strategy: Strategy,
    pub num_workers: u32,
    /// AllReduce waits while there are fewer workers than this.
    pub min_workers: u32,
    /// Maximum number of workers that `scale` can set.
    pub max_workers: Option<u32>,
    /// Micro-batches per AllReduce step, fixed for the job's lifetime; unset: `max_workers`, or
    /// `num_workers`.
    pub lanes: Option<u32>,
    /// Compute threads per worker; fixed for the job's lifetime, because results depend on it.
    pub threads_per_worker: u32,
    pub same_bits: SameBits,
    /// Assigns fewer lanes to slow workers; results stay bit-identical.
    pub lane_balance: bool,
    /// Data type of gradients sent between workers; fixed for the job's lifetime, because results
    /// depend on it.
    pub allreduce_dtype: AllreduceDtype,
    pub num_ps_pods: u32,
    /// Number of partitions of the parameter state, fixed for the job's lifetime.
    pub partitions: u32,

    // Gradients.
    /// Unset: asynchronous unless `grads_to_wait` or `sync_version_tolerance` is set.
    pub use_async: Option<bool>,
    /// Batches per synchronous round.
    pub grads_to_wait: Option<u32>,
    /// Maximum staleness, in steps: faster workers wait when they pull parameters. 0: no limit.
    pub sync_version_tolerance: u32,
    /// Divides the learning rate of a stale gradient by its staleness.
    pub lr_staleness_modulation: bool,
    /// Pulls dense parameters every this many batches (asynchronous training only).
    pub get_model_steps: u32,

    // Evaluation.
    /// Steps between evaluations; 0: only the final one.
    pub evaluation_steps: u32,
    /// Seconds between evaluations; 0: none.
    pub evaluation_secs: u32,
    /// Evaluate after each epoch.
    pub evaluation_epochs: bool,
    /// Stop after this many evaluations without improvement; 0: never.
    pub early_stop_patience: u32,

    // Checkpoints and results.
    /// Empty: `checkpoints` in the job folder.
    pub checkpoint_dir: String,
    /// Steps between checkpoints; 0: not by step.
    pub checkpoint_steps: u32,
    /// Seconds between checkpoints; 0: not by time.
    pub checkpoint_secs: u32,
    /// Number of checkpoints to keep; 0: all.
    pub keep_checkpoint_max: u32,
    /// Checkpoint to start from: a `version-N` folder, or a folder of them to use the newest.
    pub checkpoint_dir_for_init: String,
    /// Folder for the trained model or the predictions; empty: `output` in the job folder.
    pub output: String,

    // Limits.
    /// Stop at this step; 0: no limit.
    pub max_step: u64,
    /// Stop after this many seconds; 0: no limit.
    pub max_time: u64,
    /// A worker that does not finish its task in this time loses it.
    pub task_timeout_secs: u32,
    /// A process that sends no heartbeat for this long is replaced.
    pub heartbeat_timeout_secs: f64,
    /// Crashes without progress to tolerate before the job fails; preemptions and evictions do not
    /// count.
    pub relaunch_on_worker_failure: u32,
    /// Failures of the same batch after which the job fails.
    pub max_batch_failures: u32,

    // Monitoring.
    pub log_level: String,
    pub log_loss_steps: u32,
    pub tensorboard_dir: String,
    /// OpenTelemetry collector to send traces to, e.g. `http://host:4317`; empty: none.
    pub otlp_endpoint: String,
    /// Port of the job's web page, `/metrics` and `/healthz`; 0 picks a free port.
    pub http_port: u16,
    /// Allows fault injection from the web page and by `chaos`.
    pub allow_chaos: bool,
    /// Port of the master; 0 picks a free port.
    pub port: u16,

    // Kubernetes. `cluster.rs` reads these fields.
    /// Image of the master; empty: the job runs on this machine.
    pub image_name: String,
    /// Image of workers and parameter servers; empty: the master's.
    pub worker_image: String,
    /// Image of parameter servers; empty: the workers'.
    pub ps_image: String,
    /// Always, IfNotPresent or Never.
    pub image_pull_policy: String,
    /// Image pull Secrets, separated by commas.
    pub image_pull_secrets: String,
    /// Empty: the namespace of the kubeconfig's context.
    pub namespace: String,
    /// Service account for the pods; empty: the namespace's default.
    pub service_account: String,
    // `cpu=1,memory=4096Mi,gpu=1`; an empty limit equals the request.
    pub master_resource_request: String,
    pub master_resource_limit: String,
    pub ps_resource_request: String,
    pub ps_resource_limit: String,
    pub worker_resource_request: String,
    pub worker_resource_limit: String,
    /// Name of a PriorityClass; empty: none.
    pub master_pod_priority: String,
    /// Empty: the master's.
    pub ps_pod_priority: String,
    /// Name of a PriorityClass, or the share of workers that get `high_priority_class`, e.g. `0.5`.
    pub worker_pod_priority: String,
    pub high_priority_class: String,
    pub low_priority_class: String,
    /// `claim_name=CLAIM,mount_path=PATH` or `host_path=PATH,mount_path=PATH`, separated by `;`.
    pub volume: String,
    /// Job folder, as a path inside the pods; empty: a folder on the first volume.
    pub job_dir: String,
    /// Restart policy of the master's container: Never, OnFailure or Always. The master restarts
    /// the other pods.
    pub restart_policy: String,
    /// Environment variables for every pod: `NAME=value,…`.
    pub envs: String,
    /// Regular expression for the names of environment variables that the master passes on to
    /// workers and parameter servers.
    pub populate_env_names: String,
    /// Patches for the job's objects, as JSON; `--cluster_spec` reads them from a file.
    pub cluster_spec_json: String,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum JobType {
    #[default]
    Train,
    Evaluate,
    Predict,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Strategy {
    #[default]
    #[serde(rename = "ParameterServerStrategy")]
    ParameterServer,
    #[serde(rename = "AllreduceStrategy")]
    Allreduce,
    /// Dense parameters by AllReduce, embedding tables on parameter servers.
    #[serde(rename = "HybridStrategy")]
    Hybrid,
    #[serde(rename = "Local")]
    Local,
}

impl Strategy {
    /// The name in flags and files.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::ParameterServer => "ParameterServerStrategy",
            Self::Allreduce => "AllreduceStrategy",
            Self::Hybrid => "HybridStrategy",
            Self::Local => "Local",
        }
    }
}

/// What happens when a worker's results differ bitwise from those of the other workers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SameBits {
    /// The worker is rejected.
    #[default]
    Strict,
    /// The worker is admitted, and the job reports that its result depends on which worker
    /// computed it.
    Report,
}

/// Data type of gradients sent between workers. Sums are always computed in 32 bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AllreduceDtype {
    #[default]
    F32,
    /// The gradient of every lane is rounded to 16 bits, and so is their mean.
    Bf16,
}

/// How gradients of several workers are combined.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    Async,
    /// Asynchronous with bounded staleness.
    Bounded {
        versions: u32,
    },
    /// Rounds of this many batches, applied together.
    Sync {
        grads_to_wait: u32,
    },
    /// The parts of a batch, one per lane, are applied together.
    Steps {
        lanes: u32,
    },
}

/// An error in a job description: a sentence that names the flag and what to do next.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Invalid(pub String);

impl Default for JobSpec {
    #[expect(clippy::too_many_lines, reason = "one line for each field")]
    fn default() -> Self {
        Self {
            job_name: String::new(),
            job_type: JobType::Train,
            model_zoo: String::new(),
            model_def: "mnist_cnn".into(),
            job_command: String::new(),
            model_params: BTreeMap::new(),
            optimizer: None,
            optimizer_fn: String::new(),
            loss: String::new(),
            feed: String::new(),
            eval_metrics_fn: String::new(),
            callbacks: String::new(),
            custom_data_reader: String::new(),
            prediction_outputs_processor: String::new(),
            learning_rate: None,
            learning_rate_schedule: None,
            weight_decay: None,
            clip_norm: None,
            training_data: String::new(),
            validation_data: String::new(),
            prediction_data: String::new(),
            codec_type: "tf_example".into(),
            data_reader_params: BTreeMap::new(),
            minibatch_size: 64,
            num_minibatches_per_task: 8,
            num_epochs: 1,
            shuffle: true,
            seed: 0,
            distribution_strategy: Strategy::ParameterServer,
            num_workers: 2,
            min_workers: 1,
            max_workers: None,
            lanes: None,
            threads_per_worker: 1,
            same_bits: SameBits::Strict,
            lane_balance: false,
            allreduce_dtype: AllreduceDtype::F32,
            num_ps_pods: 1,
            partitions: 32,
            use_async: None,
            grads_to_wait: None,
            sync_version_tolerance: 0,
            lr_staleness_modulation: false,
            get_model_steps: 1,
            evaluation_steps: 0,
            evaluation_secs: 0,
            evaluation_epochs: true,
            early_stop_patience: 0,
            checkpoint_dir: String::new(),
            checkpoint_steps: 0,
            checkpoint_secs: 30,
            keep_checkpoint_max: 3,
            checkpoint_dir_for_init: String::new(),
            output: String::new(),
            max_step: 0,
            max_time: 0,
            task_timeout_secs: 300,
            heartbeat_timeout_secs: 10.0,
            relaunch_on_worker_failure: 3,
            max_batch_failures: 3,
            log_level: "INFO".into(),
            log_loss_steps: 100,
            tensorboard_dir: String::new(),
            otlp_endpoint: String::new(),
            http_port: 0,
            allow_chaos: false,
            port: 0,
            image_name: String::new(),
            worker_image: String::new(),
            ps_image: String::new(),
            image_pull_policy: "Always".into(),
            image_pull_secrets: String::new(),
            namespace: String::new(),
            service_account: String::new(),
            master_resource_request: "cpu=0.1,memory=1024Mi".into(),
            master_resource_limit: String::new(),
            ps_resource_request: "cpu=1,memory=4096Mi".into(),
            ps_resource_limit: String::new(),
            worker_resource_request: "cpu=1,memory=4096Mi".into(),
            worker_resource_limit: String::new(),
            master_pod_priority: String::new(),
            ps_pod_priority: String::new(),
            worker_pod_priority: String::new(),
            high_priority_class: "high-priority".into(),
            low_priority_class: "low-priority".into(),
            volume: String::new(),
            job_dir: String::new(),
            restart_policy: "Never".into(),
            envs: String::new(),
            populate_env_names: String::new(),
            cluster_spec_json: String::new(),
        }
    }
}

impl JobSpec {
    /// How gradients meet on servers: by lanes, or as the three flags that speak of it say.
    #[must_use]
    pub fn mode(&self) -> Mode {
        if self.is_hybrid() {
            return Mode::Steps { lanes: self.n_lanes() };
        }
        if self.use_async == Some(true) {
            return Mode::Async;
        }
        if self.sync_version_tolerance > 0 {
            return Mode::Bounded { versions: self.sync_version_tolerance };
        }
        match (self.use_async, self.grads_to_wait) {
            (Some(false), grads) => Mode::Sync { grads_to_wait: grads.unwrap_or(1) },
            (None, Some(grads)) => Mode::Sync { grads_to_wait: grads },
            (None | Some(true), _) => Mode::Async,
        }
    }

    /// Whether the workers hold the dense parameters themselves and train in steps.
    #[must_use]
    pub fn is_allreduce(&self) -> bool {
        match self.distribution_strategy {
            Strategy::ParameterServer => false,
            Strategy::Allreduce | Strategy::Hybrid | Strategy::Local => {
                self.job_type == JobType::Train
            }
        }
    }

    /// Strategy and number of servers say the same thing twice; here they are made to agree.
    pub fn settle_strategy(&mut self) {
        if self.job_type != JobType::Train {
            // Whatever trained a model, servers hold it while it is used.
            self.distribution_strategy = Strategy::ParameterServer;
            self.num_ps_pods = self.num_ps_pods.max(1);
            return;
        }
        if self.distribution_strategy == Strategy::ParameterServer && self.num_ps_pods == 0 {
            self.distribution_strategy = Strategy::Allreduce;
        }
        match self.distribution_strategy {
            Strategy::ParameterServer | Strategy::Hybrid => {}
            Strategy::Allreduce => self.num_ps_pods = 0,
            Strategy::Local => {
                // A step stays what it is with one worker: that one runs all lanes.
                self.lanes = Some(self.n_lanes_of_local());
                (self.num_ps_pods, self.num_workers, self.max_workers) = (0, 1, None);
            }
        }
    }

    /// Whether workers that train in steps leave embedding tables to servers.
    #[must_use]
    pub fn is_hybrid(&self) -> bool {
        self.distribution_strategy == Strategy::Hybrid && self.job_type == JobType::Train
    }

    /// Whether there are parameter servers.
    #[must_use]
    pub fn has_servers(&self) -> bool {
        !self.is_allreduce() || self.is_hybrid()
    }

    /// How the state of a model with `dense_len` dense numbers is cut.
    #[must_use]
    pub fn layout(&self, dense_len: usize) -> Layout {
        match self.is_hybrid() {
            true => Layout::apart(dense_len, self.partitions),
            false => Layout::shared(dense_len, self.partitions),
        }
    }

    /// Whether the job runs a custom training loop.
    #[must_use]
    pub fn is_own_loop(&self) -> bool {
        !self.job_command.is_empty()
    }

    /// Micro-batches of one AllReduce step.
    #[must_use]
    pub fn n_lanes(&self) -> u32 {
        self.lanes.or(self.max_workers).unwrap_or(self.num_workers).max(1)
    }

    /// Lanes of a job without other workers: one, unless said otherwise.
    #[must_use]
    pub fn n_lanes_of_local(&self) -> u32 {
        self.lanes.or(self.max_workers).unwrap_or(1).max(1)
    }

    /// The plan of batches over a data set of `n_records`. A step of AllReduce is one batch of
    /// it: `lanes::share_out` cuts it into lanes.
    #[must_use]
    pub fn plan(&self, n_records: u64) -> BatchPlan {
        let lanes = if self.is_allreduce() { self.n_lanes() } else { 1 };
        BatchPlan {
            n_records,
            minibatch_size: self.minibatch_size.saturating_mul(lanes),
            batches_per_shard: self.num_minibatches_per_task,
            seed: self.seed,
            shuffle: self.shuffle,
        }
    }

    #[must_use]
    pub fn task_timeout(&self) -> Duration {
        Duration::from_secs(u64::from(self.task_timeout_secs))
    }

    #[must_use]
    pub fn heartbeat_timeout(&self) -> Duration {
        Duration::from_secs_f64(self.heartbeat_timeout_secs)
    }

    /// Refuses to resume a job with a field changed that must stay the same.
    pub fn check_resumed(&self, before: &Self) -> Result<(), Invalid> {
        let differs = [
            ("job_type", self.job_type != before.job_type),
            ("model_zoo", self.model_zoo != before.model_zoo),
            ("model_def", self.model_def != before.model_def),
            ("job_command", self.job_command != before.job_command),
            ("model_params", self.model_params != before.model_params),
            ("optimizer", self.optimizer != before.optimizer),
            ("training_data", self.training_data != before.training_data),
            ("codec_type", self.codec_type != before.codec_type),
            ("data_reader_params", self.data_reader_params != before.data_reader_params),
            ("minibatch_size", self.minibatch_size != before.minibatch_size),
            (
                "num_minibatches_per_task",
                self.num_minibatches_per_task != before.num_minibatches_per_task,
            ),
            ("shuffle", self.shuffle != before.shuffle),
            ("seed", self.seed != before.seed),
            ("partitions", self.partitions != before.partitions),
            (
                "distribution_strategy",
                self.is_allreduce() != before.is_allreduce()
                    || self.is_hybrid() != before.is_hybrid(),
            ),
            ("lanes", self.is_allreduce() && self.n_lanes() != before.n_lanes()),
            (
                "allreduce_dtype",
                self.is_allreduce() && self.allreduce_dtype != before.allreduce_dtype,
            ),
            ("threads_per_worker", self.threads_per_worker != before.threads_per_worker),
            (
                "use_async, --grads_to_wait or --sync_version_tolerance",
                self.mode() != before.mode(),
            ),
            ("checkpoint_dir", self.checkpoint_dir != before.checkpoint_dir),
            (
                "checkpoint_dir_for_init",
                self.checkpoint_dir_for_init != before.checkpoint_dir_for_init,
            ),
        ];
        match differs.iter().find(|(_, differs)| *differs) {
            None => Ok(()),
            Some((name, _)) => Err(Invalid(format!(
                "a resumed job cannot change --{name}; leave it out, or start a new job with another --job_name"
            ))),
        }
    }

    /// Refuses what no job can run with; the platform's own checks come after.
    pub fn check(&self) -> Result<(), Invalid> {
        let invalid = |text: &str| Err(Invalid(text.into()));
        let name_fits = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        if self.job_name.is_empty()
            || !self.job_name.chars().all(name_fits)
            || self.job_name.len() > 50
        {
            return Err(Invalid(format!(
                "job name `{}` must be 1 to 50 characters of a-z, 0-9 and `-`; set --job_name",
                self.job_name
            )));
        }
        if self.minibatch_size == 0 || self.num_minibatches_per_task == 0 {
            return invalid("--minibatch_size and --num_minibatches_per_task must be at least 1");
        }
        if self.partitions == 0 || self.num_ps_pods > self.partitions {
            return invalid("--num_ps_pods must not exceed --partitions, which must be at least 1");
        }
        if self.is_allreduce() {
            self.check_workers()?;
        }
        if self.is_hybrid() {
            self.check_hybrid()?;
        }
        if self.partitions > MAX_PARTITIONS {
            return Err(Invalid(format!("--partitions must be at most {MAX_PARTITIONS}")));
        }
        if self.clip_norm.is_some_and(|norm| !norm.is_finite() || norm <= 0.0) {
            return invalid("--clip_norm must be a number above 0; leave it out for no clipping");
        }
        if self.grads_to_wait == Some(0) || self.get_model_steps == 0 {
            return invalid("--grads_to_wait and --get_model_steps must be at least 1");
        }
        if self.use_async == Some(true) && self.grads_to_wait.is_some_and(|grads| grads > 1) {
            return invalid("--grads_to_wait needs synchronous training; drop --use_async");
        }
        if self.heartbeat_timeout_secs.is_nan() || self.heartbeat_timeout_secs < 0.5 {
            return invalid("--heartbeat_timeout_secs must be at least 0.5");
        }
        if !is_collector(&self.otlp_endpoint) {
            return Err(Invalid(format!(
                "--otlp_endpoint `{}` is not a collector URL; use http://host:4317 or https://…",
                self.otlp_endpoint
            )));
        }
        if self.task_timeout_secs == 0 {
            return invalid("--task_timeout_secs must be at least 1");
        }
        if !["tf_example", "bytes"].contains(&self.codec_type.as_str()) {
            return Err(Invalid(format!(
                "unknown --codec_type `{}`; use tf_example or bytes",
                self.codec_type
            )));
        }
        Ok(())
    }

    /// Refuses what contradicts steps that workers and servers take together.
    fn check_hybrid(&self) -> Result<(), Invalid> {
        let invalid = |text: &str| Err(Invalid(text.into()));
        if self.num_ps_pods == 0 {
            return invalid(
                "HybridStrategy keeps embedding tables on parameter servers: --num_ps_pods must be \
                 at least 1; without tables use --distribution_strategy=AllreduceStrategy",
            );
        }
        let is_gathered = self.grads_to_wait.is_some_and(|grads| grads > 1);
        if self.use_async == Some(true) || is_gathered || self.sync_version_tolerance > 0 {
            return invalid(
                "HybridStrategy is synchronous: drop --use_async, --grads_to_wait and \
                 --sync_version_tolerance; --lanes sets the number of gradients per step",
            );
        }
        Ok(())
    }

    /// Refuses numbers of workers and lanes that contradict each other.
    fn check_workers(&self) -> Result<(), Invalid> {
        let lanes = self.n_lanes();
        let most = self.max_workers.unwrap_or(lanes);
        if self.lanes == Some(0) || self.threads_per_worker == 0 {
            let why = "--lanes and --threads_per_worker must be at least 1";
            return Err(Invalid(why.into()));
        }
        if self.num_workers.max(most) > lanes {
            return Err(Invalid(format!(
                "{} workers are more than --lanes={lanes}: every worker needs a lane; raise --lanes",
                self.num_workers.max(most)
            )));
        }
        // None at all: they are started manually.
        let is_between = (self.min_workers..=most).contains(&self.num_workers);
        if self.num_workers > 0 && !is_between {
            return Err(Invalid(format!(
                "--num_workers={} must be between --min_workers={} and --max_workers={most}",
                self.num_workers, self.min_workers
            )));
        }
        if u64::from(lanes) * u64::from(self.minibatch_size) > u64::from(u32::MAX) {
            return Err(Invalid("--lanes times --minibatch_size must stay below 2^32".into()));
        }
        Ok(())
    }
}

/// Whether spans can go there: nowhere, or over gRPC to a host.
fn is_collector(endpoint: &str) -> bool {
    let host = ["http://", "https://"].iter().find_map(|scheme| endpoint.strip_prefix(scheme));
    let is_host = |rest: &str| !rest.starts_with(['/', ':']) && !rest.contains(char::is_whitespace);
    endpoint.is_empty() || host.is_some_and(|rest| !rest.is_empty() && is_host(rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_codec_is_refused_by_name() {
        let (job_name, codec_type) = ("x".into(), "json".into());
        let spec = JobSpec { job_name, codec_type, ..JobSpec::default() };
        let expected = "unknown --codec_type `json`; use tf_example or bytes";
        assert_eq!(spec.check().unwrap_err().to_string(), expected);
    }
}
