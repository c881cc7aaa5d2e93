// SPDX-License-Identifier: Apache-2.0
//! Jobs that ask for the impossible, by mistake or on purpose: they wait or get what fits, and no
//! other job notices.

use std::sync::Arc;
use std::time::{Duration, Instant};

use edl_core::platform::Role;
use edl_kube::names;
use edl_sched::state::{Options, PlannerState, Policy};
use k8s_openapi::api::core::v1::{ConfigMap, Node};
use serde_json::json;

use super::fake_cluster::{FakeCluster, job, node, other_pod};
use crate::inquiry::Inquiry;
use crate::permissions::{self, Permissions};
use crate::queues::{self, Queues};

/// Far longer than a plan takes, far shorter than what these jobs used to take.
const IN_TIME: Duration = Duration::from_secs(20);

fn nodes(n: u32) -> Vec<Node> {
    (0..n).map(|id| node(&format!("n{id}"), "96", "512Gi")).collect()
}

/// Workers that the plan gives to each job, by name.
fn planned(cluster: &mut FakeCluster) -> Vec<(String, u32)> {
    let (observed, plan, _) = cluster.plan();
    for job in &edl_sched::applied(&observed.snapshot, &plan).jobs {
        for placed in job.placed.iter().filter(|placed| placed.role == Role::Worker) {
            assert!(placed.n <= 110, "more pods on a node than it accepts: {placed:?}");
        }
    }
    let workers = |(id, name): (&_, &String)| {
        let workers = plan.change_of(*id).map_or(0, |change| change.target.worker);
        (name.clone(), workers)
    };
    observed.names.jobs.iter().map(workers).collect()
}

#[test]
fn a_job_with_an_absurd_maximum_is_refused_and_stops_no_other() {
    let absurd = |name: &str, max: u32| job(name, &json!({"min_workers": 1, "max_workers": max}));
    let jobs = [absurd("a", u32::MAX), absurd("b", 100_000_000), absurd("c", 3)];
    for policy in Policy::ALL {
        let mut cluster = FakeCluster::new(&nodes(3), &jobs);
        cluster.state = PlannerState::of(policy);
        let began = Instant::now();
        let all = planned(&mut cluster);
        assert!(began.elapsed() < IN_TIME, "{policy}: {:?}", began.elapsed());
        let workers = |name: &str| all.iter().find(|(it, _)| it == name).unwrap().1;
        assert_eq!((workers("default/a"), workers("default/b")), (0, 0), "{policy}");
        assert!(workers("default/c") > 0, "{policy}");
        cluster.pass();
        let queued = cluster.status("a").conditions.remove(0);
        assert_eq!(queued.message, "max_workers must be at most 10000", "{policy}");
    }
}

#[test]
fn tiny_workers_fill_no_node_beyond_its_number_of_pods() {
    let tiny = json!({"min_workers": 1, "max_workers": 10_000, "master_resource_request": "cpu=0.001",
        "worker_resource_request": "cpu=0.001"});
    for policy in Policy::ALL {
        let mut cluster = FakeCluster::new(&nodes(20), &[job("a", &tiny)]);
        cluster.state = PlannerState::new(Options { policy, ..Options::default() });
        let began = Instant::now();
        let workers = planned(&mut cluster)[0].1;
        assert!(began.elapsed() < IN_TIME, "{policy}: {:?}", began.elapsed());
        // Without a planner of ours, Kubernetes itself keeps the limit.
        let is_ours = !policy.leaves_placing_to_kubernetes();
        assert!(!is_ours || workers <= 20 * 110, "{policy}: {workers}");
    }
}

#[test]
fn an_edited_annotation_neither_stalls_a_pass_nor_stays() {
    let jobs = [job("a", &json!({"min_workers": 1, "max_workers": 4}))];
    let mut cluster = FakeCluster::new(&nodes(100), &jobs);
    cluster.pass();
    cluster.settle();
    cluster.pass();
    for edited in [u32::MAX, 100_000_000, 10_000] {
        cluster.grant("a", edited);
        let began = Instant::now();
        let actions = cluster.pass();
        assert!(began.elapsed() < IN_TIME, "{edited}: {:?}", began.elapsed());
        assert!(actions.contains("with 4") || actions.contains("to 4"), "{edited}: {actions}");
        cluster.now_secs += 100;
        cluster.settle();
        assert_eq!(cluster.status("a").wanted_workers, 4, "{edited}");
    }
}

