// SPDX-License-Identifier: Apache-2.0
//! The files in `manifests/` match what the code generates, or what it relies on.
//!
//! `UPDATE_EXPECT=1 cargo test -p edl-kube` rewrites the demos.

use std::path::{Path, PathBuf};

use edl_core::platform::Role::{Master, Ps, Worker};
use edl_core::spec::JobSpec;
use edl_kube::{manifest, names, yaml};
use expect_test::expect_file;
use k8s_openapi::api::core::v1::ServiceAccount;
use k8s_openapi::api::rbac::v1::{PolicyRule, Role, RoleBinding};
use k8s_openapi::api::scheduling::v1::PriorityClass;
use serde::de::DeserializeOwned;

const MINIKUBE: &str = "\
job_name: demo-mnist
model_def: mnist_cnn
training_data: /data/mnist/train
validation_data: /data/mnist/test
num_epochs: 2
num_workers: 1
evaluation_steps: 50
image_name: elasticdl:mnist_ps
image_pull_policy: Never
volume: host_path=/data,mount_path=/data
master_resource_request: cpu=0.2,memory=1024Mi
master_resource_limit: cpu=1,memory=2048Mi
ps_resource_request: cpu=0.2,memory=1024Mi
ps_resource_limit: cpu=1,memory=2048Mi
worker_resource_request: cpu=0.4,memory=1024Mi
worker_resource_limit: cpu=1,memory=2048Mi
";

const K8S: &str = "\
job_name: demo-mnist
model_def: mnist_cnn
training_data: /data/mnist/train
validation_data: /data/mnist/test
num_epochs: 2
num_workers: 3
num_ps_pods: 2
evaluation_steps: 50
image_name: elasticdl:mnist_ps
image_pull_policy: IfNotPresent
volume: claim_name=elasticdl-data,mount_path=/data
";

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../manifests")
}

fn demo(comment: &str, job: &str) -> String {
    let spec = yaml::read::<JobSpec>(job).expect("a job");
    spec.check().expect("a valid job");
    spec.check_cluster().expect("a valid job");
    let mut objects = manifest::job_objects(&spec, "").expect("objects");
    // Fields with default values are omitted, to keep the file short.
    objects.config_map.data = Some([(names::JOB_FILE.to_owned(), job.to_owned())].into());
    let yaml = manifest::to_yaml(&objects).expect("YAML");
    format!("# SPDX-License-Identifier: Apache-2.0\n{comment}{yaml}")
}

#[test]
fn the_demo_for_minikube_is_up_to_date() {
    let comment = "\
# MNIST on minikube: kubectl apply -f manifests/elasticdl-rbac.yaml -f <this file>
# Requires the image on the node, and the data in /data on the node, writable by user 1000.
";
    let file = folder().join("examples/elasticdl-demo-minikube.yaml");
    expect_file![file].assert_eq(&demo(comment, MINIKUBE));
}

#[test]
fn the_demo_for_a_cluster_is_up_to_date() {
    let comment = "\
# MNIST on a cluster: kubectl apply -f manifests/elasticdl-rbac.yaml -f <this file>
# Requires a claim `elasticdl-data` (ReadWriteMany) that contains the data.
";
    let file = folder().join("examples/elasticdl-demo-k8s.yaml");
    expect_file![file].assert_eq(&demo(comment, K8S));
}

fn read<T: DeserializeOwned>(name: &str, at: usize) -> T {
    let text = std::fs::read_to_string(folder().join(name)).expect("a file");
    let document = text.split("\n---\n").nth(at).expect("a document");
    yaml::read(document).expect("an object")
}

#[test]
fn the_priority_classes_match_the_defaults_for_shares_of_workers() {
    let spec = JobSpec::default();
    for (file, name, value) in [
        ("examples/high-prio.yaml", spec.high_priority_class.name(), 1_000_000),
        ("examples/low-prio.yaml", spec.low_priority_class.name(), 1000),
    ] {
        let class: PriorityClass = read(file, 0);
        assert_eq!((class.metadata.name.as_deref(), class.value), (name, value));
    }
}

#[test]
fn the_role_is_bound_only_to_masters_and_cannot_read_secrets() {
    let role: Role = read("elasticdl-rbac.yaml", 0);
    let binding: RoleBinding = read("elasticdl-rbac.yaml", 1);
    assert_eq!(Some(binding.role_ref.name), role.metadata.name);
    let [subject] = &binding.subjects.unwrap()[..] else {
        panic!("only the master has permissions")
    };
    assert_eq!(subject.name, names::account(Master));
    let rules = role.rules.unwrap();
    let verbs = |resource: &str| -> Vec<String> {
        let is_about =
            |rule: &&PolicyRule| rule.resources.iter().flatten().any(|it| it == resource);
        rules.iter().filter(is_about).flat_map(|rule| rule.verbs.clone()).collect()
    };
    assert_eq!(verbs("secrets"), ["create"]);
    assert_eq!(verbs("pods"), ["create", "delete", "list", "watch"]);
    let all: Vec<_> = rules.iter().flat_map(|rule| rule.resources.clone().unwrap()).collect();
    assert_eq!(all, ["pods", "configmaps", "secrets", "services", "jobs"]);
}

#[test]
fn every_role_has_an_account_and_only_the_master_a_token() {
    for (at, role) in [Master, Ps, Worker].into_iter().enumerate() {
        let account: ServiceAccount = read("elasticdl-rbac.yaml", 2 + at);
        assert_eq!(account.metadata.name, Some(names::account(role)));
        let expected = if role == Master { None } else { Some(false) };
        assert_eq!(account.automount_service_account_token, expected);
    }
}
