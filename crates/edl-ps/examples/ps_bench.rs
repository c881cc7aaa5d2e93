// SPDX-License-Identifier: Apache-2.0
//! Measures pulls and pushes over a socket against the same work done in memory by one thread.
//!
//! `cargo run --release -p edl-ps --example ps_bench [-- PASSES [CASE]]`. Ratios are of one run on one
//! machine: each case runs both sides in turn, and the best pass of each counts.

use std::io::Write;
use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

use edl_core::id::{BatchId, Generation, PartitionId, PsId, RunId};
use edl_core::job::LoadFrom;
use edl_core::layout::Layout;
use edl_core::model::{Init, ModelSpec, ParamSpec, Rule, TableSpec};
use edl_core::optimizer::{OptimizerKind, OptimizerSpec};
use edl_core::rng::Rng;
use edl_core::server::{Event, Load, Order, Report};
use edl_core::spec::Mode;
use edl_net::cipher::{Buffer, Cipher};
use edl_net::data::{Limits, PsClient, Route, ServerRoute, Versions};
use edl_net::handshake::Encryption;
use edl_net::key::JobKey;
use edl_net::seal::Seal;
use edl_net::wire::Stream;
use edl_ps::Front;
use edl_ps::store::Store;
use edl_tensor::partition::{Partition, PartitionConfig};
use edl_tensor::push::{Body, Head, Push};

const N_IDS: usize = 26_624;
const DIM: usize = 16;
const N_PARTITIONS: u32 = 32;
const RUN: RunId = RunId([1; 16]);
const DEADLINE: Duration = Duration::from_secs(60);
/// Pushes on their way at once, as a worker would have.
const IN_FLIGHT: usize = 4;
const N_BATCHES: u32 = 1 << 20;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

fn main() -> Outcome<()> {
    let passes = std::env::args().nth(1).map_or(Ok(200), |passes| passes.parse())?;
    let only = std::env::args().nth(2).unwrap_or_default();
    let is_wanted = |name: &str| name.contains(&only);
    let mut out = std::io::stdout().lock();
    if is_wanted("tag") {
        seals(&mut out)?;
    }
    if is_wanted("encryption") {
        encryption(&mut out, passes)?;
    }
    for n_rows in [100_000, 2_000_000] {
        for by in [By::Unix, By::Tcp] {
            if is_wanted(&format!("{n_rows} rows by {by:?}")) {
                rows(&mut out, n_rows, by, passes)?;
            }
        }
    }
    for by in [By::Unix, By::Tcp] {
        if is_wanted(&format!("dense by {by:?}")) {
            dense(&mut out, 10_000_000, by, passes / 10 + 1)?;
        }
    }
    Ok(())
}

#[derive(Clone, Copy, Debug)]
enum By {
    Unix,
    Tcp,
    EncryptedTcp,
}

impl By {
    fn encryption(self) -> Encryption {
        match self {
            Self::Unix | Self::Tcp => Encryption::Never,
            Self::EncryptedTcp => Encryption::Always,
        }
    }
}

/// Bytes per second of both kinds of tags, and of encryption.
fn seals(out: &mut impl Write) -> Outcome<()> {
    let bytes = vec![7_u8; 256 << 10];
    let (mut cipher, mut sealed) = (Cipher::new([1; 32]), Buffer::default());
    let best_seal = best(400, |_| {
        let start = Instant::now();
        sealed.clear();
        cipher.seal(&[&bytes], &mut sealed);
        Ok(start.elapsed())
    })?;
    let rate = bytes.len() as f64 / best_seal / 1e9;
    writeln!(out, "encryption by AEGIS: {rate:.1} GB/s")?;
    for (name, is_local) in [("AEGIS (tcp)", false), ("xxh3 (unix)", true)] {
        let seal = Seal::new([1; 32], is_local);
        let mut best = Duration::MAX;
        for _ in 0..400 {
            let start = Instant::now();
            let mut hasher = seal.begin();
            hasher.update(&bytes);
            std::hint::black_box(hasher.tag());
            best = best.min(start.elapsed());
        }
        let rate = bytes.len() as f64 / best.as_secs_f64() / 1e9;
        writeln!(out, "tag {name}: {rate:.1} GB/s")?;
    }
    Ok(())
}

