// SPDX-License-Identifier: Apache-2.0
//! TLS of the control plane, made from the job's key alone.
//!
//! Both sides derive the same authority and the same leaf certificate, so no file is exchanged
//! and none is kept. The server demands a certificate of the job's authority too: who lacks the
//! key, or holds another job's, fails in the handshake and reaches no service.

use std::pin::Pin;
use std::sync::Once;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, SerialNumber,
};
use tokio::net::{TcpListener, TcpStream};
use tonic::transport::server::TcpIncoming;
use tonic::transport::{
    Certificate, Channel, ClientTlsConfig, Endpoint, Identity, Server, ServerTlsConfig, Uri,
};
use tower::service_fn;

use crate::isolation::Gate;
use crate::key::JobKey;

/// The name in the certificate. Addresses come and go; who answers is proven by the key.
const SERVER_NAME: &str = "job.elasticdl";
/// How often an idle connection is tried.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(3);
/// How long the answer may take before the connection counts as broken.
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(5);
/// A peer that does not finish its handshake is let go.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot create the job's certificates")]
    Certificate(#[source] rcgen::Error),
    #[error("invalid address `{address}`")]
    Address { address: String, source: tonic::transport::Error },
    #[error("cannot set up TLS")]
    Setup(#[source] tonic::transport::Error),
    #[error("cannot connect to the master at `{address}`")]
    Connect { address: String, source: tonic::transport::Error },
    #[error("the master at `{address}` did not respond within {timeout:?}")]
    Deadline { address: String, timeout: Duration },
}

impl Error {
    /// Whether the two sides do not trust each other, as opposed to not reaching each other.
    #[must_use]
    pub fn is_untrusted(&self) -> bool {
        let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(self);
        while let Some(error) = cause {
            if let Some(error) = error.downcast_ref::<std::io::Error>() {
                return error.kind() == std::io::ErrorKind::InvalidData;
            }
            cause = error.source();
        }
        false
    }
}

/// What both sides present and trust, as PEM.
struct Credentials {
    authority: String,
    certificate: String,
    key: String,
}

/// What a server of this job presents and demands.
pub fn server_config(key: &JobKey) -> Result<ServerTlsConfig, Error> {
    choose_provider();
    let credentials = credentials(key).map_err(Error::Certificate)?;
    Ok(ServerTlsConfig::new()
        .identity(Identity::from_pem(&credentials.certificate, &credentials.key))
        .client_ca_root(Certificate::from_pem(&credentials.authority))
        .timeout(HANDSHAKE_TIMEOUT))
}

/// A gRPC server with the job's TLS that notices silent peers.
pub fn server(key: &JobKey) -> Result<Server, Error> {
    let server = Server::builder().tls_config(server_config(key)?).map_err(Error::Setup)?;
    Ok(server
        .http2_keepalive_interval(Some(KEEPALIVE_INTERVAL))
        .http2_keepalive_timeout(Some(KEEPALIVE_TIMEOUT)))
}

/// The connections that come to `listener`. The server's own setting is not used for connections
/// that it did not accept itself, and without this one a message waits for the answer to the one
/// before it: tens of milliseconds.
#[must_use]
pub fn incoming(listener: TcpListener) -> TcpIncoming {
    TcpIncoming::from(listener).with_nodelay(Some(true))
}

/// What a client of this job presents and trusts.
pub fn client_config(key: &JobKey) -> Result<ClientTlsConfig, Error> {
    choose_provider();
    let credentials = credentials(key).map_err(Error::Certificate)?;
    Ok(ClientTlsConfig::new()
        .domain_name(SERVER_NAME)
        .ca_certificate(Certificate::from_pem(&credentials.authority))
        .identity(Identity::from_pem(&credentials.certificate, &credentials.key)))
}

/// Connects to the job's server at `address` (`host:port`).
///
/// The future is boxed so that the HTTP/2 client is compiled in this crate, once, and not in every
/// crate that connects.
pub fn connect<'a>(
    address: &'a str,
    key: &'a JobKey,
    timeout: Duration,
) -> Pin<Box<dyn Future<Output = Result<Channel, Error>> + Send + 'a>> {
    Box::pin(async move {
        let endpoint = Endpoint::from_shared(format!("https://{address}"))
            .map_err(|source| Error::Address { address: address.into(), source })?
            .tls_config(client_config(key)?)
            .map_err(Error::Setup)?
            .connect_timeout(timeout)
            .http2_keep_alive_interval(KEEPALIVE_INTERVAL)
            .keep_alive_timeout(KEEPALIVE_TIMEOUT)
            .keep_alive_while_idle(true);
        // The connect timeout ends with TCP; this one holds for the TLS handshake too.
        let connecting = endpoint.connect_with_connector(service_fn(dial));
        match tokio::time::timeout(timeout, connecting).await {
            Ok(Ok(channel)) => Ok(channel),
            Ok(Err(source)) => Err(Error::Connect { address: address.into(), source }),
            Err(_) => Err(Error::Deadline { address: address.into(), timeout }),
        }
    })
}

