// SPDX-License-Identifier: Apache-2.0
//! Compares the AdaptDL workloads (`tests/adaptdl`) with the published means, from the result files
//! of the artifact.

use std::path::Path;

use edl_sched::sim::adaptdl::{self, BatchRule, Files, Profiles};
use edl_sched::sim::metrics::mean;
use edl_sched::sim::run;
use edl_sched::state::Policy;

const LOADS: [&str; 4] = ["-0.5", "", "-1.5", "-2.0"];

/// Mean completion times in seconds by load, then by workload.
const TIRESIAS: [[f64; 4]; 4] = [
    [1451.0, 2333.0, 1870.0, 1947.0],
    [2474.0, 5145.0, 3876.0, 3280.0],
    [5520.0, 6334.0, 6562.0, 5577.0],
    [10138.0, 8656.0, 10728.0, 9665.0],
];
const OPTIMUS: [[f64; 4]; 4] = [
    [1310.0, 3125.0, 1987.0, 2174.0],
    [4087.0, 6914.0, 3944.0, 5968.0],
    [7674.0, 6678.0, 5684.0, 7684.0],
    [10807.0, 8515.0, 8363.0, 10313.0],
];

fn data() -> Files {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/adaptdl");
    let mut files = Files::new();
    let mut open = vec![folder.clone()];
    while let Some(path) = open.pop() {
        for entry in std::fs::read_dir(&path).expect("a folder") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                open.push(path);
            } else if path.extension().is_some_and(|extension| extension == "csv") {
                let name = path.strip_prefix(&folder).expect("inside").display().to_string();
                files.insert(name, std::fs::read_to_string(&path).expect("text"));
            }
        }
    }
    files
}

fn mean_time(files: &Files, profiles: &Profiles, load: &str, which: usize, policy: Policy) -> f64 {
    let path = format!("workloads{load}/workload-{which}.csv");
    let entries = adaptdl::parse_workload(files, &path).expect("a workload");
    let scenario = adaptdl::scenario(&path, &entries, profiles, policy, BatchRule::Fixed);
    let report = run(&scenario.expect("known applications"), policy, 0);
    assert_eq!(report.completion_times().len(), entries.len(), "every job finishes");
    mean(&report.completion_times())
}

fn check_against(published: &[[f64; 4]; 4], policy: Policy) {
    let files = data();
    let profiles = Profiles::parse(&files).expect("profiles");
    for (load, row) in LOADS.iter().zip(published) {
        for (which, published) in row.iter().enumerate() {
            let ours = mean_time(&files, &profiles, load, which + 1, policy);
            let off = ours / published - 1.0;
            assert!(
                off.abs() < 0.05,
                "{policy} workload {}{load}: {ours:.0}, {off:+.3}",
                which + 1
            );
        }
    }
}

#[test]
fn tiresias_is_within_five_percent_of_its_published_means() {
    check_against(&TIRESIAS, Policy::Tiresias);
}

#[test]
fn optimus_is_within_five_percent_of_its_published_means() {
    check_against(&OPTIMUS, Policy::Optimus);
}

#[test]
fn goodput_beats_every_policy_with_a_fixed_batch() {
    let files = data();
    let profiles = Profiles::parse(&files).expect("profiles");
    let over_all = |policy| {
        let each = (1..=4).map(|which| mean_time(&files, &profiles, "", which, policy));
        mean(&each.collect::<Vec<_>>())
    };
    let goodput = over_all(Policy::Goodput);
    for policy in
        [Policy::Fifo, Policy::Drf, Policy::Tiresias, Policy::Optimus, Policy::ElasticFair]
    {
        let other = over_all(policy);
        assert!(goodput < other, "goodput {goodput:.0}, {policy} {other:.0}");
    }
}
