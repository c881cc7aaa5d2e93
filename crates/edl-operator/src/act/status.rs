// SPDX-License-Identifier: Apache-2.0
//! The status of a job: six conditions, each with its reason.

use edl_core::platform::Role;
use edl_core::text::counted;
use edl_kube::names;
use k8s_openapi::jiff::Timestamp;

use super::JobEvent;
use crate::crd::{Condition, ConditionKind, Status};
use crate::observe::{JobStage, JobView};

/// What was decided about a job.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Outcome {
    /// Workers that it is granted from now on.
    pub(super) workers: u32,
    /// Why that has changed; empty if it has not.
    pub(super) why: String,
    /// Why it has less than its minimum: in one word, and in a sentence.
    pub(super) waiting: Option<(&'static str, String)>,
}

/// Whether a condition holds, why in one word, and in a sentence.
type Verdict = (bool, String, String);

/// The status of a job; `before` is the one that it has.
pub(super) fn status(view: &JobView, before: &Status, outcome: &Outcome, now: Timestamp) -> Status {
    let is_live = view.stage == JobStage::Live;
    let mut status = Status {
        observed_generation: view.object.metadata.generation,
        workers: view.running.worker,
        wanted_workers: if is_live { outcome.workers } else { 0 },
        selector: names::role_selector(view.object.name(), Role::Worker),
        eta: String::new(),
        ..before.clone()
    };
    if let Some((min, max)) = view.limits() {
        (status.min_workers, status.max_workers) = (Some(min), Some(max));
    }
    if let Some(note) = &view.note {
        status.records_done = Some(note.records_done);
        status.records_total = note.records_total.filter(|total| *total > 0);
        status.progress = note.progress();
        if is_live {
            status.eta = note.eta();
        }
    }
    status.conditions =
        ConditionKind::ALL.map(|kind| condition(kind, view, before, outcome, now)).into();
    let holding = ConditionKind::ALL.into_iter().rev().find(|kind| status.is(*kind));
    status.state = holding.map_or("", ConditionKind::name).into();
    status
}

fn condition(
    kind: ConditionKind,
    view: &JobView,
    before: &Status,
    outcome: &Outcome,
    now: Timestamp,
) -> Condition {
    let (holds, reason, message) = match kind {
        ConditionKind::Queued => queued(view, outcome),
        ConditionKind::Admitted => admitted(view, before, outcome),
        ConditionKind::Running => running(view, outcome),
        ConditionKind::Resizing => resizing(view, before, outcome),
        ConditionKind::Succeeded => match view.stage {
            JobStage::Succeeded => yes("Done", "training completed"),
            JobStage::Live | JobStage::Deleted | JobStage::Failed(..) => no("NotYet", ""),
        },
        ConditionKind::Failed => match &view.stage {
            JobStage::Failed(reason, message) => yes(reason, message),
            JobStage::Live | JobStage::Deleted | JobStage::Succeeded => no("No", ""),
        },
    };
    let status = if holds { "True" } else { "False" };
    let old = before.condition(kind).filter(|old| old.status == status);
    let last_transition_time = match old {
        Some(old) => old.last_transition_time.clone(),
        None => seconds(now),
    };
    let kind = kind.name().into();
    Condition { kind, status: status.into(), reason, message, last_transition_time }
}

fn queued(view: &JobView, outcome: &Outcome) -> Verdict {
    if view.stage != JobStage::Live {
        return no("Ended", "");
    }
    if outcome.workers > 0 {
        return no("Admitted", "");
    }
    match (&view.trouble, &outcome.waiting) {
        (Some(trouble), _) => yes(trouble.reason, &trouble.message),
        (None, Some((reason, message))) => yes(reason, message),
        (None, None) if !outcome.why.is_empty() => yes("Stopped", &outcome.why),
        (None, None) => yes("Waiting", "waiting for its turn"),
    }
}

