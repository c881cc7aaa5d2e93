// SPDX-License-Identifier: Apache-2.0
//! Kubernetes quantities (`500m`, `4Gi`) as numbers. Requests are rounded up and capacities down, so
//! rounding never puts a pod on a node that is too small.

use std::collections::BTreeMap;

use edl_core::cluster::UNITS;
use edl_sched::resources::Resources;
use k8s_openapi::api::core::v1::{Container, Pod};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

type Quantities = BTreeMap<String, Quantity>;

/// More than any cluster has, and small enough to be added up.
pub const BOUNDLESS: Resources =
    Resources { gpu: 1 << 40, cpu_milli: 1 << 50, memory_mib: 1 << 50, pods: 1 << 40 };

/// The kubelet's default, for nodes that do not say how many pods they accept.
const USUAL_PODS: u64 = 110;

const MIB: f64 = 1_048_576.0;

/// Suffixes beside those of bytes.
const SMALL_UNITS: [(&str, f64); 4] = [("n", 1e-9), ("u", 1e-6), ("m", 1e-3), ("k", 1e3)];

/// The value of an amount; 0 if it is invalid.
#[must_use]
pub fn value(text: &str) -> f64 {
    let text = text.trim();
    let parsed = text.parse::<f64>().ok().or_else(|| {
        let units = UNITS.iter().chain(&SMALL_UNITS);
        let (unit, factor) = units.into_iter().find(|(unit, _)| text.ends_with(unit))?;
        Some(text.strip_suffix(unit)?.parse::<f64>().ok()? * factor)
    });
    parsed.filter(|value| value.is_finite() && *value > 0.0).unwrap_or(0.0)
}

/// Whether a resource is a GPU of any vendor.
#[must_use]
pub fn is_gpu(name: &str) -> bool {
    name.ends_with("gpu")
}

/// What pods can request on a node.
#[must_use]
pub fn offered(amounts: &Quantities) -> Resources {
    let pods = amounts.get("pods").map_or(USUAL_PODS, |n| whole(value(&n.0), BOUNDLESS.pods));
    let offered =
        of(amounts.iter().map(|(name, amount)| (name.as_str(), amount.0.as_str())), f64::floor);
    offered.with_pods(pods)
}

/// What a pod requests: a place on a node, and the sum of its containers, or more for the init containers before them.
#[must_use]
pub fn requested(pod: &Pod) -> Resources {
    let Some(spec) = &pod.spec else { return Resources::ZERO.with_pods(1) };
    let requests = |container: &Container| {
        let amounts = container.resources.as_ref().and_then(|it| it.requests.as_ref());
        amounts.map_or(Resources::ZERO, rounded_up)
    };
    let mut beside = Resources::ZERO;
    let mut before = Resources::ZERO;
    for container in spec.init_containers.iter().flatten() {
        // A sidecar keeps running beside the others.
        if container.restart_policy.as_deref() == Some("Always") {
            beside += requests(container);
            before = before.larger(beside);
        } else {
            before = before.larger(beside + requests(container));
        }
    }
    let containers: Resources = spec.containers.iter().map(requests).sum();
    let overhead = spec.overhead.as_ref().map_or(Resources::ZERO, rounded_up);
    (before.larger(containers + beside) + overhead).with_pods(1)
}

/// A limit that may name only some kinds; the others are as in `free`.
#[must_use]
pub fn limit(amounts: &BTreeMap<String, String>, free: Resources) -> Resources {
    let names = |wanted: fn(&str) -> bool| amounts.keys().any(|name| wanted(name));
    let given =
        of(amounts.iter().map(|(name, amount)| (name.as_str(), amount.as_str())), f64::floor);
    Resources {
        gpu: if names(is_gpu) { given.gpu } else { free.gpu },
        cpu_milli: if names(|name| name == "cpu") { given.cpu_milli } else { free.cpu_milli },
        memory_mib: if names(|name| name == "memory") { given.memory_mib } else { free.memory_mib },
        pods: free.pods,
    }
}

fn rounded_up(amounts: &Quantities) -> Resources {
    of(amounts.iter().map(|(name, amount)| (name.as_str(), amount.0.as_str())), f64::ceil)
}

fn of<'a>(
    amounts: impl Iterator<Item = (&'a str, &'a str)>,
    rounded: impl Fn(f64) -> f64,
) -> Resources {
    let mut all = Resources::ZERO;
    for (name, amount) in amounts {
        let value = value(amount);
        match name {
            "cpu" => all.cpu_milli += whole(rounded(value * 1000.0), BOUNDLESS.cpu_milli),
            "memory" => all.memory_mib += whole(rounded(value / MIB), BOUNDLESS.memory_mib),
            name if is_gpu(name) => all.gpu += whole(rounded(value), BOUNDLESS.gpu),
            _ => {}
        }
    }
    all
}

fn whole(value: f64, most: u64) -> u64 {
    #[expect(clippy::cast_possible_truncation, reason = "a float to integer cast saturates")]
    #[expect(clippy::cast_sign_loss, reason = "amounts are not negative")]
    let whole = value as u64;
    whole.min(most)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn amounts_are_read_as_kubernetes_reads_them() {
        let table = [
            ("2", 2.0),
            ("500m", 0.5),
            ("1e3", 1000.0),
            ("4Gi", 4.0 * 1_073_741_824.0),
            ("128974848", 128_974_848.0),
            ("129M", 129e6),
            ("100k", 1e5),
            ("1E", 1e18),
            ("5Ei", 5.0 * 1_152_921_504_606_846_976.0),
            ("250u", 0.00025),
            ("", 0.0),
            ("lots", 0.0),
            ("-1", 0.0),
        ];
        for (text, expected) in table {
            let found = value(text);
            assert!((found - expected).abs() <= expected * 1e-12, "{text}: {found}");
        }
    }

    #[test]
    fn what_runs_before_the_others_counts_if_it_is_larger() {
        let container = |cpu: &str| json!({"name": "c", "resources": {"requests": {"cpu": cpu}}});
        let mut sidecar = container("100m");
        sidecar["restartPolicy"] = "Always".into();
        let pod = |init: serde_json::Value| {
            let pod = json!({"spec": {"initContainers": init, "overhead": {"memory": "1"},
                "containers": [container("1"), container("0.5")]}});
            requested(&serde_json::from_value(pod).unwrap())
        };
        assert_eq!(pod(json!([])), Resources::new(0, 1500, 1).with_pods(1));
        assert_eq!(pod(json!([container("2")])).cpu_milli, 2000);
        assert_eq!(pod(json!([sidecar])).cpu_milli, 1600);
        assert_eq!(pod(json!([sidecar, container("2")])).cpu_milli, 2100);
    }

    #[test]
    fn a_limit_binds_the_kinds_that_it_names() {
        let given = [("cpu".to_owned(), "2".to_owned())].into();
        assert_eq!(limit(&given, Resources::ZERO), Resources::new(0, 2000, 0));
        assert_eq!(limit(&given, BOUNDLESS).gpu, BOUNDLESS.gpu);
    }
}
