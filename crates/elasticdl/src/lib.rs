// SPDX-License-Identifier: Apache-2.0
//! The `elasticdl` command, for the binary and for the Python package.
//!
//! Results go to standard output, everything else to standard error; exit codes are in [`exit`].

use std::ffi::OsString;
use std::io::{self, Write};

use anyhow::Context as _;
use clap::FromArgMatches as _;
use clap::error::ErrorKind;
use edl_core::spec::{FieldType as _, JobType, LogLevel};
use tokio::runtime::{Builder, Runtime};

use cli::{Cli, Command, MasterArgs};
use console::{Output, unless_closed};
use exit::Exit;

mod argv;
mod attach;
mod audit;
mod chaos;
mod cli;
mod cluster;
mod completions;
mod config;
mod console;
mod control;
mod convert;
mod custom_loop;
mod data;
mod demo;
mod detach;
mod doctor;
mod exit;
mod explain;
mod export;
mod flags;
mod fork_server;
mod goodput;
mod help;
mod host;
mod init;
mod jobs;
mod lines;
mod list;
mod logs;
mod manual;
mod models;
mod operator;
mod paths;
mod plan;
mod pod;
mod processes;
mod python;
mod report;
mod resume;
mod run_script;
mod scale;
mod shipped;
mod signals;
mod simulate;
mod stacks;
mod status;
mod stop;
mod submit;
mod supervisor;
mod telemetry;
mod top;
mod trained;
mod ui;
mod usage;
mod wait;
mod zoo;

pub use custom_loop::{work, work_alone};
pub use host::{Host, Open, Python};

/// Runs the command to its end and returns the exit code.
pub fn main(args: Vec<OsString>, host: Host) -> u8 {
    host::set(host);
    let mut out = Output::new(io::stdout().lock());
    let ended = parse(args).and_then(|parsed| match parsed {
        Parsed::Command(command) => run(command, &mut out),
        Parsed::Printed(exit) => Ok(exit),
    });
    let flushed = unless_closed(out.flush());
    match ended.and_then(|exit| Ok(flushed.map(|()| exit)?)) {
        Ok(exit) => exit.code(),
        // The reader has closed the pipe, as in `elasticdl list | head -1`.
        Err(error) if out.is_closed && is_closed_pipe(&error) => Exit::Ok.code(),
        Err(error) => {
            console::error(format_args!("error: {error:#}"));
            exit::of_error(&error).code()
        }
    }
}

/// What the command line asks for.
enum Parsed {
    Command(Command),
    /// Help or version was printed.
    Printed(Exit),
}

fn parse(args: Vec<OsString>) -> anyhow::Result<Parsed> {
    let argv = argv::normalise(args)?;
    let mut command = help::command(help::detail(&argv.args));
    let matches = command.try_get_matches_from_mut(&argv.args);
    let parsed = matches.and_then(|matches| Cli::from_arg_matches(&matches));
    match parsed.map_err(|error| error.format(&mut command)) {
        Ok(cli) => {
            console::set_quiet(cli.quiet);
            argv.notes.iter().for_each(console::eprint);
            Ok(Parsed::Command(cli.command))
        }
        Err(error) => {
            let name = argv.args.get(1).and_then(|name| name.to_str());
            if let Some(sentence) =
                usage::sentence(&error, name.filter(|name| !name.starts_with('-')))
            {
                return Err(exit::refuse(sentence));
            }
            let is_bare = argv.args.len() <= 1;
            if is_bare && error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
                unless_closed(help::print_common(&mut io::stdout()))?;
                return Ok(Parsed::Printed(Exit::Ok));
            }
            unless_closed(error.print()).context("cannot print help")?;
            // Help without `--help` means that a subcommand is missing, as in `elasticdl data`.
            Ok(Parsed::Printed(if error.use_stderr() { Exit::BadInput } else { Exit::Ok }))
        }
    }
}

