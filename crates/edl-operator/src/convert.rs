// SPDX-License-Identifier: Apache-2.0
//! `elasticdl job convert`: converts a TrainingJob of PaddlePaddle EDL.

use edl_kube::yaml;
use serde_json::{Map, Value, json};

use crate::aliases::{self, Translated};
use crate::crd::{API_VERSION, KIND, TrainingJob};
use crate::description;

/// Converts a manifest. Fields without a counterpart, and errors of our own checks, are added as
/// comments at the top.
pub fn convert(text: &str) -> Result<String, String> {
    let manifest = yaml::read_value(text).map_err(|error| error.to_string())?;
    if manifest["kind"] != KIND {
        return Err(format!("expected a manifest of kind {KIND}, found {}", manifest["kind"]));
    }
    let Some(name) = manifest["metadata"]["name"].as_str() else {
        return Err("metadata.name is missing".into());
    };
    let Value::Object(spec) = manifest["spec"].clone() else {
        return Err("spec is missing".into());
    };
    let Translated { fields, mut notes } = aliases::translate(spec)?;
    let mut metadata = Map::new();
    for field in ["name", "namespace", "labels", "annotations"] {
        if let Some(value) = manifest["metadata"].get(field) {
            metadata.insert(field.into(), value.clone());
        }
    }
    let job = json!({
        "apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": fields,
    });
    notes.extend(trouble(&job).map(|trouble| format!("not accepted as is: {trouble}")));
    let body = yaml::write(&job).map_err(|error| error.to_string())?;
    let notes = notes.iter().map(|note| format!("# {note}\n"));
    let head =
        format!("# {name}, converted from {}\n", manifest["apiVersion"].as_str().unwrap_or("?"));
    Ok(std::iter::once(head).chain(notes).chain([body]).collect())
}

/// What is wrong with the converted job, found without submitting it.
fn trouble(job: &Value) -> Option<String> {
    let mut job: TrainingJob = match serde_json::from_value(job.clone()) {
        Ok(job) => job,
        Err(error) => return Some(error.to_string()),
    };
    job.metadata.namespace.get_or_insert_with(|| "default".into());
    description::read(&job).err().map(|trouble| trouble.message)
}

#[cfg(test)]
mod tests {
    use expect_test::expect;

    use super::*;

    /// As in EDL's own tutorial.
    const FIT_A_LINE: &str = "\
apiVersion: paddlepaddle.org/v1
kind: TrainingJob
metadata:
  name: example
spec:
  image: paddlepaddle/edl-example
  port: 7164
  ports_num: 1
  ports_num_for_sparse: 1
  fault_tolerant: true
  trainer:
    entrypoint: python /workspace/train_ft.py
    workspace: /workspace
    passes: 50
    min-instance: 2
    max-instance: 10
    resources:
      limits: {cpu: 200m, memory: 200Mi}
      requests: {cpu: 200m, memory: 200Mi}
  pserver:
    min-instance: 2
    max-instance: 2
    resources:
      limits: {cpu: 800m, memory: 1Gi}
      requests: {cpu: 500m, memory: 600Mi}
  master:
    resources:
      limits: {cpu: 1, memory: 1Gi}
      requests: {cpu: 500m, memory: 600Mi}
";

    #[test]
    fn the_tutorial_of_edl_becomes_a_job_of_ours() {
        expect![[r##"
            # example, converted from paddlepaddle.org/v1
            # the entrypoint runs as a worker: its training loop must call elasticdl.init()
            # port is not needed: the master uses a fixed port in a cluster
            # ports_num is not needed: each server has one port
            # ports_num_for_sparse is not needed: each server has one port
            # not accepted as is: the job's pods share no storage, so a replaced pod could not resume training; add a shared volume with --volume, e.g. "claim_name=CLAIM,mount_path=/data"
            apiVersion: elasticdl.org/v1
            kind: TrainingJob
            metadata:
              name: example
            spec:
              image_name: paddlepaddle/edl-example
              job_command: sh -c 'cd /workspace && exec python /workspace/train_ft.py'
              master_resource_limit: cpu=1,memory=1Gi
              master_resource_request: cpu=500m,memory=600Mi
              max_workers: 10
              min_workers: 2
              num_epochs: 50
              num_ps_pods: 2
              ps_resource_limit: cpu=800m,memory=1Gi
              ps_resource_request: cpu=500m,memory=600Mi
              worker_resource_limit: cpu=200m,memory=200Mi
              worker_resource_request: cpu=200m,memory=200Mi
        "##]].assert_eq(&convert(FIT_A_LINE).unwrap());
    }

    #[test]
    fn a_converted_job_stays_what_it_is() {
        let with_volume = FIT_A_LINE.replace(
            "  port: 7164\n",
            "  volumes: [{name: d, hostPath: {path: /d}}]\n  VolumeMounts: [{name: d, mountPath: /d}]\n",
        );
        let once = convert(&with_volume).unwrap();
        assert!(!once.contains("not accepted"), "{once}");
        let body = |text: &str| {
            text.lines().filter(|line| !line.starts_with('#')).collect::<Vec<_>>().join("\n")
        };
        assert_eq!(body(&convert(&once).unwrap()), body(&once));
    }

    #[test]
    fn what_is_no_manifest_is_refused() {
        for (text, why) in [
            ("kind: Pod", "of kind TrainingJob"),
            ("kind: TrainingJob", "metadata.name"),
            ("{kind: TrainingJob, metadata: {name: a}}", "spec is missing"),
            ("[", ""),
        ] {
            let error = convert(text).unwrap_err();
            assert!(error.contains(why), "{text}: {error}");
        }
    }
}
