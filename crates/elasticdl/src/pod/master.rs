// SPDX-License-Identifier: Apache-2.0
//! A job's master in a pod: the master and the platform under it, side by side.

use std::time::Duration;

use edl_core::job::OWN_LOOP_GRACE;
use edl_core::spec::JobSpec;
use edl_kube::board::Board;
use edl_kube::note::StatusNote;
use edl_kube::platform::{self, End};
use edl_kube::{inside, manifest};
use edl_master::Platform;
use edl_net::proto;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::Pod;
use crate::exit::{Exit, refuse};
use crate::jobs::{self, Job};
use crate::own_loop;
use crate::processes::{self, exit_of_master};
use crate::submit::checks;

/// A master of before, on a node that was lost, may hold the store until it is ended.
const STORE_PATIENCE: Duration = Duration::from_secs(60);
/// What the platform gets after the job's end for those who do not leave by themselves.
const FAREWELL: Duration = Duration::from_secs(40);
/// An operator that plans by a job's progress needs it no more often.
const TELL_EVERY: Duration = Duration::from_secs(3);
/// Kubernetes shows what is written there with a container that has ended; longer is cut off.
const LAST_WORDS: &str = "/dev/termination-log";
const MAX_LAST_WORDS: usize = 4096;
/// Of a sentence among the last words, each of whose bytes may be written as several.
const MAX_REASON: usize = 1000;

/// The job's folder as this master finds it.
struct Opened {
    job: Job,
    spec: JobSpec,
    /// A loop of the user's own that nobody has asked yet what it goes through.
    is_unasked: bool,
    /// The job in it had ended.
    was_over: bool,
}

/// Runs the master to its end.
pub(super) fn run(pod: &Pod) -> anyhow::Result<Exit> {
    let opened = Opened::of(pod)?;
    let job = opened.job.clone();
    let runtime = processes::runtime(2)?;
    let exit = runtime.block_on(async {
        let asked = CancellationToken::new();
        let _signals = processes::cancel_on_signal(&asked)?;
        tokio::select! {
            exit = Box::pin(serve(pod, opened)) => exit,
            // Whoever comes next finds all that counts on disk.
            () = asked.cancelled() => Ok(Exit::Interrupted),
        }
    })?;
    if exit == Exit::Ok || exit == Exit::Failed || exit == Exit::Stopped {
        leave_last_words(&job);
    }
    runtime.shutdown_background();
    Ok(exit)
}

/// The master and the platform under it, side by side.
async fn serve(pod: &Pod, opened: Opened) -> anyhow::Result<Exit> {
    let Opened { job, spec, is_unasked, was_over } = opened;
    let spec = if is_unasked { asked(&job, spec).await? } else { Ok(spec) };
    let spec = match spec {
        Ok(spec) => spec,
        Err(why) => return Ok(refused(&why)),
    };
    let client = inside::connect().await?;
    let config = edl_master::Config {
        job_dir: job.paths().clone(),
        listen: format!("0.0.0.0:{}", pod.args.master_port),
        http_listen: format!("0.0.0.0:{}", pod.args.http_port),
        key: pod.key_or_new(&client).await?,
        spec,
        resume: was_over,
        ip: Some(pod.ip),
        store_patience: STORE_PATIENCE,
    };
    let board = Board::new(client.clone(), &pod.namespace, &pod.spec.job_name);
    let board = if board.is_used().await { Some(board) } else { None };
    let env = manifest::populated(&pod.spec, std::env::vars());
    let platform_config = platform::Config {
        spec: pod.spec.clone(),
        namespace: pod.namespace.clone(),
        master_uid: pod.uid(&client).await.ok(),
        env: env.map_err(|invalid| refuse(invalid.0))?,
        board: board.clone(),
    };
    let (port, Platform { orders, reports }) = edl_master::port();
    // Held to the end: a master whose platform is gone stops its job, and the platform also ends
    // when another master takes over, which finds the job running.
    let _open_port = reports.clone();
    let mut platform = JoinSet::new();
    platform.spawn(platform::run(client, platform_config, orders, reports));
    let mut telling = JoinSet::new();
    if let Some(board) = board.clone() {
        telling.spawn(tell(board, job.clone()));
    }
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
    telling.abort_all();
    if let (Some(board), Some(note)) = (&board, note(&job)) {
        board.tell(&note).await;
    }
    // Those who were told of the end leave by themselves, most of them at once; what follows a
    // loop of the user's own takes as long as it takes.
    let has_more = pod.spec.is_own_loop() && exit == Exit::Ok;
    let farewell = if has_more { OWN_LOOP_GRACE + FAREWELL } else { FAREWELL };
    let _ = tokio::time::timeout(farewell, platform.join_next()).await;
    Ok(exit)
}

