// SPDX-License-Identifier: Apache-2.0
//! Translates the fields of PaddlePaddle EDL. Fields without a counterpart are reported in a note.
//!
//! | PaddlePaddle EDL | elasticdl |
//! |---|---|
//! | `image` | `image_name` |
//! | `passes` | `num_epochs` |
//! | `trainer.entrypoint`, `trainer.workspace` | `job_command` |
//! | `trainer.min-instance`, `.max-instance`, `.resources` | `min_workers`, `max_workers`, `worker_resource_*` |
//! | `pserver.min-instance`, `.resources` | `num_ps_pods`, `ps_resource_*` |
//! | `master.resources` | `master_resource_*` |
//! | `volumes`, `VolumeMounts` | `volume` (claims and host paths) |
//! | `imagePullSecrets` | `image_pull_secrets` |
//! | `fault_tolerant` | always on; with `false`, minimum and maximum must be equal |

use serde_json::{Map, Value};

type Fields = Map<String, Value>;

/// Fields that identify a description of EDL.
const MARKERS: [&str; 7] =
    ["trainer", "pserver", "fault_tolerant", "passes", "ports_num", "VolumeMounts", "image"];

/// Fields that are not needed: processes find each other, and state is on disk.
const NOT_NEEDED: [&str; 2] = ["ports_num", "ports_num_for_sparse"];

/// A translated description.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Translated {
    pub fields: Fields,
    /// Fields without a counterpart or with another meaning; a sentence each.
    pub notes: Vec<String>,
}

/// Translates EDL's fields to ours; our own fields take precedence.
pub fn translate(mut fields: Fields) -> Result<Translated, String> {
    if !MARKERS.iter().any(|field| fields.contains_key(*field)) {
        return Ok(Translated { fields, notes: Vec::new() });
    }
    let mut found = Fields::new();
    let mut notes = Vec::new();
    let is_edl = fields.contains_key("trainer") || fields.contains_key("pserver");
    if let Some(image) = fields.remove("image") {
        found.insert("image_name".into(), image);
    }
    if let Some(passes) = fields.remove("passes") {
        found.insert("num_epochs".into(), passes);
    }
    let is_tolerant = fields.remove("fault_tolerant");
    let trainer = role(&mut fields, "trainer")?;
    let pserver = role(&mut fields, "pserver")?;
    let master = role(&mut fields, "master")?;
    of_trainer(&trainer, &mut found, &mut notes)?;
    of_pserver(&pserver, &mut found, &mut notes)?;
    of_resources("master", &master, &mut found)?;
    if is_tolerant == Some(Value::Bool(false))
        && found.get("min_workers") != found.get("max_workers")
    {
        return Err("max-instance must equal min-instance when fault_tolerant is false; omit \
                    fault_tolerant: jobs survive the loss of any process"
            .into());
    }
    if is_edl && fields.remove("port").is_some() {
        notes.push("port is not needed: the master uses a fixed port in a cluster".into());
    }
    for field in NOT_NEEDED.iter().filter(|field| fields.remove(**field).is_some()) {
        notes.push(format!("{field} is not needed: each server has one port"));
    }
    let etcd = [&trainer, &pserver, &master].iter().any(|role| role.contains_key("etcd-endpoint"));
    if etcd {
        notes.push(
            "etcd-endpoint is not needed: the master keeps its state in the job's folder".into(),
        );
    }
    of_volumes(&mut fields, &mut found, &mut notes);
    of_secrets(&mut fields, &mut found);
    for field in ["HostNetwork", "host_network"] {
        if fields.remove(field) == Some(Value::Bool(true)) {
            notes.push(format!(
                "{field} was not converted: if the pods need it, patch them with cluster_spec_json"
            ));
        }
    }
    for (field, value) in found {
        fields.entry(field).or_insert(value);
    }
    Ok(Translated { fields, notes })
}

fn role(fields: &mut Fields, name: &str) -> Result<Fields, String> {
    match fields.remove(name) {
        None | Some(Value::Null) => Ok(Fields::new()),
        Some(Value::Object(role)) => Ok(role),
        Some(Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Array(_)) => {
            Err(format!("`{name}` must be a map with fields such as min-instance and resources"))
        }
    }
}

