// SPDX-License-Identifier: Apache-2.0
//! `job convert`: converts a manifest of PaddlePaddle EDL.

use std::io::Write;
use std::path::Path;

use crate::cli::operator::{JobArgs, JobCommand};
use crate::exit::{Exit, refuse};

/// Runs the command.
pub(crate) fn run(args: &JobArgs, out: &mut dyn Write) -> anyhow::Result<Exit> {
    let JobCommand::Convert { file } = &args.command;
    out.write_all(converted(file)?.as_bytes())?;
    Ok(Exit::Ok)
}

fn converted(file: &Path) -> anyhow::Result<String> {
    let shown = file.display();
    let text = std::fs::read_to_string(file)
        .map_err(|error| refuse(format!("cannot read `{shown}`: {error}")))?;
    edl_operator::convert::convert(&text).map_err(|error| refuse(format!("`{shown}`: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_converted_or_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("old.yaml");
        let manifest = "{kind: TrainingJob, metadata: {name: a}, spec: {image: i, passes: 3}}";
        std::fs::write(&path, manifest).unwrap();
        assert!(converted(&path).unwrap().contains("num_epochs: 3"));
        std::fs::write(&path, "kind: Pod").unwrap();
        assert!(converted(&path).unwrap_err().to_string().contains("old.yaml`: expected"));
        assert!(converted(Path::new("no/such")).unwrap_err().to_string().contains("cannot read"));
    }
}
