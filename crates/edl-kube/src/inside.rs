// SPDX-License-Identifier: Apache-2.0
//! The connection of a master in a pod to its cluster.

use futures::future::BoxFuture;
use kube::Client;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot find the API server from inside the cluster")]
    NoServer(#[source] Box<kube::Error>),
}

/// Connects to the API server as the pod's service account.
pub fn connect() -> BoxFuture<'static, Result<Client, Error>> {
    Box::pin(async move {
        Client::try_default().await.map_err(|error| Error::NoServer(Box::new(error)))
    })
}