/// A connection that stops while the process is isolated.
async fn dial(uri: Uri) -> std::io::Result<TokioIo<Gate<TcpStream>>> {
    let address = uri.authority().map_or("", |authority| authority.as_str());
    let stream = TcpStream::connect(address).await?;
    // A message must not wait for the answer to the one before it.
    stream.set_nodelay(true)?;
    Ok(TokioIo::new(Gate::new(stream)))
}

/// Names ring as the process's provider: with two compiled in, rustls refuses to choose.
pub(crate) fn choose_provider() {
    static CHOSEN: Once = Once::new();
    CHOSEN.call_once(|| {
        // An error means that the program has chosen already, which is as good.
        let _ = rustls::crypto::ring::default_provider().install_default();
    });
}

fn credentials(key: &JobKey) -> Result<Credentials, rcgen::Error> {
    let (authority_key, authority) = authority(key)?;
    let leaf_key = ed25519(&key.derive("tls leaf"))?;
    let mut leaf = CertificateParams::new(vec![SERVER_NAME.to_owned()])?;
    leaf.serial_number = Some(SerialNumber::from(2_u64));
    leaf.distinguished_name.push(DnType::CommonName, "elasticdl member");
    leaf.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    // Every member is a client of some and may be a server to others.
    leaf.extended_key_usages =
        vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    let authority_pem = authority.self_signed(&authority_key)?.pem();
    let issuer = Issuer::new(authority, authority_key);
    let certificate = leaf.signed_by(&leaf_key, &issuer)?.pem();
    Ok(Credentials { authority: authority_pem, certificate, key: leaf_key.serialize_pem() })
}

fn authority(key: &JobKey) -> Result<(KeyPair, CertificateParams), rcgen::Error> {
    let authority_key = ed25519(&key.derive("tls authority"))?;
    // The dates are rcgen's fixed ones, 1975 to 4096: a job has no use for an expiry.
    let mut authority = CertificateParams::new(Vec::new())?;
    authority.serial_number = Some(SerialNumber::from(1_u64));
    authority.distinguished_name.push(DnType::CommonName, "elasticdl job");
    authority.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    authority.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
    Ok((authority_key, authority))
}

/// The Ed25519 key of a seed, by way of its PKCS#8 form (RFC 8410), which is a fixed prefix.
fn ed25519(seed: &[u8; 32]) -> Result<KeyPair, rcgen::Error> {
    const PREFIX: [u8; 16] = [
        0x30, 0x2e, 0x02, 0x01, 0x00, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x04, 0x22, 0x04,
        0x20,
    ];
    let mut der = PREFIX.to_vec();
    der.extend(seed);
    KeyPair::from_pkcs8_der_and_sign_algo(&der.into(), &rcgen::PKCS_ED25519)
}

#[cfg(test)]
mod tests;
