// SPDX-License-Identifier: Apache-2.0
//! Clap's errors about a bad command line, as one sentence with the next step.

use std::num::{IntErrorKind, ParseFloatError, ParseIntError};

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
            let flag = context(error, ContextKind::InvalidArg).unwrap_or_default();
            let what = match flag.strip_prefix('-') {
                Some(number) if number.parse::<f64>().is_ok() => "unexpected negative number",
                Some(_) => "unknown flag",
                None => "unexpected argument",
            };
            let suggested = context(error, ContextKind::SuggestedArg);
            // Without the dashes, which make any two flags similar.
            let is_near = |near: &String| {
                nearest(flag.trim_start_matches('-'), [near.trim_start_matches('-')]).is_some()
            };
            Some(match suggested.filter(is_near) {
                Some(near) => format!("{what} `{flag}`; did you mean `{near}`?"),
                None => format!("{what} `{flag}`; see `{help}`"),
            })
        }
        ErrorKind::InvalidSubcommand => {
            let name = context(error, ContextKind::InvalidSubcommand).unwrap_or_default();
            let command = <crate::cli::Cli as clap::CommandFactory>::command();
            Some(unknown_command(&name, &command))
        }
        ErrorKind::MissingRequiredArgument => {
            let missing = match error.get(ContextKind::InvalidArg) {
                Some(ContextValue::Strings(names)) => names.join(" "),
                _ => context(error, ContextKind::InvalidArg).unwrap_or_default(),
            };
            Some(format!("{missing} is missing; see `{help}`"))
        }
        // Clap's own first line is such a sentence already.
        _ => {
            if let Some(ContextValue::Strings(known)) = error.get(ContextKind::ValidValue)
                && !known.is_empty()
            {
                let value = context(error, ContextKind::InvalidValue).unwrap_or_default();
                let flag = context(error, ContextKind::InvalidArg).unwrap_or_default();
                return Some(format!(
                    "invalid value `{value}` for {flag}; choose from {}",
                    known.join(", ")
                ));
            }
            let text = error.render().to_string();
            let line = text.lines().next().unwrap_or_default().trim_start_matches("error: ");
            // The reason may come from a library.
            let line = match (std::error::Error::source(error), expected(error)) {
                (Some(why), Some(expected)) => line.replace(&why.to_string(), &expected),
                _ => line.to_owned(),
            };
            Some(format!("{line}; see `{help}`"))
        }
    }
}

/// The sentence about a word that is no command of `parent`.
pub(crate) fn unknown_command(name: &str, parent: &clap::Command) -> String {
    let known = parent.get_subcommands().filter(|command| !command.is_hide_set());
    match nearest(name, known.map(clap::Command::get_name)) {
        Some(near) => format!("unknown command `{name}`; did you mean `{near}`?"),
        None => format!("unknown command `{name}`; see `elasticdl --help`"),
    }
}

/// What should have been there instead of something that is no number, or none that is allowed.
fn expected(error: &clap::Error) -> Option<String> {
    let why = std::error::Error::source(error)?;
    if let Some(why) = why.downcast_ref::<ParseIntError>() {
        let is_large = matches!(why.kind(), IntErrorKind::PosOverflow);
        return Some(
            if is_large { "the number is too large" } else { "expected an integer" }.into(),
        );
    }
    if why.is::<ParseFloatError>() {
        return Some("expected a number".into());
    }
    let why = why.to_string();
    let (least, most) = why.split_once(" is not in ")?.1.split_once("..=")?;
    Some(format!("expected an integer from {least} to {most}"))
}

