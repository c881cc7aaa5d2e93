// SPDX-License-Identifier: Apache-2.0
//! The command line: every command with its flags.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use crate::flags::{ClusterFlags, CommonFlags, JobFlags, PredictFlags, TrainFlags};

pub(crate) mod operator;
pub(crate) mod zoo;

const ABOUT: &str = "Train deep-learning models on machines that come and go";

const HELP: &str = "\
{about}

Usage: elasticdl <COMMAND> [FLAGS]

Commands:
{subcommands}

Examples:
  elasticdl train                                   train a built-in model on the data shipped with it
  elasticdl train --model_def=mnist_mlp --training_data=DIR --num_workers=4 --num_epochs=2
  elasticdl init && elasticdl train --config job.yaml --detach
  elasticdl status && elasticdl logs --follow
  elasticdl train --resume                          go on where the last job was stopped or killed

Exit codes: 0 done, 1 the job failed, 2 bad input and nothing started, 3 stopped before its end (resumable),
  4 no such job, 130 interrupted (resumable). Results are on stdout, all else on stderr.
Jobs are kept in $ELASTICDL_HOME/jobs (default ~/.elasticdl/jobs). `elasticdl COMMAND --help` tells more.
";

const VERSION: &str =
    concat!(env!("CARGO_PKG_VERSION"), " (commit ", env!("ELASTICDL_COMMIT"), ")");

#[derive(Debug, Parser)]
#[command(name = "elasticdl", about = ABOUT, version = VERSION, help_template = HELP)]
#[command(disable_help_subcommand = true, max_term_width = 110)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Train a model
    #[command(after_help = TRAIN_EXAMPLES)]
    Train(Box<TrainArgs>),
    /// Measure a trained model on data
    #[command(
        after_help = "Example:\n  elasticdl evaluate --checkpoint_dir_for_init=~/.elasticdl/jobs/JOB/checkpoints"
    )]
    Evaluate(Box<EvaluateArgs>),
    /// Write a trained model's output for each record
    #[command(
        after_help = "Example:\n  elasticdl predict --checkpoint_dir_for_init=DIR --prediction_data=DATA --output=DIR"
    )]
    Predict(Box<PredictArgs>),
    /// Train by a script of your own, as torchrun starts one
    #[command(after_help = RUN_EXAMPLES)]
    Run(Box<ScriptArgs>),
    /// Write a commented job description to start from
    Init(InitArgs),
    /// Show how far a job is
    Status(StatusArgs),
    /// Watch a job that runs in the background
    Attach(JobArg),
    /// Watch a running job on the whole terminal, scale it and kill its processes by keys
    Top(JobArg),
    /// Show what the processes of a job wrote
    Logs(LogsArgs),
    /// Change the number of workers of a running job
    Scale(ScaleArgs),
    /// Stop a job; it can be resumed
    Stop(JobArg),
    /// List the jobs of this machine
    List(ListArgs),
    /// Remove jobs that have ended, with their checkpoints and models
    Clean(CleanArgs),
    /// Prove that every record was trained exactly once
    Audit(StatusArgs),
    /// Write a job's page as one file
    Report(JobArg),
    /// Kill, pause, cut off or slow a process of a running job, to see it heal
    #[command(after_help = CHAOS_EXAMPLES)]
    Chaos(ChaosArgs),
    /// Generate, import and look at data
    Data(DataArgs),
    /// Make images of models for clusters: init, build, push
    Zoo(zoo::ZooArgs),
    /// Play a cluster of many jobs in numbers, and see who gets how many workers
    #[command(after_help = SIMULATE_EXAMPLES)]
    Simulate(SimulateArgs),
    /// Care for the TrainingJobs of a cluster, or print what installs that
    #[command(after_help = operator::OPERATOR_EXAMPLES)]
    Operator(operator::OperatorArgs),
    /// Show what the operator would do with every job now, and why
    #[command(after_help = operator::PLAN_EXAMPLES)]
    Plan(operator::PlanArgs),
    /// Say why a job of the cluster is not at its maximum
    Explain(operator::ExplainArgs),
    /// Turn job descriptions of others into ours
    Job(operator::JobArgs),
    /// Train while processes are being killed, then prove that nothing was lost
    Demo(DemoArgs),
    /// Check that this machine can train
    Doctor,
    /// Run a job's master by hand; it starts parameter servers, workers are yours
    Master(Box<MasterArgs>),
    /// Run a parameter server by hand
    Ps(PsArgs),
    /// Run a worker by hand
    Worker(Box<WorkerArgs>),
    /// Print shell completions
    Completions {
        /// bash, zsh, fish, elvish or powershell
        shell: clap_complete::Shell,
    },
    /// The background half of `train --detach`
    #[command(hide = true)]
    Supervise(SuperviseArgs),
    /// Says what the model of the job on standard input is made of
    #[command(hide = true)]
    Describe,
    /// A process of a job inside a container
    #[command(hide = true)]
    Pod(crate::pod::PodArgs),
}

