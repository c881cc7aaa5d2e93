// SPDX-License-Identifier: Apache-2.0
//! What processes send to each other, and what they wait for.

use edl_core::id::CheckpointId;
use edl_core::job;
use edl_core::platform::{InstanceId, Order};

use crate::disk::WriteId;
use crate::kernel::Pid;
use crate::mesh;
use crate::network::ConnId;

#[derive(Clone, Debug)]
pub(crate) enum Message {
    /// A message of the control plane, encoded by prost.
    Control(Vec<u8>),
    /// The master closes a control stream, with a gRPC status.
    Close(tonic::Status),
    /// A frame of the data plane.
    Frame(Vec<u8>),
    /// Between members of a world.
    Mesh(mesh::MeshMessage),
}

impl Message {
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Control(bytes) | Self::Frame(bytes) => bytes.len(),
            Self::Close(_) => 1,
            Self::Mesh(_) => 2,
        }
    }
}

/// What a process, or the site, has planned for later.
#[derive(Clone, Debug)]
pub(crate) enum Timer {
    /// A machine's next deadline.
    Wake,
    /// SIGTERM.
    Terminate,
    // The control session of a worker or server.
    Connect,
    /// The welcome is overdue.
    Unanswered(ConnId),
    Heartbeat(ConnId),
    Master(Box<MasterTimer>),
    /// Work of a server, worker or member that is done now.
    Done(Box<crate::process::Done>),
    Site(SiteTimer),
}

#[derive(Clone, Debug)]
pub(crate) enum MasterTimer {
    /// The answer to an effect, or a report of the platform.
    Event(job::Event),
    /// A state that could not be saved is tried again.
    Save,
    Commit {
        checkpoint: CheckpointId,
        folder: String,
        version: u64,
        write: Result<WriteId, String>,
    },
    Export {
        folder: String,
    },
}

#[derive(Clone, Debug)]
pub(crate) enum SiteTimer {
    StartMaster,
    Obey { master: Pid, order: Order },
    Launched { instance: InstanceId, pid: Pid },
    Kill { pid: Pid },
    Thaw { pid: Pid },
    DiskFree,
    Fault,
    Freeze,
    Resume,
}
