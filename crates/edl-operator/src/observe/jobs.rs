// SPDX-License-Identifier: Apache-2.0
//! One TrainingJob with everything that belongs to it: its description, its grant, its master's
//! report and its pods.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use edl_core::job::JobState;
use edl_core::platform::Role;
use edl_core::pod::PodState;
use edl_core::spec::JobSpec;
use edl_core::time::Time;
use edl_kube::note::{Grant, StatusNote};
use edl_kube::{manifest, names};
use edl_sched::resources::Resources;
use edl_sched::snapshot::{Counts, Job, JobId, QueueId, RoleSpec, Roles};
use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::jiff::Timestamp;

use super::marks::MarkTable;
use super::placement::{Placement, Wanted};
use super::pods::JobPod;
use super::spec_cache::ParsedSpec;
use super::{ClusterObjects, amounts, created};
use crate::crd::{ConditionKind, KIND, TrainingJob};
use crate::description::{self, JobDescription, Priority, Trouble};
use crate::queues::Queues;
use crate::speed::Measured;

/// The current state of a job.
#[derive(Clone, Debug)]
pub struct JobView {
    pub id: JobId,
    pub object: Arc<TrainingJob>,
    pub stage: JobStage,
    /// Why it cannot be planned as it is written.
    pub trouble: Option<Trouble>,
    /// A field that was changed while the job runs, which has no effect.
    pub edited: Option<String>,
    /// The description that its master was started with; none before it was admitted.
    pub started: Option<Arc<JobSpec>>,
    /// With 0 workers, the job has no master either.
    pub grant: Grant,
    pub note: Option<StatusNote>,
    pub pods: Vec<JobPod>,
    pub running: Counts,
    /// Whether its master may be created: the description that it was started with can be edited by
    /// others.
    pub may_start: bool,
    plan_as: Option<Arc<JobDescription>>,
    priority: i32,
    masters_outside: bool,
}

/// Whether a job still needs the operator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JobStage {
    Live,
    /// Its object is being deleted; the cluster deletes the rest.
    Deleted,
    Succeeded,
    /// A reason of one word, and a message.
    Failed(String, String),
}

/// ConfigMaps by namespace and name of their job.
pub(super) fn config_maps(maps: &[Arc<ConfigMap>]) -> BTreeMap<(String, String), &Arc<ConfigMap>> {
    let mut by_job = BTreeMap::new();
    for map in maps {
        let Some(namespace) = &map.metadata.namespace else { continue };
        let Some(job) = names::job_of(&map.metadata) else { continue };
        if map.metadata.name.as_deref() == Some(&names::config_map(job)) {
            by_job.insert((namespace.clone(), job.clone()), map);
        }
    }
    by_job
}

/// Whether a ConfigMap belongs to this job, not to another of the same name.
pub(super) fn is_owned(map: &ConfigMap, job: &TrainingJob) -> bool {
    let mut owners = map.metadata.owner_references.iter().flatten();
    owners.any(|owner| owner.uid == job.uid())
}

pub(super) fn view(
    id: JobId,
    object: Arc<TrainingJob>,
    parsed: ParsedSpec,
    map: Option<&Arc<ConfigMap>>,
    pods: Vec<JobPod>,
    objects: &ClusterObjects,
) -> JobView {
    let own_map = map.filter(|map| is_owned(map, &object));
    let grant = own_map.and_then(|map| Grant::read(map)).unwrap_or_default();
    let note = own_map.and_then(|map| StatusNote::read(map));
    let ParsedSpec { described, started, edited, .. } = parsed;
    let mut view = JobView {
        id,
        stage: stage(&object, &pods, note.as_ref()),
        trouble: described.as_ref().err().cloned(),
        edited: edited.filter(|_| grant.workers > 0),
        started,
        grant,
        note,
        pods,
        running: Counts::default(),
        may_start: true,
        plan_as: None,
        priority: 0,
        masters_outside: objects.masters_outside,
        object,
    };
    if let Ok(described) = &described {
        view.check(described, objects);
    }
    if let Some(spec) = view.started.as_deref()
        && let Err(trouble) = objects.permissions.check(spec)
    {
        view.may_start = false;
        view.trouble = Some(trouble);
    }
    if let Some(map) = map.filter(|_| own_map.is_none()) {
        view.trouble = Some(name_taken(&view.object, map));
    }
    view.running = view.count_running();
    if view.stage == JobStage::Live {
        view.plan_as = view.plan_as(described.ok());
    }
    view
}

