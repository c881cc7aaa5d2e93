// SPDX-License-Identifier: Apache-2.0
//! Tests of the Kubernetes fields.

use std::collections::BTreeMap;

use super::*;

const WORKER: InstanceId = InstanceId { role: Role::Worker, id: 0 };
const MASTER: InstanceId = InstanceId::MASTER;
const PS: InstanceId = InstanceId { role: Role::Ps, id: 0 };

fn job() -> JobSpec {
    JobSpec {
        job_name: "x".into(),
        image_name: "image".into(),
        volume: "host_path=/data,mount_path=/data".into(),
        ..JobSpec::default()
    }
}

fn refusal(change: impl FnOnce(&mut JobSpec)) -> String {
    let mut spec = job();
    change(&mut spec);
    spec.check_cluster().expect_err("it is refused").0
}

/// Why this text of a field is refused.
fn refused(name: &str, text: &str) -> String {
    let given = [(name.to_owned(), text.into())].into_iter().collect();
    job().with(given).expect_err("it is refused").0
}

fn resources(text: &str) -> BTreeMap<String, String> {
    text.parse::<Resources>().unwrap().0
}

#[test]
fn a_field_is_stored_as_the_text_it_was_read_from() {
    let text = "gpu=1, memory=5K";
    let spec = JobSpec { worker_resource_limit: text.into(), ..job() };
    let stored = serde_json::to_value(&spec).unwrap();
    assert_eq!(stored["worker_resource_limit"], text);
    assert_eq!(serde_json::from_value::<JobSpec>(stored).unwrap(), spec);
}

#[test]
fn resources_are_written_as_kubernetes_writes_them() {
    let text = "cpu=0.4, memory=1024Mi,disk=2G,gpu=1,amd.com/gpu=2";
    let found = resources(text);
    let found: Vec<_> = found.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
    assert_eq!(
        found,
        [
            ("amd.com/gpu", "2"),
            ("cpu", "0.4"),
            ("ephemeral-storage", "2G"),
            ("memory", "1024Mi"),
            ("nvidia.com/gpu", "1")
        ]
    );
    assert_eq!(resources("memory=5K")["memory"], "5k");
    assert!(resources("").is_empty());
}

#[test]
fn an_invalid_resource_is_refused_by_flag_and_value() {
    for (text, says) in [
        ("cpu", "`cpu` is not in the form name=amount"),
        ("cpu=fast", "invalid amount cpu=`fast`"),
        ("cpu=-1", "invalid amount cpu=`-1`"),
        ("memory=1024Mb", "invalid amount memory=`1024Mb`"),
        ("gpu=0.5", "invalid amount gpu=`0.5`"),
        ("ram=1Gi", "unknown resource `ram`"),
        ("cpu=1,cpu=2", "cpu is specified twice"),
    ] {
        let error = refused("ps_resource_limit", text);
        assert!(error.starts_with("--ps_resource_limit") && error.contains(says), "{error}");
    }
}

#[test]
fn a_limit_that_is_not_given_is_the_request() {
    let spec = JobSpec { worker_resource_request: "cpu=2".into(), ..job() };
    let (request, limit) = spec.resources(Role::Worker);
    assert_eq!((request.0["cpu"].as_str(), limit.0["cpu"].as_str()), ("2", "2"));
    let spec = JobSpec::default();
    let (request, _) = spec.resources(Role::Master);
    assert_eq!(request.0["memory"], "1024Mi");
}

#[test]
fn memory_is_multiplied_in_any_unit() {
    assert_eq!(times("1024Mi", 1.5), "1536Mi");
    assert_eq!(times("1Gi", 2.0), "2048Mi");
    assert_eq!(times("1000000", 1.0), "1Mi");
    assert_eq!(times("4M", 2.0), "8Mi");
}

#[test]
fn volumes_come_from_claims_and_hosts_by_new_and_old_names() {
    let volumes = |text: &str| text.parse::<Volumes>().unwrap().0;
    let found = volumes(
        "claim_name=c,mount_path=/a,sub_path=s; host_path=/h,mount_path=/b,type=Directory;",
    );
    assert_eq!(found.len(), 2);
    assert_eq!(found[0].source, Source::Claim("c".into()));
    assert_eq!(found[0].sub_path.as_deref(), Some("s"));
    let kind = Some("Directory".into());
    assert_eq!(found[1].source, Source::HostPath { path: "/h".into(), kind });
    let old = volumes("volume_name=c,mount_path=/a");
    assert_eq!(old[0].source, Source::Claim("c".into()));
    let named = volumes("volume_name=v,host_path=/h,mount_path=/a");
    assert!(matches!(&named[0].source, Source::HostPath { path, .. } if path == "/h"));
}

