//! Where a parameter server listens, and what it tells others about it.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};

use edl_core::id::PsId;
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
        let address = SocketAddr::new(reachable(local.ip(), &config.master_addr), local.port());
        let (unix_path, folder) = socket_path(&config.job_dir, config.ps)?;
        let socket = |source| Error::Listen { address: unix_path.display().to_string(), source };
        match std::fs::remove_file(&unix_path) {
            // A server of this number that died left it behind.
            Ok(()) => {}
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => return Err(socket(error)),
        }
        let unix = UnixListener::bind(&unix_path).map_err(socket)?;
        Ok(Self { tcp, unix, address: address.to_string(), unix_path, _folder: folder })
    }
}

/// The server's socket in the job's folder; in a private temporary folder if that is too deep.
fn socket_path(job_dir: &Path, ps: PsId) -> Result<(PathBuf, Option<TempDir>), Error> {
    let name = format!("ps-{ps}.sock");
    let failed = |folder: &Path, source| Error::Listen {
        address: folder.join(&name).display().to_string(),
        source,
    };
    let folder = std::path::absolute(job_dir.join("run")).map_err(|e| failed(job_dir, e))?;
    if folder.join(&name).as_os_str().len() <= MAX_SOCKET_PATH {
        let mut builder = std::fs::DirBuilder::new();
        builder.recursive(true).mode(0o700);
        builder.create(&folder).map_err(|error| failed(&folder, error))?;
        return Ok((folder.join(&name), None));
    }
    let private = std::fs::Permissions::from_mode(0o700);
    let made = tempfile::Builder::new().prefix("edl-").permissions(private).tempdir();
    let folder = made.map_err(|error| failed(&std::env::temp_dir(), error))?;
    Ok((folder.path().join(&name), Some(folder)))
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

    #[test]
    fn a_deep_job_folder_gets_its_socket_in_a_private_temporary_one() {
        let root = tempfile::tempdir().unwrap();
        let (path, folder) = socket_path(root.path(), PsId(3)).unwrap();
        assert_eq!(path, root.path().join("run/ps-3.sock"));
        assert!(folder.is_none());
        let deep = root.path().join("d".repeat(90));
        let (path, folder) = socket_path(&deep, PsId(3)).unwrap();
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
