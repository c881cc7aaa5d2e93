// SPDX-License-Identifier: Apache-2.0
//! Scenarios from a user's file: a cluster, and its jobs and services.
//!
//! The fields are those of a job: `workers: 2-8`, `worker: {cpu: 4, memory: 8Gi}`. Times are
//! `90s`, `5m`, `2h` or `1d`; memory is `512Mi` or `8Gi`.

use std::collections::BTreeSet;
use std::str::FromStr;
use std::time::Duration;

use edl_core::spec::MAX_WORKERS;
use edl_core::time::Time;
use serde::Deserialize;

use crate::resources::Resources;
use crate::sim::kubernetes::Kubernetes;
use crate::sim::scenario::{JobScript, Scenario, ServiceScript};
use crate::sim::work::Work;
use crate::snapshot::{Job, JobId, Node, NodeId, Queue, QueueId, RoleSpec, Roles};

/// Enough for a large cluster; ids have 32 bits.
const MAX_NODES: u32 = 100_000;
const MAX_JOBS: u32 = 100_000;
/// The most pods that all jobs and services may have together.
const MAX_PODS: u64 = 1_000_000;
const MAX_GPUS: u64 = 1_000_000;
/// The kubelet's default.
const PODS_PER_NODE: u64 = 110;

/// The contents of the file.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Description {
    nodes: Vec<Nodes>,
    #[serde(default)]
    queues: Vec<Team>,
    jobs: Vec<Jobs>,
    #[serde(default)]
    services: Vec<Service>,
    #[serde(default)]
    faults: Faults,
    /// The end of the simulation; without it, when all jobs are done.
    end: Option<Span>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Nodes {
    #[serde(default = "one")]
    count: u32,
    cpu: f64,
    #[serde(default)]
    memory: Memory,
    #[serde(default)]
    gpu: u64,
    /// The most pods that a node accepts.
    #[serde(default = "pods_per_node")]
    pods: u64,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Team {
    name: String,
    #[serde(default = "one")]
    weight: u32,
    quota: Option<Shape>,
    borrow: Option<Shape>,
}

/// Equal jobs that come one after the other.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Jobs {
    name: String,
    #[serde(default = "one")]
    count: u32,
    #[serde(default)]
    at: Span,
    #[serde(default)]
    every: Span,
    workers: Range,
    worker: Shape,
    #[serde(default)]
    num_ps_pods: u32,
    #[serde(default)]
    ps: Shape,
    #[serde(default)]
    master: Shape,
    /// How long one worker would take; without it, the job never ends.
    work: Option<Span>,
    /// 1 for linear scaling.
    #[serde(default = "whole")]
    scaling: f64,
    #[serde(default)]
    priority: i32,
    #[serde(default = "one")]
    weight: u32,
    #[serde(default)]
    queue: String,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Service {
    name: String,
    pod: Shape,
    /// `[time, pods]`, in order.
    pods: Vec<(Span, u32)>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Faults {
    losses_per_hour: f64,
    reclaims_per_hour: f64,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Shape {
    cpu: f64,
    memory: Memory,
    gpu: u64,
}

/// What is wrong with a description, with the name of the field.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Invalid(String);

/// The scenario of a description.
/// Fails if a value is impossible.
pub fn scenario(name: &str, description: &Description, seed: u64) -> Result<Scenario, Invalid> {
    // First: names are counted one by one.
    check_size(description)?;
    check_names(description)?;
    let queues: Vec<&str> = description.queues.iter().map(|queue| queue.name.as_str()).collect();
    let teams = description.queues.iter().zip(1..).map(|(team, id)| team.queue(id));
    let scenario = Scenario {
        queues: teams.collect::<Result<_, _>>()?,
        jobs: jobs(&description.jobs, &queues)?,
        services: description.services.iter().map(Service::script).collect::<Result<_, _>>()?,
        end: description.end.map(|end| Time::ZERO + end.0),
        ..Scenario::new(name, nodes(&description.nodes)?, Kubernetes::of_today())
    };
    if scenario.end.is_none() && description.jobs.iter().any(|jobs| jobs.work.is_none()) {
        return Err(Invalid(
            "jobs without `work` never finish; set the end of the simulation with `end`".into(),
        ));
    }
    let Faults { losses_per_hour, reclaims_per_hour } = description.faults;
    scenario
        .with_losses(losses_per_hour, reclaims_per_hour, seed)
        .map_err(|invalid| Invalid(format!("`faults`: {invalid}")))
}

/// Refuses duplicate names, which a report could not distinguish.
fn check_names(description: &Description) -> Result<(), Invalid> {
    let queues = description.queues.iter().map(|queue| ("queue", queue.name.clone()));
    let services = description.services.iter().map(|service| ("service", service.name.clone()));
    let jobs = description
        .jobs
        .iter()
        .flat_map(|jobs| (0..jobs.count).map(|which| ("job", jobs.name_of(which))));
    let mut seen = BTreeSet::new();
    for (kind, name) in queues.chain(services).chain(jobs) {
        if !seen.insert((kind, name.clone())) {
            return Err(Invalid(format!("duplicate {kind} `{name}`; rename one")));
        }
    }
    Ok(())
}

/// Refuses more pods than can be simulated, all jobs and services at their maximum.
fn check_size(description: &Description) -> Result<(), Invalid> {
    let mut pods = 0_u64;
    for jobs in &description.jobs {
        if jobs.workers.max.max(jobs.num_ps_pods) > MAX_WORKERS {
            return Err(Invalid(format!(
                "job `{}`: `workers` and `num_ps_pods` must be at most {MAX_WORKERS}",
                jobs.name
            )));
        }
        let each = 1 + u64::from(jobs.num_ps_pods) + u64::from(jobs.workers.max);
        pods = pods.saturating_add(each.saturating_mul(jobs.count.into()));
    }
    for service in &description.services {
        pods += service.pods.iter().map(|(_, n)| u64::from(*n)).max().unwrap_or(0);
    }
    if pods > MAX_PODS {
        return Err(Invalid(format!(
            "all `jobs` and `services` together have up to {pods} pods; the limit is {MAX_PODS}"
        )));
    }
    Ok(())
}

fn nodes(descriptions: &[Nodes]) -> Result<Vec<Node>, Invalid> {
    let mut nodes = Vec::new();
    for Nodes { count, cpu, memory, gpu, pods } in descriptions {
        let next = u32::try_from(nodes.len()).unwrap_or(u32::MAX);
        if next.saturating_add(*count) > MAX_NODES {
            return Err(Invalid(format!("too many `nodes`; the limit is {MAX_NODES}")));
        }
        let capacity = Shape { cpu: *cpu, memory: *memory, gpu: *gpu }.resources(*pods)?;
        nodes.extend((next..next + count).map(|id| Node::new(NodeId(id), capacity)));
    }
    if nodes.is_empty() { Err(Invalid("`nodes` is empty".into())) } else { Ok(nodes) }
}

fn jobs(descriptions: &[Jobs], queues: &[&str]) -> Result<Vec<JobScript>, Invalid> {
    let mut scripts = Vec::new();
    for jobs in descriptions {
        let next = u32::try_from(scripts.len()).unwrap_or(u32::MAX);
        if next.saturating_add(jobs.count) > MAX_JOBS {
            return Err(Invalid(format!("too many `jobs`; the limit is {MAX_JOBS}")));
        }
        for which in 0..jobs.count {
            scripts.push(jobs.script(next + which, which, queues)?);
        }
    }
    // In order of submission.
    scripts.sort_by_key(|script| script.job.submitted);
    for (script, id) in scripts.iter_mut().zip(0..) {
        script.job.id = JobId(id);
    }
    Ok(scripts)
}

impl Jobs {
    fn script(&self, id: u32, which: u32, queues: &[&str]) -> Result<JobScript, Invalid> {
        let fixed =
            |shape: &Shape, n| shape.resources(1).map(|shape| RoleSpec { shape, min: n, max: n });
        let Range { min, max } = self.workers;
        let roles = Roles {
            master: fixed(&self.master, 1)?,
            ps: fixed(&self.ps, self.num_ps_pods)?,
            worker: RoleSpec { shape: self.worker.resources(1)?, min, max },
        };
        let submitted = Time::ZERO + self.at.0 + self.every.0 * which;
        let queue = self.queue_id(queues)?;
        let job = Job {
            priority: self.priority,
            weight: weight(&format!("job `{}`", self.name), self.weight)?,
            queue,
            ..Job::new(JobId(id), submitted, roles)
        };
        if let Some(fault) = job.fault() {
            return Err(Invalid(format!("job `{}`: {fault}", self.name)));
        }
        if !(self.scaling.is_finite() && (0.0..=1.5).contains(&self.scaling)) {
            return Err(Invalid(format!("job `{}`: `scaling` must be 0 to 1.5", self.name)));
        }
        let work = self.work.map_or(Work::Endless, |work| Work::WorkerSeconds {
            left: work.0.as_secs_f64(),
            scaling: self.scaling,
        });
        Ok(JobScript { name: self.name_of(which), job, work })
    }

    /// Several equal jobs are numbered.
    fn name_of(&self, which: u32) -> String {
        if self.count == 1 { self.name.clone() } else { format!("{}-{which}", self.name) }
    }

    /// Queue 0 is that of jobs without a queue.
    fn queue_id(&self, queues: &[&str]) -> Result<QueueId, Invalid> {
        if self.queue.is_empty() {
            return Ok(QueueId(0));
        }
        let found = queues.iter().zip(1..).find(|(name, _)| **name == self.queue);
        found.map(|(_, id)| QueueId(id)).ok_or_else(|| {
            Invalid(format!("job `{}`: queue `{}` not found", self.name, self.queue))
        })
    }
}

impl Team {
    fn queue(&self, id: u32) -> Result<Queue, Invalid> {
        let limit = |shape: &Option<Shape>| {
            shape.as_ref().map(|shape| shape.resources(MAX_PODS)).transpose()
        };
        Ok(Queue {
            id: QueueId(id),
            weight: weight(&format!("queue `{}`", self.name), self.weight)?,
            quota: limit(&self.quota)?,
            borrow: limit(&self.borrow)?,
        })
    }
}

impl Service {
    fn script(&self) -> Result<ServiceScript, Invalid> {
        let targets: Vec<(Time, u32)> =
            self.pods.iter().map(|(at, n)| (Time::ZERO + at.0, *n)).collect();
        if !targets.is_sorted_by_key(|(at, _)| *at) {
            return Err(Invalid(format!("service `{}`: `pods` must be sorted by time", self.name)));
        }
        let at_start = targets.first().filter(|(at, _)| *at == Time::ZERO).map_or(0, |(_, n)| *n);
        Ok(ServiceScript {
            name: self.name.clone(),
            shape: self.pod.resources(1)?,
            at_start,
            targets,
        })
    }
}

impl Shape {
    fn resources(&self, pods: u64) -> Result<Resources, Invalid> {
        let Self { cpu, memory, gpu } = self;
        if *gpu > MAX_GPUS {
            return Err(Invalid(format!("`gpu: {gpu}` must be at most {MAX_GPUS}")));
        }
        if !(0.0..=1e6).contains(cpu) {
            return Err(Invalid(format!("`cpu: {cpu}` must be between 0 and 1000000")));
        }
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "it is within range"
        )]
        let cpu_milli = (cpu * 1000.0).round() as u64;
        Ok(Resources::new(*gpu, cpu_milli, memory.0).with_pods(pods.min(MAX_PODS)))
    }
}

fn weight(whose: &str, weight: u32) -> Result<u32, Invalid> {
    match weight {
        0 => Err(Invalid(format!("{whose}: `weight` must be at least 1"))),
        weight => Ok(weight),
    }
}

fn one() -> u32 {
    1
}

fn pods_per_node() -> u64 {
    PODS_PER_NODE
}

fn whole() -> f64 {
    1.0
}

/// `2-8`, or one number for a fixed size.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(try_from = "Text")]
struct Range {
    min: u32,
    max: u32,
}

/// A time, or how long something takes.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(try_from = "Text")]
struct Span(Duration);

/// In MiB.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(try_from = "Text")]
struct Memory(u64);

/// A string or a number.
#[derive(Deserialize)]
#[serde(untagged)]
enum Text {
    Number(f64),
    String(String),
}

impl Text {
    fn into_string(self) -> String {
        match self {
            Self::Number(number) => number.to_string(),
            Self::String(text) => text,
        }
    }
}

impl TryFrom<Text> for Range {
    type Error = String;

    fn try_from(text: Text) -> Result<Self, String> {
        let text = text.into_string();
        let (min, max) = text.split_once('-').unwrap_or((&text, &text));
        match (u32::from_str(min.trim()), u32::from_str(max.trim())) {
            (Ok(min), Ok(max)) => Ok(Self { min, max }),
            (Err(_), _) | (_, Err(_)) => Err(format!("invalid range `{text}`; use e.g. 2-8")),
        }
    }
}

impl TryFrom<Text> for Span {
    type Error = String;

    fn try_from(text: Text) -> Result<Self, String> {
        let units = [("d", 86_400.0), ("h", 3600.0), ("m", 60.0), ("s", 1.0), ("", 1.0)];
        let text = text.into_string();
        let secs = number_with_unit(&text, &units);
        // Far longer than any simulation, and far below the maximum of a time.
        let secs = secs.filter(|secs| (0.0..=1e9).contains(secs));
        secs.map(|secs| Self(Duration::from_secs_f64(secs)))
            .ok_or_else(|| format!("invalid duration `{text}`; use e.g. 90s, 5m or 2h"))
    }
}

impl TryFrom<Text> for Memory {
    type Error = String;

    fn try_from(text: Text) -> Result<Self, String> {
        let units = [("Ti", 1_048_576.0), ("Gi", 1024.0), ("Mi", 1.0)];
        let text = text.into_string();
        let mib = number_with_unit(&text, &units).filter(|mib| (0.0..=1e12).contains(mib));
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "it is within range"
        )]
        mib.map(|mib| Self(mib.round() as u64))
            .ok_or_else(|| format!("invalid memory size `{text}`; use e.g. 512Mi or 8Gi"))
    }
}

/// A number followed by one of `units`, in the unit that counts as 1.
fn number_with_unit(text: &str, units: &[(&str, f64)]) -> Option<f64> {
    units.iter().find_map(|(unit, factor)| {
        let number = text.trim().strip_suffix(unit)?;
        f64::from_str(number.trim()).ok().map(|number| number * factor)
    })
}
