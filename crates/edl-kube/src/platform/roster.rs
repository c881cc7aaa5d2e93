// SPDX-License-Identifier: Apache-2.0
//! The job's pods as they were seen last: turns what is seen into reports.
//!
//! A watch has gaps. After each, everything is listed again, and what is listed is compared with
//! what was known: a pod that is not listed has ended, even if nobody saw it go.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use edl_core::platform::{InstanceId, Report, Role, pid_of};
use edl_core::pod::{Facts, State};

use crate::facts::NODE_MARGIN;

/// What has ended is kept so long, for those who want to read its log.
const TTL: Duration = Duration::from_secs(600);

/// One pod, as the API server tells of it.
#[derive(Clone, Debug)]
pub(super) struct Seen {
    pub(super) instance: InstanceId,
    pub(super) uid: String,
    pub(super) facts: Facts,
    /// Its PriorityClass.
    pub(super) class: Option<String>,
    /// What it gets between the wish that it leaves and its end.
    pub(super) grace: Duration,
}

/// The pods of one job but its master's.
#[derive(Debug, Default)]
pub(super) struct Roster {
    pods: BTreeMap<InstanceId, Known>,
    /// Those that the master wants and has not heard the end of.
    wanted: BTreeSet<InstanceId>,
    /// What was listed so far, while a list comes in.
    listing: Option<BTreeSet<String>>,
    /// The first list is complete.
    is_listed: bool,
}

#[derive(Debug)]
struct Known {
    uid: String,
    facts: Facts,
    class: Option<String>,
    /// It was us who asked it to leave.
    is_dismissed: bool,
    /// Its node must have said by then that it is gone; or, after its end, it is removed then.
    due: Option<Instant>,
}

impl Roster {
    /// The master wants this one from now on.
    pub(super) fn want(&mut self, instance: InstanceId) {
        self.wanted.insert(instance);
    }

    /// Whether the master wants it and has not heard its end.
    pub(super) fn wants(&self, instance: InstanceId) -> bool {
        self.wanted.contains(&instance)
    }

    /// The master shall hear nothing more of it.
    pub(super) fn forget(&mut self, instance: InstanceId) {
        self.wanted.remove(&instance);
    }

    /// The master has asked it to leave, so that it need not be told.
    pub(super) fn dismissed(&mut self, instance: InstanceId) {
        if let Some(known) = self.pods.get_mut(&instance) {
            known.is_dismissed = true;
        }
    }

    /// The pod of an instance that is there and has not ended.
    pub(super) fn living(&self, instance: InstanceId) -> Option<&str> {
        let known = self.pods.get(&instance)?;
        (!known.has_ended()).then_some(known.uid.as_str())
    }

    /// The pod of an instance that has ended but still takes its name.
    pub(super) fn remains(&self, instance: InstanceId) -> Option<&str> {
        let known = self.pods.get(&instance)?;
        known.has_ended().then_some(known.uid.as_str())
    }

    /// How many workers of this class are there and stay.
    pub(super) fn n_high(&self, class: &str) -> usize {
        let is_high = |(id, known): &(&InstanceId, &Known)| {
            let stays = matches!(known.facts.state(), State::Waiting(_) | State::Running);
            id.role == Role::Worker && stays && known.class.as_deref() == Some(class)
        };
        self.pods.iter().filter(is_high).count()
    }

    /// Whether everything that is there is known.
    pub(super) fn is_listed(&self) -> bool {
        self.is_listed
    }

    pub(super) fn is_running(&self, instance: InstanceId) -> bool {
        self.pods.get(&instance).is_some_and(|known| known.facts.state() == State::Running)
    }

    /// A list begins to come in.
    pub(super) fn list_begins(&mut self) {
        self.listing = Some(BTreeSet::new());
    }