/// The description that a job's master has; empty if there is none.
pub(super) fn description<'a>(map: Option<&'a Arc<ConfigMap>>, job: &TrainingJob) -> &'a str {
    map.filter(|map| is_owned(map, job)).map_or("", |map| manifest::description(map))
}

fn name_taken(job: &TrainingJob, map: &ConfigMap) -> Trouble {
    let mut owners = map.metadata.owner_references.iter().flatten();
    if owners.any(|owner| owner.kind == KIND) {
        let message = "objects of a deleted job with the same name are still being removed".into();
        return Trouble { reason: "NameNotFree", message };
    }
    let map = names::config_map(job.name());
    Trouble {
        reason: "NameTaken",
        message: format!(
            "ConfigMap `{map}` belongs to another job with this name; remove that job with \
             `elasticdl clean {} --namespace={}`, or choose another name",
            job.name(),
            job.namespace()
        ),
    }
}

/// The stage of a job by its master's pod, the master's last report or the job's status, in this
/// order.
fn stage(job: &TrainingJob, pods: &[JobPod], note: Option<&StatusNote>) -> JobStage {
    if job.metadata.deletion_timestamp.is_some() {
        return JobStage::Deleted;
    }
    let mut masters = pods.iter().filter(|pod| pod.role == Role::Master);
    if masters.clone().any(JobPod::is_active) {
        return JobStage::Live;
    }
    let end = masters.clone().find_map(|pod| match &pod.state {
        PodState::Ended(how) => how.job_end(),
        PodState::Waiting(_) | PodState::Running | PodState::Leaving(_) => None,
    });
    // If the job is not over, the master is recreated.
    if end.is_none() && masters.next().is_some() {
        return JobStage::Live;
    }
    let state = end.or(note.map(|note| note.state));
    match state {
        Some(JobState::Succeeded) => return JobStage::Succeeded,
        Some(JobState::Failed) => return failed(job),
        Some(JobState::Stopped) => return stopped(job),
        Some(_) | None => {}
    }
    let status = job.status.as_ref();
    if status.is_some_and(|status| status.is(ConditionKind::Succeeded)) {
        return JobStage::Succeeded;
    }
    let condition = status.and_then(|status| status.condition(ConditionKind::Failed));
    match condition.filter(|condition| condition.holds()) {
        Some(condition) => JobStage::Failed(condition.reason.clone(), condition.message.clone()),
        None => JobStage::Live,
    }
}

fn failed(job: &TrainingJob) -> JobStage {
    let (name, namespace) = (job.name(), job.namespace());
    let why = format!("job failed; see `elasticdl logs {name} --namespace={namespace}`");
    JobStage::Failed("Failed".into(), why)
}

fn stopped(job: &TrainingJob) -> JobStage {
    let (name, namespace) = (job.name(), job.namespace());
    let why = format!(
        "job was stopped before it finished; resume it with `elasticdl train --resume {name} \
         --namespace={namespace}`"
    );
    JobStage::Failed("Stopped".into(), why)
}

impl JobView {
    /// `namespace/name`.
    #[must_use]
    pub fn title(&self) -> String {
        format!("{}/{}", self.object.namespace(), self.object.name())
    }

    /// The description to plan with; none if the job cannot be planned, or is over.
    #[must_use]
    pub fn plannable(&self) -> Option<&JobDescription> {
        self.plan_as.as_deref()
    }

    /// The minimum and maximum number of workers.
    #[must_use]
    pub fn limits(&self) -> Option<(u32, u32)> {
        self.plannable().map(|described| (described.min_workers, described.max_workers))
    }

    #[must_use]
    pub fn has_master(&self) -> bool {
        self.masters_outside
            || self.pods.iter().any(|pod| pod.role == Role::Master && pod.is_active())
    }

