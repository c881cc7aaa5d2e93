// SPDX-License-Identifier: Apache-2.0
//! The platform of a master in a pod: creates and deletes pods as the master orders, and reports what
//! becomes of them.
//!
//! It makes no decisions about the job. A pod that cannot be created yet, because of a quota or
//! missing permissions, is retried as long as the master needs it.

mod departure;
mod roster;

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use edl_core::platform::{ChaosAction, Ended, InstanceId, Order, Report, Role};
use edl_core::pod::{PodState, Wait};
use edl_core::spec::JobSpec;
use futures::future::BoxFuture;

use futures::stream::{self, BoxStream};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use kube::Client;
use kube::runtime::watcher::{self, watcher};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;
use tokio_stream::{Stream, StreamExt as _};

use crate::board::Board;
use crate::calls::{Answer, Pods, wait_of};
use crate::leaving::Leaving;
use crate::manifest::PodExtras;
use crate::note::Grant;
use crate::{facts, names};
use departure::{Departure, Next};
use roster::{Roster, Seen};

/// How often overdue pods, retries and grace periods are checked.
const TICK: Duration = Duration::from_millis(100);
/// The first and longest pause before a failed call is retried; it doubles each time.
const FIRST_BACKOFF: Duration = Duration::from_millis(500);
const LAST_BACKOFF: Duration = Duration::from_secs(8);
/// The pause until the name of an ended pod is free.
const NAME_BACKOFF: Duration = Duration::from_millis(200);
/// A node reports the end of a pod seconds later. A pod that is deleted before would not be shown as
/// completed.
const DISMISSED_GRACE: Duration = Duration::from_secs(20);

/// The platform's settings.
#[derive(Clone, Debug)]
pub struct Config {
    pub spec: JobSpec,
    pub namespace: String,
    /// The uid of the pod that this master runs in; none if it runs in no pod.
    pub master_uid: Option<String>,
    /// Variables of the master that its pods also get.
    pub env: Vec<(String, String)>,
    /// The operator's grants, if an operator manages the job.
    pub board: Option<Board>,
    /// Whether a user has deleted the pod of the last master. If all others are deleted, too, the
    /// job is to stop.
    pub was_deleted: bool,
    /// Begins when a user has deleted the pod of this master.
    pub leaving: Leaving,
}

/// Why a platform stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The master has no more orders.
    Done,
    /// Another master has replaced this one, or will: this one must stop silently.
    Superseded,
}

/// Serves a master until it has no more orders and its pods are gone, or its own pod is deleted.
pub fn run(
    client: Client,
    config: Config,
    orders: mpsc::Receiver<Order>,
    reports: mpsc::Sender<Report>,
) -> BoxFuture<'static, End> {
    let pods = Pods::new(client, &config.namespace, config.spec.clone());
    let watch = watcher::Config::default().labels(&names::selector(&config.spec.job_name));
    let events = watcher(pods.api().clone(), watch);
    let platform = Platform {
        pods,
        n_high: config.spec.n_high_workers(),
        config,
        reports,
        roster: Roster::default(),
        attempts: BTreeMap::new(),
        dismissed: BTreeMap::new(),
        calls: JoinSet::new(),
        undeleted: Vec::new(),
        trouble: None,
        departure: None,
        end: None,
    };
    Box::pin(platform.run(orders, events))
}

struct Platform {
    config: Config,
    pods: Pods,
    reports: mpsc::Sender<Report>,
    roster: Roster,
    /// Pods to create.
    attempts: BTreeMap<InstanceId, Attempt>,
    /// Pods that know that the job is over, and their deadlines.
    dismissed: BTreeMap<InstanceId, Instant>,
    /// How many workers get the high class.
    n_high: usize,
    calls: JoinSet<Answer>,
    /// Failed deletions to retry.
    undeleted: Vec<Undeleted>,
    /// The last problem with the API server itself.
    trouble: Option<Wait>,
    /// Set once a user has deleted the pod of this master: no more pods are created.
    departure: Option<Departure>,
    end: Option<End>,
}

struct Undeleted {
    instance: InstanceId,
    uid: String,
    grace: Duration,
    at: Instant,
}

struct Attempt {
    memory_percent: u32,
    not_before: Instant,
    backoff: Duration,
    is_under_way: bool,
    /// Whether it gets the high priority class.
    is_high: bool,
    reported: Option<Wait>,
}

