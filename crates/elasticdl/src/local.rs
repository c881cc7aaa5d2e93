// SPDX-License-Identifier: Apache-2.0
//! `--distribution_strategy=Local`: the whole job in this one process, for debuggers and small
//! machines.
//!
//! There is no master process and no child: the master's machine and one worker run as tasks
//! beside each other and speak as they always do, so that the job folder, the checkpoints and the
//! bits are those of a job with one worker.

use std::time::Duration;

use anyhow::Context as _;
use edl_core::id::WorkerId;
use edl_core::platform::{Ended, InstanceId, Order, Report, Role};
use tokio::io::BufReader;
use tokio::signal::unix::{SignalKind, signal};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::exit::Exit;
use crate::jobs::{Hold, Job};
use crate::processes;
use crate::supervisor::link::Link;
use crate::ui::Ui;

/// The one worker's log; the master's lines are there, too.
const WORKER: InstanceId = InstanceId { role: Role::Worker, id: 0 };
const TICK: Duration = Duration::from_millis(100);
/// Orders and reports are short lines.
const LINE: usize = 64 * 1024;
/// After Ctrl-C everything is gone within two seconds.
const STOP_LIMIT: Duration = Duration::from_millis(1600);

/// Runs the job to its end, and says how it ended. `hold` is the claim on the job.
pub(crate) async fn run(job: &Job, hold: Hold, resume: bool, ui: &mut Ui) -> anyhow::Result<Exit> {
    let _held_to_the_end = hold;
    job.write_supervisor()?;
    let spec = job.spec()?;
    crate::telemetry::start_in(spec.log_level, &job.log_path(WORKER))?;
    let (ours, theirs) = tokio::io::duplex(LINE);
    let (our_out, our_in) = tokio::io::split(ours);
    let (reports, orders) = tokio::io::split(theirs);
    let mut link = Link::new(our_in, our_out);
    link.report(Report::Running(Vec::new()));
    let shutdown = CancellationToken::new();
    let config = processes::master_config(job, spec.port, resume)?;
    let mut master = JoinSet::new();
    let stop = shutdown.clone();
    let reports = Box::new(BufReader::new(reports));
    master.spawn(edl_master::run(config, Box::new(orders), reports, stop));
    let mut workers = Workers { job, tasks: JoinSet::new(), stops: Vec::new() };
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot listen for signals")?;
    let mut terminate = signal(SignalKind::terminate()).context("cannot listen for signals")?;
    let mut tick = tokio::time::interval(TICK);
    let mut stopping = None;
    loop {
        tokio::select! {
            ended = master.join_next() => {
                let exit = match ended {
                    Some(Ok(ended)) => processes::exit_of_master(ended),
                    Some(Err(_)) | None => Exit::Failed,
                };
                workers.stop();
                ui.tick();
                return Ok(if stopping.is_some() { Exit::Interrupted } else { exit });
            }
            Some(order) = link.order() => {
                if let Some(report) = workers.obey(&order) {
                    link.report(report);
                }
            }
            Some(ended) = workers.tasks.join_next() => {
                let (instance, how) = ended.unwrap_or((WORKER, Ended::Exit(101)));
                link.report(Report::Ended { instance, pid: std::process::id(), how });
            }
            _ = interrupt.recv() => interrupted(&mut stopping, &shutdown, ui),
            _ = terminate.recv() => interrupted(&mut stopping, &shutdown, ui),
            _ = tick.tick() => {
                ui.tick();
                if stopping.is_some_and(|since: std::time::Instant| since.elapsed() > STOP_LIMIT) {
                    return Ok(Exit::Interrupted);
                }
            }
        }
    }
}

fn interrupted(
    stopping: &mut Option<std::time::Instant>,
    shutdown: &CancellationToken,
    ui: &mut Ui,
) {
    if stopping.is_some() {
        std::process::exit(Exit::Interrupted.code().into());
    }
    ui.say("stopping… press Ctrl-C again to force quit");
    *stopping = Some(std::time::Instant::now());
    shutdown.cancel();
}

/// The worker of this process, and those that came before it.
struct Workers<'a> {
    job: &'a Job,
    tasks: JoinSet<(InstanceId, Ended)>,
    stops: Vec<(InstanceId, CancellationToken)>,
}

impl Workers<'_> {
    /// Does what the master orders; what there is to tell at once is the answer.
    fn obey(&mut self, order: &Order) -> Option<Report> {
        match *order {
            Order::Launch { instance, .. } => Some(match self.launch(instance) {
                Ok(()) => Report::Started { instance, pid: std::process::id() },
                Err(error) => Report::NotStarted { instance, error: format!("{error:#}") },
            }),
            // It would harm the only process there is.
            Order::Harm { .. } => None,
            Order::Stop { instance, .. } | Order::Dismiss { instance, .. } => {
                let stops = self.stops.iter().filter(|(stopped, _)| *stopped == instance);
                stops.for_each(|(_, stop)| stop.cancel());
                None
            }
        }
    }

    fn launch(&mut self, instance: InstanceId) -> anyhow::Result<()> {
        anyhow::ensure!(instance.role == Role::Worker, "only workers can run in this process");
        let master = self.job.master().context("the master's address is unknown")?;
        let config = processes::worker_config(
            WorkerId(instance.id),
            master.address,
            self.job.key()?,
            self.job.dir().to_owned(),
        );
        let stop = CancellationToken::new();
        self.stops.push((instance, stop.clone()));
        self.tasks.spawn(async move {
            let ended = edl_worker::run(config, processes::open_model(), stop).await;
            if let Err(error) = &ended {
                tracing::error!("{:#}", anyhow::anyhow!("{error}"));
            }
            (instance, Ended::Exit(i32::from(ended.is_err())))
        });
        Ok(())
    }

    fn stop(&self) {
        self.stops.iter().for_each(|(_, stop)| stop.cancel());
    }
}
