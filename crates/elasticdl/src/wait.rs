// SPDX-License-Identifier: Apache-2.0
//! `wait`: waits until a job ends, for scripts. It shows nothing meanwhile.

use std::io::Write;
use std::time::Duration;

use edl_core::job::JobState;

use crate::cli::jobs::WaitArgs;
use crate::cluster::{self, Target};
use crate::console::{put_result, span};
use crate::exit::{Exit, Refusal};
use crate::jobs::Job;
use crate::ui::{Ui, Watched};

const POLL: Duration = Duration::from_millis(100);

/// Runs the command. The exit code is that of a command that had run the job itself.
pub(crate) fn run(args: &WaitArgs, out: &mut dyn Write) -> anyhow::Result<Exit> {
    let target = cluster::find(&args.job)?;
    let handle = target.handle();
    let limit = args.timeout.map(Duration::from_secs);
    let ended = target.block_on(async {
        let end = end(&target);
        match limit {
            None => end.await.map(Ended::Job),
            Some(limit) => match tokio::time::timeout(limit, end).await {
                Ok(state) => state.map(Ended::Job),
                Err(_) => Ok(Ended::Time(limit)),
            },
        }
    })?;
    match ended {
        Ended::Job(None) => Ok(Exit::Interrupted),
        Ended::Job(Some(state)) => {
            put_result(out, format_args!("job {handle} {state}\n"))?;
            Ok(Exit::of_state(state))
        }
        Ended::Time(limit) => {
            let text = format!(
                "job `{handle}` is still running after {}; see `elasticdl status {handle}`",
                span(limit.as_secs_f64())
            );
            Err(Refusal { exit: Exit::TimedOut, text }.into())
        }
    }
}

/// What ended the wait.
enum Ended {
    /// The job's state; none if the user has interrupted the command.
    Job(Option<JobState>),
    Time(Duration),
}

async fn end(target: &Target) -> anyhow::Result<Option<JobState>> {
    match target {
        Target::Local(job) => Ok(Some(end_of_local(job).await)),
        Target::Cluster(job) => {
            let mut ui = Ui::silent(target);
            let watched = cluster::watch(job, &mut ui).await?;
            let state = ui.finish().map_or(JobState::Interrupted, |status| status.state());
            Ok((watched == Watched::JobEnded).then_some(state))
        }
    }
}

async fn end_of_local(job: &Job) -> JobState {
    while job.is_running() {
        tokio::time::sleep(POLL).await;
    }
    job.state()
}
