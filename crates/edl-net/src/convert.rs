// SPDX-License-Identifier: Apache-2.0
//! Between the events and effects of the machines and the messages of the control plane.
//!
//! Pure: production and simulation use the same conversions.

pub mod master;
pub mod member;
pub mod server;
pub mod worker;
