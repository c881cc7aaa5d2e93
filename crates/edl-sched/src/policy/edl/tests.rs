// SPDX-License-Identifier: Apache-2.0
//! The cases of EDL's own unit tests, as ours: what the published rules answer, and what the
//! corrected policy plans in the same cluster.

use edl_core::time::Time;

use super::*;
use crate::snapshot::{Counts, Job, JobId, Node, NodeId, RoleSpec, Roles, Snapshot};
use crate::state::{Options, PlannerState, Policy};
use crate::{applied, plan};

fn cpu(milli: u64) -> Resources {
    Resources::new(0, milli, 1)
}

/// One node with everything on it.
fn totals(total: Resources, asked: Resources) -> ClusterTotals {
    ClusterTotals { total, asked, idle: vec![total.saturating_sub(asked)] }
}

fn plenty(cpu_milli: u64, gpu: u64) -> Resources {
    Resources::new(gpu, cpu_milli, 1_000_000)
}

fn up(totals: &mut ClusterTotals, trainer: &mut Trainer, load: u32) -> i64 {
    totals.step(trainer, load, Direction::Up)
}

fn down(totals: &mut ClusterTotals, trainer: &mut Trainer, load: u32) -> i64 {
    totals.step(trainer, load, Direction::Down)
}

/// How many more workers the corrected policy plans for one job that has `n` on a single node.
fn planned(total: Resources, taken: Resources, job: (u32, u32, u32, Resources), load: u32) -> i64 {
    let (min, max, n, shape) = job;
    let placed =
        crate::snapshot::Placed { role: crate::snapshot::Role::Worker, node: NodeId(0), n };
    let job = Job {
        placed: if n > 0 { vec![placed] } else { Vec::new() },
        running: Counts { worker: n, ..Counts::default() },
        ..Job::new(
            JobId(0),
            Time::ZERO,
            Roles { worker: RoleSpec { shape, min, max }, ..Roles::default() },
        )
    };
    let node = Node { taken, ..Node::new(NodeId(0), total) };
    let snapshot = Snapshot { nodes: vec![node], jobs: vec![job], ..Snapshot::default() };
    let options =
        Options { policy: Policy::Edl, max_load_permille: load, growth: 100, ..Options::default() };
    let made = plan(&snapshot, &PlannerState::new(options), Time::ZERO);
    i64::from(applied(&snapshot, &made).jobs[0].counts().worker) - i64::from(n)
}

#[test]
fn a_job_at_its_maximum_stays() {
    let mut totals = totals(plenty(2000, 0), plenty(1000, 0).permille(0));
    let mut trainer = Trainer::of(1, 2, 2, cpu(1000));
    assert_eq!(up(&mut totals, &mut trainer, 1000), 0);
    assert_eq!(planned(plenty(4000, 0), Resources::ZERO, (1, 2, 2, cpu(1000)), 1000), 0);
}

#[test]
fn cpus_that_are_free_are_used() {
    let mut totals = totals(plenty(3000, 0), cpu(100));
    let mut trainer = Trainer::of(1, 3, 1, cpu(1000));
    assert_eq!(up(&mut totals, &mut trainer, 1000), 1);
    assert_eq!(trainer.planned, 2);
    assert_eq!(planned(plenty(3100, 0), cpu(100), (1, 3, 1, cpu(1000)), 1000), 2);
}

#[test]
fn without_free_cpus_nothing_grows() {
    let mut totals = totals(plenty(1000, 0), cpu(1000));
    let mut trainer = Trainer::of(1, 3, 1, cpu(1000));
    assert_eq!(up(&mut totals, &mut trainer, 1000), 0);
    assert_eq!(planned(plenty(1000, 0), Resources::ZERO, (1, 3, 1, cpu(1000)), 1000), 0);
}

#[test]
fn gpus_that_are_free_are_used() {
    let shape = Resources::new(1, 1000, 1);
    let mut totals = totals(plenty(4000, 10), Resources::new(9, 0, 0));
    let mut trainer = Trainer::of(1, 3, 1, shape);
    assert_eq!(up(&mut totals, &mut trainer, 1000), 1);
    assert_eq!(planned(plenty(4000, 3), Resources::ZERO, (1, 3, 1, shape), 1000), 2);
}

