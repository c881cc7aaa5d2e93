// SPDX-License-Identifier: Apache-2.0
//! What the unit tests of several modules share.

pub(crate) mod fixture;