impl Platform {
    async fn run(
        mut self,
        mut orders: mpsc::Receiver<Order>,
        events: impl Stream<Item = watcher::Result<watcher::Event<Pod>>>,
    ) -> End {
        let mut events = std::pin::pin!(events);
        let mut grants: BoxStream<'static, Grant> = match &self.config.board {
            Some(board) => board.grants(),
            None => Box::pin(stream::pending()),
        };
        let mut ticks = tokio::time::interval(TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (mut backoff, mut watch_at) = (FIRST_BACKOFF, tokio::time::Instant::now());
        let mut has_orders = true;
        loop {
            tokio::select! {
                order = orders.recv(), if has_orders => match order {
                    Some(order) => self.obey(order, Instant::now()),
                    None => has_orders = false,
                },
                Some(event) = next_at(&mut events, watch_at) => match event {
                    Ok(event) => {
                        (backoff, watch_at) = (FIRST_BACKOFF, tokio::time::Instant::now());
                        self.watched(event, Instant::now()).await;
                    }
                    Err(error) => {
                        self.watch_failed(&error).await;
                        watch_at = tokio::time::Instant::now() + backoff;
                        backoff = (backoff * 2).min(LAST_BACKOFF);
                    }
                },
                Some(answer) = self.calls.join_next() => {
                    // A panic has been logged; the call is lost, and retried.
                    if let Ok(answer) = answer {
                        self.answered(answer, Instant::now()).await;
                    }
                }
                // The first report must be what runs.
                Some(Grant { workers, leave }) = grants.next(), if self.roster.is_listed() => {
                    self.report_all(vec![Report::Granted { workers, leave }]).await;
                }
                _ = ticks.tick() => self.tick(Instant::now()),
            }
            self.check_departure(Instant::now()).await;
            if let Some(end) = self.end {
                return end;
            }
            if !has_orders && self.is_over() {
                return End::Done;
            }
        }
    }

    /// Whether all dismissed pods are gone.
    fn is_over(&self) -> bool {
        let is_there = |id: &InstanceId| self.roster.living(*id).is_some();
        self.calls.is_empty() && !self.dismissed.keys().any(is_there)
    }

    fn obey(&mut self, order: Order, now: Instant) {
        match order {
            Order::Launch { instance, memory_percent, .. } => {
                self.roster.want(instance);
                let attempt = Attempt {
                    memory_percent,
                    not_before: now,
                    backoff: FIRST_BACKOFF,
                    is_under_way: false,
                    is_high: self.is_high_next(),
                    reported: None,
                };
                self.attempts.insert(instance, attempt);
                self.try_all(now);
            }
            Order::Stop { instance, grace_ms } => {
                self.stop(instance, Duration::from_millis(grace_ms));
            }
            Order::Dismiss { instance, grace_ms } => {
                if self.roster.is_running(instance) {
                    self.roster.dismissed(instance);
                    let grace = Duration::from_millis(grace_ms).max(DISMISSED_GRACE);
                    self.dismissed.insert(instance, now + grace);
                } else {
                    // It would start after the job is over.
                    self.stop(instance, Duration::ZERO);
                }
            }
            Order::Chaos { instance, action: ChaosAction::Kill } => {
                // It was not asked to leave, so its end is reported like that of any deleted pod.
                if let Some(uid) = self.roster.living(instance).map(str::to_owned) {
                    self.delete(instance, uid, Duration::ZERO);
                }
            }
            Order::Chaos { .. } => tracing::warn!("the only chaos action for pods is kill"),
        }
    }

    /// Whether the next worker gets the high class: too few of the current ones have it.
    fn is_high_next(&self) -> bool {
        let is_high =
            |(id, attempt): (&InstanceId, &Attempt)| id.role == Role::Worker && attempt.is_high;
        let to_come = self.attempts.iter().filter(|attempt| is_high(*attempt)).count();
        let high = self.config.spec.high_priority_class.name().unwrap_or_default();
        let there = self.roster.n_high(high);
        to_come + there < self.n_high
    }

    fn stop(&mut self, instance: InstanceId, grace: Duration) {
        let was_to_come = self.attempts.remove(&instance).is_some();
        if let Some(uid) = self.roster.living(instance).map(str::to_owned) {
            self.roster.dismissed(instance);
            self.delete(instance, uid, grace);
        } else if was_to_come {
            self.roster.forget(instance);
            // If it is being created now, it will be a stray.
            self.report(Report::Ended { instance, pid: 0, how: Ended::Deleted });
        }
    }

    fn delete(&mut self, instance: InstanceId, uid: String, grace: Duration) {
        self.calls.spawn(self.pods.clone().delete(instance, uid, grace));
    }

