// SPDX-License-Identifier: Apache-2.0
//! A plan for people: every job with what it has and gets, and why one is not at its maximum.

use std::fmt::Write as _;

use edl_sched::plan::Plan;
use edl_sched::resources::Resources;
use edl_sched::snapshot::{Job, Node, NodeState, Snapshot};

use crate::observe::{JobView, Observed, Stage};

const HEAD: [&str; 5] = ["JOB", "WORKERS", "MIN", "MAX", "WHY"];

/// All jobs: workers now and planned, limits, and why.
#[must_use]
pub fn table(observed: &Observed, plan: &Plan) -> String {
    let mut rows = vec![HEAD.map(str::to_owned)];
    for view in observed.jobs.values() {
        let (min, max) = view.limits().map_or((String::new(), String::new()), |(min, max)| {
            (min.to_string(), max.to_string())
        });
        rows.push([view.title(), workers(view, plan), min, max, why(view, observed, plan)]);
    }
    if rows.len() == 1 {
        return "there are no TrainingJobs\n".into();
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

/// `2 → 4`, or `2` if it stays so.
fn workers(view: &JobView, plan: &Plan) -> String {
    match planned(view, plan) {
        planned if planned == view.told => planned.to_string(),
        planned => format!("{} → {planned}", view.told),
    }
}

fn planned(view: &JobView, plan: &Plan) -> u32 {
    match view.stage {
        Stage::Live => plan.change_of(view.id).map_or(view.told, |change| change.target.worker),
        Stage::Deleted | Stage::Succeeded | Stage::Failed(..) => 0,
    }
}

fn why(view: &JobView, observed: &Observed, plan: &Plan) -> String {
    match &view.stage {
        Stage::Succeeded => return "it has succeeded".into(),
        Stage::Failed(_, why) => return why.clone(),
        Stage::Deleted => return "it is being deleted".into(),
        Stage::Live => {}
    }
    let mut told = Vec::new();
    if let Some(trouble) = &view.trouble {
        told.push(trouble.message.clone());
    }
    if let Some(change) = plan.change_of(view.id) {
        told.push(observed.names.reasons(&change.reasons));
    }
    if let Some(waiting) = plan.waiting.get(&view.id) {
        told.push(observed.names.waiting(*waiting));
    }
    told.join("; ")
}

/// Why a job (`name` or `namespace/name`) has what it has, and not more. None if there is none of
/// that name.
#[must_use]
pub fn job(observed: &Observed, plan: &Plan, name: &str) -> Option<String> {
    let mut found = observed.jobs.values();
    let view = found.find(|view| view.title() == name || view.object.name() == name)?;
    let mut text = format!("job `{}`", view.title());
    if let Some((min, max)) = view.limits() {
        let _infallible = write!(text, ": {min} to {max} workers");
    }
    let (told, runs, planned) = (view.told, view.running.worker, planned(view, plan));
    let _infallible = writeln!(text, "\n  it has {told} workers, of which {runs} run");
    let why = why(view, observed, plan);
    if planned != told {
        let _infallible = writeln!(text, "  it gets {planned}: {why}");
    } else if !why.is_empty() {
        let _infallible = writeln!(text, "  {why}");
    }
    let after = edl_sched::applied(&observed.snapshot, plan);
    let seat = after.jobs.iter().find(|job| job.id == view.id);
    if let (Some(job), Some((_, max))) = (seat, view.limits())
        && planned > 0
    {
        let more = not_more(&after, job, planned, max, plan, observed);
        let _infallible = writeln!(text, "  {more}");
    }
    Some(text)
}

/// Why it does not get one worker more.
fn not_more(
    after: &Snapshot,
    job: &Job,
    planned: u32,
    max: u32,
    plan: &Plan,
    observed: &Observed,
) -> String {
    if planned >= max {
        return "it is at its maximum".into();
    }
    let shape = job.roles.worker.shape;
    let options = &plan.state.options;
    let taken = taken(after);
    let stays = |node: &&Node| node.state != NodeState::Leaving;
    let total: Resources = after.nodes.iter().filter(stays).map(|node| node.capacity).sum();
    let asked: Resources = taken.iter().copied().sum();
    if let Some(kind) = (asked + shape).lacks(total.permille(options.max_load_permille)) {
        let percent = f64::from(options.max_load_permille) / 10.0;
        return format!(
            "not more: the cluster's {kind} is filled to the {percent} % that it may be"
        );
    }
    let queue = after.queues.iter().find(|queue| queue.id == job.queue);
    if let Some(quota) = queue.and_then(|queue| queue.quota) {
        let of_queue = after.jobs.iter().filter(|other| other.queue == job.queue);
        let used: Resources = of_queue.map(|other| other.resources(other.counts())).sum();
        let borrow = queue.and_then(|queue| queue.borrow);
        if let Some(borrow) = borrow
            && let Some(kind) = (used + shape).lacks(quota + borrow)
        {
            let name = observed.names.queues.get(&job.queue).cloned().unwrap_or_default();
            return format!("not more: queue `{name}` has used the {kind} that it may");
        }
    }
    let fits = after.nodes.iter().zip(&taken).any(|(node, taken)| {
        let free = node.capacity.saturating_sub(*taken);
        node.state == NodeState::Ready && job.may_use(node) && shape.fits_in(free)
    });
    if !fits {
        return format!("not more: no node has room for a worker ({shape})");
    }
    let secs = options.freeze.as_secs();
    format!(
        "not more yet: a job grows in steps, and is left alone for {secs} s after it was resized"
    )
}

/// What is taken on each node, by jobs and by others.
fn taken(snapshot: &Snapshot) -> Vec<Resources> {
    let of_jobs = |node: &Node| -> Resources {
        let placed = |job: &Job| -> Resources {
            let here = job.placed.iter().filter(|placed| placed.node == node.id);
            here.map(|placed| job.roles.of(placed.role).shape * u64::from(placed.n)).sum()
        };
        snapshot.jobs.iter().map(placed).sum()
    };
    snapshot.nodes.iter().map(|node| node.taken + of_jobs(node)).collect()
}

#[cfg(test)]
mod tests {
    use expect_test::expect;
    use serde_json::json;

    use super::*;
    use crate::fixture::{World, job as training_job, node};

    fn world() -> World {
        let jobs = [
            training_job("a", &json!({"min_workers": 1, "max_workers": 6})),
            training_job("bad", &json!({"queue": "nowhere"})),
            training_job("big", &json!({"num_workers": 9})),
        ];
        let mut world = World::new(&[node("n1", "4500m", "32Gi")], &jobs);
        world.round();
        world.settle();
        world
    }

    #[test]
    fn a_plan_is_a_table_of_jobs() {
        let mut world = world();
        world.seen.jobs.push(training_job("new", &json!({"max_workers": 2})).into());
        let (observed, plan, _) = world.plan();
        expect![[r#"
            JOB          WORKERS  MIN  MAX  WHY
            default/a    4 → 3    1    6    it makes room for job `default/new` to start
            default/bad  0                  there is no queue `nowhere`; choose another, or add it to `elasticdl-queues`
            default/big  0        9    9    there is not enough CPU for its minimum
            default/new  0 → 1    1    2    its minimum fits
        "#]].assert_eq(&table(&observed, &plan));
        let (observed, plan, _) = World::new(&[], &[]).plan();
        assert_eq!(table(&observed, &plan), "there are no TrainingJobs\n");
    }

    #[test]
    fn a_job_is_told_why_it_does_not_get_more() {
        let mut world = world();
        let (observed, plan, _) = world.plan();
        let told = ["a", "default/bad", "big"].map(|name| job(&observed, &plan, name).unwrap());
        expect![[r#"
            job `default/a`: 1 to 6 workers
              it has 4 workers, of which 4 run
              not more: the cluster's CPU is filled to the 97 % that it may be
            job `default/bad`
              it has 0 workers, of which 0 run
              there is no queue `nowhere`; choose another, or add it to `elasticdl-queues`
            job `default/big`: 9 to 9 workers
              it has 0 workers, of which 0 run
              there is not enough CPU for its minimum
        "#]]
        .assert_eq(&told.join(""));
        assert_eq!(job(&observed, &plan, "other"), None);
    }
}
