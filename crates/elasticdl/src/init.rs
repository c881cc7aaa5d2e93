// SPDX-License-Identifier: Apache-2.0
//! `init`: writes a job description file with comments.

use std::fs::OpenOptions;
use std::io::{ErrorKind, Write};

use anyhow::Context as _;
use edl_core::spec::{JobSpec, template};

use crate::cli::InitArgs;
use crate::config;
use crate::console::eprint;
use crate::exit::{Exit, refuse};

/// Writes the file; its name goes to `out`.
pub(crate) fn run(args: &InitArgs, out: &mut dyn Write) -> anyhow::Result<Exit> {
    let InitArgs { file, force, job } = args;
    let text = template(&config::apply(&JobSpec::default(), job.0.clone())?);
    let shown = file.display();
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true).create_new(!force);
    let mut opened = options.open(file).map_err(|error| {
        if error.kind() == ErrorKind::AlreadyExists {
            refuse(format!("`{shown}` already exists; add --force to overwrite it"))
        } else {
            refuse(format!("cannot write `{shown}`: {error}"))
        }
    })?;
    opened.write_all(text.as_bytes()).with_context(|| format!("cannot write `{shown}`"))?;
    writeln!(out, "{shown}")?;
    eprint(format_args!("edit it, then run: elasticdl train --config {shown}"));
    Ok(Exit::Ok)
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::cli::{Cli, Command};

    /// Runs `elasticdl init FILE` with these flags.
    fn init(file: &std::path::Path, flags: &[&str]) -> anyhow::Result<String> {
        let line = ["elasticdl", "init", file.to_str().unwrap()].into_iter();
        let line = line.chain(flags.iter().copied());
        let Command::Init(args) = Cli::try_parse_from(line).unwrap().command else { panic!() };
        run(&args, &mut Vec::new())?;
        Ok(std::fs::read_to_string(file).unwrap())
    }

    #[test]
    fn the_template_is_the_default_job() {
        let written = edl_kube::yaml::read_value(&template(&JobSpec::default())).unwrap();
        assert_eq!(written, serde_json::to_value(JobSpec::default()).unwrap());
    }

    #[test]
    fn flags_set_fields_of_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let flags = ["--workers=4", "--lr=0.5", "--job_name=on: 'x'", "--model_params=a=1;b=2,3"];
        let text = init(&dir.path().join("job.yaml"), &flags).unwrap();
        let written: JobSpec =
            serde_json::from_value(edl_kube::yaml::read_value(&text).unwrap()).unwrap();
        let expected = JobSpec {
            num_workers: 4,
            learning_rate: Some(0.5),
            job_name: "on: 'x'".into(),
            model_params: [("a", "1"), ("b", "2,3")].map(|(k, v)| (k.into(), v.into())).into(),
            ..JobSpec::default()
        };
        assert_eq!(written, expected);
    }

    #[test]
    fn an_existing_file_is_kept_unless_forced() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("job.yaml");
        std::fs::write(&file, "mine").unwrap();
        let error = init(&file, &[]).unwrap_err().to_string();
        assert!(error.contains("add --force"), "{error}");
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "mine");
        assert_eq!(init(&file, &["--force"]).unwrap(), template(&JobSpec::default()));
    }
}
