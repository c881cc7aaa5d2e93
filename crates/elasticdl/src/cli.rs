// SPDX-License-Identifier: Apache-2.0
//! The command line: every command with its flags.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use edl_core::platform::ChaosKind;
use edl_core::spec::{FieldType as _, LogLevel};

use crate::flags::{CLUSTER, COMMON, HIDDEN, JobFlags, PREDICT, SCRIPT, TRAIN};
use crate::{console, host};

pub(crate) mod data;
pub(crate) mod jobs;
pub(crate) mod operator;
pub(crate) mod trained;
pub(crate) mod zoo;

pub(crate) const ABOUT: &str = "Train deep-learning models on machines that come and go";

pub(crate) fn version() -> String {
    format!("{} (commit {})", env!("CARGO_PKG_VERSION"), host::get().commit)
}

#[derive(Debug, Parser)]
#[command(name = "elasticdl", about = ABOUT, version = version())]
#[command(disable_help_subcommand = true, max_term_width = 110)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
    /// Print only results and errors
    #[arg(long, short, global = true)]
    pub(crate) quiet: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Train a model
    #[command(after_help = TRAIN_EXAMPLES)]
    Train(Box<SubmitArgs<{ CLUSTER | COMMON | TRAIN }>>),
    /// Evaluate a trained model
    #[command(after_help = trained::EVALUATE_EXAMPLES)]
    Evaluate(Box<trained::UseArgs<{ CLUSTER | COMMON }>>),
    /// Predict with a trained model: one result per record
    #[command(after_help = trained::PREDICT_EXAMPLES)]
    Predict(Box<trained::UseArgs<{ CLUSTER | COMMON | PREDICT }>>),
    /// Export a trained model to files that other programs can read
    #[command(after_help = trained::EXPORT_EXAMPLES)]
    Export(trained::ExportArgs),
    /// Run your own training script (like torchrun)
    #[command(after_help = RUN_EXAMPLES)]
    Run(Box<ScriptArgs>),
    /// Write a job description file with comments
    Init(InitArgs),
    /// Show the status and progress of a job
    Status(StatusArgs),
    /// Follow the progress of a background job
    Attach(JobArg),
    /// Wait until a job ends; the exit code shows how it ended
    #[command(after_help = jobs::WAIT_EXAMPLES)]
    Wait(jobs::WaitArgs),
    /// Monitor and control a running job in a full-screen view
    Top(JobArg),
    /// Print the logs of a job's processes
    Logs(LogsArgs),
    /// Change the number of workers of a running job
    Scale(ScaleArgs),
    /// Stop a job; it can be resumed later
    Stop(StopArgs),
    /// List jobs
    List(jobs::ListArgs),
    /// Delete jobs that are not running, with checkpoints and models
    #[command(after_help = jobs::CLEAN_EXAMPLES)]
    Clean(jobs::CleanArgs),
    /// Verify that every record was trained exactly once
    Audit(StatusArgs),
    /// Save a job's web page as a single file
    Report(JobArg),
    /// Kill, pause, disconnect or slow down a process of a running job
    #[command(after_help = CHAOS_EXAMPLES)]
    Chaos(ChaosArgs),
    /// Generate, import and inspect datasets
    Data(data::DataArgs),
    /// Build and push container images of models
    Zoo(zoo::ZooArgs),
    /// Simulate scheduling on a cluster
    #[command(after_help = SIMULATE_EXAMPLES)]
    Simulate(SimulateArgs),
    /// Run the Kubernetes operator, or print its manifests
    #[command(after_help = operator::OPERATOR_EXAMPLES)]
    Operator(operator::OperatorArgs),
    /// Show what the operator would do with each job, and why
    #[command(after_help = operator::PLAN_EXAMPLES)]
    Plan(operator::PlanArgs),
    /// Explain why a job failed or stalled, or has few workers
    #[command(after_help = operator::EXPLAIN_EXAMPLES)]
    Explain(operator::ExplainArgs),
    /// Convert PaddlePaddle EDL manifests
    Job(operator::JobArgs),
    /// Train while processes are killed, then verify the result
    Demo(DemoArgs),
    /// Check that this machine is ready to train
    Doctor,
    /// Run a job's master and parameter servers manually
    Master(Box<MasterArgs>),
    /// Run a parameter server manually
    Ps(PsArgs),
    /// Run a worker manually
    Worker(Box<WorkerArgs>),
    /// Print help: an overview, or all flags of a command
    Help {
        /// Command, e.g. `train` or `data import`
        #[arg(value_name = "COMMAND")]
        command: Vec<String>,
    },
    /// Print the version
    Version,
    /// Print a shell completion script
    Completions {
        /// Shell
        shell: clap_complete::Shell,
    },
    /// Print the names of the jobs on this machine, for shell completion
    #[command(hide = true)]
    JobNames,
    /// Run the background process of `train --detach`
    #[command(hide = true)]
    Supervise(SuperviseArgs),
    /// Describe the model of the job on standard input
    #[command(hide = true)]
    Describe,
    /// Run a process of a job inside a container
    #[command(hide = true)]
    Pod(crate::pod::PodArgs),
}