/// Tells an operator how far the job is, whenever that has changed.
async fn tell(board: Board, job: Job) {
    let mut told = None;
    loop {
        let new = note(&job);
        if let Some(new) = new.filter(|new| told.as_ref() != Some(new)) {
            board.tell(&new).await;
            told = Some(new);
        }
        tokio::time::sleep(TELL_EVERY).await;
    }
}

/// What an operator wants to know of the job.
fn note(job: &Job) -> Option<String> {
    let status = job.status()?;
    let working = |it: &&proto::Instance| it.role == "worker" && it.state != "waiting";
    let workers = status.instances.iter().filter(working).count();
    let note = StatusNote {
        records_done: status.records_done,
        records_total: Some(status.records_total),
        records_per_second: Some(status.records_per_second.round()),
        workers: u32::try_from(workers).unwrap_or(u32::MAX),
        eta_secs: Some(status.eta_secs.round()),
        step: status.step,
        state: status.state,
    };
    serde_json::to_string(&note).ok()
}

/// A loop of the user's own says itself what it goes through: the first master asks it, up to its
/// first step, and leaves the answer in the job's folder. A loop that cannot be trained has failed
/// its job, with a reason.
async fn asked(job: &Job, mut spec: JobSpec) -> anyhow::Result<Result<JobSpec, String>> {
    tracing::info!("running `{}` up to its first step to find its model", spec.job_command);
    let job = job.clone();
    let asked = tokio::task::spawn_blocking(move || {
        let told = own_loop::describe(&spec)?;
        told.settle(&mut spec);
        checks::check(&spec, Some(&told.model))?;
        told.keep(job.dir())?;
        job.rewrite_spec(&spec)?;
        anyhow::Ok(spec)
    });
    Ok(asked.await?.map_err(|error| format!("{error:#}")))
}

/// Ends a job that cannot be trained; the next master would find the same.
fn refused(why: &str) -> Exit {
    tracing::error!("{why}");
    let reason = last_of(why);
    say_last(&proto::JobStatus { state: "failed".into(), reason, ..proto::JobStatus::default() });
    Exit::Failed
}

/// What fits of a sentence whose end says most, as that of a traceback does.
fn last_of(why: &str) -> String {
    let n_over = why.chars().count().saturating_sub(MAX_REASON);
    let cut = if n_over > 0 { "… " } else { "" };
    format!("{cut}{}", why.chars().skip(n_over).collect::<String>())
}

impl Opened {
    /// Makes the job's folder what the ConfigMap says.
    fn of(pod: &Pod) -> anyhow::Result<Self> {
        let mut spec = pod.spec.clone();
        let plan = own_loop::plan(&pod.job_dir).filter(|_| spec.is_own_loop());
        let is_unasked = spec.is_own_loop() && plan.is_none();
        if let Some(plan) = plan {
            plan.settle(&mut spec);
        }
        let job = Job::in_folder(&pod.job_dir, &spec)?;
        let was_over = job.status().is_some_and(|status| jobs::is_final(&status.state));
        Ok(Self { job, spec, is_unasked, was_over })
    }
}

/// Leaves the job's last status with the container.
fn leave_last_words(job: &Job) {
    let Some(mut status) = job.status() else { return };
    status.instances.clear();
    status.events.clear();
    status.evaluations.drain(..status.evaluations.len().saturating_sub(1));
    say_last(&status);
}

fn say_last(status: &proto::JobStatus) {
    let said = serde_json::to_vec(status).unwrap_or_default();
    if said.len() <= MAX_LAST_WORDS {
        // Without it the exit code still tells how the job ended.
        let _ = std::fs::write(LAST_WORDS, said);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_a_long_reason_the_end_is_kept() {
        assert_eq!(last_of("short"), "short");
        let long = format!("{}ImportError: no torch", "trace ".repeat(500));
        let kept = last_of(&long);
        assert!(kept.starts_with("… ") && kept.ends_with("ImportError: no torch"));
        assert_eq!(kept.chars().count(), MAX_REASON + 2);
    }
}
