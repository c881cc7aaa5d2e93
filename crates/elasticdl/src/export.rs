// SPDX-License-Identifier: Apache-2.0
//! `export`: writes a trained model to files that other programs read.

use std::collections::BTreeMap;
use std::io::Write;

use anyhow::Context as _;
use edl_tensor::import::{CARD, WEIGHTS};

use crate::cli::trained::ExportArgs;
use crate::console::{counted, eprint};
use crate::exit::{Exit, refuse};
use crate::jobs::Home;
use crate::trained::{Source, Trained};
use crate::{models, python};

/// Runs the command; the path of the model goes to `out`.
pub(crate) fn run(args: &ExportArgs, out: &mut dyn Write) -> anyhow::Result<Exit> {
    let ExportArgs { model, output, force } = args;
    let trained = Trained::find(model, &Home::from_env()?)?;
    let (weights, shown) = (output.join(WEIGHTS), output.display());
    if weights.exists() && !force {
        return Err(refuse(format!(
            "`{shown}` already contains a model; add --force to overwrite it, or choose another \
             --output"
        )));
    }
    match &trained.source {
        Source::Checkpoint(checkpoint) => {
            let exported =
                edl_tensor::export::export(&checkpoint.path, output, &BTreeMap::new(), &|_| {})
                    .with_context(|| format!("cannot export to `{shown}`"))?;
            let n_params = counted(exported.n_params as u64, "parameter");
            let n_rows = match exported.n_rows {
                0 => String::new(),
                n_rows => format!(" and {} of tables", counted(n_rows, "row")),
            };
            let version = checkpoint.manifest.version;
            eprint(format_args!("exported {n_params}{n_rows}, as of step {version}"));
        }
        Source::Exported(model) => {
            let copy = || {
                std::fs::create_dir_all(output)?;
                for name in [WEIGHTS, CARD] {
                    let (from, to) = (model.weights.with_file_name(name), output.join(name));
                    // A file must not be copied onto itself, which would empty it.
                    if std::fs::canonicalize(&from).ok() != std::fs::canonicalize(&to).ok() {
                        std::fs::copy(from, to)?;
                    }
                }
                Ok::<(), std::io::Error>(())
            };
            copy().with_context(|| format!("cannot write to `{shown}`"))?;
        }
    }
    writeln!(out, "{}", weights.display())?;
    if let Some(spec) = trained.writer.filter(models::is_python) {
        let names = python::export_to(output, &spec, None)
            .context("cannot export the model in its framework's format")?;
        for name in names.split_whitespace() {
            writeln!(out, "{}", output.join(name).display())?;
        }
    }
    Ok(Exit::Ok)
}
