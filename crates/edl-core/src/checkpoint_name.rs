// SPDX-License-Identifier: Apache-2.0
//! The name of a checkpoint's folder, such as `version-100.g2.c10000000007.r0f…`: what it holds, and
//! the run that it belongs to. Several jobs may write to one folder of checkpoints.

use std::fmt;

use crate::id::{CheckpointId, Generation, RunId};

/// What the name of a checkpoint's folder says. Ordered by age: a restore raises the generation, so
/// what comes after it is newer even if it went back to an older version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CheckpointName {
    pub generation: Generation,
    pub version: u64,
    pub checkpoint: CheckpointId,
    pub run: RunId,
}

impl fmt::Display for CheckpointName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { generation, version, checkpoint, run } = self;
        write!(f, "version-{version}.g{generation}.c{:x}.r{run}", checkpoint.0)
    }
}

impl CheckpointName {
    /// Reads what `Display` wrote.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let mut parts = text.split('.');
        let mut part = |prefix| parts.next()?.strip_prefix(prefix);
        let name = Self {
            version: part("version-")?.parse().ok()?,
            generation: Generation(part("g")?.parse().ok()?),
            checkpoint: CheckpointId(u64::from_str_radix(part("c")?, 16).ok()?),
            run: RunId::parse(part("r")?)?,
        };
        // Only our own spelling: `version-007` is not one of our folders.
        (name.to_string() == text).then_some(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::id::Term;

    #[test]
    fn a_name_says_what_its_folder_holds_and_whose_it_is() {
        let name = CheckpointName {
            generation: Generation(2),
            version: 100,
            checkpoint: CheckpointId::of(Term(1), 7),
            run: RunId([0xab; 16]),
        };
        let text = format!("version-100.g2.c10000000007.r{}", "ab".repeat(16));
        assert_eq!(name.to_string(), text);
        assert_eq!(CheckpointName::parse(&text), Some(name));
    }

    #[test]
    fn other_names_are_not_ours() {
        let run = "ab".repeat(16);
        for text in [
            "".to_owned(),
            "version-100".into(),
            "version-100.g2.c7".into(),
            "version-100.g2.c7.r12".into(),
            format!("version-0100.g2.c7.r{run}"),
            format!("version-100.g2.c+7.r{run}"),
            format!("version-100.g2.c7.r{run}.old"),
            format!("version-100.g2.c7.r{}", run.to_uppercase()),
        ] {
            assert_eq!(CheckpointName::parse(&text), None, "{text}");
        }
    }
}
