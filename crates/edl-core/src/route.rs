// SPDX-License-Identifier: Apache-2.0
//! Where the partitions are.

use std::ops::Range;

use crate::id::{Generation, PsId};

/// All servers of one generation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Route {
    pub generation: Generation,
    pub servers: Vec<ServerRoute>,
}

/// One server and what it holds.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ServerRoute {
    pub ps: PsId,
    /// `host:port`.
    pub address: String,
    /// Empty, or a socket that is preferred where it exists.
    pub unix_path: String,
    pub partitions: Range<u32>,
}
