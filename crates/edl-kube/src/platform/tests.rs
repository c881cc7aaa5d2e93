// SPDX-License-Identifier: Apache-2.0
//! Orders and reports over an API server that is simulated here: what it rejects, loses and hides.

mod fake;

use edl_core::platform::{Process, pid_of};
use tokio::time::timeout;

use super::*;
use fake::Fake;

const LIMIT: Duration = Duration::from_secs(20);
const W0: InstanceId = InstanceId { role: Role::Worker, id: 0 };
const NAME: &str = "elasticdl-x-worker-0";

/// A platform on a simulated API server, as its master uses it.
struct Stage {
    api: Fake,
    orders: Option<mpsc::Sender<Order>>,
    reports: mpsc::Receiver<Report>,
    platform: JoinSet<End>,
    leaving: Leaving,
}

impl Stage {
    fn new(api: Fake, master_uid: Option<&str>) -> Self {
        Self::after(api, master_uid, false)
    }

    /// A platform whose last master a user has deleted, if that is so.
    fn after(api: Fake, master_uid: Option<&str>, was_deleted: bool) -> Self {
        let spec = JobSpec {
            job_name: "x".into(),
            image_name: "image".into(),
            volume: "host_path=/data,mount_path=/data".into(),
            ..JobSpec::default()
        };
        let leaving = Leaving::default();
        let config = Config {
            spec,
            namespace: "n".into(),
            master_uid: master_uid.map(str::to_owned),
            env: Vec::new(),
            board: None,
            was_deleted,
            leaving: leaving.clone(),
        };
        let (orders, order_queue) = mpsc::channel(16);
        let (report_queue, reports) = mpsc::channel(64);
        let mut platform = JoinSet::new();
        platform.spawn(run(api.client(), config, order_queue, report_queue));
        Self { api, orders: Some(orders), reports, platform, leaving }
    }

    async fn order(&self, order: Order) {
        self.orders.as_ref().unwrap().send(order).await.unwrap();
    }

    async fn report(&mut self) -> Report {
        let next = timeout(LIMIT, self.reports.recv()).await;
        next.expect("a report in time").expect("the platform runs")
    }

    async fn end(mut self) -> End {
        self.orders = None;
        timeout(LIMIT, self.platform.join_next()).await.unwrap().unwrap().unwrap()
    }

    fn pid(&self) -> u32 {
        pid_of(&self.api.uid(NAME))
    }
}

fn launch() -> Order {
    Order::Launch { instance: W0, memory_percent: 150, is_spare: false }
}

#[tokio::test]
async fn a_pod_over_quota_is_reported_and_retried() {
    let mut stage = Stage::new(Fake::default(), None);
    assert_eq!(stage.report().await, Report::Running(Vec::new()));
    stage.api.refuse(403, "pods \"a\" is forbidden: exceeded quota: q");
    stage.order(launch()).await;
    let Report::Waiting { instance: W0, why: Wait::Quota(_) } = stage.report().await else {
        panic!("the quota is used up")
    };
    assert_eq!(stage.report().await, Report::Waiting { instance: W0, why: Wait::Starting });
    stage.api.set(NAME, "/status/phase", "Running");
    let pid = stage.pid();
    assert_eq!(stage.report().await, Report::Started { instance: W0, pid });
    let memory = stage.api.get(NAME, "/spec/containers/0/resources/requests/memory");
    assert_eq!(memory, "6144Mi", "half as much again as the job asks for");
    assert_eq!(stage.api.get(NAME, "/metadata/ownerReferences/0/uid"), "job");
    assert_eq!(stage.end().await, End::Done);
}

#[tokio::test]
async fn missing_permissions_are_reported_until_they_are_granted() {
    let api = Fake::default();
    let sentence = "pods is forbidden: User \"u\" cannot list resource \"pods\"";
    api.refuse(403, sentence);
    let mut stage = Stage::new(api, None);
    let Report::Trouble(Some(why)) = stage.report().await else { panic!("it has no rights") };
    assert!(why.to_string().starts_with(sentence), "{why}");
    assert!(why.to_string().contains("elasticdl-rbac.yaml"), "{why}");
    assert_eq!(stage.report().await, Report::Trouble(None));
    assert_eq!(stage.report().await, Report::Running(Vec::new()));
}

#[tokio::test]
async fn what_vanishes_while_the_watch_is_broken_has_ended() {
    let mut stage = Stage::new(Fake::default(), None);
    stage.report().await;
    stage.order(launch()).await;
    stage.report().await;
    stage.api.set(NAME, "/status/phase", "Running");
    stage.report().await;
    let pid = stage.pid();
    stage.api.vanish(NAME);
    let ended = Report::Ended { instance: W0, pid, how: Ended::Deleted };
    assert_eq!(stage.report().await, ended);
}

#[tokio::test]
async fn a_stopped_pod_is_deleted_and_its_end_reported() {
    let mut stage = Stage::new(Fake::default(), None);
    stage.report().await;
    stage.order(launch()).await;
    stage.report().await;
    let pid = stage.pid();
    stage.order(Order::Stop { instance: W0, grace_ms: 1500 }).await;
    let ended = Report::Ended { instance: W0, pid, how: Ended::Deleted };
    assert_eq!(stage.report().await, ended);
    assert_eq!(stage.api.graces(), [2], "in whole seconds, and never less");
}

