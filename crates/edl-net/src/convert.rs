// SPDX-License-Identifier: Apache-2.0
//! Between the events and effects of the machines and the messages of the control plane.
//!
//! Pure: production and simulation use the same conversions.

pub mod master;
pub mod member;
pub mod server;
pub mod worker;

use edl_core::id::{CheckpointId, Generation, PsId};
use edl_core::job::{CheckpointFile, LoadFrom};
use edl_core::route::{Route, ServerRoute};
use serde::Serialize;

use crate::proto;

fn json(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("our own types have a JSON form")
}

impl From<CheckpointFile> for proto::CheckpointFile {
    fn from(file: CheckpointFile) -> Self {
        let CheckpointFile { partition, name, bytes, checksum, updates } = file;
        Self { partition, name, bytes, checksum, updates }
    }
}

impl From<proto::CheckpointFile> for CheckpointFile {
    fn from(file: proto::CheckpointFile) -> Self {
        let proto::CheckpointFile { partition, name, bytes, checksum, updates } = file;
        Self { partition, name, bytes, checksum, updates }
    }
}

impl From<proto::LoadFrom> for LoadFrom {
    fn from(proto::LoadFrom { checkpoint, keep_applied }: proto::LoadFrom) -> Self {
        Self { checkpoint, keep_applied }
    }
}

impl From<proto::Route> for Route {
    fn from(route: proto::Route) -> Self {
        let server = |server: proto::Server| ServerRoute {
            ps: PsId(server.ps),
            address: server.address,
            unix_path: server.unix_path,
            partitions: server.first_partition..server.end_partition,
        };
        let servers = route.servers.into_iter().map(server).collect();
        Self { generation: Generation(route.generation), servers }
    }
}

fn checkpoint_done(
    CheckpointId(checkpoint): CheckpointId,
    Generation(generation): Generation,
    files: Vec<CheckpointFile>,
) -> proto::CheckpointDone {
    let files = files.into_iter().map(Into::into).collect();
    proto::CheckpointDone { checkpoint, generation, files }
}
