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

type Words = Map<String, Value>;

/// Words by which a description is known to be EDL's.
const MARKERS: [&str; 7] =
    ["trainer", "pserver", "fault_tolerant", "passes", "ports_num", "VolumeMounts", "image"];

/// Words that nothing here needs: processes find each other, and state is on disk.
const NOT_NEEDED: [&str; 2] = ["ports_num", "ports_num_for_sparse"];

/// What became of a description.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Translated {
    pub words: Words,
    /// What has no counterpart, or means something else here; a sentence each.
    pub notes: Vec<String>,
}

/// Turns EDL's words into ours; a word of ours that is said as well wins.
pub fn translate(mut words: Words) -> Result<Translated, String> {
    if !MARKERS.iter().any(|word| words.contains_key(*word)) {
        return Ok(Translated { words, notes: Vec::new() });
    }
    let mut found = Words::new();
    let mut notes = Vec::new();
    let is_edl = words.contains_key("trainer") || words.contains_key("pserver");
    if let Some(image) = words.remove("image") {
        found.insert("image_name".into(), image);
    }
    if let Some(passes) = words.remove("passes") {
        found.insert("num_epochs".into(), passes);
    }
    let is_tolerant = words.remove("fault_tolerant");
    let trainer = role(&mut words, "trainer")?;
    let pserver = role(&mut words, "pserver")?;
    let master = role(&mut words, "master")?;
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
    if is_edl && words.remove("port").is_some() {
        notes.push("port is not needed: the master uses a fixed port in a cluster".into());
    }
    for word in NOT_NEEDED.iter().filter(|word| words.remove(**word).is_some()) {
        notes.push(format!("{word} is not needed: each server has one port"));
    }
    let etcd = [&trainer, &pserver, &master].iter().any(|role| role.contains_key("etcd-endpoint"));
    if etcd {
        notes.push(
            "etcd-endpoint is not needed: the master keeps its state in the job's folder".into(),
        );
    }
    of_volumes(&mut words, &mut found, &mut notes);
    of_secrets(&mut words, &mut found);
    for word in ["HostNetwork", "host_network"] {
        if words.remove(word) == Some(Value::Bool(true)) {
            notes.push(format!(
                "{word} was not converted: if the pods need it, patch them with cluster_spec_json"
            ));
        }
    }
    for (word, value) in found {
        words.entry(word).or_insert(value);
    }
    Ok(Translated { words, notes })
}

fn role(words: &mut Words, name: &str) -> Result<Words, String> {
    match words.remove(name) {
        None | Some(Value::Null) => Ok(Words::new()),
        Some(Value::Object(role)) => Ok(role),
        Some(Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Array(_)) => {
            Err(format!("`{name}` must be a map with fields such as min-instance and resources"))
        }
    }
}

fn of_trainer(trainer: &Words, found: &mut Words, notes: &mut Vec<String>) -> Result<(), String> {
    for (edl, ours) in [("min-instance", "min_workers"), ("max-instance", "max_workers")] {
        if let Some(count) = trainer.get(edl) {
            found.insert(ours.into(), count.clone());
        }
    }
    if let Some(passes) = trainer.get("passes") {
        // Where EDL's own examples had it, and EDL did not read it.
        found.entry("num_epochs").or_insert_with(|| passes.clone());
    }
    let text = |word: &str| trainer.get(word).and_then(Value::as_str).filter(|it| !it.is_empty());
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

fn of_pserver(pserver: &Words, found: &mut Words, notes: &mut Vec<String>) -> Result<(), String> {
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
fn of_resources(ours: &str, role: &Words, found: &mut Words) -> Result<(), String> {
    let Some(resources) = role.get("resources") else { return Ok(()) };
    for (edl, end) in [("requests", "request"), ("limits", "limit")] {
        let Some(amounts) = resources.get(edl).and_then(Value::as_object) else { continue };
        let pairs: Result<Vec<String>, String> = amounts.iter().map(amount).collect();
        found.insert(format!("{ours}_resource_{end}"), pairs?.join(",").into());
    }
    // A GPU was asked for by its limit alone.
    let text = |end: &str| {
        let words = found.get(&format!("{ours}_resource_{end}")).and_then(Value::as_str);
        words.unwrap_or_default().to_owned()
    };
    let (request, limit) = (text("request"), text("limit"));
    let is_missing = |pair: &&str| request.is_empty() || pair.starts_with("gpu=");
    let is_asked = |pair: &&str| !request.split(',').any(|it| it == *pair);
    let missing = limit.split(',').filter(is_missing).filter(is_asked);
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

fn of_volumes(words: &mut Words, found: &mut Words, notes: &mut Vec<String>) {
    let list = |value: Option<Value>| match value {
        Some(Value::Array(list)) => list,
        _ => Vec::new(),
    };
    let volumes = list(words.remove("volumes"));
    let mut parts = Vec::new();
    for mount in list(words.remove("VolumeMounts")) {
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

fn of_secrets(words: &mut Words, found: &mut Words) {
    let Some(Value::Array(secrets)) = words.remove("imagePullSecrets") else { return };
    let names: Vec<&str> = secrets.iter().filter_map(|secret| secret["name"].as_str()).collect();
    found.insert("image_pull_secrets".into(), names.join(",").into());
}

/// A word of a shell command, whatever it holds.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use expect_test::{Expect, expect};
    use serde_json::json;

    use super::*;

    fn check(words: Value, expected: &Expect) {
        let Value::Object(words) = words else { panic!("a map") };
        let told = match translate(words) {
            Ok(Translated { words, notes }) => {
                let words = words.iter().map(|(word, value)| format!("{word}: {value}\n"));
                let notes = notes.iter().map(|note| format!("# {note}\n"));
                words.chain(notes).collect::<String>()
            }
            Err(error) => error,
        };
        expected.assert_eq(&told);
    }

    #[test]
    fn our_own_words_stay_as_they_are() {
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
