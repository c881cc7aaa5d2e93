// SPDX-License-Identifier: Apache-2.0
//! The results of a run, as a table, CSV or a plot.

use std::fmt::Write;
use std::ops::Add;

use edl_core::time::Time;

use crate::resources::Resources;
use crate::sim::bound::most_asked_by_staying;
use crate::sim::metrics::{Row, mean, mean_over, quantile, secs};
use crate::sim::svg;
use crate::snapshot::Job;
use crate::state::Policy;

#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    pub scenario: String,
    pub policy: Policy,
    pub seed: u64,
    pub end: Time,
    pub capacity: Resources,
    /// The jobs as they were submitted.
    pub scripts: Vec<Job>,
    pub jobs: Vec<JobOutcome>,
    pub services: Vec<ServiceOutcome>,
    pub rows: Vec<Row>,
    pub n_plans: u64,
}

#[derive(Clone, Debug, PartialEq)]
pub struct JobOutcome {
    pub name: String,
    pub submitted: Time,
    /// When its first worker ran (the end of waiting in the published experiment).
    pub first_worker: Option<Time>,
    /// When its whole minimum ran.
    pub whole: Option<Time>,
    pub done: Option<Time>,
    pub n_resizes: u32,
    /// How often it lost all workers.
    pub n_stops: u32,
    pub worker_secs: f64,
    /// Worker-seconds of pauses after a change of workers.
    pub paused_worker_secs: f64,
    pub max_workers: u32,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct ServiceOutcome {
    pub name: String,
    /// Pod-seconds below its target.
    pub deficit_pod_secs: f64,
    /// Of these, those in which pods had no node; the rest is their start-up.
    pub deficit_without_node_pod_secs: f64,
    /// Of these, those for which no removal was planned: the planner's responsibility.
    pub deficit_unplanned_pod_secs: f64,
}

impl Report {
    /// Seconds from submission to the first worker. A job without one counts as waiting until the end
    /// (right-censored), as in the published experiment.
    #[must_use]
    pub fn waits(&self) -> Vec<f64> {
        let wait =
            |job: &JobOutcome| secs(job.first_worker.unwrap_or(self.end)) - secs(job.submitted);
        self.submitted().map(wait).collect()
    }

    /// Seconds from submission until the whole minimum ran.
    #[must_use]
    pub fn whole_waits(&self) -> Vec<f64> {
        let wait = |job: &JobOutcome| secs(job.whole.unwrap_or(self.end)) - secs(job.submitted);
        self.submitted().map(wait).collect()
    }

    /// Seconds from submission to the end of each job that ended.
    #[must_use]
    pub fn completion_times(&self) -> Vec<f64> {
        let time = |job: &JobOutcome| Some(secs(job.done?) - secs(job.submitted));
        self.jobs.iter().filter_map(time).collect()
    }

    #[must_use]
    pub fn makespan(&self) -> f64 {
        self.jobs.iter().filter_map(|job| job.done).map(secs).fold(0.0, f64::max)
    }

    /// The share of CPUs (or GPUs, if there are any) that running pods request, in percent.
    #[must_use]
    pub fn utilization(&self, row: &Row) -> f64 {
        self.percent(if self.capacity.gpu > 0 { row.asked.gpu } else { row.asked.cpu_milli })
    }

    /// The mean of the best possible utilization over a window, in percent.
    #[must_use]
    pub fn mean_bound(&self, from: f64, to: f64) -> Option<f64> {
        let bound = |row: &Row| row.bound.map_or(f64::NAN, |bound| self.percent(bound));
        Some(mean_over(&self.rows, from..=to, bound)).filter(|bound| !bound.is_nan())
    }

    /// The same for servers that stay on their nodes, chosen with knowledge of the future, once all
    /// jobs are submitted. None without services, or if jobs end or nodes fail.
    #[must_use]
    pub fn mean_bound_by_staying(&self, from: f64, to: f64) -> Option<f64> {
        let inside = |row: &&Row| (from..=to).contains(&row.secs());
        let (late, early): (Vec<&Row>, Vec<&Row>) =
            self.rows.iter().filter(inside).partition(|row| row.n_not_submitted == 0);
        let n_nodes = late.first()?.free_by_node.len();
        if n_nodes == 0
            || late.iter().any(|row| row.free_by_node.len() != n_nodes || row.n_done > 0)
        {
            return None;
        }
        let of_node = |node: usize| late.iter().map(|row| row.free_by_node[node]).collect();
        let free_by_node: Vec<Vec<Resources>> = (0..n_nodes).map(of_node).collect();
        let jobs: Vec<&Job> = self.scripts.iter().collect();
        let masters: Resources =
            jobs.iter().map(|job| job.roles.master.shape * u64::from(job.roles.master.min)).sum();
        let amount = |of: Resources| if self.capacity.gpu > 0 { of.gpu } else { of.cpu_milli };
        let mut sum = most_asked_by_staying(&free_by_node, &jobs)?;
        for row in &late {
            let free: Resources = row.free_by_node.iter().copied().sum();
            sum += amount(self.capacity.saturating_sub(free)) + amount(masters);
        }
        for row in &early {
            sum += row.bound?;
        }
        Some(self.percent(sum) / (late.len() + early.len()) as f64)
    }

    fn percent(&self, amount: u64) -> f64 {
        let Resources { gpu, cpu_milli, .. } = self.capacity;
        100.0 * amount as f64 / (if gpu > 0 { gpu } else { cpu_milli.max(1) }) as f64
    }

