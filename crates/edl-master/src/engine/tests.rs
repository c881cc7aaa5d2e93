// SPDX-License-Identifier: Apache-2.0
//! A whole master on real sockets, and invalid messages to it.

use std::io;
use std::sync::Mutex;

use edl_core::goodput::TimeKind;
use edl_core::job_dir::JobDir;
use edl_core::platform::{Report, Role};
use edl_core::spec::JobSpec;
use edl_net::CONTROL_PROTOCOL;
use edl_net::key::JobKey;
use edl_net::proto::master_client::MasterClient;
use edl_net::proto::{ChaosRequest, PsMessage, WorkerMessage, ps_message, worker_message};
use prost::Message as _;
use prost::bytes::{Buf as _, BufMut as _};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::client::Grpc;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::Channel;
use tonic::{Code, Request};
use tracing::Level;
use tracing::subscriber::DefaultGuard;

use super::*;
use crate::Platform;
use crate::store::Earlier;

const LIMIT: Duration = Duration::from_secs(3);
const WORKER: &str = "/elasticdl.v1.Master/WorkerSession";
const PS: &str = "/elasticdl.v1.Master/PsSession";
/// A varint where every known message has a length.
const GARBAGE: [u8; 2] = [0x08, 0x07];

/// Sends bytes as they are; reads that something came.
struct Raw;

impl Codec for Raw {
    type Encode = Vec<u8>;
    type Decode = ();
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for Raw {
    type Item = Vec<u8>;
    type Error = Status;

    fn encode(&mut self, item: Vec<u8>, to: &mut EncodeBuf<'_>) -> Result<(), Status> {
        to.put_slice(&item);
        Ok(())
    }
}

impl Decoder for Raw {
    type Item = ();
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<()>, Status> {
        from.advance(from.remaining());
        Ok(Some(()))
    }
}

/// What the master logs.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A master at work.
struct Bench {
    channel: Channel,
    control: std::net::SocketAddr,
    http: std::net::SocketAddr,
    platform: Platform,
    log: Log,
    token: String,
    _tasks: JoinSet<Result<End, Error>>,
    _folder: tempfile::TempDir,
    _logging: DefaultGuard,
}

impl Bench {
    async fn start(spec: JobSpec) -> Self {
        Self::start_logging(spec, Level::INFO).await
    }

    async fn start_logging(spec: JobSpec, level: Level) -> Self {
        let log = Log::default();
        let writer = log.clone();
        let format = tracing_subscriber::fmt().with_ansi(false).with_max_level(level);
        let subscriber = format.with_writer(move || writer.clone()).finish();
        let logging = tracing::subscriber::set_default(subscriber);
        let folder = tempfile::tempdir().unwrap();
        let spec = JobSpec { job_name: "toy".into(), ..spec };
        let key = JobKey::from_bytes([7; 32]);
        let config = Config {
            job_dir: JobDir::new(folder.path()),
            listen: String::new(),
            http_listen: String::new(),
            http_hosts: Vec::new(),
            key: key.clone(),
            spec: spec.clone(),
            resume: false,
            ip: None,
            store_patience: Duration::ZERO,
            build: crate::Build::default(),
        };
        let (store, opened) = Store::open(&config.job_dir.store(), Earlier::default()).unwrap();
        let data = Data { n_records: 64, ..Data::default() };
        let job_config = job::Config {
            spec,
            run: opened.run,
            term: opened.term,
            n_records: data.n_records,
            n_validation_records: 0,
            n_prediction_records: 0,
            output: String::new(),
            evaluated_version: 0,
        };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let http_listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let control = listener.local_addr().unwrap();
        let http = http_listener.local_addr().unwrap();
        let addresses = Addresses { control, http };
        let origin = Instant::now();
        let (durable, stop) = (opened.durable, CancellationToken::new());
        let engine = Engine::new(config, job_config, durable, data, store, addresses, origin, stop);
        let (port, platform) = crate::port();
        let mut tasks = JoinSet::new();
        tasks.spawn(engine.run(listener, http_listener, port));
        let channel = edl_net::tls::connect(&control.to_string(), &key, LIMIT).await.unwrap();
        let token = key.page_token();
        Self {
            channel,
            control,
            http,
            platform,
            log,
            token,
            _tasks: tasks,
            _folder: folder,
            _logging: logging,
        }
    }

