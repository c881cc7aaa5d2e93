// SPDX-License-Identifier: Apache-2.0
//! A job's master in a pod, with the platform that starts its other pods.

use std::cell::Cell;
use std::time::Duration;

use edl_core::job::CUSTOM_LOOP_GRACE;
use edl_core::job::JobState;
use edl_core::job_dir::JobDir;
use edl_core::platform::{InstanceState, Role};
use edl_core::spec::JobSpec;
use edl_kube::board::Board;
use edl_kube::leaving::Leaving;
use edl_kube::note::StatusNote;
use edl_kube::platform::{self, End};
use edl_kube::{inside, manifest, names};
use edl_master::Platform;
use edl_net::proto;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::controller::{Controller, Start, is_retried};
use super::{Pod, uid};
use crate::custom_loop;
use crate::exit::{Exit, of_error, refuse};
use crate::host;
use crate::jobs::Job;
use crate::processes::{self, exit_of_master};
use crate::submit::checks;

/// An earlier master, on a lost node, may hold the store until it is killed.
const STORE_TIMEOUT: Duration = Duration::from_secs(60);
/// Time for the platform to stop processes that do not exit by themselves after the job's end.
const EXIT_GRACE: Duration = Duration::from_secs(40);
/// What a master that a user has deleted needs of its pod's grace period to exit.
const LEAVE_MARGIN: Duration = Duration::from_secs(2);
/// Interval between progress reports to the operator.
const REPORT_INTERVAL: Duration = Duration::from_secs(3);
/// Kubernetes shows this file with a container that has ended, up to its limit.
const TERMINATION_LOG: &str = "/dev/termination-log";
const MAX_MESSAGE: usize = 4096;
/// Limit for a reason in the message; a byte may take several in JSON.
const MAX_REASON: usize = 1000;

/// The job's folder.
struct Opened {
    job: Job,
    spec: JobSpec,
    /// Whether the custom training loop has not been described yet.
    is_undescribed: bool,
    /// How the job had ended, if it had.
    end: Option<JobState>,
    start: Start,
}

/// What a master that is asked to exit does. If a user has deleted its pod, perhaps with all others,
/// the job may have to be saved first; its platform finds out.
#[derive(Default)]
struct Departure {
    asked: CancellationToken,
    /// Set once it is known that a user has deleted the pod.
    leaving: Leaving,
    /// Whether there is a job to save.
    is_serving: Cell<bool>,
}

impl Departure {
    /// Waits until a master that was asked to exit must do so.
    async fn overdue(&self, pod: &Pod, controller: &Controller) {
        if let Some(grace) = self.grace_to_save(controller.deletion(pod)).await {
            let within = grace.saturating_sub(LEAVE_MARGIN);
            controller.leave(within);
            tokio::time::sleep(within).await;
        }
    }

    /// Waits until the master is asked to exit, or its pod is deleted; returns the pod's grace period
    /// if the job may have to be saved. `deletion` asks the API server, which may not respond: the
    /// platform's watch may have shown the deletion already.
    async fn grace_to_save(
        &self,
        deletion: impl Future<Output = Option<Duration>>,
    ) -> Option<Duration> {
        tokio::select! {
            grace = self.leaving.begun() => Some(grace),
            () = self.asked.cancelled() => {
                if !self.is_serving.get() {
                    return None;
                }
                if let Some(grace) = deletion.await {
                    self.leaving.begin(grace);
                }
                if self.leaving.has_begun() { Some(self.leaving.begun().await) } else { None }
            }
        }
    }
}

/// Runs the master to its end.
pub(super) fn run(pod: &Pod) -> anyhow::Result<Exit> {
    crate::stacks::log_panics();
    let controller = Controller::of_environment(&JobDir::new(&pod.job_dir));
    let runtime = processes::runtime(2)?;
    let exit = runtime.block_on(async {
        let departure = Departure::default();
        let _signals = processes::cancel_on_signal(&departure.asked)?;
        let exit = tokio::select! {
            exit = Box::pin(start(pod, &controller, &departure)) => exit,
            // The next master finds its state on disk.
            () = departure.overdue(pod, &controller) => Ok(Exit::Interrupted),
        };
        let how = exit.as_ref().map_or_else(of_error, |exit| *exit);
        let is_end = how.job_end().is_some();
        if departure.leaving.has_begun() || !is_end && controller.deletion(pod).await.is_some() {
            // If the training job has ended, the next master tells its Job.
            controller.left();
        } else if is_end {
            controller.close(pod, how).await;
        }
        exit
    });
    runtime.shutdown_background();
    exit
}

/// Runs the job, unless it had ended and this master was started only because the last one could not
/// end its Kubernetes Job.
async fn start(pod: &Pod, controller: &Controller, departure: &Departure) -> anyhow::Result<Exit> {
    controller.wait_for_last().await;
    let opened = Opened::of(pod, controller)?;
    let job = opened.job.clone();
    let exit = match opened.end {
        Some(end)
            if opened.start != Start::Request && !is_retried(end, pod.spec.restart_policy) =>
        {
            Exit::of_state(end)
        }
        Some(_) | None => serve(pod, opened, departure).await?,
    };
    if exit.job_end().is_some() {
        write_termination_message(&job);
    }
    Ok(exit)
}

