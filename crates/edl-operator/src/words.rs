// SPDX-License-Identifier: Apache-2.0
//! Reads the words of a TrainingJob: the job description, how many workers it may have, and whose
//! turn it is. Whatever is wrong is one sentence that says what to change.

use edl_core::platform::{InstanceId, Role};
use edl_core::spec::{FIELDS, Field, Invalid, JobSpec, Kind};
use edl_kube::manifest::{self, PodExtras};
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Map, Value};

use crate::aliases;
use crate::crd::TrainingJob;

/// The queue of jobs that name none; it is always there.
pub const DEFAULT_QUEUE: &str = "default";

/// A job that can be planned.
#[derive(Clone, Debug, PartialEq)]
pub struct Described {
    pub spec: JobSpec,
    pub min_workers: u32,
    pub max_workers: u32,
    pub queue: String,
    pub priority: Priority,
    /// A pod of each role, to see what it asks for and where it may go.
    pub master: Box<Pod>,
    pub ps: Box<Pod>,
    pub worker: Box<Pod>,
}

/// Who goes first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Priority {
    Number(i32),
    /// The value of a PriorityClass.
    Class(String),
}

/// Why a job cannot be planned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trouble {
    /// One word, for conditions and events.
    pub reason: &'static str,
    pub message: String,
}

impl Trouble {
    fn invalid(message: impl Into<String>) -> Self {
        Self { reason: "Invalid", message: message.into() }
    }
}

impl From<Invalid> for Trouble {
    fn from(invalid: Invalid) -> Self {
        Self::invalid(invalid.0)
    }
}

/// What a TrainingJob describes.
pub fn read(job: &TrainingJob) -> Result<Described, Trouble> {
    let Value::Object(words) = job.spec.clone() else {
        return Err(Trouble::invalid("spec must be a map of job fields, e.g. image_name"));
    };
    let mut words = aliases::translate(words).map_err(Trouble::invalid)?.words;
    let queue = queue(words.remove("queue"))?;
    let priority = priority(words.remove("priority"))?;
    check_place(&words, job)?;
    words.insert("job_name".into(), job.name().into());
    words.insert("namespace".into(), job.namespace().into());
    let (mut spec, counts) = settled(words)?;
    spec.settle_strategy();
    let limits = limits(&mut spec, counts)?;
    spec.check()?;
    spec.check_cluster()?;
    manifest::populated(&spec, [])?;
    as_pods(spec, limits, queue, priority)
}

/// A running job: what it was started with, and what its description says of turn and size now.
/// One whose description cannot be understood any more stays as it is.
pub fn as_started(
    started: &JobSpec,
    described: Option<&Described>,
    n_workers: u32,
) -> Result<Described, Trouble> {
    let Some(described) = described else {
        let limits = (started.min_workers.min(n_workers), n_workers);
        return as_pods(started.clone(), limits, DEFAULT_QUEUE.into(), Priority::Number(0));
    };
    let limits = limits_of_started(started, described, n_workers);
    as_pods(started.clone(), limits, described.queue.clone(), described.priority.clone())
}

/// How many workers a job may have that runs with `n_workers`: lanes are laid out for its whole
/// life, and a master whose workers train in steps waits for its first minimum. A minimum that was
/// raised is no reason to stop it: what it has is not taken away, and it grows as room allows.
#[must_use]
pub fn limits_of_started(started: &JobSpec, described: &Described, n_workers: u32) -> (u32, u32) {
    let (min, max) = (described.min_workers.min(n_workers), described.max_workers);
    if !started.is_allreduce() {
        return (min, max);
    }
    let most = started.n_lanes().min(started.max_workers.unwrap_or(u32::MAX));
    let min = min.clamp(started.min_workers.min(most), most);
    (min, max.clamp(min, most))
}

fn as_pods(
    spec: JobSpec,
    (min_workers, max_workers): (u32, u32),
    queue: String,
    priority: Priority,
) -> Result<Described, Trouble> {
    let pod = |role| manifest::pod(&spec, InstanceId { role, id: 0 }, &PodExtras::default());
    let (master, ps, worker) = (pod(Role::Master)?, pod(Role::Ps)?, pod(Role::Worker)?);
    let (master, ps, worker) = (Box::new(master), Box::new(ps), Box::new(worker));
    Ok(Described { min_workers, max_workers, queue, priority, master, ps, worker, spec })
}

/// The numbers of workers that were said.
#[derive(Clone, Copy, Debug)]
struct Said {
    min: bool,
    max: bool,
}

