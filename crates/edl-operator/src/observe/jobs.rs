// SPDX-License-Identifier: Apache-2.0
//! One TrainingJob with everything that belongs to it: what it says, what its master was told and
//! says, and its pods.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use edl_core::platform::{Ended, Role as PodRole};
use edl_core::spec::JobSpec;
use edl_core::time::Time;
use edl_kube::names;
use edl_kube::note::StatusNote;
use edl_sched::resources::Resources;
use edl_sched::snapshot::{Counts, Job, JobId, QueueId, RoleSpec, Roles};
use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::jiff::Timestamp;

use super::marks::Book;
use super::pods::{JobPod, Life};
use super::readings::Reading;
use super::seats::{Seats, Wanted};
use super::{Seen, amounts, created};
use crate::crd::{KIND, Kind, TrainingJob};
use crate::queues::Queues;
use crate::speed::Measured;
use crate::words::{self, Described, Priority, Trouble};

/// A job as it stands.
#[derive(Clone, Debug)]
pub struct JobView {
    pub id: JobId,
    pub object: Arc<TrainingJob>,
    pub stage: Stage,
    /// Why it cannot be planned as it is written.
    pub trouble: Option<Trouble>,
    /// The word that was changed while it runs, and has no effect.
    pub edited: Option<String>,
    /// What its master was started with; none before it was admitted.
    pub started: Option<Arc<JobSpec>>,
    /// How many workers its master was told to have; 0: none, and no master either.
    pub told: u32,
    /// Workers that were asked to leave first.
    pub leave: BTreeSet<u32>,
    pub note: Option<StatusNote>,
    pub pods: Vec<JobPod>,
    pub running: Counts,
    plan_as: Option<Arc<Described>>,
    priority: i32,
    masters_outside: bool,
}

/// Whether a job is still to be cared for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stage {
    Live,
    /// Its object is being deleted; the cluster clears away the rest.
    Deleted,
    Succeeded,
    /// With a reason of one word, and a sentence.
    Failed(String, String),
}

/// ConfigMaps by namespace and name of their job.
pub(super) fn config_maps(maps: &[Arc<ConfigMap>]) -> BTreeMap<(String, String), &Arc<ConfigMap>> {
    let mut by_job = BTreeMap::new();
    for map in maps {
        let (Some(namespace), Some(labels)) = (&map.metadata.namespace, &map.metadata.labels)
        else {
            continue;
        };
        let Some(job) = labels.get(names::JOB_LABEL) else { continue };
        if map.metadata.name.as_deref() == Some(&names::config_map(job)) {
            by_job.insert((namespace.clone(), job.clone()), map);
        }
    }
    by_job
}

/// Whether a ConfigMap was made for this very job.
pub(super) fn is_owned(map: &ConfigMap, job: &TrainingJob) -> bool {
    let mut owners = map.metadata.owner_references.iter().flatten();
    owners.any(|owner| owner.uid == job.uid())
}

pub(super) fn view(
    id: JobId,
    object: Arc<TrainingJob>,
    reading: Reading,
    map: Option<&Arc<ConfigMap>>,
    pods: Vec<JobPod>,
    seen: &Seen,
) -> JobView {
    let own_map = map.filter(|map| is_owned(map, &object));
    let notes = own_map.and_then(|map| map.metadata.annotations.clone()).unwrap_or_default();
    let told = notes.get(names::WORKERS_NOTE).and_then(|text| text.trim().parse().ok());
    let leave = notes.get(names::LEAVE_NOTE).map(String::as_str).unwrap_or_default();
    let note = StatusNote::read(&notes);
    let Reading { described, started, edited, .. } = reading;
    let mut view = JobView {
        id,
        stage: stage(&object, &pods, note.as_ref()),
        trouble: described.as_ref().err().cloned(),
        edited: edited.filter(|_| told.is_some_and(|told| told > 0)),
        started,
        told: told.unwrap_or(0),
        leave: leave.split(',').filter_map(|number| number.trim().parse().ok()).collect(),
        note,
        pods,
        running: Counts::default(),
        plan_as: None,
        priority: 0,
        masters_outside: seen.masters_outside,
        object,
    };
    if let Ok(described) = &described {
        view.check(described, seen);
    }
    if let Some(map) = map.filter(|_| own_map.is_none()) {
        view.trouble = Some(name_taken(&view.object, map));
    }
    view.running = view.count_running();
    if view.stage == Stage::Live {
        view.plan_as = view.plan_as(described.ok());
    }
    view
}

