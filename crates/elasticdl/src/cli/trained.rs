// SPDX-License-Identifier: Apache-2.0
//! The flags of `evaluate`, `predict` and `export`: commands that use a trained model.

use clap::Args;

use super::RunFlags;
use crate::exit::refuse;
use crate::flags::{Given, JobFlags};
use crate::trained;

pub(crate) const EVALUATE_EXAMPLES: &str = "\
Examples:
  elasticdl evaluate my-job
  elasticdl evaluate model/model.safetensors --validation_data=DATA";

pub(crate) const PREDICT_EXAMPLES: &str = "\
Examples:
  elasticdl predict my-job --prediction_data=DATA --output=DIR
  elasticdl predict model --prediction_data=DATA";

pub(crate) const EXPORT_EXAMPLES: &str = "\
Examples:
  elasticdl export my-job                               to the folder `model`
  elasticdl export ~/.elasticdl/jobs/my-job/checkpoints --output=DIR";

/// A command that uses a trained model.
#[derive(Args, Debug)]
pub(crate) struct UseArgs<const GROUPS: u8> {
    /// Trained model: a job, its output folder, a model.safetensors, or a checkpoint
    #[arg(value_name = "MODEL")]
    pub(crate) model: Option<String>,
    #[command(flatten)]
    pub(crate) job: JobFlags<GROUPS>,
    #[command(flatten)]
    pub(crate) run: RunFlags,
}

impl<const GROUPS: u8> UseArgs<GROUPS> {
    /// The fields that the command line sets.
    pub(crate) fn fields(&self) -> anyhow::Result<Given> {
        let mut given = self.job.0.clone();
        if let Some(model) = &self.model
            && given.insert(trained::FIELD.into(), model.clone().into()).is_some()
        {
            return Err(refuse(format!(
                "`{model}` and --{} both name a trained model; remove one",
                trained::FIELD
            )));
        }
        Ok(given)
    }
}

#[derive(Args, Debug)]
pub(crate) struct ExportArgs {
    /// Trained model: a job, its output folder, a model.safetensors, or a checkpoint
    #[arg(value_name = "MODEL")]
    pub(crate) model: String,
    /// Folder to write to
    #[arg(long, value_name = "DIR", default_value = "model")]
    pub(crate) output: String,
    /// Overwrite a model that is already there
    #[arg(long)]
    pub(crate) force: bool,
}
