// SPDX-License-Identifier: Apache-2.0
//! Defaults of a job without flags: the data included in the repository, and a name.

use std::path::{Path, PathBuf};

use edl_core::spec::{JobSpec, JobType};

use crate::exit::refuse;
use crate::jobs::suffix;

/// Below the repository's root.
const FASHION_MNIST: &str = "data/fashion_mnist";

/// Fills in what the user did not specify: the data of image models, and the job's name.
pub(crate) fn fill(spec: &mut JobSpec) -> anyhow::Result<()> {
    fill_data(spec)?;
    fill_name(spec)
}

/// Names a job that has no name after its model.
pub(crate) fn fill_name(spec: &mut JobSpec) -> anyhow::Result<()> {
    if spec.job_name.is_empty() {
        spec.job_name = format!("{}-{}", name_part(&spec.model_def), suffix()?);
    }
    Ok(())
}

/// The data that a job of this type goes through, and its flag.
pub(crate) fn data_of(spec: &JobSpec) -> (&'static str, &String) {
    match spec.job_type {
        JobType::Train => ("training_data", &spec.training_data),
        JobType::Evaluate => ("validation_data", &spec.validation_data),
        JobType::Predict => ("prediction_data", &spec.prediction_data),
    }
}

fn fill_data(spec: &mut JobSpec) -> anyhow::Result<()> {
    let (flag, data) = data_of(spec);
    if !data.is_empty() {
        return Ok(());
    }
    if !spec.model_def.starts_with("mnist") {
        return Err(refuse(format!("model `{}` needs data; set --{flag}", spec.model_def)));
    }
    let data = find().ok_or_else(|| {
        refuse(format!(
            "the data shipped with elasticdl (`{FASHION_MNIST}`) was not found; provide other data \
             with --{flag}, or generate some with `elasticdl data gen fashion_mnist DIR`"
        ))
    })?;
    let part = |name: &str| data.join(name).to_string_lossy().into_owned();
    match spec.job_type {
        JobType::Train => {
            spec.training_data = part("train");
            if spec.validation_data.is_empty() {
                spec.validation_data = part("test");
            }
        }
        JobType::Evaluate => spec.validation_data = part("test"),
        JobType::Predict => spec.prediction_data = part("test"),
    }
    Ok(())
}

/// The shipped data: below the current folder, next to the executable, or where this was built.
pub(crate) fn find() -> Option<PathBuf> {
    let here = std::env::current_dir().ok();
    let executable = std::env::current_exe().ok();
    let built = Path::new(env!("CARGO_MANIFEST_DIR"));
    let places = here
        .iter()
        .map(PathBuf::as_path)
        .chain(executable.iter().flat_map(|path| path.ancestors().skip(1)))
        .chain(built.ancestors());
    places.map(|place| place.join(FASHION_MNIST)).find(|data| data.join("train").is_dir())
}

/// `model_zoo.mnist_cnn` becomes `mnist-cnn`.
fn name_part(model: &str) -> String {
    let last = model.rsplit(['.', '/']).find(|part| !part.is_empty()).unwrap_or("job");
    let fits = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '-' };
    let name: String = last.chars().map(fits).take(40).collect();
    let name = name.trim_matches('-');
    if name.is_empty() { "job".into() } else { name.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_made_from_the_models() {
        assert_eq!(name_part("mnist_cnn"), "mnist-cnn");
        assert_eq!(name_part("zoo.My_Model.custom"), "custom");
        assert_eq!(name_part("___"), "job");
        let mut spec = JobSpec { training_data: "x".into(), ..JobSpec::default() };
        fill(&mut spec).unwrap();
        assert!(spec.job_name.starts_with("mnist-cnn-"), "{}", spec.job_name);
        spec.check().unwrap();
        assert_eq!(spec.validation_data, "", "only a job without any data gets ours");
    }

    #[test]
    fn a_model_without_shipped_data_asks_for_data() {
        let mut spec = JobSpec { model_def: "deepfm".into(), ..JobSpec::default() };
        let error = fill(&mut spec).unwrap_err().to_string();
        assert_eq!(error, "model `deepfm` needs data; set --training_data");
    }
}
