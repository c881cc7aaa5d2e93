// SPDX-License-Identifier: Apache-2.0
//! Where the time went: every second of every worker and server belongs to exactly one [`TimeKind`].
//!
//! Processes measure themselves and report their totals regularly. Time that no process can measure
//! (one that is gone, one that starts) is counted here; the time of a spare is not. An account always
//! adds up to the rest of the time from its opening to now: reports only divide the time that has
//! passed on the master's clock, so different clocks cannot make seconds appear or vanish.

mod spent;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use self::spent::{Spent, TimeKind, nanos};
use crate::id::{Incarnation, WorkerId};
use crate::platform::{InstanceId, Role};
use crate::time::Time;

/// Silence up to this long before an end counts as the work before it; longer silence as down.
const SHORT_SILENCE: Duration = Duration::from_secs(2);
/// Losses that may wait for their replacement; older ones are forgotten.
const MAX_VACANCIES: usize = 10_000;

/// The time accounting of one job.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Goodput {
    #[serde(with = "spent::pairs")]
    accounts: BTreeMap<InstanceId, Account>,
    /// What those have spent that are gone for good.
    closed: BTreeMap<Role, Spent>,
    /// When workers were lost whose replacements have not been launched.
    #[serde(skip)]
    vacancies: VecDeque<Time>,
    trained: u64,
    repeated: u64,
    /// Records whose gradients were computed, repeated ones included.
    #[serde(default)]
    records: u64,
}

/// One worker or server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Account {
    spent: Spent,
    /// Everything up to here is in `spent`, except for `owed`.
    #[serde(skip)]
    at: Time,
    /// Time before `at` that is not in `spent`: it passed while no master ran.
    owed: Duration,
    presence: Presence,
    /// It replaces a lost one, and has not worked yet.
    is_mending: bool,
    /// It waits to replace another one: its time is not the job's.
    #[serde(default)]
    is_spare: bool,
    incarnation: Incarnation,
    reported: Spent,
    /// What it was doing at its last report.
    last: TimeKind,
    step: u64,
    /// Records that its process has trained, by its last report.
    #[serde(default)]
    records: u64,
    /// Batches that it finished since its last report, and those of them that were done before.
    n_finished: u64,
    n_repeated: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Presence {
    /// Its process is gone, and the next one is not started.
    Gone,
    Starting,
    Here,
}

/// What a process reports about its time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct TimeReport {
    /// Since the start of the process.
    pub spent: Spent,
    pub last: TimeKind,
    /// Under AllReduce, the job's step that it holds.
    pub step: u64,
    /// Records whose gradients it has computed.
    pub records: u64,
}

impl Goodput {
    /// A process is started: a server again, a worker for one that was lost, as one more or as a
    /// spare.
    pub fn launched(&mut self, instance: InstanceId, is_spare: bool, now: Time) {
        if let Some(account) = self.accounts.get_mut(&instance) {
            account.settle(now);
            account.presence = Presence::Starting;
            return;
        }
        let fills_place = instance.role == Role::Worker && !is_spare;
        let lost = if fills_place { self.vacancies.pop_front() } else { None };
        let mut account = Account::open(lost.unwrap_or(now));
        (account.is_mending, account.is_spare) = (lost.is_some(), is_spare);
        account.settle(now);
        account.presence = Presence::Starting;
        self.accounts.insert(instance, account);
    }

    /// Only these workers are spares. One that no longer is takes the place of one that was lost.
    pub fn set_spares(&mut self, spares: &BTreeSet<WorkerId>, now: Time) {
        let Self { accounts, vacancies, .. } = self;
        for (instance, account) in accounts.iter_mut().filter(|(id, _)| id.role == Role::Worker) {
            let is_spare = spares.contains(&WorkerId(instance.id));
            if is_spare == account.is_spare {
                continue;
            }
            account.settle(now);
            account.is_spare = is_spare;
            if !is_spare && let Some(lost) = vacancies.pop_front() {
                account.spent.add(TimeKind::Down, now.since(lost));
                account.is_mending = true;
            }
        }
    }

