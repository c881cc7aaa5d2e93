// SPDX-License-Identifier: Apache-2.0
//! What the unit tests of several modules share.

pub(crate) mod fake_api;
pub(crate) mod fake_cluster;
mod hostile;