const CHAOS_EXAMPLES: &str = "\
Examples:
  elasticdl train --allow_chaos --detach
  elasticdl chaos kill                              kill a random worker
  elasticdl chaos my-job pause --worker 1           pause worker 1; `resume` resumes it
  elasticdl chaos partition --worker 1 --secs 20    disconnect worker 1 for 20 seconds
  elasticdl chaos slow --factor 8                   make a random worker 8x slower for 15 seconds
  elasticdl chaos kill --every 30s --seed 7         kill a random worker every 30 seconds";

const TRAIN_EXAMPLES: &str = "\
Examples:
  elasticdl train --epochs=3 --workers=4
  elasticdl train --model_def=mnist_mlp --grads_to_wait=2 --training_data=DIR
  elasticdl train --config job.yaml --model_params=\"lr=0.05\" --detach
  elasticdl train --resume my-job --workers=8";

const RUN_EXAMPLES: &str = "\
Examples:
  elasticdl run --workers 2:8 train.py --lr 0.1
  elasticdl run --workers 2:8 --image_name=IMAGE \\
    --volume=claim_name=CLAIM,mount_path=/data /workspace/train.py";

const SIMULATE_EXAMPLES: &str = "\
Examples:
  elasticdl simulate edl-case-1 --policy=off,edl-published,elastic-fair --seeds=10
  elasticdl simulate --example > cluster.yaml && elasticdl simulate cluster.yaml --svg=run.svg
  elasticdl simulate adaptdl-1 adaptdl-2 --policy=tiresias,goodput --data=DIR";

/// A command that runs a job, with the groups of flags that describe the job.
#[derive(Args, Debug)]
pub(crate) struct SubmitArgs<const GROUPS: u8> {
    // First, because it decides the order of the headings in `--help`.
    #[command(flatten)]
    pub(crate) job: JobFlags<GROUPS>,
    #[command(flatten)]
    pub(crate) run: RunFlags,
}

/// Whose output the terminal shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum LogToTerminal {
    Leader,
    All,
    None,
}