#[test]
fn without_free_gpus_nothing_grows() {
    let shape = Resources::new(1, 1000, 1);
    let mut totals = totals(plenty(4000, 10), Resources::new(10, 0, 0));
    let mut trainer = Trainer::of(1, 3, 1, shape);
    assert_eq!(up(&mut totals, &mut trainer, 1000), 0);
    assert_eq!(planned(plenty(4000, 1), Resources::ZERO, (1, 3, 1, shape), 1000), 0);
}

#[test]
fn a_job_above_its_maximum_shrinks_one_by_one_and_stops_there() {
    let mut totals = totals(plenty(2000, 0), cpu(1000));
    let mut trainer = Trainer::of(1, 3, 6, cpu(1000));
    let steps: Vec<i64> = (0..4).map(|_| down(&mut totals, &mut trainer, 1000)).collect();
    assert_eq!(steps, [-1, -1, -1, 0]);
    assert_eq!(planned(plenty(20_000, 0), Resources::ZERO, (1, 3, 6, cpu(1000)), 1000), -3);
}

#[test]
fn a_full_cluster_shrinks_jobs_to_their_minimum_and_no_further() {
    let mut totals = totals(plenty(1000, 0), cpu(6000));
    let mut trainer = Trainer::of(1, 3, 3, cpu(1000));
    let steps: Vec<i64> = (0..3).map(|_| down(&mut totals, &mut trainer, 1000)).collect();
    assert_eq!(steps, [-1, -1, 0]);
    assert_eq!(planned(plenty(4000, 0), cpu(1000), (1, 3, 3, cpu(1000)), 500), -2);
}

#[test]
fn a_cluster_above_its_load_takes_one() {
    let mut totals = totals(plenty(1000, 0), cpu(1100));
    let mut trainer = Trainer::of(1, 3, 3, cpu(1000));
    assert_eq!(down(&mut totals, &mut trainer, 1000), -1);
}

#[test]
fn without_free_memory_nothing_grows() {
    let total = Resources::new(0, 10_000, 100);
    let mut totals = totals(total, Resources::new(0, 0, 99));
    let mut trainer = Trainer::of(1, 3, 1, Resources::new(0, 1000, 1));
    assert_eq!(up(&mut totals, &mut trainer, 1000), 0);
    let taken = Resources::new(0, 0, 98);
    let shape = Resources::new(0, 1000, 2);
    assert_eq!(planned(total, taken, (1, 3, 1, shape), 1000), 0);
}

#[test]
fn the_whole_dry_run_fills_what_is_free() {
    // Four CPUs, one in use.
    let mut totals = totals(plenty(4000, 0), cpu(1000));
    let mut trainers = [Trainer::of(1, 3, 1, cpu(1000))];
    assert_eq!(totals.dry_run(&mut trainers, 1000), Ok(()));
    assert_eq!(trainers[0].planned - 1, 2);
    assert_eq!(planned(plenty(4000, 0), Resources::ZERO, (1, 3, 1, cpu(1000)), 1000), 2);
}

#[test]
fn the_whole_dry_run_stops_where_memory_is_used_up() {
    let total = Resources::new(0, 4000, 10);
    let mut totals = totals(total, Resources::new(0, 1000, 10));
    let mut trainers = [Trainer::of(1, 3, 1, cpu(1000))];
    assert_eq!(totals.dry_run(&mut trainers, 1000), Ok(()));
    assert_eq!(trainers[0].planned, 1);
}

#[test]
fn a_load_below_one_leaves_capacity_free() {
    // Eight tenths of three CPUs hold two workers.
    let mut totals = totals(plenty(3000, 0), cpu(1000));
    let mut trainers = [Trainer::of(1, 3, 1, cpu(1000))];
    assert_eq!(totals.dry_run(&mut trainers, 800), Ok(()));
    assert_eq!(trainers[0].planned - 1, 1);
    assert_eq!(planned(plenty(3000, 0), Resources::ZERO, (1, 3, 1, cpu(1000)), 800), 1);
}

#[test]
fn a_load_below_one_takes_back_what_is_above_it() {
    let mut totals = totals(plenty(3000, 0), cpu(3000));
    let mut trainers = [Trainer::of(1, 3, 3, cpu(1000))];
    assert_eq!(totals.dry_run(&mut trainers, 800), Ok(()));
    assert_eq!(trainers[0].planned - 3, -1);
    assert_eq!(planned(plenty(3000, 0), Resources::ZERO, (1, 3, 3, cpu(1000)), 800), -1);
}