/// Runs the master and the platform concurrently.
async fn serve(pod: &Pod, opened: Opened, departure: &Departure) -> anyhow::Result<Exit> {
    let Opened { job, spec, is_undescribed, end, start } = opened;
    let spec = if is_undescribed { described(&job, spec).await? } else { Ok(spec) };
    let spec = match spec {
        Ok(spec) => spec,
        Err(why) => return Ok(refused(&why)),
    };
    let client = inside::connect().await?;
    let config = edl_master::Config {
        job_dir: job.paths().clone(),
        listen: format!("0.0.0.0:{}", pod.args.master_port),
        http_listen: format!("0.0.0.0:{}", pod.args.http_port),
        http_hosts: names::hosts(&names::service(&pod.spec.job_name), &pod.namespace),
        key: pod.key_or_new(&client).await?,
        spec,
        resume: end.is_some(),
        ip: Some(pod.ip),
        store_patience: STORE_TIMEOUT,
        build: host::get().build(),
    };
    let board = Board::new(client.clone(), &pod.namespace, &pod.spec.job_name);
    let board = if board.is_used().await { Some(board) } else { None };
    let env = manifest::populated(&pod.spec, std::env::vars());
    let platform_config = platform::Config {
        spec: pod.spec.clone(),
        namespace: pod.namespace.clone(),
        master_uid: uid().ok(),
        env: env.map_err(|invalid| refuse(invalid.0))?,
        board: board.clone(),
        was_deleted: start == Start::Deletion,
        leaving: departure.leaving.clone(),
    };
    let (port, Platform { orders, reports }) = edl_master::port();
    // Held to the end: a master stops its job when its platform is gone, but the platform also ends
    // when another master takes over the running job.
    let _open_port = reports.clone();
    let mut platform = JoinSet::new();
    platform.spawn(platform::run(client, platform_config, orders, reports));
    let mut reporter = JoinSet::new();
    if let Some(board) = board.clone() {
        reporter.spawn(report_progress(board, job.clone(), departure.leaving.clone()));
    }
    departure.is_serving.set(true);
    let never = CancellationToken::new();
    let ended = tokio::select! {
        ended = edl_master::run(config, port, never) => ended,
        end = platform.join_next() => {
            let why = match end {
                Some(Ok(End::Superseded)) => "this master's pod was deleted or replaced; exiting",
                Some(Ok(End::Done) | Err(_)) | None => "the platform task exited",
            };
            tracing::warn!("{why}");
            return Ok(Exit::Relaunch);
        }
    };
    let exit = exit_of_master(ended);
    let is_leaving = departure.leaving.has_begun();
    if !is_reported(exit, is_leaving) {
        return Ok(exit);
    }
    reporter.abort_all();
    if let (Some(board), Some(note)) = (&board, note(&job)) {
        board.report(&note).await;
    }
    if is_leaving {
        // All pods are being deleted already.
        return Ok(exit);
    }
    // Processes that know of the end exit by themselves, most of them at once. A custom training
    // loop may do more work after its last step.
    let has_more = pod.spec.is_custom_loop() && exit == Exit::Ok;
    let grace = if has_more { CUSTOM_LOOP_GRACE + EXIT_GRACE } else { EXIT_GRACE };
    let _ = tokio::time::timeout(grace, platform.join_next()).await;
    Ok(exit)
}

/// Whether the operator learns how the master exits. A stop because its pods are being deleted is not
/// the end of the operator's job; any other end is, and the next master does not report it.
fn is_reported(exit: Exit, is_leaving: bool) -> bool {
    !is_leaving || exit != Exit::Stopped
}

/// Reports the job's progress to the operator whenever it has changed, until the master leaves.
async fn report_progress(board: Board, job: Job, leaving: Leaving) {
    let mut last = None;
    loop {
        let new = note(&job);
        if leaving.has_begun() {
            return;
        }
        if let Some(new) = new.filter(|new| last.as_ref() != Some(new)) {
            board.report(&new).await;
            last = Some(new);
        }
        tokio::time::sleep(REPORT_INTERVAL).await;
    }
}

/// The progress of the job, for the operator.
fn note(job: &Job) -> Option<StatusNote> {
    let status = job.status()?;
    let working =
        |it: &&proto::Instance| it.role() == Role::Worker && it.state() != InstanceState::Waiting;
    let workers = status.instances.iter().filter(working).count();
    Some(StatusNote {
        records_done: status.records_done,
        records_total: Some(status.records_total),
        records_per_second: Some(status.records_per_second.round()),
        workers: u32::try_from(workers).unwrap_or(u32::MAX),
        eta_secs: Some(status.eta_secs.round()),
        step: status.step,
        state: status.state(),
    })
}

