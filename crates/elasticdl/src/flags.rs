// SPDX-License-Identifier: Apache-2.0
//! The flags that describe a job, made from the table of fields. Each one that is given overrides
//! the field of the same name.

use clap::builder::{
    BoolishValueParser, PossibleValue, PossibleValuesParser, TypedValueParser as _,
};
use clap::{Arg, ArgMatches, Args, Command, Error, FromArgMatches};
use edl_core::spec::{
    FIELDS, Field, FieldKind, FieldType as _, Flag, Group, JobSpec, Seconds, field,
};
use serde_json::{Map, Value};

use crate::exit::refuse;

/// Fields of a job by name, with checked values.
pub(crate) type Given = Map<String, Value>;

/// The groups of flags that a command takes, one bit each.
pub(crate) const CLUSTER: u8 = 1;
pub(crate) const COMMON: u8 = 2;
pub(crate) const TRAIN: u8 = 4;
pub(crate) const PREDICT: u8 = 8;
/// The flags are accepted, but not shown in `--help`.
pub(crate) const HIDDEN: u8 = 16;
/// Flags of the other groups that make sense for a custom training loop: `Field::is_for_script`.
pub(crate) const SCRIPT: u8 = 32;

/// Flags without a position follow those that have one.
const AFTER: usize = 1000;

/// The flags that were given, from the groups in `GROUPS`.
#[derive(Clone, Debug, Default)]
pub(crate) struct JobFlags<const GROUPS: u8>(pub(crate) Given);

/// The flags of some groups, in the order of `--help`: Kubernetes is last.
fn flags(groups: u8) -> impl Iterator<Item = (&'static Field, &'static Flag)> {
    let ours = [(Group::Common, COMMON), (Group::Train, TRAIN), (Group::Predict, PREDICT)];
    ours.into_iter().chain([(Group::Cluster, CLUSTER)]).flat_map(move |(group, bit)| {
        let flags = FIELDS.iter().filter_map(|field| Some((field, field.flag.as_ref()?)));
        let flags = flags.filter(move |(_, flag)| flag.group == group);
        flags.filter(move |(field, _)| {
            groups & bit != 0 || groups & SCRIPT != 0 && field.is_for_script
        })
    })
}

fn arg(at: usize, field: &'static Field, flag: &Flag, default: &Value) -> Arg {
    let value_name = match flag.value {
        "" => field.name.to_uppercase(),
        value => value.to_owned(),
    };
    let arg = Arg::new(field.name)
        .long(field.name)
        .visible_aliases(field.aliases.iter().copied())
        .help(field.help_with_default(default))
        .help_heading(flag.heading)
        .value_name(value_name)
        .display_order(flag.position.unwrap_or(AFTER + at));
    match field.kind {
        FieldKind::Boolean => arg
            .num_args(0..=1)
            .require_equals(true)
            .default_missing_value("true")
            .value_parser(BoolishValueParser::new().map(Value::from)),
        FieldKind::Choice(names) => arg
            .value_parser(
                PossibleValuesParser::new(choices(field, names))
                    .map(move |text| Value::from(field.full_value(&text))),
            )
            .hide_possible_values(names.iter().all(|name| field.help.contains(name))),
        // A negative number is a wrong value rather than an unknown flag.
        FieldKind::Integer | FieldKind::Number => {
            arg.allow_negative_numbers(true).value_parser(field.parse)
        }
        FieldKind::Text | FieldKind::Map => arg.value_parser(field.parse),
    }
}

/// The values of a field, each of which may also have shorter names.
fn choices(field: &'static Field, names: &[&'static str]) -> Vec<PossibleValue> {
    let value = |name: &&'static str| {
        let aliases = field.value_aliases.iter().filter(|(_, value)| value == name);
        PossibleValue::new(*name).aliases(aliases.map(|(alias, _)| *alias))
    };
    names.iter().map(value).collect()
}

