// SPDX-License-Identifier: Apache-2.0
//! `--docker_image_prefix`: builds and pushes an image of the user's models for one job.

use std::path::{Path, PathBuf};

use edl_core::spec::JobSpec;

use crate::cli::RunFlags;
use crate::exit::refuse;
use crate::flags::{self, Given};
use crate::zoo;

/// Where the image has the models.
const MODEL_ZOO: &str = "/model_zoo";

/// An image to build for one job.
pub(super) struct JobImage {
    prefix: String,
    base: String,
    /// The user's models; none for the built-in ones.
    models: Option<PathBuf>,
}

impl JobImage {
    /// The image to build, if the user asks for one. The fields of the job then name models by their
    /// paths in the image.
    pub(super) fn of(run: &RunFlags, given: &mut Given) -> anyhow::Result<Option<Self>> {
        let Some(prefix) = &run.docker_image_prefix else { return Ok(None) };
        if given.contains_key("image_name") {
            return Err(refuse(
                "--docker_image_prefix and --image_name cannot be used together; choose one",
            ));
        }
        let field = |name: &str| flags::text(given, name).unwrap_or_default();
        let model = Path::new(field("model_def")).to_owned();
        let models = match field("model_zoo") {
            "" if model.is_file() => Some(model.parent().unwrap_or(Path::new(".")).to_owned()),
            "" if model.is_dir() => Some(model.clone()),
            "" => None,
            zoo => Some(PathBuf::from(zoo)),
        };
        if let Some(folder) = models.as_ref().filter(|folder| !folder.is_dir()) {
            return Err(refuse(format!(
                "folder `{}` not found; check --model_zoo",
                folder.display()
            )));
        }
        if let Some(folder) = &models {
            if let Ok(below) = model.strip_prefix(folder) {
                let inside = Path::new(MODEL_ZOO).join(below);
                given.insert("model_def".into(), inside.to_string_lossy().into_owned().into());
            }
            given.insert("model_zoo".into(), MODEL_ZOO.into());
        }
        // The name without its digest, until the image is built.
        given.insert("image_name".into(), prefix.clone().into());
        let base = run.image_base.clone().unwrap_or_default();
        Ok(Some(Self { prefix: prefix.clone(), base, models }))
    }

    /// Builds and pushes the image, and sets its name in the job.
    pub(super) fn publish(&self, spec: &mut JobSpec) -> anyhow::Result<()> {
        let empty = tempfile::tempdir()?;
        let models = self.models.as_deref().unwrap_or(empty.path());
        spec.image_name = zoo::publish(models, &self.base, &self.prefix, &spec.job_name)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn with_image(given: Value) -> anyhow::Result<(Option<PathBuf>, Value)> {
        let run = RunFlags { docker_image_prefix: Some("host/me".into()), ..RunFlags::default() };
        let Value::Object(mut given) = given else { panic!("fields of a job") };
        let wanted = JobImage::of(&run, &mut given)?.expect("an image is asked for");
        Ok((wanted.models, given.into()))
    }

    #[test]
    fn models_are_named_as_the_image_has_them() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("mine.py");
        std::fs::write(&file, "").unwrap();
        let (models, given) = with_image(json!({ "model_def": file })).unwrap();
        assert_eq!(models.as_deref(), Some(folder.path()));
        assert_eq!(given["model_def"], "/model_zoo/mine.py");
        assert_eq!(given["model_zoo"], "/model_zoo");
        let (models, given) =
            with_image(json!({ "model_zoo": folder.path(), "model_def": "mine.custom_model" }))
                .unwrap();
        assert_eq!(models.as_deref(), Some(folder.path()));
        assert_eq!(given["model_def"], "mine.custom_model");
        let (models, given) = with_image(json!({ "model_def": "mnist_cnn" })).unwrap();
        assert_eq!((models, given.get("model_zoo")), (None, None));
    }

    #[test]
    fn two_images_and_missing_models_are_refused() {
        let both = with_image(json!({ "image_name": "x" })).unwrap_err().to_string();
        assert!(both.contains("choose one"), "{both}");
        let missing = with_image(json!({ "model_zoo": "/nowhere" })).unwrap_err().to_string();
        assert!(missing.contains("`/nowhere` not found; check --model_zoo"), "{missing}");
    }
}