    /// A process connected: from now on it reports its time.
    pub fn connected(&mut self, instance: InstanceId, incarnation: Incarnation, now: Time) {
        let account = self.accounts.entry(instance).or_insert_with(|| Account::open(now));
        if account.incarnation != incarnation {
            account.settle(now);
            account.incarnation = incarnation;
            (account.reported, account.records) = (Spent::default(), 0);
            account.last = TimeKind::Idle;
        }
        account.presence = Presence::Here;
    }

    /// Takes the report of a process. `redo` are the steps that are trained again.
    pub fn report(
        &mut self,
        instance: InstanceId,
        incarnation: Incarnation,
        report: TimeReport,
        redo: &std::ops::Range<u64>,
        now: Time,
    ) {
        let Some(account) = self.accounts.get_mut(&instance) else { return };
        if account.incarnation == incarnation && account.presence == Presence::Here {
            self.records += report.records.saturating_sub(account.records);
            account.report(report, redo, now);
        }
    }

    /// A batch was finished by this worker; `is_repeated` if it had been finished before.
    pub fn finished(&mut self, worker: InstanceId, is_repeated: bool) {
        self.trained += 1;
        self.repeated += u64::from(is_repeated);
        if let Some(account) = self.accounts.get_mut(&worker) {
            account.n_finished += 1;
            account.n_repeated += u64::from(is_repeated);
        }
    }

    /// Work that was finished without a report to this master.
    pub fn found(&mut self, n_batches: u64) {
        self.trained += n_batches;
    }

    /// Finished steps that were lost; all workers repeat them.
    pub fn lost_work(&mut self, n_steps: u64) {
        self.trained += n_steps;
        self.repeated += n_steps;
    }

    /// A process that will be replaced is gone.
    pub fn lost(&mut self, instance: InstanceId, now: Time) {
        let Some(account) = self.accounts.get_mut(&instance) else { return };
        account.end(now);
        account.is_mending = true;
        let has_place = !account.is_spare;
        if instance.role == Role::Worker {
            self.close(instance);
            self.vacancies.extend(has_place.then_some(now));
            self.vacancies.truncate(MAX_VACANCIES);
        }
    }

    /// A process is gone, as intended.
    pub fn left(&mut self, instance: InstanceId, now: Time) {
        if let Some(account) = self.accounts.get_mut(&instance) {
            account.end(now);
            self.close(instance);
        }
    }

    /// No more than `n` workers are missing: others will not be replaced.
    pub fn expect(&mut self, n: usize) {
        self.vacancies.truncate(n);
    }

    fn close(&mut self, instance: InstanceId) {
        if let Some(account) = self.accounts.remove(&instance) {
            *self.closed.entry(instance.role).or_default() += account.spent;
        }
    }

    /// The processes with an open account.
    pub fn instances(&self) -> impl Iterator<Item = InstanceId> + '_ {
        self.accounts.keys().copied()
    }

    /// What one instance has spent up to now.
    #[must_use]
    pub fn spent(&self, instance: InstanceId, now: Time) -> Spent {
        self.accounts.get(&instance).map(|account| account.up_to(now)).unwrap_or_default()
    }

    /// What all instances of a role have spent up to now, those that are gone as well.
    #[must_use]
    pub fn total(&self, role: Role, now: Time) -> Spent {
        let mut total = self.closed.get(&role).copied().unwrap_or_default();
        for (_, account) in self.accounts.iter().filter(|(id, _)| id.role == role) {
            total += account.up_to(now);
        }
        if role == Role::Worker {
            for lost in &self.vacancies {
                total.add(TimeKind::Down, now.since(*lost));
            }
        }
        total
    }

    /// Batches (under AllReduce: steps) trained in all.
    #[must_use]
    pub fn trained(&self) -> u64 {
        self.trained
    }

    /// Those of them that had been trained before.
    #[must_use]
    pub fn repeated(&self) -> u64 {
        self.repeated
    }

    /// Records whose gradients were computed, repeated ones included. What a process computed after
    /// its last report before it failed is missing.
    #[must_use]
    pub fn records(&self) -> u64 {
        self.records
    }

    /// The accounting in the form that the next master of the job continues.
    #[must_use]
    pub fn saved(&self, now: Time) -> Self {
        let mut saved = self.clone();
        for lost in std::mem::take(&mut saved.vacancies) {
            saved.closed.entry(Role::Worker).or_default().add(TimeKind::Down, now.since(lost));
        }
        for account in saved.accounts.values_mut() {
            account.owed += now.since(account.at);
            account.at = now;
        }
        saved
    }

    /// Continues the accounting of an earlier master, which was saved `gap` ago.
    #[must_use]
    pub fn resumed(mut self, gap: Duration, now: Time) -> Self {
        // What counts of the rest is found where the parameters are.
        self.trained = self.repeated;
        for account in self.accounts.values_mut() {
            account.owed += gap;
            account.at = now;
        }
        self
    }

    /// All processes are gone: a job that is resumed has new ones.
    #[must_use]
    pub fn all_gone(mut self) -> Self {
        for instance in self.instances().collect::<Vec<_>>() {
            self.close(instance);
        }
        self
    }
}

