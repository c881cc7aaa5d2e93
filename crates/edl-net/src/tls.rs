// SPDX-License-Identifier: Apache-2.0
//! TLS of the control plane, made from the job's key alone.
//!
//! Both sides derive the same authority and the same leaf certificate, so no file is exchanged
//! and none is kept. The server also requires a certificate of the job's authority: a peer without
//! the key, or with another job's, fails in the handshake and reaches no service.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Once};
use std::task::{Context, Poll};
use std::time::Duration;

use hyper_util::rt::TokioIo;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, SerialNumber,
};
use rustls::RootCertStore;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{ServerConfig, WebPkiClientVerifier};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, mpsc};
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_stream::Stream;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity, Server, Uri};
use tower::service_fn;

use crate::isolation::Gate;
use crate::key::JobKey;
use crate::strangers::{Place, Strangers};

/// The name in the certificate. Addresses change; the key proves the peer's identity.
const SERVER_NAME: &str = "job.elasticdl";
/// How often an idle connection is tried.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(3);
/// How long the answer may take before the connection counts as broken.
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a handshake can take, however many bytes come.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// After an accept that failed for want of descriptors or memory.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Connections that wait for the server to take them.
const MAX_WAITING: usize = 16;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot create the job's certificates")]
    Certificate(#[source] rcgen::Error),
    #[error("invalid address `{address}`")]
    Address { address: String, source: tonic::transport::Error },
    #[error("cannot set up TLS")]
    Setup(#[source] Box<dyn std::error::Error + Send + Sync>),
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
            if let Some(error) = error.downcast_ref::<io::Error>() {
                return error.kind() == io::ErrorKind::InvalidData;
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

/// A gRPC server that notices silent peers. It serves the connections of [`incoming`].
#[must_use]
pub fn server() -> Server {
    Server::builder()
        .http2_keepalive_interval(Some(KEEPALIVE_INTERVAL))
        .http2_keepalive_timeout(Some(KEEPALIVE_TIMEOUT))
}

/// The connections that come to `listener`, once their peers have proven the job's key.
///
/// The handshakes are not left to the server: it would begin any number of them, and without
/// descriptors it would try to accept in an endless loop.
pub fn incoming(listener: TcpListener, key: &JobKey) -> Result<Incoming, Error> {
    choose_provider();
    let credentials = credentials(key).map_err(Error::Certificate)?;
    let acceptor = acceptor(&credentials).map_err(Error::Setup)?;
    let (sender, proven) = mpsc::channel(MAX_WAITING);
    let mut accepting = JoinSet::new();
    accepting.spawn(accept_all(listener, acceptor, sender));
    Ok(Incoming { proven, _accepting: accepting })
}

/// See [`incoming`]. Closes its listener when it is dropped.
pub struct Incoming {
    proven: mpsc::Receiver<TlsStream<TcpStream>>,
    _accepting: JoinSet<()>,
}

impl Stream for Incoming {
    type Item = io::Result<TlsStream<TcpStream>>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.proven.poll_recv(context).map(|stream| stream.map(Ok))
    }
}

/// What a server of this job presents and demands.
fn acceptor(
    Credentials { authority, certificate, key }: &Credentials,
) -> Result<TlsAcceptor, Box<dyn std::error::Error + Send + Sync>> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(authority.as_bytes())?)?;
    let verifier = WebPkiClientVerifier::builder(Arc::new(roots)).build()?;
    let chain = vec![CertificateDer::from_pem_slice(certificate.as_bytes())?];
    let key = PrivateKeyDer::from_pem_slice(key.as_bytes())?;
    let mut config =
        ServerConfig::builder().with_client_cert_verifier(verifier).with_single_cert(chain, key)?;
    config.alpn_protocols.push(b"h2".to_vec());
    Ok(TlsAcceptor::from(Arc::new(config)))
}

async fn accept_all(
    listener: TcpListener,
    acceptor: TlsAcceptor,
    proven: mpsc::Sender<TlsStream<TcpStream>>,
) {
    let strangers = Strangers::new();
    let mut handshakes = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            Some(_) = handshakes.join_next() => continue,
        };
        match accepted {
            Ok((stream, peer)) => {
                let displaced = Arc::new(Notify::new());
                let notify = Arc::clone(&displaced);
                let place = strangers.admit(move || notify.notify_one());
                let limit = HANDSHAKE_TIMEOUT;
                let handshake = handshake(acceptor.clone(), stream, limit, place, displaced);
                let (strangers, proven) = (Arc::clone(&strangers), proven.clone());
                handshakes.spawn(async move {
                    match handshake.await {
                        // The server may have stopped.
                        Ok(Some(stream)) => drop(proven.send(stream).await),
                        Ok(None) => {}
                        Err(reason) => strangers.log_refusal(Some(peer), reason),
                    }
                });
            }
            Err(error) => {
                strangers.log_failure(&error);
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// The connection of a peer that has proven the key. None if the peer hung up, or newer ones have
/// displaced it. It must have done so within `limit`, however it sends.
async fn handshake(
    acceptor: TlsAcceptor,
    stream: TcpStream,
    limit: Duration,
    _until_proven: Place,
    displaced: Arc<Notify>,
) -> Result<Option<TlsStream<TcpStream>>, &'static str> {
    // Otherwise a message waits for the answer to the one before it: tens of milliseconds. If it
    // fails, the connection is gone, as the handshake finds out.
    let _ = stream.set_nodelay(true);
    let accepting = tokio::time::timeout(limit, acceptor.accept(stream));
    tokio::select! {
        () = displaced.notified() => Ok(None),
        accepted = accepting => match accepted {
            Ok(Ok(stream)) => Ok(Some(stream)),
            Ok(Err(error)) if error.kind() == io::ErrorKind::InvalidData => {
                Err("it does not have this job's key, or does not use TLS")
            }
            Ok(Err(_)) => Ok(None),
            Err(_) => Err("it did not prove the job's key in time"),
        }
    }
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
            .map_err(|error| Error::Setup(error.into()))?
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
async fn dial(uri: Uri) -> io::Result<TokioIo<Gate<TcpStream>>> {
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
        // An error means that the program has already chosen one, which is just as good.
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
