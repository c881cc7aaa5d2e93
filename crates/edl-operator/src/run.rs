// SPDX-License-Identifier: Apache-2.0
//! The operator as a process: watches, leader election, and a reconcile pass after every change, at
//! most one per second. A pass observes, plans and acts; nothing is decided here.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use edl_core::error::chain;
use edl_core::time::Time;
use edl_kube::names;
use edl_page::http::Hosts;
use edl_sched::plan::AllocationPlan;
use edl_sched::state::{Options, PlannerState};
use futures::StreamExt as _;
use futures::future::{BoxFuture, LocalBoxFuture};
use k8s_openapi::jiff::Timestamp;
use kube::Client;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::act::{self, Action, JobAction};
use crate::apply::{Executor, NewKey, Promise};
use crate::health::Health;
use crate::inquiry::Inquiry;
use crate::metrics::Metrics;
use crate::observe::{self, ClusterObjects, Memory, Observed};
use crate::overview::Pass;
use crate::page_data::PageData;
use crate::watch::Watches;
use crate::{explain, http, lease};

/// Changes within this time are handled in one pass.
const DEBOUNCE: Duration = Duration::from_millis(100);
/// The least time between two passes.
const PASS_GAP: Duration = Duration::from_secs(1);
/// The most time between two passes: plans also depend on time.
const IDLE_GAP: Duration = Duration::from_secs(5);
/// How long to wait until the watches show the operator's own changes.
const PROMISE_LIMIT: Duration = Duration::from_secs(5);
/// A plan for the largest cluster takes well under a second; one that takes longer than this would
/// describe a cluster that has changed.
const PLAN_LIMIT: Duration = Duration::from_secs(30);
/// Jobs whose actions are performed at the same time.
const MAX_AT_ONCE: usize = 8;
/// How long tasks may take to stop.
const GRACE: Duration = Duration::from_secs(10);

/// The operator's settings.
#[derive(Clone, Debug)]
pub struct Config {
    /// The namespace of its Lease and of the queues.
    pub namespace: String,
    pub options: Options,
    /// Masters are started outside the cluster, not by the operator.
    pub masters_outside: bool,
    pub new_key: NewKey,
    /// Its name in the leader election.
    pub identity: String,
    /// Further host names of its web page.
    pub http_hosts: Vec<String>,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("no cluster found: {0}")]
    NoCluster(String),
    #[error(transparent)]
    Call(#[from] crate::apply::Error),
}

/// Connects to the cluster of a kubeconfig; without one, as [`edl_kube::client::config`] finds it.
pub fn connect<'a>(kubeconfig: Option<&'a Path>) -> BoxFuture<'a, Result<Client, Error>> {
    Box::pin(async move {
        let connected = async {
            let config = edl_kube::client::config(kubeconfig, false).await?;
            Ok::<_, Box<dyn std::error::Error + Send + Sync>>(Client::try_from(config)?)
        };
        connected.await.map_err(|error| Error::NoCluster(error.to_string()))
    })
}

/// Runs until `shutdown`; `listener` serves the page, `/metrics` and `/healthz`. Jobs keep running
/// without it.
pub fn run(
    client: Client,
    config: Config,
    listener: TcpListener,
    shutdown: CancellationToken,
) -> LocalBoxFuture<'static, ()> {
    Box::pin(async move {
        let mut tasks = JoinSet::new();
        let watches = Watches::start(&client, &config.namespace, &mut tasks);
        let (metrics, page_data) = (Metrics::new(), PageData::default());
        let health = Health::default();
        let mut ending = JoinSet::new();
        let router = http::router(metrics.clone(), page_data.clone(), health.clone());
        let hosts = names::hosts(lease::NAME, &config.namespace).into_iter();
        let hosts = Hosts::new(hosts.chain(config.http_hosts));
        ending.spawn(edl_page::http::serve(listener, router, hosts, shutdown.clone()));
        let (leads, led) = watch::channel(false);
        let (namespace, me) = (config.namespace.clone(), config.identity.clone());
        let (client_of_lease, until) = (client.clone(), shutdown.clone());
        ending.spawn(lease::hold(client_of_lease, namespace, me, leads, health.clone(), until));
        let executor = Executor {
            client,
            masters_outside: config.masters_outside,
            new_key: config.new_key,
            identity: config.identity,
        };
        let memory = OperatorMemory::new(config.options);
        let operator =
            Operator { watches, executor, led, metrics, page_data, health, promises: Vec::new() };
        tokio::select! {
            () = shutdown.cancelled() => {}
            () = operator.run(memory) => {}
        }
        let ended = async { while ending.join_next().await.is_some() {} };
        if tokio::time::timeout(GRACE, ended).await.is_err() {
            tracing::warn!("operator is exiting before all its tasks have finished");
        }
    })
}

