// SPDX-License-Identifier: Apache-2.0
//! What installs the operator: the definition of `TrainingJob`, the rights that it uses and no
//! others, and its Deployment. `manifests/operator/` holds the same as files.

use edl_kube::yaml;
use serde_json::{Value, json};

use crate::crd;
use crate::lease::NAME;

/// Where the operator runs unless it is told otherwise.
pub const NAMESPACE: &str = "elasticdl";
/// Where it serves its page, `/metrics` and `/healthz`.
pub const HTTP_PORT: u16 = 8080;
/// As whom it runs.
const USER: u32 = 1000;

/// A file of manifests: its name and its text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct File {
    pub name: &'static str,
    pub text: String,
}

/// The definition alone.
#[must_use]
pub fn definition() -> String {
    document("TrainingJob fields: `kubectl explain trainingjob.spec`.", &[crd::definition()])
}

/// All files, in the order of their names, in which `kubectl apply -f FOLDER` applies them: the
/// namespace comes with the Deployment, whose pods wait for their rights.
#[must_use]
pub fn files(namespace: &str, image: &str) -> Vec<File> {
    vec![
        File { name: "crd.yaml", text: definition() },
        File { name: "deployment.yaml", text: document(DEPLOYMENT, &deployment(namespace, image)) },
        File { name: "rbac.yaml", text: document(RBAC, &rights(namespace)) },
    ]
}

const RBAC: &str = "Permissions of the operator: only what it uses. It creates Secrets for its \
                    jobs but cannot read them.\n# For the permissions of the jobs' pods, see \
                    manifests/elasticdl-rbac.yaml.";

const DEPLOYMENT: &str = "The operator. Several replicas can run; only one acts at a time.";

fn rights(namespace: &str) -> Vec<Value> {
    let rule = |group: &str, resources: &[&str], verbs: &[&str]| {
        json!({
            "apiGroups": [group], "resources": resources, "verbs": verbs,
        })
    };
    let see = ["list", "watch"];
    let make = ["create", "patch"];
    let api = "rbac.authorization.k8s.io";
    let subject = json!([{ "kind": "ServiceAccount", "name": NAME, "namespace": namespace }]);
    let here = json!({ "name": NAME, "namespace": namespace });
    let mut lease = rule("coordination.k8s.io", &["leases"], &["get", "update"]);
    lease["resourceNames"] = json!([NAME]);
    vec![
        json!({ "apiVersion": "v1", "kind": "ServiceAccount", "metadata": here }),
        json!({
            "apiVersion": format!("{api}/v1"),
            "kind": "ClusterRole",
            "metadata": { "name": NAME },
            "rules": [
                rule("", &["nodes"], &see),
                rule("", &["pods"], &["create", "delete", "list", "watch"]),
                rule("", &["configmaps"], &["create", "list", "patch", "watch"]),
                rule("", &["secrets"], &["create"]),
                rule("", &["services"], &make),
                rule("networking.k8s.io", &["networkpolicies"], &make),
                rule("policy", &["poddisruptionbudgets"], &make),
                rule("scheduling.k8s.io", &["priorityclasses"], &see),
                rule("events.k8s.io", &["events"], &["create"]),
                rule(crd::GROUP, &[crd::PLURAL], &see),
                rule(crd::GROUP, &["trainingjobs/status"], &["patch"]),
            ],
        }),
        json!({
            "apiVersion": format!("{api}/v1"),
            "kind": "ClusterRoleBinding",
            "metadata": { "name": NAME },
            "roleRef": { "apiGroup": api, "kind": "ClusterRole", "name": NAME },
            "subjects": subject,
        }),
        json!({
            "apiVersion": format!("{api}/v1"),
            "kind": "Role",
            "metadata": here,
            // What is not there yet cannot be named.
            "rules": [rule("coordination.k8s.io", &["leases"], &["create"]), lease],
        }),
        json!({
            "apiVersion": format!("{api}/v1"),
            "kind": "RoleBinding",
            "metadata": here,
            "roleRef": { "apiGroup": api, "kind": "Role", "name": NAME },
            "subjects": subject,
        }),
    ]
}

