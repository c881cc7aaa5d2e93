// SPDX-License-Identifier: Apache-2.0
//! Parses a TrainingJob: the job description, its limits, queue and priority. An error is one sentence
//! that says what to change.

use edl_core::batch;
use edl_core::platform::{InstanceId, Role};
use edl_core::spec::{FIELDS, Field, FieldKind, Invalid, JobSpec};
use edl_kube::manifest::{self, PodExtras};
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Map, Value};

use crate::aliases;
use crate::crd::TrainingJob;

/// The queue of jobs without a queue; it always exists.
pub const DEFAULT_QUEUE: &str = "default";

/// A job that can be planned.
#[derive(Clone, Debug, PartialEq)]
pub struct JobDescription {
    pub spec: JobSpec,
    pub min_workers: u32,
    pub max_workers: u32,
    pub queue: String,
    pub priority: Priority,
    /// A pod of each role, for its requests and node constraints.
    pub master: Box<Pod>,
    pub ps: Box<Pod>,
    pub worker: Box<Pod>,
}

/// The priority of a job.
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

/// Parses a TrainingJob.
pub fn read(job: &TrainingJob) -> Result<JobDescription, Trouble> {
    let Value::Object(fields) = job.spec.clone() else {
        return Err(Trouble::invalid("spec must be a map of job fields, e.g. image_name"));
    };
    let mut fields = aliases::translate(fields).map_err(Trouble::invalid)?.fields;
    let queue = queue(fields.remove("queue"))?;
    let priority = priority(fields.remove("priority"))?;
    check_name(&fields, job)?;
    fields.insert("job_name".into(), job.name().into());
    fields.insert("namespace".into(), job.namespace().into());
    let (mut spec, given) = parse_spec(fields)?;
    spec.settle_strategy();
    if spec.spares > 0 {
        return Err(Trouble::invalid(
            "spares is not supported in a TrainingJob, because the operator allocates resources only \
             to workers that train; omit it",
        ));
    }
    let limits = limits(&mut spec, given)?;
    spec.check()?;
    spec.check_cluster()?;
    manifest::populated(&spec, [])?;
    as_pods(spec, limits, queue, priority)
}

/// A running job: its original description with the current limits, queue and priority. If the
/// current description is invalid, the job stays as it is.
pub fn as_started(
    started: &JobSpec,
    described: Option<&JobDescription>,
    n_workers: u32,
) -> Result<JobDescription, Trouble> {
    let Some(described) = described else {
        let limits = (started.min_workers.min(n_workers), n_workers);
        return as_pods(started.clone(), limits, DEFAULT_QUEUE.into(), Priority::Number(0));
    };
    let limits = limits_of_started(started, described, n_workers);
    as_pods(started.clone(), limits, described.queue.clone(), described.priority.clone())
}

/// The limits of a job that runs with `n_workers`. With AllReduce, the number of lanes is fixed and the
/// master waits for its original minimum. A raised minimum does not stop the job: it keeps its
/// workers and grows when there is capacity.
#[must_use]
pub fn limits_of_started(
    started: &JobSpec,
    described: &JobDescription,
    n_workers: u32,
) -> (u32, u32) {
    let (min, max) = (described.min_workers.min(n_workers), described.max_workers);
    let Some(lanes) = started.step_lanes() else { return (min, max) };
    let most = lanes.min(started.max_workers.unwrap_or(u32::MAX));
    let min = min.clamp(started.min_workers.min(most), most);
    (min, max.clamp(min, most))
}

fn as_pods(
    spec: JobSpec,
    (min_workers, max_workers): (u32, u32),
    queue: String,
    priority: Priority,
) -> Result<JobDescription, Trouble> {
    let pod = |role| manifest::pod(&spec, InstanceId { role, id: 0 }, &PodExtras::default());
    let (master, ps, worker) = (pod(Role::Master)?, pod(Role::Ps)?, pod(Role::Worker)?);
    let (master, ps, worker) = (Box::new(master), Box::new(ps), Box::new(worker));
    Ok(JobDescription { min_workers, max_workers, queue, priority, master, ps, worker, spec })
}

