// SPDX-License-Identifier: Apache-2.0
//! Servers in this process, and their clients.

use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use edl_core::id::{BatchId, CheckpointId, Generation, PartitionId, PsId, RunId};
use edl_core::job::{CheckpointFile, LoadFrom};
use edl_core::layout::Layout;
use edl_core::model::{Init, ModelSpec, ParamSpec, Rule, TableSpec};
use edl_core::optimizer::OptimizerSpec;
use edl_core::server::{Event, Load, Order, Report};
use edl_core::servers::PartitionState;
use edl_core::spec::Mode;
use edl_net::data::{Error, Limits, PsClient, Route, ServerRoute};
use edl_net::handshake::Encryption;
use edl_net::key::JobKey;
use edl_net::wire::Stream;
use edl_ps::Front;
use edl_ps::store::Store;
use edl_tensor::checkpoint::FileEntry;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

pub(crate) const RUN: RunId = RunId([7; 16]);
pub(crate) const N_PARTITIONS: u32 = 6;
pub(crate) const N_BATCHES: u32 = 5;
/// Far longer than any test takes: reached only when something hangs.
pub(crate) const DEADLINE: Duration = Duration::from_secs(60);

pub(crate) fn key() -> JobKey {
    JobKey::from_bytes([3; 32])
}

/// Initial values are zero and the learning rate of SGD is one, so values are sums of gradients.
pub(crate) fn model() -> ModelSpec {
    let zero = Init::Constant(0.0);
    let table = |name: &str, dim| TableSpec { name: name.into(), dim, init: zero };
    ModelSpec {
        name: "sums".into(),
        params: vec![ParamSpec::new("w", vec![20], zero, Rule::Trainable { decay: false })],
        tables: vec![table("narrow", 2), table("wide", 16)],
        inputs: Vec::new(),
        metrics: Vec::new(),
        optimizer: OptimizerSpec::sgd(1.0),
    }
}

pub(crate) fn layout() -> Layout {
    Layout::shared(20, N_PARTITIONS)
}

pub(crate) fn load_spec(generation: u64, partitions: std::ops::Range<u32>, mode: Mode) -> Load {
    Load {
        generation: Generation(generation),
        partitions,
        layout: layout(),
        model: Arc::new(model()),
        optimizer: OptimizerSpec::sgd(1.0),
        seed: 1,
        n_batches: N_BATCHES,
        mode,
        lr_staleness_modulation: false,
        from: LoadFrom { checkpoint: None, keep_applied: true },
    }
}

/// The transport of the frames.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum By {
    Tcp,
    Unix,
    EncryptedTcp,
}

impl By {
    pub(crate) const ALL: [Self; 3] = [Self::Tcp, Self::Unix, Self::EncryptedTcp];

    /// The encryption that a client requests. Servers on its host accept both.
    pub(crate) fn encryption(self) -> Encryption {
        match self {
            Self::Tcp | Self::Unix => Encryption::BetweenHosts,
            Self::EncryptedTcp => Encryption::Always,
        }
    }
}

/// One server of a job, with its listeners.
pub(crate) struct Server {
    pub(crate) store: Arc<Store>,
    pub(crate) address: String,
    pub(crate) unix_path: PathBuf,
    reports: Mutex<UnboundedReceiver<Report>>,
    front: Arc<Front>,
}

impl Server {
    pub(crate) fn start(folder: &Path, ps: u32) -> Self {
        Self::start_with(folder, ps, Encryption::default())
    }

    pub(crate) fn start_with(folder: &Path, ps: u32, encryption: Encryption) -> Self {
        let (sender, reports) = unbounded_channel();
        let store = Arc::new(Store::new(2, folder.into(), sender).unwrap());
        let front = Arc::new(Front::new(Arc::clone(&store), key()));
        front.set_run(RUN, encryption);
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = tcp.local_addr().unwrap().to_string();
        let unix_path = folder.join(format!("ps-{ps}.sock"));
        let unix = UnixListener::bind(&unix_path).unwrap();
        // These threads end with the process; they hold a port and a file that only this test uses.
        let listening = Arc::clone(&front);
        std::thread::spawn(move || {
            for stream in tcp.incoming() {
                if listening.admit(Stream::tcp(stream.unwrap()).unwrap()).is_err() {
                    return;
                }
            }
        });
        let listening = Arc::clone(&front);
        std::thread::spawn(move || {
            for stream in unix.incoming() {
                if listening.admit(Stream::unix(stream.unwrap()).unwrap()).is_err() {
                    return;
                }
            }
        });
        Self { store, address, unix_path, reports: Mutex::new(reports), front }
    }

