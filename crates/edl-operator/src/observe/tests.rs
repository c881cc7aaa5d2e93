// SPDX-License-Identifier: Apache-2.0
//! Observations of whole clusters: what is taken, reserved, leaving and waiting.

use std::sync::Arc;

use edl_sched::resources::Resources;
use edl_sched::snapshot::{NodeState, Placed, Role};
use serde_json::json;

use crate::crd::TrainingJob;
use crate::tests::fake_cluster::{FakeCluster, job, node, other_pod};

/// A job of three workers that runs on one node of eight CPUs.
fn running() -> FakeCluster {
    let mut cluster =
        FakeCluster::new(&[node("n1", "8", "32Gi")], &[job("a", &json!({"num_workers": 3}))]);
    cluster.pass();
    cluster.settle();
    cluster
}

#[test]
fn pods_of_others_count_as_taken_unless_they_leave() {
    let mut cluster = FakeCluster::new(&[node("n1", "8", "32Gi"), node("n2", "4", "8Gi")], &[]);
    let mut leaving = other_pod("b", "2", Some("n1"));
    leaving.metadata.deletion_timestamp =
        serde_json::from_value(json!("2026-11-16T10:00:00Z")).unwrap();
    let mut ended = other_pod("c", "3", Some("n1"));
    ended.status = serde_json::from_value(json!({"phase": "Succeeded"})).unwrap();
    let pods = [other_pod("a", "1", Some("n1")), leaving, ended, other_pod("d", "5", Some("gone"))];
    cluster.objects.pods = pods.map(Arc::new).into();
    let nodes = cluster.observe().snapshot.nodes;
    assert_eq!((nodes[0].taken.cpu_milli, nodes[0].leaving.cpu_milli), (1000, 2000));
    assert_eq!((nodes[1].taken, nodes[1].state), (Resources::ZERO, NodeState::Ready));
    assert_eq!(nodes[0].taken.pods, 1);
    assert_eq!(nodes[1].capacity, Resources::new(0, 4000, 8192).with_pods(110));
}

#[test]
fn equal_pods_that_wait_are_one_entry() {
    let mut cluster = FakeCluster::new(&[node("n1", "1", "1Gi")], &[]);
    let pods = [other_pod("a", "4", None), other_pod("b", "4", None), other_pod("c", "5", None)];
    cluster.objects.pods = pods.map(Arc::new).into();
    let observed = cluster.observe();
    let counts: Vec<(u64, u32)> =
        observed.snapshot.waiting.iter().map(|it| (it.shape.cpu_milli, it.n)).collect();
    assert_eq!(counts, [(4000, 2), (5000, 1)]);
    assert!(observed.names.services.values().all(|name| name == "web/nginx"));
}

#[test]
fn capacity_is_reserved_for_pods_that_are_being_created() {
    let mut cluster = running();
    let n_workers = |cluster: &mut FakeCluster| {
        let job = cluster.observe().snapshot.jobs.remove(0);
        let of = |placed: &&Placed| placed.role == Role::Worker;
        (job.placed.iter().filter(of).map(|placed| placed.n).sum::<u32>(), job.running.worker)
    };
    assert_eq!(n_workers(&mut cluster), (3, 3));
    let is_last = |name: Option<&str>| name == Some("elasticdl-a-worker-2");
    cluster.objects.pods.retain(|pod| !is_last(pod.metadata.name.as_deref()));
    assert_eq!(n_workers(&mut cluster), (3, 2), "its master will make it again");
    cluster.grant("a", 5);
    assert_eq!(n_workers(&mut cluster), (5, 2));
    cluster.grant("a", 50);
    let job = cluster.observe().snapshot.jobs.remove(0);
    assert_eq!((job.counts().worker, job.unplaced.worker), (50, 43), "seven fit");
}

#[test]
fn workers_that_are_too_many_are_as_good_as_gone() {
    let mut cluster = running();
    cluster.grant("a", 1);
    let snapshot = cluster.observe().snapshot;
    assert_eq!(snapshot.jobs[0].counts().worker, 1);
    assert_eq!(snapshot.nodes[0].leaving.cpu_milli, 2000);
    assert_eq!(snapshot.nodes[0].taken, Resources::ZERO);
}

#[test]
fn a_pod_with_more_memory_than_its_job_asks_for_is_counted_whole() {
    let mut cluster = running();
    let is_first = |name: Option<&str>| name == Some("elasticdl-a-worker-0");
    let pod = cluster.objects.pods.iter_mut().find(|pod| is_first(pod.metadata.name.as_deref()));
    let spec = Arc::make_mut(pod.unwrap()).spec.as_mut().unwrap();
    let requests = spec.containers[0].resources.as_mut().unwrap().requests.as_mut().unwrap();
    requests.get_mut("memory").unwrap().0 = "1536Mi".into();
    let taken = cluster.observe().snapshot.nodes[0].taken;
    assert_eq!(taken, Resources::new(0, 0, 512));
}

#[test]
fn two_jobs_of_one_name_in_two_namespaces_are_two_jobs() {
    let mut other = job("a", &json!({}));
    other.metadata.namespace = Some("other".into());
    other.metadata.uid = Some("another".into());
    let jobs = [job("a", &json!({})), other];
    let mut cluster = FakeCluster::new(&[node("n1", "8", "32Gi")], &jobs);
    let observed = cluster.observe();
    assert_eq!(observed.snapshot.jobs.len(), 2);
    let names: Vec<&String> = observed.names.jobs.values().collect();
    assert_eq!(names, ["default/a", "other/a"]);
}

#[test]
fn a_job_keeps_its_number_and_a_new_one_of_its_name_gets_another() {
    let mut cluster = FakeCluster::new(&[], &[job("a", &json!({})), job("b", &json!({}))]);
    let ids = |cluster: &mut FakeCluster| -> Vec<(u32, String)> {
        cluster.observe().names.jobs.into_iter().map(|(id, name)| (id.0, name)).collect()
    };
    assert_eq!(ids(&mut cluster), [(0, "default/a".into()), (1, "default/b".into())]);
    cluster.objects.jobs.remove(0);
    assert_eq!(ids(&mut cluster), [(1, "default/b".into())]);
    let again = TrainingJob { ..job("a", &json!({})) };
    cluster.objects.jobs.push(again.into());
    assert_eq!(ids(&mut cluster), [(1, "default/b".into()), (2, "default/a".into())]);
}

#[test]
fn a_job_that_is_being_deleted_is_not_planned_and_its_pods_leave() {
    let mut cluster = running();
    let deleted = Arc::make_mut(&mut cluster.objects.jobs[0]);
    deleted.metadata.deletion_timestamp = deleted.metadata.creation_timestamp.clone();
    let snapshot = cluster.observe().snapshot;
    assert!(snapshot.jobs.is_empty());
    assert_eq!(snapshot.nodes[0].leaving.cpu_milli, 3100);
    assert_eq!(cluster.pass(), "");
}
