// SPDX-License-Identifier: Apache-2.0
//! Absolute paths for a job, which can be resumed from any folder.

use anyhow::Context as _;
use edl_core::spec::{FIELDS, JobSpec};

use crate::config;
use crate::flags::Given;

/// Makes every local path of the job absolute; URLs and ranges of records stay unchanged.
pub(crate) fn make_absolute(spec: &mut JobSpec) -> anyhow::Result<()> {
    let fields = serde_json::json!(spec);
    let mut paths = Given::new();
    for field in FIELDS.iter().filter(|field| field.is_path) {
        let path = fields[field.name].as_str().unwrap_or_default();
        paths.insert(field.name.into(), absolute(path)?.into());
    }
    // A file or a folder is a path; the dotted name of a module is not.
    if spec.model_def.contains('/') || spec.model_def.ends_with(".py") {
        paths.insert("model_def".into(), absolute(&spec.model_def)?.into());
    }
    *spec = config::apply(spec, paths)?;
    Ok(())
}

/// Whether a location has records without files.
fn is_bare(location: &str) -> bool {
    ["range:", "stream:", "reader:"].iter().any(|prefix| location.starts_with(prefix))
}

fn absolute(path: &str) -> anyhow::Result<String> {
    if path.is_empty() || path.contains("://") || is_bare(path) {
        return Ok(path.to_owned());
    }
    let path = expanded(path);
    let whole = std::path::absolute(&path).with_context(|| format!("cannot resolve `{path}`"))?;
    Ok(whole.to_string_lossy().into_owned())
}

/// Expands a tilde: shells do not expand that of `--output=~/model`.
pub(crate) fn expanded(path: &str) -> String {
    let home = std::env::var("HOME").ok().filter(|home| !home.is_empty());
    match (path.strip_prefix("~/"), home) {
        (Some(rest), Some(home)) => format!("{home}/{rest}"),
        (Some(_) | None, _) => path.to_owned(),
    }
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
