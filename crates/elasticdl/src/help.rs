// SPDX-License-Identifier: Apache-2.0
//! Help: the overview of all commands, and which flags of a command `-h` and `--help` show.

use std::ffi::OsString;
use std::io::Write;

use clap::builder::{Resettable, Str};
use clap::{Arg, ArgAction, Command, CommandFactory as _};

use crate::cli::{ABOUT, Cli};
use crate::exit::{Exit, refuse};
use crate::usage;

/// How much help is printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Detail {
    /// What fits one screen: `-h`.
    Common,
    /// `--help`.
    Everything,
}

const HELP: &str = "help";
/// The default of flags that name data, which is shortened by `-h`.
const INCLUDED: &str = "the data included with elasticdl";
/// Of a command with more flags than this, `-h` shows only the common ones.
const MANY: usize = 20;

/// The flags that everyone needs, in the order of `-h`: the name of the argument, the shortest name of
/// its flag, and its help in a few words.
const COMMON_FLAGS: [(&str, &str, &str); 15] = [
    ("model_def", "model_def", "Built-in or Python model"),
    ("training_data", "training_data", "File, folder or URL"),
    ("validation_data", "validation_data", "Data to evaluate on"),
    ("prediction_data", "prediction_data", "Data to predict on"),
    ("num_epochs", "epochs", "Number of epochs"),
    ("minibatch_size", "batch_size", "Records per batch"),
    ("learning_rate", "lr", "Learning rate"),
    ("workers", "workers", "Number of workers, or a range [default: 1]"),
    ("num_workers", "workers", "Number of workers"),
    ("distribution_strategy", "strategy", "ps, allreduce, hybrid or local [default: ps]"),
    ("output", "output", "Result folder [default: in the job folder]"),
    ("job_name", "job_name", "Job name [default: generated]"),
    ("config", "config", "YAML file with fields of the job"),
    ("detach", "detach", "Run the job in the background"),
    ("resume", "resume", "Resume a job"),
];

/// The commands that use a trained model, and the defaults that it decides: command, flag, default.
const DEFAULTS_OF_MODEL: [(&str, &str, &str); 3] = [
    ("evaluate", "model_def", "the trained model's"),
    ("evaluate", "validation_data", "that of its job"),
    ("predict", "model_def", "the trained model's"),
];

/// Commands about the same subject.
struct Group {
    heading: &'static str,
    /// Whether `-h` lists them.
    is_common: bool,
    commands: &'static [&'static str],
}

const GROUPS: [Group; 6] = [
    Group {
        heading: "Train and use models",
        is_common: true,
        commands: &["train", "run", "evaluate", "predict", "export", "init", "demo", "doctor"],
    },
    Group {
        heading: "Watch and control jobs",
        is_common: true,
        commands: &[
            "status", "attach", "top", "logs", "list", "wait", "scale", "stop", "clean", "explain",
            "audit", "report", "chaos",
        ],
    },
    Group { heading: "Data and images", is_common: false, commands: &["data", "zoo"] },
    Group {
        heading: "Kubernetes",
        is_common: false,
        commands: &["operator", "plan", "simulate", "job"],
    },
    Group {
        heading: "Single processes of a job",
        is_common: false,
        commands: &["master", "ps", "worker"],
    },
    Group {
        heading: "This command",
        is_common: false,
        commands: &["help", "version", "completions"],
    },
];

const EXAMPLES: &str = "
Examples:
  elasticdl train                         a built-in model on the included data
  elasticdl train --workers=4 --epochs=2 --training_data=DIR
  elasticdl init && elasticdl train --config job.yaml --detach
  elasticdl status && elasticdl logs --follow
  elasticdl train --resume                the most recent job
";

const MORE: &str = "
Run `elasticdl --help` for all commands, `elasticdl COMMAND -h` for a command.
";

const CONVENTIONS: &str = "
Options:
{options}

Exit codes: 0 success, 1 job failed, 2 invalid input (nothing started),
  3 stopped early (resumable), 4 job not found, 124 timed out (`wait`),
  130 interrupted (resumable).
Results go to stdout, everything else to stderr.
Jobs are stored in $ELASTICDL_HOME/jobs (default: ~/.elasticdl/jobs).
Run `elasticdl COMMAND -h` for the common flags of a command, `--help` for all.
";

/// How much help these arguments ask for; the parser stops at the first flag that asks for help.
pub(crate) fn detail(args: &[OsString]) -> Detail {
    let first = args.iter().find(|arg| *arg == "-h" || *arg == "--help");
    // Messages about a wrong flag name it as `--help` does.
    if first.is_some_and(|flag| flag == "-h") { Detail::Common } else { Detail::Everything }
}

