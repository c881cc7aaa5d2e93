// SPDX-License-Identifier: Apache-2.0
//! Job descriptions, objects of a cluster, and scenarios of `elasticdl simulate`.

use std::sync::Arc;

use edl_core::spec::JobSpec;
use edl_core::time::Time;
use edl_kube::yaml;
use edl_operator::act;
use edl_operator::convert;
use edl_operator::crd::TrainingJob;
use edl_operator::observe::{ClusterObjects, Memory, observe};
use edl_operator::permissions::Permissions;
use edl_operator::queues::Queues;
use edl_sched::sim::{file, philly};
use edl_sched::state::PlannerState;
use k8s_openapi::api::core::v1::{ConfigMap, Node, Pod};
use k8s_openapi::jiff::Timestamp;
use serde::Deserialize;
use serde_json::Value;

/// The file of `--config`, and a PaddlePaddle EDL manifest.
pub(crate) fn job(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    drop(convert::convert(&text));
    let Ok(Value::Object(fields)) = yaml::read_value(&text) else { return };
    let Ok(mut spec) = JobSpec::try_from(fields) else { return };
    let written = yaml::write(&spec).expect("a job has a YAML form");
    let again: JobSpec = yaml::read(&written).expect("what was written can be read");
    assert_eq!(again, spec, "a job has changed");
    spec.settle_strategy();
    drop(spec.check());
    drop(spec.check_cluster());
}

/// The objects that an operator watches; users can write all of them but nodes.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Objects {
    nodes: Vec<Node>,
    pods: Vec<Pod>,
    jobs: Vec<TrainingJob>,
    config_maps: Vec<ConfigMap>,
    queues: Option<ConfigMap>,
    permissions: Option<ConfigMap>,
}

/// A pass of the operator over any objects.
pub(crate) fn cluster(bytes: &[u8]) {
    let Ok(objects) = yaml::read::<Objects>(&String::from_utf8_lossy(bytes)) else { return };
    let Objects { nodes, pods, jobs, config_maps, queues, permissions } = objects;
    let objects = ClusterObjects {
        nodes: shared(nodes),
        pods: shared(pods),
        jobs: shared(jobs),
        config_maps: shared(config_maps),
        queues: Queues::read(queues.as_ref()),
        permissions: Permissions::read(permissions.as_ref()),
        ..ClusterObjects::default()
    };
    let observed = observe(&objects, &mut Memory::default(), Time::ZERO);
    let plan = edl_sched::plan(&observed.snapshot, &PlannerState::default(), Time::ZERO);
    drop(act::actions(&observed, &plan, Timestamp::UNIX_EPOCH));
}

fn shared<T>(objects: Vec<T>) -> Vec<Arc<T>> {
    objects.into_iter().map(Arc::new).collect()
}

pub(crate) fn scenario(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    if let Ok(description) = yaml::read(&text) {
        drop(file::scenario("fuzz", &description, 1));
    }
    if let Ok(entries) = philly::parse(&text) {
        drop(philly::scenario(&entries, 0, 1000, 10, 50));
    }
}
