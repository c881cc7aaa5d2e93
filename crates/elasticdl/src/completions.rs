// SPDX-License-Identifier: Apache-2.0
//! `completions`: shell completions for every command, flag and job name.
//!
//! Commands and flags are part of the script; the names of jobs come from this command whenever the
//! shell needs them.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::io::Write;

use clap::{Arg, Command};
use clap_complete::Shell;

use crate::exit::Exit;
use crate::help::{self, Detail};

/// How arguments are called that name a job, and those that name a job or a file.
const JOB: &str = "JOB";
const MODEL: &str = "MODEL";
/// Prints the names of the jobs; see `cli::Command::JobNames`.
const NAMES: &str = "elasticdl job-names 2>/dev/null";

/// Writes the completions of one shell.
pub(crate) fn run(shell: Shell, out: &mut dyn Write) -> anyhow::Result<Exit> {
    // The generator panics when its output is closed, so it writes into memory.
    let mut text = Vec::new();
    let mut command = help::command(Detail::Everything);
    clap_complete::generate(shell, &mut command, "elasticdl", &mut text);
    let text = String::from_utf8(text)?;
    out.write_all(with_job_names(shell, text, &command).as_bytes())?;
    Ok(Exit::Ok)
}

/// The script with job names, for the shells that most people use.
#[expect(clippy::wildcard_enum_match_arm, reason = "the generator's shells grow with its versions")]
fn with_job_names(shell: Shell, text: String, root: &Command) -> String {
    match shell {
        Shell::Bash => text + &bash(root),
        Shell::Zsh => zsh(&text),
        Shell::Fish => text + &fish(root),
        _ => text,
    }
}

/// The commands that take the name of a job.
fn job_commands(root: &Command) -> impl Iterator<Item = &Command> {
    let takes = |command: &&Command| takes(command, JOB) || takes(command, MODEL);
    root.get_subcommands().filter(|command| !command.is_hide_set()).filter(takes)
}

/// Whether a command has such an argument.
fn takes(command: &Command, what: &str) -> bool {
    let is_it = |arg: &Arg| arg.get_value_names().is_some_and(|it| it.iter().any(|it| it == what));
    command.get_positionals().any(is_it)
}

/// Flags after which a job name can follow, because they have no value.
fn switches(root: &Command) -> BTreeSet<String> {
    let args = job_commands(root).flat_map(Command::get_arguments);
    let switches = args.filter(|arg| !arg.is_positional() && !arg.get_action().takes_values());
    let names = switches.flat_map(|arg| {
        let long = arg.get_long().map(|name| format!("--{name}"));
        long.into_iter().chain(arg.get_short().map(|name| format!("-{name}")))
    });
    names.collect()
}

/// Wraps the generated function, which knows no values.
fn bash(root: &Command) -> String {
    let commands = job_commands(root).map(Command::get_name).collect::<Vec<_>>().join("|");
    let switches = switches(root).into_iter().collect::<Vec<_>>().join("|");
    format!(
        r#"
_elasticdl_with_jobs() {{
    _elasticdl "$@"
    local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}"
    # `--resume=` is three words for bash.
    if [[ $word == "=" ]]; then word=""; elif [[ $before == "=" ]]; then
        before="${{COMP_WORDS[COMP_CWORD-2]}}"
    fi
    local command="" at
    for ((at = 1; at < COMP_CWORD; at++)); do
        [[ ${{COMP_WORDS[at]}} == -* ]] || {{ command="${{COMP_WORDS[at]}}"; break; }}
    done
    [[ -z $command || $word == -* ]] && return
    if [[ $before != --resume ]]; then
        [[ $command == @({commands}) ]] || return
        [[ $before == -* && $before != @({switches}) ]] && return
    fi
    local names
    names="$({NAMES})"
    [[ -z $names ]] || COMPREPLY=($(compgen -W "$names" -- "$word"))
}}
complete -F _elasticdl_with_jobs -o bashdefault -o default elasticdl
"#
    )
}

/// Completes the arguments that name a job by a function.
fn zsh(text: &str) -> String {
    let mut found = String::from(
        "#compdef elasticdl\n\n_elasticdl_jobs() {\n    local -a jobs\n    jobs=(${(f)\"$(",
    );
    let _infallible = writeln!(found, "{NAMES})\"}})\n    compadd -a jobs\n}}");
    found += "\n_elasticdl_models() {\n    _elasticdl_jobs\n    _files\n}\n";
    for line in text.lines().skip_while(|line| line.starts_with("#compdef")) {
        let is_positional = ["'::job -- ", "'*::jobs -- ", "':job -- "]
            .iter()
            .any(|start| line.trim_start().starts_with(start));
        let is_model = ["'::model -- ", "':model -- "]
            .iter()
            .any(|start| line.trim_start().starts_with(start));
        let line = if is_model {
            line.replace(":_default'", ":_elasticdl_models'")
        } else if is_positional || line.contains(":JOB:_default'") {
            line.replace(":_default'", ":_elasticdl_jobs'")
        } else {
            line.to_owned()
        };
        found += &line;
        found.push('\n');
    }
    found
}

fn fish(root: &Command) -> String {
    let (jobs, models): (Vec<_>, Vec<_>) = job_commands(root).partition(|it| takes(it, JOB));
    let line = |commands: Vec<&Command>, options: &str| {
        let commands = commands.into_iter().map(Command::get_name).collect::<Vec<_>>().join(" ");
        format!(
            "complete -c elasticdl -n \"__fish_seen_subcommand_from {commands}\" {options}-a \
             \"({NAMES})\"\n"
        )
    };
    // A model can also be a file.
    line(jobs, "-f ") + &line(models, "")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn script(shell: Shell) -> String {
        let mut out = Vec::new();
        run(shell, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn completions_know_the_flags() {
        let text = script(Shell::Bash);
        assert!(text.contains("--num_workers") && text.contains("audit"));
    }

    #[test]
    fn the_commands_that_take_a_job_are_known() {
        let root = help::command(Detail::Everything);
        let names: Vec<&str> = job_commands(&root).map(Command::get_name).collect();
        for name in ["status", "logs", "stop", "clean", "wait", "audit", "scale", "chaos", "export"]
        {
            assert!(names.contains(&name), "{name}: {names:?}");
        }
        assert!(!names.contains(&"train") && !names.contains(&"data"), "{names:?}");
        assert!(switches(&root).contains("--follow") && !switches(&root).contains("--worker"));
    }

    #[test]
    fn job_names_come_from_the_command_in_zsh_and_fish() {
        let zsh = script(Shell::Zsh);
        assert!(zsh.starts_with("#compdef elasticdl\n\n_elasticdl_jobs() {"), "{zsh}");
        assert!(zsh.matches(":_elasticdl_jobs'").count() > 10, "{zsh}");
        assert_eq!(zsh.matches(":_elasticdl_models'").count(), 3, "{zsh}");
        let fish = script(Shell::Fish);
        assert!(fish.contains("__fish_seen_subcommand_from status"), "{fish}");
        assert!(fish.contains("(elasticdl job-names 2>/dev/null)"));
        assert!(
            fish.contains("__fish_seen_subcommand_from evaluate predict export\" -a "),
            "{fish}"
        );
    }
}