#[expect(clippy::wildcard_enum_match_arm, reason = "the parser's values grow with its versions")]
fn context(error: &clap::Error, kind: ContextKind) -> Option<String> {
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
    use crate::help::Detail;

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
        let negative = check(&["train", "--num_workers", "-1"]).unwrap();
        assert!(negative.starts_with("invalid value '-1' for '--num_workers <N>'"), "{negative}");
        for (args, expected) in [
            (["scale", "job", "--workers=x"], "'--workers <N>': expected an integer"),
            (["scale", "job", "--workers=-1"], "expected an integer from 0 to 4294967295"),
            (["scale", "job", "--workers=99999999999999999999"], "the number is too large"),
            (["logs", "job", "--tail=x"], "'--tail <N>': expected an integer"),
            (["logs", "job", "--tail=-1"], "'--tail <N>': expected an integer"),
            (["chaos", "slow", "--factor=x"], "'--factor <F>': expected an integer"),
            (["chaos", "slow", "--factor=1000"], "expected an integer from 2 to 100"),
        ] {
            let text = check(&args).unwrap();
            assert!(text.contains(expected), "{text}");
            assert!(!text.contains("invalid digit") && !text.contains("is not in"), "{text}");
        }
        let negative = check(&["scale", "job", "--workers", "-3"]).unwrap();
        assert_eq!(negative, "unexpected negative number `-3`; see `elasticdl scale --help`");
        let missing = check(&["scale", "job"]).unwrap();
        assert_eq!(missing, "--workers <N> is missing; see `elasticdl scale --help`");
        assert_eq!(check(&["--help"]), None);
    }

    /// The commands of ElasticDL's documents, apart from the program's name and paths: a master and
    /// a worker by hand, from both guides for developers; on GKE, a job with an image of its own
    /// model, and a job of high priority beside one of low priority; on minikube.
    const OLD_LINES: [&str; 12] = [
        "master --model_file=m.py --training_data_dir=d --evaluation_data_dir=e \
         --records_per_task=100 --num_epochs=1 --codec_type=tf_example --grads_to_wait=2 \
         --checkpoint_steps=2 --minibatch_size=10 --job_name=test --log_level=INFO",
        "worker --worker_id=1 --model_file=m.py --codec_type=tf_example --minibatch_size=10 \
         --master_addr=localhost:50001 --log_level=INFO",
        "master --model_zoo=z --model_def=m.f --job_name=test --training_data=d \
         --validation_data=e --evaluation_steps=15 --num_epochs=2 --checkpoint_steps=2 \
         --grads_to_wait=2 --minibatch_size=10 --num_minibatches_per_task=10 --log_level=INFO",
        "worker --worker_id=1 --model_zoo=z --model_def=m.f --minibatch_size=10 \
         --job_type=training_with_evaluation --master_addr=localhost:50001 --log_level=INFO",
        "worker --worker_id=0 --model_file=m.py --training_data_dir=d --evaluation_data_dir=e \
         --records_per_task=100 --codec_type=bytes --grads_to_wait=2 --checkpoint_steps=2 \
         --minibatch_size=10 --num_workers=2 --job_type=training_only --ps_addrs=a:2222,b:2222",
        "ps --ps_id=0 --port=2222 --job_name=test --use_async=true --grads_to_wait=1 \
         --lr_staleness_modulation=false --num_ps_pods=2 --num_workers=2 --minibatch_size=10 \
         --checkpoint_dir=c --checkpoint_steps=2 --keep_checkpoint_max=3",
        "train --image_base=elasticdl:ci --docker_image_prefix=r/p --model_zoo=z --model_def=m.f \
         --training_data=/data/train --validation_data=/data/test --num_epochs=2 \
         --master_resource_request=cpu=1,memory=2048Mi,ephemeral-storage=5000Mi \
         --worker_resource_request=cpu=1,memory=2048Mi,ephemeral-storage=5000Mi \
         --minibatch_size=64 --records_per_task=100 --num_workers=2 --checkpoint_steps=10 \
         --grads_to_wait=2 --job_name=test --log_level=INFO --image_pull_policy=Always \
         --namespace=n --volume=volume_name=v,mount_path=/data,claim_name=c",
        "train --image_name=i --model_file=m.py --training_data_dir=/data/train \
         --evaluation_data_dir=/data/test --master_pod_priority=high-priority \
         --worker_pod_priority=low-priority --num_epochs=1 --minibatch_size=10 \
         --records_per_task=100 --num_workers=2 --checkpoint_steps=2 \
         --master_resource_request=cpu=1,memory=1024Mi --master_resource_limit=cpu=1,memory=1024Mi \
         --worker_resource_request=cpu=3,memory=4096Mi --worker_resource_limit=cpu=3,memory=4096Mi \
         --grads_to_wait=2 --codec_type=bytes --log_level=INFO --job_name=low-prio-job \
         --volume=volume_name=v,mount_path=/data,claim_name=c",
        "train --image_name=i --model_file=m.py --training_data_dir=/data/train \
         --evaluation_data_dir=/data/test --master_pod_priority=high-priority \
         --worker_pod_priority=high-priority --num_epochs=1 --minibatch_size=10 \
         --records_per_task=100 --num_workers=1 --grads_to_wait=2 --codec_type=bytes \
         --job_name=high-prio-job --volume=volume_name=v,mount_path=/data,claim_name=c",
        "train --image_name=i --model_zoo=z --model_def=m.f --training_data=/data/train \
         --validation_data=/data/test --num_epochs=5 --master_resource_request=cpu=2,memory=2048Mi \
         --master_resource_limit=cpu=2,memory=2048Mi --master_pod_priority=high \
         --worker_resource_request=cpu=2 --worker_pod_priority=low --ps_resource_limit=cpu=2 \
         --ps_pod_priority=high --minibatch_size=64 --num_minibatches_per_task=64 --num_ps_pods=2 \
         --num_workers=4 --evaluation_steps=200 --grads_to_wait=1 --job_name=test-mnist \
         --log_level=INFO --image_pull_policy=Always --volume=mount_path=/data,claim_name=c \
         --distribution_strategy=ParameterServerStrategy",
        "train --image_name=i --model_zoo=z --model_def=m.f --training_data=/data/train \
         --validation_data=/data/test --num_epochs=2 --master_resource_request=cpu=0.2 \
         --worker_resource_request=cpu=0.4 --ps_resource_request=cpu=0.2 --minibatch_size=64 \
         --num_minibatches_per_task=2 --num_ps_pods=1 --num_workers=1 --evaluation_steps=50 \
         --grads_to_wait=1 --job_name=test-mnist --log_level=INFO --image_pull_policy=Never \
         --volume=host_path=/data,mount_path=/data --need_elasticdl_job_service=true \
         --distribution_strategy=ParameterServerStrategy",
        "train --image_name=i --model_zoo=z --model_def=m.f --training_data=/data/train \
         --num_epochs=1 --num_workers=2 --minibatch_size=64 --num_minibatches_per_task=20 \
         --job_name=test-mnist-allreduce --image_pull_policy=Never --need_elasticdl_job_service \
         --volume=host_path=/data,mount_path=/data --distribution_strategy=AllreduceStrategy",
    ];

    #[test]
    fn commands_of_the_original_documents_are_accepted() {
        for line in OLD_LINES {
            let words = std::iter::once("elasticdl").chain(line.split_whitespace());
            let argv = crate::argv::normalise(words.map(Into::into)).unwrap();
            let parsed = Cli::try_parse_from(argv.args);
            assert!(parsed.is_ok(), "{line}: {}", parsed.unwrap_err());
        }
    }

    #[test]
    fn the_parser_is_well_formed() {
        Cli::command().debug_assert();
        for detail in [Detail::Common, Detail::Everything] {
            crate::help::command(detail).debug_assert();
        }
    }
}
