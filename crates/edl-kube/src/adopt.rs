// SPDX-License-Identifier: Apache-2.0
//! Objects that a master creates itself if its job was applied from a file, which contains no key. It
//! can create Secrets, but not read them.

use std::time::Duration;

use edl_core::pod::Wait;
use edl_core::spec::JobSpec;
use futures::future::BoxFuture;
use k8s_openapi::api::core::v1::{ConfigMap, Secret, Service};
use kube::api::PostParams;
use kube::{Api, Client};

use crate::calls::wait_of;
use crate::manifest;
use crate::names;

/// The first and longest pause before a rejected call is retried; it doubles each time.
const FIRST_BACKOFF: Duration = Duration::from_secs(1);
const LAST_BACKOFF: Duration = Duration::from_secs(8);

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot {verb} {object}: {why}")]
    Refused { verb: &'static str, object: String, why: Wait },
    #[error("cannot create the job's Service: {0}")]
    Invalid(String),
}

/// Creates the job's Secret with `new_key`, and the Service. Both belong to the job's ConfigMap.
/// Returns whether the key is the job's: otherwise, an earlier master has created one. Rejected calls
/// are retried until they are allowed.
pub fn key_and_service<'a>(
    client: &'a Client,
    namespace: &'a str,
    spec: &'a JobSpec,
    new_key: &'a str,
) -> BoxFuture<'a, Result<bool, Error>> {
    Box::pin(async move {
        let mut backoff = FIRST_BACKOFF;
        loop {
            match once(client, namespace, spec, new_key).await {
                Err(refused @ Error::Refused { .. }) => tracing::warn!("{refused}"),
                done => return done,
            }
            tokio::time::sleep(backoff).await;
            backoff = (backoff * 2).min(LAST_BACKOFF);
        }
    })
}

async fn once(
    client: &Client,
    namespace: &str,
    spec: &JobSpec,
    new_key: &str,
) -> Result<bool, Error> {
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), namespace);
    let name = names::config_map(&spec.job_name);
    let map = maps.get(&name).await.map_err(|error| refused("read", "configmap", &name, &error))?;
    let owners = manifest::owner(&map).map(|owner| vec![owner]);
    let mut secret = manifest::secret(spec, new_key);
    secret.metadata.owner_references.clone_from(&owners);
    let mut service = manifest::service(spec).map_err(|invalid| Error::Invalid(invalid.0))?;
    service.metadata.owner_references = owners;

    let secrets: Api<Secret> = Api::namespaced(client.clone(), namespace);
    let name = names::secret(&spec.job_name);
    let is_new = match secrets.create(&PostParams::default(), &secret).await {
        Ok(_) => true,
        Err(kube::Error::Api(status)) if status.is_already_exists() => false,
        Err(error) => return Err(refused("create", "secret", &name, &error)),
    };
    let services: Api<Service> = Api::namespaced(client.clone(), namespace);
    match services.create(&PostParams::default(), &service).await {
        Ok(_) => {}
        Err(kube::Error::Api(status)) if status.is_already_exists() => {}
        Err(error) => {
            let name = names::service(&spec.job_name);
            return Err(refused("create", "service", &name, &error));
        }
    }
    Ok(is_new)
}

fn refused(verb: &'static str, kind: &str, name: &str, error: &kube::Error) -> Error {
    Error::Refused { verb, object: format!("{kind} `{name}`"), why: wait_of(error) }
}
