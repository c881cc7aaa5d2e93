// SPDX-License-Identifier: Apache-2.0
//! Where the partitions are.

use std::ops::Range;

use edl_core::id::{Generation, PsId};

use crate::proto;

/// All servers of one generation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Route {
    pub generation: Generation,
    pub servers: Vec<ServerRoute>,
}

/// One server and what it holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerRoute {
    pub ps: PsId,
    /// `host:port`.
    pub address: String,
    /// Empty, or a socket that is preferred where it exists.
    pub unix_path: String,
    pub partitions: Range<u32>,
}

impl From<proto::Route> for Route {
    fn from(route: proto::Route) -> Self {
        let server = |server: proto::Server| ServerRoute {
            ps: PsId(server.ps),
            address: server.address,
            unix_path: server.unix_path,
            partitions: server.first_partition..server.end_partition,
        };
        Self {
            generation: Generation(route.generation),
            servers: route.servers.into_iter().map(server).collect(),
        }
    }
}

impl From<Route> for proto::Route {
    fn from(route: Route) -> Self {
        let server = |server: ServerRoute| proto::Server {
            ps: server.ps.0,
            address: server.address,
            unix_path: server.unix_path,
            first_partition: server.partitions.start,
            end_partition: server.partitions.end,
        };
        Self {
            generation: route.generation.0,
            servers: route.servers.into_iter().map(server).collect(),
        }
    }
}
