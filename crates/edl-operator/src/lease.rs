// SPDX-License-Identifier: Apache-2.0
//! Leader election: only the holder of the Lease `training-job-controller` acts.
//!
//! Clocks of different machines are never compared. A lease has expired when its record has not
//! changed for its whole duration by the local clock.

use std::time::{Duration, Instant};

use edl_core::error::chain;
use edl_core::time::Time;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use k8s_openapi::jiff::Timestamp;
use kube::api::PostParams;
use kube::{Api, Client};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::apply::{Error, is_code, within};
use crate::health::Health;

/// The Lease, and the Deployment that holds it.
pub const NAME: &str = "training-job-controller";
const DURATION: Duration = Duration::from_secs(15);
const RENEW_EVERY: Duration = Duration::from_secs(5);
/// A leader that could not renew for this long stops acting, well before another can start.
const GIVE_UP_AFTER: Duration = Duration::from_secs(10);

/// What a candidate knows about the lease.
#[derive(Clone, Debug)]
struct Election {
    me: String,
    /// The last record, and when it was first seen.
    seen: Option<(LeaseSpec, Time)>,
}

/// What a candidate does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    /// It holds the lease, or the lease is free.
    Write,
    /// Another candidate holds it.
    Wait,
}

impl Election {
    fn new(me: &str) -> Self {
        Self { me: me.into(), seen: None }
    }

    fn step(&mut self, lease: Option<&LeaseSpec>, now: Time) -> Step {
        let Some(lease) = lease else { return Step::Write };
        let holder = lease.holder_identity.as_deref().unwrap_or_default();
        if holder.is_empty() || holder == self.me {
            return Step::Write;
        }
        let since = match &self.seen {
            Some((seen, since)) if seen == lease => *since,
            Some(_) | None => {
                self.seen = Some((lease.clone(), now));
                now
            }
        };
        let length = lease.lease_duration_seconds.and_then(|secs| u64::try_from(secs).ok());
        let length = length.map_or(DURATION, Duration::from_secs);
        if now.since(since) >= length { Step::Write } else { Step::Wait }
    }

    /// The record that claims the lease from `now` on.
    fn record(&self, before: Option<&LeaseSpec>, now: Timestamp) -> LeaseSpec {
        let is_mine = before.is_some_and(|it| it.holder_identity.as_ref() == Some(&self.me));
        let turns = before.and_then(|it| it.lease_transitions).unwrap_or(0);
        let acquired = before.filter(|_| is_mine).and_then(|it| it.acquire_time.clone());
        LeaseSpec {
            holder_identity: Some(self.me.clone()),
            lease_duration_seconds: i32::try_from(DURATION.as_secs()).ok(),
            lease_transitions: Some(turns + i32::from(before.is_some() && !is_mine)),
            acquire_time: Some(acquired.unwrap_or(MicroTime(now))),
            renew_time: Some(MicroTime(now)),
            ..LeaseSpec::default()
        }
    }
}

/// Holds the lease whenever possible, until `shutdown`; `leads` is whether it does. At the end, and
/// while the operator is stuck, the lease is released, so the next leader need not wait for it to
/// expire.
pub async fn hold(
    client: Client,
    namespace: String,
    me: String,
    leads: watch::Sender<bool>,
    health: Health,
    shutdown: CancellationToken,
) {
    let api: Api<Lease> = Api::namespaced(client, &namespace);
    let started = Instant::now();
    let mut election = Election::new(&me);
    let mut renewed: Option<Instant> = None;
    let mut stuck = health.watch();
    while !shutdown.is_cancelled() {
        if *stuck.borrow_and_update() {
            renewed = None;
            give_back(&api, &me, &leads).await;
        } else {
            match attempt(&api, &mut election, Time::since_origin(started.elapsed())).await {
                Ok(true) => renewed = Some(Instant::now()),
                Ok(false) => renewed = None,
                Err(error) => tracing::warn!("{}", chain(&error)),
            }
        }
        let is_leader = renewed.is_some_and(|at| at.elapsed() < GIVE_UP_AFTER);
        if leads.send_replace(is_leader) != is_leader {
            tracing::info!(me, "{}", if is_leader { "leading" } else { "standing by" });
        }
        tokio::select! {
            () = shutdown.cancelled() => {}
            _ = stuck.changed() => {}
            () = tokio::time::sleep(RENEW_EVERY) => {}
        }
    }
    give_back(&api, &me, &leads).await;
}

/// Stops leading, and releases the lease.
async fn give_back(api: &Api<Lease>, me: &str, leads: &watch::Sender<bool>) {
    if leads.send_replace(false)
        && let Err(error) = release(api, me).await
    {
        tracing::warn!("{}", chain(&error));
    }
}