/// How a job is run, as opposed to what it is.
#[derive(Args, Clone, Debug, Default)]
#[command(rename_all = "snake_case")]
pub(crate) struct RunFlags {
    /// Read the job description from a YAML file, or from standard input (`-`); flags override it
    #[arg(long, help_heading = "Job", value_name = "FILE", overrides_with = "config")]
    pub(crate) config: Option<PathBuf>,
    /// Print the resulting job description as YAML and exit
    #[arg(long, help_heading = "Job")]
    pub(crate) print_config: bool,
    /// Resume a stopped or killed job [default: the most recent job]
    #[arg(long, help_heading = "Job", value_name = "JOB", num_args = 0..=1)]
    #[expect(clippy::option_option, reason = "absent, bare, and with a name are three things")]
    pub(crate) resume: Option<Option<String>>,
    /// Job folder [default: $ELASTICDL_HOME/jobs/NAME; on a cluster, elasticdl/NAME on the first
    /// volume]
    #[arg(long, help_heading = "Job", value_name = "DIR")]
    pub(crate) job_dir: Option<PathBuf>,
    /// Write the Kubernetes objects as YAML to stdout or FILE instead of submitting the job
    #[arg(long, help_heading = "Kubernetes", value_name = "FILE", num_args = 0..=1, require_equals = true)]
    #[expect(clippy::option_option, reason = "absent, bare, and with a name are three things")]
    pub(crate) yaml: Option<Option<PathBuf>>,
    /// YAML or JSON file with patches for the job's pods and Service; see docs/kubernetes.md
    #[arg(long, help_heading = "Kubernetes", value_name = "FILE")]
    pub(crate) cluster_spec: Option<PathBuf>,
    /// Build an image from --model_zoo, push it to PREFIX (registry and path), and run the job with
    /// it
    #[arg(long, help_heading = "Kubernetes", value_name = "PREFIX")]
    pub(crate) docker_image_prefix: Option<String>,
    /// Base image for --docker_image_prefix [default: the one of `elasticdl zoo init`]
    #[arg(
        long,
        help_heading = "Kubernetes",
        value_name = "IMAGE",
        requires = "docker_image_prefix"
    )]
    pub(crate) image_base: Option<String>,
    /// Use the kubeconfig file even inside a cluster [default: false]
    #[arg(long, help_heading = "Kubernetes", value_name = "BOOL", num_args = 0..=1, require_equals = true,
        default_missing_value = "true", value_parser = clap::builder::BoolishValueParser::new())]
    pub(crate) force_use_kube_config_file: Option<bool>,
    /// Run the job in the background
    #[arg(long, help_heading = "Job")]
    pub(crate) detach: bool,
    /// Show the full-screen view of `elasticdl top`; the job keeps running when you quit the
    /// view
    #[arg(long, help_heading = "Job", conflicts_with = "detach")]
    pub(crate) tui: bool,
    /// Workers whose Python output the terminal shows: only the leader, all (each line with the
    /// worker's name) or none; the logs contain the output of all workers [default: leader; with
    /// --quiet, none]
    #[arg(long, help_heading = "Job", value_name = "WHOSE", conflicts_with_all = ["detach", "tui"])]
    pub(crate) log_to_terminal: Option<LogToTerminal>,
    /// Deprecated: use --num_minibatches_per_task
    #[arg(long, hide = true, value_name = "N")]
    pub(crate) records_per_task: Option<u32>,
}

#[derive(Args, Debug)]
#[command(rename_all = "snake_case")]
pub(crate) struct MasterArgs {
    #[command(flatten)]
    pub(crate) job: JobFlags<{ CLUSTER | COMMON | TRAIN | PREDICT }>,
    #[command(flatten)]
    pub(crate) run: RunFlags,
    /// Set by the supervisor that started this process
    #[arg(long, hide = true, requires = "job_dir")]
    pub(crate) supervised: bool,
}

/// Which job a process joins.
#[derive(Args, Clone, Debug, Default)]
#[command(rename_all = "snake_case")]
pub(crate) struct JoinFlags {
    /// Address of the master [default: the job's, or localhost:50001 if no job is named]
    #[arg(long, value_name = "HOST:PORT")]
    pub(crate) master_addr: Option<String>,
    /// Job name
    #[arg(long)]
    pub(crate) job_name: Option<String>,
    /// Job folder
    #[arg(long, value_name = "DIR")]
    pub(crate) job_dir: Option<PathBuf>,
    /// File with the job's key [default: `job.key` in the job folder]
    #[arg(long, value_name = "FILE")]
    pub(crate) job_key_file: Option<PathBuf>,
    /// Log level: DEBUG, INFO, WARNING or ERROR [default: the job's]
    #[arg(long, value_name = "LEVEL", value_parser = LogLevel::parse)]
    pub(crate) log_level: Option<LogLevel>,
    /// Set by the supervisor that started this process
    #[arg(long, hide = true, requires = "job_dir")]
    pub(crate) supervised: bool,
}

/// The flags of the master, which a worker or server accepts too; the job decides.
pub(crate) type MemberFlags = JobFlags<{ COMMON | TRAIN | PREDICT | HIDDEN }>;

#[derive(Args, Debug)]
#[command(rename_all = "snake_case")]
pub(crate) struct PsArgs {
    /// Index of this parameter server
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) ps_id: u32,
    /// Port to listen on; 0 picks a free port
    #[arg(long, default_value_t = 0)]
    pub(crate) port: u16,
    #[command(flatten)]
    pub(crate) join: JoinFlags,
    #[command(flatten)]
    pub(crate) job: MemberFlags,
}