fn model(dense: usize) -> ModelSpec {
    let init = Init::Uniform { low: -0.05, high: 0.05 };
    ModelSpec {
        name: "bench".into(),
        params: vec![ParamSpec::new("w", vec![dense], init, Rule::Trainable { decay: false })],
        tables: vec![TableSpec { name: "ids".into(), dim: DIM, init }],
        inputs: Vec::new(),
        metrics: Vec::new(),
        optimizer: adam(),
    }
}

fn adam() -> OptimizerSpec {
    let kind = OptimizerKind::Adam { beta_1: 0.9, beta_2: 0.999, epsilon: 1e-8, amsgrad: false };
    OptimizerSpec { kind, ..OptimizerSpec::sgd(0.001) }
}

/// A server in this process and one client of it.
struct Pair {
    client: PsClient,
    store: Arc<Store>,
    front: Arc<Front>,
    _folder: tempfile::TempDir,
}

impl Drop for Pair {
    fn drop(&mut self) {
        self.client.abort_handle().abort();
        self.store.close();
        self.front.close();
    }
}

fn pair(model: &ModelSpec, layout: Layout, by: By) -> Outcome<Pair> {
    let folder = tempfile::tempdir()?;
    let key = JobKey::from_bytes([2; 32]);
    let (sender, mut reports) = tokio::sync::mpsc::unbounded_channel();
    let store = Arc::new(Store::new(0, folder.path().into(), sender)?);
    let generation = Generation(1);
    store.handle(Event::Order(Order::Load(Box::new(Load {
        generation,
        partitions: 0..N_PARTITIONS,
        layout,
        model: Arc::new(model.clone()),
        optimizer: adam(),
        seed: 1,
        n_batches: N_BATCHES,
        mode: Mode::Async,
        lr_staleness_modulation: false,
        from: LoadFrom { checkpoint: None, keep_applied: true },
    }))));
    let loaded = reports.blocking_recv();
    if !matches!(loaded, Some(Report::Loaded { .. })) {
        return Err(format!("cannot load: {loaded:?}").into());
    }
    store.handle(Event::Order(Order::Serve(generation)));
    let front = Arc::new(Front::new(Arc::clone(&store), key.clone()));
    front.set_run(RUN, by.encryption());
    let (address, unix_path) = listen(&front, folder.path(), by)?;
    let server = ServerRoute { ps: PsId(0), address, unix_path, partitions: 0..N_PARTITIONS };
    let route = Route { generation, servers: vec![server] };
    let session = (&key, RUN, by.encryption());
    let client = PsClient::connect(&route, session, layout, model, Limits::all(DEADLINE))?;
    Ok(Pair { client, store, front, _folder: folder })
}

/// Accepts the two connections of one client.
fn listen(front: &Arc<Front>, folder: &std::path::Path, by: By) -> Outcome<(String, String)> {
    let front = Arc::clone(front);
    Ok(match by {
        By::Tcp | By::EncryptedTcp => {
            let listener = TcpListener::bind("127.0.0.1:0")?;
            let address = listener.local_addr()?.to_string();
            std::thread::spawn(move || {
                for stream in listener.incoming().take(2).flatten() {
                    let _ = Stream::tcp(stream).and_then(|stream| front.admit(stream));
                }
            });
            (address, String::new())
        }
        By::Unix => {
            let path = folder.join("ps.sock");
            let listener = UnixListener::bind(&path)?;
            std::thread::spawn(move || {
                for stream in listener.incoming().take(2).flatten() {
                    let _ = Stream::unix(stream).and_then(|stream| front.admit(stream));
                }
            });
            (String::new(), path.to_string_lossy().into_owned())
        }
    })
}

/// Distinct ids below `n_rows` per batch, for several batches.
fn batches(n_rows: u64) -> Vec<Vec<u64>> {
    let mut rng = Rng::new(5);
    let batch = |_| {
        let mut ids: Vec<u64> = (0..N_IDS * 2).map(|_| rng.below(n_rows)).collect();
        ids.sort_unstable();
        ids.dedup();
        // In no order, as they come from records.
        for last in (1..ids.len()).rev() {
            ids.swap(last, usize::try_from(rng.below(last as u64 + 1)).unwrap_or(0));
        }
        ids.truncate(N_IDS);
        ids
    };
    (0..16).map(batch).collect()
}

