// SPDX-License-Identifier: Apache-2.0
//! Converts between the events and effects of the machines and the messages of the control plane.
//!
//! Pure: production and simulation use the same conversions.

pub mod master;
pub mod member;
pub mod server;
pub mod worker;
pub mod worlds;

use std::ops::Range;

use edl_core::id::{CheckpointId, EvalId, Generation, PsId};
use edl_core::job::{CheckpointFile, LoadFrom};
use edl_core::route::{Route, ServerRoute};
use edl_core::worker::{Pass, Shard, Task};
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

impl From<Route> for proto::Route {
    fn from(Route { generation, servers }: Route) -> Self {
        let server = |server: ServerRoute| proto::Server {
            ps: server.ps.0,
            address: server.address,
            unix_path: server.unix_path,
            first_partition: server.partitions.start,
            end_partition: server.partitions.end,
        };
        Self { generation: generation.0, servers: servers.into_iter().map(server).collect() }
    }
}

impl From<proto::lease::Work> for Task {
    fn from(work: proto::lease::Work) -> Self {
        use proto::lease::Work;
        let (number, records, pass) = match work {
            Work::Train(proto::TrainWork { epoch, first, count, skipped }) => {
                return Self::Train { epoch, indices: first..first.saturating_add(count), skipped };
            }
            Work::Eval(proto::EvalWork { eval, version, shard, first_record, end_record }) => {
                let pass = Pass::Evaluate { eval: EvalId(eval), version };
                (shard, first_record..end_record, pass)
            }
            Work::Predict(proto::PredictWork { shard, first_record, end_record, folder }) => {
                (shard, first_record..end_record, Pass::Predict { folder })
            }
        };
        Self::Shard(Shard { number, records, pass })
    }
}

impl From<Task> for proto::lease::Work {
    fn from(task: Task) -> Self {
        let Shard { number: shard, records, pass } = match task {
            Task::Shard(shard) => shard,
            Task::Train { epoch, indices: Range { start: first, end }, skipped } => {
                let count = end - first;
                return Self::Train(proto::TrainWork { epoch, first, count, skipped });
            }
        };
        let Range { start: first_record, end: end_record } = records;
        match pass {
            Pass::Evaluate { eval: EvalId(eval), version } => {
                Self::Eval(proto::EvalWork { eval, version, shard, first_record, end_record })
            }
            Pass::Predict { folder } => {
                Self::Predict(proto::PredictWork { shard, first_record, end_record, folder })
            }
        }
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
