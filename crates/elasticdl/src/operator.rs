// SPDX-License-Identifier: Apache-2.0
//! `operator`: runs the operator of a cluster, or prints its manifests.

use std::io::Write;
use std::path::Path;

use anyhow::Context as _;
use edl_core::error::chain;
use edl_kube::Client;
use edl_net::key::JobKey;
use edl_operator::{manifests, run};
use edl_sched::state::{Options, Policy};
use tokio::net::TcpListener;

use crate::cli::operator::{OperatorArgs, OperatorCommand, PlannerFlags};
use crate::exit::{Exit, refuse};
use crate::{processes, telemetry};

/// Runs the command.
pub(crate) fn run(args: &OperatorArgs, out: &mut dyn Write) -> anyhow::Result<Exit> {
    match &args.command {
        Some(OperatorCommand::Crd) => out.write_all(manifests::definition().as_bytes())?,
        Some(OperatorCommand::Manifests { namespace, image }) => {
            let files = manifests::files(namespace, image);
            let texts: Vec<String> = files.into_iter().map(|file| file.text).collect();
            out.write_all(texts.join("---\n").as_bytes())?;
        }
        None => return operate(args),
    }
    Ok(Exit::Ok)
}

fn operate(args: &OperatorArgs) -> anyhow::Result<Exit> {
    let options = options(&args.cluster.planner)?;
    telemetry::start(args.log_level);
    let config = run::Config {
        namespace: args.cluster.namespace.clone(),
        options,
        masters_outside: args.masters_outside,
        new_key,
        identity: identity(),
        http_hosts: args.http_hosts.0.clone(),
    };
    let (kubeconfig, port) = (args.cluster.planner.kubeconfig.clone(), args.http_port);
    processes::run(false, async move |shutdown| {
        let client = connect(kubeconfig.as_deref()).await?;
        let listener = TcpListener::bind(("0.0.0.0", port)).await;
        let listener = listener.with_context(|| format!("cannot listen on port {port}"))?;
        let address = listener.local_addr().context("a listener has an address")?;
        tracing::info!(%address, policy = %config.options.policy, "operator started");
        run::run(client, config, listener, shutdown).await;
        Ok(())
    })
}

/// The cluster that the flags name.
pub(crate) async fn connect(kubeconfig: Option<&Path>) -> anyhow::Result<Client> {
    let connected = run::connect(kubeconfig).await;
    connected.map_err(|error| refuse(format!("{error}; set the kubeconfig with --kubeconfig")))
}

/// The options of the planner.
pub(crate) fn options(flags: &PlannerFlags) -> anyhow::Result<Options> {
    let policy = flags.policy.parse::<Policy>().map_err(|error| {
        let known: Vec<&str> = Policy::ALL.into_iter().map(Policy::name).collect();
        refuse(format!("--policy: {error}; choose from {}", known.join(", ")))
    })?;
    let load = flags.max_load_desired;
    if !(load > 0.0 && load <= 1.0) {
        return Err(refuse(format!("--max_load_desired={load} must be above 0 and at most 1")));
    }
    #[expect(clippy::cast_possible_truncation, reason = "at most a thousand")]
    #[expect(clippy::cast_sign_loss, reason = "checked above")]
    let max_load_permille = (load * 1000.0).round() as u32;
    Ok(Options { policy, max_load_permille, ..Options::default() })
}

/// The key of a new job.
fn new_key() -> Result<String, String> {
    match JobKey::generate() {
        Ok(key) => Ok(key.to_text()),
        Err(error) => Err(chain(&error)),
    }
}

/// The name of the pod, or else of the machine and the process.
fn identity() -> String {
    if let Ok(pod) = std::env::var("POD_NAME") {
        return pod;
    }
    let host = std::fs::read_to_string("/etc/hostname").unwrap_or_default();
    format!("{}-{}", host.trim(), std::process::id())
}

#[cfg(test)]
mod tests {
    use edl_core::spec::{HttpHosts, LogLevel};

    use super::*;
    use crate::cli::operator::OperatorFlags;

    fn flags(max_load_desired: f64, policy: &str) -> PlannerFlags {
        PlannerFlags { kubeconfig: None, max_load_desired, policy: policy.into() }
    }

    #[test]
    fn flags_set_the_policy_and_the_load_limit() {
        let options = options(&flags(0.97, "edl")).unwrap();
        assert_eq!((options.policy, options.max_load_permille), (Policy::Edl, 970));
    }

    #[test]
    fn an_invalid_policy_or_load_limit_is_refused() {
        for (load, policy, why) in [
            (0.0, "edl", "--max_load_desired=0 must be above 0"),
            (1.5, "edl", "at most 1"),
            (f64::NAN, "edl", "--max_load_desired"),
            (0.9, "best", "unknown policy `best`; choose from off, fifo"),
        ] {
            let error = options(&flags(load, policy)).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
    }

    #[test]
    fn the_manifests_that_install_the_operator_are_printed() {
        let command = OperatorCommand::Manifests { namespace: "x".into(), image: "i".into() };
        let args = OperatorArgs {
            command: Some(command),
            cluster: OperatorFlags { namespace: "elasticdl".into(), planner: flags(0.97, "edl") },
            log_level: LogLevel::Info,
            http_port: 0,
            http_hosts: HttpHosts::default(),
            masters_outside: false,
        };
        let mut out = Vec::new();
        run(&args, &mut out).unwrap();
        let text = String::from_utf8(out).expect("text");
        assert!(text.contains("kind: CustomResourceDefinition") && text.contains("image: i"));
    }
}