    /// The next report to the master, except reports that a checkpoint of a step was accepted.
    pub(crate) fn report(&self) -> Report {
        let mut reports = self.reports.lock().unwrap();
        loop {
            let report = reports.blocking_recv().unwrap();
            if !matches!(report, Report::CheckpointStarted { .. }) {
                return report;
            }
        }
    }

    pub(crate) fn load(&self, load: Load) -> Result<(), String> {
        let ordered = load.generation;
        self.store.handle(Event::Order(Order::Load(Box::new(load))));
        let (generation, loaded) = match self.report() {
            Report::Loaded { generation, .. } => (generation, Ok(())),
            Report::LoadFailed { generation, error } => (generation, Err(error)),
            other @ (Report::Heartbeat
            | Report::Spending(_)
            | Report::CheckpointStarted { .. }
            | Report::CheckpointDone { .. }
            | Report::CheckpointFailed { .. }
            | Report::States { .. }) => panic!("{other:?}"),
        };
        assert_eq!(generation, ordered);
        loaded
    }

    pub(crate) fn serve(&self, generation: Generation) {
        self.store.handle(Event::Order(Order::Serve(generation)));
    }

    pub(crate) fn order_checkpoint(&self, number: u64, folder: &Path, at: Option<u64>) {
        // The master creates the folder first, too.
        std::fs::create_dir_all(folder).unwrap();
        let (checkpoint, generation) = (CheckpointId(number), Generation(1));
        let folder = folder.to_str().unwrap().to_owned();
        let order = Order::Checkpoint { checkpoint, generation, folder, at };
        self.store.handle(Event::Order(order));
    }

    /// The result of the checkpoint with this number.
    pub(crate) fn checkpointed(&self, number: u64) -> Result<Vec<FileEntry>, String> {
        let (checkpoint, files) = match self.report() {
            Report::CheckpointDone { checkpoint, files, .. } => (checkpoint, Ok(files)),
            Report::CheckpointFailed { checkpoint, error, .. } => (checkpoint, Err(error)),
            other @ (Report::Heartbeat
            | Report::Spending(_)
            | Report::CheckpointStarted { .. }
            | Report::Loaded { .. }
            | Report::LoadFailed { .. }
            | Report::States { .. }) => panic!("{other:?}"),
        };
        assert_eq!(checkpoint, CheckpointId(number));
        let entry = |file: CheckpointFile| {
            let CheckpointFile { partition, name, bytes, checksum, updates } = file;
            FileEntry { partition: PartitionId(partition), name, bytes, checksum, updates }
        };
        files.map(|files| files.into_iter().map(entry).collect())
    }

    /// The state of the server's partitions.
    pub(crate) fn states(&self) -> Vec<PartitionState> {
        self.store.inspect().blocking_recv().unwrap().1
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.store.close();
        self.front.close();
    }
}

/// Two servers that together hold all partitions.
pub(crate) struct ServerPair {
    pub(crate) servers: [Server; 2],
    pub(crate) folder: tempfile::TempDir,
}

impl ServerPair {
    pub(crate) fn start(mode: Mode) -> Self {
        Self::start_with(mode, Encryption::default())
    }

    pub(crate) fn start_with(mode: Mode, encryption: Encryption) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let servers = [0, 1].map(|ps| Server::start_with(folder.path(), ps, encryption));
        let job = Self { servers, folder };
        job.load(1, mode);
        job
    }

    pub(crate) fn load(&self, generation: u64, mode: Mode) {
        for (server, partitions) in self.servers.iter().zip(shares()) {
            server.load(load_spec(generation, partitions, mode)).unwrap();
            server.serve(Generation(generation));
        }
    }

    pub(crate) fn route(&self, generation: u64, by: By) -> Route {
        let server = |((ps, server), partitions): ((u32, &Server), _)| ServerRoute {
            ps: PsId(ps),
            address: server.address.clone(),
            unix_path: match by {
                By::Unix => server.unix_path.to_str().unwrap().to_owned(),
                By::Tcp | By::EncryptedTcp => String::new(),
            },
            partitions,
        };
        let servers = (0..).zip(&self.servers).zip(shares()).map(server).collect();
        Route { generation: Generation(generation), servers }
    }

    pub(crate) fn client(&self, generation: u64, by: By) -> Client {
        Client::connect_as(&self.route(generation, by), by.encryption()).unwrap()
    }

    /// The number of updates of every partition.
    pub(crate) fn updates(&self) -> Vec<u64> {
        let states = self.servers.iter().flat_map(Server::states);
        states.map(|state| state.updates).collect()
    }
}