fn deployment(namespace: &str, image: &str) -> Vec<Value> {
    let labels = json!({ "app": NAME });
    let field = |name: &str, path: &str| json!({ "name": name, "valueFrom": { "fieldRef": { "fieldPath": path } } });
    let probe = json!({ "httpGet": { "path": "/healthz", "port": "http" } });
    let container = json!({
        "name": "operator",
        "image": image,
        "command": ["elasticdl", "operator"],
        "args": [
            // Kubernetes puts it in: wherever the Deployment is moved to, it looks there.
            "--namespace=$(POD_NAMESPACE)",
            "--max_load_desired=0.97",
            "--log_level=INFO",
            format!("--http_port={HTTP_PORT}"),
        ],
        "env": [field("POD_NAME", "metadata.name"), field("POD_NAMESPACE", "metadata.namespace")],
        "ports": [{ "name": "http", "containerPort": HTTP_PORT }],
        "livenessProbe": probe,
        "readinessProbe": probe,
        "resources": {
            "requests": { "cpu": "100m", "memory": "128Mi" },
            "limits": { "memory": "1Gi" },
        },
        "securityContext": {
            "allowPrivilegeEscalation": false,
            "readOnlyRootFilesystem": true,
            "capabilities": { "drop": ["ALL"] },
        },
    });
    let home =
        json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": namespace } });
    let deployment = json!({
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": { "name": NAME, "namespace": namespace, "labels": labels },
        "spec": {
            "replicas": 1,
            "selector": { "matchLabels": labels },
            "template": {
                "metadata": { "labels": labels },
                "spec": {
                    "serviceAccountName": NAME,
                    "securityContext": {
                        "runAsNonRoot": true,
                        "runAsUser": USER,
                        "runAsGroup": USER,
                        "seccompProfile": { "type": "RuntimeDefault" },
                    },
                    "containers": [container],
                },
            },
        },
    });
    vec![home, deployment]
}

fn document(about: &str, objects: &[Value]) -> String {
    let text = |object: &Value| yaml::write(object).unwrap_or_default();
    let body: Vec<String> = objects.iter().map(text).collect();
    let head = "# SPDX-License-Identifier: Apache-2.0";
    let made = "# Printed by `elasticdl operator manifests`.";
    format!("{head}\n# {about}\n{made}\n{}", body.join("---\n"))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// The image that `make images` builds.
    const IMAGE: &str = "elasticdl:native";

    #[test]
    fn the_files_are_what_the_command_prints() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../manifests/operator");
        let is_update = std::env::var_os("UPDATE_EXPECT").is_some();
        for File { name, text } in files(NAMESPACE, IMAGE) {
            let path = folder.join(name);
            if is_update {
                std::fs::create_dir_all(&folder).unwrap();
                std::fs::write(&path, &text).unwrap();
            }
            let kept = std::fs::read_to_string(&path).unwrap_or_default();
            assert!(kept == text, "{}: regenerate it with UPDATE_EXPECT=1", path.display());
        }
    }

    #[test]
    fn nothing_is_allowed_but_what_is_used() {
        let rules = rights("x");
        let text = serde_json::to_string(&rules).unwrap();
        assert!(!text.contains('*'), "{text}");
        let of = |resource: &str| -> Vec<String> {
            let rules = rules[1]["rules"].as_array().unwrap();
            let named = rules.iter().filter(|rule| rule["resources"][0] == resource);
            let verbs = named.flat_map(|rule| rule["verbs"].as_array().unwrap().clone());
            verbs.map(|verb| verb.as_str().unwrap().to_owned()).collect()
        };
        assert_eq!(of("secrets"), ["create"]);
        assert_eq!(of("nodes"), ["list", "watch"]);
        assert_eq!(of("trainingjobs"), ["list", "watch"]);
    }
}
