// SPDX-License-Identifier: Apache-2.0
//! `explain`: why a job failed or stalled, and what to do; for a TrainingJob, also why it has its
//! current number of workers.
//!
//! This only gathers facts and prints; `edl_core::verdict` judges.

use std::io::Write;

use edl_core::platform::InstanceId;
use edl_core::verdict::{Facts, Noted, ProcessNow, Verdict, verdict};
use edl_kube::client::Cluster;
use edl_net::proto::JobStatus;

use crate::cli::operator::ExplainArgs;
use crate::cluster::{self, ClusterJob, Target};
use crate::console::write_json;
use crate::exit::Exit;
use crate::plan;

mod local;
mod log;

/// What is printed as JSON.
#[derive(serde::Serialize)]
struct Answer {
    #[serde(flatten)]
    verdict: Option<Verdict>,
    /// What the operator says about a TrainingJob.
    plan: Option<String>,
}

/// Runs the command.
pub(crate) fn run(args: &ExplainArgs, out: &mut dyn Write) -> anyhow::Result<Exit> {
    let (mut found, mut plan) = (None, None);
    match find(args) {
        Ok(Target::Local(job)) => found = Some(local::verdict_of(&job)?),
        Ok(Target::Cluster(job)) => {
            plan = planned(args).ok().flatten();
            found = Some(verdict(&cluster_facts(&job)));
        }
        // The operator may not have started the job yet.
        Err(error) => match planned(args) {
            Ok(Some(text)) => plan = Some(text),
            Ok(None) | Err(_) => return Err(error),
        },
    }
    if args.json {
        write_json(&Answer { verdict: found, plan }, out)?;
        return Ok(Exit::Ok);
    }
    let texts = [found.as_ref().map(text), plan];
    let texts: Vec<String> = texts.into_iter().flatten().collect();
    out.write_all(texts.join("\n").as_bytes())?;
    Ok(Exit::Ok)
}

/// The job that is meant: `NAME`, a folder, or `NAMESPACE/NAME`.
fn find(args: &ExplainArgs) -> anyhow::Result<Target> {
    let found = cluster::find(&args.job);
    let qualified = args.job.job.as_ref().and_then(|job| job.split_once('/'));
    match qualified.filter(|_| found.is_err() && Cluster::is_configured()) {
        Some((namespace, name)) => {
            let job = ClusterJob::find(namespace, Some(name), false)?;
            Ok(Target::Cluster(Box::new(job)))
        }
        None => found,
    }
}

/// What the operator says about a TrainingJob of this name.
fn planned(args: &ExplainArgs) -> anyhow::Result<Option<String>> {
    let Some(job) = &args.job.job else { return Ok(None) };
    let job = match &args.job.namespace {
        Some(namespace) => format!("{namespace}/{job}"),
        None => job.clone(),
    };
    plan::text(&args.operator_namespace, &args.planner, Some(&job))
}

/// The facts that a status contains.
fn of_status(job: String, status: &JobStatus) -> Facts {
    let noted = |event: &edl_net::proto::Event| Noted {
        at_secs: event.at_secs,
        kind: event.kind(),
        text: event.text.clone(),
    };
    let process = |instance: &edl_net::proto::Instance| ProcessNow {
        instance: InstanceId { role: instance.role(), id: instance.id },
        state: instance.state(),
        why: instance.why.clone(),
    };
    Facts {
        job,
        job_type: status.job_type(),
        state: status.state(),
        reason: status.reason.clone(),
        step: status.step,
        last_checkpoint: status.last_checkpoint.clone(),
        now_secs: local::now_secs(),
        events: status.events.iter().map(noted).collect(),
        processes: status.instances.iter().map(process).collect(),
        ..Facts::default()
    }
}

/// What the master and the pods' logs say.
fn cluster_facts(job: &ClusterJob) -> Facts {
    job.runtime.block_on(async {
        let status = cluster::status::of(job).await;
        let mut facts = of_status(job.handle(), &status);
        for (instance, text) in cluster::logs::of_pods(job).await {
            facts.logged.extend(log::entries(instance, &text));
        }
        facts
    })
}

/// The verdict for people: one sentence, the evidence, the advice.
fn text(verdict: &Verdict) -> String {
    let mut lines = vec![format!("verdict    {}", verdict.verdict)];
    let mut line = |name: &str, value: Option<String>| {
        lines.extend(value.map(|value| format!("{name:<11}{value}")));
    };
    line("process", verdict.process.map(|process| process.to_string()));
    line("since", verdict.at_secs.map(log::stamp));
    line("step", (verdict.step > 0).then(|| verdict.step.to_string()));
    line("records", verdict.records.clone());
    for (n, evidence) in verdict.evidence.iter().enumerate() {
        let at = evidence.at_secs.map(|at| format!("{}  ", log::stamp(at))).unwrap_or_default();
        let name = if n == 0 { "evidence" } else { "" };
        line(name, Some(format!("{at}{}", evidence.text)));
    }
    if let Some(stack) = &verdict.stack {
        line("stack", Some(String::new()));
        lines.extend(stack.lines().map(|frame| format!("    {frame}")));
    }
    lines.push(format!("advice     {}: {}", verdict.advice.title(), verdict.next));
    let trimmed: Vec<&str> = lines.iter().map(|line| line.trim_end()).collect();
    format!("{}\n", trimmed.join("\n"))
}

#[cfg(test)]
mod tests {
    use edl_core::verdict::{Advice, Cause, Evidence};
    use expect_test::expect;

    use super::*;

    #[test]
    fn a_verdict_is_a_sentence_with_evidence_and_advice() {
        let verdict = Verdict {
            cause: Cause::CodeError,
            advice: Advice::FixCode,
            verdict: "the model's code failed on worker-1: ValueError: x".into(),
            process: Some(edl_core::id::WorkerId(1).into()),
            at_secs: Some(1_763_174_800.25),
            step: 7,
            records: Some("batch 0/7 (records 3, 1)".into()),
            stack: Some("Traceback (most recent call last):\n  File \"m.py\", line 3".into()),
            evidence: vec![Evidence { at_secs: Some(1_763_174_800.25), text: "it failed".into() }],
            next: "fix the model's code, then run `elasticdl train --resume x`".into(),
        };
        expect![[r#"
            verdict    the model's code failed on worker-1: ValueError: x
            process    worker-1
            since      2025-11-15 02:46:40,250
            step       7
            records    batch 0/7 (records 3, 1)
            evidence   2025-11-15 02:46:40,250  it failed
            stack
                Traceback (most recent call last):
                  File "m.py", line 3
            advice     fix the code: fix the model's code, then run `elasticdl train --resume x`
        "#]]
        .assert_eq(&text(&verdict));
    }
}
