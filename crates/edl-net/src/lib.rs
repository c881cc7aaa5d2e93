// SPDX-License-Identifier: Apache-2.0
//! What crosses a wire: the gRPC control plane with TLS, and the framed data plane.
//!
//! The only decision made here is which master a process follows ([`control::Follow`]).

mod by_name;
pub mod cipher;
pub mod control;
pub mod convert;
pub mod data;
pub mod frame;
pub mod fuzz;
pub mod handshake;
mod instance;
pub mod isolation;
pub mod key;
pub mod mesh;
pub mod open_files;
pub mod otlp;
pub mod place;
pub mod seal;
pub mod socket;
mod spent;
pub mod strangers;
pub mod tls;
pub mod wire;

use self::by_name::ByName;

/// Version of the control plane: the `protocol` of every hello. Another one is refused by name.
pub const CONTROL_PROTOCOL: u32 = 7;

/// Longest message of the control plane. None grows with the data; the applied sets of thousands of
/// partitions, with thousands of workers in between, come in one.
pub const MAX_MESSAGE: usize = 1 << 26;

/// Messages and services of the control plane.
#[allow(
    clippy::all,
    clippy::allow_attributes_without_reason,
    clippy::too_many_lines,
    unreachable_pub,
    unused_qualifications,
    reason = "generated code"
)]
#[path = "generated/elasticdl.v1.rs"]
#[rustfmt::skip]
pub mod proto;