#[test]
fn jobs_that_ask_for_too_much_cpu_stay_small() {
    let mut totals = totals(plenty(2000, 0), cpu(1000));
    let mut trainers = [Trainer::of(1, 3, 1, cpu(1500))];
    assert_eq!(totals.dry_run(&mut trainers, 1000), Ok(()));
    assert_eq!(trainers[0].planned, 1);
    assert_eq!(planned(plenty(2000, 0), Resources::ZERO, (1, 3, 1, cpu(1500)), 1000), 0);
}

#[test]
fn jobs_that_ask_for_too_many_gpus_stay_small() {
    let shape = Resources::new(2, 100, 1);
    let mut totals = totals(plenty(4000, 3), Resources::new(2, 100, 1));
    let mut trainers = [Trainer::of(1, 3, 1, shape)];
    assert_eq!(totals.dry_run(&mut trainers, 1000), Ok(()));
    assert_eq!(trainers[0].planned, 1);
    assert_eq!(planned(plenty(4000, 3), Resources::ZERO, (1, 3, 1, shape), 1000), 0);
}

#[test]
fn fulfillment_goes_from_nothing_to_one() {
    let of = |current| Trainer::of(1, 3, current, cpu(1)).fulfillment();
    assert!((of(1) - 0.0).abs() < 1e-12);
    assert!((of(2) - 0.5).abs() < 1e-12);
    assert!((of(3) - 1.0).abs() < 1e-12);
    assert!((Trainer::of(2, 2, 2, cpu(1)).fulfillment() - 1.0).abs() < 1e-12, "rigid");
}

#[test]
fn the_least_fulfilled_come_first_then_the_least_demanding() {
    let small = Resources::new(0, 1, 1);
    let jobs = [
        Trainer::of(1, 10, 2, Resources::new(0, 10, 1)),
        Trainer::of(1, 20, 2, small),
        Trainer::of(1, 10, 2, small),
        Trainer::of(1, 10, 2, Resources::new(1, 1, 1)),
    ];
    let mut sorted = jobs;
    sorted.sort_by(Trainer::order);
    assert_eq!(sorted, [jobs[1], jobs[2], jobs[0], jobs[3]]);
}

#[test]
fn more_memory_breaks_a_tie_last() {
    let with = |memory| Trainer::of(1, 10, 1, Resources::new(0, 1, memory));
    let mut sorted = [with(3), with(1), with(2)];
    sorted.sort_by(Trainer::order);
    assert_eq!(sorted, [with(1), with(2), with(3)]);
}

#[test]
fn the_published_rules_go_up_and_down_forever_with_gpus_and_the_fixed_ones_stop() {
    // Ten GPUs at 0.97: up fills the tenth, down takes it away.
    let shape = Resources::new(1, 100, 1);
    let mut totals = totals(plenty(100_000, 10), Resources::new(1, 100, 1));
    let mut trainers = [Trainer::of(1, 20, 1, shape)];
    assert_eq!(totals.dry_run(&mut trainers, 970), Err(Endless));
    assert_eq!(planned(plenty(100_000, 10), Resources::ZERO, (1, 20, 1, shape), 970), 8);
}

#[test]
fn the_published_rules_overfill_a_node_and_the_fixed_ones_do_not() {
    // Two nodes of 6 CPUs hold one worker of 5 each, whatever the sums say.
    let shape = cpu(5000);
    let mut totals = ClusterTotals {
        total: plenty(12_000, 0) + plenty(12_000, 0),
        asked: Resources::ZERO,
        idle: vec![plenty(6000, 0)],
    };
    let mut trainers = [Trainer::of(1, 9, 0, shape)];
    assert_eq!(totals.dry_run(&mut trainers, 1000), Ok(()));
    assert_eq!(trainers[0].planned, 4, "the wrong sign: one node takes them all");
    assert_eq!(planned(plenty(6000, 0), Resources::ZERO, (1, 9, 1, shape), 1000), 0);
}

#[test]
fn a_job_is_elastic_only_if_its_minimum_is_below_its_maximum() {
    let with =
        |min, max| planned(plenty(9000, 0), Resources::ZERO, (min, max, min, cpu(1000)), 1000);
    assert_eq!((with(2, 2), with(2, 4)), (0, 2));
}

#[test]
fn requests_of_many_pods_add_up() {
    let pods = [Resources::new(1, 100, 10), Resources::new(0, 200, 20)];
    assert_eq!(pods.into_iter().sum::<Resources>(), Resources::new(1, 300, 30));
}
