// SPDX-License-Identifier: Apache-2.0
//! Turns a plan into actions. All decisions are made here; [`crate::apply`] only performs them. An
//! action whose effect is already visible in the cluster is left out.

mod status;
#[cfg(test)]
mod tests;

use edl_core::platform::Role;
use edl_core::spec::JobSpec;
use edl_core::text::counted;
use edl_kube::note::Grant;
use edl_sched::plan::{AllocationPlan, Change, Placing};
use edl_sched::snapshot::Job;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use k8s_openapi::jiff::Timestamp;
use kube::Resource as _;

use crate::crd::Status;
use crate::observe::{JobStage, JobView, Observed};
use status::Outcome;

/// An action on one job.
#[derive(Clone, Debug, PartialEq)]
pub struct JobAction {
    pub job: Target,
    pub action: Action,
}

/// The job of an action.
#[derive(Clone, Debug, PartialEq)]
pub struct Target {
    pub namespace: String,
    pub name: String,
    pub owner: OwnerReference,
    pub object: ObjectReference,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Creates the job's missing objects, writes its grant, and creates the Job of its master.
    Admit {
        spec: Box<JobSpec>,
        grant: Grant,
    },
    Resize(Grant),
    /// Grants no workers, and deletes the Job of the master and these pods (names and uids). The job
    /// can resume later.
    Stop {
        pods: Vec<(String, String)>,
    },
    UpdateStatus(Box<Status>),
    RecordEvent(JobEvent),
}

/// A Kubernetes event, as `kubectl describe` shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobEvent {
    pub is_warning: bool,
    /// One word.
    pub reason: &'static str,
    pub note: String,
}

/// All actions, in the order in which they are performed.
#[must_use]
pub fn actions(observed: &Observed, plan: &AllocationPlan, now: Timestamp) -> Vec<JobAction> {
    let mut all = Vec::new();
    for view in observed.jobs.values() {
        let mut actions = Vec::new();
        let outcome = decide(view, observed, plan, &mut actions);
        let before = view.object.status.clone().unwrap_or_default();
        let after = status::status(view, &before, &outcome, now);
        actions.extend(status::events(&before, &after).into_iter().map(Action::RecordEvent));
        if after != before && view.stage != JobStage::Deleted {
            actions.push(Action::UpdateStatus(Box::new(after)));
        }
        all.extend(actions.into_iter().map(|action| JobAction { job: target(view), action }));
    }
    all
}

fn target(view: &JobView) -> Target {
    Target {
        namespace: view.object.namespace().into(),
        name: view.object.name().into(),
        owner: view.object.owner(),
        object: view.object.object_ref(&()),
    }
}

/// Decides about one job, and adds the actions for it to `actions`.
fn decide(
    view: &JobView,
    observed: &Observed,
    plan: &AllocationPlan,
    actions: &mut Vec<Action>,
) -> Outcome {
    let change = plan.change_of(view.id);
    let why = change.map(|change| observed.names.reasons(&change.reasons)).unwrap_or_default();
    let waiting = plan.waiting.get(&view.id);
    let waiting = waiting.map(|it| (it.name(), observed.names.waiting(*it)));
    let before = view.grant.workers;
    let mut outcome = Outcome { workers: before, why, waiting };
    if view.stage != JobStage::Live {
        return outcome;
    }
    let job = observed.snapshot.jobs.iter().find(|job| job.id == view.id);
    let is_placed = !plan.state.options.policy.leaves_placing_to_kubernetes();
    let workers = match (job.filter(|_| is_placed), change) {
        (_, Some(change)) => change.target.worker,
        (Some(job), None) => n_placed(view, job),
        (None, None) => before,
    };
    outcome.workers = workers;
    if workers != before && outcome.why.is_empty() {
        outcome.why = "no node can run the remaining workers".into();
    }
    let event =
        |reason, note: String| Action::RecordEvent(JobEvent { is_warning: false, reason, note });
    let why = &outcome.why;
    match (before, workers) {
        (0, 0) => actions.extend(stop(view)),
        (0, n) => {
            actions.extend(admit(view, n));
            let note = format!("starting with {}: {why}", counted(n, "worker"));
            actions.push(event("Admitted", note));
        }
        (_, 0) => {
            actions.push(stop(view).unwrap_or(Action::Stop { pods: Vec::new() }));
            actions.push(event("Stopped", format!("released all workers: {why}")));
        }
        (before, n) if before != n => {
            let leave = leaving(view, observed, change);
            actions.push(Action::Resize(Grant { workers: n, leave }));
            actions.push(event("Resized", format!("{before} → {}: {why}", counted(n, "worker"))));
        }
        // Only if there is no Job, either: otherwise that starts the master.
        (_, n) if !view.has_master() => actions.extend(admit(view, n)),
        (_, _) => {}
    }
    outcome
}

/// The workers of a job that the plan does not change. If some of its pods fit on no node, it gets
/// only those that do, because the others would never start. Only a plan may take a job below its
/// minimum.
fn n_placed(view: &JobView, job: &Job) -> u32 {
    let workers = job.placed.iter().filter(|placed| placed.role == Role::Worker);
    let placed: u32 = workers.map(|placed| placed.n).sum();
    if placed >= job.roles.worker.min { placed } else { view.grant.workers }
}

fn admit(view: &JobView, workers: u32) -> Option<Action> {
    if !view.may_start {
        return None;
    }
    // A job that ran before resumes with its original description.
    let started = view.started.as_deref();
    let spec = started.or_else(|| view.plannable().map(|it| &it.spec))?;
    let spec = Box::new(JobSpec { num_workers: workers, ..spec.clone() });
    let grant = Grant { workers, leave: view.grant.leave.clone() };
    Some(Action::Admit { spec, grant })
}

/// Deletes the pods of a job that gets none, its master first: it would recreate the others.
fn stop(view: &JobView) -> Option<Action> {
    let active = view.pods.iter().filter(|pod| pod.is_active());
    let pods: Vec<_> = active.map(|pod| (pod.name.clone(), pod.uid.clone())).collect();
    (!pods.is_empty()).then_some(Action::Stop { pods })
}

/// The workers on nodes whose capacity other jobs need.
fn leaving(view: &JobView, observed: &Observed, change: Option<&Change>) -> Vec<u32> {
    let Some(Placing::Named { stop, .. }) = change.map(|change| &change.placing) else {
        return Vec::new();
    };
    let mut leave = Vec::new();
    for placed in stop.iter().filter(|placed| placed.role == Role::Worker) {
        let node = observed.names.nodes.get(&placed.node);
        let here =
            view.pods.iter().rev().filter(|pod| {
                pod.role == Role::Worker && pod.is_active() && pod.node.as_ref() == node
            });
        leave.extend(here.take(placed.n as usize).map(|pod| pod.index));
    }
    leave.sort_unstable();
    leave
}
