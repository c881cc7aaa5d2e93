// SPDX-License-Identifier: Apache-2.0
//! `simulate`: simulates scheduling on a cluster with the real planner, and prints the results.

mod table;
mod traces;

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use edl_sched::sim::adaptdl::Files;
use edl_sched::sim::kubernetes::Kubernetes;
use edl_sched::sim::{Report, Scenario, catalog, file, run as simulate_scenario};
use edl_sched::state::Policy;

use crate::cli::SimulateArgs;
use crate::console::{eprint, write_json};
use crate::exit::{Exit, refuse};
use edl_core::text::nearest;

/// An example scenario.
const TEMPLATE: &str = include_str!("simulate/cluster.yaml");

/// Simulates every scenario with every policy and every seed.
pub(crate) fn run(args: &SimulateArgs, out: &mut dyn Write) -> anyhow::Result<Exit> {
    if args.example {
        out.write_all(TEMPLATE.as_bytes())?;
        return Ok(Exit::Ok);
    }
    let policies = policies(&args.policy)?;
    let kubernetes = args.kubernetes.as_deref().map(kubernetes).transpose()?;
    let names: Vec<&str> = args.scenarios.iter().map(String::as_str).collect();
    let files = traces(args, &names)?;
    let mut reports = Vec::new();
    for name in &names {
        for policy in &policies {
            for seed in args.seed..args.seed.saturating_add(args.seeds) {
                let scenario = scenario(name, *policy, seed, kubernetes, &files)?;
                let scenario = scenario
                    .with_losses(args.losses_per_hour, args.reclaims_per_hour, seed)
                    .map_err(|invalid| refuse(format!("--{invalid}")))?;
                reports.push(simulate_scenario(&scenario, *policy, seed));
            }
        }
    }
    for (path, text) in
        [(&args.csv, Report::csv as fn(&Report) -> String), (&args.svg, Report::svg)]
    {
        if let Some(path) = path {
            write_each(path, &reports, text)?;
        }
    }
    if args.json {
        write_json(&table::rows(&reports), out)?;
    } else if let [report] = reports.as_slice() {
        out.write_all(report.table().as_bytes())?;
    } else {
        table::write(&reports, out)?;
    }
    Ok(Exit::Ok)
}

/// Writes one file for each run, named after the run if there are several.
fn write_each(path: &Path, reports: &[Report], text: fn(&Report) -> String) -> anyhow::Result<()> {
    for report in reports {
        let path = if reports.len() == 1 { path.to_owned() } else { named_after(path, report) };
        std::fs::write(&path, text(report))
            .map_err(|error| refuse(format!("cannot write `{}`: {error}", path.display())))?;
        eprint(format_args!("wrote {}", path.display()));
    }
    Ok(())
}

/// `run.svg` becomes `run-edl-case-1-fifo-0.svg`.
fn named_after(path: &Path, report: &Report) -> PathBuf {
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    let tail =
        path.extension().map_or(String::new(), |tail| format!(".{}", tail.to_string_lossy()));
    let fits = |c: char| if c.is_ascii_alphanumeric() || "-.".contains(c) { c } else { '_' };
    let scenario: String = report.scenario.chars().map(fits).collect();
    path.with_file_name(format!("{stem}-{scenario}-{}-{}{tail}", report.policy, report.seed))
}

fn policies(names: &str) -> anyhow::Result<Vec<Policy>> {
    if names == "all" {
        return Ok(Policy::ALL.to_vec());
    }
    let policy = |name: &str| {
        name.parse::<Policy>().map_err(|error| {
            let known: Vec<&str> = Policy::ALL.into_iter().map(Policy::name).collect();
            refuse(format!("--policy: {error}; choose from {} and all", known.join(", ")))
        })
    };
    names.split(',').map(policy).collect()
}

fn kubernetes(year: &str) -> anyhow::Result<Kubernetes> {
    match year {
        "today" => Ok(Kubernetes::of_today()),
        "2017" => Ok(Kubernetes::of_2017()),
        other => Err(refuse(format!("--kubernetes `{other}` must be today or 2017"))),
    }
}

/// The files of the traces, if a scenario needs them.
fn traces(args: &SimulateArgs, names: &[&str]) -> anyhow::Result<Files> {
    let Some(needs) = names.iter().find(|name| catalog::needs_traces(name)) else {
        return Ok(Files::new());
    };
    let Some(folder) = &args.data else {
        return Err(refuse(format!(
            "scenario `{needs}` replays a trace; specify the folder of its files with --data"
        )));
    };
    traces::read(folder).map_err(|error| refuse(format!("--data `{}`: {error}", folder.display())))
}