impl<const GROUPS: u8> Args for JobFlags<GROUPS> {
    fn augment_args(command: Command) -> Command {
        let defaults = serde_json::json!(JobSpec::default());
        // A command may have its own flags with the same names.
        let own: Vec<String> =
            command.get_arguments().map(|arg| arg.get_id().to_string()).collect();
        let args = flags(GROUPS).filter(|(field, _)| !own.iter().any(|name| name == field.name));
        command.args(args.enumerate().map(|(at, (field, flag))| {
            arg(at, field, flag, &defaults[field.name]).hide(GROUPS & HIDDEN != 0)
        }))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl<const GROUPS: u8> FromArgMatches for JobFlags<GROUPS> {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, Error> {
        let given = flags(GROUPS).filter_map(|(field, _)| {
            // A flag of the command's own has another type.
            let value = matches.try_get_one::<Value>(field.name).ok().flatten()?;
            Some((field.name.to_owned(), value.clone()))
        });
        Ok(Self(given.collect()))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

/// The text of a field, if it is given.
pub(crate) fn text<'a>(given: &'a Given, name: &str) -> Option<&'a str> {
    given.get(name).and_then(Value::as_str)
}

/// A flag about Kubernetes.
pub(crate) fn is_for_cluster(field: &Field) -> bool {
    field.flag.is_some_and(|flag| flag.group == Group::Cluster)
}

/// What the Kubernetes flags mean for a job on this machine: a note each, or a refusal.
pub(crate) fn on_this_machine(flags: &Given) -> anyhow::Result<Vec<String>> {
    let mut notes = Vec::new();
    for field in flags.keys().filter_map(|name| field(name).ok()).filter(|it| is_for_cluster(it)) {
        let name = field.name;
        if field.needs_cluster {
            return Err(needs_cluster(name));
        }
        notes.push(format!("--{name} is ignored: without --image_name the job runs locally"));
    }
    Ok(notes)
}

/// The refusal of a flag that needs a cluster.
pub(crate) fn needs_cluster(name: &str) -> anyhow::Error {
    refuse(format!(
        "--{name} needs a Kubernetes cluster: set --image_name to run the job there, or drop \
         --{name} to train on this machine"
    ))
}

/// A rate: a number from 0.
pub(crate) fn rate(text: &str) -> Result<f64, String> {
    let rate = text.parse().ok().filter(|rate: &f64| (0.0..=1e6).contains(rate));
    rate.ok_or_else(|| "expected a number from 0 to 1000000".into())
}

/// Seconds, or a number with s, m, h or d.
pub(crate) fn seconds(text: &str) -> Result<u64, String> {
    Seconds::parse(text).map(|Seconds(seconds)| seconds)
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;
    use serde_json::json;

    use super::*;

    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        flags: JobFlags<{ CLUSTER | COMMON | TRAIN | PREDICT }>,
    }

    fn given(args: &[&str]) -> Given {
        let line = ["x"].iter().chain(args);
        Line::try_parse_from(line).unwrap_or_else(|error| panic!("{error}")).flags.0
    }

    #[test]
    fn only_what_is_given_is_named() {
        assert!(given(&[]).is_empty());
        let seed = format!("--seed={}", u64::MAX);
        let found = given(&["--use_async=no", &seed, "--shuffle", "--model_params=lr=0.1"]);
        let expected = json!({
            "use_async": false, "seed": u64::MAX, "shuffle": true, "model_params": {"lr": "0.1"},
        });
        assert_eq!(Value::Object(found), expected);
    }

    #[test]
    fn short_names_of_flags_and_values_mean_the_same() {
        let short = ["--lr=0.1", "--batch_size=8", "--strategy=ddp", "--workers=3", "--epochs=2"];
        let expected = json!({
            "learning_rate": 0.1, "minibatch_size": 8, "num_workers": 3, "num_epochs": 2,
            "distribution_strategy": "AllreduceStrategy",
        });
        assert_eq!(Value::Object(given(&short)), expected);
        for field in FIELDS {
            for (alias, value) in field.value_aliases {
                let found = given(&[&format!("--{}={alias}", field.name)]);
                assert_eq!(found[field.name], *value, "{alias}");
            }
        }
    }

    #[test]
    fn on_one_machine_ignored_flags_leave_a_note_and_others_are_refused_by_name() {
        let harmless = given(&["--namespace=x", "--worker_resource_request=cpu=1", "--seed=1"]);
        let notes = on_this_machine(&harmless).unwrap();
        assert_eq!(notes.len(), 2);
        assert!(notes[0].starts_with("--namespace is ignored"), "{}", notes[0]);
        let volume = given(&["--volume=claim_name=c,mount_path=/d"]);
        let error = on_this_machine(&volume).unwrap_err().to_string();
        assert!(error.starts_with("--volume needs a Kubernetes cluster"), "{error}");
    }
}
