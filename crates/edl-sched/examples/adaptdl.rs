// SPDX-License-Identifier: Apache-2.0
//! Plays the AdaptDL workloads under one policy and prints mean completion times:
//! `cargo run --release -p edl-sched --example adaptdl -- FOLDER POLICY [fixed|adaptive] [LOAD…]`.

use std::error::Error;
use std::io::{self, Write};
use std::path::Path;

use edl_sched::sim::adaptdl::{self, BatchRule, Profiles};
use edl_sched::sim::metrics::{mean, quantile};
use edl_sched::sim::run;
use edl_sched::state::Policy;

use csv_files::read;

#[path = "files/csv_files.rs"]
mod csv_files;

fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [folder, policy, rule, loads @ ..] = words.as_slice() else {
        return Err("usage: adaptdl FOLDER POLICY fixed|adaptive [LOAD…]".into());
    };
    let policy: Policy = policy.parse()?;
    let rule = match rule.as_str() {
        "fixed" => BatchRule::Fixed,
        "adaptive" => BatchRule::Adaptive,
        other => return Err(format!("no batch rule is called `{other}`").into()),
    };
    let loads = if loads.is_empty() { vec!["1".into()] } else { loads.to_vec() };
    let files = read(Path::new(folder))?;
    let profiles = Profiles::parse(&files)?;
    let mut out = io::stdout().lock();
    writeln!(out, "load  workload  mean JCT  p50  p99  makespan  resizes  stops (s; {policy})")?;
    for load in &loads {
        let suffix = if load == "1" { String::new() } else { format!("-{load}") };
        let mut means = Vec::new();
        for which in 1..=4 {
            let path = format!("workloads{suffix}/workload-{which}.csv");
            let entries = adaptdl::parse_workload(&files, &path)?;
            let scenario = adaptdl::scenario(&path, &entries, &profiles, policy, rule)?;
            let report = run(&scenario, policy, 0);
            let times = report.completion_times();
            means.push(mean(&times));
            writeln!(
                out,
                "{load:<5} {which:<9} {:<9.0} {:<4.0} {:<4.0} {:<9.0} {:<8} {}",
                mean(&times),
                quantile(&times, 0.5),
                quantile(&times, 0.99),
                report.makespan(),
                report.n_resizes(),
                report.n_stops(),
            )?;
        }
        writeln!(out, "{load:<5} all       {:.0}", mean(&means))?;
    }
    Ok(())
}