    /// Creates every pod that is due, unless the next master decides about it.
    fn try_all(&mut self, now: Instant) {
        if self.departure.is_some() {
            return;
        }
        for (instance, attempt) in &mut self.attempts {
            if attempt.is_under_way || attempt.not_before > now {
                continue;
            }
            if let Some(uid) = self.roster.remains(*instance) {
                // Free its name.
                let uid = uid.to_owned();
                self.calls.spawn(self.pods.clone().delete(*instance, uid, Duration::ZERO));
                attempt.not_before = now + NAME_BACKOFF;
                continue;
            }
            attempt.is_under_way = true;
            let extras = PodExtras {
                memory_factor: f64::from(attempt.memory_percent) / 100.0,
                is_high: Some(attempt.is_high),
                env: self.config.env.clone(),
                ..PodExtras::default()
            };
            self.calls.spawn(self.pods.clone().create(*instance, extras));
        }
    }

    async fn answered(&mut self, answer: Answer, now: Instant) {
        match answer {
            Answer::Created(instance, pod) => {
                self.attempts.remove(&instance);
                if let Some(seen) = seen(&pod) {
                    let reports = self.roster.seen(seen, now);
                    self.report_all(reports).await;
                }
            }
            Answer::NameTaken(instance) => self.try_later(instance, None, now),
            Answer::Refused(instance, why) => self.try_later(instance, Some(why), now),
            Answer::Deleted => {}
            Answer::NotDeleted { instance, uid, grace, why } => {
                tracing::warn!(%instance, %why, "cannot delete a pod");
                self.undeleted.push(Undeleted { instance, uid, grace, at: now + FIRST_BACKOFF });
                self.troubled(why).await;
            }
        }
        self.try_all(now);
    }

    /// Schedules a retry, and reports why the pod is delayed.
    fn try_later(&mut self, instance: InstanceId, why: Option<Wait>, now: Instant) {
        let Some(attempt) = self.attempts.get_mut(&instance) else { return };
        attempt.is_under_way = false;
        let Some(why) = why else {
            attempt.not_before = now + NAME_BACKOFF;
            return;
        };
        attempt.not_before = now + attempt.backoff;
        attempt.backoff = (attempt.backoff * 2).min(LAST_BACKOFF);
        if attempt.reported.as_ref() != Some(&why) {
            attempt.reported = Some(why.clone());
            self.report(Report::Waiting { instance, why });
        }
    }

    async fn watched(&mut self, event: watcher::Event<Pod>, now: Instant) {
        if self.trouble.take().is_some() {
            self.report(Report::Trouble(None));
        }
        let reports = match event {
            watcher::Event::Init => {
                self.roster.list_begins();
                Vec::new()
            }
            watcher::Event::InitApply(pod) | watcher::Event::Apply(pod) => self.seen(&pod, now),
            watcher::Event::Delete(pod) => self.gone(&pod),
            watcher::Event::InitDone => {
                let is_first = !self.roster.is_listed();
                let reports = self.roster.list_ends(Timestamp::now());
                let is_stopped = is_first && self.config.was_deleted && self.roster.n_left() == 0;
                if is_stopped { vec![Report::AllDeleted { within_ms: 0 }] } else { reports }
            }
        };
        self.report_all(reports).await;
        if self.departure.is_some() {
            return;
        }
        for (instance, uid) in self.roster.strays() {
            if !self.attempts.contains_key(&instance) {
                tracing::warn!(%instance, "deleting a pod that the job did not request");
                self.delete(instance, uid, Duration::ZERO);
            }
        }
    }

    fn seen(&mut self, pod: &Pod, now: Instant) -> Vec<Report> {
        let Some(seen) = seen(pod) else { return Vec::new() };
        if seen.instance.role == Role::Master {
            self.check_master(pod, seen, now);
            return Vec::new();
        }
        // It was created, although the answer was lost.
        if self.roster.wants(seen.instance) && !matches!(seen.facts.state(), PodState::Ended(_)) {
            self.attempts.remove(&seen.instance);
        }
        self.roster.seen(seen, now)
    }

    fn gone(&mut self, pod: &Pod) -> Vec<Report> {
        let Some(mut seen) = seen(pod) else { return Vec::new() };
        if seen.instance.role == Role::Master {
            if self.is_my_pod(&seen) {
                self.end = Some(End::Superseded);
            }
            return Vec::new();
        }
        seen.facts.is_gone = true;
        self.roster.gone(seen)
    }

