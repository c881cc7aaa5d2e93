// SPDX-License-Identifier: Apache-2.0
//! Whole rounds on a small cluster: what is done, and that it is done once.

use expect_test::{Expect, expect};
use serde_json::json;

use edl_kube::names;

use crate::crd::ConditionKind;
use crate::tests::fake_cluster::{FakeCluster, job, node, other_pod};

fn check(report: &str, expected: &Expect) {
    expected.assert_eq(report);
}

/// Rounds until nothing is left to do.
fn calm(cluster: &mut FakeCluster) {
    for _ in 0..20 {
        cluster.settle();
        cluster.now_secs += 100;
        if cluster.pass().is_empty() {
            return;
        }
    }
    panic!("the rounds do not come to rest");
}

#[test]
fn a_job_starts_at_its_minimum_and_grows_into_free_capacity() {
    let jobs = [job("a", &json!({"min_workers": 2, "max_workers": 4}))];
    let mut cluster = FakeCluster::new(&[node("n1", "8", "32Gi")], &jobs);
    check(
        &cluster.pass(),
        &expect![[r#"
        a: admit with 4
        a: - Admitted: starting with 4 workers: enough free capacity for its minimum; free capacity available
        a: 0 of 4, Admitted(Planned: enough free capacity for its minimum; free capacity available)
    "#]],
    );
    check(&cluster.pass(), &expect![[r#""#]]);
    cluster.settle();
    check(
        &cluster.pass(),
        &expect![[r#"
        a: 4 of 4, Admitted(Planned: enough free capacity for its minimum; free capacity available), Running(HasItsMinimum: )
    "#]],
    );
    calm(&mut cluster);
    assert_eq!((cluster.status("a").workers, cluster.status("a").state.as_str()), (4, "Running"));
}

#[test]
fn a_second_job_starts_on_what_the_first_gives_up_and_gets_it_back() {
    let fields = json!({"min_workers": 1, "max_workers": 4});
    let nodes = [node("n1", "4500m", "32Gi")];
    let mut cluster = FakeCluster::new(&nodes, &[job("a", &fields)]);
    calm(&mut cluster);
    assert_eq!(cluster.status("a").workers, 4);
    cluster.objects.jobs.push(job("b", &fields).into());
    check(
        &cluster.pass(),
        &expect![[r#"
        a: resize to 2, leave [2, 3]
        a: - Resized: 4 → 2 workers: freeing capacity for job `default/b` to start; above its fair share while job `default/b` is below
        a: 4 of 2, Admitted(Planned: enough free capacity for its minimum; free capacity available), Running(HasItsMinimum: ), Resizing(Shrinking: to 2 workers: freeing capacity for job `default/b` to start; above its fair share while job `default/b` is below)
        b: admit with 2
        b: - Admitted: starting with 2 workers: enough free capacity for its minimum; below its fair share while job `default/a` is above
        b: 0 of 2, Admitted(Planned: enough free capacity for its minimum; below its fair share while job `default/a` is above)
    "#]],
    );
    cluster.settle();
    check(
        &cluster.pass(),
        &expect![[r#"
        a: 2 of 2, Admitted(Planned: enough free capacity for its minimum; free capacity available), Running(HasItsMinimum: )
        b: 2 of 2, Admitted(Planned: enough free capacity for its minimum; below its fair share while job `default/a` is above), Running(HasItsMinimum: )
    "#]],
    );
    calm(&mut cluster);
    assert_eq!((cluster.status("a").workers, cluster.status("b").workers), (2, 2));
    // The first one ends.
    cluster.report("a", &json!({"state": "succeeded", "records_done": 5}));
    cluster.objects.pods.retain(|pod| names::job_of(&pod.metadata).unwrap() != "a");
    check(
        &cluster.pass(),
        &expect![[r#"
        a: - Succeeded: training completed
        a: 0 of 0, Succeeded(Done: training completed)
        b: resize to 4, leave []
        b: - Resized: 2 → 4 workers: free capacity available
        b: 2 of 4, Admitted(Planned: enough free capacity for its minimum; below its fair share while job `default/a` is above), Running(HasItsMinimum: ), Resizing(Growing: to 4 workers: free capacity available)
    "#]],
    );
    calm(&mut cluster);
    assert_eq!(cluster.status("b").workers, 4);
}

#[test]
fn a_growing_service_gets_its_capacity_back() {
    let fields = json!({"min_workers": 1, "max_workers": 4});
    let mut cluster = FakeCluster::new(&[node("n1", "4500m", "32Gi")], &[job("a", &fields)]);
    calm(&mut cluster);
    assert_eq!(cluster.status("a").workers, 4);
    cluster.objects.pods.push(other_pod("nginx-1", "2", None).into());
    check(
        &cluster.pass(),
        &expect![[r#"
        a: resize to 2, leave [2, 3]
        a: - Resized: 4 → 2 workers: freeing capacity for service `web/nginx`
        a: 4 of 2, Admitted(Planned: enough free capacity for its minimum; free capacity available), Running(HasItsMinimum: ), Resizing(Shrinking: to 2 workers: freeing capacity for service `web/nginx`)
    "#]],
    );
    cluster.settle();
    calm(&mut cluster);
    assert_eq!(cluster.status("a").workers, 2);
    let nginx =
        cluster.objects.pods.iter().find(|pod| pod.metadata.name.as_deref() == Some("nginx-1"));
    assert_eq!(nginx.unwrap().spec.as_ref().unwrap().node_name.as_deref(), Some("n1"));
}

#[test]
fn workers_on_contended_nodes_are_removed_first() {
    let fields = json!({"min_workers": 1, "max_workers": 3});
    let nodes = [node("n1", "1100m", "32Gi"), node("n2", "2", "32Gi")];
    let mut cluster = FakeCluster::new(&nodes, &[job("a", &fields)]);
    calm(&mut cluster);
    cluster.objects.pods.push(other_pod("nginx-1", "2", None).into());
    let report = cluster.pass();
    assert!(report.contains("resize to 1, leave"), "{report}");
    cluster.settle();
    let nginx =
        cluster.objects.pods.iter().find(|pod| pod.metadata.name.as_deref() == Some("nginx-1"));
    assert_eq!(nginx.unwrap().spec.as_ref().unwrap().node_name.as_deref(), Some("n2"), "{report}");
}

#[test]
fn a_job_of_higher_priority_stops_another_which_resumes_later() {
    let rigid = json!({"num_workers": 3});
    let mut cluster = FakeCluster::new(&[node("n1", "4", "32Gi")], &[job("low", &rigid)]);
    calm(&mut cluster);
    cluster.objects.jobs.push(job("high", &json!({"num_workers": 3, "priority": 10})).into());
    check(
        &cluster.pass(),
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
    calm(&mut cluster);
    assert_eq!(cluster.status("low").state, "Queued");
    assert_eq!(cluster.status("high").workers, 3);
    cluster.report("high", &json!({"state": "succeeded"}));
    cluster.objects.pods.clear();
    calm(&mut cluster);
    assert_eq!(cluster.status("low").state, "Running");
}

#[test]
fn an_invalid_job_has_a_reason_and_does_not_block_others() {
    let jobs = [
        job("crossed", &json!({"min_workers": 4, "max_workers": 2})),
        job("good", &json!({"num_workers": 1})),
        job("huge", &json!({"worker_resource_request": "cpu=64,memory=1Gi"})),
        job("lost", &json!({"queue": "nowhere"})),
        job("none", &json!({"num_workers": 0})),
        job("odd", &json!({"priority": "no-such-class"})),
    ];
    let mut cluster = FakeCluster::new(&[node("n1", "8", "32Gi")], &jobs);
    check(
        &cluster.pass(),
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
    calm(&mut cluster);
    assert_eq!(cluster.status("good").state, "Running");
    // With a valid description, it runs.
    cluster.edit("crossed", "max_workers", json!(4));
    calm(&mut cluster);
    assert_eq!(cluster.status("crossed").state, "Running");
}

#[test]
fn a_name_that_another_job_has_is_left_alone() {
    let mut cluster = FakeCluster::new(&[node("n1", "8", "32Gi")], &[job("a", &json!({}))]);
    let foreign = json!({"metadata": {"name": "elasticdl-a", "namespace": "default",
        "labels": names::job_labels("a")}});
    cluster.objects.config_maps.push(std::sync::Arc::new(serde_json::from_value(foreign).unwrap()));
    let report = cluster.pass();
    assert!(report.contains("Queued(NameTaken") && !report.contains("admit"), "{report}");
    assert_eq!(cluster.pass(), "");
}

#[test]
fn a_recreated_job_waits_until_the_old_one_is_removed() {
    let mut cluster = FakeCluster::new(&[node("n1", "8", "32Gi")], &[job("a", &json!({}))]);
    calm(&mut cluster);
    let again = std::sync::Arc::make_mut(&mut cluster.objects.jobs[0]);
    again.metadata.uid = Some("another".into());
    again.status = None;
    let report = cluster.pass();
    assert!(report.contains("- Queued: objects of a deleted job with the same name"), "{report}");
    assert!(!report.contains("admit"), "{report}");
    cluster.objects.config_maps.clear();
    cluster.objects.pods.clear();
    let report = cluster.pass();
    assert!(report.contains("admit with 2"), "{report}");
}

#[test]
fn an_edit_of_a_running_job_is_applied_or_reported() {
    let jobs = [job("a", &json!({"min_workers": 2, "max_workers": 4}))];
    let mut cluster = FakeCluster::new(&[node("n1", "16", "64Gi")], &jobs);
    calm(&mut cluster);
    cluster.edit("a", "max_workers", json!(3));
    let report = cluster.pass();
    assert!(report.contains("resize to 3") && report.contains("above its maximum"), "{report}");
    calm(&mut cluster);
    cluster.edit("a", "num_epochs", json!(9));
    check(
        &cluster.pass(),
        &expect![[r#"
        a: ! SpecChanged: `num_epochs` cannot change while the job runs: only min_workers, max_workers, queue and priority can; submit a new job to change it
        a: 3 of 3, Admitted(SpecChanged: `num_epochs` cannot change while the job runs: only min_workers, max_workers, queue and priority can; submit a new job to change it), Running(HasItsMinimum: )
    "#]],
    );
    cluster.edit("a", "min_workers", json!(7));
    check(
        &cluster.pass(),
        &expect![[r#"
        a: ! Invalid: min_workers=7 exceeds the maximum of 3; lower it, or raise max_workers; until this is fixed, the job keeps running with its original settings
        a: 3 of 3, Admitted(Invalid: min_workers=7 exceeds the maximum of 3; lower it, or raise max_workers; until this is fixed, the job keeps running with its original settings), Running(HasItsMinimum: )
    "#]],
    );
    calm(&mut cluster);
    assert_eq!(cluster.status("a").workers, 3, "it continues unchanged");
}

#[test]
fn a_raised_minimum_stops_no_job() {
    let fields = json!({"min_workers": 1, "max_workers": 8, "num_ps_pods": 1,
        "ps_resource_request": "cpu=100m,memory=64Mi"});
    let mut cluster = FakeCluster::new(&[node("n1", "2500m", "64Gi")], &[job("a", &fields)]);
    calm(&mut cluster);
    let before = cluster.status("a").workers;
    cluster.edit("a", "min_workers", json!(6));
    calm(&mut cluster);
    assert_eq!((cluster.status("a").workers, before), (2, 2));
}

#[test]
fn a_lost_master_is_recreated_and_one_that_is_done_is_not() {
    let mut cluster = FakeCluster::new(&[node("n1", "8", "32Gi")], &[job("a", &json!({}))]);
    calm(&mut cluster);
    let is_master = |pod: &k8s_openapi::api::core::v1::Pod| {
        pod.metadata.name.as_deref() == Some("elasticdl-a-master")
    };
    cluster.objects.pods.retain(|pod| !is_master(pod));
    let report = cluster.pass();
    assert!(report.contains("admit with 2"), "{report}");
    calm(&mut cluster);
    let end = |cluster: &mut FakeCluster, code: i32| {
        let master = cluster.objects.pods.iter_mut().find(|pod| is_master(pod)).unwrap();
        let status = json!({"phase": "Failed", "containerStatuses": [{"name": "elasticdl",
            "image": "", "imageID": "", "ready": false, "restartCount": 0,
            "state": {"terminated": {"exitCode": code}}}]});
        std::sync::Arc::make_mut(master).status = serde_json::from_value(status).unwrap();
    };
    end(&mut cluster, 137);
    let report = cluster.pass();
    assert!(report.contains("admit with 2"), "{report}");
    end(&mut cluster, 1);
    check(
        &cluster.pass(),
        &expect![[r#"
        a: ! Failed: job failed; see `elasticdl logs a --namespace=default`
        a: 2 of 0, Failed(Failed: job failed; see `elasticdl logs a --namespace=default`)
    "#]],
    );
    assert_eq!(cluster.pass(), "");
    assert!(cluster.status("a").is(ConditionKind::Failed));
    // Its status outlives its pods.
    cluster.objects.pods.clear();
    cluster.objects.config_maps.clear();
    cluster.pass();
    assert!(cluster.status("a").is(ConditionKind::Failed));
    assert_eq!(cluster.pass(), "");
}

#[test]
fn with_masters_outside_no_capacity_is_reserved_for_them() {
    let mut cluster = FakeCluster::new(&[node("n1", "2500m", "32Gi")], &[job("a", &json!({}))]);
    cluster.objects.masters_outside = true;
    let observed = cluster.observe();
    assert_eq!(observed.snapshot.jobs[0].roles.master.max, 0);
    let report = cluster.pass();
    assert!(report.contains("admit with 2"), "{report}");
    cluster.objects.pods.clear();
    assert!(!cluster.pass().contains("admit"), "its master is not a pod");
}

/// Clusters at random: rounds come to rest, and every job has what it was report, within its limits.
#[test]
fn any_cluster_comes_to_rest() {
    for seed in 0..60_u64 {
        let mut rng = edl_core::rng::Rng::new(seed);
        let mut below = |n: u32| u32::try_from(rng.below(u64::from(n))).unwrap();
        let nodes: Vec<_> = (0..1 + below(4))
            .map(|at| node(&format!("n{at}"), &(2 + below(8)).to_string(), "64Gi"))
            .collect();
        let mut cluster = FakeCluster::new(&nodes, &[]);
        for at in 0..1 + below(6) {
            let min = 1 + below(3);
            let fields = json!({"min_workers": min, "max_workers": min + below(4),
                "priority": below(2), "num_ps_pods": 0});
            cluster.objects.jobs.push(job(&format!("j{at}"), &fields).into());
            cluster.pass();
            cluster.settle();
        }
        for at in 0..below(4) {
            let cpu = (1 + below(2)).to_string();
            cluster.objects.pods.push(other_pod(&format!("p{at}"), &cpu, None).into());
            cluster.pass();
            cluster.settle();
        }
        calm(&mut cluster);
        let observed = cluster.observe();
        for view in observed.jobs.values() {
            let (min, max) = view.limits().unwrap();
            let runs = view.running.worker;
            assert!(runs == 0 || (min..=max).contains(&runs), "seed {seed}: {}", view.title());
            assert_eq!(runs, view.grant.workers, "seed {seed}: {}", view.title());
        }
    }
}