const CHAOS_EXAMPLES: &str = "\
Examples:
  elasticdl train --allow_chaos --detach
  elasticdl chaos kill                              one of the workers, now
  elasticdl chaos my-job stop --worker 1            as if its machine stood still; wake ends it
  elasticdl chaos partition --worker 1 --secs 20    as if its cable was pulled, and put back
  elasticdl chaos slow --factor 8                   as if others used its machine, for a while
  elasticdl chaos kill --every 30s --seed 7         again and again until the job ends";

const TRAIN_EXAMPLES: &str = "\
Examples:
  elasticdl train --num_epochs=3 --num_workers=4
  elasticdl train --model_def=mnist_mlp --grads_to_wait=2 --training_data=data/mnist/train
  elasticdl train --config job.yaml --model_params=\"lr=0.05\" --detach
  elasticdl train --resume my-job --num_workers=8";

const RUN_EXAMPLES: &str = "\
Examples:
  elasticdl run --workers 2:8 train.py --lr 0.1
  elasticdl run --workers 2:8 --image_name=IMAGE --volume=claim_name=CLAIM,mount_path=/data /workspace/train.py";

const SIMULATE_EXAMPLES: &str = "\
Examples:
  elasticdl simulate edl-case-1 --policy=off,edl-published,elastic-fair --seeds=10
  elasticdl simulate --example > cluster.yaml && elasticdl simulate cluster.yaml --svg=play.svg
  elasticdl simulate adaptdl-1 adaptdl-2 --policy=tiresias,goodput --data=DIR";

#[derive(Args, Debug)]
pub(crate) struct TrainArgs {
    #[command(flatten)]
    pub(crate) run: RunFlags,
    #[command(flatten)]
    pub(crate) cluster: ClusterFlags,
    #[command(flatten)]
    pub(crate) common: CommonFlags,
    #[command(flatten)]
    pub(crate) train: TrainFlags,
}

#[derive(Args, Debug)]
pub(crate) struct EvaluateArgs {
    #[command(flatten)]
    pub(crate) run: RunFlags,
    #[command(flatten)]
    pub(crate) cluster: ClusterFlags,
    #[command(flatten)]
    pub(crate) common: CommonFlags,
}

#[derive(Args, Debug)]
pub(crate) struct PredictArgs {
    #[command(flatten)]
    pub(crate) run: RunFlags,
    #[command(flatten)]
    pub(crate) cluster: ClusterFlags,
    #[command(flatten)]
    pub(crate) common: CommonFlags,
    #[command(flatten)]
    pub(crate) predict: PredictFlags,
}

