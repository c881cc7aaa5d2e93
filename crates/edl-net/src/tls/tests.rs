// SPDX-License-Identifier: Apache-2.0
//! Who gets in and who does not, against a real server.

use std::pin::Pin;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio_stream::Stream;
use tonic::{Request, Response, Status, Streaming};

use super::*;
use crate::proto::master_client::MasterClient;
use crate::proto::master_server::{Master, MasterServer};
use crate::proto::{
    AuditReport, AuditRequest, ChaosReply, ChaosRequest, JobStatus, PsCommand, PsMessage,
    ScaleReply, ScaleRequest, StatusRequest, StopReply, StopRequest, WorkerCommand, WorkerMessage,
};

const TIMEOUT: Duration = Duration::from_secs(20);

/// A master that only answers with the name of its job.
struct ScriptedMaster;

type Commands<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl Master for ScriptedMaster {
    type WorkerSessionStream = Commands<WorkerCommand>;
    type PsSessionStream = Commands<PsCommand>;

    async fn worker_session(
        &self,
        _: Request<Streaming<WorkerMessage>>,
    ) -> Result<Response<Self::WorkerSessionStream>, Status> {
        Err(Status::unimplemented("not of this test"))
    }
    async fn ps_session(
        &self,
        _: Request<Streaming<PsMessage>>,
    ) -> Result<Response<Self::PsSessionStream>, Status> {
        Err(Status::unimplemented("not of this test"))
    }
    async fn status(&self, _: Request<StatusRequest>) -> Result<Response<JobStatus>, Status> {
        Ok(Response::new(JobStatus { job: "named".into(), ..JobStatus::default() }))
    }
    async fn scale(&self, _: Request<ScaleRequest>) -> Result<Response<ScaleReply>, Status> {
        Err(Status::unimplemented("not of this test"))
    }
    async fn stop(&self, _: Request<StopRequest>) -> Result<Response<StopReply>, Status> {
        Err(Status::unimplemented("not of this test"))
    }
    async fn audit(&self, _: Request<AuditRequest>) -> Result<Response<AuditReport>, Status> {
        Err(Status::unimplemented("not of this test"))
    }
    async fn chaos(&self, _: Request<ChaosRequest>) -> Result<Response<ChaosReply>, Status> {
        Err(Status::unimplemented("not of this test"))
    }
}

/// Serves `ScriptedMaster` for as long as the returned set lives.
async fn serve(key: &JobKey) -> (String, JoinSet<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let incoming = incoming(listener, key).unwrap();
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        let service = server().add_service(MasterServer::new(ScriptedMaster));
        service.serve_with_incoming(incoming).await.unwrap();
    });
    (address, tasks)
}

async fn job_behind(channel: Channel) -> Result<String, Status> {
    let reply = MasterClient::new(channel).status(StatusRequest {}).await?;
    Ok(reply.into_inner().job)
}

#[tokio::test]
async fn a_client_with_the_key_is_admitted() {
    let key = JobKey::generate().unwrap();
    let (address, _tasks) = serve(&key).await;
    let channel = connect(&address, &key, TIMEOUT).await.unwrap();
    assert_eq!(job_behind(channel).await.unwrap(), "named");
}

#[tokio::test]
async fn another_key_is_refused_in_the_handshake() {
    let (address, _tasks) = serve(&JobKey::generate().unwrap()).await;
    let refused = connect(&address, &JobKey::generate().unwrap(), TIMEOUT).await;
    assert!(matches!(refused, Err(Error::Connect { .. })), "{refused:?}");
}

#[tokio::test]
async fn a_client_that_trusts_any_server_but_has_no_certificate_reaches_no_service() {
    let key = JobKey::generate().unwrap();
    let (address, _tasks) = serve(&key).await;
    let (_, authority) = authority(&key).unwrap();
    let authority_key = ed25519(&key.derive("tls authority")).unwrap();
    let authority = authority.self_signed(&authority_key).unwrap().pem();
    let config = ClientTlsConfig::new()
        .domain_name(SERVER_NAME)
        .ca_certificate(Certificate::from_pem(authority));
    check_kept_out(&address, config).await;
}

