// SPDX-License-Identifier: Apache-2.0
//! The last known state of the job's pods: converts observations to reports.
//!
//! A watch has gaps. After each gap, all pods are listed again and compared with what was known: a
//! pod that is not listed has ended.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use edl_core::platform::{Ended, InstanceId, Process, Report, Role, pid_of};
use edl_core::pod::{PodFacts, PodState};
use k8s_openapi::jiff::Timestamp;

use crate::facts::NODE_MARGIN;

/// How long ended pods are kept, so their logs can be read.
const TTL: Duration = Duration::from_secs(600);

/// One pod, as the API server shows it.
#[derive(Clone, Debug)]
pub(super) struct Seen {
    pub(super) instance: InstanceId,
    pub(super) uid: String,
    pub(super) facts: PodFacts,
    /// Its PriorityClass.
    pub(super) class: Option<String>,
    /// Its grace period.
    pub(super) grace: Duration,
    /// When its process started, by the clock of its node.
    pub(super) started: Option<Timestamp>,
}

/// The pods of one job, without its master's.
#[derive(Debug, Default)]
pub(super) struct Roster {
    pods: BTreeMap<InstanceId, Known>,
    /// Instances that the master requested and whose end was not reported.
    wanted: BTreeSet<InstanceId>,
    /// The uids listed so far, while a list is received.
    listing: Option<BTreeSet<String>>,
    /// The first list is complete.
    is_listed: bool,
}

#[derive(Debug)]
struct Known {
    uid: String,
    facts: PodFacts,
    class: Option<String>,
    started: Option<Timestamp>,
    /// The master asked it to leave.
    is_dismissed: bool,
    /// When it is deleted by force: its node must have reported its end by then, or it ended long ago.
    due: Option<Instant>,
}

impl Roster {
    /// The master requested this instance.
    pub(super) fn want(&mut self, instance: InstanceId) {
        self.wanted.insert(instance);
    }

    /// Whether the master requested it and its end was not reported.
    pub(super) fn wants(&self, instance: InstanceId) -> bool {
        self.wanted.contains(&instance)
    }

    /// Stops reporting on it.
    pub(super) fn forget(&mut self, instance: InstanceId) {
        self.wanted.remove(&instance);
    }

    /// The master asked it to leave, so its leaving is not reported.
    pub(super) fn dismissed(&mut self, instance: InstanceId) {
        if let Some(known) = self.pods.get_mut(&instance) {
            known.is_dismissed = true;
        }
    }

    /// The pod of an instance, if it exists and has not ended.
    pub(super) fn living(&self, instance: InstanceId) -> Option<&str> {
        let known = self.pods.get(&instance)?;
        (!known.has_ended()).then_some(known.uid.as_str())
    }

    /// The pod of an instance, if it has ended but still exists.
    pub(super) fn remains(&self, instance: InstanceId) -> Option<&str> {
        let known = self.pods.get(&instance)?;
        known.has_ended().then_some(known.uid.as_str())
    }

    /// The number of staying workers of a priority class.
    pub(super) fn n_high(&self, class: &str) -> usize {
        let is_high = |(id, known): &(&InstanceId, &Known)| {
            let stays = matches!(known.facts.state(), PodState::Waiting(_) | PodState::Running);
            id.role == Role::Worker && stays && known.class.as_deref() == Some(class)
        };
        self.pods.iter().filter(is_high).count()
    }

    /// Whether all existing pods are known.
    pub(super) fn is_listed(&self) -> bool {
        self.is_listed
    }

    /// Whether it runs, even if it is leaving.
    pub(super) fn is_running(&self, instance: InstanceId) -> bool {
        let known = self.pods.get(&instance);
        known.is_some_and(|known| {
            matches!(known.facts.state(), PodState::Running | PodState::Leaving(_))
        })
    }

    pub(super) fn list_begins(&mut self) {
        self.listing = Some(BTreeSet::new());
    }

    /// A pod exists: it was listed, watched or just created.
    pub(super) fn seen(&mut self, seen: Seen, now: Instant) -> Vec<Report> {
        let Seen { instance, uid, facts, class, grace, started } = seen;
        if let Some(listing) = &mut self.listing {
            listing.insert(uid.clone());
        }
        let mut reports = Vec::new();
        let before = match self.pods.remove(&instance) {
            Some(known) if known.uid == uid => Some(known),
            // Its end was missed, and the next pod of its name already exists.
            Some(known) => {
                let ended = self.ended(instance, &known, known.facts.clone());
                reports = self.settle(ended.into_iter().collect());
                None
            }
            None => None,
        };
        let (old_state, is_dismissed, old_due) = match &before {
            Some(known) => (Some(known.facts.state()), known.is_dismissed, known.due),
            None => (None, false, None),
        };
        // An ended pod stays ended, even if a late answer differs.
        if let (Some(known), Some(PodState::Ended(_))) = (before, &old_state) {
            self.pods.insert(instance, known);
            return self.settle(reports);
        }
        let state = facts.state();
        let due = match state {
            PodState::Leaving(_) => old_due.or(Some(now + grace + NODE_MARGIN)),
            PodState::Ended(_) => Some(now + TTL),
            PodState::Waiting(_) | PodState::Running => None,
        };
        let known = Known { uid: uid.clone(), facts, class, started, is_dismissed, due };
        self.pods.insert(instance, known);
        if old_state.as_ref() != Some(&state) {
            reports.extend(self.report(instance, &uid, state, is_dismissed));
        }
        self.settle(reports)
    }

