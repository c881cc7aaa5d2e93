// SPDX-License-Identifier: Apache-2.0
//! The mesh of `edl-net` behind the loop's words.

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};

use edl_core::id::{WorkerId, WorldId};
use edl_core::job_dir::JobDir;
use edl_core::member::{Failure, Move};
use edl_core::spec::{AllreduceDtype, JobSpec};
use edl_net::mesh::{self, Dtype, MeshConfig, Peer, Phase, PhaseHook, Transport};
use tempfile::TempDir;

use super::{Abort, Identity, Mesh, OpenMesh, Opened};
use crate::Config;
use crate::allreduce::fault::Fault;
use crate::chain;

/// The kernel allows 108 bytes for the path of a Unix socket; this is left for the folder.
const MAX_SOCKET_FOLDER: usize = 80;

/// Opens the mesh of a worker, with what its environment forces.
pub(crate) fn open_mesh(config: &Config) -> OpenMesh {
    let config = config.clone();
    Box::new(move |identity, spec| {
        let transport = Transport::from_env()?;
        let fault = Fault::from_env(identity.worker)?.map(hook);
        open(config, identity, spec, transport, fault)
    })
}

pub(crate) fn open(
    config: Config,
    identity: Identity,
    spec: &JobSpec,
    transport: Option<Transport>,
    on_phase: Option<PhaseHook>,
) -> Result<Opened, String> {
    let folder = config.place.sockets.unwrap_or_else(|| JobDir::new(config.job_dir).sockets());
    let (folder, temporary) = socket_folder(&folder)
        .map_err(|error| format!("cannot create a folder for the socket: {error}"))?;
    let ip = config.place.ip.unwrap_or_else(|| towards(&config.master_addr));
    let opened = mesh::Mesh::open(MeshConfig {
        key: config.key,
        run: identity.run,
        worker: identity.worker,
        incarnation: identity.incarnation,
        folder,
        listen: SocketAddr::new(ip, 0).to_string(),
        transport,
        // Who computes for long is silent, too; whether a process hangs is for the master to
        // say, who hears its heartbeats.
        silence: spec.task_timeout(),
        on_phase,
    });
    let mesh = opened.map_err(|error| chain(&error))?;
    let waiting = mesh.waiting_for();
    Ok(Opened {
        address: mesh.address().into(),
        unix_path: mesh.unix_path().into(),
        abort: Box::new(mesh.abort()),
        waiting_for: Box::new(move || names(&waiting.peers())),
        mesh: Box::new(Real { mesh, dtype: dtype(spec), _folder: temporary }),
    })
}

struct Real {
    mesh: mesh::Mesh,
    /// How nodes travel.
    dtype: Dtype,
    /// Removes the socket's folder at the end, if it is a temporary one.
    _folder: Option<TempDir>,
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

impl Abort for mesh::Abort {
    fn abort(&self, world: WorldId) {
        self.abort(world);
    }

    fn close(&self) {
        self.close();
    }
}

fn failure(error: mesh::Error) -> Failure {
    match error {
        mesh::Error::Aborted => Failure::Cancelled,
        mesh::Error::Lost { peer, error } => Failure::Lost { peer, error },
        error @ (mesh::Error::Item { .. } | mesh::Error::Io { .. } | mesh::Error::Path { .. }) => {
            Failure::Failed(chain(&error))
        }
    }
}

fn dtype(spec: &JobSpec) -> Dtype {
    match spec.allreduce_dtype {
        AllreduceDtype::F32 => Dtype::F32,
        AllreduceDtype::Bf16 => Dtype::Bf16,
    }
}

fn names(workers: &[WorkerId]) -> String {
    let names: Vec<String> = workers.iter().map(|worker| format!("worker {worker}")).collect();
    names.join(", ")
}

/// Lets a fault happen at its place, once.
fn hook(fault: Fault) -> PhaseHook {
    let mut fault = Some(fault);
    Box::new(move |phase, step| {
        if let Some(fault) = fault.take_if(|fault| fault.is_at(name(phase), step)) {
            fault.happen();
        }
    })
}

fn name(phase: Phase) -> &'static str {
    match phase {
        Phase::BeforeSend => "before_send",
        Phase::HalfSent => "half_sent",
        Phase::Reducing => "reducing",
        Phase::BeforeGather => "before_gather",
        Phase::After => "after",
    }
}

/// Where the socket goes: into this folder, or into a private temporary one if that is too deep.
fn socket_folder(folder: &Path) -> io::Result<(PathBuf, Option<TempDir>)> {
    let folder = std::path::absolute(folder)?;
    if folder.as_os_str().len() <= MAX_SOCKET_FOLDER {
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&folder)?;
        return Ok((folder, None));
    }
    let private = std::fs::Permissions::from_mode(0o700);
    let folder = tempfile::Builder::new().prefix("edl-").permissions(private).tempdir()?;
    Ok((folder.path().to_owned(), Some(folder)))
}

/// The address of this host that leads to the master: other workers find it there.
fn towards(master: &str) -> IpAddr {
    // Connecting a datagram socket sends nothing; it only asks the routing table.
    let ask = || {
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).ok()?;
        socket.connect(master).ok()?;
        Some(socket.local_addr().ok()?.ip())
    };
    ask().unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_listens_where_its_master_is() {
        assert_eq!(towards("127.0.0.1:9"), IpAddr::V4(Ipv4Addr::LOCALHOST));
        assert_eq!(towards("nonsense"), IpAddr::V4(Ipv4Addr::LOCALHOST));
    }

    #[test]
    fn those_who_are_waited_for_are_named() {
        assert_eq!(names(&[]), "");
        assert_eq!(names(&[WorkerId(1), WorkerId(3)]), "worker 1, worker 3");
    }

    #[test]
    fn a_deep_job_folder_gets_its_socket_in_a_temporary_one() {
        let root = tempfile::tempdir().unwrap();
        let (folder, temporary) = socket_folder(&root.path().join("run")).unwrap();
        assert_eq!((folder, temporary.is_none()), (root.path().join("run"), true));
        let (folder, temporary) = socket_folder(&root.path().join("d".repeat(90))).unwrap();
        assert_eq!(temporary.unwrap().path(), folder);
    }
}
