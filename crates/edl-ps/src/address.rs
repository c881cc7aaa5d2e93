// SPDX-License-Identifier: Apache-2.0
//! Where a parameter server listens, and what it tells others about it.

use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};

use edl_core::id::PsId;
use edl_core::job_dir::JobDir;
use tempfile::TempDir;
use tokio::net::{TcpListener, UnixListener};

use crate::{Config, Error};

/// The kernel allows 108 bytes for the path of a Unix socket, its end included.
const MAX_SOCKET_PATH: usize = 100;

/// Both listeners of a server and how to reach them.
pub(crate) struct Listeners {
    pub(crate) tcp: TcpListener,
    pub(crate) unix: UnixListener,
    /// `host:port` as others reach it.
    pub(crate) address: String,
    pub(crate) unix_path: PathBuf,
    /// Removes the socket's folder at the end, if it is a temporary one.
    _folder: Option<TempDir>,
}

impl Listeners {
    pub(crate) async fn bind(config: &Config) -> Result<Self, Error> {
        let listen = |source| Error::Listen { address: config.listen.clone(), source };
        let tcp = TcpListener::bind(&config.listen).await.map_err(listen)?;
        let local = tcp.local_addr().map_err(listen)?;
        let ip = config.place.ip.unwrap_or_else(|| reachable(local.ip(), &config.master_addr));
        let address = SocketAddr::new(ip, local.port());
        let sockets = || JobDir::new(&config.job_dir).sockets();
        let folder = config.place.sockets.clone().unwrap_or_else(sockets);
        let (unix, unix_path, folder) = bind_unix(&folder, config.ps)?;
        Ok(Self { tcp, unix, address: address.to_string(), unix_path, _folder: folder })
    }
}

/// Binds the server's socket in this folder; in a private temporary one if that is too deep, or
/// on a file system without sockets.
fn bind_unix(folder: &Path, ps: PsId) -> Result<(UnixListener, PathBuf, Option<TempDir>), Error> {
    let name = format!("ps-{ps}.sock");
    let failed = |source| Error::Listen { address: name.clone(), source };
    let folder = std::path::absolute(folder).map_err(failed)?;
    let path = folder.join(&name);
    if path.as_os_str().len() <= MAX_SOCKET_PATH {
        match bind_in(&folder, &path) {
            Ok(listener) => return Ok((listener, path, None)),
            Err(error) => tracing::warn!(%error, "cannot create a socket in its folder"),
        }
    }
    let private = std::fs::Permissions::from_mode(0o700);
    let made = tempfile::Builder::new().prefix("edl-").permissions(private).tempdir();
    let folder = made.map_err(failed)?;
    let path = folder.path().join(&name);
    let listener = UnixListener::bind(&path).map_err(failed)?;
    Ok((listener, path, Some(folder)))
}

fn bind_in(folder: &Path, path: &Path) -> io::Result<UnixListener> {
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    match std::fs::remove_file(path) {
        // A server of this number that died left it behind.
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    UnixListener::bind(path)
}

/// The address to tell others. Who listens everywhere names the address that leads to the master.
fn reachable(ip: IpAddr, master: &str) -> IpAddr {
    if !ip.is_unspecified() {
        return ip;
    }
    // Connecting a datagram socket sends nothing; it only asks the routing table.
    let towards_master = || {
        let socket = UdpSocket::bind((ip, 0)).ok()?;
        socket.connect(master).ok()?;
        Some(socket.local_addr().ok()?.ip())
    };
    towards_master().unwrap_or(ip)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_deep_job_folder_gets_its_socket_in_a_private_temporary_one() {
        let root = tempfile::tempdir().unwrap();
        for _ in 0..2 {
            // The second time over the file that the first one left.
            let (_, path, folder) = bind_unix(&root.path().join("run"), PsId(3)).unwrap();
            assert_eq!(path, root.path().join("run/ps-3.sock"));
            assert!(folder.is_none());
        }
        let deep = root.path().join("d".repeat(90));
        let (_, path, folder) = bind_unix(&deep, PsId(3)).unwrap();
        assert!(path.as_os_str().len() <= MAX_SOCKET_PATH, "{path:?}");
        let folder = folder.unwrap();
        let mode = std::fs::metadata(folder.path()).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
    }

    #[test]
    fn who_listens_everywhere_names_an_address_that_can_be_reached() {
        let everywhere = IpAddr::from([0, 0, 0, 0]);
        assert_eq!(reachable(everywhere, "127.0.0.1:9"), IpAddr::from([127, 0, 0, 1]));
        let one = IpAddr::from([10, 1, 2, 3]);
        assert_eq!(reachable(one, "127.0.0.1:9"), one);
    }
}