fn of_trainer(trainer: &Fields, found: &mut Fields, notes: &mut Vec<String>) -> Result<(), String> {
    for (edl, ours) in [("min-instance", "min_workers"), ("max-instance", "max_workers")] {
        if let Some(count) = trainer.get(edl) {
            found.insert(ours.into(), count.clone());
        }
    }
    if let Some(passes) = trainer.get("passes") {
        // EDL's examples set it here, although EDL did not read it.
        found.entry("num_epochs").or_insert_with(|| passes.clone());
    }
    let text = |field: &str| trainer.get(field).and_then(Value::as_str).filter(|it| !it.is_empty());
    if let Some(entry) = text("entrypoint") {
        let command = match text("workspace") {
            Some(folder) => format!("sh -c {}", quoted(&format!("cd {folder} && exec {entry}"))),
            None => entry.to_owned(),
        };
        found.insert("job_command".into(), command.into());
        notes.push(
            "the entrypoint runs as a worker: its training loop must call elasticdl.init()".into(),
        );
    }
    of_resources("worker", trainer, found)
}

fn of_pserver(pserver: &Fields, found: &mut Fields, notes: &mut Vec<String>) -> Result<(), String> {
    let (min, max) = (pserver.get("min-instance"), pserver.get("max-instance"));
    if let Some(count) = min.or(max) {
        found.insert("num_ps_pods".into(), count.clone());
    }
    if min.is_some() && max.is_some() && min != max {
        notes.push(
            "pserver.max-instance is not used: the number of servers is fixed while a job runs"
                .into(),
        );
    }
    of_resources("ps", pserver, found)
}

/// `{requests: {cpu: 200m}, limits: {…}}` becomes `cpu=200m`.
fn of_resources(ours: &str, role: &Fields, found: &mut Fields) -> Result<(), String> {
    let Some(resources) = role.get("resources") else { return Ok(()) };
    for (edl, end) in [("requests", "request"), ("limits", "limit")] {
        let Some(amounts) = resources.get(edl).and_then(Value::as_object) else { continue };
        let pairs: Result<Vec<String>, String> = amounts.iter().map(amount).collect();
        found.insert(format!("{ours}_resource_{end}"), pairs?.join(",").into());
    }
    // A GPU was requested by its limit only.
    let text = |end: &str| {
        let fields = found.get(&format!("{ours}_resource_{end}")).and_then(Value::as_str);
        fields.unwrap_or_default().to_owned()
    };
    let (request, limit) = (text("request"), text("limit"));
    let is_missing = |pair: &&str| request.is_empty() || pair.starts_with("gpu=");
    let is_new = |pair: &&str| !request.split(',').any(|it| it == *pair);
    let missing = limit.split(',').filter(is_missing).filter(is_new);
    let all: Vec<&str> = request.split(',').chain(missing).filter(|it| !it.is_empty()).collect();
    if !all.is_empty() {
        found.insert(format!("{ours}_resource_request"), all.join(",").into());
    }
    Ok(())
}

fn amount((name, amount): (&String, &Value)) -> Result<String, String> {
    let name = if name.ends_with("gpu") { "gpu" } else { name.as_str() };
    match amount {
        Value::String(text) => Ok(format!("{name}={text}")),
        Value::Number(number) => Ok(format!("{name}={number}")),
        Value::Null | Value::Bool(_) | Value::Array(_) | Value::Object(_) => {
            Err(format!("`{name}` must be a quantity such as 500m or 4Gi"))
        }
    }
}

fn of_volumes(fields: &mut Fields, found: &mut Fields, notes: &mut Vec<String>) {
    let list = |value: Option<Value>| match value {
        Some(Value::Array(list)) => list,
        _ => Vec::new(),
    };
    let volumes = list(fields.remove("volumes"));
    let mut parts = Vec::new();
    for mount in list(fields.remove("VolumeMounts")) {
        let name = mount["name"].as_str().unwrap_or_default();
        let path = mount["mountPath"].as_str().unwrap_or_default();
        let volume = volumes.iter().find(|volume| volume["name"] == mount["name"]);
        let source = volume.and_then(|volume| {
            let host = volume["hostPath"]["path"].as_str().map(|path| format!("host_path={path}"));
            let claim = volume["persistentVolumeClaim"]["claimName"].as_str();
            host.or_else(|| claim.map(|claim| format!("claim_name={claim}")))
        });
        match source {
            Some(source) => {
                let sub_path = mount["subPath"].as_str();
                let sub_path = sub_path.map_or(String::new(), |path| format!(",sub_path={path}"));
                parts.push(format!("{source},mount_path={path}{sub_path}"));
            }
            None => notes.push(format!(
                "volume `{name}` was not converted: only claims and host paths are supported; for \
                 others, patch the pods with cluster_spec_json"
            )),
        }
    }
    if !parts.is_empty() {
        found.insert("volume".into(), parts.join(";").into());
    }
}

