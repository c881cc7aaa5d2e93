// SPDX-License-Identifier: Apache-2.0
//! The master of one job: a shell around the machine in `edl_core::job`.
//!
//! It turns messages into events, asks the machine, and performs the effects in order. It
//! decides nothing itself.

mod about;
mod audit;
mod checkpoints;
mod commands;
mod curve_file;
mod data;
mod engine;
mod evaluation;
pub mod fuzz;
mod history;
mod http;
mod journal;
pub mod line_file;
mod log_part;
mod logged;
mod metrics;
mod otlp;
mod page;
mod peers;
mod platform;
mod saving;
mod service;
mod spans;
mod status;
mod store;
mod tensorboard;
mod trace;
pub mod usage;

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::time::{Duration, Instant};

use edl_core::error::{chain, is_full};
use edl_core::evaluation::Evaluated;
use edl_core::id::{Generation, RunId, Term};
use edl_core::job::{self, End};
use edl_core::job_dir::JobDir;
use edl_core::spec::{Invalid, JobSpec, JobType};
use edl_net::convert::master as convert;
use edl_net::key::JobKey;
use edl_net::proto::{self, JobStatus};
use edl_tensor::checkpoint::Checkpoint;
use serde::Deserialize;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

pub use self::about::Build;
pub use self::audit::of_checkpoint as audit_checkpoint;
use self::engine::Engine;
pub use self::journal::take_rest as take_rest_of_logged;
pub use self::log_part::log_files;
pub use self::page::report;
pub use self::platform::{MAX_WAITING, Platform, Port, port};
pub use self::status::processes;
use self::store::{Earlier, Store};

/// Between two tries to open a store that another master holds, or a port.
const STORE_PAUSE: Duration = Duration::from_millis(200);
/// How long a port may be in use that the master before had.
const LISTEN_PATIENCE: Duration = Duration::from_secs(10);
/// Between two tries to start on a full disk.
const ROOM_PAUSE: Duration = Duration::from_secs(2);

/// What a master is started with.
#[derive(Clone, Debug)]
pub struct Config {
    pub job_dir: JobDir,
    /// `host:port`; port 0 picks a free one.
    pub listen: String,
    pub http_listen: String,
    /// Host names of the web page, besides those of the job's description.
    pub http_hosts: Vec<String>,
    pub key: JobKey,
    pub spec: JobSpec,
    /// The first start of a resumed job: what ended it before is forgotten.
    pub resume: bool,
    /// The address that others reach it at, if it listens everywhere.
    pub ip: Option<IpAddr>,
    /// How long an earlier master may still hold the job's store.
    pub store_patience: Duration,
    pub build: Build,
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
    #[error("cannot index the data")]
    Index { source: io::Error },
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

impl Error {
    /// Whether the next master would find the same, so something has to be done first.
    #[must_use]
    pub fn is_lasting(&self) -> bool {
        match self {
            Self::Listen { .. }
            | Self::Data { .. }
            | Self::DataChanged { .. }
            | Self::Spec(_)
            | Self::Tls(_) => true,
            Self::Folder { source, .. } => is_denied(source.kind()),
            Self::Store(store) => store.is_other_build() || store.io_kind().is_some_and(is_denied),
            Self::Index { .. } | Self::Serve(_) | Self::Persist(_) => false,
        }
    }

    fn is_disk_full(&self) -> bool {
        match self {
            Self::Folder { source, .. } | Self::Index { source } => is_full(source.kind()),
            Self::Store(store) => store.is_disk_full(),
            Self::Listen { .. }
            | Self::Data { .. }
            | Self::DataChanged { .. }
            | Self::Spec(_)
            | Self::Tls(_)
            | Self::Serve(_)
            | Self::Persist(_) => false,
        }
    }
}

/// Whether a file or folder cannot be used until it is changed.
fn is_denied(kind: io::ErrorKind) -> bool {
    matches!(
        kind,
        io::ErrorKind::PermissionDenied
            | io::ErrorKind::ReadOnlyFilesystem
            | io::ErrorKind::NotADirectory
            | io::ErrorKind::IsADirectory
    )
}

/// Where this master can be reached.
#[derive(Clone, Debug)]
pub(crate) struct Addresses {
    pub control: SocketAddr,
    pub http: SocketAddr,
}

/// Runs a master to the end of its job. `port` leads to its platform.
///
/// The future is boxed to compile it once in this crate, and not in every crate that awaits it.
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
        while let Err(error) = make_folder(&folder) {
            wait_for_room(error).await?;
        }
    }
    // A master that replaces another one takes its ports, which may be in use for another moment.
    let is_first = !job_dir.store().exists();
    let patience = if is_first { Duration::ZERO } else { LISTEN_PATIENCE };
    let listener = bind(&config.listen, patience).await?;
    let http_listener = bind(&config.http_listen, patience).await?;
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
    let Some(data) = data::open(&config, &addresses, &shutdown).await? else {
        return Ok(End::Stopped("the master was shut down".into()));
    };
    let (mut store, mut opened) = open_store(&config).await?;
    let stored = opened.durable.clone();
    adopt_checkpoints(&config, &mut opened);
    opened.spec.as_ref().map_or(Ok(()), |before| config.spec.check_resumed(before))?;
    if opened.fingerprint.as_ref().is_some_and(|before| *before != data.fingerprint) {
        return Err(Error::DataChanged { which: "training" });
    }
    while let Err(error) = store.pin(&config.spec, &data.fingerprint) {
        wait_for_room(error.into()).await?;
    }
    let mut durable = opened.durable;
    if config.resume {
        durable.resume();
    }
    durable.end = None;
    while let Err(error) = store.persist(&durable.changes(&stored)) {
        wait_for_room(error.into()).await?;
    }
    let job_config = job::Config {
        spec: config.spec.clone(),
        run: opened.run,
        term: opened.term,
        n_records: data.n_records,
        n_validation_records: data.n_validation_records,
        n_prediction_records: data.n_prediction_records,
        output: config.job_dir.output(&config.spec).to_string_lossy().into_owned(),
        evaluated_version: evaluated_version(&config.spec),
    };
    tracing::info!(term = opened.term.0, address = %addresses.control, http = %addresses.http, "master started");
    let origin = tokio::time::Instant::now();
    let engine = Engine::new(config, job_config, durable, data, store, addresses, origin, shutdown);
    Box::pin(engine.run(listener, http_listener, port)).await
}