    /// A pod is gone.
    pub(super) fn gone(&mut self, seen: Seen) -> Vec<Report> {
        let Seen { instance, uid, facts, .. } = seen;
        // The end of an earlier pod has been reported.
        if self.pods.get(&instance).is_none_or(|known| known.uid != uid) {
            return Vec::new();
        }
        let known = self.pods.remove(&instance).expect("just seen");
        let reports = self.ended(instance, &known, facts).into_iter().collect();
        self.settle(reports)
    }

    /// A list is complete: pods that are not on it are gone. After the first list, the running pods
    /// are reported, with the time that they have run by the clock, which is `now`.
    pub(super) fn list_ends(&mut self, now: Timestamp) -> Vec<Report> {
        let Some(listed) = self.listing.take() else { return Vec::new() };
        let is_missing = |known: &Known| !listed.contains(&known.uid);
        let missing: Vec<_> = self.pods.extract_if(.., |_, known| is_missing(known)).collect();
        if self.is_listed {
            let ended = missing.iter();
            let ended = ended.filter_map(|(id, known)| self.ended(*id, known, known.facts.clone()));
            let reports = ended.collect();
            return self.settle(reports);
        }
        self.is_listed = true;
        let living: Vec<_> = self.pods.iter().filter(|(_, known)| !known.has_ended()).collect();
        let process = |(id, known): &(&InstanceId, &Known)| Process {
            instance: **id,
            pid: pid_of(&known.uid),
            age_ms: known.age_ms(now),
        };
        let running = living.iter().map(process).collect();
        self.wanted = living.iter().map(|(id, _)| **id).collect();
        let states = living.iter().filter_map(|(id, known)| {
            let state = known.facts.state();
            self.report(**id, &known.uid, state, false)
        });
        let states = states.filter(|report| !matches!(report, Report::Started { .. }));
        [Report::Running(running)].into_iter().chain(states).collect()
    }

    /// How many pods users have not deleted. A pod that is lost with its node, preempted or evicted
    /// was not deleted by a user.
    pub(super) fn n_left(&self) -> usize {
        let is_deleted = |known: &&Known| {
            let state = known.facts.state();
            matches!(state, PodState::Leaving(Ended::Deleted) | PodState::Ended(Ended::Deleted))
        };
        self.pods.values().filter(|known| !is_deleted(known)).count()
    }

    /// Pods that were not requested: an earlier master died while it created them.
    pub(super) fn strays(&self) -> Vec<(InstanceId, String)> {
        let is_stray = |(id, known): &(&InstanceId, &Known)| {
            let is_leaving = matches!(known.facts.state(), PodState::Leaving(_));
            self.is_listed && !self.wants(**id) && !known.has_ended() && !is_leaving
        };
        let strays = self.pods.iter().filter(is_stray);
        strays.map(|(id, known)| (*id, known.uid.clone())).collect()
    }

    /// Pods to delete by force: their node does not report their end, or they ended long ago. Each is
    /// returned once.
    pub(super) fn overdue(&mut self, now: Instant) -> Vec<(InstanceId, String)> {
        let mut overdue = Vec::new();
        for (id, known) in &mut self.pods {
            if known.due.is_some_and(|due| due <= now) {
                known.due = Some(now + NODE_MARGIN); // In case it fails.
                overdue.push((*id, known.uid.clone()));
            }
        }
        overdue
    }

    fn report(
        &self,
        instance: InstanceId,
        uid: &str,
        state: PodState,
        is_dismissed: bool,
    ) -> Option<Report> {
        if !self.is_listed || !self.wants(instance) {
            return None;
        }
        let pid = pid_of(uid);
        match state {
            PodState::Waiting(why) => Some(Report::Waiting { instance, why }),
            PodState::Running => Some(Report::Started { instance, pid }),
            PodState::Leaving(_) if is_dismissed => None,
            PodState::Leaving(how) => Some(Report::Leaving { instance, pid, how }),
            PodState::Ended(how) => Some(Report::Ended { instance, pid, how }),
        }
    }

    /// An instance whose end is reported is not wanted until the master requests it again.
    fn settle(&mut self, reports: Vec<Report>) -> Vec<Report> {
        for report in &reports {
            if let Report::Ended { instance, .. } = report {
                self.wanted.remove(instance);
            }
        }
        reports
    }

    /// The report of a pod that is gone, by its last known facts; none if its end was reported.
    fn ended(&self, instance: InstanceId, known: &Known, last: PodFacts) -> Option<Report> {
        if known.has_ended() {
            return None;
        }
        let state = PodFacts { is_gone: true, ..last }.state();
        self.report(instance, &known.uid, state, known.is_dismissed)
    }
}

impl Known {
    /// How long its process has run; zero if that is not known, or if the clocks differ.
    fn age_ms(&self, now: Timestamp) -> u64 {
        let age = self.started.map(|started| now.as_millisecond() - started.as_millisecond());
        age.and_then(|age| u64::try_from(age).ok()).unwrap_or(0)
    }

    fn has_ended(&self) -> bool {
        matches!(self.facts.state(), PodState::Ended(_))
    }
}

#[cfg(test)]
mod tests;