fn of_secrets(fields: &mut Fields, found: &mut Fields) {
    let Some(Value::Array(secrets)) = fields.remove("imagePullSecrets") else { return };
    let names: Vec<&str> = secrets.iter().filter_map(|secret| secret["name"].as_str()).collect();
    found.insert("image_pull_secrets".into(), names.join(",").into());
}

/// Quotes text for a shell.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use expect_test::{Expect, expect};
    use serde_json::json;

    use super::*;

    fn check(fields: Value, expected: &Expect) {
        let Value::Object(fields) = fields else { panic!("a map") };
        let report = match translate(fields) {
            Ok(Translated { fields, notes }) => {
                let fields = fields.iter().map(|(field, value)| format!("{field}: {value}\n"));
                let notes = notes.iter().map(|note| format!("# {note}\n"));
                fields.chain(notes).collect::<String>()
            }
            Err(error) => error,
        };
        expected.assert_eq(&report);
    }

    #[test]
    fn our_own_fields_stay_as_they_are() {
        check(
            json!({"image_name": "a", "num_workers": 2, "port": 7}),
            &expect![[r#"
                image_name: "a"
                num_workers: 2
                port: 7
            "#]],
        );
    }

    #[test]
    fn the_example_of_edl_is_understood() {
        check(
            json!({
                "image": "paddlepaddle/edl-example", "port": 7164, "ports_num": 1,
                "ports_num_for_sparse": 1, "fault_tolerant": true,
                "trainer": {
                    "entrypoint": "python train.py", "workspace": "/workspace", "passes": 50,
                    "min-instance": 2, "max-instance": 6,
                    "resources": {"requests": {"cpu": "200m", "memory": "200Mi"},
                        "limits": {"cpu": "200m", "memory": "200Mi",
                            "alpha.kubernetes.io/nvidia-gpu": 1}},
                },
                "pserver": {"min-instance": 2, "max-instance": 3,
                    "resources": {"limits": {"cpu": "800m"}}},
                "volumes": [{"name": "d", "hostPath": {"path": "/data"}}, {"name": "e"}],
                "VolumeMounts": [{"name": "d", "mountPath": "/data"},
                    {"name": "e", "mountPath": "/e"}],
                "imagePullSecrets": [{"name": "s"}, {"name": "t"}],
            }),
            &expect![[r#"
                image_name: "paddlepaddle/edl-example"
                image_pull_secrets: "s,t"
                job_command: "sh -c 'cd /workspace && exec python train.py'"
                max_workers: 6
                min_workers: 2
                num_epochs: 50
                num_ps_pods: 2
                ps_resource_limit: "cpu=800m"
                ps_resource_request: "cpu=800m"
                volume: "host_path=/data,mount_path=/data"
                worker_resource_limit: "gpu=1,cpu=200m,memory=200Mi"
                worker_resource_request: "cpu=200m,memory=200Mi,gpu=1"
                # the entrypoint runs as a worker: its training loop must call elasticdl.init()
                # pserver.max-instance is not used: the number of servers is fixed while a job runs
                # port is not needed: the master uses a fixed port in a cluster
                # ports_num is not needed: each server has one port
                # ports_num_for_sparse is not needed: each server has one port
                # volume `e` was not converted: only claims and host paths are supported; for others, patch the pods with cluster_spec_json
            "#]],
        );
    }

    #[test]
    fn what_contradicts_itself_is_refused() {
        check(
            json!({"fault_tolerant": false, "trainer": {"min-instance": 2, "max-instance": 6}}),
            &expect![
                "max-instance must equal min-instance when fault_tolerant is false; omit fault_tolerant: jobs survive the loss of any process"
            ],
        );
        check(
            json!({"trainer": 3}),
            &expect!["`trainer` must be a map with fields such as min-instance and resources"],
        );
        check(
            json!({"trainer": {"resources": {"requests": {"cpu": []}}}}),
            &expect!["`cpu` must be a quantity such as 500m or 4Gi"],
        );
    }
}
