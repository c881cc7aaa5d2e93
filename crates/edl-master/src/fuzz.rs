// SPDX-License-Identifier: Apache-2.0
//! Entry points for fuzzers.

use crate::http;

/// Reads bytes as the body of each request of the page.
pub fn page_request(bytes: &[u8]) {
    http::parse_bodies(bytes);
}
