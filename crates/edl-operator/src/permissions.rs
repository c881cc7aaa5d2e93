// SPDX-License-Identifier: Apache-2.0
//! What a TrainingJob may ask for beyond its own fields. The operator creates pods with its own
//! rights, so the cluster administrator decides, in the ConfigMap of the queues, file
//! `permissions.yaml`. Without the file, nothing here gives a job more than a restricted pod.
//!
//! ```yaml
//! patches: [spec.nodeSelector, spec.tolerations, service.metadata.annotations]
//! host_paths: [/data]
//! service_accounts: [trainer]
//! priority_classes: [high, low]
//! ```

use std::path::{Component, Path};

use edl_core::cluster::Source;
use edl_core::platform::{InstanceId, Role};
use edl_core::spec::JobSpec;
use edl_kube::{manifest, yaml};
use k8s_openapi::api::core::v1::ConfigMap;
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::description::Trouble;
use crate::queues::CONFIG_MAP;

/// The file in the ConfigMap of the queues.
pub const FILE: &str = "permissions.yaml";

/// Fields of a pod that say where it runs and what its program sees, but give it no rights. Values of
/// variables may not come from Secrets.
const PATCHES: [&str; 10] = [
    "metadata.labels",
    "spec.affinity",
    "spec.containers.env.name",
    "spec.containers.env.value",
    "spec.containers.name",
    "spec.containers.resources",
    "spec.nodeSelector",
    "spec.terminationGracePeriodSeconds",
    "spec.tolerations",
    "spec.topologySpreadConstraints",
];
/// The account of pods that name none.
const DEFAULT_ACCOUNT: &str = "default";
/// PriorityClasses of Kubernetes' own pods.
const SYSTEM_CLASSES: &str = "system-";

/// What jobs may set.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Permissions {
    fields: Fields,
    /// What is wrong with the file, if anything; then the defaults hold.
    pub trouble: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Fields {
    /// Fields of pods, and with `service.` in front those of the Service, with all below them.
    patches: Vec<String>,
    /// Folders of nodes, with all below them.
    host_paths: Vec<String>,
    service_accounts: Vec<String>,
    /// None: all but those of the system.
    priority_classes: Option<Vec<String>>,
}

impl Default for Fields {
    fn default() -> Self {
        Self {
            patches: PATCHES.map(Into::into).into(),
            host_paths: Vec::new(),
            service_accounts: Vec::new(),
            priority_classes: None,
        }
    }
}

impl Permissions {
    /// The permissions in the ConfigMap; without them, the defaults.
    #[must_use]
    pub fn read(map: Option<&ConfigMap>) -> Self {
        let data = map.and_then(|map| map.data.as_ref());
        let Some(text) = data.and_then(|data| data.get(FILE)) else { return Self::default() };
        match yaml::read(text) {
            Ok(fields) => Self { fields, trouble: None },
            Err(error) => {
                let trouble = Some(format!("{CONFIG_MAP}, {FILE}: {error}"));
                Self { trouble, ..Self::default() }
            }
        }
    }

    /// Refuses a job that asks for more than its namespace may have.
    pub fn check(&self, spec: &JobSpec) -> Result<(), Trouble> {
        let refused = |what: String, list: &str| {
            let message = format!(
                "{what} is not allowed in a TrainingJob; remove it, or ask the cluster \
                 administrator to add it to `{list}` in `{CONFIG_MAP}`, {FILE}"
            );
            Err(Trouble { reason: "NotAllowed", message })
        };
        if let Some(path) = self.refused_patch(spec)? {
            return refused(format!("patching `{path}`"), "patches");
        }
        for volume in &spec.volume.0 {
            if let Source::HostPath { path, .. } = &volume.source
                && !self.allows_host_path(path)
            {
                return refused(format!("host_path `{path}`"), "host_paths");
            }
        }
        let account = &spec.service_account;
        if !account.is_empty()
            && account != DEFAULT_ACCOUNT
            && !self.fields.service_accounts.contains(account)
        {
            return refused(format!("service_account `{account}`"), "service_accounts");
        }
        match priority_classes(spec).into_iter().find(|class| !self.allows_class(class)) {
            Some(class) => refused(format!("PriorityClass `{class}`"), "priority_classes"),
            None => Ok(()),
        }
    }