/// Runs a custom training loop up to its first step and saves its description in the job's folder.
/// A loop that cannot be trained fails its job, with a reason.
async fn described(job: &Job, mut spec: JobSpec) -> anyhow::Result<Result<JobSpec, String>> {
    tracing::info!("running `{}` up to its first step to find its model", spec.job_command);
    let job = job.clone();
    let described = tokio::task::spawn_blocking(move || {
        // Its process ends here: workers run in pods of their own.
        let (description, _) = custom_loop::describe(&spec, None, None, tempfile::tempdir()?)?;
        description.settle(&mut spec);
        let indexes = job.paths().indexes();
        checks::check(&spec, Some(&description.model), Some(&indexes))?.save_indexes(&indexes);
        description.save(job.dir())?;
        job.rewrite_spec(&spec)?;
        anyhow::Ok(spec)
    });
    Ok(described.await?.map_err(|error| format!("{error:#}")))
}

/// Fails a job that cannot be trained, because the next master would fail, too.
fn refused(why: &str) -> Exit {
    tracing::error!("{why}");
    let reason = last_of(why);
    write_message(&proto::JobStatus {
        state: JobState::Failed.into(),
        reason,
        ..proto::JobStatus::default()
    });
    Exit::Failed
}

/// The end of a text that is too long; the end of a traceback matters most.
fn last_of(why: &str) -> String {
    let n_over = why.chars().count().saturating_sub(MAX_REASON);
    let prefix = if n_over > 0 { "… " } else { "" };
    format!("{prefix}{}", why.chars().skip(n_over).collect::<String>())
}

impl Opened {
    /// Updates the job's folder from the ConfigMap.
    fn of(pod: &Pod, controller: &Controller) -> anyhow::Result<Self> {
        let mut spec = pod.spec.clone();
        let plan = custom_loop::plan(&pod.job_dir).filter(|_| spec.is_custom_loop());
        let is_undescribed = spec.is_custom_loop() && plan.is_none();
        if let Some(plan) = plan {
            plan.settle(&mut spec);
        }
        let job = Job::in_folder(&pod.job_dir, &spec)?;
        let end = job.status().map(|status| status.state()).filter(|state| state.is_final());
        let start = controller.begin()?;
        Ok(Self { job, spec, is_undescribed, end, start })
    }
}

/// Writes the job's last status to the container's termination message.
fn write_termination_message(job: &Job) {
    let Some(mut status) = job.status() else { return };
    status.instances.clear();
    status.events.clear();
    status.evaluations.drain(..status.evaluations.len().saturating_sub(1));
    write_message(&status);
}

fn write_message(status: &proto::JobStatus) {
    let message = serde_json::to_vec(status).unwrap_or_default();
    if message.len() <= MAX_MESSAGE {
        // Without it, the exit code still shows how the job ended.
        let _ = std::fs::write(TERMINATION_LOG, message);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRACE: Option<Duration> = Some(Duration::from_secs(120));

    /// The grace period that a master which is asked to exit may use, and whether it is leaving. The
    /// watch shows the deletion of its pod while the API server is asked.
    async fn asked(
        is_serving: bool,
        listed: Option<Duration>,
        watched: Option<Duration>,
    ) -> (Option<Duration>, bool) {
        let departure = Departure::default();
        departure.is_serving.set(is_serving);
        departure.asked.cancel();
        let deletion = async {
            watched.into_iter().for_each(|grace| departure.leaving.begin(grace));
            listed
        };
        (departure.grace_to_save(deletion).await, departure.leaving.has_begun())
    }

    #[tokio::test]
    async fn a_master_that_is_asked_to_exit_stays_if_its_pod_was_deleted() {
        assert_eq!(asked(true, GRACE, None).await, (GRACE, true));
        assert_eq!(asked(true, None, None).await, (None, false), "it was evicted, for example");
        assert_eq!(asked(false, GRACE, None).await, (None, false), "there is nothing to save");
    }

    #[tokio::test]
    async fn a_deletion_that_was_watched_counts_if_the_api_server_does_not_respond() {
        assert_eq!(asked(true, None, GRACE).await, (GRACE, true));
    }

    #[test]
    fn the_operator_learns_of_every_end_but_a_stop_because_of_the_deletion() {
        for exit in [Exit::Ok, Exit::Failed, Exit::Stopped] {
            assert!(is_reported(exit, false));
            assert_eq!(is_reported(exit, true), exit != Exit::Stopped);
        }
    }

    #[test]
    fn the_end_of_a_long_reason_is_kept() {
        assert_eq!(last_of("short"), "short");
        let long = format!("{}ImportError: no torch", "trace ".repeat(500));
        let kept = last_of(&long);
        assert!(kept.starts_with("… ") && kept.ends_with("ImportError: no torch"));
        assert_eq!(kept.chars().count(), MAX_REASON + 2);
    }
}
