// SPDX-License-Identifier: Apache-2.0
//! What the table of fields knows about a field, and the types that a field can have.
//!
//! [`FieldType::read`] is the only reader of a value: files, TrainingJobs and stored jobs pass
//! through it, and [`FieldType::parse`] gives the same values for the text of a flag.

use std::collections::BTreeMap;
use std::ops::Deref;
use std::str::FromStr;

use serde::{Serialize, Serializer};
use serde_json::Value;

use super::JobSpec;

/// A field of the job description.
#[derive(Clone, Copy, Debug)]
pub struct Field {
    pub name: &'static str,
    pub kind: FieldKind,
    /// Whether `null` is a separate value; otherwise `null` means "not set".
    pub is_optional: bool,
    pub help: &'static str,
    /// The heading in the file that `elasticdl init` writes.
    pub section: &'static str,
    /// The comment in that file, if it differs from the help text.
    pub comment: Option<&'static str>,
    pub flag: Option<Flag>,
    /// The minimum that a cluster enforces for a TrainingJob.
    pub least: u32,
    /// The maximum for every job: more only ties up the machines that read it.
    pub most: Option<u32>,
    /// What a resumed job must not change.
    pub fixed: Fixed,
    /// Whether a job without a cluster cannot ignore this field.
    pub needs_cluster: bool,
    /// Whether it is a path, which is stored as an absolute path.
    pub is_path: bool,
    /// Whether it names a function or class of a Python model.
    pub is_symbol: bool,
    /// Whether `elasticdl run` has its flag: it makes sense for a custom training loop.
    pub is_for_script: bool,
    /// A deprecated name of its flag.
    pub old_name: Option<&'static str>,
    /// Shorter names of its flag. Files have only the field's own name.
    pub aliases: &'static [&'static str],
    /// Shorter values of its flag, each with the value that it stands for.
    pub value_aliases: &'static [(&'static str, &'static str)],
    /// The value of a flag, from its text.
    pub parse: fn(&str) -> Result<Value, String>,
    /// The value of a file, checked and in its standard form.
    pub read: fn(Value) -> Result<Value, String>,
}

/// How a field appears on the command line.
#[derive(Clone, Copy, Debug)]
pub struct Flag {
    pub group: Group,
    pub heading: &'static str,
    /// The placeholder of its value; empty: the name in capitals.
    pub value: &'static str,
    /// Its position under the heading, if not the table's.
    pub position: Option<usize>,
}

/// Flags that a command takes together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Group {
    /// Where and how the job runs on Kubernetes.
    Cluster,
    /// Every type of job.
    Common,
    Train,
    Predict,
}

/// What a value can be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FieldKind {
    Text,
    Integer,
    Number,
    Boolean,
    /// Names with values.
    Map,
    /// One of these names.
    Choice(&'static [&'static str]),
}

/// What a resumed job must keep.
#[derive(Clone, Copy, Debug)]
pub enum Fixed {
    No,
    Value,
    /// Not the value itself, but what follows from it.
    Derived(fn(&JobSpec) -> Value),
}

impl Field {
    /// A field of this type about which the table says nothing else.
    pub(super) const fn of<T: FieldType>() -> Self {
        Self {
            name: "",
            kind: T::KIND,
            is_optional: T::IS_OPTIONAL,
            help: "",
            section: "",
            comment: None,
            flag: None,
            least: 0,
            most: None,
            fixed: Fixed::No,
            needs_cluster: false,
            is_path: false,
            is_symbol: false,
            is_for_script: false,
            old_name: None,
            aliases: &[],
            value_aliases: &[],
            parse: |text| T::parse(text).map(as_json),
            read: |value| T::read(value).map(as_json),
        }
    }

    /// The help text of its flag, with its default.
    #[must_use]
    pub fn help_with_default(&self, default: &Value) -> String {
        let default = default.as_str().map_or_else(|| default.to_string(), Into::into);
        match default.trim_end_matches(".0") {
            _ if self.help.contains("[default: ") => self.help.into(),
            "" | "null" | "{}" => format!("{} [default: none]", self.help),
            default => format!("{} [default: {default}]", self.help),
        }
    }

    /// The value that the text of a flag stands for.
    #[must_use]
    pub fn full_value<'a>(&self, text: &'a str) -> &'a str {
        let found = self.value_aliases.iter().find(|(alias, _)| *alias == text);
        found.map_or(text, |(_, value)| *value)
    }
}

fn as_json<T: Serialize>(value: T) -> Value {
    serde_json::to_value(value).expect("a field is text, a number or a map")
}

/// A type that a field can have.
pub trait FieldType: Serialize + Sized {
    const KIND: FieldKind;
    const IS_OPTIONAL: bool = false;

    /// Reads a value of a file, or returns what was expected. Most types are written as text.
    fn read(value: Value) -> Result<Self, String> {
        Self::parse(&String::read(value)?)
    }

    /// Reads the text of a flag, or returns what was expected.
    fn parse(text: &str) -> Result<Self, String>;

    /// Sets the value; in a map, only the entries that are given change.
    fn update(&mut self, value: Value) -> Result<(), String> {
        *self = Self::read(value)?;
        Ok(())
    }
}

fn expected<T>(what: &str, value: &Value) -> Result<T, String> {
    Err(format!("expected {what}, found {value}"))
}

impl FieldType for String {
    const KIND: FieldKind = FieldKind::Text;

    fn read(value: Value) -> Result<Self, String> {
        match value {
            Value::String(text) => Ok(text),
            Value::Number(_) | Value::Bool(_) => {
                Err(format!("expected text, found {value}; put it in quotes"))
            }
            Value::Null | Value::Array(_) | Value::Object(_) => expected("text", &value),
        }
    }