impl Account {
    fn open(at: Time) -> Self {
        Self {
            spent: Spent::default(),
            at,
            owed: Duration::ZERO,
            presence: Presence::Gone,
            is_mending: false,
            is_spare: false,
            incarnation: Incarnation(0),
            reported: Spent::default(),
            last: TimeKind::Idle,
            step: 0,
            records: 0,
            n_finished: 0,
            n_repeated: 0,
        }
    }

    fn pending(&self, now: Time) -> Duration {
        self.owed + now.since(self.at)
    }

    /// The kind of time that is not measured.
    fn unmeasured(&self) -> TimeKind {
        match self.presence {
            Presence::Gone => TimeKind::Down,
            Presence::Starting if self.is_mending => TimeKind::Heal,
            Presence::Here if self.is_mending && self.last == TimeKind::Idle => TimeKind::Heal,
            Presence::Starting => TimeKind::Idle,
            Presence::Here => self.last,
        }
    }

    /// Accounts the time that has passed without a report.
    fn settle(&mut self, now: Time) {
        self.spent = self.up_to(now);
        (self.at, self.owed) = (self.at.max(now), Duration::ZERO);
    }

    fn up_to(&self, now: Time) -> Spent {
        let mut spent = self.spent;
        if !self.is_spare {
            spent.add(self.unmeasured(), self.pending(now));
        }
        spent
    }

    fn report(&mut self, report: TimeReport, redo: &std::ops::Range<u64>, now: Time) {
        let share = report.spent.since(&self.reported);
        let mut share = share.scaled_to(self.pending(now)).unwrap_or_else(|| {
            let mut all = Spent::default();
            all.add(self.unmeasured(), self.pending(now));
            all
        });
        let works = share.get(TimeKind::Compute) > Duration::ZERO;
        if self.is_mending {
            share.shift(TimeKind::Idle, TimeKind::Heal, 1, 1);
            self.is_mending = !works;
        }
        let steps = report.step.saturating_sub(self.step);
        let again = redo.end.min(report.step).saturating_sub(redo.start.max(self.step));
        share.shift(
            TimeKind::Compute,
            TimeKind::Redo,
            self.n_repeated + again.min(steps),
            self.n_finished + steps,
        );
        if !self.is_spare {
            self.spent += share;
        }
        (self.at, self.owed) = (self.at.max(now), Duration::ZERO);
        (self.reported, self.last, self.step) = (report.spent, report.last, report.step);
        self.records = report.records;
        (self.n_finished, self.n_repeated) = (0, 0);
    }

    fn end(&mut self, now: Time) {
        if self.presence == Presence::Here && self.pending(now) > SHORT_SILENCE {
            self.presence = Presence::Gone;
        }
        self.settle(now);
        self.presence = Presence::Gone;
    }
}

#[cfg(test)]
mod tests;