    async fn report(&mut self, report: Report) {
        self.platform.reports.send(report).await.unwrap();
    }

    async fn order(&mut self) -> Order {
        let order = tokio::time::timeout(LIMIT, self.platform.orders.recv()).await;
        order.expect("an order in time").expect("the master runs")
    }

    /// How the master ends a stream that carries these messages. The client ends nothing.
    async fn answer(&self, path: &'static str, messages: Vec<Vec<u8>>) -> Status {
        let (send, sending) = mpsc::channel(messages.len());
        for message in messages {
            send.send(message).await.unwrap();
        }
        let mut grpc = Grpc::new(self.channel.clone());
        grpc.ready().await.unwrap();
        let request = Request::new(ReceiverStream::new(sending));
        let path = PathAndQuery::from_static(path);
        let answer = async {
            let mut commands = grpc.streaming(request, path, Raw).await?.into_inner();
            while commands.message().await?.is_some() {}
            Ok::<_, Status>(())
        };
        let answer = tokio::time::timeout(LIMIT, answer).await;
        drop(send);
        match answer {
            Ok(Err(status)) => status,
            Ok(Ok(())) => Status::ok("closed without a reason"),
            Err(_) => Status::ok("no answer in time"),
        }
    }

    /// The status line and the body.
    async fn post(&self, path: &str, headers: &str, body: &str) -> (String, String) {
        let Self { http, token, .. } = self;
        let n = body.len();
        let request = format!(
            "POST {path} HTTP/1.1\r\nHost: {http}\r\nAuthorization: Bearer {token}\r\n{headers}\
             Content-Length: {n}\r\nConnection: close\r\n\r\n{body}"
        );
        // Not as text: a header may be none.
        let bytes: Vec<u8> = request.chars().map(|c| u8::try_from(c).unwrap()).collect();
        let mut stream = TcpStream::connect(http).await.unwrap();
        stream.write_all(&bytes).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        (head.lines().next().unwrap().to_owned(), body.to_owned())
    }

    /// The log's lines with this text.
    fn logged(&self, text: &str) -> Vec<String> {
        let log = String::from_utf8(self.log.0.lock().unwrap().clone()).unwrap();
        log.lines().filter(|line| line.contains(text)).map(ToOwned::to_owned).collect()
    }

