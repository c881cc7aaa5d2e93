// SPDX-License-Identifier: Apache-2.0
//! What crosses a wire: the gRPC control plane with TLS, and the framed data plane.
//!
//! The only decision made here is which master a process follows ([`control::Follow`]).

pub mod control;
pub mod convert;
pub mod cut;
pub mod data;
pub mod frame;
pub mod fuzz;
pub mod handshake;
mod instance;
pub mod key;
pub mod mesh;
pub mod otlp;
pub mod place;
pub mod seal;
mod spent;
pub mod tls;
pub mod wire;

/// Version of the control plane: the `protocol` of every hello. Another one is refused by name.
pub const CONTROL_PROTOCOL: u32 = 2;

/// Longest message of the control plane. The applied sets of thousands of partitions over millions
/// of batches come in one, which is far more than gRPC's usual 4 MiB.
pub const MAX_MESSAGE: usize = 1 << 30;

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