const DELETED: (&str, &str) = ("/metadata/deletionTimestamp", "2026-01-01T00:00:00Z");

#[tokio::test]
async fn a_master_whose_pod_is_deleted_alone_creates_nothing_more_and_exits() {
    let api = Fake::default();
    api.add("elasticdl-x-master", "master", "me");
    api.add(NAME, "worker", "w");
    api.set(NAME, "/status/phase", "Running");
    let mut stage = Stage::new(api, Some("me"));
    stage.report().await;
    stage.api.set("elasticdl-x-master", DELETED.0, DELETED.1);
    assert_eq!(timeout(LIMIT, stage.leaving.begun()).await.unwrap(), Duration::from_secs(30));
    let w1 = InstanceId { id: 1, ..W0 };
    assert_eq!(stage.report().await, Report::MasterDeleted);
    stage.order(Order::Launch { instance: w1, memory_percent: 100, is_spare: false }).await;
    stage.order(Order::Stop { instance: w1, grace_ms: 0 }).await;
    let uncreated = Report::Ended { instance: w1, pid: 0, how: Ended::Deleted };
    assert_eq!(stage.report().await, uncreated, "it was still to be created");
    let end = timeout(LIMIT, stage.platform.join_next()).await.unwrap().unwrap().unwrap();
    assert_eq!(end, End::Superseded);
    assert_eq!(stage.api.n_made(), 0);
}

#[tokio::test]
async fn a_master_whose_pod_is_deleted_with_all_others_saves_the_job() {
    let api = Fake::default();
    api.add("elasticdl-x-master", "master", "me");
    api.add(NAME, "worker", "w");
    api.set(NAME, "/status/phase", "Running");
    let mut stage = Stage::new(api, Some("me"));
    stage.report().await;
    stage.api.set("elasticdl-x-master", DELETED.0, DELETED.1);
    assert_eq!(stage.report().await, Report::MasterDeleted);
    // The next master is there already, and waits.
    stage.api.add("after", "master", "after");
    stage.api.set(NAME, DELETED.0, DELETED.1);
    let leaving = Report::Leaving { instance: W0, pid: pid_of("w"), how: Ended::Deleted };
    assert_eq!(stage.report().await, leaving);
    let Report::AllDeleted { within_ms } = stage.report().await else { panic!("it is to save") };
    assert!(within_ms > 10_000, "most of its grace period: {within_ms}");
    // It stays as long as its master has orders.
    stage.order(Order::Stop { instance: W0, grace_ms: 0 }).await;
    let ended = Report::Ended { instance: W0, pid: pid_of("w"), how: Ended::Deleted };
    while stage.report().await != ended {}
    assert_eq!(stage.end().await, End::Done);
}

#[tokio::test]
async fn a_master_continues_next_to_its_lost_predecessor_and_exits_for_its_successor() {
    let api = Fake::default();
    api.add("before", "master", "before");
    api.set("before", DELETED.0, DELETED.1);
    api.add("me", "master", "me");
    let mut stage = Stage::new(api, Some("me"));
    assert_eq!(stage.report().await, Report::Running(Vec::new()));
    stage.order(launch()).await;
    stage.report().await;
    assert_eq!(stage.api.graces(), [0], "the Service must not lead to the previous one");
    stage.api.add("after", "master", "after");
    let end = timeout(LIMIT, stage.platform.join_next()).await.unwrap().unwrap().unwrap();
    assert_eq!(end, End::Superseded);
}

#[tokio::test]
async fn a_new_master_learns_that_all_pods_were_deleted_with_the_last_one() {
    let leaving = |api: &Fake, reason: Option<&str>| {
        api.add(NAME, "worker", "w");
        api.set(NAME, DELETED.0, DELETED.1);
        if let Some(reason) = reason {
            api.set(NAME, "/status/reason", reason);
        }
    };
    let living = Report::Running(vec![Process { instance: W0, pid: pid_of("w"), age_ms: 0 }]);
    type Pods<'a> = &'a dyn Fn(&Fake);
    let table: [(Pods<'_>, bool, Report); 5] = [
        (&|_| {}, true, Report::AllDeleted { within_ms: 0 }),
        (&|api| leaving(api, None), true, Report::AllDeleted { within_ms: 0 }),
        // A node was lost, or the master was deleted alone.
        (&|api| leaving(api, Some("NodeLost")), true, living.clone()),
        (&|api| api.add(NAME, "worker", "w"), true, living),
        // The last master was lost.
        (&|_| {}, false, Report::Running(Vec::new())),
    ];
    for (at, (add, was_deleted, expected)) in table.into_iter().enumerate() {
        let api = Fake::default();
        add(&api);
        let mut stage = Stage::after(api, None, was_deleted);
        assert_eq!(stage.report().await, expected, "case {at}");
    }
}