    /// Checks the pods of masters. When this one's is deleted, perhaps with all others, no pod may be
    /// created: the next master decides. Its deletion is seen before that of pods deleted after it.
    /// The pod of the master before, which is still leaving, must go: the Service leads to it, and a
    /// node that is lost would keep it.
    fn check_master(&mut self, pod: &Pod, seen: Seen, now: Instant) {
        let is_mine = self.is_my_pod(&seen);
        if !is_mine && self.config.master_uid.is_none() {
            return;
        }
        match seen.facts.state() {
            // The next master waits for one that leaves.
            _ if self.departure.is_some() => {}
            PodState::Waiting(_) | PodState::Running if !is_mine => {
                self.end = Some(End::Superseded);
            }
            PodState::Leaving(Ended::Deleted) if is_mine => {
                self.config.leaving.begin(seen.grace);
                self.departure = Some(Departure::new(seen.grace, now));
            }
            PodState::Leaving(_) if is_mine => self.end = Some(End::Superseded),
            PodState::Leaving(_) => {
                let name = pod.metadata.name.clone().unwrap_or_default();
                let pods = self.pods.clone();
                let call = pods.delete_named(name, seen.instance, seen.uid, Duration::ZERO);
                self.calls.spawn(call);
            }
            PodState::Waiting(_) | PodState::Running | PodState::Ended(_) => {}
        }
    }

    /// Follows the deletion of this master's pod.
    async fn check_departure(&mut self, now: Instant) {
        let Some(departure) = self.departure.as_mut().filter(|_| self.roster.is_listed()) else {
            return;
        };
        match departure.next(self.roster.n_left(), now) {
            Next::Wait => {}
            Next::Warn => self.report_all(vec![Report::MasterDeleted]).await,
            Next::Save(within) => {
                let within_ms = u64::try_from(within.as_millis()).unwrap_or(u64::MAX);
                self.report_all(vec![Report::AllDeleted { within_ms }]).await;
            }
            Next::Exit => self.end = Some(End::Superseded),
        }
    }

    fn is_my_pod(&self, seen: &Seen) -> bool {
        self.config.master_uid.as_ref() == Some(&seen.uid)
    }

    async fn watch_failed(&mut self, error: &watcher::Error) {
        let why = match error {
            watcher::Error::InitialListFailed(error)
            | watcher::Error::WatchStartFailed(error)
            | watcher::Error::WatchFailed(error) => wait_of(error),
            // The list that follows recovers from it.
            watcher::Error::WatchError(status) if status.code == 410 => return,
            watcher::Error::WatchError(status) => Wait::of_refusal(status.code, &status.message),
            watcher::Error::NoResourceVersion => Wait::Unreachable(error.to_string()),
        };
        self.troubled(why).await;
    }

    async fn troubled(&mut self, why: Wait) {
        if self.trouble.as_ref() != Some(&why) {
            tracing::warn!("{why}");
            self.trouble = Some(why.clone());
            self.report_all(vec![Report::Trouble(Some(why))]).await;
        }
    }

    fn tick(&mut self, now: Instant) {
        self.try_all(now);
        for (instance, uid) in self.roster.overdue(now) {
            self.delete(instance, uid, Duration::ZERO);
        }
        for due in self.undeleted.extract_if(.., |pod| pod.at <= now).collect::<Vec<_>>() {
            if self.roster.living(due.instance) == Some(&due.uid) {
                self.delete(due.instance, due.uid, due.grace);
            }
        }
        let late = self.dismissed.extract_if(.., |_, until| *until <= now);
        let late: BTreeSet<InstanceId> = late.map(|(id, _)| id).collect();
        for instance in late {
            self.stop(instance, Duration::ZERO);
        }
    }

    /// Reports while executing an order; the master reads as fast as it orders.
    fn report(&self, report: Report) {
        if self.reports.try_send(report).is_err() {
            tracing::warn!("the master is not reading platform reports");
        }
    }

    async fn report_all(&self, reports: Vec<Report>) {
        for report in reports {
            tracing::debug!(?report, "platform");
            // The master may be gone.
            let _ = self.reports.send(report).await;
        }
    }
}

fn seen(pod: &Pod) -> Option<Seen> {
    Some(Seen {
        instance: names::instance_of(&pod.metadata)?,
        uid: pod.metadata.uid.clone()?,
        facts: facts::of(pod),
        class: pod.spec.as_ref().and_then(|spec| spec.priority_class_name.clone()),
        grace: facts::grace(pod),
        started: facts::started(pod),
    })
}

async fn next_at<S: Stream + Unpin>(events: &mut S, at: tokio::time::Instant) -> Option<S::Item> {
    tokio::time::sleep_until(at).await;
    events.next().await
}

#[cfg(test)]
mod tests;
