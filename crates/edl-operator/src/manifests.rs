// SPDX-License-Identifier: Apache-2.0
//! The manifests that install the operator: the CRD, its permissions and its Deployment. The files in
//! `manifests/operator/` are the same.

use edl_kube::yaml;

use crate::crd;

/// The operator's default namespace.
pub const NAMESPACE: &str = "elasticdl";
/// The port of its page, `/metrics` and `/healthz`.
pub const HTTP_PORT: u16 = 8080;

/// A file of manifests: its name and its text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct File {
    pub name: &'static str,
    pub text: String,
}

/// The definition alone.
#[must_use]
pub fn definition() -> String {
    let body = yaml::write(&crd::definition()).unwrap_or_default();
    format!(
        "# SPDX-License-Identifier: Apache-2.0\n\
         # TrainingJob fields: `kubectl explain trainingjob.spec`.\n\
         # Printed by `elasticdl operator manifests`.\n{body}"
    )
}

/// All files, in the order in which `kubectl apply -f FOLDER` applies them: by name. The namespace is
/// in the Deployment's file, whose pods wait for their permissions.
#[must_use]
pub fn files(namespace: &str, image: &str) -> Vec<File> {
    let quoted = |text: &str| yaml::write(&text).unwrap_or_default().trim_end().to_owned();
    let (namespace, image) = (quoted(namespace), quoted(image));
    let filled = |text: &str| text.replace("{namespace}", &namespace).replace("{image}", &image);
    let deployment = filled(include_str!("manifests/deployment.yaml"));
    let rbac = filled(include_str!("manifests/rbac.yaml"));
    vec![
        File { name: "crd.yaml", text: definition() },
        File { name: "deployment.yaml", text: deployment },
        File { name: "rbac.yaml", text: rbac },
    ]
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::{Value, json};

    use super::*;
    use crate::lease::NAME;

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
        let [_, deployment, rbac] = files("x", IMAGE).try_into().unwrap();
        let documents = rbac.text.split("---\n").map(|text| yaml::read_value(text).unwrap());
        let rules: Vec<Value> = documents.collect();
        assert!(!rbac.text.contains('*'), "{}", rbac.text);
        assert!(deployment.text.contains(&format!("--http_port={HTTP_PORT}\n")));
        assert_eq!(rules[0]["metadata"], json!({ "name": NAME, "namespace": "x" }));
        let of = |resource: &str| -> Vec<String> {
            let rules = rules[1]["rules"].as_array().unwrap();
            let named = rules.iter().filter(|rule| rule["resources"][0] == resource);
            let verbs = named.flat_map(|rule| rule["verbs"].as_array().unwrap().clone());
            verbs.map(|verb| verb.as_str().unwrap().to_owned()).collect()
        };
        assert_eq!(of("secrets"), ["create"]);
        assert_eq!(of("pods"), ["delete", "list", "watch"]);
        assert_eq!(of("nodes"), ["list", "watch"]);
        assert_eq!(of("trainingjobs"), ["list", "watch"]);
    }
}