    /// What is wrong about a refusal, which is logged once, with its sender.
    fn judge(&self, status: &Status, code: Code, sender: &str, reason: &str) -> Option<String> {
        let lines = self.logged(reason);
        let is_right = status.code() == code
            && status.message().contains(reason)
            && matches!(&lines[..], [line] if line.contains(sender));
        (!is_right).then(|| format!("{reason}: {status:?}, logged {lines:?}"))
    }
}

fn worker(kind: worker_message::Kind) -> Vec<u8> {
    WorkerMessage { kind: Some(kind) }.encode_to_vec()
}

fn ps(kind: ps_message::Kind) -> Vec<u8> {
    PsMessage { kind: Some(kind) }.encode_to_vec()
}

fn worker_hello() -> Vec<u8> {
    let hello = proto::WorkerHello { protocol: CONTROL_PROTOCOL, worker: 3, ..Default::default() };
    worker(worker_message::Kind::Hello(hello))
}

fn ps_hello() -> proto::PsHello {
    proto::PsHello { protocol: CONTROL_PROTOCOL, ps: 1, ..Default::default() }
}

fn bad_sets() -> Vec<proto::PartitionSet> {
    vec![proto::PartitionSet { applied: vec![1, 2, 3], ..Default::default() }]
}

fn two_servers() -> JobSpec {
    JobSpec { num_ps_pods: 2, ..JobSpec::default() }
}

#[tokio::test]
async fn a_worker_learns_why_its_message_is_invalid() {
    use worker_message::Kind;
    let bad_spec = proto::Ready { model_spec_json: "{".into(), ..Default::default() };
    let sums = vec![proto::Sums { kind: 99, ..Default::default() }];
    let bad_measures = proto::EvalDone { measures: sums, ..Default::default() };
    let last = proto::Spending { last: 99, ..Default::default() };
    let spent = proto::Spending { last: TimeKind::Idle.into(), ..Default::default() };
    let mut wrong = Vec::new();
    for (message, reason) in [
        (Vec::new(), "unknown kind of message"),
        (GARBAGE.to_vec(), "cannot decode a message"),
        (worker_hello(), "a hello must be the first message"),
        (worker(Kind::Ready(bad_spec)), "cannot parse the model spec"),
        (worker(Kind::EvalDone(bad_measures)), "unknown kind of metric 99"),
        (worker(Kind::Spending(last)), "unknown activity 99"),
        (worker(Kind::Spending(spent)), "no times"),
    ] {
        let bench = Bench::start(JobSpec::default()).await;
        let status = bench.answer(WORKER, vec![worker_hello(), message]).await;
        wrong.extend(bench.judge(&status, Code::InvalidArgument, "worker-3", reason));
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[tokio::test]
async fn a_server_learns_why_its_message_is_invalid() {
    use ps_message::Kind;
    let sets = proto::Sets { sets: bad_sets(), ..Default::default() };
    let loaded = proto::Loaded { sets: bad_sets(), ..Default::default() };
    let last = proto::Spending { last: 99, ..Default::default() };
    let mut wrong = Vec::new();
    for (message, reason) in [
        (Vec::new(), "unknown kind of message"),
        (GARBAGE.to_vec(), "cannot decode a message"),
        (ps(Kind::Hello(ps_hello())), "a hello must be the first message"),
        (ps(Kind::Loaded(loaded)), "cannot parse a set of applied batches"),
        (ps(Kind::Sets(sets)), "cannot parse a set of applied batches"),
        (ps(Kind::Spending(last)), "unknown activity 99"),
    ] {
        let bench = Bench::start(two_servers()).await;
        let status = bench.answer(PS, vec![ps(Kind::Hello(ps_hello())), message]).await;
        wrong.extend(bench.judge(&status, Code::InvalidArgument, "ps-1", reason));
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[tokio::test]
async fn an_invalid_first_message_is_final() {
    use ps_message::Kind;
    let old = proto::PsHello { protocol: 1, ..ps_hello() };
    let bad = proto::PsHello { sets: bad_sets(), ..ps_hello() };
    let beat = worker(worker_message::Kind::Heartbeat(proto::Heartbeat::default()));
    let mut wrong = Vec::new();
    for (path, message, code, reason) in [
        (WORKER, GARBAGE.to_vec(), Code::InvalidArgument, "cannot decode a message"),
        (WORKER, beat, Code::InvalidArgument, "first message must be a hello"),
        (PS, GARBAGE.to_vec(), Code::InvalidArgument, "cannot decode a message"),
        (PS, ps(Kind::Hello(bad)), Code::InvalidArgument, "cannot parse a set"),
        (PS, ps(Kind::Hello(old)), Code::FailedPrecondition, "the caller uses 1"),
    ] {
        let bench = Bench::start(two_servers()).await;
        let status = bench.answer(path, vec![message]).await;
        wrong.extend(bench.judge(&status, code, "127.0.0.1:", reason));
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[tokio::test]
async fn a_stream_that_is_replaced_is_notified() {
    let bench = Bench::start(JobSpec::default()).await;
    let status = tokio::select! {
        status = bench.answer(WORKER, vec![worker_hello()]) => status,
        status = bench.answer(WORKER, vec![worker_hello()]) => status,
    };
    // Not final: it may be the same process.
    assert_eq!(status.code(), Code::Unavailable, "{status}");
    assert!(status.message().contains("replaced"), "{status}");
}

#[tokio::test]
async fn invalid_requests_are_answered_with_the_reason() {
    let bench = Bench::start(JobSpec::default()).await;
    let mut wrong = Vec::new();
    let mut master = MasterClient::new(bench.channel.clone());
    let other = ChaosRequest { role: Role::Worker.into(), how: 99, ..Default::default() };
    let status = master.chaos(other).await.unwrap_err();
    let reason = "unknown chaos action 99";
    wrong.extend(bench.judge(&status, Code::InvalidArgument, "127.0.0.1:", reason));
    let freeze = r#"{"role": "ps", "id": 0, "how": "freeze"}"#;
    for (path, body, reason) in [
        ("/api/scale", r#"{"workers": "many"}"#, "invalid type: string"),
        ("/api/stop", r#"{"now": true}"#, "unknown field `now`"),
        ("/api/chaos", freeze, "unknown value `freeze`"),
    ] {
        let (head, answer) = bench.post(path, "", body).await;
        assert!(head.contains("400") && answer.lines().count() == 1, "{head}: {answer}");
        let status = Status::invalid_argument(answer);
        wrong.extend(bench.judge(&status, Code::InvalidArgument, "127.0.0.1:", reason));
    }
    let (head, answer) = bench.post("/api/stop", "", &" ".repeat(5000)).await;
    assert!(head.contains("413"), "{head}: {answer}");
    let status = Status::resource_exhausted(answer);
    let reason = "the body must be at most 4096 bytes";
    wrong.extend(bench.judge(&status, Code::ResourceExhausted, "127.0.0.1:", reason));
    assert!(wrong.is_empty(), "{wrong:#?}");
    let (status, _) = bench.post("/api/stop", "Origin: http://\u{e9}\r\n", "{}").await;
    assert!(status.contains("403"), "an origin that is not text is not ours: {status}");
}

#[tokio::test]
async fn a_refusal_by_the_machine_comes_back_to_the_caller() {
    let bench = Bench::start(JobSpec { max_workers: Some(4), ..JobSpec::default() }).await;
    let mut master = MasterClient::new(bench.channel.clone());
    let kill = ChaosRequest { role: Role::Worker.into(), ..Default::default() };
    let refused = master.chaos(kill).await.unwrap_err();
    let expected = "chaos is disabled; start the job with --allow_chaos";
    assert_eq!((refused.code(), refused.message()), (Code::FailedPrecondition, expected));
    let refused = master.scale(proto::ScaleRequest { workers: 5 }).await.unwrap_err();
    let expected = "cannot scale to 5: --max_workers is 4";
    assert_eq!((refused.code(), refused.message()), (Code::InvalidArgument, expected));
    let (head, body) = bench.post("/api/scale", "", r#"{"workers": 5}"#).await;
    assert!(head.contains("400") && body.trim_end() == expected, "{head}: {body}");
    let before = JobSpec::default().num_workers;
    let scaled = master.scale(proto::ScaleRequest { workers: 4 }).await.unwrap().into_inner();
    assert_eq!(scaled, proto::ScaleReply { before, after: 4 });
    let (head, body) = bench.post("/api/scale", "", r#"{"workers": 3}"#).await;
    assert!(head.contains("200") && body == "{}", "{head}: {body}");
    master.stop(proto::StopRequest { reason: "enough".into(), within_ms: None }).await.unwrap();
}

#[tokio::test]
async fn a_master_sleeps_until_the_next_deadline() {
    let mut bench = Bench::start_logging(JobSpec::default(), Level::TRACE).await;
    bench.report(Report::Running(Vec::new())).await;
    let Order::Launch { instance, .. } = bench.order().await else { panic!("no launch") };
    bench.report(Report::NotStarted { instance, error: "no such file".into() }).await;
    // The pause after a failed start ends without any event.
    let is_again =
        |order: Order| matches!(order, Order::Launch { instance: of, .. } if of == instance);
    while !is_again(bench.order().await) {}
    let n_ticks = bench.logged("a deadline has passed").len();
    assert!((1..=5).contains(&n_ticks), "{n_ticks} wake-ups in a second");
}

#[tokio::test]
async fn strangers_write_no_text_and_few_lines_into_the_log() {
    let bench = Bench::start(JobSpec::default()).await;
    let forged = "GET /outsider HTTP/1.1\r\nHost: outsider.example\r\nConnection: close\r\n\r\n";
    for address in [bench.control, bench.http] {
        for _ in 0..100 {
            let mut stream = TcpStream::connect(address).await.unwrap();
            stream.write_all(forged.as_bytes()).await.unwrap();
            // The end of the connection is all that matters here.
            let _ = stream.read_to_end(&mut Vec::new()).await;
        }
    }
    let lines = bench.logged("refused a connection");
    assert!((1..=10).contains(&lines.len()), "{lines:?}");
    assert!(lines.iter().all(|line| line.contains("does not use TLS")), "{lines:?}");
    assert_eq!(bench.logged("outsider"), [""; 0]);
}