    /// A pod is there, by a list, by the watch or because we have just made it.
    pub(super) fn seen(&mut self, seen: Seen, now: Instant) -> Vec<Report> {
        let Seen { instance, uid, facts, class, grace } = seen;
        if let Some(listing) = &mut self.listing {
            listing.insert(uid.clone());
        }
        let mut reports = Vec::new();
        let before = match self.pods.remove(&instance) {
            Some(known) if known.uid == uid => Some(known),
            // Its end was missed, and the next one of its name is there already.
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
        // What is over stays over, whatever a late answer says.
        if let (Some(known), Some(State::Ended(_))) = (before, &old_state) {
            self.pods.insert(instance, known);
            return self.settle(reports);
        }
        let state = facts.state();
        let due = match state {
            State::Leaving(_) => old_due.or(Some(now + grace + NODE_MARGIN)),
            State::Ended(_) => Some(now + TTL),
            State::Waiting(_) | State::Running => None,
        };
        self.pods.insert(instance, Known { uid: uid.clone(), facts, class, is_dismissed, due });
        if old_state.as_ref() != Some(&state) {
            reports.extend(self.report(instance, &uid, state, is_dismissed));
        }
        self.settle(reports)
    }

    /// A pod is gone.
    pub(super) fn gone(&mut self, seen: Seen) -> Vec<Report> {
        let Seen { instance, uid, facts, .. } = seen;
        // Of one of before the end has been told.
        if self.pods.get(&instance).is_none_or(|known| known.uid != uid) {
            return Vec::new();
        }
        let known = self.pods.remove(&instance).expect("just seen");
        let reports = self.ended(instance, &known, facts).into_iter().collect();
        self.settle(reports)
    }

    /// A list is complete: what is not on it is gone. The first one tells the master what runs.
    pub(super) fn list_ends(&mut self) -> Vec<Report> {
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
        let running = living.iter().map(|(id, known)| (**id, pid_of(&known.uid))).collect();
        self.wanted = living.iter().map(|(id, _)| **id).collect();
        let states = living.iter().filter_map(|(id, known)| {
            let state = known.facts.state();
            self.report(**id, &known.uid, state, false)
        });
        let states = states.filter(|report| !matches!(report, Report::Started { .. }));
        [Report::Running(running)].into_iter().chain(states).collect()
    }

    /// Pods that nobody wants: of an earlier master that died while it made them.
    pub(super) fn strays(&self) -> Vec<(InstanceId, String)> {
        let is_stray = |(id, known): &(&InstanceId, &Known)| {
            let is_leaving = matches!(known.facts.state(), State::Leaving(_));
            self.is_listed && !self.wants(**id) && !known.has_ended() && !is_leaving
        };
        let strays = self.pods.iter().filter(is_stray);
        strays.map(|(id, known)| (*id, known.uid.clone())).collect()
    }

    /// Pods to be removed by force: their node does not say that they are gone, or they ended
    /// long ago. Each is named once.
    pub(super) fn overdue(&mut self, now: Instant) -> Vec<(InstanceId, String)> {
        let mut overdue = Vec::new();
        for (id, known) in &mut self.pods {
            if known.due.is_some_and(|due| due <= now) {
                known.due = Some(now + NODE_MARGIN); // Until it worked.
                overdue.push((*id, known.uid.clone()));
            }
        }
        overdue
    }

    fn report(
        &self,
        instance: InstanceId,
        uid: &str,
        state: State,
        is_dismissed: bool,
    ) -> Option<Report> {
        if !self.is_listed || !self.wants(instance) {
            return None;
        }
        let pid = pid_of(uid);
        match state {
            State::Waiting(why) => Some(Report::Waiting { instance, why }),
            State::Running => Some(Report::Started { instance, pid }),
            State::Leaving(_) if is_dismissed => None,
            State::Leaving(how) => Some(Report::Leaving { instance, pid, how }),
            State::Ended(how) => Some(Report::Ended { instance, pid, how }),
        }
    }

    /// Whose end the master has heard of is not wanted until the master says so again.
    fn settle(&mut self, reports: Vec<Report>) -> Vec<Report> {
        for report in &reports {
            if let Report::Ended { instance, .. } = report {
                self.wanted.remove(instance);
            }
        }
        reports
    }

    /// The report of a pod that is gone, by the last that was heard of it; none if its end has
    /// been told.
    fn ended(&self, instance: InstanceId, known: &Known, last: Facts) -> Option<Report> {
        if known.has_ended() {
            return None;
        }
        let state = Facts { is_gone: true, ..last }.state();
        self.report(instance, &known.uid, state, known.is_dismissed)
    }
}

impl Known {
    fn has_ended(&self) -> bool {
        matches!(self.facts.state(), State::Ended(_))
    }
}

#[cfg(test)]
mod tests;
