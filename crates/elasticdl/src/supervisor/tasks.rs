// SPDX-License-Identifier: Apache-2.0
//! `--distribution_strategy=Local`: master and worker as tasks of one process, for debuggers and
//! small machines.
//!
//! They exchange the same messages as processes do, so the job folder, the checkpoints and the
//! results are those of a job with one worker.

use anyhow::Context as _;
use edl_core::id::WorkerId;
use edl_core::platform::{Ended, InstanceId, Role};
use edl_net::place::Place;
use rustix::process::Signal;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::link::Link;
use crate::exit::Exit;
use crate::jobs::Job;
use crate::processes::{self, Membership};

/// Stops or kills a task.
#[derive(Clone, Debug, Default)]
pub(super) struct Task {
    stop: CancellationToken,
    kill: CancellationToken,
}

impl Task {
    /// Does what the signal would do to a process, if that ends it.
    pub(super) fn signal(&self, signal: Signal) {
        if signal == Signal::TERM {
            self.stop.cancel();
        } else if signal == Signal::KILL {
            self.kill.cancel();
        }
    }

    /// Runs `body` until it ends, panics or is killed.
    pub(super) async fn run(self, body: impl Future<Output = Ended> + Send + 'static) -> Ended {
        let mut task = JoinSet::new();
        task.spawn(body);
        tokio::select! {
            ended = task.join_next() => ended.and_then(Result::ok).unwrap_or(Exit::Panicked.into()),
            () = self.kill.cancelled() => Ended::Signal(9),
        }
    }

    /// A master, and the link to it.
    pub(super) fn master(
        &self,
        job: &Job,
        port: u16,
        resume: bool,
    ) -> anyhow::Result<(Link, impl Future<Output = Ended> + Send + use<>)> {
        let config = processes::master_config(job, port, resume)?;
        let (port, platform) = edl_master::port();
        let ended = edl_master::run(config, port, self.stop.clone());
        let body = async { Ended::Exit(processes::exit_of_master(ended.await).code().into()) };
        Ok((Link::new(platform), body))
    }

    pub(super) fn worker(
        &self,
        job: &Job,
        instance: InstanceId,
    ) -> anyhow::Result<impl Future<Output = Ended> + Send + use<>> {
        anyhow::ensure!(instance.role == Role::Worker, "only workers can run in this process");
        let master = job.master().context("the master's address is unknown")?;
        let membership = Membership {
            master_addr: master.address,
            key: job.key()?,
            job_dir: job.dir().to_owned(),
            place: Place::default(),
        };
        let (worker, stop) = (WorkerId(instance.id), self.stop.clone());
        Ok(async move {
            let open = processes::open_model(&membership.job_dir);
            let ended = membership.worker(worker, open, stop).await;
            if let Err(error) = &ended {
                tracing::error!("{error}");
            }
            Ended::Exit(i32::from(ended.is_err()))
        })
    }
}