/// A training script that calls `elasticdl.init()`.
#[derive(Args, Debug)]
#[command(rename_all = "snake_case")]
pub(crate) struct ScriptArgs {
    /// Number of workers, or the minimum and maximum, e.g. 2:8. On this machine, a job starts with
    /// one worker per core within this range [default: nnodes × nproc_per_node]
    #[arg(long, visible_alias = "num_workers", value_name = "N[:MAX]")]
    pub(crate) workers: Option<String>,
    /// As in torchrun: number of nodes, or the minimum and maximum; ignored with --workers
    #[arg(long, value_name = "N[:MAX]", default_value = "1")]
    pub(crate) nnodes: String,
    /// As in torchrun: workers per node, or `auto` for one per core; ignored with --workers
    #[arg(long, alias = "nproc-per-node", value_name = "N", default_value = "1")]
    pub(crate) nproc_per_node: String,
    /// Micro-batches per step, fixed for the job's lifetime [default: the maximum number of
    /// workers]
    #[arg(long, value_name = "N")]
    pub(crate) lanes: Option<u32>,
    /// Where the optimizer steps run: in elasticdl (`rust`, only supported optimizers) or in the
    /// script (`python`, any optimizer); `auto` selects `python` if the script calls
    /// `optimizer.step()` or its optimizer is not supported
    #[arg(long, value_name = "WHERE", value_parser = ["auto", "rust", "python"], default_value = "auto")]
    pub(crate) step: String,
    /// Random seed
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
    /// Compute threads per worker, fixed for the job's lifetime [default: 1]
    #[arg(long, alias = "threads-per-worker", value_name = "N")]
    pub(crate) threads_per_worker: Option<u32>,
    /// Number of crashes without progress that the job tolerates [default: 3]
    #[arg(long, alias = "max-restarts", value_name = "N")]
    pub(crate) max_restarts: Option<u32>,
    /// Job name [default: derived from the script's name]
    #[arg(long, alias = "job-name")]
    pub(crate) job_name: Option<String>,
    /// Job folder [default: $ELASTICDL_HOME/jobs/NAME; on a cluster, elasticdl/NAME on the first
    /// volume]
    #[arg(long, alias = "job-dir", value_name = "DIR")]
    pub(crate) job_dir: Option<PathBuf>,
    /// Folder for the trained model [default: `output` in the job folder]
    #[arg(long, value_name = "DIR")]
    pub(crate) output: Option<String>,
    /// Run the job in the background
    #[arg(long)]
    pub(crate) detach: bool,
    /// Workers whose script output the terminal shows: only the leader, all (each line with the
    /// worker's name) or none; the logs contain the output of all workers [default: leader; with
    /// --quiet, none]
    #[arg(long, value_name = "WHOSE", conflicts_with = "detach")]
    pub(crate) log_to_terminal: Option<LogToTerminal>,
    /// Run SCRIPT as a Python module, like `python -m`
    #[arg(short, long)]
    pub(crate) module: bool,
    /// Run SCRIPT directly, without Python
    #[arg(long, alias = "no-python")]
    pub(crate) no_python: bool,
    /// Resume a stopped or killed job [default: start a new one]
    #[arg(long, value_name = "JOB")]
    pub(crate) resume: Option<String>,
    #[command(flatten)]
    pub(crate) job: JobFlags<{ CLUSTER | SCRIPT }>,
    /// Accepted for compatibility with torchrun; always on
    #[arg(long, hide = true)]
    pub(crate) standalone: bool,
    #[arg(long, alias = "rdzv-backend", hide = true)]
    pub(crate) rdzv_backend: Option<String>,
    #[arg(long, alias = "rdzv-endpoint", hide = true)]
    pub(crate) rdzv_endpoint: Option<String>,
    #[arg(long, alias = "rdzv-id", hide = true)]
    pub(crate) rdzv_id: Option<String>,
    /// Script to run, followed by its arguments
    #[arg(value_name = "SCRIPT", required_unless_present = "resume", trailing_var_arg = true)]
    pub(crate) script: Vec<String>,
}

#[derive(Args, Debug)]
#[command(rename_all = "snake_case")]
pub(crate) struct WorkerArgs {
    /// Index of this worker
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) worker_id: u32,
    #[command(flatten)]
    pub(crate) join: JoinFlags,
    #[command(flatten)]
    pub(crate) job: MemberFlags,
    /// Ignored: the master provides it
    #[arg(long, hide = true)]
    pub(crate) job_type: Option<String>,
    /// Ignored: the master provides it
    #[arg(long, hide = true)]
    pub(crate) ps_addrs: Option<String>,
}

