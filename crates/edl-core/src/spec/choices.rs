// SPDX-License-Identifier: Apache-2.0
//! Fields with a fixed set of values.

use serde::{Serialize, Serializer};

use super::field::{FieldType, Kind};
use crate::text::nearest;

macro_rules! choices {
    ($(
        $(#[$meta:meta])*
        $type:ident { $($(#[$variant_meta:meta])* $variant:ident = $name:literal,)* }
    )*) => { $(
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
        pub enum $type { $($(#[$variant_meta])* $variant,)* }

        impl $type {
            pub const NAMES: &'static [&'static str] = &[$($name),*];

            /// The name in flags and files.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }
        }

        impl FieldType for $type {
            const KIND: Kind = Kind::Choice(Self::NAMES);

            fn parse(text: &str) -> Result<Self, String> {
                match text {
                    $($name => Ok(Self::$variant),)*
                    _ => Err(unknown(text, Self::NAMES)),
                }
            }
        }

        impl Serialize for $type {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(self.name())
            }
        }
    )* };
}

choices! {
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

    /// Data type of gradients sent between workers. Sums are always computed in 32 bits.
    AllreduceDtype {
        #[default]
        F32 = "f32",
        /// The gradient of every lane is rounded to 16 bits, and so is their mean.
        Bf16 = "bf16",
    }

    ImagePullPolicy {
        #[default]
        Always = "Always",
        IfNotPresent = "IfNotPresent",
        Never = "Never",
    }

    /// When Kubernetes restarts the master's container.
    RestartPolicy {
        Always = "Always",
        OnFailure = "OnFailure",
        #[default]
        Never = "Never",
    }
}

/// The refusal of a value that is not one of `known`.
fn unknown(text: &str, known: &[&str]) -> String {
    match (nearest(text, known.iter().copied()), known) {
        (Some(near), _) => format!("unknown value `{text}`; did you mean `{near}`?"),
        (None, [first @ .., last]) => {
            format!("unknown value `{text}`; use {} or {last}", first.join(", "))
        }
        (None, []) => format!("unknown value `{text}`"),
    }
}

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
    const KIND: Kind = Kind::Text;

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