    fn refused_patch(&self, spec: &JobSpec) -> Result<Option<String>, Trouble> {
        let patches = manifest::read_patches(&spec.cluster_spec_json)?;
        let mut paths = Vec::new();
        for pod in [&patches.pod, &patches.master_pod, &patches.ps_pod, &patches.worker_pod] {
            collect("", pod, &mut paths);
        }
        collect("service.", &patches.service, &mut paths);
        Ok(paths.into_iter().find(|path| !self.fields.patches.iter().any(|it| covers(it, path))))
    }

    fn allows_host_path(&self, path: &str) -> bool {
        let path = Path::new(path);
        let is_plain = !path.components().any(|part| part == Component::ParentDir);
        is_plain && self.fields.host_paths.iter().any(|allowed| path.starts_with(allowed))
    }

    fn allows_class(&self, class: &str) -> bool {
        match &self.fields.priority_classes {
            Some(classes) => classes.iter().any(|allowed| allowed == class),
            None => !class.starts_with(SYSTEM_CLASSES),
        }
    }
}

/// The paths of all values that a patch sets or removes; entries of lists have no names. An empty map
/// changes nothing.
fn collect(above: &str, patch: &Map<String, Value>, paths: &mut Vec<String>) {
    for (field, value) in patch {
        let path = format!("{above}{field}");
        let below = format!("{path}.");
        match value {
            Value::Object(map) => collect(&below, map, paths),
            Value::Array(entries) if entries.iter().all(is_filled) && !entries.is_empty() => {
                let maps = entries.iter().filter_map(Value::as_object);
                maps.for_each(|map| collect(&below, map, paths));
            }
            Value::Array(_)
            | Value::Null
            | Value::Bool(_)
            | Value::Number(_)
            | Value::String(_) => paths.push(path),
        }
    }
}

fn is_filled(entry: &Value) -> bool {
    entry.as_object().is_some_and(|map| !map.is_empty())
}

