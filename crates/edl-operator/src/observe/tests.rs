// SPDX-License-Identifier: Apache-2.0
//! Whole clusters, looked at.
