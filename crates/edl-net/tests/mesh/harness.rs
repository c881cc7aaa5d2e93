// SPDX-License-Identifier: Apache-2.0
//! Worlds whose members are threads, and their expected sums.

use std::sync::mpsc;
use std::time::Duration;

use edl_core::id::{Incarnation, RunId, WorkerId, WorldId};
use edl_core::lanes::{Span, fold, nodes_within};
use edl_net::handshake::Encryption;
use edl_net::key::JobKey;
use edl_net::mesh::{Dtype, Error, Mesh, MeshConfig, Peer, PhaseHook, Transport, round_to_bf16};
use tempfile::TempDir;

pub(crate) const KEY: [u8; 32] = [7; 32];
pub(crate) const RUN: RunId = RunId([3; 16]);
/// How members reach each other, and whether they encrypt.
pub(crate) type Over = (Transport, Encryption);
pub(crate) const TRANSPORTS: [Over; 4] = [
    (Transport::SharedMemory, Encryption::BetweenHosts),
    (Transport::Unix, Encryption::Always),
    (Transport::Tcp, Encryption::BetweenHosts),
    (Transport::Tcp, Encryption::Always),
];
/// The time limit of a test; only a test that hangs takes this long.
pub(crate) const DEADLINE: Duration = Duration::from_secs(60);

pub(crate) fn config(folder: &TempDir, worker: u32, over: Option<Over>) -> MeshConfig {
    MeshConfig {
        key: JobKey::from_bytes(KEY),
        run: RUN,
        worker: WorkerId(worker),
        incarnation: Incarnation(100 + u64::from(worker)),
        folder: folder.path().into(),
        listen: "127.0.0.1:0".into(),
        transport: over.map(|(transport, _)| transport),
        encryption: over.map_or(Encryption::default(), |(_, encryption)| encryption),
        silence: DEADLINE,
        on_phase: None,
    }
}

pub(crate) fn peer(mesh: &Mesh, worker: u32, span: Span) -> Peer {
    Peer {
        worker: WorkerId(worker),
        incarnation: Incarnation(100 + u64::from(worker)),
        address: mesh.address().into(),
        unix_path: mesh.unix_path().to_str().unwrap().into(),
        span,
        is_busy: false,
    }
}

/// Meshes of workers `0..spans.len()`, and their peers.
pub(crate) fn open(
    folder: &TempDir,
    over: Over,
    spans: &[Span],
    hook: &mut dyn FnMut(usize) -> Option<PhaseHook>,
) -> (Vec<Mesh>, Vec<Peer>) {
    let mut meshes = Vec::new();
    let mut peers = Vec::new();
    for (member, span) in spans.iter().enumerate() {
        let worker = u32::try_from(member).unwrap();
        let mut config = config(folder, worker, Some(over));
        config.on_phase = hook(member);
        let mesh = Mesh::open(config).unwrap();
        peers.push(peer(&mesh, worker, span.clone()));
        meshes.push(mesh);
    }
    (meshes, peers)
}

/// Runs every member in a separate thread, with a time limit.
pub(crate) fn run<T: Send + 'static>(
    meshes: Vec<Mesh>,
    member: impl Fn(usize, &mut Mesh) -> T + Clone + Send + 'static,
) -> (Vec<Mesh>, Vec<T>) {
    let n_members = meshes.len();
    let (sender, results) = mpsc::channel();
    for (place, mut mesh) in meshes.into_iter().enumerate() {
        let (sender, member) = (sender.clone(), member.clone());
        std::thread::spawn(move || {
            let result = member(place, &mut mesh);
            sender.send((place, mesh, result)).unwrap();
        });
    }
    drop(sender);
    let mut ended = Vec::new();
    for _ in 0..n_members {
        ended.push(results.recv_timeout(DEADLINE).expect("no member hangs or panics"));
    }
    ended.sort_by_key(|(place, ..)| *place);
    ended.into_iter().map(|(_, mesh, result)| (mesh, result)).unzip()
}

/// The numbers of a lane. Their magnitudes differ, so a different order of addition changes the
/// sum.
pub(crate) fn lane(step: u64, lane: u32, len: usize) -> Vec<f32> {
    let mut state = step.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (u64::from(lane) << 32);
    let mut next = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        u32::try_from(state >> 32).unwrap()
    };
    (0..len)
        .map(|_| {
            let sign_and_mantissa = next() & 0x807f_ffff;
            f32::from_bits(sign_and_mantissa | (117 + next() % 20) << 23)
        })
        .collect()
}

