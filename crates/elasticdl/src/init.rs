// SPDX-License-Identifier: Apache-2.0
//! `init`: writes a job description file with comments.

use std::fs::OpenOptions;
use std::io::{ErrorKind, Write};

use anyhow::Context as _;
use edl_core::spec::template;

use crate::cli::InitArgs;
use crate::console::eprint;
use crate::exit::{Exit, refuse};

/// Writes the file; its name goes to `out`.
pub(crate) fn run(args: &InitArgs, out: &mut dyn Write) -> anyhow::Result<Exit> {
    let InitArgs { file, force } = args;
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
    opened.write_all(template().as_bytes()).with_context(|| format!("cannot write `{shown}`"))?;
    writeln!(out, "{shown}")?;
    eprint(format_args!("edit it, then run: elasticdl train --config {shown}"));
    Ok(Exit::Ok)
}

#[cfg(test)]
mod tests {
    use edl_core::spec::JobSpec;

    use super::*;

    #[test]
    fn the_template_is_the_default_job() {
        let written = edl_kube::yaml::read_value(&template()).unwrap();
        assert_eq!(written, serde_json::to_value(JobSpec::default()).unwrap());
    }

    #[test]
    fn an_existing_file_is_kept_unless_forced() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("job.yaml");
        std::fs::write(&file, "mine").unwrap();
        let args = InitArgs { file: file.clone(), force: false };
        let error = run(&args, &mut Vec::new()).unwrap_err().to_string();
        assert!(error.contains("add --force"), "{error}");
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "mine");
        run(&InitArgs { force: true, ..args }, &mut Vec::new()).unwrap();
        assert_eq!(std::fs::read_to_string(&file).unwrap(), template());
    }
}
