// SPDX-License-Identifier: Apache-2.0
//! What a job is, for its page: the command, the fields that differ from their defaults, the build,
//! the data and the machine. Everyone who reaches the page can read it, so known secrets are left out.

use std::fs;
use std::num::NonZero;

use edl_core::job_dir::JobDir;
use edl_core::spec::{FIELDS, JobSpec, JobType};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::data::Data;

/// Fields whose values can be secret. The second one has the containers of all pods in it.
const SECRET: [&str; 2] = ["envs", "cluster_spec_json"];
/// Words of names whose values are secret, as in `--hf_token=…` and `?X-Amz-Signature=…`.
const SECRET_WORDS: [&str; 10] = [
    "token",
    "secret",
    "password",
    "passwd",
    "credential",
    "credentials",
    "apikey",
    "signature",
    "sig",
    "key",
];
const HIDDEN: &str = "***";

/// The program that runs a master.
#[derive(Clone, Copy, Debug, Default)]
pub struct Build {
    pub commit: &'static str,
    /// The instructions that it uses on this machine.
    pub instruction_set: &'static str,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct About {
    /// As a shell would read it; empty on Kubernetes, where no command runs the job.
    command: String,
    /// Names and values.
    fields: Vec<(String, String)>,
    version: String,
    commit: String,
    data: Vec<DataSet>,
    machine: Machine,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct DataSet {
    name: String,
    path: String,
    records: u64,
}

/// The machine of the master.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Machine {
    cpu: String,
    cores: usize,
    memory_bytes: u64,
    instruction_set: String,
}

impl About {
    pub(crate) fn new(job_dir: &JobDir, spec: &JobSpec, data: &Data, build: Build) -> Self {
        Self {
            command: command(job_dir),
            fields: fields(spec),
            version: env!("CARGO_PKG_VERSION").into(),
            commit: build.commit.into(),
            data: data_sets(spec, data),
            machine: Machine::this(build),
        }
    }
}

/// The command that has started the supervisor of the job.
fn command(job_dir: &JobDir) -> String {
    #[derive(Deserialize)]
    struct Supervisor {
        #[serde(default)]
        command: Vec<String>,
    }
    let text = fs::read(job_dir.supervisor()).unwrap_or_default();
    let words =
        serde_json::from_slice(&text).map_or_else(|_| Vec::new(), |it: Supervisor| it.command);
    let words = masked(words.iter().map(String::as_str));
    words.iter().map(|word| quoted(word)).collect::<Vec<_>>().join(" ")
}

/// The words of a command without secrets.
fn masked<'a>(words: impl Iterator<Item = &'a str>) -> Vec<String> {
    let mut is_value = false;
    let mask = |word: &str| {
        let (name, value) = word.split_once('=').map_or((word, None), |(n, v)| (n, Some(v)));
        let is_named = is_secret(name);
        let shown = match (is_value, is_named && value.is_some()) {
            (true, _) => HIDDEN.to_owned(),
            // The name can be that of a part of a URL.
            (false, true) => format!("{}={HIDDEN}", without_passwords(name)),
            (false, false) => without_passwords(&without_secret_pairs(word)),
        };
        is_value = is_named && value.is_none() && name.starts_with('-') && !is_value;
        shown
    };
    words.map(mask).collect()
}

/// The same for a command, path or URL in one piece.
fn without_secrets(text: &str) -> String {
    masked(text.split(' ')).join(" ")
}

/// Whether the values of an option, variable or key with this name are secret.
fn is_secret(name: &str) -> bool {
    let name = name.to_lowercase();
    let is_field = SECRET.contains(&name.trim_start_matches('-'));
    let mut words = name.split(|c: char| !c.is_ascii_alphanumeric());
    is_field || words.any(|word| SECRET_WORDS.contains(&word))
}

/// `?signature=…&x=1` without the signature.
fn without_secret_pairs(text: &str) -> String {
    let is_end = |c: char| "?&;,".contains(c);
    let mask = |piece: &str| match piece.split_once('=') {
        Some((name, value)) if is_secret(name) => {
            let end = &value[value.trim_end_matches(is_end).len()..];
            format!("{name}={HIDDEN}{end}")
        }
        Some(_) | None => piece.into(),
    };
    text.split_inclusive(is_end).map(mask).collect()
}

/// A word as a shell would read it.
fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_=./,:+@%*".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        return word.into();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// `https://user:password@host` without the password, for every URL in the text.
fn without_passwords(text: &str) -> String {
    let (mut shown, mut rest) = (String::new(), text);
    while let Some((scheme, after)) = rest.split_once("://") {
        shown.extend([scheme, "://"]);
        rest = after;
        let is_end = |c: char| "/'\"".contains(c) || c.is_whitespace();
        let authority = after.split(is_end).next().unwrap_or_default();
        if let Some((user, _)) = authority.rsplit_once('@') {
            let name = user.split(':').next().unwrap_or_default();
            shown.extend([name, ":", HIDDEN]);
            rest = after.strip_prefix(user).unwrap_or_default();
        }
    }
    shown + rest
}

fn fields(spec: &JobSpec) -> Vec<(String, String)> {
    let values = |spec: &JobSpec| match serde_json::to_value(spec) {
        Ok(Value::Object(values)) => values,
        Ok(_) | Err(_) => Map::new(),
    };
    let (given, defaults) = (values(spec), values(&JobSpec::default()));
    let names = FIELDS.iter().map(|field| field.name);
    let changed = names.filter(|name| given.get(*name) != defaults.get(*name));
    changed.filter_map(|name| Some((name.into(), shown(name, given.get(name)?)))).collect()
}