fn scenario(
    name: &str,
    policy: Policy,
    seed: u64,
    kubernetes: Option<Kubernetes>,
    files: &Files,
) -> anyhow::Result<Scenario> {
    if is_file(name) {
        let text = std::fs::read_to_string(name)
            .map_err(|error| refuse(format!("cannot read `{name}`: {error}")))?;
        let description: file::Description = edl_kube::yaml::read(&text).map_err(|error| {
            refuse(format!("`{name}`: {error}; see the fields with `elasticdl simulate --example`"))
        })?;
        let stem = Path::new(name).file_stem().context("a file has a name")?.to_string_lossy();
        let scenario = file::scenario(&stem, &description, seed)
            .map_err(|error| refuse(format!("`{name}`: {error}")))?;
        return Ok(Scenario { kubernetes: kubernetes.unwrap_or(scenario.kubernetes), ..scenario });
    }
    catalog::scenario(name, policy, kubernetes, files).map_err(|error| match error {
        catalog::Error::Unknown(_) => {
            let hint = nearest(name, ["edl-case-1", "edl-case-2", "adaptdl-1", "philly-50"]);
            let hint = hint.map_or(".".to_owned(), |near| format!("; did you mean `{near}`?"));
            refuse(format!(
                "{error}{hint} Choose from {}, or a file that ends in .yaml",
                catalog::NAMES
            ))
        }
        catalog::Error::Trace(error) => refuse(format!("--data: {error}")),
    })
}

