// SPDX-License-Identifier: Apache-2.0
//! What is asked of an API server, in which order, and what happens when it refuses.

use expect_test::expect;
use serde_json::json;

use super::*;
use crate::tests::fake_api::FakeApi;
use crate::tests::fake_cluster::{FakeCluster, job, node};

const MAP: &str = "/api/v1/namespaces/default/configmaps/elasticdl-a";

fn executor(api: &FakeApi, masters_outside: bool) -> Executor {
    let new_key = || Ok("key".to_owned());
    Executor { client: api.client(), masters_outside, new_key, identity: "me".into() }
}

/// The actions of a first round with one job of two workers.
fn actions() -> Vec<JobAction> {
    let jobs = [job("a", &json!({"num_workers": 2}))];
    FakeCluster::new(&[node("n1", "8", "32Gi")], &jobs).plan().2
}

fn on_job(action: Action) -> JobAction {
    JobAction { action, ..actions().remove(0) }
}

#[tokio::test]
async fn a_job_is_admitted_with_its_note_before_its_master() {
    let api = FakeApi::default();
    for action in actions() {
        executor(&api, false).perform(&action).await.unwrap();
    }
    let calls = api.calls();
    // Events have their own names.
    let calls: Vec<&str> = calls.lines().collect();
    expect![[r#"
        PATCH /api/v1/namespaces/default/configmaps/elasticdl-a
        POST /api/v1/namespaces/default/secrets
        PATCH /api/v1/namespaces/default/services/elasticdl-a-master
        PATCH /apis/networking.k8s.io/v1/namespaces/default/networkpolicies/elasticdl-a
        PATCH /apis/policy/v1/namespaces/default/poddisruptionbudgets/elasticdl-a-master
        PATCH /api/v1/namespaces/default/configmaps/elasticdl-a
        POST /apis/batch/v1/namespaces/default/jobs
        POST /apis/events.k8s.io/v1/namespaces/default/events
        PATCH /apis/elasticdl.org/v1/namespaces/default/trainingjobs/a/status"#]]
    .assert_eq(&calls.join("\n"));
    assert_eq!(api.get(MAP, "/metadata/annotations/elasticdl.org~1workers"), "2");
    assert_eq!(api.get(MAP, "/metadata/ownerReferences/0/kind"), KIND);
    let master = "/apis/batch/v1/namespaces/default/jobs/elasticdl-a-master";
    assert_eq!(api.get(master, "/metadata/ownerReferences/0/kind"), "ConfigMap");
    let job = "/apis/elasticdl.org/v1/namespaces/default/trainingjobs/a/status";
    assert_eq!(api.get(job, "/status/state"), "Admitted");
}

#[tokio::test]
async fn an_existing_object_is_not_an_error() {
    let api = FakeApi::default();
    let admit = actions().remove(0);
    let first = executor(&api, false).perform(&admit).await.unwrap().unwrap();
    let again = executor(&api, false).perform(&admit).await.unwrap().unwrap();
    assert!(again.version.parse::<u32>().unwrap() > first.version.parse::<u32>().unwrap());
    assert_eq!((again.namespace.as_str(), again.name.as_str()), ("default", "elasticdl-a"));
}

#[tokio::test]
async fn masters_outside_are_not_made() {
    let api = FakeApi::default();
    executor(&api, true).perform(&actions().remove(0)).await.unwrap();
    assert!(!api.calls().contains("/jobs"));
}

#[tokio::test]
async fn a_resize_is_a_note_and_a_stop_ends_pods() {
    let api = FakeApi::default();
    let executor = executor(&api, false);
    executor
        .perform(&on_job(Action::Resize(Grant { workers: 4, leave: vec![3, 7] })))
        .await
        .unwrap();
    assert_eq!(api.get(MAP, "/metadata/annotations/elasticdl.org~1workers"), "4");
    assert_eq!(api.get(MAP, "/metadata/annotations/elasticdl.org~1leave"), "3,7");
    executor.perform(&on_job(Action::Resize(Grant { workers: 5, leave: vec![] }))).await.unwrap();
    assert!(api.get(MAP, "/metadata/annotations/elasticdl.org~1leave").is_null());
    api.calls();
    let pods = vec![("m".to_owned(), "1".to_owned()), ("w".to_owned(), "2".to_owned())];
    executor.perform(&on_job(Action::Stop { pods })).await.unwrap();
    assert_eq!(api.get(MAP, "/metadata/annotations/elasticdl.org~1workers"), "0");
    expect![[r#"
        PATCH /api/v1/namespaces/default/configmaps/elasticdl-a
        DELETE /apis/batch/v1/namespaces/default/jobs/elasticdl-a-master
        DELETE /api/v1/namespaces/default/pods/m
        DELETE /api/v1/namespaces/default/pods/w
    "#]]
    .assert_eq(&api.calls());
}

#[tokio::test]
async fn a_refusal_is_one_sentence_and_the_rest_is_not_tried() {
    let api = FakeApi::default();
    api.refuse(403, "configmaps is forbidden");
    let error = executor(&api, false).perform(&actions().remove(0)).await.unwrap_err();
    let report = edl_core::error::chain(&error);
    assert!(report.starts_with("cannot apply configmap `default/elasticdl-a`: "), "{report}");
    assert!(report.contains("configmaps is forbidden"), "{report}");
    assert_eq!(api.calls().lines().count(), 1);
    // A pod that is gone, or another of its name, is as good as deleted.
    let pods = vec![("m".to_owned(), "1".to_owned())];
    let stop = on_job(Action::Stop { pods });
    executor(&api, false).perform(&stop).await.unwrap();
}

#[test]
fn a_long_note_is_truncated_between_two_letters() {
    assert_eq!(shortened("ab"), "ab");
    let long = "→".repeat(1000);
    assert!(shortened(&long).len() <= MAX_NOTE && shortened(&long).len() > MAX_NOTE - 4);
}