/// The version of the checkpoint that a job evaluates.
fn evaluated_version(spec: &JobSpec) -> u64 {
    if spec.job_type != JobType::Evaluate {
        return 0;
    }
    // A checkpoint that cannot be read is the servers' error.
    let checkpoint = Checkpoint::open(spec.checkpoint_dir_for_init.as_ref());
    checkpoint.map_or(0, |checkpoint| checkpoint.manifest.version)
}

/// Opens the job's store, once no other master has it open.
async fn open_store(config: &Config) -> Result<(Store, store::Opened), Error> {
    let (path, start) = (config.job_dir.store(), Instant::now());
    let earlier = earlier_masters(config);
    loop {
        match Store::open(&path, earlier) {
            Err(store::Error::InUse { .. }) if start.elapsed() < config.store_patience => {
                tokio::time::sleep(STORE_PAUSE).await;
            }
            Err(error) => wait_for_room(error.into()).await?,
            Ok(opened) => return Ok(opened),
        }
    }
}

/// Waits a while if the disk is full; any other error is returned.
async fn wait_for_room(error: Error) -> Result<(), Error> {
    if !error.is_disk_full() {
        return Err(error);
    }
    tracing::error!("{}; waiting for free disk space", chain(&error));
    tokio::time::sleep(ROOM_PAUSE).await;
    Ok(())
}

/// What is known of earlier masters without their store.
fn earlier_masters(config: &Config) -> Earlier {
    #[derive(Deserialize)]
    struct Master {
        term: Term,
        #[serde(default)]
        run: String,
    }
    let text = std::fs::read(config.job_dir.master()).unwrap_or_default();
    if let Ok(Master { term, run }) = serde_json::from_slice(&text)
        && let Some(run) = RunId::parse(&run)
    {
        return Earlier { run: Some(run), term };
    }
    // The checkpoints in the job's own folder are its own.
    let newest = checkpoints::find(&config.job_dir.own_checkpoints(), None).pop();
    newest.map_or_else(Earlier::default, |Checkpoint { manifest, .. }| Earlier {
        run: RunId::parse(&manifest.run),
        term: manifest.term,
    })
}

/// Takes in complete checkpoints that the store does not know.
fn adopt_checkpoints(config: &Config, opened: &mut store::Opened) {
    let found = checkpoints::find(&config.job_dir.checkpoints(&config.spec), Some(opened.run));
    if opened.spec.is_none() {
        opened.fingerprint = found.last().map(|newest| newest.manifest.fingerprint.clone());
        // Servers may still hold a generation that no checkpoint has.
        let status = std::fs::read(config.job_dir.status()).unwrap_or_default();
        let status: JobStatus = serde_json::from_slice(&status).unwrap_or_default();
        opened.durable.generation = Generation(status.generation);
        let best = Path::new(&status.best_checkpoint).file_name();
        let is_best = |checkpoint: &&Checkpoint| checkpoint.path.file_name() == best;
        let best = found.iter().find(is_best).and_then(|best| best.path.file_name());
        opened.durable.best = best.map(|folder| folder.to_string_lossy().into_owned());
        opened.durable.evaluations = status.evaluations.into_iter().map(evaluated).collect();
    }
    let found = found.into_iter().map(checkpoints::describe).collect();
    match opened.durable.adopt(found) {
        0 => {}
        n => tracing::warn!("using complete checkpoints that are missing from the store: {n}"),
    }
}

/// An evaluation as a status shows it.
fn evaluated(evaluation: proto::Evaluation) -> Evaluated {
    let proto::Evaluation { version, epoch, metrics, best } = evaluation;
    Evaluated { version, epoch, metrics: metrics.into_iter().collect(), is_best: best }
}

async fn bind(address: &str, patience: Duration) -> Result<TcpListener, Error> {
    let start = Instant::now();
    loop {
        match TcpListener::bind(address).await {
            Err(error)
                if error.kind() == io::ErrorKind::AddrInUse && start.elapsed() < patience =>
            {
                tokio::time::sleep(STORE_PAUSE).await;
            }
            bound => {
                return bound.map_err(|source| Error::Listen { address: address.into(), source });
            }
        }
    }
}

fn make_folder(path: &Path) -> Result<(), Error> {
    std::fs::create_dir_all(path).map_err(|source| Error::Folder { path: path.into(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_that_will_not_go_away_is_lasting() {
        let path = PathBuf::from("job");
        let listen = io::ErrorKind::AddrInUse.into();
        let folder =
            |kind: io::ErrorKind| Error::Folder { path: path.clone(), source: kind.into() };
        let other_build = store::Error::Format { path: path.clone(), found: 9 };
        let in_use = store::Error::InUse { path: path.clone() };
        for (error, expected) in [
            (Error::Listen { address: "x".into(), source: listen }, true),
            (folder(io::ErrorKind::PermissionDenied), true),
            (folder(io::ErrorKind::StorageFull), false),
            (Error::Store(other_build), true),
            (Error::Store(in_use), false),
        ] {
            assert_eq!(error.is_lasting(), expected, "{error}");
        }
    }
}
