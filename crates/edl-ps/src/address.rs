// SPDX-License-Identifier: Apache-2.0
//! Where a parameter server listens, and how other processes reach it.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use edl_core::job_dir::JobDir;
use edl_net::socket::{UnixSocket, address_towards};
use tempfile::TempDir;
use tokio::net::{TcpListener, UnixListener};

use crate::{Config, Error};

/// Both listeners of a server and how to reach them.
pub(crate) struct Listeners {
    pub(crate) tcp: TcpListener,
    pub(crate) unix: UnixListener,
    /// `host:port` as others reach it.
    pub(crate) address: String,
    pub(crate) unix_path: PathBuf,
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
        let name = format!("ps-{}.sock", config.ps);
        let bind = || -> std::io::Result<_> {
            let UnixSocket { listener, path, folder } = UnixSocket::bind(&folder, &name)?;
            listener.set_nonblocking(true)?;
            Ok((UnixListener::from_std(listener)?, path, folder))
        };
        let (unix, unix_path, folder) =
            bind().map_err(|source| Error::Listen { address: name.clone(), source })?;
        Ok(Self { tcp, unix, address: address.to_string(), unix_path, _folder: folder })
    }
}

/// The address to announce. A server that listens everywhere uses the one that leads to the master.
fn reachable(ip: IpAddr, master: &str) -> IpAddr {
    if ip.is_unspecified() { address_towards(master) } else { ip }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_listens_everywhere_announces_an_address_that_can_be_reached() {
        let everywhere = IpAddr::from([0, 0, 0, 0]);
        assert_eq!(reachable(everywhere, "127.0.0.1:9"), IpAddr::from([127, 0, 0, 1]));
        let one = IpAddr::from([10, 1, 2, 3]);
        assert_eq!(reachable(one, "127.0.0.1:9"), one);
    }
}
