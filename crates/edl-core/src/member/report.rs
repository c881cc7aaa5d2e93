// SPDX-License-Identifier: Apache-2.0
//! What is reported to the master, and when: not every step, but the last one before every wait;
//! and again after a stream broke.

use std::time::Duration;

use super::{Activity, Doing, Effect, Member};
use crate::id::WorldId;
use crate::job::MemberReport;
use crate::time::Time;
use crate::worker::Report;

/// Steps are not reported more often than this, except for those that the master waits for.
const REPORT_EVERY: Duration = Duration::from_millis(20);
/// All members but the first report less often the more they are: about 4,000 times per second
/// together. What they report in between is that they are alive.
const PER_MEMBER: Duration = Duration::from_micros(250);
const MAX_REPORT_EVERY: Duration = Duration::from_millis(250);
/// Reported instead of a hash that is no longer known.
const NO_HASH: u64 = 0;

/// What was reported, and what was not.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Reports {
    unreported: Option<Stepped>,
    /// The gradient of the last step is still there, to be hashed. Only steps that are reported
    /// need a hash.
    has_gradient: bool,
    reported_at: Option<Time>,
    /// The last reports about a world and about a step, for a master that may have missed them.
    last_news: Option<MemberReport>,
    last_step: Option<Stepped>,
    /// A master has missed something.
    is_repeated: bool,
}

/// A step that this worker has trained.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Stepped {
    world: WorldId,
    step: u64,
    hash: u64,
    loss: f32,
}

impl Reports {
    /// The worker holds the state after `step`, and the gradient that led to it.
    pub(super) fn stepped(&mut self, world: WorldId, step: u64, loss: f32) {
        self.unreported = Some(Stepped { world, step, hash: NO_HASH, loss });
        self.has_gradient = true;
    }

    /// The gradient of the last step is overwritten from now on.
    pub(super) fn overwrite(&mut self) {
        self.has_gradient = false;
    }

    pub(super) fn hashed(&mut self, hash: u64) {
        self.has_gradient = false;
        if let Some(stepped) = &mut self.unreported {
            stepped.hash = hash;
        }
    }

    /// The world that the last news was about is left for a later one, whose master needs no news
    /// of it.
    pub(super) fn forget_news(&mut self) {
        self.last_news = None;
    }

    /// Whether the last step must be reported before anything else; a worker that keeps training
    /// is `quiet` for a while.
    pub(super) fn is_due(&self, is_quiet: bool, every: Duration, now: Time) -> bool {
        let is_late = |at: Time| now.since(at) >= every;
        self.unreported.is_some()
            && (!is_quiet || self.is_repeated || self.reported_at.is_none_or(is_late))
    }
}

impl Member {
    /// How often this worker reports steps while it keeps training. The master learns from the
    /// first member how far all of them are, and from the others that they agree.
    pub(super) fn report_every(&self) -> Duration {
        let members = self.world.as_ref().map_or(&[][..], |world| &world.world.members);
        if members.first().is_none_or(|first| first.worker == self.config.worker) {
            return REPORT_EVERY;
        }
        let n_members = u32::try_from(members.len()).unwrap_or(u32::MAX);
        PER_MEMBER.saturating_mul(n_members).clamp(REPORT_EVERY, MAX_REPORT_EVERY)
    }

    /// Reports the last step, with its hash if the gradient is still there.
    pub(super) fn report_step(&mut self, now: Time) -> bool {
        if self.reports.has_gradient {
            self.start(Doing::Hashing, Activity::Hash);
            return false;
        }
        self.flush(now);
        true
    }

    /// Reports the last step, unless it was reported.
    pub(super) fn flush(&mut self, now: Time) {
        self.reports.is_repeated = false;
        if let Some(stepped) = self.reports.unreported.take() {
            self.reports.last_step = Some(stepped);
            self.reports.reported_at = Some(now);
            self.report_stepped(stepped);
        }
    }

    fn report_stepped(&mut self, stepped: Stepped) {
        let Stepped { world, step, hash, loss } = stepped;
        self.report(Report::Member(MemberReport::Stepped { world, step, hash, loss }));
    }

    /// Reports how this worker stands to its world.
    pub(super) fn report_news(&mut self, news: MemberReport) {
        self.reports.last_news = Some(news.clone());
        self.report(Report::Member(news));
    }

    pub(super) fn report(&mut self, report: Report) {
        self.effects.push(Effect::Report(report));
    }

    /// Repeats what may have been lost with a stream, and forgets what was taken back.
    pub(super) fn rejoined(&mut self, now: Time) {
        self.drop_shards();
        self.announce();
        if self.exit_by.is_some() {
            self.report(Report::Leaving);
        }
        if let Some(news) = self.reports.last_news.clone() {
            self.report(Report::Member(news));
        }
        match (self.reports.unreported, self.reports.last_step) {
            (Some(_), _) => self.reports.is_repeated = true,
            (None, Some(stepped)) => {
                self.reports.reported_at = Some(now);
                self.report_stepped(stepped);
            }
            (None, None) => {}
        }
    }
}