/// Whether an allowed path is this one or one above it.
fn covers(allowed: &str, path: &str) -> bool {
    path.strip_prefix(allowed).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// The PriorityClasses that the pods of a job can get.
fn priority_classes(spec: &JobSpec) -> Vec<String> {
    let role = |role| spec.priority_class(InstanceId { role, id: 0 }, None);
    let worker =
        |is_high| spec.priority_class(InstanceId { role: Role::Worker, id: 0 }, Some(is_high));
    let all = [role(Role::Master), role(Role::Ps), worker(true), worker(false)];
    all.into_iter().flatten().map(Into::into).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn permissions(text: &str) -> Permissions {
        let data = Some([(FILE.to_owned(), text.to_owned())].into());
        Permissions::read(Some(&ConfigMap { data, ..ConfigMap::default() }))
    }

    fn spec(fields: Value) -> JobSpec {
        serde_json::from_value(fields).unwrap()
    }

    fn patched(patch: Value) -> JobSpec {
        spec(json!({ "cluster_spec_json": patch.to_string() }))
    }

    fn refusal(permissions: &Permissions, spec: &JobSpec) -> String {
        permissions.check(spec).map_or_else(|trouble| trouble.message, |()| "allowed".into())
    }

    #[test]
    fn by_default_a_job_gets_no_rights_of_the_node_or_of_another_account() {
        let default = Permissions::default();
        let table = [
            (spec(json!({"volume": "host_path=/,mount_path=/data"})), "host_path `/`"),
            (spec(json!({"service_account": "admin"})), "service_account `admin`"),
            (
                spec(json!({"worker_pod_priority": "system-node-critical"})),
                "PriorityClass `system-node-critical`",
            ),
            (patched(json!({"pod": {"spec": {"hostNetwork": true}}})), "`spec.hostNetwork`"),
            (
                patched(json!({"pod": {"spec": {"securityContext": null}}})),
                "`spec.securityContext`",
            ),
            (
                patched(json!({"worker_pod": {"spec": {"containers": [
                    {"name": "elasticdl", "securityContext": {"privileged": true}}]}}})),
                "`spec.containers.securityContext.privileged`",
            ),
            (
                patched(json!({"pod": {"spec": {"containers": [{"name": "elasticdl", "env": [
                    {"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]}]}}})),
                "`spec.containers.env.valueFrom.secretKeyRef",
            ),
            (
                patched(json!({"ps_pod": {"spec": {"volumes": [
                    {"name": "v", "hostPath": {"path": "/"}}]}}})),
                "`spec.volumes.hostPath.path`",
            ),
            (
                patched(json!({"master_pod_spec": {"serviceAccountName": "x"}})),
                "serviceAccountName",
            ),
            (patched(json!({"service": {"spec": {"type": "NodePort"}}})), "`service.spec.type`"),
            (patched(json!({"pod": {"spec": {"volumes": [{}]}}})), "`spec.volumes`"),
        ];
        for (spec, expected) in table {
            let found = refusal(&default, &spec);
            assert!(
                found.contains(expected) && found.contains("ask the cluster administrator"),
                "{found}"
            );
        }
    }

    #[test]
    fn placing_pods_and_setting_variables_is_always_allowed() {
        let default = Permissions::default();
        for spec in [
            spec(json!({"service_account": "default", "worker_pod_priority": "0.5",
                "volume": "claim_name=c,mount_path=/data"})),
            patched(json!({
                "pod": {"metadata": {"labels": {"team": "a"}}, "spec": {
                    "nodeSelector": {"disk": "ssd"},
                    "affinity": {"nodeAffinity": {}},
                    "containers": [{"name": "elasticdl", "env": [{"name": "A", "value": "1"}]}]}},
                "worker_pod": {"spec": {"tolerations": [{"key": "gpu", "operator": "Exists"}]}},
            })),
        ] {
            assert_eq!(refusal(&default, &spec), "allowed");
        }
    }

    #[test]
    fn the_owner_of_the_cluster_can_allow_more() {
        let more = permissions(
            "patches: [spec.hostNetwork, service.spec]\nhost_paths: [/data]\n\
             service_accounts: [trainer]\npriority_classes: [high]\n",
        );
        assert_eq!(more.trouble, None);
        let check = |fields| refusal(&more, &spec(fields));
        assert_eq!(check(json!({"service_account": "trainer"})), "allowed");
        assert_eq!(check(json!({"volume": "host_path=/data/a,mount_path=/d"})), "allowed");
        for path in ["/database", "/data/../etc", "/"] {
            let found = check(json!({"volume": format!("host_path={path},mount_path=/d")}));
            assert!(found.contains("host_path"), "{path}: {found}");
        }
        assert_eq!(check(json!({"master_pod_priority": "high"})), "allowed");
        assert!(check(json!({"master_pod_priority": "low"})).contains("PriorityClass `low`"));
        let patch = |patch| refusal(&more, &patched(patch));
        assert_eq!(patch(json!({"pod": {"spec": {"hostNetwork": true}}})), "allowed");
        assert_eq!(patch(json!({"service": {"spec": {"type": "NodePort"}}})), "allowed");
        let instead = patch(json!({"pod": {"spec": {"nodeSelector": {"a": "b"}}}}));
        assert!(instead.contains("`spec.nodeSelector.a`"), "the list replaces the default one");
    }

    #[test]
    fn an_invalid_file_allows_no_more_than_the_defaults() {
        for text in ["[1", "host_paths: /data", "everything: true"] {
            let found = permissions(text);
            assert!(found.trouble.as_ref().is_some_and(|why| why.contains(FILE)), "{found:?}");
            assert_eq!(found.fields, Fields::default());
        }
        assert_eq!(Permissions::read(None), Permissions::default());
    }
}