/// How a job is run, as opposed to what it is.
#[derive(Args, Clone, Debug, Default)]
#[command(rename_all = "snake_case")]
pub(crate) struct RunFlags {
    /// Read the job from a YAML file; flags win
    #[arg(long, help_heading = "Job", value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Print the job as YAML and start nothing
    #[arg(long, help_heading = "Job")]
    pub(crate) print_config: bool,
    /// Go on with a job that was stopped or killed [default: the newest]
    #[arg(long, help_heading = "Job", value_name = "JOB", num_args = 0..=1)]
    #[expect(clippy::option_option, reason = "absent, bare, and with a name are three things")]
    pub(crate) resume: Option<Option<String>>,
    /// Folder of the job [default: $ELASTICDL_HOME/jobs/NAME; on a cluster, of the first volume]
    #[arg(long, help_heading = "Job", value_name = "DIR")]
    pub(crate) job_dir: Option<PathBuf>,
    /// Print the objects for `kubectl apply -f`, or write them to FILE, and submit nothing
    #[arg(long, help_heading = "Kubernetes", value_name = "FILE", num_args = 0..=1, require_equals = true)]
    #[expect(clippy::option_option, reason = "absent, bare, and with a name are three things")]
    pub(crate) yaml: Option<Option<PathBuf>>,
    /// File of patches for the job's pods and Service, see docs/kubernetes.md
    #[arg(long, help_heading = "Kubernetes", value_name = "FILE")]
    pub(crate) cluster_spec: Option<PathBuf>,
    /// Build an image of --model_zoo, push it to PREFIX (registry and path), and submit the job with it
    #[arg(long, help_heading = "Kubernetes", value_name = "PREFIX")]
    pub(crate) docker_image_prefix: Option<String>,
    /// Image that --docker_image_prefix starts from
    #[arg(
        long,
        help_heading = "Kubernetes",
        value_name = "IMAGE",
        requires = "docker_image_prefix"
    )]
    pub(crate) image_base: Option<String>,
    /// Inside a cluster, use the kubeconfig all the same
    #[arg(long, help_heading = "Kubernetes", value_name = "BOOL", num_args = 0..=1, require_equals = true,
        default_missing_value = "true", value_parser = clap::builder::BoolishValueParser::new())]
    pub(crate) force_use_kube_config_file: Option<bool>,
    /// Leave the job in the background
    #[arg(long, help_heading = "Job")]
    pub(crate) detach: bool,
    /// Watch it on the whole terminal, as `elasticdl top` does; leaving lets it go on
    #[arg(long, help_heading = "Job", conflicts_with = "detach")]
    pub(crate) tui: bool,
    /// Old way to say --num_minibatches_per_task
    #[arg(long, hide = true, value_name = "N")]
    pub(crate) records_per_task: Option<u32>,
}

#[derive(Args, Debug)]
#[command(rename_all = "snake_case")]
pub(crate) struct MasterArgs {
    #[command(flatten)]
    pub(crate) run: RunFlags,
    #[command(flatten)]
    pub(crate) cluster: ClusterFlags,
    #[command(flatten)]
    pub(crate) common: CommonFlags,
    #[command(flatten)]
    pub(crate) train: TrainFlags,
    #[command(flatten)]
    pub(crate) predict: PredictFlags,
    /// Set by the supervisor that started this process
    #[arg(long, hide = true, requires = "job_dir")]
    pub(crate) supervised: bool,
}

/// Which job a process joins.
#[derive(Args, Clone, Debug, Default)]
#[command(rename_all = "snake_case")]
pub(crate) struct JoinFlags {
    /// Address of the master [default: the job's]
    #[arg(long, value_name = "HOST:PORT")]
    pub(crate) master_addr: Option<String>,
    /// Name of the job
    #[arg(long)]
    pub(crate) job_name: Option<String>,
    /// Folder of the job
    #[arg(long, value_name = "DIR")]
    pub(crate) job_dir: Option<PathBuf>,
    /// File with the job's key [default: `job.key` in the job's folder]
    #[arg(long, value_name = "FILE")]
    pub(crate) job_key_file: Option<PathBuf>,
    /// Set by the supervisor that started this process
    #[arg(long, hide = true, requires = "job_dir")]
    pub(crate) supervised: bool,
}

