// SPDX-License-Identifier: Apache-2.0
//! Orders, requests and checkpoints of one server, event by event.
