// SPDX-License-Identifier: Apache-2.0
//! The Kubernetes objects of a job.

#![allow(clippy::too_many_lines, reason = "snapshots of objects are long")]

use edl_core::platform::{InstanceId, Role};
use edl_core::spec::{ImagePullPolicy, Invalid, JobSpec, RestartPolicy};
use edl_kube::manifest::{PodExtras, job_objects, master, owner, pod, populated, service, to_yaml};
use edl_kube::{names, yaml};
use expect_test::expect;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use serde_json::{Value, json};

const MASTER: InstanceId = InstanceId::MASTER;
const SERVER: InstanceId = InstanceId { role: Role::Ps, id: 0 };
const WORKER: InstanceId = InstanceId { role: Role::Worker, id: 3 };

fn job() -> JobSpec {
    JobSpec {
        job_name: "x".into(),
        image_name: "image:1".into(),
        image_pull_policy: ImagePullPolicy::Never,
        volume: "claim_name=c,mount_path=/data;claim_name=c,mount_path=/more,sub_path=s".into(),
        ..JobSpec::default()
    }
}

fn worker(change: impl FnOnce(&mut JobSpec), extras: &PodExtras) -> Result<Value, Invalid> {
    let mut spec = job();
    change(&mut spec);
    Ok(serde_json::to_value(pod(&spec, WORKER, extras)?).expect("JSON"))
}