#[derive(Args, Debug)]
#[command(rename_all = "snake_case")]
pub(crate) struct PsArgs {
    /// Number of this parameter server
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) ps_id: u32,
    /// Port to serve on; 0 picks a free one
    #[arg(long, default_value_t = 0)]
    pub(crate) port: u16,
    #[command(flatten)]
    pub(crate) join: JoinFlags,
    /// DEBUG, INFO, WARNING or ERROR [default: the job's]
    #[arg(long, value_name = "LEVEL")]
    pub(crate) log_level: Option<String>,
}

/// A script whose loop calls `elasticdl.init()`.
#[derive(Args, Debug)]
#[command(rename_all = "snake_case")]
pub(crate) struct ScriptArgs {
    /// Workers, or the fewest and the most of them, e.g. 2:8
    #[arg(long, value_name = "N[:MAX]")]
    pub(crate) workers: Option<String>,
    /// torchrun's word for workers: nodes …
    #[arg(long, value_name = "N[:MAX]", default_value = "1")]
    pub(crate) nnodes: String,
    /// … times processes of each; auto: one per core
    #[arg(long, alias = "nproc-per-node", value_name = "N", default_value = "1")]
    pub(crate) nproc_per_node: String,
    /// Micro-batches of one step, for the job's whole life [default: the most workers]
    #[arg(long, value_name = "N")]
    pub(crate) lanes: Option<u32>,
    /// Decides everything that is random
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
    /// Threads of each worker [default: 1]
    #[arg(long, alias = "threads-per-worker", value_name = "N")]
    pub(crate) threads_per_worker: Option<u32>,
    /// Unexplained crashes after which a worker is given up [default: 3]
    #[arg(long, alias = "max-restarts", value_name = "N")]
    pub(crate) max_restarts: Option<u32>,
    /// Name of the job [default: made from the script's]
    #[arg(long, alias = "job-name")]
    pub(crate) job_name: Option<String>,
    /// Folder of the job [default: $ELASTICDL_HOME/jobs/NAME; on a cluster, of the first volume]
    #[arg(long, alias = "job-dir", value_name = "DIR")]
    pub(crate) job_dir: Option<PathBuf>,
    /// Where the model goes [default: `output` in the job's folder]
    #[arg(long, value_name = "DIR")]
    pub(crate) output: Option<String>,
    /// Leave the job in the background
    #[arg(long)]
    pub(crate) detach: bool,
    /// The script is the name of a module
    #[arg(short, long)]
    pub(crate) module: bool,
    /// The script is a program, not for Python
    #[arg(long, alias = "no-python")]
    pub(crate) no_python: bool,
    #[command(flatten)]
    pub(crate) cluster: ClusterFlags,
    /// torchrun's; always so
    #[arg(long, hide = true)]
    pub(crate) standalone: bool,
    #[arg(long, alias = "rdzv-backend", hide = true)]
    pub(crate) rdzv_backend: Option<String>,
    #[arg(long, alias = "rdzv-endpoint", hide = true)]
    pub(crate) rdzv_endpoint: Option<String>,
    #[arg(long, alias = "rdzv-id", hide = true)]
    pub(crate) rdzv_id: Option<String>,
    /// The script, and what it is given: all that follows is its own
    #[arg(value_name = "SCRIPT", required = true, trailing_var_arg = true)]
    pub(crate) script: Vec<String>,
}

