// SPDX-License-Identifier: Apache-2.0
//! The CustomResourceDefinition, which the API server enforces.
//!
//! The fields of a job and their types come from the table of the job description.

use edl_core::spec::{FIELDS, Field, FieldKind, MAX_WORKERS};
use serde_json::{Map, Value, json};

use super::{GROUP, KIND, PLURAL, VERSION};

/// The names of the job's pods are longer, and limited.
const MAX_NAME: u32 = 50;

/// The definition of `TrainingJob`.
#[must_use]
pub fn definition() -> Value {
    json!({
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": { "name": format!("{PLURAL}.{GROUP}") },
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": format!("{KIND}List"),
                "plural": PLURAL,
                "singular": "trainingjob",
                "shortNames": ["tj"],
            },
            "versions": [{
                "name": VERSION,
                "served": true,
                "storage": true,
                "additionalPrinterColumns": columns(),
                "subresources": {
                    "status": {},
                    "scale": {
                        "specReplicasPath": ".spec.max_workers",
                        "statusReplicasPath": ".status.workers",
                        "labelSelectorPath": ".status.selector",
                    },
                },
                "schema": { "openAPIV3Schema": {
                    "type": "object",
                    "required": ["spec"],
                    "properties": { "spec": spec(), "status": status() },
                    "x-kubernetes-validations": [
                        rule(
                            "!has(self.spec.job_name) || self.spec.job_name == '' \
                             || self.spec.job_name == self.metadata.name",
                            "job_name must be the name of the TrainingJob; leave it out",
                        ),
                        rule(
                            &format!("size(self.metadata.name) <= {MAX_NAME}"),
                            &format!("the name must have at most {MAX_NAME} characters"),
                        ),
                    ],
                } },
            }],
        },
    })
}

fn columns() -> Value {
    let column = |name: &str, kind: &str, path: &str| {
        json!({
            "name": name, "type": kind, "jsonPath": path,
        })
    };
    let wide = |mut column: Value| {
        column["priority"] = 1.into();
        column
    };
    json!([
        column("Workers", "integer", ".status.workers"),
        column("Progress", "string", ".status.progress"),
        column("ETA", "string", ".status.eta"),
        wide(column("State", "string", ".status.state")),
        wide(column("Min", "integer", ".status.minWorkers")),
        wide(column("Max", "integer", ".status.maxWorkers")),
        column("Age", "date", ".metadata.creationTimestamp"),
    ])
}

fn spec() -> Value {
    let mut fields = job_fields();
    fields.extend(cluster_fields());
    fields.extend(edl_fields());
    json!({
        "type": "object",
        "properties": fields,
        "x-kubernetes-validations": [
            rule(
                "!has(self.min_workers) || !has(self.max_workers) \
                 || self.min_workers <= self.max_workers",
                "min_workers must not exceed max_workers",
            ),
            rule(
                "!has(self.min_workers) || !has(self.num_workers) || has(self.max_workers) \
                 || self.min_workers <= self.num_workers",
                "min_workers must not exceed num_workers",
            ),
            rule(
                "has(self.image_name) || has(self.image)",
                "image_name is required: set it to the image of the job's pods",
            ),
        ],
    })
}

/// The fields of the job description.
fn job_fields() -> Map<String, Value> {
    FIELDS.iter().map(|field| (field.name.to_owned(), of_field(field))).collect()
}

fn of_field(field: &Field) -> Value {
    match field.kind {
        _ if field.name == "job_name" => json!({ "type": "string", "maxLength": MAX_NAME }),
        FieldKind::Text => json!({ "type": "string" }),
        FieldKind::Choice(names) => json!({ "type": "string", "enum": names }),
        FieldKind::Integer => {
            let mut schema =
                json!({ "type": "integer", "format": "int64", "minimum": field.least });
            if let Some(most) = field.most {
                schema["maximum"] = most.into();
            }
            schema
        }
        FieldKind::Number => json!({ "type": "number" }),
        FieldKind::Boolean => json!({ "type": "boolean" }),
        FieldKind::Map => free_form(),
    }
}

/// Fields that only jobs of a cluster have.
fn cluster_fields() -> Map<String, Value> {
    let queue = json!({ "type": "string", "maxLength": 63 });
    // A number, or the name of a PriorityClass.
    let priority = json!({ "x-kubernetes-int-or-string": true });
    [("queue".to_owned(), queue), ("priority".to_owned(), priority)].into_iter().collect()
}