#[test]
fn requests_beyond_all_numbers_wait_and_stop_no_other() {
    let vast = json!({"worker_resource_request": "cpu=9000000000000000000,memory=8Ei"});
    let jobs = [job("a", &vast), job("b", &vast), job("c", &json!({}))];
    let mut cluster = FakeCluster::new(&nodes(2), &jobs);
    let pods = ["x", "y"].map(|name| other_pod(name, "9000000000000000000", Some("n0")));
    cluster.objects.pods = pods.map(Arc::new).into();
    for policy in Policy::ALL.into_iter().filter(|it| !it.leaves_placing_to_kubernetes()) {
        cluster.state = PlannerState::of(policy);
        let workers: Vec<u32> = planned(&mut cluster).into_iter().map(|(_, n)| n).collect();
        assert_eq!(workers, [0, 0, 2], "{policy}");
    }
    let shown = Inquiry::new(&cluster.objects.nodes, &cluster.objects.pods).to_string();
    assert!(shown.contains(&format!("CPURequestMilli:{}", i64::MAX)), "{shown}");
}

fn settings(file: &str, text: &str) -> ConfigMap {
    let data = Some([(file.to_owned(), text.to_owned())].into());
    ConfigMap { data, ..ConfigMap::default() }
}

#[test]
fn a_job_gets_only_what_the_owner_of_the_cluster_allows() {
    let wants_the_node = json!({"volume": "host_path=/etc,mount_path=/data"});
    let mut cluster =
        FakeCluster::new(&nodes(1), &[job("a", &wants_the_node), job("b", &json!({}))]);
    let actions = cluster.pass();
    assert!(actions.contains("b: admit") && !actions.contains("a: admit"), "{actions}");
    assert!(actions.contains("Queued(NotAllowed: host_path `/etc` is not allowed"), "{actions}");
    let map = settings(permissions::FILE, "host_paths: [/etc]");
    cluster.objects.permissions = Permissions::read(Some(&map));
    assert!(cluster.pass().contains("a: admit"));
}

#[test]
fn a_description_that_was_edited_in_the_config_map_starts_no_master() {
    let mut cluster = FakeCluster::new(&nodes(1), &[job("a", &json!({}))]);
    cluster.pass();
    cluster.settle();
    let map = Arc::make_mut(&mut cluster.objects.config_maps[0]);
    let text = map.data.as_mut().unwrap().get_mut(names::JOB_FILE).unwrap();
    *text = text.replace("claim_name=c", "host_path=/etc");
    cluster.objects.pods.retain(|pod| !pod.metadata.name.as_ref().unwrap().ends_with("master"));
    let actions = cluster.pass();
    assert!(!actions.contains("admit"), "{actions}");
    assert!(actions.contains("host_path `/etc` is not allowed"), "{actions}");
}

#[test]
fn a_queue_is_for_its_namespaces_and_no_priority_exceeds_its_cap() {
    let text = "default: {max_priority: 5}\nteam: {namespaces: [other]}\n";
    let jobs = [job("a", &json!({"queue": "team"})), job("b", &json!({"priority": i32::MAX}))];
    let mut cluster = FakeCluster::new(&nodes(1), &jobs);
    cluster.objects.queues = Queues::read(Some(&settings(queues::FILE, text)));
    let observed = cluster.observe();
    let priorities: Vec<i32> = observed.snapshot.jobs.iter().map(|job| job.priority).collect();
    assert_eq!(priorities, [5], "only `b` can be planned");
    let actions = cluster.pass();
    assert!(
        actions.contains("queue `team` does not accept jobs of namespace `default`"),
        "{actions}"
    );
}