/// Reads the lease and writes it if allowed; returns whether it is held now.
async fn attempt(api: &Api<Lease>, election: &mut Election, now: Time) -> Result<bool, Error> {
    let what = || format!("lease `{NAME}`");
    let found = within("read", what(), api.get_opt(NAME)).await?;
    let before = found.as_ref().and_then(|lease| lease.spec.clone());
    if election.step(before.as_ref(), now) == Step::Wait {
        return Ok(false);
    }
    let spec = Some(election.record(before.as_ref(), Timestamp::now()));
    let params = PostParams::default();
    let written = match found {
        // The write has the version that was read, so it fails if another candidate was faster.
        Some(lease) => {
            let lease = Lease { spec, ..lease };
            within("write", what(), api.replace(NAME, &params, &lease)).await
        }
        None => {
            let metadata = ObjectMeta { name: Some(NAME.into()), ..ObjectMeta::default() };
            within("create", what(), api.create(&params, &Lease { metadata, spec })).await
        }
    };
    match written {
        Ok(_) => Ok(true),
        Err(Error::Call { source, .. }) if is_code(&source, &[409]) => Ok(false),
        Err(error) => Err(error),
    }
}

async fn release(api: &Api<Lease>, me: &str) -> Result<(), Error> {
    let what = || format!("lease `{NAME}`");
    let Some(mut lease) = within("read", what(), api.get_opt(NAME)).await? else { return Ok(()) };
    let Some(spec) = lease.spec.as_mut() else { return Ok(()) };
    if spec.holder_identity.as_deref() != Some(me) {
        return Ok(());
    }
    spec.holder_identity = Some(String::new());
    let params = PostParams::default();
    within("release", what(), api.replace(NAME, &params, &lease)).await.map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::fake_api::FakeApi;

    fn at(secs: u64) -> Time {
        Time::since_origin(Duration::from_secs(secs))
    }

    fn held(by: &str, version: i64) -> LeaseSpec {
        LeaseSpec {
            holder_identity: Some(by.into()),
            lease_duration_seconds: Some(15),
            renew_time: Timestamp::from_second(version).ok().map(MicroTime),
            ..LeaseSpec::default()
        }
    }

    #[test]
    fn an_expired_lease_is_taken_over() {
        let mut me = Election::new("me");
        assert_eq!(me.step(None, at(0)), Step::Write);
        assert_eq!(me.step(Some(&held("me", 1)), at(0)), Step::Write);
        assert_eq!(me.step(Some(&held("", 1)), at(0)), Step::Write);
        assert_eq!(me.step(Some(&held("you", 1)), at(100)), Step::Wait, "seen for the first time");
        assert_eq!(me.step(Some(&held("you", 1)), at(114)), Step::Wait);
        assert_eq!(me.step(Some(&held("you", 2)), at(115)), Step::Wait, "it was renewed");
        assert_eq!(me.step(Some(&held("you", 2)), at(129)), Step::Wait);
        assert_eq!(me.step(Some(&held("you", 2)), at(130)), Step::Write);
    }

    #[tokio::test]
    async fn one_of_two_holds_the_lease_until_it_gives_it_back() {
        let api = FakeApi::default();
        let leases: Api<Lease> = Api::namespaced(api.client(), "n");
        let (mut me, mut you) = (Election::new("me"), Election::new("you"));
        assert!(attempt(&leases, &mut me, at(0)).await.unwrap());
        assert!(!attempt(&leases, &mut you, at(1)).await.unwrap());
        assert!(attempt(&leases, &mut me, at(5)).await.unwrap());
        assert!(!attempt(&leases, &mut you, at(6)).await.unwrap(), "it was renewed");
        release(&leases, "you").await.unwrap();
        assert!(!attempt(&leases, &mut you, at(7)).await.unwrap(), "it is not theirs to give");
        release(&leases, "me").await.unwrap();
        assert!(attempt(&leases, &mut you, at(8)).await.unwrap());
        api.refuse(409, "the object has been modified");
        assert!(attempt(&leases, &mut me, at(9)).await.is_err(), "not even readable");
    }

    #[tokio::test]
    async fn an_operator_that_is_stuck_gives_its_lease_to_another() {
        let api = FakeApi::default();
        let (health, shutdown) = (Health::default(), CancellationToken::new());
        let (leads, mut led) = watch::channel(false);
        let holding =
            hold(api.client(), "n".into(), "me".into(), leads, health.clone(), shutdown.clone());
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let judge = async {
            led.wait_for(|leads| *leads).await.unwrap();
            let planning = health.within(Duration::ZERO, move || ended.recv());
            let other = async {
                led.wait_for(|leads| !*leads).await.unwrap();
                let leases: Api<Lease> = Api::namespaced(api.client(), "n");
                let mut you = Election::new("you");
                while !attempt(&leases, &mut you, at(0)).await.unwrap() {}
                drop(end);
            };
            tokio::join!(planning, other);
            shutdown.cancel();
        };
        tokio::join!(holding, judge);
    }

    #[test]
    fn a_record_counts_how_often_the_lease_changed_hands() {
        let me = Election::new("me");
        let now = Timestamp::from_second(50).unwrap();
        let first = me.record(None, now);
        assert_eq!((first.lease_transitions, first.lease_duration_seconds), (Some(0), Some(15)));
        let taken = me.record(Some(&held("you", 1)), now);
        assert_eq!(taken.lease_transitions, Some(1));
        let later = me.record(Some(&taken), Timestamp::from_second(60).unwrap());
        assert_eq!((later.lease_transitions, &later.acquire_time), (Some(1), &taken.acquire_time));
    }
}