/// The work of a server on one thread, without any server: ids sorted by partition beforehand.
struct Bare {
    partitions: Vec<Partition>,
    /// Per batch, per partition.
    ids: Vec<Vec<Vec<u64>>>,
    out: Vec<f32>,
}

impl Bare {
    fn new(model: &ModelSpec, layout: Layout, batches: &[Vec<u64>]) -> Self {
        let model = Arc::new(model.clone());
        let partition = |id| {
            Partition::new(PartitionConfig {
                id: PartitionId(id),
                layout,
                model: Arc::clone(&model),
                optimizer: adam(),
                seed: 1,
                n_batches: N_BATCHES,
                mode: Mode::Async,
                lr_staleness_modulation: false,
            })
        };
        let split = |ids: &Vec<u64>| {
            let mut parts = vec![Vec::new(); N_PARTITIONS as usize];
            ids.iter().for_each(|id| parts[layout.partition_of(*id).0 as usize].push(*id));
            parts
        };
        Self {
            partitions: (0..N_PARTITIONS).map(partition).collect(),
            ids: batches.iter().map(split).collect(),
            out: vec![0.0; N_IDS * DIM],
        }
    }

    fn fill(&mut self, layout: Layout, n_rows: u64) {
        for id in 0..n_rows {
            let partition = &mut self.partitions[layout.partition_of(id).0 as usize];
            partition.gather(0, &[id], &mut self.out[..DIM]);
        }
    }

    fn gather(&mut self, batch: usize) {
        let mut out = self.out.as_mut_slice();
        for (partition, ids) in self.partitions.iter_mut().zip(&self.ids[batch]) {
            let (here, rest) = out.split_at_mut(ids.len() * DIM);
            partition.gather(0, ids, here);
            out = rest;
        }
        std::hint::black_box(&self.out);
    }

    fn pushes(&self, layout: Layout, index: u32, batch: usize) -> Outcome<Arc<Push>> {
        let ids: Vec<u64> = self.ids[batch].concat();
        let counts = self.ids[batch].iter().map(|ids| u32::try_from(ids.len()));
        let head = Head {
            batch: BatchId { epoch: 0, index },
            n_records: 64,
            base_version: 0,
            partitions: 0..N_PARTITIONS,
            layout,
            lane: None,
        };
        let body = Body {
            dense: vec![0.01; layout.dense_len],
            counts: counts.collect::<Result<_, _>>()?,
            grads: vec![0.01; ids.len() * DIM],
            ids,
        };
        Ok(Arc::new(Push::new(head, &[DIM], body)?))
    }

    fn push(&mut self, push: &Arc<Push>) {
        for partition in &mut self.partitions {
            std::hint::black_box(partition.push(push));
        }
    }
}

/// The shortest of many.
fn best(passes: usize, mut pass: impl FnMut(usize) -> Outcome<Duration>) -> Outcome<f64> {
    let mut best = Duration::MAX;
    for number in 0..passes {
        best = best.min(pass(number)?);
    }
    Ok(best.as_secs_f64())
}

