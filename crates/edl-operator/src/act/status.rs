// SPDX-License-Identifier: Apache-2.0
//! How a job stands, in the words of its status: six conditions, each with its reason.

use edl_core::text::counted;
use edl_kube::names;
use k8s_openapi::jiff::Timestamp;

use super::Told;
use crate::crd::{Condition, Kind, Status};
use crate::observe::{JobView, Stage};

/// What was decided about a job.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Outcome {
    /// Workers that its master is told to have from now on.
    pub(super) told: u32,
    /// Why that has changed; empty if it has not.
    pub(super) why: String,
    /// Why it has less than its minimum: in one word, and in a sentence.
    pub(super) waiting: Option<(&'static str, String)>,
}

/// Whether something is so, why in one word, and in a sentence.
type Said = (bool, String, String);

/// The status of a job; `before` is the one that it has.
pub(super) fn status(view: &JobView, before: &Status, outcome: &Outcome, now: Timestamp) -> Status {
    let is_live = view.stage == Stage::Live;
    let mut status = Status {
        observed_generation: view.object.metadata.generation,
        workers: view.running.worker,
        wanted_workers: if is_live { outcome.told } else { 0 },
        selector: format!("{},{}=worker", names::selector(view.object.name()), names::ROLE_LABEL),
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
    status.conditions = Kind::ALL.map(|kind| condition(kind, view, before, outcome, now)).into();
    let holding = Kind::ALL.into_iter().rev().find(|kind| status.is(*kind));
    status.state = holding.map_or("", Kind::name).into();
    status
}

fn condition(
    kind: Kind,
    view: &JobView,
    before: &Status,
    outcome: &Outcome,
    now: Timestamp,
) -> Condition {
    let said = match kind {
        Kind::Queued => queued(view, outcome),
        Kind::Admitted => admitted(view, before, outcome),
        Kind::Running => running(view, outcome),
        Kind::Resizing => resizing(view, before, outcome),
        Kind::Succeeded => match view.stage {
            Stage::Succeeded => yes("Done", "training completed"),
            Stage::Live | Stage::Deleted | Stage::Failed(..) => no("NotYet", ""),
        },
        Kind::Failed => match &view.stage {
            Stage::Failed(reason, message) => yes(reason, message),
            Stage::Live | Stage::Deleted | Stage::Succeeded => no("No", ""),
        },
    };
    let (holds, reason, message) = said;
    let status = if holds { "True" } else { "False" };
    let old = before.condition(kind).filter(|old| old.status == status);
    let last_transition_time = match old {
        Some(old) => old.last_transition_time.clone(),
        None => seconds(now),
    };
    let kind = kind.name().into();
    Condition { kind, status: status.into(), reason, message, last_transition_time }
}

fn queued(view: &JobView, outcome: &Outcome) -> Said {
    if view.stage != Stage::Live {
        return no("Ended", "");
    }
    if outcome.told > 0 {
        return no("Admitted", "");
    }
    match (&view.trouble, &outcome.waiting) {
        (Some(trouble), _) => yes(trouble.reason, &trouble.message),
        (None, Some((word, sentence))) => yes(word, sentence),
        (None, None) if !outcome.why.is_empty() => yes("Stopped", &outcome.why),
        (None, None) => yes("Waiting", "waiting for its turn"),
    }
}

fn admitted(view: &JobView, before: &Status, outcome: &Outcome) -> Said {
    if view.stage != Stage::Live {
        return no("Ended", "");
    }
    if outcome.told == 0 {
        return no("Queued", "");
    }
    if let Some(trouble) = view.trouble.as_ref().filter(|_| view.told > 0) {
        let message = format!(
            "{}; until this is fixed, the job keeps running with its original settings",
            trouble.message
        );
        return yes(trouble.reason, &message);
    }
    if let Some(word) = &view.edited {
        let message = format!(
            "`{word}` cannot change while the job runs: only min_workers, max_workers, queue and \
             priority can; submit a new job to change it"
        );
        return yes(SPEC_CHANGED, &message);
    }
    let old = before.condition(Kind::Admitted).filter(|old| old.holds() && old.reason == PLANNED);
    match old {
        Some(old) if view.told > 0 => yes(PLANNED, &old.message),
        Some(_) | None => yes(PLANNED, &outcome.why),
    }
}

const PLANNED: &str = "Planned";
const SPEC_CHANGED: &str = "SpecChanged";

fn is_running(view: &JobView, outcome: &Outcome) -> bool {
    let min = view.limits().map_or(1, |(min, _)| min);
    let is_live = view.stage == Stage::Live && outcome.told > 0;
    // While it shrinks to a smaller minimum it runs all the same.
    is_live && view.running.worker >= min.min(outcome.told).max(1)
}

fn running(view: &JobView, outcome: &Outcome) -> Said {
    if is_running(view, outcome) {
        return yes("HasItsMinimum", "");
    }
    if view.stage != Stage::Live {
        return no("Ended", "");
    }
    if outcome.told == 0 {
        return no("Queued", "");
    }
    let (has, min) = (view.running.worker, view.limits().map_or(1, |(min, _)| min));
    let waits = outcome.waiting.as_ref().map_or(String::new(), |(_, why)| format!(": {why}"));
    no("Starting", &format!("{has} of {min} required workers running{waits}"))
}

fn resizing(view: &JobView, before: &Status, outcome: &Outcome) -> Said {
    let has = view.running.worker;
    if !is_running(view, outcome) || has == outcome.told {
        return no("No", "");
    }
    let reason = if has < outcome.told { "Growing" } else { "Shrinking" };
    let old = before.condition(Kind::Resizing).filter(|old| old.holds() && outcome.why.is_empty());
    match old {
        // Why is known in the moment of the plan alone.
        Some(old) => yes(reason, &old.message),
        None => {
            let (size, why) = (counted(outcome.told, "worker"), because(&outcome.why));
            yes(reason, &format!("to {size}: {why}"))
        }
    }
}

fn because(why: &str) -> &str {
    if why.is_empty() { "pods are starting or stopping" } else { why }
}

/// What is worth an event: that a job cannot be planned, that it waits, and how it ended.
pub(super) fn news(before: &Status, after: &Status) -> Vec<Told> {
    let mut news = Vec::new();
    let is_new = |kind: Kind| {
        let new = after.condition(kind).filter(|new| new.holds())?;
        let is_old =
            before.condition(kind).is_some_and(|old| old.holds() && old.reason == new.reason);
        (!is_old).then_some(new)
    };
    if let Some(queued) = is_new(Kind::Queued) {
        let is_warning = TROUBLES.contains(&queued.reason.as_str());
        let reason = if is_warning { "Invalid" } else { "Queued" };
        news.push(Told { is_warning, reason, note: queued.message.clone() });
    }
    let unlike_plan = is_new(Kind::Admitted).filter(|admitted| admitted.reason != PLANNED);
    if let Some(admitted) = unlike_plan {
        let reason = if admitted.reason == SPEC_CHANGED { SPEC_CHANGED } else { "Invalid" };
        news.push(Told { is_warning: true, reason, note: admitted.message.clone() });
    }
    for (kind, is_warning) in [(Kind::Succeeded, false), (Kind::Failed, true)] {
        if let Some(ended) = is_new(kind) {
            news.push(Told { is_warning, reason: kind.name(), note: ended.message.clone() });
        }
    }
    news
}

/// Reasons that only the job's owner can mend.
const TROUBLES: [&str; 5] =
    ["Invalid", "NameTaken", "NeverFits", "UnknownPriority", "UnknownQueue"];

fn yes(reason: &str, message: &str) -> Said {
    (true, reason.into(), message.into())
}

fn no(reason: &str, message: &str) -> Said {
    (false, reason.into(), message.into())
}

/// `2026-11-16T13:00:00Z`.
fn seconds(now: Timestamp) -> String {
    Timestamp::from_second(now.as_second()).unwrap_or(now).to_string()
}
