// SPDX-License-Identifier: Apache-2.0
//! From a plan to what is to be done: everything is decided here, so that whoever does it has
//! nothing left to decide. What is done already is not done again.

mod status;
#[cfg(test)]
mod tests;

use edl_core::platform::{Ended, Role as PodRole};
use edl_core::spec::JobSpec;
use edl_core::text::counted;
use edl_sched::plan::{Change, Placing, Plan};
use edl_sched::snapshot::{Job, Role};
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use k8s_openapi::jiff::Timestamp;
use kube::Resource as _;

use crate::crd::Status;
use crate::observe::{JobView, Life, Observed, Stage};
use status::Outcome;

/// One thing to do, to one job.
#[derive(Clone, Debug, PartialEq)]
pub struct Action {
    pub job: Target,
    pub deed: Deed,
}

/// The job that something is done to.
#[derive(Clone, Debug, PartialEq)]
pub struct Target {
    pub namespace: String,
    pub name: String,
    pub owner: OwnerReference,
    pub object: ObjectReference,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Deed {
    /// Makes what of its objects is missing, notes how many workers it may have, and makes its
    /// master.
    Admit {
        spec: Box<JobSpec>,
        workers: u32,
        /// A master that has ended and will not come back: its name and uid.
        remove: Option<(String, String)>,
    },
    /// Notes how many workers it may have, and which should rather leave.
    Resize { workers: u32, leave: Vec<u32> },
    /// Notes that it may have none, and ends these pods (names and uids). It can go on later.
    Stop { pods: Vec<(String, String)> },
    /// Says how it stands.
    Show(Box<Status>),
    /// Leaves a sentence for `kubectl describe`.
    Tell(Told),
}

/// An event of Kubernetes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Told {
    pub is_warning: bool,
    /// One word.
    pub reason: &'static str,
    pub note: String,
}

/// Everything that is to be done, in this order.
#[must_use]
pub fn actions(observed: &Observed, plan: &Plan, now: Timestamp) -> Vec<Action> {
    let mut actions = Vec::new();
    for view in observed.jobs.values() {
        let mut deeds = Vec::new();
        let outcome = decide(view, observed, plan, &mut deeds);
        let before = view.object.status.clone().unwrap_or_default();
        let after = status::status(view, &before, &outcome, now);
        deeds.extend(status::news(&before, &after).into_iter().map(Deed::Tell));
        if after != before && view.stage != Stage::Deleted {
            deeds.push(Deed::Show(Box::new(after)));
        }
        actions.extend(deeds.into_iter().map(|deed| Action { job: target(view), deed }));
    }
    actions
}

fn target(view: &JobView) -> Target {
    Target {
        namespace: view.object.namespace().into(),
        name: view.object.name().into(),
        owner: view.object.owner(),
        object: view.object.object_ref(&()),
    }
}

/// What becomes of one job; what is to be done for it is added to `deeds`.
fn decide(view: &JobView, observed: &Observed, plan: &Plan, deeds: &mut Vec<Deed>) -> Outcome {
    let change = plan.change_of(view.id);
    let why = change.map(|change| observed.names.reasons(&change.reasons)).unwrap_or_default();
    let waiting = plan.waiting.get(&view.id);
    let waiting = waiting.map(|it| (crate::tell::word(*it), observed.names.waiting(*it)));
    let mut outcome = Outcome { told: view.told, why, waiting };
    if view.stage != Stage::Live {
        return outcome;
    }
    let job = observed.snapshot.jobs.iter().find(|job| job.id == view.id);
    let is_seated = !plan.state.options.policy.leaves_placing_to_kubernetes();
    let shall = match (job.filter(|_| is_seated), change) {
        (_, Some(change)) => change.target.worker,
        (Some(job), None) => n_seated(view, job),
        (None, None) => view.told,
    };
    outcome.told = shall;
    if shall != view.told && outcome.why.is_empty() {
        outcome.why = "no node can run the remaining workers".into();
    }
    let tell = |reason, note: String| Deed::Tell(Told { is_warning: false, reason, note });
    let why = &outcome.why;
    match (view.told, shall) {
        (0, 0) => deeds.extend(stop(view)),
        (0, n) => {
            deeds.extend(admit(view, n));
            deeds.push(tell("Admitted", format!("starting with {}: {why}", counted(n, "worker"))));
        }
        (_, 0) => {
            deeds.push(stop(view).unwrap_or(Deed::Stop { pods: Vec::new() }));
            deeds.push(tell("Stopped", format!("released all workers: {why}")));
        }
        (told, n) if told != n => {
            let leave = leaving(view, observed, change);
            deeds.push(Deed::Resize { workers: n, leave });
            deeds.push(tell("Resized", format!("{told} → {}: {why}", counted(n, "worker"))));
        }
        (_, n) if !view.has_master() => deeds.extend(admit(view, n)),
        (_, _) => {}
    }
    outcome
}

/// How many workers a job shall have that the plan leaves as it is. If some of its pods fit
/// nowhere, it is told to have those that do, so that nobody waits for pods that cannot come; but
/// only a plan may take its minimum away.
fn n_seated(view: &JobView, job: &Job) -> u32 {
    let seated = job.placed.iter().filter(|placed| placed.role == Role::Worker);
    let seated: u32 = seated.map(|placed| placed.n).sum();
    if seated >= job.roles.worker.min { seated } else { view.told }
}

fn admit(view: &JobView, workers: u32) -> Option<Deed> {
    // A job that ran before goes on with what it was started with.
    let started = view.started.as_deref();
    let spec = started.or_else(|| view.plannable().map(|it| &it.spec))?;
    let spec = Box::new(JobSpec { num_workers: workers, ..spec.clone() });
    let ended = view.pods.iter().find(|pod| pod.role == PodRole::Master).filter(|pod| {
        // How a master ends whose job is over; such a one is no reason to make another.
        !matches!(pod.life, Life::Ended(Ended::Exit(0 | 1 | 3)))
            && matches!(pod.life, Life::Ended(_))
    });
    let remove = ended.map(|pod| (pod.name.clone(), pod.uid.clone()));
    Some(Deed::Admit { spec, workers, remove })
}

/// Ends the pods of a job that shall have none, its master first: without it nobody makes more.
fn stop(view: &JobView) -> Option<Deed> {
    let active = view.pods.iter().filter(|pod| pod.is_active());
    let pods: Vec<_> = active.map(|pod| (pod.name.clone(), pod.uid.clone())).collect();
    (!pods.is_empty()).then_some(Deed::Stop { pods })
}

/// The workers on nodes where others wait for their room.
fn leaving(view: &JobView, observed: &Observed, change: Option<&Change>) -> Vec<u32> {
    let Some(Placing::Named { stop, .. }) = change.map(|change| &change.placing) else {
        return Vec::new();
    };
    let mut leave = Vec::new();
    for placed in stop.iter().filter(|placed| placed.role == Role::Worker) {
        let node = observed.names.nodes.get(&placed.node);
        let here = view.pods.iter().rev().filter(|pod| {
            pod.role == PodRole::Worker && pod.is_active() && pod.node.as_ref() == node
        });
        leave.extend(here.take(placed.n as usize).map(|pod| pod.index));
    }
    leave.sort_unstable();
    leave
}