pub(crate) fn shares() -> [std::ops::Range<u32>; 2] {
    [0..2, 2..N_PARTITIONS]
}

/// A worker: a client and its buffers.
pub(crate) struct Client {
    pub(crate) net: PsClient,
    pub(crate) ids: Vec<Vec<u64>>,
    pub(crate) dense: Vec<f32>,
    pub(crate) rows: Vec<Vec<f32>>,
}

impl Client {
    pub(crate) fn connect(route: &Route) -> Result<Self, Error> {
        Self::connect_as(route, Encryption::default())
    }

    pub(crate) fn connect_as(route: &Route, encryption: Encryption) -> Result<Self, Error> {
        let net = PsClient::connect(
            route,
            (&key(), RUN, encryption),
            layout(),
            &model(),
            Limits::all(DEADLINE),
        )?;
        let ids = vec![vec![5, 1, 900, 17, 4], (0..100).map(|id| id * 7 + 1).collect()];
        Ok(Self { net, ids, dense: vec![9.0; 20], rows: vec![Vec::new(), Vec::new()] })
    }

    pub(crate) fn pull(&mut self, min_round: Option<u64>) -> Result<Vec<u64>, Error> {
        let Self { net, ids, dense, rows } = self;
        Ok(net.pull(ids, Some(dense), rows, min_round)?.0)
    }

    /// Pushes `-value` for every parameter, so each application adds `value`.
    pub(crate) fn push(&mut self, batch: BatchId, value: f32) -> Result<(), Error> {
        let base = edl_net::data::Versions(vec![0, 0]);
        self.push_from(batch, value, &base)
    }

    pub(crate) fn push_from(
        &mut self,
        batch: BatchId,
        value: f32,
        base: &edl_net::data::Versions,
    ) -> Result<(), Error> {
        let grads: Vec<Vec<f32>> =
            vec![vec![-value; self.ids[0].len() * 2], vec![-value; self.ids[1].len() * 16]];
        self.net.push(batch, 10, base, &[-value; 20], &self.ids, &grads)
    }

    pub(crate) fn ack(&self) -> Result<(BatchId, u64), Error> {
        let acked = self.net.acks().recv_timeout(DEADLINE).expect("an answer in time")?;
        Ok((acked.batch, acked.generation.0))
    }

    /// Pulls and checks that every number is `value`.
    pub(crate) fn expect(&mut self, value: f32) {
        self.pull(None).unwrap();
        assert_eq!(self.dense, vec![value; 20]);
        assert_eq!(self.rows, [vec![value; 10], vec![value; 1600]]);
    }
}

pub(crate) fn batch(index: u32) -> BatchId {
    BatchId { epoch: 0, index }
}

/// Completes a checkpoint with a manifest of its files.
pub(crate) fn commit(folder: &Path, mut files: Vec<FileEntry>) {
    files.sort_by_key(|file| file.partition);
    let manifest = edl_tensor::checkpoint::Manifest {
        format: edl_tensor::checkpoint::FORMAT,
        version: 3,
        exact: None,
        generation: Generation(1),
        checkpoint: CheckpointId(1),
        term: edl_core::id::Term(1),
        run: RUN.to_string(),
        job: "test".into(),
        seed: 1,
        model: model(),
        optimizer: OptimizerSpec::sgd(1.0),
        n_batches: N_BATCHES,
        n_partitions: N_PARTITIONS,
        fingerprint: "none".into(),
        files,
        metrics: std::collections::BTreeMap::new(),
        skipped: Default::default(),
    };
    edl_tensor::checkpoint::commit_manifest(folder, &manifest).unwrap();
}