fn run(command: Command, out: &mut dyn Write) -> anyhow::Result<Exit> {
    match command {
        Command::Train(args) => submit(JobType::Train, args.run, args.job.0, out),
        Command::Evaluate(args) => {
            let flags = args.fields()?;
            submit(JobType::Evaluate, args.run, flags, out)
        }
        Command::Predict(args) => {
            let flags = args.fields()?;
            submit(JobType::Predict, args.run, flags, out)
        }
        Command::Export(args) => export::run(&args, out),
        Command::Run(args) => run_script::run(&args, out),
        Command::Master(args) => master(*args, out),
        Command::Ps(args) => manual::ps(&args),
        Command::Worker(args) => manual::worker(&args),
        Command::Supervise(args) => detach::supervise(&args, out),
        Command::Describe => python::print_description(out),
        Command::Pod(args) => pod::run(&args),
        Command::Init(args) => init::run(&args, out),
        Command::Status(args) => status::run(&args, out),
        Command::Attach(args) => attach::run(&args, out),
        Command::Logs(args) => logs::run(&args, out),
        Command::Scale(args) => scale::run(&args, out),
        Command::Stop(args) => stop::run(&args, out),
        Command::List(args) => list::list(&args, out),
        Command::Clean(args) => list::clean(&args, out),
        Command::Audit(args) => audit::run(&args, out),
        Command::Report(args) => report::run(&args, out),
        Command::Chaos(args) => chaos::run(&args, out),
        Command::Data(args) => data::run(args, out),
        Command::Zoo(args) => zoo::run(&args, out),
        Command::Simulate(args) => simulate::run(&args, out),
        Command::Operator(args) => operator::run(&args, out),
        Command::Plan(args) => plan::plan(&args, out),
        Command::Explain(args) => explain::run(&args, out),
        Command::Job(args) => convert::run(&args, out),
        Command::Wait(args) => wait::run(&args, out),
        Command::JobNames => list::names(out),
        Command::Top(args) => top::run(&args),
        Command::Demo(args) => demo::run(&args, out),
        Command::Doctor => doctor::run(out),
        Command::Help { command } => help::print(&command, out),
        Command::Version => {
            writeln!(out, "elasticdl {}", cli::version())?;
            Ok(Exit::Ok)
        }
        Command::Completions { shell } => completions::run(shell, out),
    }
}

fn submit(
    kind: JobType,
    run: cli::RunFlags,
    flags: flags::Given,
    out: &mut dyn Write,
) -> anyhow::Result<Exit> {
    telemetry::start(log_level(&flags));
    submit::run(kind, &config::JobRequest::read(run, flags)?, out)
}

fn master(args: MasterArgs, out: &mut dyn Write) -> anyhow::Result<Exit> {
    match (args.supervised, &args.run.job_dir) {
        (true, Some(job_dir)) => {
            let port = args.job.0.get("port").and_then(serde_json::Value::as_u64);
            let port = port.and_then(|port| port.try_into().ok()).unwrap_or_default();
            processes::master(job_dir, port, args.run.resume.is_some())
        }
        (true | false, _) => {
            telemetry::start(log_level(&args.job.0));
            manual::master(args, out)
        }
    }
}

/// The level of the command's own log lines.
fn log_level(flags: &flags::Given) -> LogLevel {
    let level = flags::text(flags, "log_level").and_then(|level| LogLevel::parse(level).ok());
    level.unwrap_or_default()
}

/// The runtime of a command. It has one thread, because the kernel kills children together with the
/// thread that started them, so the main thread must start them.
pub(crate) fn runtime() -> anyhow::Result<Runtime> {
    let runtime = Builder::new_current_thread().enable_all().build();
    runtime.context("cannot start the async runtime")
}

fn is_closed_pipe(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        let kind =
            match (cause.downcast_ref::<io::Error>(), cause.downcast_ref::<serde_json::Error>()) {
                (Some(error), _) => Some(error.kind()),
                (None, Some(error)) => error.io_error_kind(),
                (None, None) => None,
            };
        kind == Some(io::ErrorKind::BrokenPipe)
    })
}
