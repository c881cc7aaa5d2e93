// SPDX-License-Identifier: Apache-2.0
//! Fields with a fixed set of values.

use serde::Serialize;

use super::field::{FieldKind, FieldType};
use crate::named::named;

named! {
    JobType {
        #[default]
        Train = "train",
        Evaluate = "evaluate",
        Predict = "predict",
    }

    Strategy {
        #[default]
        ParameterServer = "ParameterServerStrategy",
        Allreduce = "AllreduceStrategy",
        /// Dense parameters by AllReduce, embedding tables on parameter servers.
        Hybrid = "HybridStrategy",
        Local = "Local",
    }

    /// The encoding of RecordIO and TFRecord records; other formats have columns.
    Codec {
        #[default]
        TfExample = "tf_example",
        /// Raw bytes: the one column that the model asks for.
        Bytes = "bytes",
    }

    /// What happens when a worker's results differ bitwise from those of the other workers.
    SameBits {
        /// The worker is rejected.
        #[default]
        Strict = "strict",
        /// The worker is admitted, and the job reports that its result depends on which worker
        /// computed it.
        Report = "report",
    }

    /// What happens when a loss or a gradient is not finite.
    OnNonfinite {
        /// The job fails.
        #[default]
        Stop = "stop",
        /// The batch is not trained.
        Skip = "skip",
        /// The last checkpoint is loaded, and the batch is not trained again.
        Rollback = "rollback",
    }

    /// Data type of gradients sent between workers. Sums are always computed in 32 bits.
    AllreduceDtype {
        #[default]
        F32 = "f32",
        /// The gradient of every lane is rounded to 16 bits, and so is their mean.
        Bf16 = "bf16",
    }

    /// Where the metrics that a script logs also go.
    Track {
        #[default]
        Wandb = "wandb",
        Mlflow = "mlflow",
    }

    ImagePullPolicy {
        #[default]
        Always = "Always",
        IfNotPresent = "IfNotPresent",
        Never = "Never",
    }

    /// Whether Kubernetes starts a job again that has failed.
    RestartPolicy {
        /// As `OnFailure`: a job that has succeeded is over.
        Always = "Always",
        OnFailure = "OnFailure",
        #[default]
        Never = "Never",
    }
}

macro_rules! choices {
    ($($type:ident),*) => { $(
        impl FieldType for $type {
            const KIND: FieldKind = FieldKind::Choice(Self::NAMES);

            fn parse(text: &str) -> Result<Self, String> {
                text.parse()
            }
        }
    )* };
}

choices!(
    JobType,
    Strategy,
    Codec,
    SameBits,
    OnNonfinite,
    AllreduceDtype,
    ImagePullPolicy,
    RestartPolicy,
    Track
);

/// The lowest level of log lines that are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum LogLevel {
    Trace,
    Debug,
    #[default]
    Info,
    Warning,
    Error,
    Critical,
}

impl FieldType for LogLevel {
    const KIND: FieldKind = FieldKind::Text;

    fn parse(text: &str) -> Result<Self, String> {
        match text.to_ascii_uppercase().as_str() {
            "TRACE" => Ok(Self::Trace),
            "DEBUG" => Ok(Self::Debug),
            "INFO" => Ok(Self::Info),
            "WARN" | "WARNING" => Ok(Self::Warning),
            "ERROR" => Ok(Self::Error),
            "CRITICAL" => Ok(Self::Critical),
            _ => Err("expected DEBUG, INFO, WARNING or ERROR".into()),
        }
    }
}
