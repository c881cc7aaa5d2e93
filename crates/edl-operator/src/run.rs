// SPDX-License-Identifier: Apache-2.0
//! The operator as a process: watches, one leader, and a round whenever something has changed, at
//! most one a second. A round is look, plan, do; nothing is decided here.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use edl_core::error::chain;
use edl_core::time::Time;
use edl_sched::plan::Plan;
use edl_sched::state::{Options, State};
use futures::StreamExt as _;
use futures::future::{BoxFuture, LocalBoxFuture};
use k8s_openapi::jiff::Timestamp;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config as KubeConfig};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::act::{self, Action, Deed};
use crate::apply::{Hands, NewKey, Promise};
use crate::inquiry::Inquiry;
use crate::metrics::Metrics;
use crate::observe::{self, Memory, Observed, Seen};
use crate::overview::Look;
use crate::watch::Watches;
use crate::window::Window;
use crate::{explain, http, lease};

/// Changes that come together are one round.
const DEBOUNCE: Duration = Duration::from_millis(100);
/// Rounds are not closer together than this.
const ROUND_GAP: Duration = Duration::from_secs(1);
/// Some of what a plan looks at is time itself.
const IDLE_GAP: Duration = Duration::from_secs(5);
/// A watch that does not show our own changes by then is planned with as it is.
const PROMISE_LIMIT: Duration = Duration::from_secs(5);
/// Jobs that are acted on at the same time.
const MAX_AT_ONCE: usize = 8;
/// An API server that lives answers much quicker.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// How long tasks may take to end.
const GRACE: Duration = Duration::from_secs(10);

/// What an operator is told.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where its Lease and the queues are.
    pub namespace: String,
    pub options: Options,
    /// Masters are started by somebody else, outside the cluster.
    pub masters_outside: bool,
    pub new_key: NewKey,
    /// Its name among several operators.
    pub identity: String,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("no cluster found: {0}")]
    NoCluster(String),
    #[error(transparent)]
    Call(#[from] crate::apply::Error),
}

/// The cluster of a kubeconfig; without one, the cluster around this process or the usual file's.
pub fn connect<'a>(kubeconfig: Option<&'a Path>) -> BoxFuture<'a, Result<Client, Error>> {
    Box::pin(async move {
        // What reads configurations names each cause in its own sentence.
        let none = |error: &dyn std::error::Error| Error::NoCluster(error.to_string());
        let mut config = match kubeconfig {
            Some(path) => {
                let file = Kubeconfig::read_from(path).map_err(|error| none(&error))?;
                let options = KubeConfigOptions::default();
                let read = KubeConfig::from_custom_kubeconfig(file, &options).await;
                read.map_err(|error| none(&error))?
            }
            None if std::env::var_os("KUBERNETES_SERVICE_HOST").is_some() => {
                KubeConfig::incluster().map_err(|error| none(&error))?
            }
            None => {
                let read = KubeConfig::from_kubeconfig(&KubeConfigOptions::default()).await;
                read.map_err(|error| none(&error))?
            }
        };
        config.connect_timeout = Some(CONNECT_TIMEOUT);
        Client::try_from(config).map_err(|error| none(&error))
    })
}

/// Runs until `shutdown`; `listener` serves the page, `/metrics` and `/healthz`. Jobs go on without
/// it.
pub fn run(
    client: Client,
    config: Config,
    listener: TcpListener,
    shutdown: CancellationToken,
) -> LocalBoxFuture<'static, ()> {
    Box::pin(async move {
        let mut tasks = JoinSet::new();
        let watches = Watches::start(&client, &config.namespace, &mut tasks);
        let (metrics, window) = (Metrics::new(), Window::default());
        let mut ending = JoinSet::new();
        let router = http::router(metrics.clone(), window.clone());
        ending.spawn(http::serve(listener, router, shutdown.clone()));
        let (leads, led) = watch::channel(false);
        let (namespace, me) = (config.namespace.clone(), config.identity.clone());
        ending.spawn(lease::hold(client.clone(), namespace, me, leads, shutdown.clone()));
        let hands = Hands {
            client,
            masters_outside: config.masters_outside,
            new_key: config.new_key,
            identity: config.identity,
        };
        let state = State::new(config.options);
        let operator = Operator { watches, hands, led, metrics, window, promises: Vec::new() };
        tokio::select! {
            () = shutdown.cancelled() => {}
            () = operator.rounds(Mind { memory: Memory::default(), state }) => {}
        }
        let ended = async { while ending.join_next().await.is_some() {} };
        if tokio::time::timeout(GRACE, ended).await.is_err() {
            tracing::warn!("operator is exiting before all its tasks have finished");
        }
    })
}

struct Operator {
    watches: Watches,
    hands: Hands,
    led: watch::Receiver<bool>,
    metrics: Metrics,
    window: Window,
    /// What the watches must show before the next plan.
    promises: Vec<Promise>,
}