    /// Checks what the description refers to, its queue and PriorityClass, and whether it may.
    fn check(&mut self, described: &JobDescription, objects: &ClusterObjects) {
        let trouble = |reason, message| Some(Trouble { reason, message });
        if objects.queues.get(&described.queue).is_none() {
            let (queue, map) = (&described.queue, crate::queues::CONFIG_MAP);
            self.trouble = trouble(
                "UnknownQueue",
                format!("queue `{queue}` not found; choose another, or add it to `{map}`"),
            );
        } else if !objects.queues.admits(&described.queue, self.object.namespace()) {
            let (queue, map) = (&described.queue, crate::queues::CONFIG_MAP);
            let namespace = self.object.namespace();
            self.trouble = trouble(
                "QueueNotAllowed",
                format!(
                    "queue `{queue}` does not accept jobs of namespace `{namespace}`; choose another, \
                     or ask the cluster administrator to add the namespace in `{map}`"
                ),
            );
        }
        if let Err(refused) = objects.permissions.check(&described.spec) {
            self.trouble = Some(refused);
        }
        let priority = match &described.priority {
            Priority::Number(number) => *number,
            Priority::Class(class) => objects.classes.get(class).copied().unwrap_or_else(|| {
                self.trouble = trouble(
                    "UnknownPriority",
                    format!("PriorityClass `{class}` not found; choose another, or use a number"),
                );
                0
            }),
        };
        self.priority = priority.min(objects.queues.max_priority(&described.queue));
    }

    /// A running job keeps the description that it was started with.
    fn plan_as(&self, described: Option<Arc<JobDescription>>) -> Option<Arc<JobDescription>> {
        let sound = described.filter(|_| self.trouble.is_none());
        let workers = self.grant.workers;
        let Some(started) = self.started.as_ref().filter(|_| workers > 0) else { return sound };
        if let Some(described) = &sound
            && self.edited.is_none()
            && description::limits_of_started(started, described, workers)
                == (described.min_workers, described.max_workers)
        {
            return sound;
        }
        description::as_started(started, sound.as_deref(), workers).ok().map(Arc::new)
    }

    /// The planner's view of the job, before its pods are placed.
    pub(super) fn job(
        &self,
        queues: &Queues,
        mark_table: &MarkTable,
        measured: &mut Measured,
        now: Time,
    ) -> Option<Job> {
        let described = self.plannable()?;
        let JobDescription { min_workers: min, max_workers: max, spec, .. } = described;
        let n_servers = spec.n_servers();
        let n_masters = u32::from(!self.masters_outside);
        let of = |shape: Resources, min, max| RoleSpec { shape, min, max };
        let roles = Roles {
            master: of(amounts::requested(&described.master), n_masters, n_masters),
            ps: of(amounts::requested(&described.ps), n_servers, n_servers),
            worker: of(amounts::requested(&described.worker), *min, *max),
        };
        let submitted = Duration::from_secs(u64::try_from(created(&self.object)).unwrap_or(0));
        let mut job = Job::new(self.id, Time::since_origin(submitted), roles);
        job.priority = self.priority;
        job.queue = queues.get(&described.queue).unwrap_or(QueueId(0));
        job.tolerates = mark_table.tolerates(&described.worker);
        job.selects = mark_table.selects(&described.worker);
        job.ran = self.admitted_since().map_or(Duration::ZERO, |since| now.since(since));
        if let Some(note) = &self.note {
            measured.record(note, self.grant.workers);
            job.speed = measured.speed(note);
        }
        Some(job)
    }

    /// How many pods of each role it should have now.
    pub(super) fn wanted(&self, job: &Job) -> Wanted<'_> {
        let counts = match self.grant.workers {
            0 => Counts::default(),
            worker => Counts { master: job.roles.master.min, ps: job.roles.ps.min, worker },
        };
        Wanted { counts, leave: &self.grant.leave }
    }

    /// Counts the resources of its pods, which will be released, if it is not planned anymore.
    pub(super) fn leave(&self, placement: &mut Placement<'_>) {
        for pod in self.pods.iter().filter(|pod| !pod.has_ended()) {
            if let Some(node) = &pod.node {
                placement.occupy(node, pod.requests, true);
            }
        }
    }

    fn count_running(&self) -> Counts {
        let mut counts = Counts::default();
        for pod in self.pods.iter().filter(|pod| pod.is_running()) {
            *counts.of_mut(pod.role) += 1;
        }
        counts
    }

    fn admitted_since(&self) -> Option<Time> {
        let condition = self.object.status.as_ref()?.condition(ConditionKind::Admitted)?;
        let since: Timestamp = condition.last_transition_time.parse().ok()?;
        let since = u64::try_from(since.as_second()).ok()?;
        condition.holds().then(|| Time::since_origin(Duration::from_secs(since)))
    }
}