#[derive(Args, Debug)]
#[command(rename_all = "snake_case")]
pub(crate) struct SuperviseArgs {
    /// Without it, a new job is on standard input
    #[arg(long)]
    pub(crate) job_dir: Option<PathBuf>,
    #[arg(long, requires = "job_dir")]
    pub(crate) resume: bool,
    /// What the user has entered.
    #[arg(last = true)]
    pub(crate) command: Vec<String>,
}

#[derive(Args, Clone, Debug, Default)]
pub(crate) struct JobArg {
    /// Job name or folder [default: the most recent job]
    #[arg(value_name = "JOB")]
    pub(crate) job: Option<String>,
    /// Look for the job in this namespace of the cluster [default: on this machine]
    #[arg(long, value_name = "NAME")]
    pub(crate) namespace: Option<String>,
}

#[derive(Args, Debug)]
pub(crate) struct StopArgs {
    #[command(flatten)]
    pub(crate) job: JobArg,
    /// Time for finishing the batches in progress and saving a checkpoint, e.g. 5s or 1m; 0 stops
    /// at once [default: 20s]
    #[arg(long, value_name = "TIME", value_parser = crate::flags::seconds)]
    pub(crate) within: Option<u64>,
}

#[derive(Args, Debug)]
pub(crate) struct StatusArgs {
    #[command(flatten)]
    pub(crate) job: JobArg,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args, Debug)]
#[command(group = clap::ArgGroup::new("process").multiple(false))]
pub(crate) struct LogsArgs {
    #[command(flatten)]
    pub(crate) job: JobArg,
    /// Show only the log of this worker [default: all processes]
    #[arg(long, value_name = "N", group = "process")]
    pub(crate) worker: Option<u32>,
    /// Show only the log of this parameter server [default: all processes]
    #[arg(long, value_name = "N", group = "process")]
    pub(crate) ps: Option<u32>,
    /// Show only the log of the master
    #[arg(long, group = "process")]
    pub(crate) master: bool,
    /// Keep printing new lines until the job ends
    #[arg(long, short)]
    pub(crate) follow: bool,
    /// Show only the last N lines [default: all]
    #[arg(long, short = 'n', value_name = "N")]
    pub(crate) tail: Option<usize>,
}

#[derive(Args, Debug)]
pub(crate) struct ScaleArgs {
    #[command(flatten)]
    pub(crate) job: JobArg,
    /// Target number of workers
    #[arg(long, visible_alias = "num_workers", value_name = "N")]
    pub(crate) workers: u32,
}

#[derive(Args, Debug)]
#[command(rename_all = "snake_case")]
#[command(allow_missing_positional = true)]
#[command(group = clap::ArgGroup::new("target").multiple(false))]
pub(crate) struct ChaosArgs {
    #[command(flatten)]
    pub(crate) job: JobArg,
    /// Chaos action
    #[arg(value_name = "ACTION")]
    pub(crate) how: How,
    /// Target worker [default: a random active worker]
    #[arg(long, value_name = "N", group = "target")]
    pub(crate) worker: Option<u32>,
    /// Target parameter server
    #[arg(long, value_name = "N", group = "target")]
    pub(crate) ps: Option<u32>,
    /// Wait until the job reaches this step [default: act at once]
    #[arg(long, value_name = "S")]
    pub(crate) at_step: Option<u64>,
    /// Repeat at this interval until the job ends, e.g. 30s [default: act once]
    #[arg(long, value_name = "TIME", value_parser = crate::flags::seconds)]
    pub(crate) every: Option<u64>,
    /// Duration of `partition` and `slow`, in seconds [default: 15]
    #[arg(long, value_name = "SECS", value_parser = f64::parse)]
    pub(crate) secs: Option<f64>,
    /// Slowdown factor of `slow` [default: 4]
    #[arg(long, value_name = "F", value_parser = clap::value_parser!(u32).range(2..=100))]
    pub(crate) factor: Option<u32>,
    /// Random seed for choosing workers [default: 0]
    #[arg(long, value_name = "K", default_value_t = 0, hide_default_value = true)]
    pub(crate) seed: u64,
}