/// The description that a job's master has; empty if there is none.
pub(super) fn description<'a>(map: Option<&'a Arc<ConfigMap>>, job: &TrainingJob) -> &'a str {
    let data = map.filter(|map| is_owned(map, job)).and_then(|map| map.data.as_ref());
    data.and_then(|data| data.get(names::JOB_FILE)).map_or("", String::as_str)
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

/// What a master's pod, its last words and our own say about how a job is, in this order.
fn stage(job: &TrainingJob, pods: &[JobPod], note: Option<&StatusNote>) -> Stage {
    if job.metadata.deletion_timestamp.is_some() {
        return Stage::Deleted;
    }
    let masters = pods.iter().filter(|pod| pod.role == PodRole::Master);
    let lives: Vec<Life> = masters.map(|pod| pod.life).collect();
    if lives.iter().any(|life| matches!(life, Life::Waiting | Life::Running)) {
        return Stage::Live;
    }
    match lives.first() {
        Some(Life::Ended(Ended::Exit(0))) => return Stage::Succeeded,
        Some(Life::Ended(Ended::Exit(1))) => return failed(job),
        Some(Life::Ended(Ended::Exit(3))) => return stopped(job),
        // It did not end by itself, so it is made again.
        Some(_) => return Stage::Live,
        None => {}
    }
    match note.map(|note| note.state.as_str()) {
        Some("succeeded") => return Stage::Succeeded,
        Some("failed") => return failed(job),
        Some("stopped") => return stopped(job),
        Some(_) | None => {}
    }
    let status = job.status.as_ref();
    if status.is_some_and(|status| status.is(Kind::Succeeded)) {
        return Stage::Succeeded;
    }
    let condition = status.and_then(|status| status.condition(Kind::Failed));
    match condition.filter(|condition| condition.holds()) {
        Some(condition) => Stage::Failed(condition.reason.clone(), condition.message.clone()),
        None => Stage::Live,
    }
}

fn failed(job: &TrainingJob) -> Stage {
    let (name, namespace) = (job.name(), job.namespace());
    let why = format!("job failed; see `elasticdl logs {name} --namespace={namespace}`");
    Stage::Failed("Failed".into(), why)
}

fn stopped(job: &TrainingJob) -> Stage {
    let (name, namespace) = (job.name(), job.namespace());
    let why = format!(
        "job was stopped before it finished; resume it with `elasticdl train --resume {name} \
         --namespace={namespace}`"
    );
    Stage::Failed("Stopped".into(), why)
}

impl JobView {
    /// `namespace/name`.
    #[must_use]
    pub fn title(&self) -> String {
        format!("{}/{}", self.object.namespace(), self.object.name())
    }

    /// What a plan is made with; none if it cannot be planned, or need not any more.
    #[must_use]
    pub fn plannable(&self) -> Option<&Described> {
        self.plan_as.as_deref()
    }

    /// Whether its master was told to work.
    #[must_use]
    pub fn is_admitted(&self) -> bool {
        self.told > 0 && self.started.is_some()
    }

    /// The smallest and largest number of workers that it may have.
    #[must_use]
    pub fn limits(&self) -> Option<(u32, u32)> {
        self.plannable().map(|described| (described.min_workers, described.max_workers))
    }

    #[must_use]
    pub fn has_master(&self) -> bool {
        self.masters_outside
            || self.pods.iter().any(|pod| pod.role == PodRole::Master && pod.is_active())
    }

