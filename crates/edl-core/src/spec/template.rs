// SPDX-License-Identifier: Apache-2.0
//! The file that `elasticdl init` writes.

use serde_json::json;

use super::{FIELDS, Field, JobSpec};

const HEAD: &str = "\
# Job description for `elasticdl train --config job.yaml`. The values below are the defaults.
# A command-line flag of the same name overrides a field of this file.
";

/// The default job as YAML, with a comment for each field.
#[must_use]
pub fn template() -> String {
    let defaults = json!(JobSpec::default());
    let mut text = String::from(HEAD);
    let mut section = "";
    for field in FIELDS {
        if field.section != section {
            section = field.section;
            text += &format!("\n{:-<92}\n", format!("# ---- {section} "));
        }
        let default = &defaults[field.name];
        let value = match default.as_str() {
            Some("") => "''".into(),
            Some(text) => text.to_owned(),
            None => default.to_string(),
        };
        let line = format!("{}: {value}", field.name);
        match comment(field) {
            comment if comment.is_empty() => text += &format!("{line}\n"),
            comment => text += &format!("{line:<30}  # {comment}\n"),
        }
    }
    text
}

fn comment(field: &Field) -> String {
    let help = || format!("{}.", field.help.split(" [default: ").next().unwrap_or_default());
    field.comment.map_or_else(help, Into::into)
}
