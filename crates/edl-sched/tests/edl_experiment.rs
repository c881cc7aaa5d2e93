// SPDX-License-Identifier: Apache-2.0
//! The published EDL experiment: first the published figures, then the results of our policies.

use edl_sched::sim::edl_cases::{self, Size};
use edl_sched::sim::kubernetes::Kubernetes;
use edl_sched::sim::metrics::{Row, mean, mean_over, quantile};
use edl_sched::sim::{Report, Scenario, run};
use edl_sched::state::Policy;

const N_ROUNDS: u64 = 10;

fn rounds(scenario: &Scenario, policy: Policy) -> Vec<Report> {
    (0..N_ROUNDS).map(|seed| run(scenario, policy, seed)).collect()
}

fn mean_of(reports: &[Report], value: impl Fn(&Report) -> f64) -> f64 {
    mean(&reports.iter().map(value).collect::<Vec<_>>())
}

fn wait(report: &Report) -> f64 {
    mean(&report.waits())
}

/// Averaged over the same time as in the publication.
fn utilization(report: &Report) -> f64 {
    report.mean_utilization(0.0, 550.0)
}

fn off_peak(report: &Report) -> f64 {
    report.mean_utilization(300.0, 370.0)
}

#[test]
fn sums_match_the_logs_exactly() {
    let nodes = edl_cases::nodes();
    let total: u64 = nodes.iter().map(|node| node.capacity.cpu_milli).sum();
    let system: u64 = nodes.iter().map(|node| node.taken.cpu_milli).sum();
    assert_eq!((nodes.len(), total, system), (133, 2_348_000, 50_500));
    let percent = |cpu: f64| (10_000.0 * (cpu + 50.5) / 2348.0).round() / 100.0;
    assert!((percent(347.0 * 5.0 + 69.0 * 4.0 + 20.0) - 88.65).abs() < 1e-9);
    assert!((percent(400.0 * 3.0) - 53.26).abs() < 1e-9);
    assert!((percent(400.0 * 3.0 + 6.0 * 116.0) - 82.90).abs() < 1e-9);
    assert!((percent(100.0 * 3.0 + 6.0 * 116.0) - 44.57).abs() < 1e-9);
    assert!((percent(341.0) - percent(0.0) - 14.52).abs() < 0.011);
}

#[test]
fn the_simulator_shows_the_same_sums() {
    let scenario = edl_cases::case_2(Size::Fixed(15), Kubernetes::of_2017());
    let report = run(&scenario, Policy::Off, 0);
    let at = |secs: f64| {
        let row = report.rows.iter().find(|row| row.secs() >= secs).expect("a row");
        (100.0 * report.utilization(row)).round() / 100.0
    };
    assert!((at(0.0) - 53.26).abs() < 1e-9, "{}", at(0.0));
    assert!((at(105.0) - 82.90).abs() < 1e-9, "{}", at(105.0));
    assert!((at(350.0) - 44.57).abs() < 1e-9, "{}", at(350.0));
}

#[test]
fn without_a_planner_case_1_matches_the_published_figures() {
    let reports = rounds(&edl_cases::case_1(Size::Fixed(60), Kubernetes::of_2017()), Policy::Off);
    // Published rounds: waits 295–319 s, utilization 75.09–79.83 %.
    let (wait, used) = (mean_of(&reports, wait), mean_of(&reports, utilization));
    assert!((295.0..=319.0).contains(&wait), "wait {wait}");
    assert!((75.09..=79.83).contains(&used), "utilization {used}");
    for report in &reports {
        let row = report.rows.last().expect("rows");
        // 346.8 trainers and 69 servers on average; 6 jobs run and 14 wait.
        assert!((345..=348).contains(&row.n_workers()), "{} trainers", row.n_workers());
        assert!((62..=70).contains(&row.n_ps), "{} servers", row.n_ps);
        assert_eq!(row.n_pending, 14);
    }
}

#[test]
fn the_published_rules_match_the_published_figures_in_case_1() {
    let scenario = edl_cases::case_1(Size::Elastic, Kubernetes::of_2017());
    let reports = rounds(&scenario, Policy::EdlPublished);
    // Published rounds: waits 24–85 s, utilization 75.05–77.85 %; 86.35 % once stable.
    let (wait, used) = (mean_of(&reports, wait), mean_of(&reports, utilization));
    assert!((24.0..=85.0).contains(&wait), "wait {wait}");
    assert!((75.05..=77.85).contains(&used), "utilization {used}");
    let stable = mean_of(&reports, |report| report.mean_utilization(400.0, 500.0));
    assert!((stable - 86.35).abs() < 1.0, "stable {stable}");
}

