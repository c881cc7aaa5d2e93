// SPDX-License-Identifier: Apache-2.0
//! How many files and connections this process can have open.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// The limit is not raised further: programs that model code starts may iterate over every
/// possible descriptor.
const MOST: u64 = 65_536;

/// Raises the limit as far as this process is allowed to. The usual 1,024 is for programs that use
/// `select`; a master of many workers needs more.
pub fn raise_limit() {
    let limit = getrlimit(Resource::Nofile);
    let most = limit.maximum.map_or(MOST, |most| most.min(MOST));
    if limit.current.is_some_and(|current| current < most) {
        // If it fails, the process has what it had.
        let _ = setrlimit(Resource::Nofile, Rlimit { current: Some(most), ..limit });
    }
}

/// The limit. None: there is no limit.
pub(crate) fn limit() -> Option<u64> {
    getrlimit(Resource::Nofile).current
}
