// SPDX-License-Identifier: Apache-2.0
//! The simulated Kubernetes: how long pods take, and which node its scheduler chooses.

use std::time::Duration;

use edl_core::rng::Rng;

use crate::resources::Resources;

/// How long pods take to start and to leave, and when an unscheduled pod is tried again.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Kubernetes {
    pub start: Start,
    /// How long a running worker takes to exit.
    pub worker_leaves: Duration,
    pub service_leaves: Duration,
    pub retry: Retry,
}

/// How pods that have a node begin to run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Start {
    AtOnce,
    /// Each after a random time between these.
    Between(Duration, Duration),
    /// The cluster starts this many per second, in random order.
    PerSecond(f64),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retry {
    /// When a pod leaves.
    OnEvents,
    /// After 1 s, 2 s, 4 s, … up to this.
    Backoff(Duration),
}

impl Kubernetes {
    /// Nothing takes any time.
    #[must_use]
    pub fn instant() -> Self {
        Self {
            start: Start::AtOnce,
            worker_leaves: Duration::ZERO,
            service_leaves: Duration::ZERO,
            retry: Retry::OnEvents,
        }
    }

    /// The cluster of the published experiment (Kubernetes 1.6, 2017). The rate of starts is fitted
    /// to the rise of utilization in the logs of both cases, and the longest retry to utilization in
    /// case 2. Trainers ignore SIGTERM, so they stay for the whole grace period.
    #[must_use]
    pub fn of_2017() -> Self {
        Self {
            start: Start::PerSecond(3.1),
            worker_leaves: Duration::from_secs(30),
            service_leaves: Duration::from_secs(1),
            retry: Retry::Backoff(Duration::from_secs(15)),
        }
    }

    /// A current cluster: images are on the nodes, waiting pods are tried again when a pod leaves,
    /// and workers exit at the end of a step.
    #[must_use]
    pub fn of_today() -> Self {
        Self {
            start: Start::Between(Duration::from_millis(1500), Duration::from_millis(4000)),
            worker_leaves: Duration::from_secs(2),
            service_leaves: Duration::from_secs(1),
            retry: Retry::OnEvents,
        }
    }
}

/// A node as the scheduler sees it.
#[derive(Clone, Copy, Debug)]
pub struct NodeView {
    pub capacity: Resources,
    pub free: Resources,
    /// Pods of the same owner there.
    pub n_siblings: u32,
    pub is_usable: bool,
}

/// The best node by Kubernetes' default priorities: emptiest, most balanced, fewest pods of the same
/// owner; a random one of equals.
#[must_use]
pub fn choose_node(nodes: &[NodeView], shape: Resources, rng: &mut Rng) -> Option<usize> {
    let fits = |view: &&NodeView| view.is_usable && shape.fits_in(view.free);
    let most_siblings = nodes.iter().filter(fits).map(|view| view.n_siblings).max()?;
    let mut best = 0;
    let mut equals: Vec<usize> = Vec::new();
    for (node, view) in nodes.iter().enumerate() {
        if !fits(&view) {
            continue;
        }
        let score = score(view, shape, most_siblings);
        if equals.is_empty() || score > best {
            best = score;
            equals.clear();
        }
        if score == best {
            equals.push(node);
        }
    }
    let which = usize::try_from(rng.below(equals.len() as u64)).ok()?;
    Some(equals[which])
}

/// Whole points from 0 to 30, as in Kubernetes 1.6.
fn score(view: &NodeView, shape: Resources, most_siblings: u32) -> u64 {
    let used = view.capacity.saturating_sub(view.free) + shape;
    let tenths = |part: u64, whole: u64| (10 * part).checked_div(whole).unwrap_or(0);
    let cpu_left =
        tenths(view.capacity.cpu_milli.saturating_sub(used.cpu_milli), view.capacity.cpu_milli);
    let memory_left =
        tenths(view.capacity.memory_mib.saturating_sub(used.memory_mib), view.capacity.memory_mib);
    let share = |part: u64, whole: u64| 1000 * part / whole.max(1);
    let cpu = share(used.cpu_milli, view.capacity.cpu_milli);
    let memory = share(used.memory_mib, view.capacity.memory_mib);
    let balanced = (1000_u64.saturating_sub(cpu.abs_diff(memory))) / 100;
    let spread = match most_siblings {
        0 => 10,
        most => 10 * u64::from(most - view.n_siblings.min(most)) / u64::from(most),
    };
    u64::midpoint(cpu_left, memory_left) + balanced + spread
}
