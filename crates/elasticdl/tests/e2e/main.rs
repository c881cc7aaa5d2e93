// SPDX-License-Identifier: Apache-2.0
//! The whole product, from outside: the real command, real processes, real signals.

mod chaos;
mod harness;
mod resume;
