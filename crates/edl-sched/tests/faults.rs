// SPDX-License-Identifier: Apache-2.0
//! Nodes fail and are reclaimed: no job is lost, nothing hangs, services recover.

use std::time::Duration;

use edl_core::time::Time;
use edl_sched::sim::edl_cases::{self, Size};
use edl_sched::sim::kubernetes::Kubernetes;
use edl_sched::sim::scenario::NodeFaultKind;
use edl_sched::sim::work::Work;
use edl_sched::sim::{Scenario, run};
use edl_sched::state::Policy;

const N_SEEDS: u64 = 8;

/// Case 1, where each job has an hour of work for 20 workers.
fn ending_jobs() -> Scenario {
    let mut scenario = edl_cases::case_1(Size::Elastic, Kubernetes::of_today());
    for script in &mut scenario.jobs {
        script.work = Work::WorkerSeconds { left: 20_000.0, scaling: 0.9 };
    }
    scenario.end = None;
    scenario.rescale = Duration::from_secs(5);
    scenario
}

#[test]
fn every_job_finishes_although_nodes_fail_and_are_reclaimed() {
    let until = Time::ZERO + Duration::from_secs(4 * 3600);
    let back_after = Duration::from_secs(300);
    let kinds = [
        NodeFaultKind::Loss { back_after },
        NodeFaultKind::Reclaim { notice: Duration::from_secs(120), back_after },
    ];
    for seed in 0..N_SEEDS {
        let kind = kinds[usize::from(seed % 2 == 0)];
        let scenario = ending_jobs().with_faults(60.0, until, kind, seed);
        assert!(!scenario.faults.is_empty());
        for policy in [Policy::ElasticFair, Policy::Edl, Policy::Goodput] {
            let report = run(&scenario, policy, seed);
            assert_eq!(report.completion_times().len(), 20, "{policy}, seed {seed}");
        }
    }
}

#[test]
fn a_service_gets_all_pods_back_after_nodes_were_lost() {
    let until = Time::ZERO + Duration::from_secs(300);
    let kind = NodeFaultKind::Loss { back_after: Duration::from_secs(60) };
    for seed in 0..N_SEEDS {
        let scenario = edl_cases::case_2(Size::Elastic, Kubernetes::of_today());
        let report =
            run(&scenario.with_faults(120.0, until, kind, seed), Policy::ElasticFair, seed);
        assert_eq!(report.rows.last().map(|row| row.n_service), Some(400), "seed {seed}");
    }
}
