// SPDX-License-Identifier: Apache-2.0
//! A route on the wire.

use edl_core::id::{Generation, PsId};
use edl_core::route::{Route, ServerRoute};

use crate::proto;

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