#[derive(Args, Debug)]
#[command(rename_all = "snake_case")]
pub(crate) struct WorkerArgs {
    /// Number of this worker
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) worker_id: u32,
    #[command(flatten)]
    pub(crate) join: JoinFlags,
    /// Must be the job's model, if given
    #[arg(long, value_name = "NAME")]
    pub(crate) model_def: Option<String>,
    /// Must be the job's, if given
    #[arg(long, value_name = "N")]
    pub(crate) minibatch_size: Option<u32>,
    /// DEBUG, INFO, WARNING or ERROR [default: the job's]
    #[arg(long, value_name = "LEVEL")]
    pub(crate) log_level: Option<String>,
    /// Known to the master
    #[arg(long, hide = true)]
    pub(crate) job_type: Option<String>,
    /// Known to the master
    #[arg(long, hide = true)]
    pub(crate) ps_addrs: Option<String>,
}

#[derive(Args, Debug)]
#[command(rename_all = "snake_case")]
pub(crate) struct SuperviseArgs {
    #[arg(long)]
    pub(crate) job_dir: PathBuf,
    #[arg(long)]
    pub(crate) resume: bool,
}

#[derive(Args, Clone, Debug, Default)]
pub(crate) struct JobArg {
    /// Name or folder of the job [default: the newest]
    #[arg(value_name = "JOB")]
    pub(crate) job: Option<String>,
    /// Look on the cluster, in this namespace
    #[arg(long, value_name = "NAME")]
    pub(crate) namespace: Option<String>,
}

#[derive(Args, Debug)]
pub(crate) struct StatusArgs {
    #[command(flatten)]
    pub(crate) job: JobArg,
    /// As JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args, Debug)]
#[command(group = clap::ArgGroup::new("process").multiple(false))]
pub(crate) struct LogsArgs {
    #[command(flatten)]
    pub(crate) job: JobArg,
    /// Only this worker's
    #[arg(long, value_name = "N", group = "process")]
    pub(crate) worker: Option<u32>,
    /// Only this parameter server's
    #[arg(long, value_name = "N", group = "process")]
    pub(crate) ps: Option<u32>,
    /// Only the master's
    #[arg(long, group = "process")]
    pub(crate) master: bool,
    /// Wait for more until the job ends
    #[arg(long, short)]
    pub(crate) follow: bool,
    /// Only the last N lines
    #[arg(long, short = 'n', value_name = "N")]
    pub(crate) tail: Option<usize>,
}

#[derive(Args, Debug)]
pub(crate) struct ScaleArgs {
    #[command(flatten)]
    pub(crate) job: JobArg,
    /// Workers that shall run
    #[arg(long, value_name = "N")]
    pub(crate) workers: u32,
}

#[derive(Args, Debug)]
#[command(rename_all = "snake_case")]
#[command(allow_missing_positional = true)]
#[command(group = clap::ArgGroup::new("victim").multiple(false))]
pub(crate) struct ChaosArgs {
    #[command(flatten)]
    pub(crate) job: JobArg,
    /// What is done to it
    #[arg(value_name = "HOW")]
    pub(crate) how: How,
    /// This worker [default: one that works, by the seed]
    #[arg(long, value_name = "N", group = "victim")]
    pub(crate) worker: Option<u32>,
    /// This parameter server
    #[arg(long, value_name = "N", group = "victim")]
    pub(crate) ps: Option<u32>,
    /// Not before this step
    #[arg(long, value_name = "S")]
    pub(crate) at_step: Option<u64>,
    /// Again and again, e.g. 30s
    #[arg(long, value_name = "TIME", value_parser = crate::flags::seconds)]
    pub(crate) every: Option<u64>,
    /// How long a partition or slowness lasts [default: 15]
    #[arg(long, value_name = "SECS", value_parser = crate::flags::finite)]
    pub(crate) secs: Option<f64>,
    /// How many times slower [default: 4]
    #[arg(long, value_name = "F", value_parser = clap::value_parser!(u32).range(2..=100))]
    pub(crate) factor: Option<u32>,
    /// Decides who is chosen
    #[arg(long, value_name = "K", default_value_t = 0)]
    pub(crate) seed: u64,
}

/// What can be done to a process on purpose.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub(crate) enum How {
    /// SIGKILL
    Kill,
    /// SIGSTOP: it stands still
    Stop,
    /// SIGCONT: it goes on
    Wake,
    /// It is cut off from the others for a while
    Partition,
    /// It gets slower for a while
    Slow,
}

