// SPDX-License-Identifier: Apache-2.0
//! A plan as text: every job with its current and planned size, and why it is not larger.

use std::fmt::Write as _;

use edl_sched::plan::AllocationPlan;

use crate::capacity::Capacity;
use crate::observe::{JobStage, JobView, Observed};

const HEAD: [&str; 5] = ["JOB", "WORKERS", "MIN", "MAX", "WHY"];

/// All jobs: workers now and planned, limits, and why.
#[must_use]
pub fn table(observed: &Observed, plan: &AllocationPlan) -> String {
    let mut rows = vec![HEAD.map(str::to_owned)];
    for view in observed.jobs.values() {
        let (min, max) = view.limits().map_or((String::new(), String::new()), |(min, max)| {
            (min.to_string(), max.to_string())
        });
        rows.push([view.title(), workers(view, plan), min, max, why(view, observed, plan)]);
    }
    if rows.len() == 1 {
        return "no TrainingJobs found\n".into();
    }
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max();
    let widths = [0, 1, 2, 3].map(|column| width(column).unwrap_or(0));
    let mut text = String::new();
    for row in &rows {
        for (column, width) in widths.into_iter().enumerate() {
            let _infallible = write!(text, "{:width$}  ", row[column]);
        }
        let _infallible = writeln!(text, "{}", row[4]);
    }
    text
}

/// `2 → 4`, or `2` if it does not change.
fn workers(view: &JobView, plan: &AllocationPlan) -> String {
    match planned(view, plan) {
        planned if planned == view.grant.workers => planned.to_string(),
        planned => format!("{} → {planned}", view.grant.workers),
    }
}

/// Workers once the plan is carried out.
pub(crate) fn planned(view: &JobView, plan: &AllocationPlan) -> u32 {
    match view.stage {
        JobStage::Live => {
            plan.change_of(view.id).map_or(view.grant.workers, |change| change.target.worker)
        }
        JobStage::Deleted | JobStage::Succeeded | JobStage::Failed(..) => 0,
    }
}

/// Why a job changes, waits or has ended.
pub(crate) fn why(view: &JobView, observed: &Observed, plan: &AllocationPlan) -> String {
    match &view.stage {
        JobStage::Succeeded => return "succeeded".into(),
        JobStage::Failed(_, why) => return why.clone(),
        JobStage::Deleted => return "being deleted".into(),
        JobStage::Live => {}
    }
    let mut reasons = Vec::new();
    if let Some(trouble) = &view.trouble {
        reasons.push(trouble.message.clone());
    }
    if let Some(change) = plan.change_of(view.id) {
        reasons.push(observed.names.reasons(&change.reasons));
    }
    if let Some(waiting) = plan.waiting.get(&view.id) {
        reasons.push(observed.names.waiting(*waiting));
    }
    reasons.join("; ")
}

/// Why a job (`name` or `namespace/name`) has its size, and not more. None if there is no such job.
#[must_use]
pub fn job(observed: &Observed, plan: &AllocationPlan, name: &str) -> Option<String> {
    let mut found = observed.jobs.values();
    let view = found.find(|view| view.title() == name || view.object.name() == name)?;
    let mut text = format!("job `{}`", view.title());
    if let Some((min, max)) = view.limits() {
        let _infallible = write!(text, ": {min} to {max} workers");
    }
    let (assigned, running) = (view.grant.workers, view.running.worker);
    let planned = planned(view, plan);
    let _infallible = writeln!(text, "\n  workers: {assigned} assigned, {running} running");
    let why = why(view, observed, plan);
    if planned != assigned {
        let _infallible = writeln!(text, "  scaling to {planned}: {why}");
    } else if !why.is_empty() {
        let _infallible = writeln!(text, "  {why}");
    }
    if let Some(more) = Capacity::new(observed, plan).not_more(view, planned) {
        let _infallible = writeln!(text, "  {more}");
    }
    Some(text)
}

#[cfg(test)]
mod tests {
    use expect_test::expect;
    use serde_json::json;

    use super::*;
    use crate::tests::fake_cluster::{FakeCluster, job as training_job, node};

    fn cluster() -> FakeCluster {
        let jobs = [
            training_job("a", &json!({"min_workers": 1, "max_workers": 6})),
            training_job("bad", &json!({"queue": "nowhere"})),
            training_job("big", &json!({"num_workers": 9})),
        ];
        let mut cluster = FakeCluster::new(&[node("n1", "4500m", "32Gi")], &jobs);
        cluster.pass();
        cluster.settle();
        cluster
    }

    #[test]
    fn a_plan_is_a_table_of_jobs() {
        let mut cluster = cluster();
        cluster.objects.jobs.push(training_job("new", &json!({"max_workers": 2})).into());
        let (observed, plan, _) = cluster.plan();
        expect![[r#"
            JOB          WORKERS  MIN  MAX  WHY
            default/a    4 → 3    1    6    freeing capacity for job `default/new` to start
            default/bad  0                  queue `nowhere` not found; choose another, or add it to `elasticdl-queues`
            default/big  0        9    9    not enough CPU for its minimum
            default/new  0 → 1    1    2    enough free capacity for its minimum
        "#]].assert_eq(&table(&observed, &plan));
        let (observed, plan, _) = FakeCluster::new(&[], &[]).plan();
        assert_eq!(table(&observed, &plan), "no TrainingJobs found\n");
    }

    #[test]
    fn a_job_at_its_size_has_a_reason() {
        let mut cluster = cluster();
        let (observed, plan, _) = cluster.plan();
        let texts = ["a", "default/bad", "big"].map(|name| job(&observed, &plan, name).unwrap());
        expect![[r#"
            job `default/a`: 1 to 6 workers
              workers: 4 assigned, 4 running
              not scaling up: cluster CPU is at the 97 % load limit
            job `default/bad`
              workers: 0 assigned, 0 running
              queue `nowhere` not found; choose another, or add it to `elasticdl-queues`
            job `default/big`: 9 to 9 workers
              workers: 0 assigned, 0 running
              not enough CPU for its minimum
        "#]]
        .assert_eq(&texts.join(""));
        assert_eq!(job(&observed, &plan, "other"), None);
    }
}
