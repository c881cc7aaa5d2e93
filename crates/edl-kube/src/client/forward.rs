// SPDX-License-Identifier: Apache-2.0
//! A local port that forwards to a job's master.
//!
//! Other users of this machine cannot use it, because the handshake needs the job's key.

use std::net::SocketAddr;

use edl_core::platform::Role;
use futures::future::BoxFuture;
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::api::ListParams;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use super::{Cluster, Error, newest_master};
use crate::names;

/// Forwards until it is dropped.
pub struct Forward {
    address: SocketAddr,
    _task: JoinSet<()>,
}

impl Forward {
    /// The local address.
    #[must_use]
    pub fn address(&self) -> String {
        self.address.to_string()
    }
}

impl Cluster {
    /// Opens a port that forwards to the master of `job`.
    pub fn forward<'a>(&'a self, job: &'a str) -> BoxFuture<'a, Result<Forward, Error>> {
        Box::pin(async move {
            let masters = ListParams::default().labels(&names::role_selector(job, Role::Master));
            let masters = self.pods().list(&masters).await;
            let masters = masters.map_err(|error| self.refused("list", "pods", "", error))?.items;
            let pod = newest_master(&masters).and_then(|pod| pod.metadata.name.clone());
            let pod = pod.unwrap_or_else(|| names::master(job));
            let failed =
                |source: std::io::Error| Error::Forward { pod: pod.clone(), source: source.into() };
            let listener = TcpListener::bind(("127.0.0.1", 0)).await.map_err(failed)?;
            let address = listener.local_addr().map_err(failed)?;
            let pods = self.pods();
            let mut task = JoinSet::new();
            task.spawn(async move {
                let mut connections = JoinSet::new();
                while let Ok((stream, _)) = listener.accept().await {
                    connections.spawn(connect(pods.clone(), pod.clone(), stream));
                }
            });
            Ok(Forward { address, _task: task })
        })
    }
}

/// Forwards one connection to the pod, or closes it if that fails.
async fn connect(pods: Api<Pod>, pod: String, mut stream: TcpStream) {
    let mut forwarder = match pods.portforward(&pod, &[names::MASTER_PORT]).await {
        Ok(forwarder) => forwarder,
        Err(error) => {
            tracing::debug!(%error, "cannot forward a port");
            return;
        }
    };
    if let Some(mut theirs) = forwarder.take_stream(names::MASTER_PORT) {
        let _either_side_ends_it = tokio::io::copy_bidirectional(&mut stream, &mut theirs).await;
    }
    forwarder.abort();
}