fn shown(name: &str, value: &Value) -> String {
    match value {
        _ if is_secret(name) => HIDDEN.into(),
        // It can be a command.
        Value::String(text) => without_secrets(text),
        Value::Object(values) => {
            let pairs = values.iter().map(|(key, value)| format!("{key}={}", shown(key, value)));
            pairs.collect::<Vec<_>>().join(";")
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::Array(_) => value.to_string(),
    }
}

fn data_sets(spec: &JobSpec, data: &Data) -> Vec<DataSet> {
    let trained = (spec.job_type == JobType::Train).then_some(&spec.training_data);
    let predicted = (spec.job_type == JobType::Predict).then_some(&spec.prediction_data);
    let all = [
        ("training", trained, data.n_records),
        ("validation", Some(&spec.validation_data), data.n_validation_records),
        ("prediction", predicted, data.n_prediction_records),
    ];
    let used = all.into_iter().filter(|(_, path, records)| path.is_some() && *records > 0);
    let data_set = |(name, path, records): (&str, Option<&String>, u64)| {
        let path = path.map(|path| without_secrets(path)).unwrap_or_default();
        DataSet { name: name.into(), path, records }
    };
    used.map(data_set).collect()
}

impl Machine {
    fn this(build: Build) -> Self {
        let line = |path: &str, name: &str| {
            let text = fs::read_to_string(path).unwrap_or_default();
            let found = text.lines().find_map(|line| {
                let (key, value) = line.split_once(':')?;
                (key.trim() == name).then(|| value.trim().to_owned())
            });
            found.unwrap_or_default()
        };
        let memory = line("/proc/meminfo", "MemTotal");
        let kilobytes = memory.strip_suffix(" kB").and_then(|number| number.parse::<u64>().ok());
        Self {
            cpu: line("/proc/cpuinfo", "model name"),
            cores: std::thread::available_parallelism().map_or(1, NonZero::get),
            memory_bytes: kilobytes.unwrap_or(0) * 1024,
            instruction_set: build.instruction_set.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_job_is_described_by_what_differs_and_without_secrets() {
        let folder = tempfile::tempdir().unwrap();
        let job_dir = JobDir::new(folder.path());
        let words = [
            "elasticdl",
            "train",
            "--model_params=hidden=128; lr=1",
            "--envs",
            "TOKEN=abc",
            "--envs=TOKEN=abc",
            "--lr",
            "0.1",
            "--training_data=s3://me:abc@host/it's",
            "--data=https://a/x?sig=abc&n=1",
            "https://me:abc@a/x,https://me:abc@b/y",
            "--hf_token=abc",
            "--password",
            "abc",
            "--tokenizer=words",
        ];
        let supervisor = json!({ "pid": 7, "command": words }).to_string();
        fs::write(job_dir.supervisor(), supervisor).unwrap();
        let spec = JobSpec {
            training_data: "https://me:abc@host/data?sig=abc".into(),
            model_params: [("hidden", "128"), ("secret_key", "abc")]
                .map(|(key, value)| (key.to_owned(), value.to_owned()))
                .into(),
            envs: "TOKEN=abc".into(),
            job_command: "env WANDB_API_KEY=abc python3 t.py --a=https://h/x --db=sql://u:abc@db/y"
                .into(),
            learning_rate: Some(0.1),
            num_workers: 3,
            ..JobSpec::default()
        };
        let data = Data { n_records: 60, ..Data::default() };
        let build = Build { commit: "1234", instruction_set: "avx2" };
        let about = About::new(&job_dir, &spec, &data, build);
        let expected = "elasticdl train '--model_params=hidden=128; lr=1' --envs *** --envs=*** \
                        --lr 0.1 '--training_data=s3://me:***@host/it'\\''s' \
                        '--data=https://a/x?sig=***&n=1' \
                        https://me:***@a/x,https://me:***@b/y \
                        --hf_token=*** --password *** --tokenizer=words";
        assert_eq!(about.command, expected);
        let fields: Vec<(&str, &str)> =
            about.fields.iter().map(|(name, value)| (&**name, &**value)).collect();
        let job_command =
            "env WANDB_API_KEY=*** python3 t.py --a=https://h/x --db=sql://u:***@db/y";
        let expected = [
            ("job_command", job_command),
            ("model_params", "hidden=128;secret_key=***"),
            ("learning_rate", "0.1"),
            ("training_data", "https://me:***@host/data?sig=***"),
            ("num_workers", "3"),
            ("envs", "***"),
        ];
        assert_eq!(fields, expected);
        assert_eq!(about.data.len(), 1, "validation data is not used");
        assert_eq!(about.data[0].records, 60);
        assert!(about.machine.cores > 0 && about.machine.memory_bytes > 1 << 20, "{about:?}");
        let text = serde_json::to_string(&about).unwrap();
        assert!(!text.contains("abc"), "{text}");
        assert_eq!(serde_json::from_str::<About>(&text).unwrap(), about);
        // Without a supervisor, as on Kubernetes.
        fs::remove_file(job_dir.supervisor()).unwrap();
        assert_eq!(About::new(&job_dir, &spec, &data, build).command, "");
    }
}
