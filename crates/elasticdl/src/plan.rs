// SPDX-License-Identifier: Apache-2.0
//! `plan`: what the operator would do now, and why a job is below its maximum.

use std::io::Write;

use edl_operator::run;

use crate::cli::operator::{PlanArgs, PlannerFlags};
use crate::exit::{Exit, not_found};
use crate::operator::{connect, options};

/// Shows the plan of all jobs, or explains one.
pub(crate) fn plan(args: &PlanArgs, out: &mut dyn Write) -> anyhow::Result<Exit> {
    let job = args.explain.as_deref();
    let flags = &args.cluster;
    match text(&flags.namespace, &flags.planner, job)? {
        Some(text) => {
            out.write_all(text.as_bytes())?;
            Ok(Exit::Ok)
        }
        None => Err(not_found(format!(
            "TrainingJob `{}` not found; list them with `kubectl get tj -A`",
            job.unwrap_or_default()
        ))),
    }
}

/// The plan of all jobs, or the explanation of one; none if there is no such job.
pub(crate) fn text(
    namespace: &str,
    flags: &PlannerFlags,
    job: Option<&str>,
) -> anyhow::Result<Option<String>> {
    let options = options(flags)?;
    let runtime = crate::runtime()?;
    runtime.block_on(async {
        let client = connect(flags.kubeconfig.as_deref()).await?;
        let text = run::explain(&client, namespace, options, job);
        anyhow::Ok(Box::pin(text).await?)
    })
}