#[test]
fn a_volume_that_cannot_be_mounted_is_refused() {
    for (text, says) in [
        ("claim_name=c", "has no mount_path"),
        ("mount_path=/a", "has neither claim_name"),
        ("claim_name=c,host_path=/h,mount_path=/a", "separate two volumes with `;`"),
        ("claim_name=c,mount_path=a", "must be an absolute path"),
        ("claim=c,mount_path=/a", "cannot parse `claim=c`"),
        ("claim_name=C!,mount_path=/a", "is not a valid name for a volume claim"),
        ("host_path=/h,mount_path=/a;host_path=/g,mount_path=/a", "`/a` is mounted twice"),
    ] {
        let error = refused("volume", text);
        assert!(error.starts_with("--volume") && error.contains(says), "{error}");
    }
    let none = refusal(|spec| spec.volume = "".into());
    assert!(none.contains("share no storage") && none.contains("--volume"), "{none}");
}

#[test]
fn a_jobs_folder_is_on_its_first_volume_unless_set() {
    assert_eq!(job().cluster_job_dir().unwrap(), "/data/elasticdl/x");
    let said = JobSpec { job_dir: "/data/here".into(), ..job() };
    assert_eq!(said.cluster_job_dir().unwrap(), "/data/here");
    assert!(refusal(|spec| spec.job_dir = "here".into()).contains("absolute path"));
}

#[test]
fn a_value_of_a_variable_may_hold_commas_and_equal_signs() {
    let spec = JobSpec { envs: "A=1,B=x,y=z/,C=,D=a=b".into(), ..job() };
    let envs: Vec<_> = spec.envs.0.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
    assert_eq!(envs, [("A", "1"), ("B", "x"), ("C", ""), ("D", "a=b"), ("y", "z/")]);
    assert!(refused("envs", "oops").starts_with("--envs: `oops`"));
}

#[test]
fn a_name_is_a_class_and_a_number_is_a_share_of_the_workers() {
    let spec = JobSpec { worker_pod_priority: "0.5".into(), num_workers: 4, ..job() };
    let class = |id| spec.priority_class(InstanceId { id, ..WORKER }, None);
    let classes: Vec<_> = (0..4).map(|id| class(id) == Some("high-priority")).collect();
    assert_eq!(classes, [true, false, false, true], "from both ends in turn");
    assert_eq!(spec.priority_class(WORKER, Some(false)), Some("low-priority"));
    let named = JobSpec { worker_pod_priority: "mine".into(), ..job() };
    assert_eq!(named.priority_class(WORKER, None), Some("mine"));
    assert_eq!(job().priority_class(WORKER, None), None);
    assert_eq!((n_high(0.3, 10), n_high(0.31, 10), n_high(1.0, 3)), (3, 4, 3));
}

#[test]
fn a_server_has_the_priority_of_the_master_unless_set() {
    let mut spec = JobSpec { master_pod_priority: "top".into(), ..job() };
    assert_eq!(spec.priority_class(MASTER, None), Some("top"));
    assert_eq!(spec.priority_class(PS, None), Some("top"));
    spec.ps_pod_priority = "own".into();
    assert_eq!(spec.priority_class(PS, None), Some("own"));
    let share = refused("master_pod_priority", "0.5");
    assert!(share.starts_with("--master_pod_priority") && share.contains("fraction"), "{share}");
    let more = refused("worker_pod_priority", "1.5");
    assert!(more.contains("from 0 to 1"), "{more}");
}

#[test]
fn an_image_is_the_masters_unless_workers_or_servers_have_their_own() {
    let mut spec = job();
    assert_eq!([Role::Master, Role::Worker, Role::Ps].map(|role| spec.image(role)), ["image"; 3]);
    spec.worker_image = "w".into();
    assert_eq!((spec.image(Role::Ps), spec.image(Role::Master)), ("w", "image"));
    spec.ps_image = "p".into();
    assert_eq!((spec.image(Role::Ps), spec.image(Role::Worker)), ("p", "w"));
}

#[test]
fn names_are_checked() {
    job().check_cluster().unwrap();
    assert!(refusal(|spec| spec.namespace = "A b".into()).starts_with("--namespace"));
    assert!(refused("image_pull_secrets", "a,B").contains("`B`"));
    assert!(refusal(|spec| spec.job_name = "-x".into()).contains("begin and end"));
}
