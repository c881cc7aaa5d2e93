// SPDX-License-Identifier: Apache-2.0
//! Orders and reports over an API server that is simulated here: what it rejects, loses and hides.

mod fake;

use edl_core::platform::pid_of;
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
}

impl Stage {
    fn new(api: Fake, master_uid: Option<&str>) -> Self {
        let spec = JobSpec {
            job_name: "x".into(),
            image_name: "image".into(),
            volume: "host_path=/data,mount_path=/data".into(),
            ..JobSpec::default()
        };
        let config = Config {
            spec,
            namespace: "n".into(),
            master_uid: master_uid.map(str::to_owned),
            env: Vec::new(),
            board: None,
        };
        let (orders, order_queue) = mpsc::channel(16);
        let (report_queue, reports) = mpsc::channel(64);
        let mut platform = JoinSet::new();
        platform.spawn(run(api.client(), config, order_queue, report_queue));
        Self { api, orders: Some(orders), reports, platform }
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
    Order::Launch { instance: W0, memory_percent: 150 }
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

#[tokio::test]
async fn a_master_whose_own_pod_is_deleted_makes_nothing_more() {
    let api = Fake::default();
    api.add("elasticdl-x-master", "master", "me");
    let mut stage = Stage::new(api, Some("me"));
    assert_eq!(stage.report().await, Report::Running(Vec::new()));
    stage.api.set("elasticdl-x-master", "/metadata/deletionTimestamp", "2026-01-01T00:00:00Z");
    let end = timeout(LIMIT, stage.platform.join_next()).await.unwrap().unwrap().unwrap();
    assert_eq!(end, End::Superseded);
}
