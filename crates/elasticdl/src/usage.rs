// SPDX-License-Identifier: Apache-2.0
//! What clap says about a bad command line, as one sentence that names the thing and the next
//! step.

use clap::error::{ContextKind, ContextValue, ErrorKind};

use edl_core::text::nearest;

/// One sentence for an error of the parser; `None` for help and version, which are no errors.
#[expect(clippy::wildcard_enum_match_arm, reason = "the parser's kinds grow with its versions")]
pub(crate) fn sentence(error: &clap::Error, command: Option<&str>) -> Option<String> {
    let help = command.map_or("elasticdl --help".to_owned(), |c| format!("elasticdl {c} --help"));
    match error.kind() {
        ErrorKind::DisplayHelp
        | ErrorKind::DisplayVersion
        | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => None,
        ErrorKind::UnknownArgument => {
            let flag = word(error, ContextKind::InvalidArg).unwrap_or_default();
            let what = if flag.starts_with('-') { "unknown flag" } else { "unexpected argument" };
            let suggested = word(error, ContextKind::SuggestedArg);
            // Without the dashes, which make any two flags alike.
            let is_near = |near: &String| {
                nearest(flag.trim_start_matches('-'), [near.trim_start_matches('-')]).is_some()
            };
            Some(match suggested.filter(is_near) {
                Some(near) => format!("{what} `{flag}`; did you mean `{near}`?"),
                None => format!("{what} `{flag}`; see `{help}`"),
            })
        }
        ErrorKind::InvalidSubcommand => {
            let name = word(error, ContextKind::InvalidSubcommand).unwrap_or_default();
            let command = <crate::cli::Cli as clap::CommandFactory>::command();
            let known = command.get_subcommands().filter(|command| !command.is_hide_set());
            let known: Vec<&str> = known.map(clap::Command::get_name).collect();
            Some(match nearest(&name, known) {
                Some(near) => format!("unknown command `{name}`; did you mean `{near}`?"),
                None => format!("unknown command `{name}`; see `elasticdl --help`"),
            })
        }
        ErrorKind::MissingRequiredArgument => {
            let missing = match error.get(ContextKind::InvalidArg) {
                Some(ContextValue::Strings(names)) => names.join(" "),
                _ => word(error, ContextKind::InvalidArg).unwrap_or_default(),
            };
            Some(format!("{missing} is missing; see `{help}`"))
        }
        // Clap's own first line is such a sentence already.
        _ => {
            if let Some(ContextValue::Strings(known)) = error.get(ContextKind::ValidValue)
                && !known.is_empty()
            {
                let value = word(error, ContextKind::InvalidValue).unwrap_or_default();
                let flag = word(error, ContextKind::InvalidArg).unwrap_or_default();
                return Some(format!(
                    "invalid value `{value}` for {flag}; choose from {}",
                    known.join(", ")
                ));
            }
            let text = error.render().to_string();
            let line = text.lines().next().unwrap_or_default();
            Some(format!("{}; see `{help}`", line.trim_start_matches("error: ")))
        }
    }
}

#[expect(clippy::wildcard_enum_match_arm, reason = "the parser's values grow with its versions")]
fn word(error: &clap::Error, kind: ContextKind) -> Option<String> {
    match error.get(kind)? {
        ContextValue::String(text) => Some(text.clone()),
        ContextValue::Strings(texts) => texts.first().cloned(),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory as _, Parser as _};

    use super::*;
    use crate::cli::Cli;

    fn check(args: &[&str]) -> Option<String> {
        let error = Cli::try_parse_from([&["elasticdl"], args].concat()).unwrap_err();
        sentence(&error, args.first().copied())
    }

    #[test]
    fn a_bad_command_line_gets_one_sentence_with_a_suggestion() {
        assert_eq!(
            check(&["train", "--num_wokers=2"]).unwrap(),
            "unknown flag `--num_wokers`; did you mean `--num_workers`?"
        );
        assert_eq!(
            check(&["train", "--zebra"]).unwrap(),
            "unknown flag `--zebra`; see `elasticdl train --help`"
        );
        assert_eq!(
            check(&["train", "--frobnicate"]).unwrap(),
            "unknown flag `--frobnicate`; see `elasticdl train --help`"
        );
        assert_eq!(
            check(&["train", "--codec_type=json"]).unwrap(),
            "invalid value `json` for --codec_type <CODEC_TYPE>; choose from tf_example, bytes"
        );
        assert_eq!(check(&["trian"]).unwrap(), "unknown command `trian`; did you mean `train`?");
        let number = check(&["train", "--num_workers=two"]).unwrap();
        assert!(number.starts_with("invalid value 'two' for '--num_workers <N>'"), "{number}");
        let missing = check(&["scale", "job"]).unwrap();
        assert_eq!(missing, "--workers <N> is missing; see `elasticdl scale --help`");
        assert_eq!(check(&["--help"]), None);
    }

    #[test]
    fn the_parser_is_well_formed() {
        Cli::command().debug_assert();
    }

    #[test]
    fn the_help_fits_one_screen_and_tells_the_exit_codes() {
        let help = Cli::command().render_help().to_string();
        let lines = help.lines().count();
        assert!((24..=50).contains(&lines), "{lines} lines:\n{help}");
        assert!(help.lines().all(|line| line.chars().count() <= 120), "{help}");
        assert!(help.contains("Exit codes: 0 success"), "{help}");
        assert!(!help.contains("supervise"), "{help}");
    }
}