fn is_file(name: &str) -> bool {
    Path::new(name).extension().is_some_and(|tail| tail == "yaml" || tail == "yml")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(scenarios: &[&str]) -> SimulateArgs {
        SimulateArgs {
            scenarios: scenarios.iter().map(ToString::to_string).collect(),
            policy: "elastic-fair".into(),
            seed: 0,
            seeds: 1,
            kubernetes: None,
            data: None,
            losses_per_hour: 0.0,
            reclaims_per_hour: 0.0,
            csv: None,
            svg: None,
            json: false,
            example: false,
        }
    }

    fn printed(args: &SimulateArgs) -> Result<String, String> {
        let mut out = Vec::new();
        run(args, &mut out).map_err(|error| format!("{error:#}"))?;
        Ok(String::from_utf8(out).expect("text"))
    }

    #[test]
    fn the_example_is_a_scenario_and_every_job_of_it_ends() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("cluster.yaml");
        std::fs::write(&path, TEMPLATE).unwrap();
        let play = SimulateArgs { json: true, ..args(&[path.to_str().unwrap()]) };
        let rows: serde_json::Value = serde_json::from_str(&printed(&play).unwrap()).unwrap();
        assert_eq!(rows[0]["jobs"], rows[0]["jobs_done"]);
        assert!(rows[0]["jobs"].as_u64().unwrap() > 3, "{rows}");
    }

    #[test]
    fn a_plot_is_written_for_each_run() {
        let dir = tempfile::tempdir().unwrap();
        let svg = dir.path().join("play.svg");
        let policy = "fifo,elastic-fair".to_owned();
        let play = SimulateArgs { svg: Some(svg), policy, ..args(&["edl-case-1"]) };
        let text = printed(&play).unwrap();
        assert!(text.contains("elastic-fair") && text.contains("fifo"), "{text}");
        for name in ["play-edl-case-1-fifo-0.svg", "play-edl-case-1-elastic-fair-0.svg"] {
            let picture = std::fs::read_to_string(dir.path().join(name)).unwrap();
            assert!(picture.starts_with("<svg"), "{name}");
        }
    }

    /// Why a file is refused.
    fn refused_file(text: &str) -> String {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("mine.yaml");
        std::fs::write(&path, text).unwrap();
        printed(&args(&[path.to_str().unwrap()])).unwrap_err()
    }

    /// Why a file with one job is refused.
    fn refused_job(fields: &str) -> String {
        let job = format!("{{name: a, worker: {{cpu: 1}}, {fields}}}");
        refused_file(&format!("nodes: [{{cpu: 4}}]\njobs: [{job}]\n"))
    }

    #[test]
    fn an_invalid_scenario_is_refused_in_one_sentence() {
        let refused = |args: &SimulateArgs| printed(args).unwrap_err();
        assert!(refused(&args(&["edl-case1"])).contains("did you mean `edl-case-1`?"));
        assert!(refused(&args(&["adaptdl-1"])).contains("with --data"));
        let other = SimulateArgs { policy: "best".into(), ..args(&["edl-case-1"]) };
        assert!(refused(&other).contains("unknown policy `best`; choose from off, fifo"));
        assert!(refused_job("workers: 4-2, work: 1h").contains("job `a`: minimum exceeds maximum"));
        assert!(refused_job("workers: 1-2").contains("set the end of the simulation with `end`"));
        assert!(
            refused_job("workers: 1-2, work: soon")
                .contains("invalid duration `soon`; use e.g. 90s")
        );
        assert!(refused_job("workers: 1-2, work: 1h, queue: x").contains("queue `x` not found"));
        assert!(refused_job("workers: 1-2, wrk: 1h").contains("wrk"));
        assert!(refused_file("nodes: []\njobs: []\n").contains("`nodes` is empty"));
    }

    #[test]
    fn sizes_rates_and_names_that_cannot_be_simulated_are_refused() {
        for (text, why) in [
            (
                "workers: 1-4294967295, work: 1h",
                "`workers` and `num_ps_pods` must be at most 10000",
            ),
            ("workers: 1, work: 1h, num_ps_pods: 100000000", "must be at most 10000"),
            ("workers: 1-10000, count: 100000, work: 1h", "the limit is 1000000"),
            ("workers: 1, work: 1h, weight: 0", "job `a`: `weight` must be at least 1"),
            ("workers: 1, work: .nan", "not a finite number"),
            ("workers: 1, work: nan", "invalid duration `nan`"),
            ("workers: 1, work: 1h, scaling: .inf", "not a finite number"),
            ("workers: 1, work: 1h, scaling: 2", "job `a`: `scaling` must be 0 to 1.5"),
            ("workers: many, work: 1h", "invalid range `many`; use e.g. 2-8"),
            ("workers: 1, work: 1h, ps: {gpu: 4294967295}", "`gpu: 4294967295` must be at most"),
            ("workers: 1, work: 1h, ps: {cpu: -1}", "`cpu: -1` must be between 0 and 1000000"),
        ] {
            let found = refused_job(text);
            assert!(found.contains(why), "{text}: {found}");
        }
        for (text, why) in [
            ("faults: {losses_per_hour: .nan}", "not a finite number"),
            (
                "faults: {losses_per_hour: 1e9}",
                "`faults`: losses_per_hour `1000000000` must be a number from 0 to 5952",
            ),
            ("faults: {reclaims_per_hour: -1}", "reclaims_per_hour `-1` must be a number from 0"),
            ("services: [{name: s, pod: {cpu: 1}, pods: [[0, 4294967295]]}]", "up to 4294967297"),
            (
                "services: [{name: s, pod: {cpu: 1}, pods: []}, {name: s, pod: {cpu: 1}, pods: []}]",
                "duplicate service `s`",
            ),
            ("queues: [{name: q}, {name: q}]", "duplicate queue `q`"),
            (
                "services: [{name: s, pod: {cpu: 1}, pods: [[9, 1], [0, 1]]}]",
                "service `s`: `pods` must be sorted by time",
            ),
        ] {
            let jobs = "jobs: [{name: a, worker: {cpu: 1}, workers: 1, work: 1h}]";
            let found = refused_file(&format!("nodes: [{{cpu: 4}}]\n{jobs}\n{text}\n"));
            assert!(found.contains(why) && found.lines().count() == 1, "{text}: {found}");
        }
        let many = "nodes: [{cpu: 4, count: 4294967295}]\njobs: []\n";
        assert!(refused_file(many).contains("too many `nodes`; the limit is"));
        let twice = "{name: a, worker: {cpu: 1}, workers: 1, work: 1h}";
        let found = refused_file(&format!("nodes: [{{cpu: 4}}]\njobs: [{twice}, {twice}]\n"));
        assert!(found.contains("duplicate job `a`"), "{found}");
        let rate = SimulateArgs { losses_per_hour: f64::NAN, ..args(&["edl-case-1"]) };
        assert!(
            printed(&rate)
                .unwrap_err()
                .contains("--losses_per_hour `NaN` must be a number from 0 to")
        );
    }
}
