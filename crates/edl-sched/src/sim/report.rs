// SPDX-License-Identifier: Apache-2.0
//! What happened in a run: a table for people, CSV for programs, a picture.

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
    /// When its first worker ran (what the published experiment calls the end of waiting).
    pub first_worker: Option<Time>,
    /// When its whole minimum ran.
    pub whole: Option<Time>,
    pub done: Option<Time>,
    pub n_resizes: u32,
    /// How often it was stopped altogether.
    pub n_stops: u32,
    pub worker_secs: f64,
    /// Worker-seconds in which it stood still because its workers had changed.
    pub paused_worker_secs: f64,
    pub max_workers: u32,
}

#[derive(Clone, Debug, PartialEq)]
pub struct ServiceOutcome {
    pub name: String,
    /// Pod-seconds below its target.
    pub deficit_pod_secs: f64,
    /// Those in which pods had no node: what is left is their start-up.
    pub deficit_without_room_pod_secs: f64,
    /// Those in which nobody was leaving for them either: what the planner answers for.
    pub deficit_unplanned_pod_secs: f64,
}

impl Report {
    /// Seconds from submission to the first worker. A job that never had one counts as waiting
    /// until the end (right-censored), as in the published experiment.
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

    /// The share of CPUs (of GPUs, where there are any) that running pods ask for, in percent.
    #[must_use]
    pub fn utilisation(&self, row: &Row) -> f64 {
        self.percent(if self.capacity.gpu > 0 { row.asked.gpu } else { row.asked.cpu_milli })
    }

    /// The mean of the most that any planner could have reached over a window, in percent.
    #[must_use]
    pub fn mean_bound(&self, from: f64, to: f64) -> Option<f64> {
        let bound = |row: &Row| row.bound.map_or(f64::NAN, |bound| self.percent(bound));
        Some(mean_over(&self.rows, from..=to, bound)).filter(|bound| !bound.is_nan())
    }

    /// The same for servers that stay where they start, whoever chose their places knowing
    /// beforehand how services would come and go: from the moment on when every job is there.
    /// None without services, or where jobs end or nodes fail.
    #[must_use]
    pub fn mean_bound_by_staying(&self, from: f64, to: f64) -> Option<f64> {
        let inside = |row: &&Row| (from..=to).contains(&row.secs());
        let (late, early): (Vec<&Row>, Vec<&Row>) =
            self.rows.iter().filter(inside).partition(|row| row.n_not_submitted == 0);
        let n_nodes = late.first()?.rooms.len();
        if n_nodes == 0 || late.iter().any(|row| row.rooms.len() != n_nodes || row.n_done > 0) {
            return None;
        }
        let of_node = |node: usize| late.iter().map(|row| row.rooms[node]).collect();
        let rooms: Vec<Vec<Resources>> = (0..n_nodes).map(of_node).collect();
        let jobs: Vec<&Job> = self.scripts.iter().collect();
        let masters: Resources =
            jobs.iter().map(|job| job.roles.master.shape * u64::from(job.roles.master.min)).sum();
        let amount = |of: Resources| if self.capacity.gpu > 0 { of.gpu } else { of.cpu_milli };
        let mut sum = most_asked_by_staying(&rooms, &jobs)?;
        for row in &late {
            let room: Resources = row.rooms.iter().copied().sum();
            sum += amount(self.capacity.saturating_sub(room)) + amount(masters);
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
    pub fn mean_utilisation(&self, from: f64, to: f64) -> f64 {
        mean_over(&self.rows, from..=to, |row| self.utilisation(row))
    }

    #[must_use]
    pub fn n_resizes(&self) -> u32 {
        self.jobs.iter().map(|job| job.n_resizes).sum()
    }

    #[must_use]
    pub fn n_stops(&self) -> u32 {
        self.jobs.iter().map(|job| job.n_stops).sum()
    }

    /// The share of worker time in which jobs got on, in percent.
    #[must_use]
    pub fn productive(&self) -> f64 {
        let all: f64 = self.jobs.iter().map(|job| job.worker_secs).sum();
        let paused: f64 = self.jobs.iter().map(|job| job.paused_worker_secs).sum();
        if all > 0.0 { 100.0 * (all - paused) / all } else { 100.0 }
    }

    /// Resizes for each hour in which a job was there.
    #[must_use]
    pub fn resizes_per_job_hour(&self) -> f64 {
        let there = |job: &JobOutcome| secs(job.done.unwrap_or(self.end)) - secs(job.submitted);
        let hours: f64 = self.submitted().map(there).sum::<f64>() / 3600.0;
        if hours > 0.0 { f64::from(self.n_resizes()) / hours } else { 0.0 }
    }

    #[must_use]
    pub fn deficit(&self) -> f64 {
        self.services.iter().map(|service| service.deficit_pod_secs).fold(0.0, Add::add)
    }

    /// What is left of the deficit when the pods' start-up is left out.
    #[must_use]
    pub fn deficit_without_room(&self) -> f64 {
        self.services
            .iter()
            .map(|service| service.deficit_without_room_pod_secs)
            .fold(0.0, Add::add)
    }

    /// What is left of that when the time is left out which workers took to leave.
    #[must_use]
    pub fn deficit_unplanned(&self) -> f64 {
        self.services.iter().map(|service| service.deficit_unplanned_pod_secs).fold(0.0, Add::add)
    }

    /// The numbers of the run, one to a line.
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
        line("requested utilisation, %", format!("{:.2}", self.mean_utilisation(0.0, end)));
        if let Some(bound) = self.mean_bound(0.0, end) {
            let share = 100.0 * self.mean_utilisation(0.0, end) / bound;
            line("packing bound, % (share reached)", format!("{bound:.2} ({share:.1} %)"));
        }
        if let Some(bound) = self.mean_bound_by_staying(0.0, end) {
            let share = 100.0 * self.mean_utilisation(0.0, end) / bound;
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
            let (all, room) = (service.deficit_pod_secs, service.deficit_without_room_pod_secs);
            let unplanned = service.deficit_unplanned_pod_secs;
            line(&name, {
                format!("{all:.0}, without a node {room:.0}, no removal planned {unplanned:.0}")
            });
        }
        line("simulated time, s / plans", format!("{end:.0} / {}", self.n_plans));
        text
    }

    /// One line for each moment that was written down.
    #[must_use]
    pub fn csv(&self) -> String {
        let mut text = String::from(
            "seconds,utilisation_percent,workers,servers,jobs_not_submitted,jobs_pending,jobs_done,service_pods,workers_by_job\n",
        );
        for row in &self.rows {
            let each: Vec<String> = row.workers.iter().map(u32::to_string).collect();
            writeln!(
                text,
                "{:.0},{:.2},{},{},{},{},{},{},{}",
                row.secs(),
                self.utilisation(row),
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

    /// Workers by job, utilisation and waiting over time, as a picture.
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