/// Which limits the description sets.
#[derive(Clone, Copy, Debug)]
struct GivenLimits {
    min: bool,
    max: bool,
}

fn parse_spec(mut fields: Map<String, Value>) -> Result<(JobSpec, GivenLimits), Trouble> {
    fields.retain(|_, value| !value.is_null());
    let given = GivenLimits {
        min: fields.contains_key("min_workers"),
        max: fields.contains_key("max_workers"),
    };
    for Field { name, least, most, .. } in
        FIELDS.iter().filter(|field| field.kind == FieldKind::Integer)
    {
        let Some(count) = fields.get(*name).and_then(Value::as_i64) else { continue };
        if count < (*least).into() {
            return Err(Trouble::invalid(format!("{name} must be at least {least}")));
        }
        if let Some(most) = most.filter(|most| count > (*most).into()) {
            return Err(Trouble::invalid(format!("{name} must be at most {most}")));
        }
    }
    Ok((JobSpec::try_from(fields)?, given))
}

/// With only `num_workers`, the number of workers is fixed; `min_workers` and `max_workers` make it
/// variable. The stored description has all three for the master.
fn limits(spec: &mut JobSpec, given: GivenLimits) -> Result<(u32, u32), Trouble> {
    let max = spec.max_workers.unwrap_or(spec.num_workers);
    let min = match given {
        GivenLimits { min: true, .. } => spec.min_workers,
        GivenLimits { max: true, .. } => 1,
        GivenLimits { .. } => max,
    };
    if min > max {
        return Err(Trouble::invalid(format!(
            "min_workers={min} exceeds the maximum of {max}; lower it, or raise max_workers"
        )));
    }
    // Before `max_workers` is removed below, it determines the number of lanes.
    spec.max_workers = Some(max);
    match spec.step_lanes() {
        Some(lanes) => spec.lanes = Some(lanes),
        // Nothing depends on the maximum, so it can be raised later.
        None => spec.max_workers = None,
    }
    spec.min_workers = min;
    spec.num_workers = spec.num_workers.clamp(min, max);
    Ok((min, max))
}

/// A job has the name and namespace of its object.
fn check_name(fields: &Map<String, Value>, job: &TrainingJob) -> Result<(), Trouble> {
    for (field, object) in [("job_name", job.name()), ("namespace", job.namespace())] {
        let value = fields.get(field).and_then(Value::as_str).unwrap_or_default();
        if !value.is_empty() && value != object {
            return Err(Trouble::invalid(format!(
                "{field}=`{value}` differs from the TrainingJob's `{object}`; omit it"
            )));
        }
    }
    Ok(())
}

fn queue(value: Option<Value>) -> Result<String, Trouble> {
    match value {
        None | Some(Value::Null) => Ok(DEFAULT_QUEUE.into()),
        Some(Value::String(name)) if name.is_empty() => Ok(DEFAULT_QUEUE.into()),
        Some(Value::String(name)) => Ok(name),
        Some(Value::Bool(_) | Value::Number(_) | Value::Array(_) | Value::Object(_)) => {
            Err(Trouble::invalid("queue must be the name of a queue"))
        }
    }
}