fn rows(out: &mut impl Write, n_rows: u64, by: By, passes: usize) -> Outcome<()> {
    let model = model(1);
    let layout = Layout::shared(1, N_PARTITIONS);
    let batches = batches(n_rows);
    let mut pair = pair(&model, layout, by)?;
    let client = &mut pair.client;
    let mut buffers = vec![Vec::new()];
    for first in (0..n_rows).step_by(N_IDS) {
        let ids = vec![(first..n_rows.min(first + N_IDS as u64)).collect()];
        client.pull(&ids, None, &mut buffers, None)?;
    }
    let lists: Vec<Vec<Vec<u64>>> = batches.iter().map(|ids| vec![ids.clone()]).collect();
    let pulled = best(passes, |pass| {
        let start = Instant::now();
        client.pull(&lists[pass % 16], None, &mut buffers, None)?;
        Ok(start.elapsed())
    })?;
    let pushed = push_over(client, &lists, layout, passes)?;
    drop(pair);
    let mut bare = Bare::new(&model, layout, &batches);
    bare.fill(layout, n_rows);
    let gathered = best(passes, |pass| {
        let start = Instant::now();
        bare.gather(pass % 16);
        Ok(start.elapsed())
    })?;
    let updated = push_bare(&mut bare, layout, passes)?;
    let rate = |seconds: f64| N_IDS as f64 / seconds / 1e6;
    writeln!(
        out,
        "{n_rows} rows by {by:?}: pull {:.1} M rows/s, bare {:.1}, ratio {:.2}; push {:.1} M rows/s, bare {:.1}, ratio {:.2}",
        rate(pulled),
        rate(gathered),
        gathered / pulled,
        rate(pushed),
        rate(updated),
        updated / pushed,
    )?;
    Ok(())
}

/// Pushes that are timed together.
const TOGETHER: usize = 8;

/// The gradients that are pushed again and again, with some pushes on their way at once.
struct Pushes<'a> {
    lists: &'a [Vec<Vec<u64>>],
    dense: Vec<f32>,
    grads: Vec<Vec<f32>>,
    next: u32,
}

impl<'a> Pushes<'a> {
    fn new(lists: &'a [Vec<Vec<u64>>], layout: Layout) -> Self {
        // One buffer for all, as a worker uses its gradient's again.
        let n_rows = lists.iter().flatten().map(Vec::len).max().unwrap_or(0);
        let (dense, grads) = (vec![0.01; layout.dense_len], vec![vec![0.01; n_rows * DIM]]);
        Self { lists, dense, grads, next: 0 }
    }

    fn push(&mut self, client: &mut PsClient) -> Outcome<()> {
        let base = Versions(vec![0]);
        let mut open = 0;
        for _ in 0..TOGETHER {
            let ids = &self.lists[self.next as usize % self.lists.len()];
            let batch = BatchId { epoch: 0, index: self.next };
            client.push(batch, 64, &base, &self.dense, ids, &self.grads)?;
            self.next += 1;
            open += 1;
            if open == IN_FLIGHT {
                client.acks().recv_timeout(DEADLINE)??;
                open -= 1;
            }
        }
        for _ in 0..open {
            client.acks().recv_timeout(DEADLINE)??;
        }
        Ok(())
    }
}

/// Seconds per push, of the best run of several.
fn push_over(
    client: &mut PsClient,
    lists: &[Vec<Vec<u64>>],
    layout: Layout,
    passes: usize,
) -> Outcome<f64> {
    let mut pushes = Pushes::new(lists, layout);
    let together = best((passes / TOGETHER).max(3), |_| {
        let start = Instant::now();
        pushes.push(client)?;
        Ok(start.elapsed())
    })?;
    Ok(together / TOGETHER as f64)
}

/// Seconds that something took, and seconds of processors, of client and server together.
#[derive(Clone, Copy)]
struct Cost {
    time: f64,
    cpu: f64,
}

fn cost(act: impl FnOnce() -> Outcome<()>) -> Outcome<Cost> {
    let (start, start_cpu) = (Instant::now(), cpu()?);
    act()?;
    Ok(Cost { time: start.elapsed().as_secs_f64(), cpu: cpu()? - start_cpu })
}

/// Processor time of this process so far, in seconds.
fn cpu() -> Outcome<f64> {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Ok(Duration::try_from(time)?.as_secs_f64())
}

fn median(costs: &[Cost], of: impl Fn(&Cost) -> f64) -> f64 {
    let mut all: Vec<f64> = costs.iter().map(of).collect();
    all.sort_by(f64::total_cmp);
    all[all.len() / 2]
}