impl How {
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Kill => "kill",
            Self::Stop => "stop",
            Self::Wake => "wake",
            Self::Partition => "partition",
            Self::Slow => "slow",
        }
    }
}

#[derive(Args, Debug)]
pub(crate) struct DemoArgs {
    /// How long it trains
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) epochs: u32,
    /// Of the model and of who is killed
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) seed: u64,
    /// Lines instead of the terminal view
    #[arg(long)]
    pub(crate) plain: bool,
}

#[derive(Args, Debug)]
pub(crate) struct ListArgs {
    /// The jobs of this namespace of the cluster
    #[arg(long, value_name = "NAME")]
    pub(crate) namespace: Option<String>,
    /// As JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Args, Debug)]
pub(crate) struct CleanArgs {
    /// The jobs of this namespace of the cluster
    #[arg(long, value_name = "NAME")]
    pub(crate) namespace: Option<String>,
    /// Names or folders of the jobs to remove
    #[arg(value_name = "JOB")]
    pub(crate) jobs: Vec<String>,
    /// Every job that does not run
    #[arg(long, conflicts_with = "jobs")]
    pub(crate) all: bool,
}

#[derive(Args, Debug)]
#[command(rename_all = "snake_case")]
pub(crate) struct InitArgs {
    /// File to write
    #[arg(value_name = "FILE", default_value = "job.yaml")]
    pub(crate) file: PathBuf,
    /// Replace the file if there is one
    #[arg(long)]
    pub(crate) force: bool,
}

#[derive(Args, Debug)]
#[command(rename_all = "snake_case")]
pub(crate) struct SimulateArgs {
    /// What to play: a name (edl-case-1, edl-case-2, adaptdl-N, philly-PERCENT) or a YAML file
    #[arg(value_name = "SCENARIO", required_unless_present = "example")]
    pub(crate) scenarios: Vec<String>,
    /// Who decides: policies, or `all`
    #[arg(long, value_name = "NAME,…", default_value = "elastic-fair")]
    pub(crate) policy: String,
    /// Seed of the first run
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) seed: u64,
    /// Play with so many seeds
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    pub(crate) seeds: u64,
    /// How quick the cluster is: today or 2017
    #[arg(long, value_name = "YEAR")]
    pub(crate) kubernetes: Option<String>,
    /// Folder of traces (AdaptDL's workloads and profiles)
    #[arg(long, value_name = "DIR")]
    pub(crate) data: Option<PathBuf>,
    /// Nodes that vanish, of the whole cluster
    #[arg(long, value_name = "N", default_value_t = 0.0, value_parser = crate::flags::rate)]
    pub(crate) losses_per_hour: f64,
    /// Nodes that are announced to go, of the whole cluster
    #[arg(long, value_name = "N", default_value_t = 0.0, value_parser = crate::flags::rate)]
    pub(crate) reclaims_per_hour: f64,
    /// Write every moment of each run to a file
    #[arg(long, value_name = "FILE")]
    pub(crate) csv: Option<PathBuf>,
    /// Draw each run: workers by job, utilisation, waiting
    #[arg(long, value_name = "FILE")]
    pub(crate) svg: Option<PathBuf>,
    /// As JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// Print a commented scenario file to start from
    #[arg(long)]
    pub(crate) example: bool,
}

#[derive(Args, Debug)]
pub(crate) struct DataArgs {
    #[command(subcommand)]
    pub(crate) command: DataCommand,
}

