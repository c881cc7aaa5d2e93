// SPDX-License-Identifier: Apache-2.0
//! The log line that users of PaddlePaddle EDL expect: the cluster's resources and requests, in EDL's
//! format and with its rounding.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use edl_core::pod::PodState;
use edl_kube::facts;
use k8s_openapi::api::core::v1::{Container, Node, Pod};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use crate::observe::amounts;

/// The sums of one pass.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Inquiry {
    n_nodes: usize,
    request: Sums,
    limit: Sums,
    total: Sums,
    cpu_idle_milli: BTreeMap<String, i64>,
    memory_free_mega: BTreeMap<String, i64>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Sums {
    gpu: i64,
    cpu_milli: i64,
    memory_bytes: f64,
}

impl Inquiry {
    /// Counts every pod that has not ended, whether it has a node or not.
    #[must_use]
    pub fn new(nodes: &[Arc<Node>], pods: &[Arc<Pod>]) -> Self {
        let mut all = Self { n_nodes: nodes.len(), ..Self::default() };
        for node in nodes {
            let amounts = node.status.as_ref().and_then(|status| status.allocatable.as_ref());
            let has = amounts.map_or(Sums::default(), sums);
            all.total.add(has);
            let name = node.metadata.name.clone().unwrap_or_default();
            all.cpu_idle_milli.insert(name.clone(), has.cpu_milli);
            all.memory_free_mega.insert(name, mega(has.memory_bytes));
        }
        for pod in pods.iter().filter(|pod| !matches!(facts::of(pod).state(), PodState::Ended(_))) {
            let Some(spec) = &pod.spec else { continue };
            let name = spec.node_name.as_deref().unwrap_or_default();
            let containers = spec.containers.iter().chain(spec.init_containers.iter().flatten());
            for container in containers {
                let (request, limit) = asked(container);
                all.request.add(request);
                all.limit.add(limit);
                if let Some(idle) = all.cpu_idle_milli.get_mut(name) {
                    *idle = idle.saturating_sub(request.cpu_milli);
                }
                if let Some(free) = all.memory_free_mega.get_mut(name) {
                    *free = free.saturating_sub(mega(request.memory_bytes));
                }
            }
        }
        all
    }
}

impl Sums {
    fn add(&mut self, other: Self) {
        self.gpu = self.gpu.saturating_add(other.gpu);
        self.cpu_milli = self.cpu_milli.saturating_add(other.cpu_milli);
        self.memory_bytes += other.memory_bytes;
    }
}

fn asked(container: &Container) -> (Sums, Sums) {
    let resources = container.resources.as_ref();
    let of = |amounts: Option<&BTreeMap<String, Quantity>>| amounts.map_or(Sums::default(), sums);
    let requests = of(resources.and_then(|it| it.requests.as_ref()));
    (requests, of(resources.and_then(|it| it.limits.as_ref())))
}

fn sums(amounts: &BTreeMap<String, Quantity>) -> Sums {
    let mut sums = Sums::default();
    for (name, amount) in amounts {
        let value = amounts::value(&amount.0);
        match name.as_str() {
            "cpu" => sums.cpu_milli += whole(value * 1000.0),
            "memory" => sums.memory_bytes += value,
            name if amounts::is_gpu(name) => sums.gpu = sums.gpu.saturating_add(whole(value)),
            _ => {}
        }
    }
    sums
}

/// Millions of bytes, rounded up as EDL did.
fn mega(bytes: f64) -> i64 {
    whole(bytes / 1e6)
}

fn whole(value: f64) -> i64 {
    #[expect(clippy::cast_possible_truncation, reason = "a float to integer cast saturates")]
    let whole = value.ceil() as i64;
    whole
}

/// A map as Go prints it.
struct GoMap<'a>(&'a BTreeMap<String, i64>);

impl fmt::Display for GoMap<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let entries: Vec<String> =
            self.0.iter().map(|(name, value)| format!("{name}:{value}")).collect();
        write!(f, "map[{}]", entries.join(" "))
    }
}

impl fmt::Display for Inquiry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { n_nodes, request, limit, total, .. } = self;
        write!(f, "msg=\"Cluster.InquiryResource done\" resource=\"{{NodeCount:{n_nodes} ")?;
        let gpu = (request.gpu, limit.gpu, total.gpu);
        write!(f, "GPURequest:{} GPULimit:{} GPUTotal:{} ", gpu.0, gpu.1, gpu.2)?;
        let cpu = (request.cpu_milli, limit.cpu_milli, total.cpu_milli);
        write!(f, "CPURequestMilli:{} CPULimitMilli:{} CPUTotalMilli:{} ", cpu.0, cpu.1, cpu.2)?;
        let [asked, most, has] = [request, limit, total].map(|sums| mega(sums.memory_bytes));
        write!(f, "MemoryRequestMega:{asked} MemoryLimitMega:{most} MemoryTotalMega:{has} ")?;
        let (idle, free) = (GoMap(&self.cpu_idle_milli), GoMap(&self.memory_free_mega));
        write!(f, "Nodes:{{NodesCPUIdleMilli:{idle} NodesMemoryFreeMega:{free}}}}}\"")
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::tests::fake_cluster::{node, other_pod};

    #[test]
    fn the_line_is_the_one_of_edl() {
        let nodes = [Arc::new(node("minikube", "2", "1993Mi"))];
        let waiting = other_pod("b", "100m", None);
        let ended = json!({"spec": {"containers": [{"name": "c", "resources":
            {"requests": {"cpu": "9"}}}]}, "status": {"phase": "Succeeded"}});
        let pods = [
            other_pod("a", "265m", Some("minikube")),
            waiting,
            serde_json::from_value(ended).unwrap(),
        ];
        let line = Inquiry::new(&nodes, &pods.map(Arc::new)).to_string();
        assert_eq!(
            line,
            "msg=\"Cluster.InquiryResource done\" resource=\"{NodeCount:1 GPURequest:0 GPULimit:0 \
             GPUTotal:0 CPURequestMilli:365 CPULimitMilli:0 CPUTotalMilli:2000 \
             MemoryRequestMega:135 MemoryLimitMega:0 MemoryTotalMega:2090 \
             Nodes:{NodesCPUIdleMilli:map[minikube:1735] NodesMemoryFreeMega:map[minikube:2022]}}\""
        );
    }
}
