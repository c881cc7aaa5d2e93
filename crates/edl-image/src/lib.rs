// SPDX-License-Identifier: Apache-2.0
//! Container images without a daemon: builds them from a Dockerfile, keeps them, and moves them to
//! and from registries and archives.
//!
//! The same input gives the same bytes: entries are sorted, times are zero, owners are root.
//! No command is ever run: a Dockerfile with a `RUN` line is rejected (see [`dockerfile`]) or passed
//! to a tool that can run it (see [`tool`]).

pub mod archive;
pub mod base;
pub mod build;
pub mod context;
pub mod digest;
pub mod dockerfile;
pub mod elf;
pub mod image;
mod inside;
pub mod layer;
pub mod program;
pub mod recipe;
pub mod reference;
pub mod registry;
pub mod skeleton;
pub mod store;
pub mod tool;