#[test]
fn the_pod_of_a_worker_matches_the_snapshot() {
    let made = pod(&job(), WORKER, &PodExtras::default()).unwrap();
    expect![[r#"
        apiVersion: v1
        kind: Pod
        metadata:
          labels:
            app: elasticdl
            elasticdl_job_name: x
            elasticdl_replica_index: "3"
            elasticdl_replica_type: worker
          name: elasticdl-x-worker-3
        spec:
          automountServiceAccountToken: false
          containers:
          - command:
            - elasticdl
            - pod
            - worker
            env:
            - name: MALLOC_MMAP_THRESHOLD_
              value: "1073741824"
            - name: MALLOC_TRIM_THRESHOLD_
              value: "1073741824"
            - name: HOME
              value: /tmp
            - name: ELASTICDL_JOB_DIR
              value: /data/elasticdl/x
            - name: ELASTICDL_MASTER_ADDR
              value: elasticdl-x-master:50001
            - name: ELASTICDL_WORKER_ID
              value: "3"
            - name: POD_NAME
              valueFrom:
                fieldRef:
                  fieldPath: metadata.name
            - name: POD_NAMESPACE
              valueFrom:
                fieldRef:
                  fieldPath: metadata.namespace
            - name: POD_UID
              valueFrom:
                fieldRef:
                  fieldPath: metadata.uid
            - name: POD_IP
              valueFrom:
                fieldRef:
                  fieldPath: status.podIP
            image: image:1
            imagePullPolicy: Never
            name: elasticdl
            resources:
              limits:
                cpu: "1"
                memory: 4096Mi
              requests:
                cpu: "1"
                memory: 4096Mi
            securityContext:
              allowPrivilegeEscalation: false
              capabilities:
                drop:
                - ALL
              readOnlyRootFilesystem: true
            volumeMounts:
            - mountPath: /etc/elasticdl/job
              name: job
              readOnly: true
            - mountPath: /etc/elasticdl/key
              name: key
              readOnly: true
            - mountPath: /tmp
              name: tmp
            - mountPath: /data
              name: volume-0
            - mountPath: /more
              name: volume-0
              subPath: s
          restartPolicy: Never
          securityContext:
            fsGroup: 1000
            runAsGroup: 1000
            runAsNonRoot: true
            runAsUser: 1000
            seccompProfile:
              type: RuntimeDefault
          serviceAccountName: elasticdl-worker
          terminationGracePeriodSeconds: 30
          tolerations:
          - effect: NoExecute
            key: node.kubernetes.io/not-ready
            operator: Exists
            tolerationSeconds: 10
          - effect: NoExecute
            key: node.kubernetes.io/unreachable
            operator: Exists
            tolerationSeconds: 10
          volumes:
          - configMap:
              name: elasticdl-x
            name: job
          - name: key
            secret:
              defaultMode: 288
              optional: true
              secretName: elasticdl-x-key
          - emptyDir: {}
            name: tmp
          - name: volume-0
            persistentVolumeClaim:
              claimName: c
    "#]]
    .assert_eq(&yaml::write(&made).unwrap());
}

#[test]
fn every_pod_is_unprivileged() {
    for instance in [MASTER, SERVER, WORKER] {
        let pod = serde_json::to_value(pod(&job(), instance, &PodExtras::default()).unwrap());
        let pod = pod.unwrap();
        let (spec, container) = (&pod["spec"], &pod["spec"]["containers"][0]);
        assert_eq!(spec["securityContext"]["runAsNonRoot"], true);
        assert_eq!(spec["securityContext"]["seccompProfile"]["type"], "RuntimeDefault");
        assert_eq!(container["securityContext"]["readOnlyRootFilesystem"], true);
        assert_eq!(container["securityContext"]["allowPrivilegeEscalation"], false);
        assert_eq!(container["securityContext"]["capabilities"]["drop"], json!(["ALL"]));
    }
}

#[test]
fn only_the_master_gets_a_token_and_each_role_has_an_account() {
    let account = |name: &str, instance: InstanceId| {
        let spec = JobSpec { service_account: name.into(), ..job() };
        let pod = pod(&spec, instance, &PodExtras::default()).unwrap().spec.unwrap();
        (pod.service_account_name.unwrap(), pod.automount_service_account_token.unwrap())
    };
    for (instance, has_token) in [(MASTER, true), (SERVER, false), (WORKER, false)] {
        let role = format!("elasticdl-{}", instance.role);
        assert_eq!(account("", instance), (role, has_token));
        assert_eq!(account("mine", instance), ("mine".into(), has_token));
    }
}

#[test]
fn a_job_restarts_the_master_no_matter_how_its_pod_ends() {
    let spec = JobSpec { restart_policy: RestartPolicy::Always, ..job() };
    let job = master(&spec).unwrap();
    assert_eq!(job.metadata.name.as_deref(), Some("elasticdl-x-master"));
    let job = job.spec.unwrap();
    assert_eq!((job.backoff_limit, job.pod_failure_policy), (Some(i32::MAX), None));
    let pod = pod(&spec, MASTER, &PodExtras::default()).unwrap();
    assert_eq!(job.template.metadata.unwrap().labels, pod.metadata.labels);
    assert_eq!(job.template.spec, pod.spec);
    assert_eq!(pod.spec.unwrap().restart_policy.as_deref(), Some("Never"));
}

#[test]
fn flags_are_applied_to_the_pod() {
    let set = |spec: &mut JobSpec| {
        spec.worker_resource_request = "cpu=0.4,gpu=1".into();
        spec.worker_resource_limit = "cpu=1,memory=2048Mi,gpu=1".into();
        spec.worker_pod_priority = "mine".into();
        spec.service_account = "me".into();
        spec.image_pull_secrets = "a,b".into();
        spec.worker_image = "other".into();
        spec.envs = "A=1,HOME=/home".into();
    };
    let owner = OwnerReference { name: "elasticdl-x".into(), ..OwnerReference::default() };
    let extras = PodExtras {
        owner: Some(owner),
        memory_factor: 2.0,
        env: vec![("B".into(), "2".into())],
        ..PodExtras::default()
    };
    let pod = worker(set, &extras).unwrap();
    let (spec, container) = (&pod["spec"], &pod["spec"]["containers"][0]);
    assert_eq!(container["resources"]["requests"], json!({ "cpu": "0.4", "nvidia.com/gpu": "1" }));
    assert_eq!(container["resources"]["limits"]["memory"], "4096Mi");
    assert_eq!(spec["priorityClassName"], "mine");
    assert_eq!(spec["serviceAccountName"], "me");
    assert_eq!(spec["imagePullSecrets"], json!([{ "name": "a" }, { "name": "b" }]));
    assert_eq!(container["image"], "other");
    assert_eq!(pod["metadata"]["ownerReferences"][0]["name"], "elasticdl-x");
    let env = container["env"].as_array().unwrap();
    let value = |name: &str| env.iter().find(|e| e["name"] == name).map(|e| e["value"].clone());
    assert_eq!((value("A"), value("B")), (Some("1".into()), Some("2".into())));
    assert_eq!(value("HOME"), Some("/tmp".into()), "only /tmp is writable");
    assert_eq!(value("ELASTICDL_WORKER_ID"), Some("3".into()));
}

#[test]
fn a_patch_changes_only_the_fields_it_names() {
    let patch = "
pod:
  metadata: {annotations: {team: vision}}
  spec:
    nodeSelector: {disk: ssd}
    securityContext: {fsGroup: null}
    containers: [{name: elasticdl, env: [{name: HOME, value: /data}, {name: NEW, value: '1'}]}]
worker_pod: {spec: {tolerations: [{key: gpu, operator: Exists}]}}
ps_pod: {spec: {nodeName: other}}
";
    let before = worker(|_| {}, &PodExtras::default()).unwrap();
    let after =
        worker(|spec| spec.cluster_spec_json = patch.into(), &PodExtras::default()).unwrap();
    assert_eq!(after["metadata"]["annotations"]["team"], "vision");
    assert_eq!(after["spec"]["nodeSelector"]["disk"], "ssd");
    assert_eq!(after["spec"]["tolerations"][2]["key"], "gpu", "the default tolerations are kept");
    assert!(after["spec"].get("nodeName").is_none(), "nodeName is only for servers");
    assert!(after["spec"]["securityContext"].get("fsGroup").is_none());
    assert_eq!(after["spec"]["securityContext"]["runAsNonRoot"], true);
    let (old, new) = (&before["spec"]["containers"][0], &after["spec"]["containers"][0]);
    assert_eq!(old["volumeMounts"], new["volumeMounts"]);
    let n_env = |container: &Value| container["env"].as_array().unwrap().len();
    assert_eq!(n_env(new), n_env(old) + 1);
}

#[test]
fn elasticdls_patch_format_is_supported() {
    let patch = r#"{"pod_spec": {"labels": {"a": "b"}, "tolerations": [{"key": "k"}],
        "env": [{"name": "E", "value": "v"}]}, "service_spec": {"type": "NodePort"}}"#;
    let spec = JobSpec { cluster_spec_json: patch.into(), ..job() };
    let pod = pod(&spec, WORKER, &PodExtras::default()).unwrap();
    assert_eq!(pod.metadata.labels.as_ref().unwrap()["a"], "b");
    let pod = serde_json::to_value(pod).unwrap();
    assert_eq!(pod["spec"]["tolerations"][2]["key"], "k");
    assert_eq!(pod["spec"]["containers"].as_array().unwrap().len(), 1);
    let service = service(&spec).unwrap().spec.unwrap();
    assert_eq!(service.type_.as_deref(), Some("NodePort"));
}

