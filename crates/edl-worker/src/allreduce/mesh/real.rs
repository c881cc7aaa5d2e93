// SPDX-License-Identifier: Apache-2.0
//! The mesh of `edl-net`, as the training loop uses it.

use std::net::SocketAddr;

use edl_core::id::WorldId;
use edl_core::job_dir::JobDir;
use edl_core::member::{Failure, Move};
use edl_core::model::ModelSpec;
use edl_core::spec::{AllreduceDtype, JobSpec};
use edl_net::mesh::{self, Dtype, MeshConfig, Peer, PhaseHook, Transport};
use edl_net::socket::address_towards;

use super::{Identity, Mesh, OpenMesh, Opened};
use crate::Config;
use crate::allreduce::fault::Fault;
use crate::chain;

/// Opens the mesh of a worker, with what its environment forces.
pub(crate) fn open_mesh(config: &Config) -> OpenMesh {
    let config = config.clone();
    Box::new(move |identity, spec, model| {
        let transport = Transport::from_env()?;
        let fault = Fault::from_env(identity.worker)?.map(hook);
        open(config, identity, (spec, model), transport, fault)
    })
}

pub(crate) fn open(
    config: Config,
    identity: Identity,
    (spec, model): (&JobSpec, &ModelSpec),
    transport: Option<Transport>,
    on_phase: Option<PhaseHook>,
) -> Result<Opened, String> {
    let folder = config.place.sockets.unwrap_or_else(|| JobDir::new(config.job_dir).sockets());
    let ip = config.place.ip.unwrap_or_else(|| address_towards(&config.master_addr));
    let opened = mesh::Mesh::open(MeshConfig {
        key: config.key,
        run: identity.run,
        worker: identity.worker,
        incarnation: identity.incarnation,
        folder,
        listen: SocketAddr::new(ip, 0).to_string(),
        transport,
        encryption: spec.encrypt_data.into(),
        // A member that computes for long is silent, too. The master, which gets its heartbeats,
        // decides whether a process hangs.
        silence: spec.round_timeout(),
        on_phase,
    });
    let mesh = opened.map_err(|error| chain(&error))?;
    let (abort, blocked) = (mesh.abort(), mesh.blocked());
    Ok(Opened {
        address: mesh.address().into(),
        unix_path: mesh.unix_path().to_string_lossy().into_owned(),
        abort: Box::new(move |world| abort.abort(world)),
        is_blocked: Box::new(move || blocked.get()),
        mesh: Box::new(Real { mesh, dtype: dtype(spec, model) }),
    })
}

struct Real {
    mesh: mesh::Mesh,
    /// How nodes travel.
    dtype: Dtype,
}

impl Mesh for Real {
    fn prepare(&mut self, members: &[Peer]) {
        self.mesh.prepare(members);
    }

    fn enter(&mut self, world: WorldId, me: usize, members: &[Peer]) -> Result<(), Failure> {
        self.mesh.enter(world, me, members.to_vec()).map_err(failure)
    }

    fn transport(&self) -> String {
        self.mesh.transport()
    }

    fn exchange(&mut self, number: u64, mine: &[u8]) -> Result<Vec<Vec<u8>>, Failure> {
        self.mesh.exchange(number, mine).map_err(failure)
    }

    fn transfer(
        &mut self,
        moves: &[Move],
        encode: &mut dyn FnMut(u32) -> Vec<u8>,
        accept: &mut dyn FnMut(u32, Vec<u8>) -> Result<(), String>,
    ) -> Result<(), Failure> {
        self.mesh.transfer(moves, encode, accept).map(drop).map_err(failure)
    }

    fn buffers(&mut self, n_active: u32, len: usize) -> Vec<&mut [f32]> {
        self.mesh.buffers(n_active, len)
    }

    fn all_reduce(
        &mut self,
        step: u64,
        n_active: u32,
        divisor: f32,
        out: &mut [f32],
    ) -> Result<(), Failure> {
        self.mesh.all_reduce(step, n_active, divisor, self.dtype, out).map_err(failure)
    }
}

fn failure(error: mesh::Error) -> Failure {
    match error {
        mesh::Error::Aborted => Failure::Cancelled,
        mesh::Error::Lost { peer, error } => Failure::Lost { peer, error },
        error @ (mesh::Error::Item { .. } | mesh::Error::Io { .. }) => {
            Failure::Failed(chain(&error))
        }
    }
}

fn dtype(spec: &JobSpec, model: &ModelSpec) -> Dtype {
    match (model.n_double_places(), spec.allreduce_dtype) {
        (0, AllreduceDtype::F32) => Dtype::F32,
        (0, AllreduceDtype::Bf16) => Dtype::Bf16,
        // Such a model is rejected with 16 bits.
        (n_places, _) => Dtype::F64First(n_places),
    }
}

/// Lets a fault happen at its place, once.
fn hook(fault: Fault) -> PhaseHook {
    let mut fault = Some(fault);
    Box::new(move |phase, step| {
        if let Some(fault) = fault.take_if(|fault| fault.is_at(phase, step)) {
            fault.happen();
        }
    })
}
