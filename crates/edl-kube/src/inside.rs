// SPDX-License-Identifier: Apache-2.0
//! What a process in a pod asks its cluster about itself.

use futures::future::BoxFuture;
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, Client};

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot find the API server from inside the cluster")]
    NoServer(#[source] Box<kube::Error>),
    #[error("cannot read pod `{name}`")]
    Look { name: String, source: Box<kube::Error> },
    #[error("pod `{0}` has no uid")]
    NoUid(String),
}

/// The API server, as a pod's service account may ask it.
pub fn connect() -> BoxFuture<'static, Result<Client, Error>> {
    Box::pin(async move {
        Client::try_default().await.map_err(|error| Error::NoServer(Box::new(error)))
    })
}

/// What tells a pod from one of the same name before it.
pub fn uid<'a>(
    client: &'a Client,
    namespace: &'a str,
    name: &'a str,
) -> BoxFuture<'a, Result<String, Error>> {
    Box::pin(async move {
        let api: Api<Pod> = Api::namespaced(client.clone(), namespace);
        let look = |source| Error::Look { name: name.into(), source: Box::new(source) };
        let pod = api.get(name).await.map_err(look)?;
        pod.metadata.uid.ok_or_else(|| Error::NoUid(name.into()))
    })
}