#[test]
fn an_invalid_patch_is_refused_and_its_field_is_named() {
    let refusal = |patch: &str| {
        let set = |spec: &mut JobSpec| spec.cluster_spec_json = patch.into();
        worker(set, &PodExtras::default()).unwrap_err().0
    };
    let typo = refusal("pod: {spec: {toleration: [{key: a}]}}");
    assert_eq!(typo, "--cluster_spec: unknown field `pod.spec.toleration`");
    assert!(refusal("pods: {}").contains("pods"));
    assert!(refusal("- 1").contains("expected patches"));
    assert!(refusal("pod: {spec: {hostNetwork: maybe}}").contains("is invalid"));
}

#[test]
fn variables_are_inherited_if_their_whole_name_matches() {
    let mut spec = JobSpec { populate_env_names: "NCCL_.*|MODE".into(), ..job() };
    let all = ["NCCL_DEBUG", "MODE", "MODEL", "X_NCCL_"].map(|n| (n.to_owned(), "1".to_owned()));
    let names =
        |found: Vec<(String, String)>| found.into_iter().map(|(n, _)| n).collect::<Vec<_>>();
    assert_eq!(names(populated(&spec, all.clone()).unwrap()), ["NCCL_DEBUG", "MODE"]);
    spec.populate_env_names = "(".into();
    assert!(populated(&spec, all).unwrap_err().0.starts_with("--populate_env_names=`(`"));
}