/// The numbers of a lane with numbers of 64 bits in the first places: of different magnitudes, and
/// with bits that 32 cannot hold.
fn lane_of(step: u64, number: u32, len: usize, dtype: Dtype) -> Vec<f32> {
    let mut places = lane(step, number, len);
    let (pairs, _) = places[..n_double(dtype)].as_chunks_mut::<2>();
    for (fine, coarse) in pairs.iter_mut().map(|[fine, coarse]| (fine, coarse)) {
        let number = f64::from(*coarse) + f64::from(*fine) / 1e9;
        [*fine, *coarse] = places_of(number);
    }
    places
}

fn n_double(dtype: Dtype) -> usize {
    if let Dtype::F64First(n_places) = dtype { n_places } else { 0 }
}

fn places_of(number: f64) -> [f32; 2] {
    let bytes = number.to_ne_bytes();
    let half = |at: usize| f32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap());
    [half(0), half(4)]
}

fn number_of(places: &[f32]) -> f64 {
    let bytes = [places[0].to_ne_bytes(), places[1].to_ne_bytes()].concat();
    f64::from_ne_bytes(bytes.try_into().unwrap())
}

/// A vector, number by number: those of 64 bits, then those of 32.
type Numbers = (Vec<f64>, Vec<f32>);

fn add(left: Numbers, right: Numbers) -> Numbers {
    let doubles = left.0.iter().zip(right.0).map(|(left, right)| left + right).collect();
    (doubles, left.1.iter().zip(right.1).map(|(left, right)| left + right).collect())
}

/// Adds up a node in the tree's order, on one thread.
fn sum_of(step: u64, span: &Span, len: usize, dtype: Dtype) -> Numbers {
    let mut known = |node: &Span| {
        (node.len() == 1).then(|| {
            let values = lane_of(step, node.start, len, dtype);
            let (doubles, singles) = values.split_at(n_double(dtype));
            let mut singles = singles.to_vec();
            if dtype == Dtype::Bf16 {
                round_to_bf16(&mut singles);
            }
            (doubles.chunks(2).map(number_of).collect(), singles)
        })
    };
    fold(span, &mut known, &mut add).unwrap()
}

fn node(step: u64, span: &Span, len: usize, dtype: Dtype) -> Vec<f32> {
    let (doubles, singles) = sum_of(step, span, len, dtype);
    doubles.into_iter().flat_map(places_of).chain(singles).collect()
}

/// The sum that every member must get.
pub(crate) fn expected(step: u64, n_active: u32, len: usize, dtype: Dtype) -> Vec<u32> {
    let (doubles, mut singles) = sum_of(step, &(0..n_active), len, dtype);
    let divide = |sum: f64| places_of(sum / f64::from(divisor(n_active)));
    let doubles = doubles.into_iter().flat_map(divide);
    singles.iter_mut().for_each(|sum| *sum /= divisor(n_active));
    if dtype == Dtype::Bf16 {
        round_to_bf16(&mut singles);
    }
    doubles.chain(singles).map(f32::to_bits).collect()
}

pub(crate) fn divisor(n_active: u32) -> f32 {
    3.0 * f32::from(u16::try_from(n_active).unwrap())
}

/// Runs one step of a member with lanes `span`; returns the bits of the sum.
pub(crate) fn step(
    mesh: &mut Mesh,
    step: u64,
    span: &Span,
    n_active: u32,
    len: usize,
    dtype: Dtype,
) -> Result<Vec<u32>, Error> {
    let nodes = nodes_within(n_active, span);
    let buffers = mesh.buffers(n_active, len);
    assert_eq!(buffers.len(), nodes.len());
    for (buffer, span) in buffers.into_iter().zip(&nodes) {
        if span.len() == 1 {
            // Not rounded: the mesh handles a lane that is alone.
            buffer.copy_from_slice(&lane_of(step, span.start, len, dtype));
        } else {
            buffer.copy_from_slice(&node(step, span, len, dtype));
        }
    }
    let mut out = vec![f32::NAN; len];
    mesh.all_reduce(step, n_active, divisor(n_active), dtype, &mut out)?;
    Ok(out.into_iter().map(f32::to_bits).collect())
}

/// Enters `world` with all peers and checks one sum.
pub(crate) fn enter_and_check(mesh: &mut Mesh, world: u64, me: usize, peers: &[Peer], len: usize) {
    mesh.enter(WorldId(world), me, peers.to_vec()).unwrap();
    let n_lanes = peers.iter().map(|peer| peer.span.end).max().unwrap();
    let sum = step(mesh, world, &peers[me].span, n_lanes, len, Dtype::F32).unwrap();
    assert!(sum == expected(world, n_lanes, len, Dtype::F32), "wrong sum in world {world}");
}
