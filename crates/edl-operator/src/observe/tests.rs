// SPDX-License-Identifier: Apache-2.0
//! Whole clusters, looked at: what is taken, kept, leaving and waiting.

use std::sync::Arc;

use edl_kube::names;
use edl_sched::resources::Resources;
use edl_sched::snapshot::{NodeState, Placed, Role};
use serde_json::json;

use crate::crd::TrainingJob;
use crate::fixture::{World, job, node, other_pod};

/// A job of three workers that runs on one node of eight CPUs.
fn running() -> World {
    let mut world = World::new(&[node("n1", "8", "32Gi")], &[job("a", &json!({"num_workers": 3}))]);
    world.round();
    world.settle();
    world
}

#[test]
fn pods_of_others_are_taken_and_those_that_leave_are_not() {
    let mut world = World::new(&[node("n1", "8", "32Gi"), node("n2", "4", "8Gi")], &[]);
    let mut leaving = other_pod("b", "2", Some("n1"));
    leaving.metadata.deletion_timestamp =
        serde_json::from_value(json!("2026-11-16T10:00:00Z")).unwrap();
    let mut ended = other_pod("c", "3", Some("n1"));
    ended.status = serde_json::from_value(json!({"phase": "Succeeded"})).unwrap();
    let pods = [other_pod("a", "1", Some("n1")), leaving, ended, other_pod("d", "5", Some("gone"))];
    world.seen.pods = pods.map(Arc::new).into();
    let nodes = world.observe().snapshot.nodes;
    assert_eq!((nodes[0].taken.cpu_milli, nodes[0].leaving.cpu_milli), (1000, 2000));
    assert_eq!((nodes[1].taken, nodes[1].state), (Resources::ZERO, NodeState::Ready));
    assert_eq!(nodes[1].capacity, Resources::new(0, 4000, 8192));
}

#[test]
fn equal_pods_that_wait_are_one_entry() {
    let mut world = World::new(&[node("n1", "1", "1Gi")], &[]);
    let pods = [other_pod("a", "4", None), other_pod("b", "4", None), other_pod("c", "5", None)];
    world.seen.pods = pods.map(Arc::new).into();
    let observed = world.observe();
    let counts: Vec<(u64, u32)> =
        observed.snapshot.waiting.iter().map(|it| (it.shape.cpu_milli, it.n)).collect();
    assert_eq!(counts, [(4000, 2), (5000, 1)]);
    assert!(observed.names.services.values().all(|name| name == "web/nginx"));
}

#[test]
fn room_is_kept_for_pods_that_are_on_their_way() {
    let mut world = running();
    let n_workers = |world: &mut World| {
        let job = world.observe().snapshot.jobs.remove(0);
        let of = |placed: &&Placed| placed.role == Role::Worker;
        (job.placed.iter().filter(of).map(|placed| placed.n).sum::<u32>(), job.running.worker)
    };
    assert_eq!(n_workers(&mut world), (3, 3));
    let is_last = |name: Option<&str>| name == Some("elasticdl-a-worker-2");
    world.seen.pods.retain(|pod| !is_last(pod.metadata.name.as_deref()));
    assert_eq!(n_workers(&mut world), (3, 2), "its master will make it again");
    world.note("a", names::WORKERS_NOTE, "5");
    assert_eq!(n_workers(&mut world), (5, 2));
    world.note("a", names::WORKERS_NOTE, "50");
    let job = world.observe().snapshot.jobs.remove(0);
    assert_eq!((job.counts().worker, job.unplaced.worker), (50, 43), "seven fit");
}

#[test]
fn workers_that_are_too_many_are_as_good_as_gone() {
    let mut world = running();
    world.note("a", names::WORKERS_NOTE, "1");
    let snapshot = world.observe().snapshot;
    assert_eq!(snapshot.jobs[0].counts().worker, 1);
    assert_eq!(snapshot.nodes[0].leaving.cpu_milli, 2000);
    assert_eq!(snapshot.nodes[0].taken, Resources::ZERO);
}

#[test]
fn a_pod_with_more_memory_than_its_job_asks_for_is_counted_whole() {
    let mut world = running();
    let is_first = |name: Option<&str>| name == Some("elasticdl-a-worker-0");
    let pod = world.seen.pods.iter_mut().find(|pod| is_first(pod.metadata.name.as_deref()));
    let spec = Arc::make_mut(pod.unwrap()).spec.as_mut().unwrap();
    let requests = spec.containers[0].resources.as_mut().unwrap().requests.as_mut().unwrap();
    requests.get_mut("memory").unwrap().0 = "1536Mi".into();
    let taken = world.observe().snapshot.nodes[0].taken;
    assert_eq!(taken, Resources::new(0, 0, 512));
}

#[test]
fn two_jobs_of_one_name_in_two_namespaces_are_two_jobs() {
    let mut other = job("a", &json!({}));
    other.metadata.namespace = Some("other".into());
    other.metadata.uid = Some("another".into());
    let world_jobs = [job("a", &json!({})), other];
    let mut world = World::new(&[node("n1", "8", "32Gi")], &world_jobs);
    let observed = world.observe();
    assert_eq!(observed.snapshot.jobs.len(), 2);
    let names: Vec<&String> = observed.names.jobs.values().collect();
    assert_eq!(names, ["default/a", "other/a"]);
}

#[test]
fn a_job_keeps_its_number_and_a_new_one_of_its_name_gets_another() {
    let mut world = World::new(&[], &[job("a", &json!({})), job("b", &json!({}))]);
    let ids = |world: &mut World| -> Vec<(u32, String)> {
        world.observe().names.jobs.into_iter().map(|(id, name)| (id.0, name)).collect()
    };
    assert_eq!(ids(&mut world), [(0, "default/a".into()), (1, "default/b".into())]);
    world.seen.jobs.remove(0);
    assert_eq!(ids(&mut world), [(1, "default/b".into())]);
    let again = TrainingJob { ..job("a", &json!({})) };
    world.seen.jobs.push(again.into());
    assert_eq!(ids(&mut world), [(1, "default/b".into()), (2, "default/a".into())]);
}

#[test]
fn a_job_that_is_being_deleted_is_not_planned_and_its_pods_leave() {
    let mut world = running();
    let deleted = Arc::make_mut(&mut world.seen.jobs[0]);
    deleted.metadata.deletion_timestamp = deleted.metadata.creation_timestamp.clone();
    let snapshot = world.observe().snapshot;
    assert!(snapshot.jobs.is_empty());
    assert_eq!(snapshot.nodes[0].leaving.cpu_milli, 3100);
    assert_eq!(world.round(), "");
}