#[test]
fn the_configmap_describes_the_job_and_owns_the_rest() {
    let mut objects = job_objects(&job(), "secret").unwrap();
    let text = &objects.config_map.data.as_ref().unwrap()[names::JOB_FILE];
    assert_eq!(yaml::read::<JobSpec>(text).unwrap(), job());
    objects.config_map.metadata.uid = Some("u".into());
    let owner = owner(&objects.config_map).unwrap();
    objects.own(&owner);
    let owned = [&objects.secret.metadata, &objects.service.metadata, &objects.master.metadata];
    for metadata in owned.into_iter().chain(objects.budgets.iter().map(|b| &b.metadata)) {
        let owners = metadata.owner_references.as_ref().unwrap();
        assert_eq!((owners[0].name.as_str(), owners[0].uid.as_str()), ("elasticdl-x", "u"));
    }
    let labels = objects.network_policy.metadata.labels.unwrap();
    assert_eq!(labels["elasticdl_job_name"], "x");
}

#[test]
fn the_other_objects_of_a_job_match_the_snapshot() {
    let objects = job_objects(&job(), "secret").unwrap();
    let mut text = String::new();
    for document in [
        yaml::write(&objects.service).unwrap(),
        yaml::write(&objects.network_policy).unwrap(),
        yaml::write(&objects.budgets).unwrap(),
    ] {
        text += &document;
    }
    expect![[r#"
        apiVersion: v1
        kind: Service
        metadata:
          labels:
            app: elasticdl
            elasticdl_job_name: x
          name: elasticdl-x-master
        spec:
          ports:
          - name: control
            port: 50001
            targetPort: 50001
          - name: http
            port: 8080
            targetPort: 8080
          publishNotReadyAddresses: true
          selector:
            elasticdl_job_name: x
            elasticdl_replica_type: master
        apiVersion: networking.k8s.io/v1
        kind: NetworkPolicy
        metadata:
          labels:
            app: elasticdl
            elasticdl_job_name: x
          name: elasticdl-x
        spec:
          ingress:
          - from:
            - podSelector:
                matchLabels:
                  elasticdl_job_name: x
          podSelector:
            matchLabels:
              elasticdl_job_name: x
          policyTypes:
          - Ingress
        - apiVersion: policy/v1
          kind: PodDisruptionBudget
          metadata:
            labels:
              app: elasticdl
              elasticdl_job_name: x
            name: elasticdl-x-master
          spec:
            minAvailable: 1
            selector:
              matchLabels:
                elasticdl_job_name: x
                elasticdl_replica_type: master
        - apiVersion: policy/v1
          kind: PodDisruptionBudget
          metadata:
            labels:
              app: elasticdl
              elasticdl_job_name: x
            name: elasticdl-x-ps
          spec:
            minAvailable: 1
            selector:
              matchLabels:
                elasticdl_job_name: x
                elasticdl_replica_type: ps
    "#]]
    .assert_eq(&text);
}

#[test]
fn printed_objects_contain_no_key_and_can_be_read_back() {
    let objects = job_objects(&job(), "0123secret").unwrap();
    let text = to_yaml(&objects).unwrap();
    assert!(!text.contains("0123secret") && !text.contains("kind: Secret"));
    let documents: Vec<Value> =
        text.split("---\n").map(|document| yaml::read(document).unwrap()).collect();
    let kinds: Vec<_> = documents.iter().map(|it| it["kind"].as_str().unwrap()).collect();
    assert_eq!(
        kinds,
        ["ConfigMap", "NetworkPolicy", "PodDisruptionBudget", "PodDisruptionBudget", "Job"]
    );
    let master: Job = serde_json::from_value(documents[4].clone()).unwrap();
    assert_eq!(master, objects.master);
}
