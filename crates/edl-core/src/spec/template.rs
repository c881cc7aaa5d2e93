// SPDX-License-Identifier: Apache-2.0
//! The file that `elasticdl init` writes.

use serde_json::json;

use super::{FIELDS, Field, JobSpec};

const HEAD: &str = "\
# Job description for `elasticdl train --config job.yaml`. Fields that are not in the file have their
# defaults. A command-line flag of the same name overrides a field of this file.
";

/// A job as YAML, with a comment for each field.
#[must_use]
pub fn template(spec: &JobSpec) -> String {
    let (values, defaults) = (json!(spec), json!(JobSpec::default()));
    let mut text = String::from(HEAD);
    let mut section = "";
    for field in FIELDS {
        if field.section != section {
            section = field.section;
            text += &format!("\n{:-<92}\n", format!("# ---- {section} "));
        }
        let value = &values[field.name];
        let value = match value.as_str() {
            Some("") => "''".into(),
            // The defaults are plain; any other text may have characters that mean something.
            Some(text) if *value == defaults[field.name] => text.to_owned(),
            Some(_) | None => value.to_string(),
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
