// SPDX-License-Identifier: Apache-2.0
//! The connection of a process in a pod to its cluster.

use futures::future::BoxFuture;
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, Client};

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot find the API server from inside the cluster")]
    NoServer(#[source] Box<kube::Error>),
    #[error("cannot read pod `{name}`")]
    Read { name: String, source: Box<kube::Error> },
    #[error("pod `{0}` has no uid")]
    NoUid(String),
}

/// Connects to the API server as the pod's service account.
pub fn connect() -> BoxFuture<'static, Result<Client, Error>> {
    Box::pin(async move {
        Client::try_default().await.map_err(|error| Error::NoServer(Box::new(error)))
    })
}

/// The uid of a pod, which distinguishes it from earlier pods of the same name.
pub fn uid<'a>(
    client: &'a Client,
    namespace: &'a str,
    name: &'a str,
) -> BoxFuture<'a, Result<String, Error>> {
    Box::pin(async move {
        let api: Api<Pod> = Api::namespaced(client.clone(), namespace);
        let failed = |source| Error::Read { name: name.into(), source: Box::new(source) };
        let pod = api.get(name).await.map_err(failed)?;
        pod.metadata.uid.ok_or_else(|| Error::NoUid(name.into()))
    })
}