/// What is remembered from one round to the next.
struct Mind {
    memory: Memory,
    state: State,
}

impl Operator {
    async fn rounds(mut self, mut mind: Mind) {
        self.watches.ready().await;
        loop {
            let leads = *self.led.borrow_and_update();
            self.metrics.led(leads);
            self.window.leads(leads);
            if leads {
                let began = Instant::now();
                mind = self.round(mind).await;
                self.metrics.took(began.elapsed());
                tokio::time::sleep(ROUND_GAP.saturating_sub(began.elapsed())).await;
            }
            tokio::select! {
                () = self.watches.changed.notified() => tokio::time::sleep(DEBOUNCE).await,
                changed = self.led.changed() => if changed.is_err() { return },
                () = tokio::time::sleep(IDLE_GAP) => {}
            }
        }
    }

    async fn round(&mut self, mind: Mind) -> Mind {
        self.keep_promises().await;
        let seen = self.watches.seen(self.hands.masters_outside);
        if let Some(trouble) = &seen.queues.trouble {
            tracing::warn!("{trouble}");
        }
        // A plan for a large cluster takes tens of milliseconds.
        let kept = (mind.memory.clone(), mind.state.clone());
        let planned = tokio::task::spawn_blocking(move || plan(&seen, mind)).await;
        let Ok(Planned { observed, plan, inquiry, mut mind }) = planned else {
            // The panic has been printed; the next round starts from what was known before.
            return Mind { memory: kept.0, state: kept.1 };
        };
        tracing::info!("{inquiry}");
        let actions = act::actions(&observed, &plan, Timestamp::now());
        self.metrics.round(&observed, &plan, &actions);
        mind.state = plan.state.clone();
        self.window.show(Look::new(observed, plan, &actions));
        self.perform(&actions).await;
        mind
    }

    /// Waits until the watches show what the last round has done: a plan made before would do it
    /// again, or undo it.
    async fn keep_promises(&mut self) {
        let deadline = Instant::now() + PROMISE_LIMIT;
        loop {
            self.promises.retain(|promise| !self.watches.shows(promise));
            if self.promises.is_empty() || Instant::now() >= deadline {
                break;
            }
            tokio::time::sleep(DEBOUNCE).await;
        }
        self.promises.clear();
    }

    /// Performs the actions of different jobs side by side, those of one job in order. What fails
    /// is tried again in the next round, because the cluster still differs from the plan.
    async fn perform(&mut self, actions: &[Action]) {
        let jobs: BTreeSet<(&str, &str)> = actions.iter().map(key).collect();
        let (hands, led, metrics) = (&self.hands, &self.led, &self.metrics);
        let each = jobs.into_iter().map(|job| async move {
            let mut promises = Vec::new();
            for action in actions.iter().filter(|action| key(action) == job) {
                // Another operator may act now.
                if !*led.borrow() {
                    break;
                }
                if let Deed::Tell(told) = &action.deed {
                    tracing::info!(
                        job = job.1,
                        namespace = job.0,
                        "{}: {}",
                        told.reason,
                        told.note
                    );
                }
                match hands.perform(action).await {
                    Ok(promise) => promises.extend(promise),
                    Err(error) => {
                        metrics.failed();
                        tracing::warn!(job = job.1, namespace = job.0, "{}", chain(&error));
                        break;
                    }
                }
            }
            promises
        });
        let promises: Vec<Vec<Promise>> =
            futures::stream::iter(each).buffer_unordered(MAX_AT_ONCE).collect().await;
        self.promises = promises.into_iter().flatten().collect();
    }
}

fn key(action: &Action) -> (&str, &str) {
    (&action.job.namespace, &action.job.name)
}

struct Planned {
    observed: Observed,
    plan: Plan,
    inquiry: Inquiry,
    mind: Mind,
}

fn plan(seen: &Seen, mut mind: Mind) -> Planned {
    let now = now();
    let observed = observe::observe(seen, &mut mind.memory, now);
    let plan = edl_sched::plan(&observed.snapshot, &mind.state, now);
    let inquiry = Inquiry::new(&seen.nodes, &seen.pods);
    Planned { observed, plan, inquiry, mind }
}

fn now() -> Time {
    Time::since_origin(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default())
}

/// What the operator would do now, and why: of all jobs as a table, or of one in sentences. None
/// if there is no such job.
pub fn told<'a>(
    client: &'a Client,
    namespace: &'a str,
    options: Options,
    job: Option<&'a str>,
) -> BoxFuture<'a, Result<Option<String>, Error>> {
    Box::pin(async move {
        let seen = crate::watch::look(client, namespace).await?;
        let mind = Mind { memory: Memory::default(), state: State::new(options) };
        let Planned { observed, plan, .. } = plan(&seen, mind);
        Ok(match job {
            Some(job) => explain::job(&observed, &plan, job),
            None => Some(explain::table(&observed, &plan)),
        })
    })
}