/// The command line with help of this detail.
pub(crate) fn command(detail: Detail) -> Command {
    let root = Cli::command();
    let text = overview(&root, detail);
    of_command(root.help_template(text), "", detail)
}

/// Prints what fits one screen.
pub(crate) fn print_common(out: &mut dyn Write) -> std::io::Result<()> {
    write!(out, "{}", command(Detail::Common).render_help())
}

/// Prints the overview, or all flags of the command that `words` name.
pub(crate) fn print(words: &[String], out: &mut dyn Write) -> anyhow::Result<Exit> {
    let mut found = command(Detail::Everything);
    // Gives each command its full name.
    found.build();
    for word in words {
        let inner = found.find_subcommand(word).filter(|inner| !inner.is_hide_set()).cloned();
        found = inner.ok_or_else(|| refuse(usage::unknown_command(word, &found)))?;
    }
    write!(out, "{}", found.render_help())?;
    Ok(Exit::Ok)
}

fn overview(root: &Command, detail: Detail) -> String {
    let mut text = format!("{ABOUT}\n\nUsage: elasticdl <COMMAND> [OPTIONS]\n");
    let is_shown = |group: &&Group| detail == Detail::Everything || group.is_common;
    for group in GROUPS.iter().filter(is_shown) {
        text += &format!("\n{}:\n", group.heading);
        for name in group.commands {
            let about = root.find_subcommand(name).and_then(Command::get_about);
            let about = about.map(ToString::to_string).unwrap_or_default();
            text += &format!("  {name:<12} {about}\n");
        }
    }
    text += EXAMPLES;
    text += if detail == Detail::Everything { CONVENTIONS } else { MORE };
    text
}

fn of_command(command: Command, path: &str, detail: Detail) -> Command {
    let path = format!("{path} {}", command.get_name()).trim_start().to_owned();
    // A flag of our own, because clap's has two forms of help, and the long one is hard to read.
    let help = Arg::new(HELP)
        .short('h')
        .long(HELP)
        .help("Print help: -h for common flags, --help for all")
        .action(ArgAction::HelpShort);
    let command = command.disable_help_flag(true).arg(help).mut_args(with_default);
    let command = with_defaults_of_model(command);
    let command = if detail == Detail::Common { shortened(command, &path) } else { command };
    command.mut_subcommands(|inner| of_command(inner, &path, detail))
}

/// Every flag with a value tells its default.
fn with_default(arg: Arg) -> Arg {
    let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
    let is_shown = !arg.is_hide_default_value_set() && !arg.get_default_values().is_empty();
    let needs_none = arg.is_positional() || arg.is_required_set() || !takes_value(&arg);
    if needs_none || is_shown || help.contains("[default: ") {
        return arg;
    }
    arg.help(format!("{help} [default: none]"))
}

/// A command that uses a trained model takes fields from the job that trained it.
fn with_defaults_of_model(command: Command) -> Command {
    let name = command.get_name().to_owned();
    command.mut_args(|arg| {
        let id = arg.get_id();
        let default = DEFAULTS_OF_MODEL.iter().find(|(of, flag, _)| *of == name && id == *flag);
        let Some((.., default)) = default else { return arg };
        let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
        let (meaning, _) = help.split_once(" [default: ").unwrap_or((&help, ""));
        arg.help(format!("{meaning} [default: {default}]"))
    })
}

fn takes_value(arg: &Arg) -> bool {
    arg.get_action().takes_values()
}

/// The command with only the common of its flags in its help, if it has many.
fn shortened(command: Command, path: &str) -> Command {
    let is_flag = |arg: &&Arg| !arg.is_positional() && !arg.is_hide_set();
    let n_flags = command.get_arguments().filter(is_flag).count();
    if n_flags <= MANY {
        return command;
    }
    let examples = command.get_after_help().map(|text| format!("{text}\n\n")).unwrap_or_default();
    let more = format!("{examples}Run `{path} --help` for all {n_flags} flags.");
    let common = |arg: Arg| {
        let id = arg.get_id().clone();
        match COMMON_FLAGS.iter().position(|(name, ..)| id.as_str() == *name) {
            Some(position) => brief(arg, position),
            None if arg.is_positional() || id.as_str() == HELP => arg,
            None => arg.hide(true),
        }
    };
    command.mut_args(common).after_help(more)
}

