// SPDX-License-Identifier: Apache-2.0
//! How long a plan takes: `cargo run --release -p edl-sched --example plan_bench`.

use std::io::{self, Write};
use std::time::{Duration, Instant};

use edl_core::rng::Rng;
use edl_core::time::Time;
use edl_sched::resources::Resources;
use edl_sched::snapshot::{
    Job, JobId, Marks, Node, NodeId, OnlinePods, QueueId, RoleSpec, Roles, ServiceId, Snapshot,
};
use edl_sched::state::{PlannerState, Policy};
use edl_sched::{applied, plan};

/// The best is taken: others may use the machine too.
const N_ROUNDS: usize = 9;

fn main() -> io::Result<()> {
    let mut out = io::stdout().lock();
    writeln!(
        out,
        "policy        jobs   nodes  empty ms  full ms  churn ms   (best of {N_ROUNDS})"
    )?;
    for policy in [Policy::ElasticFair, Policy::Edl, Policy::Fifo, Policy::Drf, Policy::Goodput] {
        for (n_jobs, n_nodes) in [(10, 100), (100, 1000), (1000, 5000)] {
            let [empty, full, churn] = measure(policy, n_jobs, n_nodes);
            writeln!(
                out,
                "{:<13} {n_jobs:<6} {n_nodes:<6} {empty:<9.1} {full:<8.1} {churn:.1}",
                policy.name()
            )?;
        }
    }
    Ok(())
}

/// Milliseconds for a cluster that all jobs come to at once, one that nothing happens in, and a
/// full one to which a twentieth of new jobs and as many online pods come.
fn measure(policy: Policy, n_jobs: u32, n_nodes: u32) -> [f64; 3] {
    let mut rng = Rng::new(1);
    let empty = Snapshot {
        nodes: (0..n_nodes).map(|id| node(id, &mut rng)).collect(),
        jobs: (0..n_jobs).map(|id| job(id, &mut rng)).collect(),
        ..Snapshot::default()
    };
    let state = PlannerState::of(policy);
    let mut full = empty.clone();
    let mut last = state.clone();
    let mut now = Time::ZERO;
    // Until jobs stop growing.
    for _ in 0..12 {
        let made = plan(&full, &last, now);
        (full, last) = (applied(&full, &made), made.state);
        now = now + Duration::from_secs(61);
    }
    let mut churn = full.clone();
    let n_new = (n_jobs / 20).max(1);
    churn.jobs.drain(..n_new as usize / 2);
    churn.jobs.extend((0..n_new).map(|id| job(n_jobs + id, &mut rng)));
    churn.waiting.push(OnlinePods {
        service: ServiceId(0),
        shape: Resources::new(0, 3000, 3072),
        n: n_nodes / 20,
        priority: 1,
        tolerates: Marks::NONE,
        selects: Marks::NONE,
    });
    [best(&empty, &state, Time::ZERO), best(&full, &last, now), best(&churn, &last, now)]
}

#[expect(clippy::disallowed_methods, reason = "a benchmark reads the clock")]
fn best(snapshot: &Snapshot, state: &PlannerState, now: Time) -> f64 {
    let mut times: Vec<f64> = (0..N_ROUNDS)
        .map(|_| {
            let start = Instant::now();
            let made = plan(snapshot, state, now);
            let time = start.elapsed().as_secs_f64() * 1000.0;
            assert_eq!(made.made, now);
            time
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[0]
}

fn node(id: u32, rng: &mut Rng) -> Node {
    let cpu = [12_000, 28_000, 64_000][usize::try_from(rng.below(3)).unwrap_or(0)];
    let gpu = if rng.below(4) == 0 { 8 } else { 0 };
    let taken = Resources::new(0, 250, 256);
    Node { taken, ..Node::new(NodeId(id), Resources::new(gpu, cpu, 262_144)) }
}

fn job(id: u32, rng: &mut Rng) -> Job {
    let fixed = |shape, n| RoleSpec { shape, min: n, max: n };
    let gpu = u64::from(rng.below(4) == 0);
    let shape = Resources::new(gpu, 1000 * (2 + rng.below(5)), 8192);
    let worker = RoleSpec { shape, min: 2, max: 60 };
    let roles = Roles {
        master: fixed(Resources::new(0, 1000, 512), 1),
        ps: fixed(Resources::new(0, 4000, 5120), 4),
        worker,
    };
    Job { queue: QueueId(id % 8), ..Job::new(JobId(id), Time::ZERO, roles) }
}
