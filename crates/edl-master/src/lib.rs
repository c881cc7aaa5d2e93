// SPDX-License-Identifier: Apache-2.0
//! The master of one job: a shell around the machine in `edl_core::job`.
//!
//! It turns messages into events, asks the machine, and performs the effects in order. It
//! decides nothing itself.

mod audit;
mod checkpoints;
mod commands;
mod engine;
mod evaluation;
mod history;
mod http;
mod journal;
mod metrics;
mod otlp;
mod page;
mod peers;
mod platform;
mod service;
mod spans;
mod status;
mod store;
mod tensorboard;
mod trace;

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::time::{Duration, Instant};

use edl_core::job::{self, End};
use edl_core::job_dir::JobDir;
use edl_core::spec::{Invalid, JobSpec, JobType};
use edl_data::{Dataset, OpenOptions};
use edl_net::convert::master as convert;
use edl_net::key::JobKey;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

pub use self::audit::of_checkpoint as audit_checkpoint;
use self::engine::Engine;
pub use self::page::report;
pub use self::platform::{MAX_WAITING, Platform, Port, port};
use self::store::Store;

/// Between two tries to open a store that another master holds.
const STORE_PAUSE: Duration = Duration::from_millis(200);

/// What a master is started with.
#[derive(Clone, Debug)]
pub struct Config {
    pub job_dir: JobDir,
    /// `host:port`; port 0 picks a free one.
    pub listen: String,
    pub http_listen: String,
    pub key: JobKey,
    pub spec: JobSpec,
    /// The first start of a resumed job: what ended it before is forgotten.
    pub resume: bool,
    /// The address that others reach it at, if it listens everywhere.
    pub ip: Option<IpAddr>,
    /// How long a master of before may still hold the job's store.
    pub store_patience: Duration,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot listen on `{address}`; choose another port, or stop the process that uses it")]
    Listen { address: String, source: io::Error },
    #[error("cannot use `{}`", path.display())]
    Folder { path: PathBuf, source: io::Error },
    #[error(transparent)]
    Store(#[from] store::Error),
    #[error("cannot open the {which} data")]
    Data { which: &'static str, source: Box<edl_data::Error> },
    #[error("the {which} data has changed since the job started; restore it, or start a new job")]
    DataChanged { which: &'static str },
    #[error(transparent)]
    Spec(#[from] Invalid),
    #[error("cannot set up TLS")]
    Tls(#[source] edl_net::tls::Error),
    #[error("the control server failed")]
    Serve(#[source] tonic::transport::Error),
    #[error("cannot save the job's state; free some disk space, then resume")]
    Persist(#[source] store::Error),
}

/// The data sets of a job, as the master needs to know them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Data {
    pub n_records: u64,
    pub n_validation_records: u64,
    pub n_prediction_records: u64,
    pub fingerprint: String,
}

/// Where this master can be reached.
#[derive(Clone, Debug)]
pub(crate) struct Addresses {
    pub control: SocketAddr,
    pub http: SocketAddr,
}

/// Runs a master to the end of its job. `port` leads to its platform.
///
/// The future is boxed so that it is compiled in this crate, once, and not in every crate that
/// awaits it.
pub fn run(
    config: Config,
    port: Port,
    shutdown: CancellationToken,
) -> Pin<Box<dyn Future<Output = Result<End, Error>> + Send>> {
    Box::pin(serve(config, port, shutdown))
}

async fn serve(config: Config, port: Port, shutdown: CancellationToken) -> Result<End, Error> {
    let job_dir = &config.job_dir;
    for folder in [job_dir.logs(), job_dir.own_checkpoints(), job_dir.own_output()] {
        make_folder(&folder)?;
    }
    let listener = bind(&config.listen).await?;
    let http_listener = bind(&config.http_listen).await?;
    let local = |listener: &TcpListener, address: &str| {
        let mut found = listener
            .local_addr()
            .map_err(|source| Error::Listen { address: address.into(), source })?;
        if let (true, Some(ip)) = (found.ip().is_unspecified(), config.ip) {
            found.set_ip(ip);
        }
        Ok::<_, Error>(found)
    };
    let addresses = Addresses {
        control: local(&listener, &config.listen)?,
        http: local(&http_listener, &config.http_listen)?,
    };
    let data = open_data(&config.spec)?;
    let (store, opened) = open_store(&config).await?;
    opened.spec.as_ref().map_or(Ok(()), |before| config.spec.check_resumed(before))?;
    if opened.fingerprint.as_ref().is_some_and(|before| *before != data.fingerprint) {
        return Err(Error::DataChanged { which: "training" });
    }
    store.pin(&config.spec, &data.fingerprint)?;
    let mut durable = opened.durable;
    if config.resume {
        durable.failures.clear();
        // What the flags say counts again.
        durable.workers_wanted = None;
    }
    let job_config = job::Config {
        spec: config.spec.clone(),
        term: opened.term,
        n_records: data.n_records,
        n_validation_records: data.n_validation_records,
        n_prediction_records: data.n_prediction_records,
    };
    tracing::info!(term = opened.term.0, address = %addresses.control, http = %addresses.http, "master started");
    let origin = tokio::time::Instant::now();
    let engine =
        Engine::new(config, job_config, durable, opened.run, data, store, addresses, origin);
    Box::pin(engine.run(listener, http_listener, port, shutdown)).await
}

/// Opens the job's store, once nobody else has it open.
async fn open_store(config: &Config) -> Result<(Store, store::Opened), Error> {
    let (path, start) = (config.job_dir.store(), Instant::now());
    loop {
        match Store::open(&path) {
            Err(store::Error::InUse { .. }) if start.elapsed() < config.store_patience => {
                tokio::time::sleep(STORE_PAUSE).await;
            }
            opened => return Ok(opened?),
        }
    }
}

async fn bind(address: &str) -> Result<TcpListener, Error> {
    let listen = |source| Error::Listen { address: address.into(), source };
    TcpListener::bind(address).await.map_err(listen)
}

fn make_folder(path: &Path) -> Result<(), Error> {
    std::fs::create_dir_all(path).map_err(|source| Error::Folder { path: path.into(), source })
}

fn open_data(spec: &JobSpec) -> Result<Data, Error> {
    let open = |which: &'static str, location: &str| -> Result<Option<Dataset>, Error> {
        if location.is_empty() {
            return Ok(None);
        }
        let params = spec.data_reader_params.clone();
        let options = OpenOptions { codec: spec.codec_type, params };
        let dataset = Dataset::open(location, &options);
        dataset.map(Some).map_err(|source| Error::Data { which, source: Box::new(source) })
    };
    let count = |dataset: &Option<Dataset>| dataset.as_ref().map_or(0, Dataset::n_records);
    let mut data = Data::default();
    if spec.job_type == JobType::Train {
        let training = open("training", &spec.training_data)?;
        data.n_records = count(&training);
        data.fingerprint = training.map(|t| t.fingerprint().to_owned()).unwrap_or_default();
    }
    if spec.job_type == JobType::Predict {
        data.n_prediction_records = count(&open("prediction", &spec.prediction_data)?);
    } else {
        data.n_validation_records = count(&open("validation", &spec.validation_data)?);
    }
    Ok(data)
}