#[tokio::test]
async fn a_client_with_another_jobs_certificate_reaches_no_service() {
    let key = JobKey::generate().unwrap();
    let (address, _tasks) = serve(&key).await;
    let ours = credentials(&key).unwrap();
    let theirs = credentials(&JobKey::generate().unwrap()).unwrap();
    let config = ClientTlsConfig::new()
        .domain_name(SERVER_NAME)
        .ca_certificate(Certificate::from_pem(ours.authority))
        .identity(Identity::from_pem(theirs.certificate, theirs.key));
    check_kept_out(&address, config).await;
}

/// With TLS 1.3 a client learns of its refusal only when it next reads: at the first call.
async fn check_kept_out(address: &str, config: ClientTlsConfig) {
    let endpoint = Endpoint::from_shared(format!("https://{address}")).unwrap();
    if let Ok(channel) = endpoint.tls_config(config).unwrap().connect().await {
        assert!(job_behind(channel).await.is_err());
    }
}

#[tokio::test]
async fn without_tls_nobody_gets_in() {
    let (address, _tasks) = serve(&JobKey::generate().unwrap()).await;
    let endpoint = Endpoint::from_shared(format!("http://{address}")).unwrap();
    if let Ok(channel) = endpoint.connect().await {
        assert!(job_behind(channel).await.is_err());
    }
}

#[test]
fn both_sides_derive_the_same_certificates() {
    let key = JobKey::generate().unwrap();
    let (one, other) = (credentials(&key).unwrap(), credentials(&key).unwrap());
    assert_eq!((one.authority, one.certificate), (other.authority, other.certificate));
    assert_ne!(one.key, credentials(&JobKey::generate().unwrap()).unwrap().key);
}

#[tokio::test]
async fn a_crowd_of_strangers_keeps_no_peer_out() {
    crate::open_files::raise_limit();
    let key = JobKey::generate().unwrap();
    let (address, _tasks) = serve(&key).await;
    let mut strangers = Vec::new();
    for _ in 0..1100 {
        strangers.push(TcpStream::connect(&address).await.unwrap());
    }
    let channel = connect(&address, &key, TIMEOUT).await.unwrap();
    assert_eq!(job_behind(channel).await.unwrap(), "named");
    // The crowd was larger than its limit: the first of them was closed, and the last was not.
    let mut byte = [0; 1];
    let first = tokio::time::timeout(TIMEOUT, strangers[0].read(&mut byte)).await;
    assert!(matches!(first, Ok(Ok(0) | Err(_))), "{first:?}");
    let last = strangers[1099].try_read(&mut byte);
    assert!(matches!(&last, Err(e) if e.kind() == io::ErrorKind::WouldBlock), "{last:?}");
}

#[tokio::test]
async fn a_client_that_sends_one_byte_at_a_time_does_not_extend_the_handshake() {
    choose_provider();
    let credentials = credentials(&JobKey::generate().unwrap()).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut stranger = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    let (accepted, _) = listener.accept().await.unwrap();
    let (limit, place) = (Duration::from_millis(500), Strangers::new().admit(|| ()));
    let acceptor = acceptor(&credentials).unwrap();
    let refused = handshake(acceptor, accepted, limit, place, Arc::default());
    let sending = async {
        // The head of a record, and much less than its content.
        for byte in [0x16, 3, 1, 0x40, 0].into_iter().chain([0; 1000]) {
            stranger.write_all(&[byte]).await.unwrap();
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::select! {
        refused = refused => {
            assert_eq!(refused.err(), Some("it did not prove the job's key in time"));
        }
        () = sending => panic!("the handshake has no limit"),
    }
}
