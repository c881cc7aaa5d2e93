// SPDX-License-Identifier: Apache-2.0
//! Local paths of a job, made whole: a job is resumed from any folder.

use anyhow::Context as _;
use edl_core::spec::JobSpec;

/// Makes every local path of the job absolute; URLs and ranges of records stay as they are.
pub(crate) fn make_absolute(spec: &mut JobSpec) -> anyhow::Result<()> {
    for path in [
        &mut spec.training_data,
        &mut spec.validation_data,
        &mut spec.prediction_data,
        &mut spec.checkpoint_dir,
        &mut spec.checkpoint_dir_for_init,
        &mut spec.output,
        &mut spec.tensorboard_dir,
        &mut spec.model_zoo,
    ] {
        *path = absolute(path)?;
    }
    // A dotted path is no path, a file or a folder is one.
    if spec.model_def.contains('/') || spec.model_def.ends_with(".py") {
        spec.model_def = absolute(&spec.model_def)?;
    }
    Ok(())
}

/// Whether a location has records without files.
fn is_bare(location: &str) -> bool {
    ["range:", "reader:"].iter().any(|prefix| location.starts_with(prefix))
}

fn absolute(path: &str) -> anyhow::Result<String> {
    if path.is_empty() || path.contains("://") || is_bare(path) {
        return Ok(path.to_owned());
    }
    // Shells leave the tilde of `--output=~/model` alone.
    let home = std::env::var("HOME").ok().filter(|home| !home.is_empty());
    let path = match (path.strip_prefix("~/"), home) {
        (Some(rest), Some(home)) => format!("{home}/{rest}"),
        (Some(_) | None, _) => path.to_owned(),
    };
    let whole = std::path::absolute(&path).with_context(|| format!("cannot resolve `{path}`"))?;
    Ok(whole.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn local_paths_become_absolute_and_urls_stay() {
        let here = std::env::current_dir().unwrap();
        let mut spec = JobSpec {
            training_data: "data/*.rec".into(),
            validation_data: "s3://bucket/x".into(),
            prediction_data: "range:7".into(),
            output: "/out".into(),
            ..JobSpec::default()
        };
        make_absolute(&mut spec).unwrap();
        assert_eq!(spec.training_data, here.join("data/*.rec").to_str().unwrap());
        assert_eq!(spec.validation_data, "s3://bucket/x");
        assert_eq!((spec.output.as_str(), spec.prediction_data.as_str()), ("/out", "range:7"));
    }
}