#[derive(Debug, Subcommand)]
#[command(rename_all = "snake_case")]
pub(crate) enum DataCommand {
    /// Write a known data set as `DIR/NAME/train` and `DIR/NAME/test`
    Gen {
        /// mnist, fashion_mnist or census
        name: String,
        /// Folder to write below
        dir: PathBuf,
        /// Where the original files are [default: where their package puts them]
        #[arg(long, value_name = "DIR")]
        source: Option<PathBuf>,
        #[command(flatten)]
        write: WriteFlags,
    },
    /// Turn a data set of another format into RecordIO
    Import {
        /// What to read: a file, a folder, a glob or a URL; of MNIST's format, the image file
        from: String,
        /// Folder to write
        dir: PathBuf,
        /// For MNIST's format, the label file
        #[arg(long, value_name = "FILE")]
        labels: Option<PathBuf>,
        #[command(flatten)]
        write: WriteFlags,
        #[command(flatten)]
        read: ReadFlags,
    },
    /// Show what a data set holds
    Inspect {
        /// A file, a folder, a glob or a URL
        data: String,
        #[command(flatten)]
        read: ReadFlags,
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Print the first records, one JSON object per line
    Head {
        /// A file, a folder, a glob or a URL
        data: String,
        /// How many
        #[arg(long, short = 'n', value_name = "N", default_value_t = 3)]
        records: u64,
        #[command(flatten)]
        read: ReadFlags,
    },
}

#[derive(Args, Clone, Debug)]
#[command(rename_all = "snake_case")]
pub(crate) struct ReadFlags {
    /// What a record's bytes are: tf_example or bytes
    #[arg(long, value_name = "CODEC", default_value = "tf_example")]
    pub(crate) codec_type: String,
    /// Words for the reader, e.g. "delimiter=;"
    #[arg(long, value_name = "K=V;…", value_parser = crate::flags::pairs)]
    pub(crate) data_reader_params: Option<std::collections::BTreeMap<String, String>>,
}

#[derive(Args, Clone, Debug)]
#[command(rename_all = "snake_case")]
pub(crate) struct WriteFlags {
    /// none, snappy or gzip
    #[arg(long, value_name = "NAME", default_value = "gzip")]
    pub(crate) compression: String,
    /// Spread the records over so many files
    #[arg(long, value_name = "N", default_value_t = 4)]
    pub(crate) files: u64,
    /// Only the first records
    #[arg(long, value_name = "N")]
    pub(crate) limit: Option<u64>,
    /// Only the first records of the test part, for `gen`
    #[arg(long, value_name = "N")]
    pub(crate) test_limit: Option<u64>,
}

impl RunFlags {
    /// A flag that only a job on a cluster can follow.
    pub(crate) fn cluster_only(&self) -> Option<&'static str> {
        let yaml = self.yaml.as_ref().map(|_| "yaml");
        yaml.or_else(|| self.cluster_spec.as_ref().map(|_| "cluster_spec"))
    }
}

impl TrainArgs {
    pub(crate) fn split(self) -> (RunFlags, JobFlags) {
        let predict = PredictFlags::default();
        let (common, train, cluster) = (self.common, self.train, self.cluster);
        (self.run, JobFlags { common, train, predict, cluster })
    }
}

impl EvaluateArgs {
    pub(crate) fn split(self) -> (RunFlags, JobFlags) {
        let (common, cluster) = (self.common, self.cluster);
        (self.run, JobFlags { common, cluster, ..JobFlags::default() })
    }
}

impl PredictArgs {
    pub(crate) fn split(self) -> (RunFlags, JobFlags) {
        let train = TrainFlags::default();
        let (common, predict, cluster) = (self.common, self.predict, self.cluster);
        (self.run, JobFlags { common, train, predict, cluster })
    }
}

impl MasterArgs {
    pub(crate) fn split(self) -> (RunFlags, JobFlags) {
        let Self { run, common, train, predict, cluster, .. } = self;
        (run, JobFlags { common, train, predict, cluster })
    }
}