fn priority(value: Option<Value>) -> Result<Priority, Trouble> {
    let invalid = || Trouble::invalid("priority must be an integer or the name of a PriorityClass");
    match value {
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

/// The first field that differs from the description that a running job was started with, except
/// for numbers of workers.
#[must_use]
pub fn edited(described: &JobSpec, started: &JobSpec) -> Option<String> {
    let plain = |spec: &JobSpec| {
        let same = JobSpec {
            num_workers: 1,
            min_workers: 1,
            max_workers: None,
            lanes: None,
            // A new version of the program describes new jobs with another one.
            batch_plan: batch::NEWEST,
            ..spec.clone()
        };
        serde_json::to_value(same).unwrap_or_default()
    };
    let (described, started) = (plain(described), plain(started));
    let fields = described.as_object().cloned().unwrap_or_default();
    let differs = |(field, value): &(String, Value)| started.get(field) != Some(value);
    fields.into_iter().find(differs).map(|(field, _)| field)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn described(extra: Value) -> Result<JobDescription, Trouble> {
        let mut spec = json!({"image_name": "i", "volume": "claim_name=c,mount_path=/data"});
        for (field, value) in extra.as_object().unwrap() {
            spec[field] = value.clone();
        }
        let job = json!({"metadata": {"name": "a", "namespace": "n"}, "spec": spec});
        read(&serde_json::from_value(job).unwrap())
    }

    #[test]
    fn limits_follow_the_description() {
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
        for (fields, expected) in table {
            let job = described(fields.clone()).unwrap();
            assert_eq!((job.min_workers, job.max_workers), expected, "{fields}");
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
    fn priority_is_a_number_or_a_class() {
        let of = |field: Value| described(json!({"priority": field})).unwrap().priority;
        assert_eq!(of(json!(7)), Priority::Number(7));
        assert_eq!(of(json!("-7")), Priority::Number(-7));
        assert_eq!(of(json!("high")), Priority::Class("high".into()));
        assert_eq!(described(json!({"queue": "q"})).unwrap().queue, "q");
        assert_eq!(described(json!({})).unwrap().queue, DEFAULT_QUEUE);
    }

    #[test]
    fn invalid_fields_are_rejected_with_a_reason() {
        let table = [
            (json!({"min_workers": 4, "max_workers": 2}), "min_workers=4 exceeds the maximum of 2"),
            (json!({"min_workers": 0}), "min_workers must be at least 1"),
            (
                json!({"spares": 1}),
                "spares is not supported in a TrainingJob, because the operator \
             allocates resources only to workers that train; omit it",
            ),
            (json!({"num_workers": -1}), "num_workers must be at least 1"),
            (json!({"max_workers": 4_294_967_295_u32}), "max_workers must be at most 10000"),
            (json!({"num_workers": 10_001}), "num_workers must be at most 10000"),
            (json!({"lanes": 100_000_000, "num_ps_pods": 0}), "lanes must be at most 10000"),
            (json!({"trainer": {"max-instance": 100_000_000}}), "max_workers must be at most"),
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
        for (fields, expected) in table {
            let trouble = described(fields.clone()).unwrap_err();
            assert!(trouble.message.contains(expected), "{fields}: {}", trouble.message);
            assert_eq!(trouble.reason, "Invalid");
        }
    }

    #[test]
    fn a_list_of_a_models_parameters_means_what_it_means_in_a_file() {
        let fields = json!({"model_params": {"hidden": [128, 64], "lr": 0.1}});
        let params = described(fields).unwrap().spec.model_params;
        assert_eq!((params["hidden"].as_str(), params["lr"].as_str()), ("128,64", "0.1"));
    }

    #[test]
    fn the_example_can_be_planned() {
        let text = include_str!("../../../examples/trainingjob/job.yaml");
        let mut job: TrainingJob = edl_kube::yaml::read(text).unwrap();
        job.metadata.namespace = Some("default".into());
        let job = read(&job).unwrap();
        assert_eq!((job.min_workers, job.max_workers, job.spec.n_lanes()), (2, 6, 6));
        assert!(job.spec.is_custom_loop() && job.spec.step_lanes().is_some());
    }

    #[test]
    fn an_edit_is_noticed_unless_it_is_about_numbers_of_workers() {
        let before = described(json!({"min_workers": 2, "max_workers": 6})).unwrap().spec;
        let of = |fields: Value| edited(&described(fields).unwrap().spec, &before);
        assert_eq!(of(json!({"min_workers": 1, "max_workers": 9})), None);
        assert_eq!(of(json!({"queue": "q", "priority": 3, "max_workers": 6})), None);
        let other = of(json!({"max_workers": 6, "num_epochs": 9}));
        assert_eq!(other.as_deref(), Some("num_epochs"));
    }
}