/// Plain against encrypted TCP. Both connections live at once and take turns.
fn encryption(out: &mut impl Write, passes: usize) -> Outcome<()> {
    let ids: Vec<Vec<Vec<u64>>> = batches(100_000).into_iter().map(|ids| vec![ids]).collect();
    let none = vec![vec![Vec::new()]];
    for (what, n_dense, lists, passes) in
        [("100000 rows", 1, &ids, passes), ("dense 40 MB", 10_000_000, &none, passes / 10 + 1)]
    {
        let (model, layout) = (model(n_dense), Layout::shared(n_dense, N_PARTITIONS));
        let mut pairs = [pair(&model, layout, By::Tcp)?, pair(&model, layout, By::EncryptedTcp)?];
        let mut pushes = [(); 2].map(|()| Pushes::new(lists, layout));
        let mut costs = [(); 2].map(|()| [Vec::new(), Vec::new()]);
        let (mut values, mut buffers) = (vec![0.0; n_dense], vec![Vec::new()]);
        for pass in 0..passes {
            let sides = pairs.iter_mut().zip(&mut pushes).zip(&mut costs);
            for ((Pair { client, .. }, pushes), [pulled, pushed]) in sides {
                let dense = (n_dense > 1).then_some(values.as_mut_slice());
                pulled.push(cost(|| {
                    client.pull(&lists[pass % lists.len()], dense, &mut buffers, None)?;
                    Ok(())
                })?);
                pushed.push(cost(|| pushes.push(client))?);
            }
        }
        let [plain, encrypted] = costs;
        for (action, n, plain, encrypted) in
            [("pull", 1, &plain[0], &encrypted[0]), ("push", TOGETHER, &plain[1], &encrypted[1])]
        {
            let times = [plain, encrypted].map(|costs| median(costs, |cost| cost.time) / n as f64);
            let cpus = [plain, encrypted].map(|costs| median(costs, |cost| cost.cpu) / n as f64);
            writeln!(
                out,
                "encryption, {what}, {action}: {:.3} ms plain, {:.3} encrypted, ratio {:.2}; processors {:.3} ms plain, {:.3} encrypted, ratio {:.2}",
                times[0] * 1e3,
                times[1] * 1e3,
                times[1] / times[0],
                cpus[0] * 1e3,
                cpus[1] * 1e3,
                cpus[1] / cpus[0],
            )?;
        }
    }
    Ok(())
}

fn push_bare(bare: &mut Bare, layout: Layout, passes: usize) -> Outcome<f64> {
    let mut next = 0;
    best(passes, |pass| {
        let push = bare.pushes(layout, next, pass % bare.ids.len())?;
        next += 1;
        let start = Instant::now();
        bare.push(&push);
        Ok(start.elapsed())
    })
}

fn dense(out: &mut impl Write, n: usize, by: By, passes: usize) -> Outcome<()> {
    let model = model(n);
    let layout = Layout::shared(n, N_PARTITIONS);
    let mut pair = pair(&model, layout, by)?;
    let client = &mut pair.client;
    let (mut values, mut buffers) = (vec![0.0; n], vec![Vec::new()]);
    let none = vec![vec![Vec::new()]];
    let pulled = best(passes, |_| {
        let start = Instant::now();
        client.pull(&none[0], Some(&mut values), &mut buffers, None)?;
        Ok(start.elapsed())
    })?;
    let pushed = push_over(client, &none, layout, passes)?;
    drop(pair);
    let mut bare = Bare::new(&model, layout, &[Vec::new()]);
    let copied = best(passes, |_| {
        let start = Instant::now();
        let mut left = values.as_mut_slice();
        for partition in &bare.partitions {
            let (here, rest) = left.split_at_mut(partition.dense().len());
            here.copy_from_slice(partition.dense());
            left = rest;
        }
        std::hint::black_box(left);
        Ok(start.elapsed())
    })?;
    let updated = push_bare(&mut bare, layout, passes)?;
    let rate = |seconds: f64| n as f64 * 4.0 / seconds / 1e9;
    writeln!(
        out,
        "dense {} MB by {by:?}: pull {:.2} GB/s, bare {:.2}, ratio {:.2}; push {:.2} GB/s, bare {:.2}, ratio {:.2}",
        n * 4 / 1_000_000,
        rate(pulled),
        rate(copied),
        copied / pulled,
        rate(pushed),
        rate(updated),
        updated / pushed,
    )?;
    Ok(())
}
