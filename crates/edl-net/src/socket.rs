// SPDX-License-Identifier: Apache-2.0
//! Where a process listens for other processes of its job.

use std::io;
use std::net::{IpAddr, Ipv4Addr, UdpSocket};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

/// The kernel allows 108 bytes for the path of a Unix socket, its end included.
const MAX_PATH: usize = 100;

/// A Unix socket that is bound.
#[derive(Debug)]
pub struct UnixSocket {
    pub listener: UnixListener,
    pub path: PathBuf,
    /// Removes the folder at the end, if it is a temporary one.
    pub folder: Option<TempDir>,
}

impl UnixSocket {
    /// Binds a socket in `folder`. Uses a private temporary folder if the path is too long, or if
    /// the file system does not support sockets.
    pub fn bind(folder: &Path, name: &str) -> io::Result<Self> {
        let folder = std::path::absolute(folder)?;
        let path = folder.join(name);
        if path.as_os_str().len() <= MAX_PATH {
            match bind_in(&folder, &path) {
                Ok(listener) => return Ok(Self { listener, path, folder: None }),
                Err(error) => tracing::warn!(%error, "cannot create a socket in its folder"),
            }
        }
        let private = std::fs::Permissions::from_mode(0o700);
        let folder = tempfile::Builder::new().prefix("edl-").permissions(private).tempdir()?;
        let path = folder.path().join(name);
        Ok(Self { listener: UnixListener::bind(&path)?, path, folder: Some(folder) })
    }
}

fn bind_in(folder: &Path, path: &Path) -> io::Result<UnixListener> {
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    match std::fs::remove_file(path) {
        // Left behind by a process that died.
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    UnixListener::bind(path)
}

/// The address of this host that leads to `master`: other processes can reach it there.
#[must_use]
pub fn address_towards(master: &str) -> IpAddr {
    // Connecting a datagram socket sends nothing; it only asks the routing table.
    let ask = || {
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).ok()?;
        socket.connect(master).ok()?;
        Some(socket.local_addr().ok()?.ip())
    };
    ask().unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deep_folder_gets_its_socket_in_a_private_temporary_one() {
        let root = tempfile::tempdir().unwrap();
        for _ in 0..2 {
            // The second time over the file that the first one left.
            let socket = UnixSocket::bind(&root.path().join("run"), "ps-3.sock").unwrap();
            assert_eq!(socket.path, root.path().join("run/ps-3.sock"));
            assert!(socket.folder.is_none());
        }
        let deep = root.path().join("d".repeat(90));
        let socket = UnixSocket::bind(&deep, "ps-3.sock").unwrap();
        assert!(socket.path.as_os_str().len() <= MAX_PATH, "{:?}", socket.path);
        let folder = socket.folder.unwrap();
        let mode = std::fs::metadata(folder.path()).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
    }

    #[test]
    fn a_process_is_reached_at_the_address_that_leads_to_its_master() {
        assert_eq!(address_towards("127.0.0.1:9"), IpAddr::V4(Ipv4Addr::LOCALHOST));
        assert_eq!(address_towards("nonsense"), IpAddr::V4(Ipv4Addr::LOCALHOST));
    }
}