/// The fields of PaddlePaddle EDL, which [`crate::aliases`] translates.
fn edl_fields() -> Map<String, Value> {
    let whole = || json!({ "type": "integer", "format": "int64", "minimum": 0 });
    let pods = || {
        let most = MAX_WORKERS;
        json!({ "type": "integer", "format": "int64", "minimum": 0, "maximum": most })
    };
    let text = || json!({ "type": "string" });
    let role = |has_entry: bool| {
        let mut role = json!({
            "type": "object",
            "properties": {
                "min-instance": pods(), "max-instance": pods(), "resources": free_form(),
                "etcd-endpoint": text(), "replicaSpec": free_form(),
            },
            "x-kubernetes-validations": [rule(
                "!has(self.min__dash__instance) || !has(self.max__dash__instance) \
                 || self.min__dash__instance <= self.max__dash__instance",
                "min-instance must not exceed max-instance",
            )],
        });
        if has_entry {
            for (field, schema) in
                [("entrypoint", text()), ("workspace", text()), ("passes", whole())]
            {
                role["properties"][field] = schema;
            }
        }
        role
    };
    let list = || json!({ "type": "array", "items": free_form() });
    let fields = [
        ("image", text()),
        ("ports_num", whole()),
        ("ports_num_for_sparse", whole()),
        ("fault_tolerant", json!({ "type": "boolean" })),
        ("passes", whole()),
        ("volumes", list()),
        ("VolumeMounts", list()),
        ("imagePullSecrets", list()),
        ("HostNetwork", json!({ "type": "boolean" })),
        ("host_network", json!({ "type": "boolean" })),
        ("trainer", role(true)),
        ("pserver", role(false)),
        ("master", role(false)),
    ];
    fields.into_iter().map(|(field, schema)| (field.to_owned(), schema)).collect()
}

fn status() -> Value {
    let whole = || json!({ "type": "integer", "format": "int64" });
    let text = || json!({ "type": "string" });
    json!({
        "type": "object",
        "properties": {
            "state": text(),
            "observedGeneration": whole(),
            "workers": whole(),
            "wantedWorkers": whole(),
            "minWorkers": whole(),
            "maxWorkers": whole(),
            "recordsDone": whole(),
            "recordsTotal": whole(),
            "progress": text(),
            "eta": text(),
            "selector": text(),
            "conditions": {
                "type": "array",
                "x-kubernetes-list-type": "map",
                "x-kubernetes-list-map-keys": ["type"],
                "items": {
                    "type": "object",
                    "required": ["type", "status", "reason", "lastTransitionTime"],
                    "properties": {
                        "type": text(),
                        "status": { "type": "string", "enum": ["True", "False", "Unknown"] },
                        "reason": text(),
                        "message": text(),
                        "lastTransitionTime": { "type": "string", "format": "date-time" },
                    },
                },
            },
        },
    })
}

fn free_form() -> Value {
    json!({ "type": "object", "x-kubernetes-preserve-unknown-fields": true })
}

fn rule(rule: &str, message: &str) -> Value {
    json!({ "rule": rule, "message": message })
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;

    use super::*;

    /// Kubernetes' own type holds limits as floats.
    fn as_floats(value: &Value) -> Value {
        match value {
            Value::Number(number) => number.as_f64().into(),
            Value::Array(list) => list.iter().map(as_floats).collect(),
            Value::Object(map) => {
                map.iter().map(|(field, value)| (field.clone(), as_floats(value))).collect()
            }
            Value::Null | Value::Bool(_) | Value::String(_) => value.clone(),
        }
    }

    #[test]
    fn the_definition_is_one_that_kubernetes_knows() {
        let read: CustomResourceDefinition = serde_json::from_value(definition()).unwrap();
        let version = &read.spec.versions[0];
        let columns = version.additional_printer_columns.as_ref().unwrap();
        let narrow = columns.iter().filter(|column| column.priority.is_none());
        let narrow: Vec<&str> = narrow.map(|column| column.name.as_str()).collect();
        assert_eq!(narrow, ["Workers", "Progress", "ETA", "Age"]);
        // No field was lost.
        let written = serde_json::to_value(&read).unwrap();
        assert!(as_floats(&written["spec"]) == as_floats(&definition()["spec"]));
    }

    #[test]
    fn every_field_of_a_job_has_its_type() {
        let spec = spec();
        let kind = |field: &str| spec["properties"][field]["type"].as_str().unwrap_or("any");
        let table = [
            ("model_def", "string"),
            ("shuffle", "boolean"),
            ("num_epochs", "integer"),
            ("heartbeat_timeout_secs", "number"),
            ("model_params", "object"),
            ("learning_rate", "number"),
            ("max_workers", "integer"),
            ("use_async", "boolean"),
            ("optimizer", "string"),
            ("priority", "any"),
            ("trainer", "object"),
        ];
        for (field, expected) in table {
            assert_eq!(kind(field), expected, "{field}");
        }
        assert_eq!(spec["properties"]["min_workers"]["minimum"], 1);
        assert_eq!(spec["properties"]["num_ps_pods"]["minimum"], 0);
        for field in ["num_workers", "min_workers", "max_workers", "lanes"] {
            assert_eq!(spec["properties"][field]["maximum"], MAX_WORKERS, "{field}");
        }
        assert_eq!(spec["properties"]["num_epochs"]["maximum"], Value::Null);
    }
}