fn settled(mut words: Map<String, Value>) -> Result<(JobSpec, Said), Trouble> {
    words.retain(|_, value| !value.is_null());
    let said =
        Said { min: words.contains_key("min_workers"), max: words.contains_key("max_workers") };
    for Field { name, least, .. } in FIELDS.iter().filter(|field| field.kind == Kind::Integer) {
        if words.get(*name).and_then(Value::as_i64).is_some_and(|count| count < (*least).into()) {
            return Err(Trouble::invalid(format!("{name} must be at least {least}")));
        }
    }
    Ok((JobSpec::try_from(words)?, said))
}

/// A job that says only `num_workers` has exactly so many; `min_workers` and `max_workers` let it
/// have others. The stored description says all three, so that its master knows them.
fn limits(spec: &mut JobSpec, said: Said) -> Result<(u32, u32), Trouble> {
    let max = spec.max_workers.unwrap_or(spec.num_workers);
    let min = match said {
        Said { min: true, .. } => spec.min_workers,
        Said { max: true, .. } => 1,
        Said { .. } => max,
    };
    if min > max {
        return Err(Trouble::invalid(format!(
            "min_workers={min} exceeds the maximum of {max}; lower it, or raise max_workers"
        )));
    }
    // Before `max_workers` is dropped below, it says how many lanes there are.
    spec.max_workers = Some(max);
    if spec.is_allreduce() {
        spec.lanes = Some(spec.n_lanes());
    } else {
        // Nothing is laid out for a number of workers, so a maximum can be raised later.
        spec.max_workers = None;
    }
    spec.min_workers = min;
    spec.num_workers = spec.num_workers.clamp(min, max);
    Ok((min, max))
}

/// A job runs under the name and in the namespace of its object.
fn check_place(words: &Map<String, Value>, job: &TrainingJob) -> Result<(), Trouble> {
    for (word, object) in [("job_name", job.name()), ("namespace", job.namespace())] {
        let said = words.get(word).and_then(Value::as_str).unwrap_or_default();
        if !said.is_empty() && said != object {
            return Err(Trouble::invalid(format!(
                "{word}=`{said}` differs from the TrainingJob's `{object}`; omit it"
            )));
        }
    }
    Ok(())
}

fn queue(word: Option<Value>) -> Result<String, Trouble> {
    match word {
        None | Some(Value::Null) => Ok(DEFAULT_QUEUE.into()),
        Some(Value::String(name)) if name.is_empty() => Ok(DEFAULT_QUEUE.into()),
        Some(Value::String(name)) => Ok(name),
        Some(Value::Bool(_) | Value::Number(_) | Value::Array(_) | Value::Object(_)) => {
            Err(Trouble::invalid("queue must be the name of a queue"))
        }
    }
}

fn priority(word: Option<Value>) -> Result<Priority, Trouble> {
    let invalid = || Trouble::invalid("priority must be an integer or the name of a PriorityClass");
    match word {
        None | Some(Value::Null) => Ok(Priority::Number(0)),
        Some(Value::Number(number)) => {
            let number = number.as_i64().and_then(|number| i32::try_from(number).ok());
            number.map(Priority::Number).ok_or_else(invalid)
        }
        Some(Value::String(text)) => match text.trim().parse::<i32>() {
            Ok(number) => Ok(Priority::Number(number)),
            Err(_) if text.trim().is_empty() => Ok(Priority::Number(0)),
            Err(_) => Ok(Priority::Class(text.trim().into())),
        },
        Some(Value::Bool(_) | Value::Array(_) | Value::Object(_)) => Err(invalid()),
    }
}

