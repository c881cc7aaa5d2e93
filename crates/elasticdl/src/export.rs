// SPDX-License-Identifier: Apache-2.0
//! `export`: writes a trained model to files that other programs read.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use edl_tensor::import::{CARD, WEIGHTS};

use crate::cli::trained::ExportArgs;
use crate::console::{counted, eprint};
use crate::exit::{Exit, refuse};
use crate::jobs::Home;
use crate::trained::{Source, Trained};
use crate::{models, paths, python};

/// Runs the command; the path of the model goes to `out`.
pub(crate) fn run(args: &ExportArgs, out: &mut dyn Write) -> anyhow::Result<Exit> {
    let ExportArgs { model, output, force } = args;
    let output = &PathBuf::from(paths::expanded(output));
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
                [WEIGHTS, CARD].iter().try_for_each(|name| {
                    copy_whole(&model.weights.with_file_name(name), &output.join(name))
                })
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

/// Copies a file, which may be the same one; after an error, what was there before stays.
fn copy_whole(from: &Path, to: &Path) -> std::io::Result<()> {
    let name = to.file_name().unwrap_or_default().to_string_lossy();
    let draft = to.with_file_name(format!(".{name}.new"));
    std::fs::copy(from, &draft).and_then(|_| std::fs::rename(&draft, to)).inspect_err(|_| {
        let _draft_stays_hidden = std::fs::remove_file(&draft);
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_copied_whole_or_not_at_all() {
        let dir = tempfile::tempdir().unwrap();
        let [from, to] = ["from", "to"].map(|name| dir.path().join(name));
        std::fs::write(&from, "new").unwrap();
        copy_whole(&from, &to).unwrap();
        copy_whole(&to, &to).unwrap();
        assert_eq!(std::fs::read_to_string(&to).unwrap(), "new");
        copy_whole(&dir.path().join("none"), &to).unwrap_err();
        // A folder cannot be copied: the draft is removed.
        copy_whole(dir.path(), &to).unwrap_err();
        assert_eq!(std::fs::read_to_string(&to).unwrap(), "new");
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2);
    }
}
