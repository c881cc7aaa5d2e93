// SPDX-License-Identifier: Apache-2.0
//! Plays a scenario: `cargo run --release -p edl-sched --example simulate -- edl-case-1 --policy edl`.

use std::error::Error;
use std::io::{self, Write};
use std::path::PathBuf;
use std::time::Duration;

use edl_core::time::Time;
use edl_sched::sim::adaptdl::{self, BatchRule, Profiles};
use edl_sched::sim::edl_cases::{self, Size};
use edl_sched::sim::kubernetes::Kubernetes;
use edl_sched::sim::scenario::FaultKind;
use edl_sched::sim::{Scenario, philly, run};
use edl_sched::state::Policy;

use csv_files::read;

#[path = "files/csv_files.rs"]
mod csv_files;

const USAGE: &str = "usage: simulate SCENARIO [--policy NAME] [--seed N] [--seeds N] \
[--kubernetes 2017|today] [--large CPUS] [--data FOLDER] [--losses N_PER_HOUR] [--reclaims N_PER_HOUR] \
[--csv FILE] [--svg FILE]
scenarios: edl-case-1, edl-case-2, philly-PERCENT (of elastic jobs), \
adaptdl-N, adaptdl-N-LOAD (workload 1 to 4; 0.5, 1.5 or 2.0), each also with -adaptive";

struct Args {
    scenario: String,
    policy: Policy,
    seed: u64,
    n_seeds: u64,
    kubernetes: Option<Kubernetes>,
    large: u64,
    data: PathBuf,
    losses: f64,
    reclaims: f64,
    csv: Option<String>,
    svg: Option<String>,
}

fn main() -> Result<(), Box<dyn Error>> {
    let args = parse(std::env::args().skip(1))?;
    let mut out = io::stdout().lock();
    let scenario = with_faults(scenario(&args)?, &args);
    for seed in args.seed..args.seed + args.n_seeds {
        let report = run(&scenario, args.policy, seed);
        writeln!(out, "{}", report.table())?;
        if let Some(path) = &args.csv {
            std::fs::write(path, report.csv())?;
        }
        if let Some(path) = &args.svg {
            std::fs::write(path, report.svg())?;
        }
    }
    Ok(())
}

fn scenario(args: &Args) -> Result<Scenario, Box<dyn Error>> {
    let by_kubernetes = args.policy.leaves_placing_to_kubernetes();
    let usual = if by_kubernetes { Kubernetes::of_2017() } else { Kubernetes::of_today() };
    let kubernetes = args.kubernetes.unwrap_or(usual);
    let size = |fixed| if args.policy == Policy::Off { Size::Fixed(fixed) } else { Size::Elastic };
    match args.scenario.as_str() {
        "edl-case-1" => Ok(with_nodes(edl_cases::case_1(size(60), kubernetes), args.large)),
        "edl-case-2" => Ok(with_nodes(edl_cases::case_2(size(15), kubernetes), args.large)),
        other => from_traces(other, args),
    }
}

/// The same totals with large nodes of another size: 20, 28, 59 or 106 CPUs beside those of 12.
fn with_nodes(scenario: Scenario, large: u64) -> Scenario {
    let n_large = u32::try_from(752 / large.saturating_sub(12).max(1)).unwrap_or(47).min(133);
    let nodes = edl_cases::nodes_of(133 - n_large, 12_000, n_large, 1000 * large);
    Scenario { nodes, ..scenario }
}

/// Scenarios whose jobs come from files.
fn from_traces(name: &str, args: &Args) -> Result<Scenario, Box<dyn Error>> {
    let words: Vec<&str> = name.split('-').collect();
    let rule = if name.ends_with("adaptive") { BatchRule::Adaptive } else { BatchRule::Fixed };
    match words.as_slice() {
        ["philly", percent] => {
            let text = std::fs::read_to_string(args.data.join("traces/philly.csv"))?;
            Ok(philly::scenario(&philly::parse(&text)?, 20_000, 400, 16, percent.parse()?))
        }
        ["adaptdl", which, rest @ ..] => {
            let files = read(&args.data)?;
            let load = rest.first().filter(|word| word.contains('.'));
            let suffix = load.map_or(String::new(), |load| format!("-{load}"));
            let path = format!("workloads{suffix}/workload-{which}.csv");
            let entries = adaptdl::parse_workload(&files, &path)?;
            let profiles = Profiles::parse(&files)?;
            Ok(adaptdl::scenario(name, &entries, &profiles, args.policy, rule)?)
        }
        _ => Err(format!("no scenario is called `{name}`\n{USAGE}").into()),
    }
}

/// Adds losses and reclaims of nodes, of ten minutes each.
fn with_faults(mut scenario: Scenario, args: &Args) -> Scenario {
    let until = scenario.end.unwrap_or(Time::ZERO + Duration::from_secs(7 * 24 * 3600));
    let back_after = Duration::from_secs(600);
    let notice = Duration::from_secs(120);
    let kinds = [
        (args.losses, FaultKind::Loss { back_after }),
        (args.reclaims, FaultKind::Reclaim { notice, back_after }),
    ];
    for (per_hour, kind) in kinds {
        if per_hour > 0.0 {
            scenario = scenario.with_faults(per_hour, until, kind, args.seed);
        }
    }
    scenario
}

fn parse(mut words: impl Iterator<Item = String>) -> Result<Args, Box<dyn Error>> {
    let scenario = words.next().ok_or(USAGE)?;
    let mut args = Args {
        scenario,
        policy: Policy::default(),
        seed: 0,
        n_seeds: 1,
        kubernetes: None,
        large: 28,
        data: "../shared/data/adaptdl".into(),
        losses: 0.0,
        reclaims: 0.0,
        csv: None,
        svg: None,
    };
    while let Some(word) = words.next() {
        let value = words.next().ok_or(USAGE)?;
        match word.as_str() {
            "--policy" => args.policy = value.parse()?,
            "--seed" => args.seed = value.parse()?,
            "--seeds" => args.n_seeds = value.parse()?,
            "--large" => args.large = value.parse()?,
            "--data" => args.data = value.into(),
            "--losses" => args.losses = value.parse()?,
            "--reclaims" => args.reclaims = value.parse()?,
            "--csv" => args.csv = Some(value),
            "--svg" => args.svg = Some(value),
            "--kubernetes" => {
                args.kubernetes = Some(match value.as_str() {
                    "2017" => Kubernetes::of_2017(),
                    "today" => Kubernetes::of_today(),
                    _ => return Err(USAGE.into()),
                });
            }
            _ => return Err(USAGE.into()),
        }
    }
    Ok(args)
}