/// A common flag, in one line. All names that it has are still accepted.
fn brief(arg: Arg, position: usize) -> Arg {
    let (_, long, brief) = COMMON_FLAGS[position];
    let known = arg.get_all_aliases().unwrap_or_default().into_iter().chain(arg.get_long());
    let hidden: Vec<String> = known.filter(|name| *name != long).map(Into::into).collect();
    let full = arg.get_help().map(ToString::to_string).unwrap_or_default();
    let default = full.find("[default: ").filter(|_| !brief.contains("[default: "));
    let help = match default.map(|at| &full[at..]) {
        Some("[default: none]") | None => brief.to_owned(),
        Some(default) if default.contains(INCLUDED) => format!("{brief} [default: included data]"),
        Some(default) => format!("{brief} {default}"),
    };
    // In one list: headings would take more room than the flags.
    arg.long(long)
        .visible_alias(Resettable::<Str>::Reset)
        .aliases(hidden)
        .help(help)
        .help_heading(Resettable::<Str>::Reset)
        .hide_default_value(true)
        .display_order(position)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Calls `visit` with every visible command and its full name.
    fn each(command: &Command, path: &str, visit: &mut dyn FnMut(&Command, &str)) {
        visit(command, path);
        for inner in command.get_subcommands().filter(|inner| !inner.is_hide_set()) {
            each(inner, format!("{path} {}", inner.get_name()).trim(), visit);
        }
    }

    fn built(detail: Detail) -> Command {
        let mut command = command(detail).term_width(80);
        command.build();
        command
    }

    /// The help of a command, 80 columns wide.
    fn help(command: &Command) -> String {
        command.clone().term_width(80).render_help().to_string()
    }

    #[test]
    fn the_first_flag_that_asks_for_help_decides_how_much() {
        let detail = |line: &str| detail(&line.split(' ').map(OsString::from).collect::<Vec<_>>());
        assert_eq!(detail("elasticdl train -h"), Detail::Common);
        assert_eq!(detail("elasticdl run --workers 2 --help"), Detail::Everything);
        assert_eq!(detail("elasticdl run -h train.py --help"), Detail::Common);
        assert_eq!(detail("elasticdl train --num_workers"), Detail::Everything);
    }

    #[test]
    fn the_short_help_of_every_command_fits_one_screen() {
        let mut n_commands = 0;
        each(&built(Detail::Common), "", &mut |command, path| {
            let help = help(command);
            let n_lines = help.lines().count();
            assert!(n_lines <= 40, "`{path} -h` has {n_lines} lines:\n{help}");
            let widest = help.lines().map(|line| line.chars().count()).max();
            assert!(widest <= Some(80), "`{path} -h` is {widest:?} columns wide:\n{help}");
            n_commands += 1;
        });
        assert!(n_commands > 30, "{n_commands}");
    }

    #[test]
    fn the_short_help_of_train_has_what_everyone_needs_and_says_where_the_rest_is() {
        let command = built(Detail::Common);
        let train = help(command.find_subcommand("train").unwrap());
        for flag in ["training_data", "workers", "epochs", "lr", "batch_size", "strategy", "detach"]
        {
            assert!(train.contains(&format!("--{flag}")), "{flag} is missing:\n{train}");
        }
        assert!(train.contains("Run `elasticdl train --help` for all "), "{train}");
        assert!(!train.contains("Kubernetes"), "{train}");
        let n_lines = train.lines().filter(|line| line.trim_start().starts_with('-')).count();
        let n_flags = train.split_once("Examples:").unwrap().0.lines().count();
        assert!(n_lines >= 14 && n_flags <= n_lines + 6, "one line per flag:\n{train}");
    }

    #[test]
    fn a_short_help_may_follow_any_flag_and_its_defaults_are_the_real_ones() {
        for flag in ["--num_workers=2", "--workers=2", "--learning_rate=1", "--lr=1"] {
            let mut command = command(Detail::Common);
            let parsed = command.try_get_matches_from_mut(["elasticdl", "train", flag]);
            assert!(parsed.is_ok(), "{flag}: {}", parsed.unwrap_err());
        }
        let command = built(Detail::Common);
        let train = help(command.find_subcommand("train").unwrap());
        let spec = edl_core::spec::JobSpec::default();
        for (flag, default) in [
            ("epochs", spec.num_epochs),
            ("batch_size", spec.minibatch_size),
            ("workers", spec.num_workers),
        ] {
            let line = train.lines().find(|line| line.contains(&format!("--{flag} "))).unwrap();
            assert!(line.ends_with(&format!("[default: {default}]")), "{line}");
        }
    }

    #[test]
    fn the_long_help_has_every_flag_by_subject_with_kubernetes_last() {
        let command = built(Detail::Everything);
        for name in ["train", "evaluate", "predict", "run", "master", "init"] {
            let command = command.find_subcommand(name).unwrap();
            let help = help(command);
            let headings: Vec<&str> =
                help.lines().filter(|line| !line.starts_with(' ') && line.ends_with(':')).collect();
            let kubernetes = headings.iter().position(|line| *line == "Kubernetes:");
            let last =
                headings.iter().rposition(|line| *line != "Examples:" && *line != "Example:");
            assert_eq!(kubernetes, last, "`{name} --help`: {headings:?}");
            for arg in command.get_arguments().filter(|arg| !arg.is_hide_set()) {
                let Some(flag) = arg.get_long() else { continue };
                assert!(help.contains(&format!("--{flag}")), "{flag}");
            }
        }
    }

    #[test]
    fn commands_that_use_a_trained_model_show_what_they_take_from_it() {
        for detail in [Detail::Common, Detail::Everything] {
            let command = built(detail);
            let help = help(command.find_subcommand("evaluate").unwrap());
            let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
            assert!(help.contains("[default: the trained model's]"), "{help}");
            assert!(help.contains("[default: that of its job]"), "{help}");
            assert!(!help.contains("mnist_cnn") && !help.contains(INCLUDED), "{help}");
        }
    }

    #[test]
    fn every_flag_shows_its_default() {
        let mut n_flags = 0;
        each(&built(Detail::Everything), "", &mut |command, path| {
            let flags = command.get_arguments().filter(|arg| !arg.is_hide_set());
            // A switch is off unless it is given.
            for flag in flags.filter(|arg| takes_value(arg) && !arg.is_required_set()) {
                let Some(name) = flag.get_long() else { continue };
                let text = flag.get_help().map(ToString::to_string).unwrap_or_default();
                let by_clap = !flag.get_default_values().is_empty();
                let shown = usize::from(by_clap && !flag.is_hide_default_value_set())
                    + text.matches("[default: ").count();
                assert_eq!(shown, 1, "defaults that `{path} --{name}` shows: {text}");
                n_flags += 1;
            }
        });
        assert!(n_flags > 300, "{n_flags}");
    }

    #[test]
    fn names_of_flags_agree_across_commands() {
        let pairs = [
            ("workers", "num_workers"),
            ("epochs", "num_epochs"),
            ("lr", "learning_rate"),
            ("batch_size", "minibatch_size"),
            ("strategy", "distribution_strategy"),
        ];
        let mut takes: Vec<String> = Vec::new();
        each(&built(Detail::Everything), "", &mut |command, path| {
            for arg in command.get_arguments() {
                let names = arg.get_long_and_visible_aliases().unwrap_or_default();
                for (one, other) in pairs {
                    assert_eq!(names.contains(&one), names.contains(&other), "{path} {names:?}");
                    takes.extend(names.contains(&one).then(|| format!("{path} {one}")));
                }
            }
        });
        for expected in ["train epochs", "run workers", "scale workers", "demo epochs", "init lr"] {
            assert!(takes.iter().any(|it| it == expected), "{expected}: {takes:?}");
        }
    }

    #[test]
    fn the_overview_lists_every_command_once() {
        let command = built(Detail::Everything);
        let visible = command.get_subcommands().filter(|inner| !inner.is_hide_set());
        let mut expected: Vec<&str> = visible.map(Command::get_name).collect();
        let mut listed: Vec<&str> =
            GROUPS.iter().flat_map(|group| group.commands).copied().collect();
        expected.sort_unstable();
        listed.sort_unstable();
        assert_eq!(listed, expected);
        let help = help(&command);
        assert!(help.contains("Exit codes: 0 success"), "{help}");
        assert!(!help.contains("supervise"), "{help}");
        assert!(help.lines().all(|line| line.chars().count() <= 80), "{help}");
    }

    #[test]
    fn help_of_a_command_is_all_of_it_and_an_unknown_one_is_refused_by_name() {
        let print = |words: &[&str]| {
            let words: Vec<String> = words.iter().map(ToString::to_string).collect();
            let mut out = Vec::new();
            print(&words, &mut out).map(|_| String::from_utf8(out).unwrap())
        };
        assert!(print(&[]).unwrap().contains("Kubernetes:"));
        let train = print(&["train"]).unwrap();
        assert!(train.contains("Usage: elasticdl train") && train.contains("--worker_image"));
        assert!(print(&["data", "import"]).unwrap().contains("--compression"));
        let error = print(&["trian"]).unwrap_err().to_string();
        assert_eq!(error, "unknown command `trian`; did you mean `train`?");
        assert!(print(&["supervise"]).is_err(), "it is hidden");
    }
}