    fn parse(text: &str) -> Result<Self, String> {
        Ok(text.into())
    }
}

macro_rules! integers {
    ($($type:ty),*) => { $(
        impl FieldType for $type {
            const KIND: FieldKind = FieldKind::Integer;

            fn read(value: Value) -> Result<Self, String> {
                let number = value.as_u64().and_then(|number| number.try_into().ok());
                number.map_or_else(|| expected(&whole(Self::MAX.into()), &value), Ok)
            }

            fn parse(text: &str) -> Result<Self, String> {
                text.parse().map_err(|_| format!("expected {}", whole(Self::MAX.into())))
            }
        }
    )* };
}

integers!(u16, u32, u64);

fn whole(max: u64) -> String {
    format!("an integer from 0 to {max}")
}

impl FieldType for f64 {
    const KIND: FieldKind = FieldKind::Number;

    fn read(value: Value) -> Result<Self, String> {
        value.as_f64().map_or_else(|| expected("a number", &value), Ok)
    }

    fn parse(text: &str) -> Result<Self, String> {
        let number: Self = text.parse().map_err(|_| "expected a number".to_owned())?;
        if number.is_finite() { Ok(number) } else { Err("expected a finite number".into()) }
    }
}

impl FieldType for bool {
    const KIND: FieldKind = FieldKind::Boolean;

    fn read(value: Value) -> Result<Self, String> {
        value.as_bool().map_or_else(|| expected("true or false", &value), Ok)
    }

    fn parse(text: &str) -> Result<Self, String> {
        text.parse().map_err(|_| "expected true or false".into())
    }
}

impl<T: FieldType> FieldType for Option<T> {
    const KIND: FieldKind = T::KIND;
    const IS_OPTIONAL: bool = true;

    fn read(value: Value) -> Result<Self, String> {
        if value.is_null() { Ok(None) } else { T::read(value).map(Some) }
    }

    fn parse(text: &str) -> Result<Self, String> {
        T::parse(text).map(Some)
    }
}

impl FieldType for BTreeMap<String, String> {
    const KIND: FieldKind = FieldKind::Map;

    fn read(value: Value) -> Result<Self, String> {
        match value {
            Value::Object(entries) => {
                Ok(entries.iter().map(|(name, value)| (name.clone(), plain(value))).collect())
            }
            Value::String(text) => Self::parse(&text),
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::Array(_) => {
                expected("a map such as {lr: 0.1}", &value)
            }
        }
    }

    /// `lr=0.1;hidden=128,64` or `lr=0.1,batch_norm=true`: a piece without `=` belongs to the value
    /// before it.
    fn parse(text: &str) -> Result<Self, String> {
        let mut pairs = Self::new();
        for part in text.split(';').filter(|part| !part.trim().is_empty()) {
            let mut last: Option<String> = None;
            for piece in part.split(',') {
                match (piece.split_once('='), &last) {
                    (Some((name, value)), _) if !name.trim().is_empty() => {
                        pairs.insert(name.trim().to_owned(), value.trim().to_owned());
                        last = Some(name.trim().to_owned());
                    }
                    (None, Some(name)) => {
                        let value = pairs.entry(name.clone()).or_default();
                        value.push(',');
                        value.push_str(piece);
                    }
                    (Some(_) | None, _) => {
                        return Err(format!("expected name=value, got `{piece}`"));
                    }
                }
            }
        }
        Ok(pairs)
    }

    fn update(&mut self, value: Value) -> Result<(), String> {
        self.extend(Self::read(value)?);
        Ok(())
    }
}

/// `lr: 0.1` means the same as `lr: "0.1"`, and `[128, 64]` the same as `128,64`.
fn plain(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Array(items) => items.iter().map(plain).collect::<Vec<_>>().join(","),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::Object(_) => value.to_string(),
    }
}

/// A time in seconds, also written as `10m` or `2h`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize)]
#[serde(transparent)]
pub struct Seconds(pub u64);

impl FieldType for Seconds {
    const KIND: FieldKind = FieldKind::Integer;

    fn read(value: Value) -> Result<Self, String> {
        match value.as_str() {
            Some(text) => Self::parse(text),
            None => u64::read(value).map(Self),
        }
    }

    fn parse(text: &str) -> Result<Self, String> {
        let (number, unit) = match text.char_indices().find(|(_, c)| !c.is_ascii_digit()) {
            Some((at, _)) => text.split_at(at),
            None => (text, "s"),
        };
        let factor = match unit {
            "s" => 1,
            "m" | "min" => 60,
            "h" => 3600,
            "d" => 86_400,
            _ => {
                return Err("expected seconds, or a number with unit s, m, h or d, e.g. 10m".into());
            }
        };
        let number: u64 = number.parse().map_err(|_| "expected a number".to_owned())?;
        number.checked_mul(factor).map(Self).ok_or_else(|| "the time is too long".to_owned())
    }
}

/// A value and the text that it was read from, which is how it is stored.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Parsed<T> {
    text: String,
    value: T,
}

impl<T: FromStr<Err = String>> FieldType for Parsed<T> {
    const KIND: FieldKind = FieldKind::Text;

    fn parse(text: &str) -> Result<Self, String> {
        Ok(Self { value: text.parse()?, text: text.into() })
    }
}

impl<T: FromStr<Err = String>> From<&'static str> for Parsed<T> {
    /// The value of a text in the program itself, such as a default.
    fn from(text: &'static str) -> Self {
        Self::parse(text).expect("the text is valid")
    }
}

impl<T> Deref for Parsed<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> Serialize for Parsed<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.text)
    }
}