    /// Looks at what a description alone cannot know: queues and classes.
    fn check(&mut self, described: &Described, seen: &Seen) {
        let trouble = |reason, message| Some(Trouble { reason, message });
        if seen.queues.get(&described.queue).is_none() {
            let (queue, map) = (&described.queue, crate::queues::CONFIG_MAP);
            self.trouble = trouble(
                "UnknownQueue",
                format!("queue `{queue}` not found; choose another, or add it to `{map}`"),
            );
        }
        self.priority = match &described.priority {
            Priority::Number(number) => *number,
            Priority::Class(class) => seen.classes.get(class).copied().unwrap_or_else(|| {
                self.trouble = trouble(
                    "UnknownPriority",
                    format!("PriorityClass `{class}` not found; choose another, or use a number"),
                );
                0
            }),
        };
    }

    /// Whoever runs goes on as it was started, whatever became of its description.
    fn plan_as(&self, described: Option<Arc<Described>>) -> Option<Arc<Described>> {
        let sound = described.filter(|_| self.trouble.is_none());
        let Some(started) = self.started.as_ref().filter(|_| self.told > 0) else { return sound };
        if let Some(described) = &sound
            && self.edited.is_none()
            && words::limits_of_started(started, described, self.told)
                == (described.min_workers, described.max_workers)
        {
            return sound;
        }
        words::as_started(started, sound.as_deref(), self.told).ok().map(Arc::new)
    }

    /// The job in numbers, before its pods are seated.
    pub(super) fn job(
        &self,
        queues: &Queues,
        book: &Book,
        measured: &mut Measured,
        now: Time,
    ) -> Option<Job> {
        let described = self.plannable()?;
        let Described { min_workers: min, max_workers: max, spec, .. } = described;
        let n_servers = if spec.has_servers() { spec.num_ps_pods } else { 0 };
        let n_masters = u32::from(!self.masters_outside);
        let of = |shape: Resources, min, max| RoleSpec { shape, min, max };
        let roles = Roles {
            master: of(amounts::asked(&described.master), n_masters, n_masters),
            ps: of(amounts::asked(&described.ps), n_servers, n_servers),
            worker: of(amounts::asked(&described.worker), *min, *max),
        };
        let submitted = Duration::from_secs(u64::try_from(created(&self.object)).unwrap_or(0));
        let mut job = Job::new(self.id, Time::since_origin(submitted), roles);
        job.priority = self.priority;
        job.queue = queues.get(&described.queue).unwrap_or(QueueId(0));
        job.tolerates = book.tolerates(&described.worker);
        job.selects = book.selects(&described.worker);
        job.ran = self.admitted_since().map_or(Duration::ZERO, |since| now.since(since));
        if let Some(note) = &self.note {
            measured.note(note, self.told);
            job.speed = measured.speed(note, *max);
        }
        Some(job)
    }

    /// How many pods of each role it shall have now.
    pub(super) fn wanted(&self, job: &Job) -> Wanted {
        let counts = match self.told {
            0 => Counts::default(),
            worker => Counts { master: job.roles.master.min, ps: job.roles.ps.min, worker },
        };
        Wanted { counts, leave: self.leave.clone() }
    }

    /// What its pods still hold, once nobody plans for them any more.
    pub(super) fn leave(&self, seats: &mut Seats<'_>) {
        for pod in self.pods.iter().filter(|pod| !matches!(pod.life, Life::Ended(_))) {
            if let Some(node) = &pod.node {
                seats.book(node, pod.asks, true);
            }
        }
    }

    fn count_running(&self) -> Counts {
        let mut counts = Counts::default();
        for pod in self.pods.iter().filter(|pod| pod.is_running()) {
            *counts.of_mut(super::seats::role(pod.role)) += 1;
        }
        counts
    }

    fn admitted_since(&self) -> Option<Time> {
        let condition = self.object.status.as_ref()?.condition(Kind::Admitted)?;
        let since: Timestamp = condition.last_transition_time.parse().ok()?;
        let since = u64::try_from(since.as_second()).ok()?;
        condition.holds().then(|| Time::since_origin(Duration::from_secs(since)))
    }
}