    #[must_use]
    pub fn mean_utilization(&self, from: f64, to: f64) -> f64 {
        mean_over(&self.rows, from..=to, |row| self.utilization(row))
    }

    #[must_use]
    pub fn n_resizes(&self) -> u32 {
        self.jobs.iter().map(|job| job.n_resizes).sum()
    }

    #[must_use]
    pub fn n_stops(&self) -> u32 {
        self.jobs.iter().map(|job| job.n_stops).sum()
    }

    /// The share of worker time in which jobs made progress, in percent.
    #[must_use]
    pub fn productive(&self) -> f64 {
        let all: f64 = self.jobs.iter().map(|job| job.worker_secs).sum();
        let paused: f64 = self.jobs.iter().map(|job| job.paused_worker_secs).sum();
        if all > 0.0 { 100.0 * (all - paused) / all } else { 100.0 }
    }

    #[must_use]
    pub fn resizes_per_job_hour(&self) -> f64 {
        let there = |job: &JobOutcome| secs(job.done.unwrap_or(self.end)) - secs(job.submitted);
        let hours: f64 = self.submitted().map(there).sum::<f64>() / 3600.0;
        if hours > 0.0 { f64::from(self.n_resizes()) / hours } else { 0.0 }
    }

    /// The deficit without the pods' start-up.
    #[must_use]
    pub fn deficit_without_node(&self) -> f64 {
        self.services
            .iter()
            .map(|service| service.deficit_without_node_pod_secs)
            .fold(0.0, Add::add)
    }

    /// The deficit without start-up and the time that workers took to leave.
    #[must_use]
    pub fn deficit_unplanned(&self) -> f64 {
        self.services.iter().map(|service| service.deficit_unplanned_pod_secs).fold(0.0, Add::add)
    }

    /// The results, one per line.
    #[must_use]
    pub fn table(&self) -> String {
        let mut text = String::new();
        let end = secs(self.end);
        let mut line = |name: &str, value: String| {
            writeln!(text, "{name:<34} {value}").expect("a string takes everything");
        };
        line("scenario", format!("{} ({}, seed {})", self.scenario, self.policy, self.seed));
        let waits = self.waits();
        line("jobs submitted / finished", {
            format!("{} / {}", waits.len(), self.completion_times().len())
        });
        line("wait for first worker, s", quantiles(&waits));
        line("wait for all minimum workers, s", quantiles(&self.whole_waits()));
        let never = self.submitted().filter(|job| job.first_worker.is_none()).count();
        line("never started (counted to the end)", never.to_string());
        let times = self.completion_times();
        if !times.is_empty() {
            line("completion time, s", quantiles(&times));
            line("makespan, s", format!("{:.0}", self.makespan()));
        }
        line("requested utilization, %", format!("{:.2}", self.mean_utilization(0.0, end)));
        if let Some(bound) = self.mean_bound(0.0, end) {
            let share = 100.0 * self.mean_utilization(0.0, end) / bound;
            line("packing bound, % (share reached)", format!("{bound:.2} ({share:.1} %)"));
        }
        if let Some(bound) = self.mean_bound_by_staying(0.0, end) {
            let share = 100.0 * self.mean_utilization(0.0, end) / bound;
            line("bound with servers fixed, %", format!("{bound:.2} ({share:.1} %)"));
        }
        line("productive share of it, %", format!("{:.2}", self.productive()));
        let jain = mean_over(&self.rows, 0.9 * end..=end, Row::jain);
        line("Jain index of workers, last 10 %", format!("{jain:.3}"));
        line("resizes (per job-hour)", {
            format!("{} ({:.1})", self.n_resizes(), self.resizes_per_job_hour())
        });
        line("jobs stopped and queued again", self.n_stops().to_string());
        for service in &self.services {
            let name = format!("deficit of {}, pod-s", service.name);
            let (all, free) = (service.deficit_pod_secs, service.deficit_without_node_pod_secs);
            let unplanned = service.deficit_unplanned_pod_secs;
            line(&name, {
                format!("{all:.0}, without a node {free:.0}, no removal planned {unplanned:.0}")
            });
        }
        line("simulated time, s / plans", format!("{end:.0} / {}", self.n_plans));
        text
    }

    /// One line per recorded moment.
    #[must_use]
    pub fn csv(&self) -> String {
        let mut text = String::from(
            "seconds,utilization_percent,workers,servers,jobs_not_submitted,jobs_pending,jobs_done,service_pods,workers_by_job\n",
        );
        for row in &self.rows {
            let each: Vec<String> = row.workers.iter().map(u32::to_string).collect();
            writeln!(
                text,
                "{:.0},{:.2},{},{},{},{},{},{},{}",
                row.secs(),
                self.utilization(row),
                row.n_workers(),
                row.n_ps,
                row.n_not_submitted,
                row.n_pending,
                row.n_done,
                row.n_service,
                each.join("|"),
            )
            .expect("a string takes everything");
        }
        text
    }

    /// A plot of workers by job, utilization and waiting jobs over time.
    #[must_use]
    pub fn svg(&self) -> String {
        svg::draw(self)
    }

    fn submitted(&self) -> impl Iterator<Item = &JobOutcome> {
        self.jobs.iter().filter(|job| job.submitted <= self.end)
    }
}

fn quantiles(values: &[f64]) -> String {
    format!(
        "mean {:.1}, p50 {:.1}, p90 {:.1}, p99 {:.1}, max {:.1}",
        mean(values),
        quantile(values, 0.5),
        quantile(values, 0.9),
        quantile(values, 0.99),
        quantile(values, 1.0),
    )
}
