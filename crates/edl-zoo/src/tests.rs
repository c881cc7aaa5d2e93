// SPDX-License-Identifier: Apache-2.0
//! What the unit tests of several models share.

pub(crate) mod check;