/// A fault to inject into a process.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub(crate) enum How {
    /// Kill the process (SIGKILL)
    Kill,
    /// Pause the process (SIGSTOP)
    #[value(alias = "stop")]
    Pause,
    /// Resume a paused process (SIGCONT)
    #[value(alias = "wake")]
    Resume,
    /// Disconnect the process from the others for --secs seconds
    Partition,
    /// Slow the process down by --factor for --secs seconds
    Slow,
}

impl How {
    /// What the master is asked for.
    pub(crate) fn kind(self) -> ChaosKind {
        match self {
            Self::Kill => ChaosKind::Kill,
            Self::Pause => ChaosKind::Pause,
            Self::Resume => ChaosKind::Resume,
            Self::Partition => ChaosKind::Partition,
            Self::Slow => ChaosKind::Slow,
        }
    }
}

#[derive(Args, Debug)]
pub(crate) struct DemoArgs {
    /// Number of epochs to train
    #[arg(long, visible_alias = "num_epochs", value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) epochs: u32,
    /// Random seed for training and for choosing processes to kill
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) seed: u64,
    /// Print plain lines instead of the full-screen view
    #[arg(long)]
    pub(crate) plain: bool,
}

#[derive(Args, Debug)]
#[command(rename_all = "snake_case")]
pub(crate) struct InitArgs {
    /// File to write
    #[arg(value_name = "FILE", default_value = "job.yaml")]
    pub(crate) file: PathBuf,
    /// Overwrite an existing file
    #[arg(long)]
    pub(crate) force: bool,
    #[command(flatten)]
    pub(crate) job: JobFlags<{ CLUSTER | COMMON | TRAIN | PREDICT }>,
}

#[derive(Args, Debug)]
#[command(rename_all = "snake_case")]
pub(crate) struct SimulateArgs {
    /// Scenarios to simulate: names (edl-case-1, edl-case-2, adaptdl-N, philly-PERCENT) or YAML
    /// files
    #[arg(value_name = "SCENARIO", required_unless_present = "example")]
    pub(crate) scenarios: Vec<String>,
    /// Scheduling policies to compare, separated by commas, or `all`
    #[arg(long, value_name = "NAME,…", default_value = "elastic-fair")]
    pub(crate) policy: String,
    /// Random seed of the first run
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) seed: u64,
    /// Number of consecutive seeds to run
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    pub(crate) seeds: u64,
    /// Kubernetes timing to simulate: today or 2017 [default: the scenario's]
    #[arg(long, value_name = "YEAR")]
    pub(crate) kubernetes: Option<String>,
    /// Folder with trace files (AdaptDL's workloads and profiles)
    #[arg(long, value_name = "DIR")]
    pub(crate) data: Option<PathBuf>,
    /// Number of nodes lost without notice per hour, in the whole cluster
    #[arg(long, value_name = "N", default_value_t = 0.0, value_parser = crate::flags::rate)]
    pub(crate) losses_per_hour: f64,
    /// Number of nodes reclaimed with notice per hour, in the whole cluster
    #[arg(long, value_name = "N", default_value_t = 0.0, value_parser = crate::flags::rate)]
    pub(crate) reclaims_per_hour: f64,
    /// Write the time series of each run to a CSV file
    #[arg(long, value_name = "FILE")]
    pub(crate) csv: Option<PathBuf>,
    /// Plot each run to an SVG file: workers by job, utilization, waiting jobs
    #[arg(long, value_name = "FILE")]
    pub(crate) svg: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// Print an example scenario file with comments
    #[arg(long)]
    pub(crate) example: bool,
}

impl RunFlags {
    /// Whose output the terminal shows.
    pub(crate) fn shown_output(&self) -> LogToTerminal {
        let quiet = if console::is_quiet() { LogToTerminal::None } else { LogToTerminal::Leader };
        self.log_to_terminal.unwrap_or(quiet)
    }

    /// A flag that only a job on a cluster can follow.
    pub(crate) fn cluster_only(&self) -> Option<&'static str> {
        let yaml = self.yaml.as_ref().map(|_| "yaml");
        yaml.or_else(|| self.cluster_spec.as_ref().map(|_| "cluster_spec"))
    }
}