#[test]
fn case_2_matches_the_published_figures() {
    let off = edl_cases::case_2(Size::Fixed(15), Kubernetes::of_2017());
    let off = rounds(&off, Policy::Off);
    // Published rounds: waits 0–3 s, utilization 61.44–62.37 %, off-peak 44.91 %.
    let used = mean_of(&off, utilization);
    assert!(mean_of(&off, wait) <= 3.0);
    assert!((61.44..=62.37).contains(&used), "off: utilization {used}");
    assert!((mean_of(&off, off_peak) - 44.91).abs() < 0.5);
    let on = edl_cases::case_2(Size::Elastic, Kubernetes::of_2017());
    let on = rounds(&on, Policy::EdlPublished);
    // Published rounds: waits 9–101 s, utilization 82.82–84.31 %; 332 (175–398) of 400 nginx pods
    // at the end.
    let (wait, used) = (mean_of(&on, wait), mean_of(&on, utilization));
    assert!((9.0..=101.0).contains(&wait), "on: wait {wait}");
    assert!((82.0..=84.31).contains(&used), "on: utilization {used}");
    let nginx = mean_of(&on, |one| mean_over(&one.rows, 640.0..=690.0, |row| row.n_service.into()));
    assert!((175.0..=398.0).contains(&nginx), "on: {nginx} nginx pods");
}

#[test]
fn elastic_fair_leaves_no_job_waiting_and_no_capacity_idle_in_case_1() {
    let scenario = edl_cases::case_1(Size::Elastic, Kubernetes::of_today());
    for report in rounds(&scenario, Policy::ElasticFair) {
        let waits = report.whole_waits();
        assert!(mean(&waits) <= 10.0 && quantile(&waits, 0.99) <= 20.0, "{waits:?}");
        let jain = mean_over(&report.rows, 500.0..=609.0, Row::jain);
        assert!(jain >= 0.98, "Jain {jain}");
        for (from, to) in [(400.0, 600.0), (0.0, 550.0)] {
            let used = report.mean_utilization(from, to);
            let bound = report.mean_bound(from, to).expect("all jobs are equal");
            assert!(used >= 0.98 * bound, "{used} of a bound of {bound}");
        }
        let per_minute = report.resizes_per_job_hour() / 60.0;
        assert!(per_minute <= 1.0, "{per_minute} resizes per job and minute");
    }
}

#[test]
fn elastic_fair_yields_to_nginx_and_leaves_no_capacity_idle_in_case_2() {
    let scenario = edl_cases::case_2(Size::Elastic, Kubernetes::of_today());
    let reports = rounds(&scenario, Policy::ElasticFair);
    for report in &reports {
        let waits = report.whole_waits();
        assert!(mean(&waits) <= 10.0 && quantile(&waits, 0.99) <= 20.0, "{waits:?}");
        // Workers leave immediately, within two seconds; nginx pods wait for nothing else.
        assert!(report.deficit_unplanned() < 1e-6, "{}", report.deficit_unplanned());
        assert!(report.deficit_without_node() <= 300.0 * 2.0, "{}", report.deficit_without_node());
        let last = report.rows.last().expect("rows");
        assert_eq!(last.n_service, 400);
        let used = utilization(report);
        let bound = report.mean_bound_by_staying(0.0, 550.0).expect("nothing ends or fails");
        assert!(used >= 88.0 && used >= 0.98 * bound, "{used} of a bound of {bound}");
    }
    let used = mean_of(&reports, off_peak);
    let bound = mean_of(&reports, |one| one.mean_bound(300.0, 370.0).expect("all jobs are equal"));
    assert!(used >= 0.98 * bound, "off-peak: {used} of a bound of {bound}");
}

#[test]
fn the_same_seed_gives_the_same_report() {
    let scenario = edl_cases::case_2(Size::Elastic, Kubernetes::of_2017());
    for policy in [Policy::EdlPublished, Policy::ElasticFair] {
        let report = run(&scenario, policy, 7);
        assert_eq!(report, run(&scenario, policy, 7));
        assert_ne!(report.rows, run(&scenario, policy, 8).rows);
    }
}