struct Operator {
    watches: Watches,
    executor: Executor,
    led: watch::Receiver<bool>,
    metrics: Metrics,
    page_data: PageData,
    health: Health,
    /// What the watches must show before the next plan.
    promises: Vec<Promise>,
}

/// What is remembered from one pass to the next.
struct OperatorMemory {
    observer: Memory,
    planner: PlannerState,
}

impl OperatorMemory {
    fn new(options: Options) -> Self {
        Self { observer: Memory::default(), planner: PlannerState::new(options) }
    }
}

impl Operator {
    async fn run(mut self, mut memory: OperatorMemory) {
        self.watches.ready().await;
        loop {
            let leads = *self.led.borrow_and_update();
            self.metrics.led(leads);
            self.page_data.leads(leads);
            if leads {
                let began = Instant::now();
                memory = self.reconcile(memory).await;
                self.metrics.took(began.elapsed());
                tokio::time::sleep(PASS_GAP.saturating_sub(began.elapsed())).await;
            }
            tokio::select! {
                () = self.watches.changed.notified() => tokio::time::sleep(DEBOUNCE).await,
                changed = self.led.changed() => if changed.is_err() { return },
                () = tokio::time::sleep(IDLE_GAP) => {}
            }
        }
    }

    async fn reconcile(&mut self, memory: OperatorMemory) -> OperatorMemory {
        self.keep_promises().await;
        let objects = self.watches.objects(self.executor.masters_outside);
        if let Some(trouble) = objects.trouble() {
            tracing::warn!("{trouble}");
        }
        // A plan for a large cluster takes tens of milliseconds.
        let (observer, planner) = (memory.observer.clone(), memory.planner.clone());
        let planned = self.health.within(PLAN_LIMIT, move || plan(&objects, memory)).await;
        let Some(Planned { observed, plan, inquiry, mut memory }) = planned else {
            // Why has been logged; the next pass starts from the old memory.
            return OperatorMemory { observer, planner };
        };
        tracing::info!("{inquiry}");
        let actions = act::actions(&observed, &plan, Timestamp::now());
        self.metrics.round(&observed, &plan, &actions);
        memory.planner = plan.state.clone();
        self.page_data.show(Pass::new(observed, plan, &actions));
        self.perform(&actions).await;
        memory
    }

    /// Waits until the watches show what the last pass wrote: an earlier plan would repeat or undo
    /// it.
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

    /// Performs the actions of different jobs concurrently, and those of one job in order. A failed
    /// action is retried in the next pass, because the cluster still differs from the plan.
    async fn perform(&mut self, actions: &[JobAction]) {
        let jobs: BTreeSet<(&str, &str)> = actions.iter().map(key).collect();
        let (executor, led, metrics) = (&self.executor, &self.led, &self.metrics);
        let each = jobs.into_iter().map(|job| async move {
            let mut promises = Vec::new();
            for action in actions.iter().filter(|action| key(action) == job) {
                // Another operator may lead now.
                if !*led.borrow() {
                    break;
                }
                if let Action::RecordEvent(event) = &action.action {
                    tracing::info!(
                        job = job.1,
                        namespace = job.0,
                        "{}: {}",
                        event.reason,
                        event.note
                    );
                }
                match executor.perform(action).await {
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

fn key(action: &JobAction) -> (&str, &str) {
    (&action.job.namespace, &action.job.name)
}

struct Planned {
    observed: Observed,
    plan: AllocationPlan,
    inquiry: Inquiry,
    memory: OperatorMemory,
}

fn plan(objects: &ClusterObjects, mut memory: OperatorMemory) -> Planned {
    let now = now();
    let observed = observe::observe(objects, &mut memory.observer, now);
    let plan = edl_sched::plan(&observed.snapshot, &memory.planner, now);
    let inquiry = Inquiry::new(&objects.nodes, &objects.pods);
    Planned { observed, plan, inquiry, memory }
}

fn now() -> Time {
    Time::since_origin(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default())
}

/// What the operator would do now, and why: a table of all jobs, or sentences about one. None if
/// there is no such job.
pub fn explain<'a>(
    client: &'a Client,
    namespace: &'a str,
    options: Options,
    job: Option<&'a str>,
) -> BoxFuture<'a, Result<Option<String>, Error>> {
    Box::pin(async move {
        let objects = crate::watch::list_all(client, namespace).await?;
        let Planned { observed, plan, .. } = plan(&objects, OperatorMemory::new(options));
        Ok(match job {
            Some(job) => explain::job(&observed, &plan, job),
            None => Some(explain::table(&observed, &plan)),
        })
    })
}