/// The first word, beside numbers of workers, that a running job's description says otherwise
/// than the one it was started with.
#[must_use]
pub fn edited(described: &JobSpec, started: &JobSpec) -> Option<String> {
    let plain = |spec: &JobSpec| {
        let same = JobSpec {
            num_workers: 1,
            min_workers: 1,
            max_workers: None,
            lanes: None,
            ..spec.clone()
        };
        serde_json::to_value(same).unwrap_or_default()
    };
    let (described, started) = (plain(described), plain(started));
    let words = described.as_object().cloned().unwrap_or_default();
    words.into_iter().find(|(word, value)| started.get(word) != Some(value)).map(|(word, _)| word)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn described(extra: Value) -> Result<Described, Trouble> {
        let mut spec = json!({"image_name": "i", "volume": "claim_name=c,mount_path=/data"});
        for (word, value) in extra.as_object().unwrap() {
            spec[word] = value.clone();
        }
        let job = json!({"metadata": {"name": "a", "namespace": "n"}, "spec": spec});
        read(&serde_json::from_value(job).unwrap())
    }

    #[test]
    fn a_job_may_have_as_many_workers_as_it_says() {
        let table = [
            (json!({}), (2, 2)),
            (json!({"num_workers": 4}), (4, 4)),
            (json!({"num_workers": 4, "min_workers": 2}), (2, 4)),
            (json!({"max_workers": 6}), (1, 6)),
            (json!({"min_workers": 2, "max_workers": 6}), (2, 6)),
            (json!({"min_workers": 2, "max_workers": 6, "num_ps_pods": 0}), (2, 6)),
            (json!({"trainer": {"min-instance": 2, "max-instance": 6}}), (2, 6)),
            (json!({"max_workers": null, "num_workers": 3}), (3, 3)),
        ];
        for (words, expected) in table {
            let job = described(words.clone()).unwrap();
            assert_eq!((job.min_workers, job.max_workers), expected, "{words}");
        }
    }

    #[test]
    fn lanes_are_fixed_for_the_largest_number_of_workers() {
        let job = described(json!({"min_workers": 2, "max_workers": 6, "num_ps_pods": 0})).unwrap();
        assert_eq!((job.spec.n_lanes(), job.spec.max_workers), (6, Some(6)));
        let job = described(json!({"min_workers": 2, "max_workers": 6})).unwrap();
        assert_eq!((job.spec.max_workers, job.spec.min_workers), (None, 2));
    }

    #[test]
    fn whose_turn_it_is_can_be_said_by_number_or_class() {
        let of = |word: Value| described(json!({"priority": word})).unwrap().priority;
        assert_eq!(of(json!(7)), Priority::Number(7));
        assert_eq!(of(json!("-7")), Priority::Number(-7));
        assert_eq!(of(json!("high")), Priority::Class("high".into()));
        assert_eq!(described(json!({"queue": "q"})).unwrap().queue, "q");
        assert_eq!(described(json!({})).unwrap().queue, DEFAULT_QUEUE);
    }

    #[test]
    fn bad_words_are_refused_with_a_sentence() {
        let table = [
            (json!({"min_workers": 4, "max_workers": 2}), "min_workers=4 exceeds the maximum of 2"),
            (json!({"min_workers": 0}), "min_workers must be at least 1"),
            (json!({"num_workers": -1}), "num_workers must be at least 1"),
            (json!({"num_epochs": -1}), "num_epochs must be at least 0"),
            (json!({"num_epochs": "x"}), "--num_epochs: expected an integer"),
            (json!({"num_worker": 1}), "unknown field `num_worker`; did you mean `num_workers`?"),
            (json!({"volume": ""}), "share no storage"),
            (json!({"job_name": "b"}), "job_name=`b` differs"),
            (json!({"namespace": "m"}), "namespace=`m` differs"),
            (json!({"worker_resource_request": "cpu=lots"}), "--worker_resource_request"),
            (json!({"priority": 1.5}), "must be an integer"),
            (json!({"queue": 3}), "name of a queue"),
            (json!({"trainer": []}), "`trainer` must be a map"),
            (json!({"cluster_spec_json": "{\"pods\": 1}"}), "--cluster_spec"),
        ];
        for (words, expected) in table {
            let trouble = described(words.clone()).unwrap_err();
            assert!(trouble.message.contains(expected), "{words}: {}", trouble.message);
            assert_eq!(trouble.reason, "Invalid");
        }
    }

    #[test]
    fn a_list_of_a_models_parameters_means_what_it_means_in_a_file() {
        let words = json!({"model_params": {"hidden": [128, 64], "lr": 0.1}});
        let params = described(words).unwrap().spec.model_params;
        assert_eq!((params["hidden"].as_str(), params["lr"].as_str()), ("128,64", "0.1"));
    }

    #[test]
    fn the_example_can_be_planned() {
        let text = include_str!("../../../examples/trainingjob/job.yaml");
        let mut job: TrainingJob = edl_kube::yaml::read(text).unwrap();
        job.metadata.namespace = Some("default".into());
        let job = read(&job).unwrap();
        assert_eq!((job.min_workers, job.max_workers, job.spec.n_lanes()), (2, 6, 6));
        assert!(job.spec.is_own_loop() && job.spec.is_allreduce());
    }

    #[test]
    fn an_edit_is_noticed_unless_it_is_about_numbers_of_workers() {
        let before = described(json!({"min_workers": 2, "max_workers": 6})).unwrap().spec;
        let of = |words: Value| edited(&described(words).unwrap().spec, &before);
        assert_eq!(of(json!({"min_workers": 1, "max_workers": 9})), None);
        assert_eq!(of(json!({"queue": "q", "priority": 3, "max_workers": 6})), None);
        let other = of(json!({"max_workers": 6, "num_epochs": 9}));
        assert_eq!(other.as_deref(), Some("num_epochs"));
    }
}
