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
                copy_all(model.weights.parent().unwrap_or(Path::new("")), output, &[WEIGHTS, CARD])
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

/// Copies files, which may be the same ones; after an error, what was there before stays.
fn copy_all(from: &Path, to: &Path, names: &[&str]) -> std::io::Result<()> {
    let draft = |name: &str| to.join(format!(".{name}.new"));
    let copied =
        names.iter().try_for_each(|name| std::fs::copy(from.join(name), draft(name)).map(drop));
    let copied = copied.and_then(|()| {
        names.iter().try_for_each(|name| std::fs::rename(draft(name), to.join(name)))
    });
    copied.inspect_err(|_| {
        names.iter().for_each(|name| {
            let _draft_stays_hidden = std::fs::remove_file(draft(name));
        });
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_copied_all_or_none() {
        let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let write = |name, text| std::fs::write(from.path().join(name), text).unwrap();
        let read = |name| std::fs::read_to_string(to.path().join(name)).unwrap();
        write("a", "old");
        write("b", "old");
        copy_all(from.path(), to.path(), &["a", "b"]).unwrap();
        copy_all(to.path(), to.path(), &["a", "b"]).unwrap();
        write("a", "new");
        std::fs::remove_file(from.path().join("b")).unwrap();
        copy_all(from.path(), to.path(), &["a", "b"]).unwrap_err();
        // A folder cannot be copied.
        std::fs::create_dir(from.path().join("b")).unwrap();
        copy_all(from.path(), to.path(), &["a", "b"]).unwrap_err();
        assert_eq!((read("a"), read("b")), ("old".into(), "old".into()));
        assert_eq!(std::fs::read_dir(to.path()).unwrap().count(), 2, "no draft is left");
    }
}
