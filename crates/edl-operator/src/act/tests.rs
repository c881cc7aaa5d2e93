// SPDX-License-Identifier: Apache-2.0
//! Whole rounds on a small cluster: what is done, and that it is done once.

use expect_test::{Expect, expect};
use serde_json::json;

use edl_kube::names;

use crate::crd::Kind;
use crate::fixture::{World, job, node, other_pod};

fn check(told: &str, expected: &Expect) {
    expected.assert_eq(told);
}

/// Rounds until nothing is left to do.
fn calm(world: &mut World) {
    for _ in 0..20 {
        world.settle();
        world.now_secs += 100;
        if world.round().is_empty() {
            return;
        }
    }
    panic!("the rounds do not come to rest");
}

#[test]
fn a_job_starts_at_its_minimum_and_grows_into_free_room() {
    let jobs = [job("a", &json!({"min_workers": 2, "max_workers": 4}))];
    let mut world = World::new(&[node("n1", "8", "32Gi")], &jobs);
    check(
        &world.round(),
        &expect![[r#"
        a: admit with 4
        a: - Admitted: starting with 4 workers: enough free capacity for its minimum; free capacity available
        a: 0 of 4, Admitted(Planned: enough free capacity for its minimum; free capacity available)
    "#]],
    );
    check(&world.round(), &expect![[r#""#]]);
    world.settle();
    check(
        &world.round(),
        &expect![[r#"
        a: 4 of 4, Admitted(Planned: enough free capacity for its minimum; free capacity available), Running(HasItsMinimum: )
    "#]],
    );
    calm(&mut world);
    assert_eq!((world.status("a").workers, world.status("a").state.as_str()), (4, "Running"));
}

#[test]
fn a_second_job_starts_on_what_the_first_gives_up_and_gets_it_back() {
    let words = json!({"min_workers": 1, "max_workers": 4});
    let nodes = [node("n1", "4500m", "32Gi")];
    let mut world = World::new(&nodes, &[job("a", &words)]);
    calm(&mut world);
    assert_eq!(world.status("a").workers, 4);
    world.seen.jobs.push(job("b", &words).into());
    check(
        &world.round(),
        &expect![[r#"
        a: resize to 2, leave [2, 3]
        a: - Resized: 4 → 2 workers: freeing capacity for job `default/b` to start; above its fair share while job `default/b` is below
        a: 4 of 2, Admitted(Planned: enough free capacity for its minimum; free capacity available), Running(HasItsMinimum: ), Resizing(Shrinking: to 2 workers: freeing capacity for job `default/b` to start; above its fair share while job `default/b` is below)
        b: admit with 2
        b: - Admitted: starting with 2 workers: enough free capacity for its minimum; below its fair share while job `default/a` is above
        b: 0 of 2, Admitted(Planned: enough free capacity for its minimum; below its fair share while job `default/a` is above)
    "#]],
    );
    world.settle();
    check(
        &world.round(),
        &expect![[r#"
        a: 2 of 2, Admitted(Planned: enough free capacity for its minimum; free capacity available), Running(HasItsMinimum: )
        b: 2 of 2, Admitted(Planned: enough free capacity for its minimum; below its fair share while job `default/a` is above), Running(HasItsMinimum: )
    "#]],
    );
    calm(&mut world);
    assert_eq!((world.status("a").workers, world.status("b").workers), (2, 2));
    // The first one ends.
    world.note("a", names::STATUS_NOTE, r#"{"state": "succeeded", "records_done": 5}"#);
    world.seen.pods.retain(|pod| pod.metadata.labels.as_ref().unwrap()[names::JOB_LABEL] != "a");
    check(
        &world.round(),
        &expect![[r#"
        a: - Succeeded: training completed
        a: 0 of 0, Succeeded(Done: training completed)
        b: resize to 4, leave []
        b: - Resized: 2 → 4 workers: free capacity available
        b: 2 of 4, Admitted(Planned: enough free capacity for its minimum; below its fair share while job `default/a` is above), Running(HasItsMinimum: ), Resizing(Growing: to 4 workers: free capacity available)
    "#]],
    );
    calm(&mut world);
    assert_eq!(world.status("b").workers, 4);
}

#[test]
fn a_service_that_grows_gets_its_room_back() {
    let words = json!({"min_workers": 1, "max_workers": 4});
    let mut world = World::new(&[node("n1", "4500m", "32Gi")], &[job("a", &words)]);
    calm(&mut world);
    assert_eq!(world.status("a").workers, 4);
    world.seen.pods.push(other_pod("nginx-1", "2", None).into());
    check(
        &world.round(),
        &expect![[r#"
        a: resize to 2, leave [2, 3]
        a: - Resized: 4 → 2 workers: freeing capacity for service `web/nginx`
        a: 4 of 2, Admitted(Planned: enough free capacity for its minimum; free capacity available), Running(HasItsMinimum: ), Resizing(Shrinking: to 2 workers: freeing capacity for service `web/nginx`)
    "#]],
    );
    world.settle();
    calm(&mut world);
    assert_eq!(world.status("a").workers, 2);
    let nginx = world.seen.pods.iter().find(|pod| pod.metadata.name.as_deref() == Some("nginx-1"));
    assert_eq!(nginx.unwrap().spec.as_ref().unwrap().node_name.as_deref(), Some("n1"));
}

#[test]
fn the_workers_that_leave_are_those_whose_room_is_needed() {
    let words = json!({"min_workers": 1, "max_workers": 3});
    let nodes = [node("n1", "1100m", "32Gi"), node("n2", "2", "32Gi")];
    let mut world = World::new(&nodes, &[job("a", &words)]);
    calm(&mut world);
    world.seen.pods.push(other_pod("nginx-1", "2", None).into());
    let told = world.round();
    assert!(told.contains("resize to 1, leave"), "{told}");
    world.settle();
    let nginx = world.seen.pods.iter().find(|pod| pod.metadata.name.as_deref() == Some("nginx-1"));
    assert_eq!(nginx.unwrap().spec.as_ref().unwrap().node_name.as_deref(), Some("n2"), "{told}");
}

#[test]
fn a_job_of_higher_priority_stops_another_which_goes_on_later() {
    let rigid = json!({"num_workers": 3});
    let mut world = World::new(&[node("n1", "4", "32Gi")], &[job("low", &rigid)]);
    calm(&mut world);
    world.seen.jobs.push(job("high", &json!({"num_workers": 3, "priority": 10})).into());
    check(
        &world.round(),
        &expect![[r#"
        low: stop 4 pods
        low: - Stopped: released all workers: preempted by job `default/high`, which has a higher priority
        low: - Queued: not enough CPU for its minimum
        low: 3 of 0, Queued(NoRoom: not enough CPU for its minimum)
        high: admit with 3
        high: - Admitted: starting with 3 workers: enough free capacity for its minimum
        high: 0 of 3, Admitted(Planned: enough free capacity for its minimum)
    "#]],
    );
    calm(&mut world);
    assert_eq!(world.status("low").state, "Queued");
    assert_eq!(world.status("high").workers, 3);
    world.note("high", names::STATUS_NOTE, r#"{"state": "succeeded"}"#);
    world.seen.pods.clear();
    calm(&mut world);
    assert_eq!(world.status("low").state, "Running");
}

#[test]
fn a_bad_job_says_what_to_change_and_keeps_nobody_from_running() {
    let jobs = [
        job("crossed", &json!({"min_workers": 4, "max_workers": 2})),
        job("good", &json!({"num_workers": 1})),
        job("huge", &json!({"worker_resource_request": "cpu=64,memory=1Gi"})),
        job("lost", &json!({"queue": "nowhere"})),
        job("none", &json!({"num_workers": 0})),
        job("odd", &json!({"priority": "no-such-class"})),
    ];
    let mut world = World::new(&[node("n1", "8", "32Gi")], &jobs);
    check(
        &world.round(),
        &expect![[r#"
            crossed: ! Invalid: min_workers=4 exceeds the maximum of 2; lower it, or raise max_workers
            crossed: 0 of 0, Queued(Invalid: min_workers=4 exceeds the maximum of 2; lower it, or raise max_workers)
            good: admit with 1
            good: - Admitted: starting with 1 worker: enough free capacity for its minimum
            good: 0 of 1, Admitted(Planned: enough free capacity for its minimum)
            huge: ! Invalid: no node has enough CPU for one of its pods
            huge: 0 of 0, Queued(NeverFits: no node has enough CPU for one of its pods)
            lost: ! Invalid: queue `nowhere` not found; choose another, or add it to `elasticdl-queues`
            lost: 0 of 0, Queued(UnknownQueue: queue `nowhere` not found; choose another, or add it to `elasticdl-queues`)
            none: ! Invalid: num_workers must be at least 1
            none: 0 of 0, Queued(Invalid: num_workers must be at least 1)
            odd: ! Invalid: PriorityClass `no-such-class` not found; choose another, or use a number
            odd: 0 of 0, Queued(UnknownPriority: PriorityClass `no-such-class` not found; choose another, or use a number)
        "#]],
    );
    calm(&mut world);
    assert_eq!(world.status("good").state, "Running");
    // Mended, it runs.
    world.edit("crossed", "max_workers", json!(4));
    calm(&mut world);
    assert_eq!(world.status("crossed").state, "Running");
}

#[test]
fn a_name_that_another_job_has_is_left_alone() {
    let mut world = World::new(&[node("n1", "8", "32Gi")], &[job("a", &json!({}))]);
    let foreign = json!({"metadata": {"name": "elasticdl-a", "namespace": "default",
        "labels": {names::JOB_LABEL: "a"}}});
    world.seen.config_maps.push(std::sync::Arc::new(serde_json::from_value(foreign).unwrap()));
    let told = world.round();
    assert!(told.contains("Queued(NameTaken") && !told.contains("admit"), "{told}");
    assert_eq!(world.round(), "");
}

#[test]
fn a_job_that_was_made_anew_waits_until_the_old_one_is_cleared_away() {
    let mut world = World::new(&[node("n1", "8", "32Gi")], &[job("a", &json!({}))]);
    calm(&mut world);
    let again = std::sync::Arc::make_mut(&mut world.seen.jobs[0]);
    again.metadata.uid = Some("another".into());
    again.status = None;
    let told = world.round();
    assert!(told.contains("- Queued: objects of a deleted job with the same name"), "{told}");
    assert!(!told.contains("admit"), "{told}");
    world.seen.config_maps.clear();
    world.seen.pods.clear();
    let told = world.round();
    assert!(told.contains("admit with 2"), "{told}");
}

#[test]
fn an_edit_of_a_running_job_is_followed_or_told() {
    let jobs = [job("a", &json!({"min_workers": 2, "max_workers": 4}))];
    let mut world = World::new(&[node("n1", "16", "64Gi")], &jobs);
    calm(&mut world);
    world.edit("a", "max_workers", json!(3));
    let told = world.round();
    assert!(told.contains("resize to 3") && told.contains("above its maximum"), "{told}");
    calm(&mut world);
    world.edit("a", "num_epochs", json!(9));
    check(
        &world.round(),
        &expect![[r#"
        a: ! SpecChanged: `num_epochs` cannot change while the job runs: only min_workers, max_workers, queue and priority can; submit a new job to change it
        a: 3 of 3, Admitted(SpecChanged: `num_epochs` cannot change while the job runs: only min_workers, max_workers, queue and priority can; submit a new job to change it), Running(HasItsMinimum: )
    "#]],
    );
    world.edit("a", "min_workers", json!(7));
    check(
        &world.round(),
        &expect![[r#"
        a: ! Invalid: min_workers=7 exceeds the maximum of 3; lower it, or raise max_workers; until this is fixed, the job keeps running with its original settings
        a: 3 of 3, Admitted(Invalid: min_workers=7 exceeds the maximum of 3; lower it, or raise max_workers; until this is fixed, the job keeps running with its original settings), Running(HasItsMinimum: )
    "#]],
    );
    calm(&mut world);
    assert_eq!(world.status("a").workers, 3, "it goes on as it was");
}

#[test]
fn a_minimum_that_is_raised_stops_nobody() {
    let words = json!({"min_workers": 1, "max_workers": 8, "num_ps_pods": 1,
        "ps_resource_request": "cpu=100m,memory=64Mi"});
    let mut world = World::new(&[node("n1", "2500m", "64Gi")], &[job("a", &words)]);
    calm(&mut world);
    let before = world.status("a").workers;
    world.edit("a", "min_workers", json!(6));
    calm(&mut world);
    assert_eq!((world.status("a").workers, before), (2, 2));
}

#[test]
fn a_master_that_is_lost_is_made_again_and_one_that_is_done_is_not() {
    let mut world = World::new(&[node("n1", "8", "32Gi")], &[job("a", &json!({}))]);
    calm(&mut world);
    let is_master = |pod: &k8s_openapi::api::core::v1::Pod| {
        pod.metadata.name.as_deref() == Some("elasticdl-a-master")
    };
    world.seen.pods.retain(|pod| !is_master(pod));
    let told = world.round();
    assert!(told.contains("admit with 2"), "{told}");
    calm(&mut world);
    let end = |world: &mut World, code: i32| {
        let master = world.seen.pods.iter_mut().find(|pod| is_master(pod)).unwrap();
        let status = json!({"phase": "Failed", "containerStatuses": [{"name": "elasticdl",
            "image": "", "imageID": "", "ready": false, "restartCount": 0,
            "state": {"terminated": {"exitCode": code}}}]});
        std::sync::Arc::make_mut(master).status = serde_json::from_value(status).unwrap();
    };
    end(&mut world, 137);
    let told = world.round();
    assert!(told.contains("admit with 2, not elasticdl-a-master"), "{told}");
    end(&mut world, 1);
    check(
        &world.round(),
        &expect![[r#"
        a: ! Failed: job failed; see `elasticdl logs a --namespace=default`
        a: 2 of 0, Failed(Failed: job failed; see `elasticdl logs a --namespace=default`)
    "#]],
    );
    assert_eq!(world.round(), "");
    assert!(world.status("a").is(Kind::Failed));
    // Its status outlives its pods.
    world.seen.pods.clear();
    world.seen.config_maps.clear();
    world.round();
    assert!(world.status("a").is(Kind::Failed));
    assert_eq!(world.round(), "");
}

#[test]
fn with_masters_outside_no_room_is_kept_for_them() {
    let mut world = World::new(&[node("n1", "2500m", "32Gi")], &[job("a", &json!({}))]);
    world.seen.masters_outside = true;
    let observed = world.observe();
    assert_eq!(observed.snapshot.jobs[0].roles.master.max, 0);
    let told = world.round();
    assert!(told.contains("admit with 2"), "{told}");
    world.seen.pods.clear();
    assert!(!world.round().contains("admit"), "its master is no pod");
}

/// Clusters at random: rounds come to rest, and every job has what it was told, within its limits.
#[test]
fn any_cluster_comes_to_rest() {
    for seed in 0..60_u64 {
        let mut rng = edl_core::rng::Rng::new(seed);
        let mut below = |n: u32| u32::try_from(rng.below(u64::from(n))).unwrap();
        let nodes: Vec<_> = (0..1 + below(4))
            .map(|at| node(&format!("n{at}"), &(2 + below(8)).to_string(), "64Gi"))
            .collect();
        let mut world = World::new(&nodes, &[]);
        for at in 0..1 + below(6) {
            let min = 1 + below(3);
            let words = json!({"min_workers": min, "max_workers": min + below(4),
                "priority": below(2), "num_ps_pods": 0});
            world.seen.jobs.push(job(&format!("j{at}"), &words).into());
            world.round();
            world.settle();
        }
        for at in 0..below(4) {
            let cpu = (1 + below(2)).to_string();
            world.seen.pods.push(other_pod(&format!("p{at}"), &cpu, None).into());
            world.round();
            world.settle();
        }
        calm(&mut world);
        let observed = world.observe();
        for view in observed.jobs.values() {
            let (min, max) = view.limits().unwrap();
            let runs = view.running.worker;
            assert!(runs == 0 || (min..=max).contains(&runs), "seed {seed}: {}", view.title());
            assert_eq!(runs, view.told, "seed {seed}: {}", view.title());
        }
    }
}