fn admitted(view: &JobView, before: &Status, outcome: &Outcome) -> Verdict {
    if view.stage != JobStage::Live {
        return no("Ended", "");
    }
    if outcome.workers == 0 {
        return no("Queued", "");
    }
    if let Some(trouble) = view.trouble.as_ref().filter(|_| view.grant.workers > 0) {
        let message = format!(
            "{}; until this is fixed, the job keeps running with its original settings",
            trouble.message
        );
        return yes(trouble.reason, &message);
    }
    if let Some(field) = &view.edited {
        let message = format!(
            "`{field}` cannot change while the job runs: only min_workers, max_workers, queue and \
             priority can; submit a new job to change it"
        );
        return yes(SPEC_CHANGED, &message);
    }
    let old = before
        .condition(ConditionKind::Admitted)
        .filter(|old| old.holds() && old.reason == PLANNED);
    match old {
        Some(old) if view.grant.workers > 0 => yes(PLANNED, &old.message),
        Some(_) | None => yes(PLANNED, &outcome.why),
    }
}

const PLANNED: &str = "Planned";
const SPEC_CHANGED: &str = "SpecChanged";

fn is_running(view: &JobView, outcome: &Outcome) -> bool {
    let min = view.limits().map_or(1, |(min, _)| min);
    let is_live = view.stage == JobStage::Live && outcome.workers > 0;
    // While it shrinks to a smaller minimum, it still runs.
    is_live && view.running.worker >= min.min(outcome.workers).max(1)
}

fn running(view: &JobView, outcome: &Outcome) -> Verdict {
    if is_running(view, outcome) {
        return yes("HasItsMinimum", "");
    }
    if view.stage != JobStage::Live {
        return no("Ended", "");
    }
    if outcome.workers == 0 {
        return no("Queued", "");
    }
    let (has, min) = (view.running.worker, view.limits().map_or(1, |(min, _)| min));
    let waits = outcome.waiting.as_ref().map_or(String::new(), |(_, why)| format!(": {why}"));
    no("Starting", &format!("{has} of {min} required workers running{waits}"))
}

fn resizing(view: &JobView, before: &Status, outcome: &Outcome) -> Verdict {
    let has = view.running.worker;
    if !is_running(view, outcome) || has == outcome.workers {
        return no("No", "");
    }
    let reason = if has < outcome.workers { "Growing" } else { "Shrinking" };
    let old = before
        .condition(ConditionKind::Resizing)
        .filter(|old| old.holds() && outcome.why.is_empty());
    match old {
        // The reason is only known in the pass that made the plan.
        Some(old) => yes(reason, &old.message),
        None => {
            let (size, why) = (counted(outcome.workers, "worker"), because(&outcome.why));
            yes(reason, &format!("to {size}: {why}"))
        }
    }
}

fn because(why: &str) -> &str {
    if why.is_empty() { "pods are starting or stopping" } else { why }
}

/// The events of a change: a job cannot be planned, waits, or has ended.
pub(super) fn events(before: &Status, after: &Status) -> Vec<JobEvent> {
    let mut events = Vec::new();
    let is_new = |kind: ConditionKind| {
        let new = after.condition(kind).filter(|new| new.holds())?;
        let is_old =
            before.condition(kind).is_some_and(|old| old.holds() && old.reason == new.reason);
        (!is_old).then_some(new)
    };
    if let Some(queued) = is_new(ConditionKind::Queued) {
        let is_warning = TROUBLES.contains(&queued.reason.as_str());
        let reason = if is_warning { "Invalid" } else { "Queued" };
        events.push(JobEvent { is_warning, reason, note: queued.message.clone() });
    }
    let unplanned = is_new(ConditionKind::Admitted).filter(|admitted| admitted.reason != PLANNED);
    if let Some(admitted) = unplanned {
        let reason = if admitted.reason == SPEC_CHANGED { SPEC_CHANGED } else { "Invalid" };
        events.push(JobEvent { is_warning: true, reason, note: admitted.message.clone() });
    }
    for (kind, is_warning) in [(ConditionKind::Succeeded, false), (ConditionKind::Failed, true)] {
        if let Some(ended) = is_new(kind) {
            events.push(JobEvent { is_warning, reason: kind.name(), note: ended.message.clone() });
        }
    }
    events
}

/// Reasons that only the job's owner can fix.
const TROUBLES: [&str; 5] =
    ["Invalid", "NameTaken", "NeverFits", "UnknownPriority", "UnknownQueue"];

fn yes(reason: &str, message: &str) -> Verdict {
    (true, reason.into(), message.into())
}

fn no(reason: &str, message: &str) -> Verdict {
    (false, reason.into(), message.into())
}

/// `2026-11-16T13:00:00Z`.
fn seconds(now: Timestamp) -> String {
    Timestamp::from_second(now.as_second()).unwrap_or(now).to_string()
}
